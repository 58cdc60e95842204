"""What a step is made of: shares of the store by role and over steps, the closest groups, groups with a
spread of rewards or completed with fresh ones, a tracked baseline, prompts of uncertain value, epochs; and
that each resumes exactly."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_mixture_rules import EPOCHS, logged_of_epochs
from tiers import first_of_each
from tiny_runs import (
    REWARDS,
    StopAfter,
    before_step,
    by_someone,
    fill_store,
    log_alone,
    metrics,
    run_tiny,
    samples_of,
    tiny,
    weights,
    whole_and_resumed,
    write_prompts,
)

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Refused
from agro.objectives.reduce import Groups
from agro.store import Pair, Store, is_held_out
from agro.train.feed import Feed, per_token
from agro.types import Sample

TRACKED: dict[str, Any] = {
    "objective": {"name": "rloo", "baseline": "stored"},
    "sampler__n": 1,
    "data__value_half_life": 3.0,
}
RUNS: dict[str, dict[str, Any]] = {
    "shares": {"data__replay": {"log": 0.25, "policy": 0.5}},
    "closest": {"data__replay": 0.5, "data__order": "closest", "data__roles": ["policy"]},
    "age": {"data__replay": 0.5, "data__order": "age_weighted", "data__age_decay": 0.3},
    "spread": {"data__replay": 0.5, "data__spread": True},
    "equal": {"data__replay": 0.5, "data__spread": 0.5},
    "drift": {"data__replay": 0.5, "data__roles": ["policy"], "data__max_drift": 0.02},
    "pairs": {"data__replay": 1.0, "objective": {"name": "dpo", "beta": 0.3}, "data__group_size": 3},
    "uncertain": TRACKED | {"data__prompt_order": "uncertain"},
    "epochs": {"data__replay": 1.0, "train": EPOCHS | {"epochs": 5}},
    "lag": {"source__sync_every": 3},
    "long lag": {"source__sync_every": 7},
    "average": {
        "phases": [
            {"name": "a", "train": {"steps": 4, "updates": 2, "weights_average": 0.5}},
            {"name": "b", "train": {"steps": 4, "weights_average": 0.9}},
        ],
        "data__eval_prompts": "held.jsonl",
        "evaluate__every": 2,
    },
    "rules": {"train__lr": 0.1, "train__step_kl": 0.01, "train__gain_ratio": 0.9},
    "tuned beta": {"objective__beta": {"start": 0.02, "target_kl": 0.3, "rate": 0.2}},
    "found rate": {"train__lr": "auto", "train__schedule": "linear"},
    "value": {"objective": {"name": "dro", "beta": 0.1}, "sampler__n": 1, "train__groups": 12},
    "kl on a log": {"data__replay": 1.0, "evaluate": {"every": 1, "kl_samples": 5}},
    "kl on its own samples": {"data__replay": 0.5, "evaluate": {"every": 1, "kl_samples": 5}},
    "diagnostics": {
        "objective": {"name": "rloo"},
        "data__replay": 0.5,
        "data__eval_prompts": "held.jsonl",
        "evaluate": {"beta": 0.5, "n": 2, "every": 2},
    },
}
ALIKE = {
    "age": "closest",
    "drift": "closest",
    "equal": "spread",
    "long lag": "lag",
    "tuned beta": "rules",
    "kl on its own samples": "kl on a log",
}
OWN_STORE = ("kl on its own samples", "diagnostics")


def run(folder: Path, name: str) -> RunConfig:
    folder.mkdir(exist_ok=True)
    if not (folder / "log.db").exists():
        fill_store(folder / "log.db", groups=6)
        with Store.open(folder / "log.db") as store:
            store.add_pairs(Pair(4 * g + k, 4 * g + 1) for g in range(6) for k in (2, 3, 4))
    given = {"data__store": str(folder / "log.db"), "train__steps": 8} | RUNS[name]
    if name in OWN_STORE:
        del given["data__store"]
    if "data__eval_prompts" in given:
        given["data__eval_prompts"] = write_prompts(folder / "held.jsonl", range(60, 66))
    return tiny(folder, **given)


@pytest.mark.parametrize("name", first_of_each(lambda name: ALIKE.get(name, name), RUNS))
def test_a_run_that_is_stopped_and_resumed_ends_the_same(name: str, tmp_path: Path) -> None:
    whole_and_resumed(lambda folder: run(folder, name), tmp_path, 5)


def test_a_share_of_each_role_is_drawn(tmp_path: Path) -> None:
    trainer = Trainer(run(tmp_path, "shares"), tmp_path / "run")
    trainer.run()
    versions = {m["step"]: m["version"] for m in metrics(tmp_path / "run")}
    with Store.open(tmp_path / "log.db", read_only=True) as store:
        drawn = store.draws.drawn(trainer.folder.id, versions)
        prompts = {s.id: s.prompt_id for s in store.samples(redone=True)}
    later = {(d.step, prompts[d.sample], d.role) for d in drawn if d.step > 2}
    # Of 6 steps of 4 groups a quarter; then sampled and replayed ones.
    assert Counter(role for *_, role in later) == {"log": 6, "policy": 18}


def test_closest_needs_recorded_log_probs(tmp_path: Path) -> None:
    config = run(tmp_path, "closest").model_dump(mode="json")
    config["data"] |= {"roles": ["log"], "replay": 1.0}
    with pytest.raises(Refused, match=r'data\.closeness = "behavior" needs the recorded log-probs'):
        Trainer(RunConfig.of(config), tmp_path / "run").run()
    config["data"]["closeness"] = "likelihood"
    Trainer(RunConfig.of(config), tmp_path / "likelihood").run()


def test_what_the_policy_has_left_is_dropped_and_counted(tmp_path: Path) -> None:
    """Replayed responses alone, whose |log π − log μ| per token is above the limit."""

    def look(feed, valid) -> None:
        stored = [s for s in valid.samples if s.id not in valid.fresh]
        assert all(value >= -0.02 for value in per_token(feed.learner, stored, "behavior"))

    with before_step(look):
        Trainer(run(tmp_path, "drift"), tmp_path / "run").run()
    reasons = [row["dropped_reasons"] or {} for row in metrics(tmp_path / "run")]
    assert any("the policy has moved too far from it" in each for each in reasons)


def test_an_uncertain_order_has_no_held_out_prompts(tmp_path: Path) -> None:
    run = run_tiny(tmp_path, **RUNS["uncertain"], data__hold_out=0.5, data__ask_held_out=False)
    sampled = {sample.prompt_id for sample in samples_of(run)}
    assert len(sampled) > 10
    assert not any(is_held_out(name, 0.5) for name in sampled)


def test_groups_of_one_learn_with_a_tracked_value(tmp_path: Path) -> None:
    """The share of sevens in a response from random weights: 0.09 at the start, more than 0.5 at the end."""
    changes = {"reward__name": f"{REWARDS}:sevens", "train__groups": 16, "train__steps": 60}
    rewards = [m["reward_mean"] for m in metrics(run_tiny(tmp_path, **TRACKED, **changes)) if m["step"]]
    assert np.mean(rewards[:5]) < 0.2
    assert np.mean(rewards[-5:]) > 0.5


def test_a_step_weighs_what_it_draws(tmp_path: Path, monkeypatch) -> None:
    """Of 8 groups 2 have rewards that differ; a step of 4 draws both, which count 2/8 · 4/2 = .5, and two of
    the others, 6/8 · 4/2 = 1.5 each."""
    equal = [Sample(f"{200 + g}>", f"{i}", reward=0.0) for g in range(6) for i in range(2)]
    data = log_alone(tmp_path, [*by_someone(groups=2), *equal], spread=0.1)
    batches, plain = [], Feed.batch

    def kept(*args):
        batches.append(plain(*args))
        return batches[-1]

    monkeypatch.setattr(Feed, "batch", kept)
    run_tiny(tmp_path, data=data, train__steps=1, train__groups=4)
    groups = Groups.of(batches[0].batch)
    assert sorted(groups.weight.tolist()) == [0.5, 0.5, 1.5, 1.5]
    equal = groups.largest(groups.reward) == -groups.largest(-groups.reward)
    assert equal.tolist() == (groups.weight == 1.5).tolist()


def test_each_stored_response_meets_fresh_ones_to_its_prompt(tmp_path):
    single = [Sample(f"{i}>", "11", reward=1.0, meta={"answer": "11"}) for i in range(6)]
    log = log_alone(tmp_path, single, roles=["log"], complete_groups=3)

    def look(feed, valid) -> None:
        of_step = Counter((s.prompt_id, s.role) for s in valid.samples)
        assert sorted(of_step.values()) == [1, 1, 1, 1, 3, 3, 3, 3]  # train.groups = 4
        assert len({prompt_id for prompt_id, _ in of_step}) == 4

    with before_step(look):
        run = run_tiny(tmp_path, data=log, reward={"name": "exact"}, train__steps=2)
    with Store.open(tmp_path / "log.db", read_only=True) as store:
        fresh = [s for s in store.samples() if s.role == "policy"]
    assert len(fresh) == 2 * 4 * 3
    assert all(s.reward is not None and s.meta["answer"] == "11" for s in fresh)
    assert metrics(run)[-1]["grad_norm"] > 0


def last_digit_three_times(folder: Path) -> dict[str, str]:
    """80 prompts such as `07>`, whose answer is `777`. The log has one response to most; 60 % are right."""
    rng = random.Random(0)
    prompts = [f"{i:02d}>" for i in range(100)]
    rng.shuffle(prompts)
    held_out, trained = prompts[:20], prompts[20:]
    for name, part in (("prompts", trained), ("eval_prompts", held_out)):
        lines = (json.dumps({"prompt": p, "answer": p[1] * 3}) + "\n" for p in part)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    with Store.open(folder / "log.db") as store:
        for i, prompt in enumerate(trained):
            answer = prompt[1] * 3
            for _ in range(2 if i % 4 == 0 else 1):
                text = answer if rng.random() < 0.6 else "".join(rng.choices("0123456789", k=3))
                store.append([Sample(prompt, text, reward=float(text == answer), meta={"answer": answer})])
    return {name: str(folder / f"{name}.jsonl") for name in ("prompts", "eval_prompts")}


@pytest.mark.nightly
def test_mixed_groups_learn_what_neither_the_log_nor_fresh_samples_teach(tmp_path):
    """A new model finds the answer once in 20,000 tries, and the log has few groups of two."""
    files = last_digit_three_times(tmp_path)
    log = log_alone(tmp_path, roles=["log"])
    parts: dict[str, dict[str, Any]] = {"log": log, "fresh": {}, "mixed": {**log, "complete_groups": 3}}
    reward = {}
    for name, data in parts.items():
        run = run_tiny(
            tmp_path,
            name,
            policy__new={"alphabet": "0123456789>", "hidden": 32, "layers": 2, "heads": 2, "context": 16},
            data={**files, **data},
            sampler={"n": 4, "max_new": 4},
            reward={"name": "exact"},
            objective={"name": "agro", "beta": 0.05, "singletons": "drop"},
            train={"steps": 60, "groups": 16, "lr": 1e-2, "micro_batch": 80, "warmup": 5},
            evaluate__n=4,
        )
        reward[name] = metrics(run)[-1]["eval_reward"]
    assert reward["mixed"] > 0.2 + max(reward["log"], reward["fresh"])


def test_the_run_is_that_of_so_many_steps_and_draws_each_group_as_often(tmp_path: Path, capsys) -> None:
    out = Trainer(logged_of_epochs(tmp_path, 2), tmp_path / "run").run()
    assert "note: train: train.epochs = 2: 5 steps over 10 stored groups" in capsys.readouterr().err
    train = logged_of_epochs(tmp_path).train.model_dump() | {"epochs": None, "steps": 5}
    assert weights(out) == weights(Trainer(logged_of_epochs(tmp_path, train=train), tmp_path / "steps").run())
    record = json.loads((out / "config.json").read_text())
    assert (record["train"]["steps"], record["train"]["epochs"]) == (5, None)
    assert record["epochs"] == {"train": {"epochs": 2, "groups": 10, "steps": 5}}
    rule = Trainer(logged_of_epochs(tmp_path), out).phases[0].rule(1)
    with Store.open(tmp_path / "log.db", read_only=True) as store:
        assert {each.uses for each in store.draws.candidates(rule, record["run"], 0)} == {2}
    assert RunConfig.load(out / "config.json").train.steps == 5


def test_a_resumed_run_keeps_its_steps_where_the_store_grew(tmp_path: Path) -> None:
    config = logged_of_epochs(tmp_path)
    plain = Trainer(config, tmp_path / "plain").run()
    Trainer(config, tmp_path / "run", monitors=[StopAfter(3)]).run()
    resumed = Trainer(config, tmp_path / "run", resume=True)
    with Store.open(tmp_path / "log.db") as store:
        store.append(Sample(f"{g}>", str(i), reward=float(i)) for g in range(500, 540) for i in range(2))
    assert Trainer(config, tmp_path / "new").phases[0].ends == 38  # ceil(3 × 50 / 4)
    grown = Trainer(config, tmp_path / "run", resume=True)
    assert [t.phases[0].ends for t in (resumed, grown)] == [8, 8]
    assert len(metrics(plain)) == 8
    longer = Trainer(logged_of_epochs(tmp_path, 4), tmp_path / "run", resume=True)
    assert longer.phases[0].ends == 50


def test_phases_have_epochs_or_steps_of_their_own(tmp_path: Path) -> None:
    phases = [{"name": "a"}, {"name": "b", "train": {"steps": 7}}, {"name": "c", "train": {"epochs": 1}}]
    config = logged_of_epochs(tmp_path, phases=phases)
    trainer = Trainer(config, tmp_path / "run")
    assert [phase.steps for phase in trainer.phases] == [8, 7, 3]
    out = trainer.run()
    record = json.loads((out / "config.json").read_text())
    assert [p["train"]["steps"] for p in record["phases"]] == [8, 7, 3]
    assert record["epochs"].keys() == {"a", "c"}
    Trainer(config, out, resume=True).run()
