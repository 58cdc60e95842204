"""Rewards that are learned while training: a discriminator against demonstrations, and a flow of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import copying, metrics, whole_and_resumed

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Refused
from agro.store import Store
from agro.train.check import check_config
from agro.types import Sample
from agro_papers.adversary import is_held_out
from agro_papers.flow_reward import ranking

ROUNDING = 1e-5
REWARD = Path(__file__).parents[1] / "train/reward.py"


def imitating(folder: Path, steps: int = 4, **changes: Any) -> RunConfig:
    values = {
        "objective": {"name": "agro", "beta": 0.05},
        "source": {"around": "adversary", "options": {"steps": 10}},
        "train__groups": 4,
        "train__checkpoint_every": 2,
    }
    return copying(folder, steps, **{**values, **changes})


def flowing(folder: Path, steps: int = 6, **changes: Any) -> RunConfig:
    values = {
        "objective": {"name": "prefix_consistency", "beta": 0.05},
        "source__around": "flow_reward",
        "source__options": {"min_reward": 1.0, "coef": 0.1, "every": 2, "steps": 20},
        "train__value_lr": 1e-2,
        "train__groups": 4,
        "train__checkpoint_every": 2,
    }
    return copying(folder, steps, **{**values, **changes})


def own_samples(config: RunConfig) -> list[Sample]:
    with Store.open(config.data.store, read_only=True) as store:
        return list(store.samples(roles=("policy",)))


def parts(run: Path, name: str) -> list[float]:
    return [row["reward_parts"][name] for row in metrics(run) if row["step"]]


def test_the_reward_is_the_discriminators_and_the_runs_own_is_measured(tmp_path: Path) -> None:
    config = imitating(tmp_path)
    Trainer(config, tmp_path / "run").run()
    samples = own_samples(config)
    assert len(samples) == 4 * 4 * 2
    for sample in samples:
        assert sample.reward == pytest.approx(sample.meta["reward_parts"]["learned"], abs=ROUNDING)
        right = sample.response == sample.meta["answer"]
        assert sample.meta["reward_parts"]["exact"] == float(right)
    assert len({round(sample.reward, 4) for sample in samples}) > 10


def test_the_reward_is_a_sum_where_its_own_counts(tmp_path: Path) -> None:
    learned = {"steps": 10, "weight": 0.5, "own": 2.0}
    config = imitating(tmp_path, source__options=learned)
    Trainer(config, tmp_path / "run").run()
    for sample in own_samples(config):
        values = sample.meta["reward_parts"]
        assert sample.reward == pytest.approx(0.5 * values["learned"] + 2 * values["exact"], abs=ROUNDING)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"source__options": {"steps": 10, "every": 3}, "data__replay": 0.5, "data__roles": ["policy"]},
            id="replayed, with an older fit",
        ),
    ],
)
def test_a_resumed_run_has_the_same_discriminator(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Checkpoints are at steps 2 and 4, and the run is interrupted after step 3."""
    whole, run = whole_and_resumed(lambda folder: imitating(folder, 5, **changes), tmp_path, 3)
    assert parts(run, "learned") == parts(whole, "learned")


def test_replayed_responses_have_the_reward_of_the_present_fit(tmp_path: Path) -> None:
    """All of the newest responses are scored by the last fit, so equal texts have equal rewards."""
    config = imitating(tmp_path, data__replay=0.5, data__roles=["policy"], train__steps=6)
    Trainer(config, tmp_path / "run").run()
    by_text: dict[tuple[str, str], set[float]] = {}
    for sample in own_samples(config):
        if sample.meta["finish"] == "stop":  # a text that was cut off has no end token
            by_text.setdefault((sample.prompt, sample.response), set()).add(round(sample.reward, 3))
    assert by_text
    assert all(len(rewards) == 1 for rewards in by_text.values())


def learning_even_digits(folder: Path, count: int, **learned: Any) -> list[dict[str, Any]]:
    """The steps of a run whose demonstrations are even digits, each of them to two prompts."""
    config = imitating(
        folder,
        count,
        demonstration=lambda digit: str(int(digit) // 2 * 2),
        reward={"name": f"{REWARD}:even"},
        source__options=learned,
        train={"steps": count, "groups": 10, "micro_batch": 256, "lr": 1e-2, "clip": 20.0},
        sampler__n=4,
    )
    return [row for row in metrics(Trainer(config, folder / "run").run()) if row["step"]]


def mean(rows: list[dict[str, Any]], part: str) -> float:
    return sum(row["reward_parts"][part] for row in rows) / len(rows)


def test_the_policy_comes_to_write_what_the_demonstrations_are(tmp_path: Path) -> None:
    """Nothing says that they are even digits: by chance 5 of 11 first tokens, and 1 of 12 second ones."""
    rows = learning_even_digits(tmp_path, 24, steps=20)
    [own] = set(rows[0]["reward_parts"]) - {"learned"}
    assert mean(rows[:4], own) < 0.2
    assert mean(rows[-4:], own) > 0.45


def test_it_is_measured_on_prompts_that_it_was_not_fitted_to() -> None:
    """One of five prompts, by a hash."""
    held_out = sum(is_held_out(f"prompt {i}") for i in range(1000))
    assert held_out == pytest.approx(200, abs=40)


def test_a_flow_rewards_the_tokens_of_fresh_responses_and_is_fitted_again(tmp_path: Path) -> None:
    """Demonstrations are trusted from the start. Fits are at versions 0, 2, 4, and 6 for the last
    measurement: the checkpoint has the last."""
    config = flowing(tmp_path)
    run = Trainer(config, tmp_path / "run").run()
    samples = own_samples(config)
    for sample in samples:
        of_tokens = sample.token_reward[sample.action]
        assert np.abs(of_tokens).max() <= 0.1 + ROUNDING
        assert np.isnan(sample.token_reward[~sample.action]).all()
        assert sample.reward == float(sample.response == sample.meta["answer"])
    assert any(np.abs(sample.token_reward[sample.action]).max() > 0.05 for sample in samples)
    position = json.loads((run / "checkpoints" / "step-00000006" / "position.json").read_text())
    assert position["monitors"]["flow"]["fitted"] == 6
    assert all(row["loss"] is not None for row in metrics(run) if row["step"])


def test_a_resumed_run_has_the_same_flow(tmp_path: Path) -> None:
    whole_and_resumed(flowing, tmp_path, 3)


def test_the_ranking_of_errors() -> None:
    """Of three responses to a prompt with rewards 1, 0 and 0, the right one against either."""

    def samples(*rewards: float, prompts: str = "ppp") -> list[Sample]:
        return [Sample(prompt, "x", reward=reward) for prompt, reward in zip(prompts, rewards)]

    assert ranking(samples(1, 0, 0), [0.5, 1.0, 0.5]) == 0.75  # a win and a tie
    assert ranking(samples(1, 0, 1, prompts="ppq"), [0.5, 0.25, 0.0]) == 0.0
    assert ranking(samples(1, 1), [0.5, 0.25]) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": {"name": "e.py:E"}}, r"adversary needs a source .* but \[environment\] is set"),
        ({"reward": {"functions": [{"name": "exact"}], "whiten": "batch"}}, "adversary gives a reward that"),
        ({"data__store": None}, r"adversary needs data\.store: demonstrations"),
        ({"data__replay": 1.0}, r"adversary changes fresh samples, but data\.replay = 1"),
        ({"source__kind": "elsewhere"}, r'adversary needs a source that .* but source\.kind is "elsewhere"'),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        check_config(imitating(tmp_path, **changes))


def test_prompts_without_demonstrations_are_refused(tmp_path: Path) -> None:
    config = imitating(tmp_path, data__store=str(tmp_path / "empty.db"))
    with pytest.raises(Refused, match=r"adversary: expected demonstrations, .* role expert"):
        Trainer(config, tmp_path / "run").run()
