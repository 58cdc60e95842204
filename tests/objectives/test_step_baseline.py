"""`baseline = "step"`: on fresh samples the expected step is the policy gradient, whatever the noise.

Enumerated: two prompts of three responses, of which each step draws one or two, independently.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from agro import Batch, objectives
from agro.errors import Refused

BETA = 0.3
POLICY = np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]])  # of a response to each prompt
REFERENCE = np.array([[0.2, 0.5, 0.3], [0.3, 0.3, 0.4]])
REWARD = np.array([[0.0, 1.0, 0.4], [1.0, 0.9, 0.0]])


def step(drawn: tuple[tuple[int, ...], ...], noise: tuple[float, ...], name: str) -> np.ndarray:
    """[2,3] the step in the logits of both prompts, from one group of each."""
    rows = [(x, y) for x, of_prompt in enumerate(drawn) for y in of_prompt]
    batch = Batch.of(
        mask=[[False, True]] * len(rows),
        reward=[REWARD[row] + more for row, more in zip(rows, noise, strict=True)],
        group=[x for x, _ in rows],
        ref_logp=[[0.0, math.log(REFERENCE[row])] for row in rows],
    )
    logp = [[0.0, math.log(POLICY[row])] for row in rows]
    found = objectives.evaluate(name, logp, batch, beta=BETA, baseline="step").grad
    logits = np.zeros((2, 3))
    for (x, y), slope in zip(rows, found, strict=True):
        logits[x] += slope[1] * ((np.arange(3) == y) - POLICY[x])
    return logits


@pytest.mark.parametrize("name", ["agro", "rloo"])
@pytest.mark.parametrize("n", [1, 2])
def test_the_expected_step_is_the_policy_gradient(name: str, n: int) -> None:
    """Of E r − β KL, half of it from each prompt; rewards ± 0.5 in turn, so that each noise is met."""
    expected = np.zeros((2, 3))
    for a in itertools.product(range(3), repeat=n):
        for b in itertools.product(range(3), repeat=n):
            chance = math.prod(POLICY[0, list(a)]) * math.prod(POLICY[1, list(b)])
            for signs in itertools.product((-0.5, 0.5), repeat=2):
                noise = (signs[0],) + (0.0,) * (n - 1) + (signs[1],) + (0.0,) * (n - 1)
                expected += chance / 4 * step((a, b), noise, name)
    R = REWARD - BETA * np.log(POLICY / REFERENCE)
    exact = -POLICY * (R - (POLICY * R).sum(1, keepdims=True)) / 2
    np.testing.assert_allclose(expected, exact, atol=1e-12)


def test_one_group_has_nothing_to_be_compared_with() -> None:
    batch = Batch.of(mask=[[False, True]] * 2, reward=[1.0, 0.0], group=["x"] * 2, ref_logp=[[0.0, -1.0]] * 2)
    with pytest.raises(Refused, match="at least 2 groups, got 'x' alone"):
        objectives.evaluate("agro", [[0.0, -1.0]] * 2, batch, beta=BETA, baseline="step")


def test_right_responses_are_raised_where_all_of_a_prompt_are() -> None:
    """R is 1 or 0 at the reference, g = (1 − e⁻¹)² for all: b of x is the mean of y, ½; of y that of x, 1."""
    batch = Batch.of(
        mask=[[False, True]] * 4, reward=[1.0, 1.0, 1.0, 0.0], group=["x", "x", "y", "y"],
        ref_logp=[[0.0, -1.0]] * 4,
    )  # fmt: skip
    out = objectives.evaluate("agro", [[0.0, -1.0]] * 4, batch, beta=BETA, baseline="step")
    np.testing.assert_allclose(out.grad[:, 1], [-0.125, -0.125, 0.0, 0.25], atol=1e-15)
