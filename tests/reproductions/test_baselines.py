"""Ends of baselines with noisy rewards, the mass of a log, and one response a prompt, on few problems."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agro.objectives.reduce import Groups
from agro.objectives.weights import excess
from agro.proof.enumerable import kl
from agro.types import Batch
from reproductions.baselines import enumerated, run, shared, users


def worst(name: str, noise: float, n: int = 3) -> float:
    reference, behavior, reward = run.drawn(4, 1, 4, seed=0)
    problems = enumerated.Problems(reference, behavior, reward, noise=noise)
    found = run.measured(problems, enumerated.gradient_of_groups(problems, name, 0.5, n), [reference])
    assert found["arrived"] == found["of"] == 4
    return found["worst"]


@pytest.mark.parametrize("name", ["mean", "weighted", "optimal", "mixed", "other groups"])
def test_baselines_whose_shares_dont_read_the_groups_rewards_end_at_the_optimum(name: str) -> None:
    assert worst(name, 0.5) < 1e-9


@pytest.mark.parametrize("name", ["lower", "balanced"])
def test_the_lower_one_of_two_means_doesnt_with_noise(name: str) -> None:
    assert worst(name, 0.0) < 1e-9
    assert worst(name, 0.5) > 0.01


def test_a_pooled_batch_ends_elsewhere_where_values_differ() -> None:
    rows = {(r["stands"], r["spread"]): r["worst"] for r in run.single(2) if r["weight"] == "root"}
    assert rows["mean of the batch", 0.0] < 1e-9
    assert rows["mean of the batch", 0.25] < rows["mean of the batch", 1.0]
    assert rows["mean of the batch", 1.0] > 0.05
    assert rows["a value that is learned", 1.0] < 1e-9


@pytest.mark.parametrize("of_reference", [True, False])
def test_centering_takes_away_what_a_user_gives_on_top(of_reference: bool) -> None:
    """Users that differ in nothing else: the batch is off by it, centered rewards and a user's own aren't.
    What the V* of a user's prompts are apart remains, whatever is given on top."""

    def far(name: str, lenience: float, spread: float) -> float:
        made = run.drawn(2, users.PROMPTS, users.RESPONSES, seed=13)
        problems = users.tables(made, alike=True, of_reference=of_reference, lenience=lenience, spread=spread)
        found = run.measured(problems, users.updates(problems)[name], [problems.reference])
        assert found["arrived"] == 2
        return found["worst"]

    assert far("the batch", 1.0, 0.0) > 0.1
    for name in ("the batch, centered by user", "the responses of a user"):
        assert far(name, 1.0, 0.0) < 1e-9
        assert far(name, 1.0, 0.25) == pytest.approx(far("the batch", 0.0, 0.25), abs=1e-6)


def test_the_mass_of_the_log_is_held_by_other_groups() -> None:
    log = shared.Log(seeds=6, noise=0.0, beta=0.2)
    mass = {
        name: shared.mass_kept(name, 0.5, log, 0.3, 300)[0].mean() for name in ("optimal", "other groups")
    }
    assert mass["optimal"] < -0.3
    assert mass["other groups"] > -0.05


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("weighted", "weighted"),
        ("optimal", "optimal"),
        ("balanced", "balanced"),
    ],
)
def test_the_baselines_are_the_librarys(name: str, kind: str) -> None:
    """One step of five groups of three responses of one token."""
    generator = torch.Generator().manual_seed(3)

    def draw() -> Tensor:
        return torch.randn(1, 5, 3, generator=generator, dtype=torch.float64)

    logp, R = draw().sigmoid().log(), draw()
    ref_logp = logp + draw()
    force = shared.forces(name, 1.0, logp, ref_logp, R).flatten()
    batch = Batch.of(
        mask=torch.tensor([[False, True]]).expand(15, 2),  # the first column is the prompt
        group=torch.arange(5).repeat_interleave(3).tolist(),
        reward=R.flatten(),
    )
    groups = Groups.of(batch)
    weight_BT = (logp - ref_logp).clamp(max=0).exp().view(15, 1).expand(15, 2)
    slope_N = (R.mean(-1, keepdim=True) - R).flatten()
    excess_G = excess(kind, groups, slope_N, weight_BT, logp.view(15, 1).expand(15, 2))
    expected = -weight_BT[:, 0] * (slope_N - excess_G[groups.group])
    torch.testing.assert_close(force, expected)


def test_an_end_is_where_the_update_vanishes() -> None:
    reference, behavior, reward = run.drawn(2, 1, 4, seed=1)
    problems = enumerated.Problems(reference, behavior, reward)
    update = enumerated.gradient_of_groups(problems, "mean", 0.0, 2)
    logp, arrived = enumerated.end(reference, update)
    assert arrived.all()
    torch.testing.assert_close(logp, problems.optimum, atol=1e-7, rtol=0)
    assert kl(reference, problems.optimum).min() > 0.01
