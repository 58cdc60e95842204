"""Learned rewards: a discriminator against demonstrations, a flow of tokens, one with a bounded slope."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from tiny_runs import copying, metrics, whole_and_resumed

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Refused
from agro.store import Store
from agro.train.check import check_config
from agro.types import Sample
from agro_papers.adversary import AdversaryOptions, Discriminator, Pool, is_held_out, slope_penalty

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
    whole_and_resumed(lambda folder: imitating(folder, 5, **changes), tmp_path, 3)


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


ZERO, ONE = [1.0, 0.0], [0.0, 1.0]


def pool(*rows: list[float], prompts: list[int] | None = None) -> Pool:
    return Pool(torch.tensor(rows), torch.tensor(prompts or [0] * len(rows)))


def fitted(own: Pool, experts: Pool, loss: str = "logistic", penalty: float = 0.0) -> Discriminator:
    made = Discriminator(own.states.shape[1], 0)
    options = AdversaryOptions(loss=loss, penalty=penalty, steps=300)
    made.fit(own, torch.ones(len(own.states)), experts, options, 0)
    return made


def test_the_logistic_loss_is_least_at_the_log_ratio_of_probabilities() -> None:
    """The experts write the first of two responses with ¾, the policy with ¼: D is log 3 and −log 3."""
    made = fitted(pool(ZERO, ONE, ONE, ONE), pool(ZERO, ZERO, ZERO, ONE))
    values = made.values(torch.tensor([ZERO, ONE]))
    assert values.tolist() == pytest.approx([math.log(3), -math.log(3)], abs=0.35)


def test_pairs_are_least_at_the_same_difference() -> None:
    """−log σ of differences: the experts' share of the first one is ¾ where the two differ, so 2 log 3."""
    made = fitted(pool(ZERO, ONE, ONE, ONE), pool(ZERO, ZERO, ZERO, ONE), loss="pairs")
    first, second = made.values(torch.tensor([ZERO, ONE])).tolist()
    assert first - second == pytest.approx(2 * math.log(3), abs=0.5)


def test_a_penalty_bounds_the_slope() -> None:
    """Two points that nobody confuses are 2 standard deviations apart in each of 2 dimensions: √8."""
    own, experts = pool(*[ONE] * 8), pool(*[ZERO] * 8)

    def rise(penalty: float) -> float:
        first, second = fitted(own, experts, penalty=penalty).values(torch.tensor([ZERO, ONE])).tolist()
        return first - second

    assert rise(100.0) == pytest.approx(math.sqrt(8), rel=0.15)
    assert rise(0.0) > 2 * math.sqrt(8)


def test_it_compares_responses_to_one_prompt() -> None:
    """What is right for one prompt is wrong for the other: the states don't differ without the prompts."""
    own, experts = pool(ZERO, ONE, prompts=[0, 1]), pool(ONE, ZERO, prompts=[0, 1])
    made = fitted(own, experts)
    assert made.values(torch.tensor([ZERO, ONE])).tolist() == pytest.approx([0, 0], abs=0.35)
    made.values = lambda states: states[:, 0]  # the first coordinate
    assert made.auc(own, experts) == 0.5  # 0 for the first prompt, 1 for the second
    assert made.auc(own, pool(ZERO, prompts=[0])) == 0.5  # equal values are ½
    assert made.auc(own, pool(ZERO, prompts=[7])) is None


def test_it_is_the_same_from_its_tensors() -> None:
    made = fitted(pool(ZERO, ONE), pool(ZERO, ZERO))
    other = Discriminator(2, 1)
    other.load_state_dict(load(save(made.state_dict())))
    states = torch.tensor([ZERO, ONE])
    assert torch.equal(made.values(states), other.values(states))


def test_the_penalty_of_a_line_is_that_of_its_slope() -> None:
    """‖(3, 4)‖ = 5, so (5 − 2)² = 9 wherever it is taken, and d/dw = 2 (5 − 2) w/5."""
    line = torch.nn.Linear(2, 1, dtype=torch.float64)
    with torch.no_grad():
        line.weight.copy_(torch.tensor([[3.0, 4.0]]))
    penalty = slope_penalty(line, torch.randn(7, 2, dtype=torch.float64), 2.0)
    assert penalty.item() == pytest.approx(9.0, abs=1e-12)
    (by_weight,) = torch.autograd.grad(penalty, line.weight)
    assert by_weight[0].tolist() == pytest.approx([6 * 3 / 5, 6 * 4 / 5], abs=1e-12)
