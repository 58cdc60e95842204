"""The discriminator of imitation: where its losses are least, its slope, and its AUC."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load, save

from agro_papers.discriminator import Discriminator, Fit, Pool

ZERO, ONE = [1.0, 0.0], [0.0, 1.0]


def pool(*rows: list[float], prompts: list[int] | None = None) -> Pool:
    return Pool(torch.tensor(rows), torch.tensor(prompts or [0] * len(rows)))


def fitted(own: Pool, experts: Pool, loss: str = "logistic", penalty: float = 0.0) -> Discriminator:
    made = Discriminator(own.states.shape[1], 0)
    made.fit(own, torch.ones(len(own.states)), experts, Fit(loss, penalty, 1.0, 300, 0))
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
    other = Discriminator.load(load(save(made.tensors())))
    states = torch.tensor([ZERO, ONE])
    assert torch.equal(made.values(states), other.values(states))
