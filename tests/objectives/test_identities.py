"""Of which other objective a gradient is a multiple, on random batches: a row each."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from cases import Case, change, draw, evaluate

BETA = 0.4


def fresh(seed: int, of: str = "logp", **how: Any) -> Case:
    """Sampled by the policy itself, or by that of old_logp."""
    case = draw(seed, **how)
    return change(case, behavior_logp=getattr(case, of))


def old_is_behavior(seed: int) -> Case:
    case = draw(seed)
    return change(case, old_logp=case.behavior_logp)


# The batch, an objective, and what it is so many times.
Row = tuple[Case, str, dict[str, Any], str, dict[str, Any], float]
ROWS: list[Row] = [
    # w = 1: −A/(n T). GMPO's geometric mean and the slope of SAPO's gate, 4 σ(0)², are 1.
    *((fresh(1), name, {}, "grpo", {}, 1.0) for name in ("gspo", "gmpo", "sapo")),
    (fresh(1), "deepseek_v32", {}, "grpo", {"std": False}, 1.0),
    # w = 1: −A over the number of all tokens. (The KL of mdpo has a gradient of 1 + log w.)
    *(
        (fresh(30, episodes=False), name, {}, "rec", {"advantage": "standardized"}, 1.0)
        for name in ("cispo", "minpro", "vespo", "m2po")
    ),
    *(
        (fresh(30, episodes=False), name, options, "rec", {}, 1.0)
        for name, options in (("aipo", {}), ("opmd_token", {}), ("mdpo", {"kl": "square"}))
    ),
    # No mismatch of engine and trainer.
    *(
        (fresh(4, "old_logp"), name, {}, "grpo", {"ratio": "old"}, 1.0)
        for name in ("tis", "mis", "icepop", "decoupled_ppo")
    ),
    (old_is_behavior(5), "remix", {}, "grpo", {"average": "token"}, 1.0),
    (draw(7), "bapo", {"target": 0.0}, "grpo", {"clip": (0.4, 0.2), "average": "token"}, 1.0),
    # Without skipped layers μ is the policy before the step; retrace weighs by λ at most.
    (old_is_behavior(32), "nested_reft", {}, "nested_reft", {"mismatch": "ignore"}, 1.0),
    (fresh(32), "nested_reft", {"mismatch": "retrace", "retrace": 0.7}, "nested_reft", {}, 0.7),
    # REINFORCE of another step.
    *((draw(37), "opmd", {"tau": tau}, "rec", {}, 1 / (1 + tau)) for tau in (0.5, 3.0)),
    *((draw(37), "opmd", {"tau": t, "form": "pairwise"}, "rec", {}, 2 * t / max(1, t)) for t in (0.5, 3.0)),
    # Squares of n responses: 2n, and 2 (n − 1)/(n β²), times AGRO's loss.
    *(
        (draw(n, sizes=(n, n)), name, {"beta": BETA}, "agro", {"beta": BETA, "scale": "loss"}, factor)
        for n in (2, 3, 5)
        for name, factor in (("copg", 2 * n), ("vargrad", 2 * (n - 1) / n / BETA**2))
    ),
    (draw(12), "agro", {"beta": 0.0}, "rloo", {}, 1.0),
    # The remark at equation 4: one gradient, on any data.
    (draw(13), "agro", {"beta": 0.3}, "rloo", {"beta": 0.3}, 1.0),
    *((draw(11), "agro", {"beta": b, "scale": "loss"}, "agro", {"beta": b}, b) for b in (0.0, 0.01, 4.0)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "name", "options", "other", "others", "factor"),
    ROWS,
    ids=[f"{r[1]}-{r[2]}-{r[3]}" for r in ROWS],
)
def test_a_gradient_is_that_of_another(
    case: Case, name: str, options: dict[str, Any], other: str, others: dict[str, Any], factor: float
) -> None:
    found, wanted = evaluate(case, name, options), evaluate(case, other, others)
    np.testing.assert_allclose(found.grad, factor * wanted.grad, rtol=1e-10, atol=1e-13)
    if name in ("copg", "vargrad"):
        assert found.loss == pytest.approx(factor * wanted.loss, rel=1e-12)
    if name == other == "agro":
        assert found.loss == wanted.loss
    if name == "agro" and other == "rloo" and options["beta"]:
        assert abs(found.loss - wanted.loss) > 0.01


def test_all_pairs_of_a_group_with_their_rewards_are_agro() -> None:
    """The mean over pairs of ¼ (R_i - R_j)² is ½ Var(R), n - 1 in it (statement 10 summed).

    It doesn't matter who is called the winner.
    """
    case = draw(0, sizes=(2, 5))
    known = dict(zip(case.response, case.group))
    every = [(a, b) for a, b in itertools.combinations(known, 2) if known[a] == known[b]]
    judged = change(case, pairs=every, votes=[(0.0, 0.0)] * len(every))
    turned = change(judged, pairs=[(b, a) for a, b in every])
    pairs, others = (
        evaluate(c, "pair_consistency", {"beta": 0.3, "gap": "reward"}) for c in (judged, turned)
    )
    agro = evaluate(case, "agro", {"beta": 0.3, "scale": "loss"})
    assert pairs.loss == pytest.approx(agro.loss, rel=1e-13)
    np.testing.assert_allclose(pairs.grad, agro.grad, atol=1e-14)
    np.testing.assert_array_equal(others.grad, pairs.grad)
