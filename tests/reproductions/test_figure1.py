"""Figure 1 on few problems: where both objectives go, by expectations and by pairs that are drawn."""

from __future__ import annotations

import pytest
import torch

from agro.proof.enumerable import Enumerable, Space
from agro.proof.expectation import DataDistribution, all_groups, gradient
from reproductions.descent import drawn_groups, table_of
from reproductions.figure1 import run

SPACES = [Space(3, 2, 2), Space(2, 3, 2, early_end=True)]


@pytest.mark.parametrize("space", SPACES)
def test_drawn_groups_have_the_expectation_of_all(space: Space) -> None:
    """The mean of 600 draws is within four of its standard errors, and the standard error is small."""
    policy, reference, behavior = (Enumerable.table(space, s) for s in (1, 2, 3))
    random = torch.Generator().manual_seed(7)
    reward = torch.rand(space.prompts, len(space.responses), generator=random, dtype=torch.float64)
    data = DataDistribution(behavior, reward)
    random.manual_seed(0)
    draws = (drawn_groups(data, reference, 3, random) for _ in range(600))
    found = torch.stack([gradient(policy, reference, batch, "agro", {"beta": 0.3}) for batch in draws])
    exact = gradient(policy, reference, all_groups(data, reference, 3), "agro", {"beta": 0.3})
    se = found.std(0) / 600**0.5
    assert se.max() < exact.abs().max() / 10
    assert ((found.mean(0) - exact).abs() <= 4 * se + 1e-12).all()


def test_any_distribution_is_a_table() -> None:
    space = SPACES[1]
    random = torch.Generator().manual_seed(3)
    logp = torch.randn(2, len(space.responses), generator=random, dtype=torch.float64).log_softmax(1)
    torch.testing.assert_close(table_of(space, logp).logp().detach(), logp)


def test_agro_arrives_and_the_policy_gradient_does_not(monkeypatch) -> None:
    monkeypatch.setattr(run, "BETAS", {0.3: 1})
    monkeypatch.setattr(run, "SIZES", (2,))
    found = run.measure(small=True)
    rows = {(r["objective"], r["behavior"]): r for r in found["rows"]}
    sampled = {(r["objective"], r["behavior"]): r for r in found["sampled"]}
    for behavior in ("reference", "uniform", "another", "mixture"):
        assert rows["agro", behavior]["worst"] < 1e-6  # after 400 updates
        assert rows["kl_pg", behavior]["median"][-1] > 0.01
        assert sampled["agro", behavior]["median"][-1] < 1e-6
        assert sampled["kl_pg", behavior]["median"][-1] > 0.01
    assert rows["agro", "lacks support"]["median"][-1] > 0.01
