"""The learned reward with a bounded slope: its penalty by hand, and what the penalty does to a fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agro.errors import Refused
from agro.types import Sample
from agro_papers.smooth import SmoothReward, slope_penalty


def test_the_penalty_of_a_line_is_that_of_its_slope() -> None:
    """‖(3, 4)‖ = 5, so (5 − 2)² = 9 wherever it is taken, and d/dw = 2 (5 − 2) w/5."""
    line = torch.nn.Linear(2, 1, dtype=torch.float64)
    with torch.no_grad():
        line.weight.copy_(torch.tensor([[3.0, 4.0]]))
    penalty = slope_penalty(line, torch.randn(7, 2, dtype=torch.float64), 2.0)
    assert penalty.item() == pytest.approx(9.0, abs=1e-12)
    (by_weight,) = torch.autograd.grad(penalty, line.weight)
    assert by_weight[0].tolist() == pytest.approx([6 * 3 / 5, 6 * 4 / 5], abs=1e-12)


def rated(n: int, seed: int) -> list[Sample]:
    """Random texts, those that end with "a" rated 1, the others 0."""
    random = np.random.default_rng(seed)
    texts = ["".join(random.choice(list("abc"), 6)) for _ in range(n)]
    return [Sample("", text, reward=float(text.endswith("a"))) for text in texts]


def test_a_fit_ranks_new_responses_and_has_the_slope_of_its_penalty(tiny) -> None:
    policy = tiny()
    fits = {of: SmoothReward.fit(policy, rated(96, 0), slope=0.2, penalty=of, steps=200) for of in (0, 10)}
    new = rated(64, 1)
    points = torch.randn(200, len(fits[0].mean), generator=torch.Generator().manual_seed(0))
    off = {of: slope_penalty(fit.network, points, 0.2).item() for of, fit in fits.items()}
    assert off[10] < 0.2 * off[0]
    found = np.array([sample.reward for sample in fits[10].reward(new)])
    right = np.array([sample.reward == 1 for sample in new])
    assert (found[right][:, None] > found[~right]).mean() > 0.85  # pairs in the right order; by chance ½


def test_what_has_no_reward_is_refused(tiny) -> None:
    policy = tiny()
    for scored in ([], [Sample("", "abc", reward=1.0), Sample("", "abc")]):
        with pytest.raises(Refused, match="smooth reward: expected scored responses"):
            SmoothReward.fit(policy, scored)
