"""A learned value beside the policy, and one that was stored before, through whole runs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from tiny_runs import (
    REWARDS,
    before_step,
    fill_store,
    log_alone,
    metrics,
    tiny,
    write_prompts,
)

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Refused
from agro.store import Store
from agro.train.collate import StoredValues, collate
from agro.train.monitors import Action, Monitor, View
from agro.types import Sample

STORED = {"name": "squared_consistency", "beta": 0.1, "baseline": "stored", "scale": "square"}


def valued(folder: Path, name: str = "dro", **changes) -> RunConfig:
    """One response a prompt, with a learned value."""
    given = {"sampler__n": 1, "train__steps": 8, "train__groups": 12}
    return tiny(folder, **{"objective": {"name": name, "beta": 0.1}, **given, **changes})


def value_of(run: Path) -> dict:
    return load_file(max((run / "checkpoints").iterdir()) / "value.safetensors")


def test_the_critic_explains_more_of_its_targets(tmp_path: Path) -> None:
    """From 0, since V = 0 at first. The prompt says what the reward is, and the targets are the rewards."""
    changes = {
        "objective": {"name": "ppo", "gae_lambda": [0.95, 1.0], "value_clip": None},
        "policy__new__initializer_range": 0.1,
        "sampler__max_new": 1,
        "reward__name": f"{REWARDS}:low_answer",
        "train": {"steps": 30, "groups": 32, "micro_batch": 64, "lr": 1e-4, "value_lr": 0.3},
    }
    run = Trainer(valued(tmp_path, **changes), tmp_path / "run").run()
    explained = [m["objective"]["explained_variance"] for m in metrics(run) if m["step"]]
    assert explained[0] == 0
    assert sum(explained[-10:]) / 10 > 0.3


def test_the_critic_s_advantages_are_those_of_when_the_batch_was_drawn(tmp_path: Path) -> None:
    """Also at the second update, when the value has moved."""
    batches = []

    def look(feed, valid) -> None:
        if len(batches) < 2:
            batches.append(feed.batch(valid, 1, feed.phase.entry.defaults()).batch)
            assert (batches[-1].old_value == feed.learner.values(batches[-1])).all()

    changes = {"objective": {"name": "ppo"}, "train__updates": 2, "train__steps": 2}
    with before_step(look):
        Trainer(valued(tmp_path, **changes), tmp_path / "run").run()
    assert [bool(batch.old_value.any()) for batch in batches] == [False, True]  # V is 0 everywhere at first


@pytest.mark.parametrize("name", ["dro", "prefix_consistency"])
def test_the_value_learns_at_a_rate_of_its_own(name: str, tmp_path: Path) -> None:
    """It changes what depends on rewards. With one that stands still the first step alone is the same."""
    changes = {"fast": {"train__steps": 30}, "slow": {"train__steps": 3, "train__value_lr": 1e-9}}
    runs = [Trainer(valued(tmp_path, name, **changes[key]), tmp_path / key).run() for key in changes]
    fast, slow = map(metrics, runs)
    moved = [m["objective"]["value_mean"] for m in fast]
    assert moved[0] == 0  # it begins at 0 everywhere
    reward = sum(m["reward_mean"] for m in fast[10:]) / 20
    assert reward > 0.02
    assert abs(sum(moved[10:]) / 20 - reward) < reward / 2
    assert all(abs(m["objective"]["value_mean"]) < 1e-6 for m in slow)
    assert [m["lr"] for m in fast[:3]] == [m["lr"] for m in slow]
    assert fast[0]["loss"] == slow[0]["loss"]
    assert fast[2]["loss"] != slow[2]["loss"]


def test_phases_share_the_value_and_one_without_it_leaves_it(tmp_path: Path) -> None:
    phases = [
        {"name": "one", "objective": {"name": "dro", "beta": 0.1}, "train": {"steps": 4}},
        {"name": "other", "train": {"steps": 2}},
    ]
    config = tiny(tmp_path, phases=phases, objective={"name": "reinforce"}, train__checkpoint_every=4)
    run = Trainer(config, tmp_path / "run").run()
    first = load_file(run / "checkpoints" / "step-00000004" / "value.safetensors")
    assert all((first[k] == v).all() for k, v in value_of(run).items())


def test_a_value_that_is_not_finite_skips_the_update(tmp_path: Path) -> None:
    def spoil(feed, valid) -> None:
        feed.learner.policy.value.linear.bias.data.fill_(math.inf)

    with before_step(spoil), pytest.raises(Refused, match="5 updates in a row were skipped"):
        Trainer(valued(tmp_path), tmp_path / "run").run()


# The soft maximum of r = (0, 1) at β = 0.5: ½ log ½(1 + e²) = 0.7169.
def test_the_stored_value_is_the_soft_maximum(tmp_path: Path) -> None:
    of_tokens = {"tokens": [1, 2], "action": [False, True], "token_reward": [math.nan, 0.5]}
    with Store.open(tmp_path / "s.db") as store:
        store.append([Sample("a", "x", 0.0), Sample("a", "y", 1.0), Sample("b", "x", 3.0), Sample("b", "y")])
        store.append([Sample("c", text, 1.0, episode="e") for text in "xy"] + [Sample("c", "z", 0.0)])
        store.append([Sample("d", "x", 1.0, **of_tokens)])
    ids = {p: Sample(p, "").prompt_id for p in "abcd"}
    values = StoredValues.load(tmp_path / "s.db", {i: p for p, i in ids.items()})
    expected = 0.5 * math.log(0.5 * (1 + math.e**2))
    assert values.value(ids["a"], 0.5) == pytest.approx(expected, rel=1e-12)
    assert values.value(ids["b"], 0.5) == 3.0
    assert values.value(ids["c"], 0.5) == pytest.approx(expected, rel=1e-12)  # an episode is one response
    assert values.value(ids["d"], 0.5) == 1.5  # rewards of tokens count as in training
    with pytest.raises(Refused, match=r"all 5 prompts .* but 1 have none"):
        StoredValues.load(tmp_path / "s.db", {i: p for p, i in ids.items()} | {"unheard of": "e"})
    with pytest.raises(Refused, match="prompt_id"):  # another question under an id of the store
        StoredValues.load(tmp_path / "s.db", {ids["a"]: "A"})


@pytest.mark.parametrize(
    ("given", "used"), [({}, 0.1), ({"value_beta": None}, 0.1), ({"value_beta": 0.5}, 0.5)]
)
def test_the_stored_value_is_of_its_own_beta(given: dict, used: float) -> None:
    """That is beta where value_beta isn't given; a row has the value of its prompt."""
    values = StoredValues({"p": np.array([0.0, 1.0]), "q": np.array([2.0])})
    soft = used * math.log(0.5 * (1 + math.exp(1 / used)))
    found = filled(values, "stored_value", [("q", 1.0), ("p", 1.0), ("q", 1.0)], **given)
    assert found == pytest.approx([2.0, soft, 2.0], rel=1e-12)


def filled(values: StoredValues, name: str, rows: list[tuple[str, float | None]], **options) -> list[float]:
    """What rows of these prompts and rewards get of the values."""
    samples = [Sample("x", "y", r, tokens=[1, 2], action=[False, True], prompt_id=p) for p, r in rows]
    return values.fill(collate(samples, 0), samples, {"beta": 0.1, **options}).extra[name].tolist()


def test_the_quantile_is_the_share_of_stored_rewards_that_are_not_above() -> None:
    """Of 0.1, 0.7, 0.7, 2: 0.25 for 0.1, 0.75 for 0.7, 1 for 5; unknown where the reward is. (0.7 as float32
    is below 0.7.)"""
    values = StoredValues({"p": np.array([0.1, 0.7, 0.7, 2.0])})
    found = filled(values, "stored_quantile", [("p", r) for r in (0.1, 0.7, 5.0, -1.0, None)])
    np.testing.assert_equal(found, [0.25, 0.75, 1.0, 0.0, math.nan])


def stored(folder: Path, **changes) -> RunConfig:
    data = log_alone(folder, group_size=1, value_store=str(folder / "values.db"))
    return tiny(folder, **{"data": data, "objective": STORED, **changes})


def test_one_response_a_prompt_with_a_stored_value(tmp_path: Path) -> None:
    """The loss of the first step, where R = r, is the mean of (r − V)²."""
    fill_store(tmp_path / "values.db")
    trainer = Trainer(stored(tmp_path), tmp_path / "run")
    run = trainer.run()
    value = 0.1 * math.log(0.5 * (1 + math.exp(1 / 0.1)))  # rewards 0, 1, 0, 1
    with Store.open(run.parent / "log.db", read_only=True) as store:
        first = [d for d in store.draws.drawn(trainer.folder.id) if d.step == 1]
    losses = [(d.reward - value) ** 2 for d in first]
    assert metrics(run)[0]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert len(losses) == 4


def test_prompts_without_a_stored_value_are_refused(tmp_path: Path) -> None:
    fill_store(tmp_path / "values.db", groups=5)
    for act in (Trainer.run, Trainer.plan):
        with pytest.raises(Refused, match=r"data\.value_store: .*all 8 prompts .* but 3 have none"):
            act(Trainer(stored(tmp_path), tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_values_are_asked_of_the_phase_that_takes_them(tmp_path: Path) -> None:
    """Not of the log that the first one imitates; of the second, before the first has begun."""
    phases = [
        {"name": "imitate", "objective": {"name": "sft"}, "train": {"steps": 1}},
        {"name": "valued", "objective": STORED, "data": {"replay": 0.0}, "train": {"steps": 1}},
    ]
    prompts = write_prompts(tmp_path / "asked.jsonl", range(5))
    config = stored(tmp_path, objective={"name": "sft"}, phases=phases, data__prompts=prompts)
    with Store.open(tmp_path / "values.db") as store:
        store.append(Sample(f"{i:03d}>", "1", reward=1.0) for i in range(4))
    with pytest.raises(Refused, match=r"all 5 prompts .* but 1 have none"):
        Trainer(config, tmp_path / "run").run()
    with Store.open(tmp_path / "values.db") as store:
        store.append([Sample("004>", "1", reward=1.0)])
    assert [m["phase"] for m in metrics(Trainer(config, tmp_path / "run").run())] == ["imitate", "valued"]


def test_a_prompt_that_comes_later_and_has_no_value_is_refused_by_name(tmp_path: Path) -> None:
    class Grow(Monitor):
        def judge(self, view: View) -> Action:
            trainer.store.append([Sample("9>", "1", reward=1.0, prompt_id="late")])
            return Action()

    fill_store(tmp_path / "values.db")
    trainer = Trainer(stored(tmp_path, train__steps=20), tmp_path / "run", monitors=[Grow()])
    late = r"needs stored_value: 3 of 4 rows have it, 1 don't \(for example: sample \d+ \(prompt late\)\)"
    with pytest.raises(Refused, match=late):
        trainer.run()
