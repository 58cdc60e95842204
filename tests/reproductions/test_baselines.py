"""Ends of baselines with noisy rewards, and of one response a prompt, on few problems."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agro.objectives import Gradient, get
from agro.objectives.ingredients import WEIGHT, WEIGHT_BASELINE
from agro.proof.enumerable import kl
from agro.types import Batch
from reproductions.baselines import run


def worst(name: str, noise: float, n: int = 3) -> float:
    reference, behavior, reward = run.drawn(4, 1, 4, seed=0)
    problems = run.Problems(reference, behavior, reward, noise=noise)
    found = run.measured(problems, run.gradient_of_groups(problems, name, n), [reference])
    assert found["arrived"] == found["of"] == 4
    return found["worst"]


@pytest.mark.parametrize("name", ["mean", "weighted", "optimal"])
def test_baselines_whose_shares_dont_read_the_groups_rewards_end_at_the_optimum(name: str) -> None:
    assert worst(name, 0.5) < 1e-9


@pytest.mark.parametrize("name", ["lower", "balanced"])
def test_the_lower_one_of_two_means_doesnt_with_noise(name: str) -> None:
    assert worst(name, 0.0) < 1e-9
    assert worst(name, 0.5) > 0.01


def test_a_pooled_batch_ends_elsewhere_where_values_differ() -> None:
    rows = {(r["stands"], r["spread"]): r["worst"] for r in run.single(2, (0.0, 0.25, 1.0))}
    assert rows["mean of the batch", 0.0] < 1e-9
    assert rows["mean of the batch", 0.25] < rows["mean of the batch", 1.0]
    assert rows["mean of the batch", 1.0] > 0.05
    assert rows["a value that is learned", 1.0] < 1e-9


def test_the_optimal_baseline_is_the_librarys() -> None:
    """One step of five groups of three responses of one token."""
    generator = torch.Generator().manual_seed(3)

    def draw() -> Tensor:
        return torch.randn(5, 3, generator=generator, dtype=torch.float64)

    logp, R = draw().sigmoid().log(), draw()
    w = draw().clamp(max=0).exp().maximum(1.1 * logp.exp()).clamp(max=1)  # π/w is a probability
    force = w * (R - run.BASELINES["optimal"](w, w * (1 - logp.exp()).square(), R)[:, None])
    mask = torch.tensor([[False, True]]).expand(15, 2)  # the first column is the prompt
    batch = Batch.of(
        mask=mask,
        group=torch.arange(5).repeat_interleave(3).tolist(),
        reward=R.flatten(),
        ref_logp=(logp - w.log()).view(15, 1).expand(15, 2),
    )
    options = get("agro").resolve("agro", {"beta": 1, "weight": "reference", "weight_baseline": "optimal"})
    logp_BT, slope_B1 = logp.view(15, 1).expand(15, 2), (R.mean(-1, keepdim=True) - R).view(15, 1)
    gradient = Gradient(0.0, slope_B1 * mask, {})
    for part in (WEIGHT_BASELINE, WEIGHT):
        gradient = part.apply(options, logp_BT, batch, gradient)
    torch.testing.assert_close(force.flatten(), -gradient.logp_BT[:, 1])


def test_an_end_is_where_the_update_vanishes() -> None:
    reference, behavior, reward = run.drawn(2, 1, 4, seed=1)
    problems = run.Problems(reference, behavior, reward)
    update = run.gradient_of_groups(problems, "mean", 2)
    logp, arrived = run.end(reference, update)
    assert arrived.all()
    torch.testing.assert_close(logp, problems.optimum, atol=1e-7, rtol=0)
    assert kl(reference, problems.optimum).min() > 0.01
