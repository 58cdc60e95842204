"""The trap's theory on a coarse grid, the remedies on few problems, the rate of the regularized reward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from reproductions.trap import compare, remedies, run


def test_the_line_divides_where_descent_ends() -> None:
    found = run.grid(small=True)
    assert found["fell below the line, c = 1"] == 1
    assert found["rose above the line, c = 1"] == 1
    assert found["least gained, adaptive"] > 0.9


def test_where_the_remedies_end() -> None:
    found = compare.expectations(remedies.tables(2, 12), 300, (2, 3))["ends"]
    assert found["c = 1"]["all"]["fell"] > 0
    for name in ("c = 0", "adaptive", "adaptive, n = 3", "c = 0, 1/2 reference"):
        assert found[name]["all"]["fell"] == 0
        assert found[name]["all"]["reached"] > found["c = 1"]["all"]["reached"]
    assert found["bound"]["all"]["fell"] > 0


def test_networks_and_sampled_groups_run(tmp_path) -> None:
    """Networks share nothing with each other: the first of six goes where it goes alone."""
    several = remedies.networks(6)
    alone = replace(remedies.networks(1), reward=several.reward[:4])
    paths = [remedies.by_library(p, "adaptive", 20) for p in (several, alone)]
    torch.testing.assert_close(
        paths[0].distance[:, :4], paths[1].distance, atol=1e-3, rtol=0
    )  # but for Adam's ε
    assert paths[1].distance[-1].mean() < paths[1].distance[0].mean()
    found = {"tables": compare.samples(remedies.tables(2, 6), 200, 4, 2)}
    assert found["tables"]["ends"]["adaptive"]["all"]["instances"] == 12
    assert found["tables"]["ends"]["adaptive"]["all"]["kl"][1] < 0.1
    compare.figure(found, tmp_path / "remedies.png")
    assert (tmp_path / "remedies.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("c = 1", remedies.shared(lambda p, a, done: 1.0)),
        ("c = 0", remedies.shared(lambda p, a, done: 0.0)),
        ("adaptive", remedies.over_groups(2, 4, remedies.per_response)),  # in a pair both have one share
    ],
)
def test_the_weights_are_the_librarys(name: str, weights: remedies.Weights) -> None:
    problems = remedies.tables(2, 6)
    found, expected = remedies.by_weights(problems, weights, 40), remedies.by_library(problems, name, 40)
    torch.testing.assert_close(found.distance, expected.distance, atol=1e-5, rtol=1e-4)


def draws() -> tuple[Tensor, Tensor, Tensor]:
    """Policies [50,4], and R − E R of skewed R."""
    generator = torch.Generator().manual_seed(3)
    p = torch.rand(50, 4, generator=generator, dtype=torch.float64)
    p = p / p.sum(1, keepdim=True)
    R = (2 * torch.randn(50, 4, generator=generator, dtype=torch.float64)).exp()
    return p, R, R - (p * R).sum(1, keepdim=True)


@pytest.mark.parametrize("c", [0.0, 0.4, 1.0])
def test_the_rate_of_the_regularized_reward(c: float) -> None:
    """Where log π moves by −W, E R moves by −Cov(W, R) = β Var R − c/2 μ₃(R); β = 1."""
    p, R, off = draws()
    pull = remedies.shared(lambda p, a, done: c)(p, p, R, 0.0)
    expected = (p * off**2).sum(1) - c / 2 * (p * off**3).sum(1)
    torch.testing.assert_close(-(pull * off).sum(1), expected)
    assert bool((expected < 0).any()) == (c > 0)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_share_for_each_response_never_lowers_it(n: int) -> None:
    p, R, off = draws()
    pull = remedies.over_groups(n, 4, remedies.per_response)(p, p, R, 0.0)
    assert (-(pull * off).sum(1)).min() > 0


def half_variance(m: Tensor, R: Tensor) -> Tensor:
    return 0.5 * (m * (R - (m * R).sum(1, keepdim=True)).square()).sum()


@pytest.mark.parametrize(
    ("weights", "loss"),
    [
        (remedies.shared(lambda p, a, done: 1.0), lambda p, q, R: half_variance(p, R)),
        (remedies.mixture(0.25), lambda p, q, R: half_variance(0.75 * p + 0.25 * q, R)),
        (
            remedies.reference_groups,
            lambda p, q, R: half_variance(p.detach(), R) / 2 + half_variance(q, R) / 2,
        ),
    ],
)
def test_the_weights_are_the_losses_gradients(weights: remedies.Weights, loss: Callable[..., Tensor]) -> None:
    q, reward, _ = draws()
    logits = q.flip(0).log().requires_grad_()  # the same policies in another order
    logp = logits.log_softmax(1)
    R = reward - (logp - q.log())
    [expected] = torch.autograd.grad(loss(logp.exp(), q, R), logits, retain_graph=True)
    pull = weights(logp.exp().detach(), q, R.detach(), 0.0)
    [found] = torch.autograd.grad((pull * logp).sum(), logits)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
