"""Objectives on judged pairs: equalities with the published losses, numbers by hand, and what is refused."""

from __future__ import annotations

from math import exp, log
from typing import Any

import numpy as np
import pytest
from cases import change, draw, evaluate

from agro import Batch, objectives
from agro.errors import Refused
from agro.objectives import Evaluation

BOTH = ("dpo", "pair_consistency")
# Rows 0 to 5 are ρ = log-ratios of one token each, so that h of (i, j) is RATIO[i] - RATIO[j].
RATIO = [0.0, -1.0, 0.5, -2.0, 0.0, -0.25]
SIX: dict[str, Any] = {
    "mask": [[False, True]] * 6,
    "reward": [np.nan] * 6,
    "group": [*"aaabbb"],
    "ref_logp": [[0.0, -3.0]] * 6,
    "ids": [f"sample {i}" for i in range(1, 7)],
}


def on(name: str, pairs: Any, ratio: Any = RATIO, *, batch: Any = (), **options: Any) -> Evaluation:
    given = SIX | {"pairs": pairs} | dict(batch)
    return objectives.evaluate(
        name, [[0.0, -3.0 + x] for x in ratio], Batch.of(**given), **{"beta": 0.4} | options
    )


def refusal(name: str, pairs: Any, **changes: Any) -> str:
    with pytest.raises(Refused) as caught:
        on(name, pairs, **changes)
    said = str(caught.value)
    assert f"objective {name}" in said
    assert "What to do" in said
    return said


H = [-3.0, -0.5, 0.0, 0.25, 2.0]


def of_h(name: str, h: float, **options: Any) -> Evaluation:
    """One pair in one group: the loss as a function of h."""
    batch = Batch.of(
        mask=[[0, 1]] * 2, reward=[0, 0], group=[0, 0], ref_logp=[[0, -9]] * 2, pairs=[[1, 0]], votes=[[3, 1]]
    )
    return objectives.evaluate(name, [[0.0, -9.0], [0.0, h - 9.0]], batch, **options)


@pytest.mark.parametrize("h", H)
@pytest.mark.parametrize("beta", [0.1, 1.3])
def test_dpo(h: float, beta: float) -> None:
    """-log σ(βh), and slopes of ∓β σ(-βh) in the winner (row 1) and the loser."""
    out = of_h("dpo", h, beta=beta)
    assert out.loss == pytest.approx(log(1 + exp(-beta * h)), rel=1e-14)
    slope = beta / (1 + exp(beta * h))
    np.testing.assert_allclose(out.grad, [[0, slope], [0, -slope]], rtol=1e-13)
    assert of_h("dpo", 0.0, beta=beta).loss == pytest.approx(log(2), rel=1e-15)


@pytest.mark.parametrize("h", H)
@pytest.mark.parametrize("tau", [0.1, 1.3])
def test_pair_consistency_with_a_gap_of_a_half_is_ipo(h: float, tau: float) -> None:
    """(β²/4) (h - 1/(2β))²; least at h = 1/(2β)."""
    out = of_h("pair_consistency", h, beta=tau)
    assert out.loss == pytest.approx(tau**2 / 4 * (h - 1 / (2 * tau)) ** 2, rel=1e-13)
    slope = tau**2 / 2 * (h - 1 / (2 * tau))
    np.testing.assert_allclose(out.grad, [[0, -slope], [0, slope]], rtol=1e-12)
    assert of_h("pair_consistency", 1 / (2 * tau), beta=tau).loss < 1e-30


@pytest.mark.parametrize("h", H)
def test_votes_are_vipo_and_vdpo(h: float) -> None:
    """3 votes against 1: p = 4/6. VIPO differs by a constant, so that the slopes are the same."""
    p, beta = 4 / 6, 0.7
    out = of_h("dpo", h, beta=beta, votes="mean")
    assert out.loss == pytest.approx(
        p * log(1 + exp(-beta * h)) + (1 - p) * log(1 + exp(beta * h)), rel=1e-13
    )
    slope = beta**2 / 4 * (p * 2 * (h - 1 / (2 * beta)) + (1 - p) * 2 * (h + 1 / (2 * beta)))
    out = of_h("pair_consistency", h, beta=beta, votes="mean")
    np.testing.assert_allclose(out.grad, [[0, -slope], [0, slope]], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("votes", "p"), [((1, 0), 2 / 3), ((5, 0), 6 / 7), ((3, 2), 4 / 7), ((0, 0), 1 / 2)])
def test_where_votes_end(votes: tuple[int, int], p: float) -> None:
    """VDPO is stationary at βh = logit p, VIPO at βh = (2p - 1)/2; at h = 0 VDPO's slope is -β (p - ½)."""

    def grad(name: str, h: float) -> float:
        batch = {"votes": [votes], "group": [0] * 6}
        return float(on(name, [[0, 1]], [h, 0, 0, 0, 0, 0], batch=batch, votes="mean").grad[0, 1])

    assert abs(grad("dpo", log(p / (1 - p)) / 0.4)) < 1e-16
    assert abs(grad("pair_consistency", (2 * p - 1) / 2 / 0.4)) < 1e-16
    assert grad("dpo", 0.0) == pytest.approx(-0.4 * (p - 0.5), abs=1e-16)


def test_label_smoothing_is_that_share_of_judgments_turned_round() -> None:
    for h in H:
        turned = of_h("dpo", -h, beta=0.7).loss
        smooth = of_h("dpo", h, beta=0.7, label_smoothing=0.2).loss
        assert smooth == pytest.approx(0.8 * of_h("dpo", h, beta=0.7).loss + 0.2 * turned, rel=1e-13)


def test_all_pairs_of_a_group_with_their_rewards_are_agro() -> None:
    """The mean over pairs of ¼ (R_i - R_j)² is ½ Var(R), n - 1 in it (statement 10 summed).

    It doesn't matter who is called the winner.
    """
    case = draw(0, sizes=(2, 5))
    members = {
        g: list(dict.fromkeys(y for y, h in zip(case.response, case.group) if h == g)) for g in case.group
    }
    every = [(a, b) for m in members.values() for i, a in enumerate(m) for b in m[:i]]
    judged = change(case, pairs=every, votes=[(0.0, 0.0)] * len(every))
    pairs = evaluate(judged, "pair_consistency", {"beta": 0.3, "gap": "reward"})
    agro = evaluate(case, "agro", {"beta": 0.3, "scale": "loss"})
    assert pairs.loss == pytest.approx(agro.loss, rel=1e-13)
    np.testing.assert_allclose(pairs.grad, agro.grad, atol=1e-14)
    turned = change(judged, pairs=[(b, a) for a, b in every])
    np.testing.assert_array_equal(
        evaluate(turned, "pair_consistency", {"beta": 0.3, "gap": "reward"}).grad, pairs.grad
    )


@pytest.mark.parametrize("h", [-1e4, -800.0, 800.0, 1e4])
def test_far_pairs_stay_finite(h: float) -> None:
    """β = 1: the loss is -h or e^-h, the slope -1 or 0, which no exponential may spoil."""
    out = of_h("dpo", h, beta=1.0)
    assert out.loss == pytest.approx(max(-h, 0.0), rel=1e-12, abs=1e-300)
    assert out.grad[1, 1] == (-1.0 if h < 0 else pytest.approx(0.0, abs=1e-300))
    assert of_h("pair_consistency", h, beta=1.0).loss == pytest.approx((0.5 - h) ** 2 / 4)


@pytest.mark.parametrize("name", BOTH)
def test_pairs_weigh_equally_in_a_group_and_groups_in_a_step(name: str) -> None:
    """Three judgments in group a and one in b. A pair judged twice counts twice; a row in none gets 0."""
    single = {p: on(name, [p], singletons="drop").loss for p in ((0, 1), (2, 1), (3, 5))}
    out = on(name, [(0, 1), (0, 1), (2, 1), (3, 5)])
    assert out.loss == pytest.approx((2 * single[0, 1] + single[2, 1]) / 6 + single[3, 5] / 2, rel=1e-14)
    assert (out.grad[4] == 0).all()
    assert (out.grad[[0, 1, 2, 3, 5], 1] != 0).all()
    weighed = on(name, [(0, 1), (3, 5)], batch={"weight": [3, 3, 3, 1, 1, 1]})
    assert weighed.loss == pytest.approx(0.75 * single[0, 1] + 0.25 * single[3, 5], rel=1e-14)


@pytest.mark.parametrize("name", BOTH)
def test_metrics(name: str) -> None:
    """h = 1, 1.5 and -1.75, so that βh = 0.4, 0.6 and -0.7; averaged as the loss is. A tie isn't in order."""
    found = on(name, [(0, 1), (2, 1), (3, 5)]).metrics
    assert found["ordered_share"] == 0.5
    assert found["implicit_margin"] == pytest.approx((0.4 + 0.6) / 4 - 0.7 / 2)
    assert on(name, [(0, 4)], batch={"group": [0] * 6}).metrics["ordered_share"] == 0


@pytest.mark.parametrize("name", BOTH)
def test_rewards_are_not_looked_at(name: str) -> None:
    """Two rows of one response with different ones, which an objective on rewards refuses."""
    batch = {"reward": [1.0, 0.0, 0.0, 1.0, 1.0, 1.0], "response": [0, 0, 1, 2, 3, 4]}
    assert np.isfinite(on(name, [(1, 2), (3, 4)], batch=batch).loss)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("pairs", [None, []])
def test_a_batch_without_pairs(name: str, pairs: Any) -> None:
    said = refusal(name, pairs)
    assert "needs pairs" in said
    assert "0 of 6 rows have it, 6 don't (for one: sample 1; sample 2; sample 3)" in said
    assert "agro import" in said


@pytest.mark.parametrize("name", BOTH)
def test_a_group_without_a_pair(name: str) -> None:
    said = refusal(name, [(3, 5)])
    assert "needs pairs" in said
    assert "1 of 2 groups have it, 1 don't (for one: a)" in said
    assert "objective.singletons=drop" in said
    out = on(name, [(3, 5)], singletons="drop")
    assert out.metrics["singletons_dropped"] == 1
    assert (out.grad[:3] == 0).all()


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    ("pair", "batch"), [((0, 3), {}), ((0, 0), {}), ((0, 1), {"response": [0, 0, 1, 2, 3, 4]})]
)
def test_a_pair_of_two_prompts_or_of_one_response(name: str, pair: tuple[int, int], batch: Any) -> None:
    said = refusal(name, [(0, 2), pair, (3, 4)], batch=batch)
    assert "expected each to join two responses to one prompt, but 1 of 3 pairs don't" in said
    assert f"sample 1 over sample {pair[1] + 1}" in said


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("votes", [None, [(3, 1), (np.nan, 2), (1, np.nan)]])
def test_unknown_votes(name: str, votes: Any) -> None:
    said = refusal(name, [(0, 1), (2, 1), (3, 5)], batch={"votes": votes}, votes="mean")
    assert f"of 3 pairs have it, {3 if votes is None else 2} don't" in said
    assert "sample 3 over sample 2; sample 4 over sample 6" in said
    assert 'votes = "ignore"' in said


def test_a_gap_that_is_known_and_estimated() -> None:
    batch = {"reward": [0.0] * 6, "votes": [(1, 0)] * 2}
    with pytest.raises(Refused, match='gap = "reward" knows the gap, but votes = "mean" estimates it'):
        on("pair_consistency", [(0, 1), (3, 5)], batch=batch, gap="reward", votes="mean")


def test_rewards_that_are_unknown() -> None:
    said = refusal("pair_consistency", [(0, 1), (3, 5)], gap="reward")
    assert "needs reward: 0 of 6 rows have it, 6 don't" in said


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dpo", {"beta": 0}),
        ("dpo", {"beta": -1.0}),
        ("dpo", {"label_smoothing": 0.5}),
        ("dpo", {"label_smoothing": -0.1}),
        ("dpo", {"votes": "count"}),
        ("pair_consistency", {"beta": 0.0}),
        ("pair_consistency", {"gap": 0}),
        ("pair_consistency", {"gap": "votes"}),
        ("pair_consistency", {"gap": float("nan")}),
    ],
)
def test_options(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=f"objective {name}: option {next(iter(options))}: expected "):
        on(name, [(0, 1), (3, 5)], **options)


TIED = {"votes": [(2.0, 2.0), (1.0, 0.0), (0.5, 0.5)]}  # group b has nothing else
TIED_PAIRS = [[0, 1], [2, 1], [3, 4]]


@pytest.mark.parametrize("name", ["dpo", "ipo", "slic", "seppo", "pair_consistency"])
def test_a_tie_is_no_pair_unless_votes_are_read(name: str) -> None:
    """The result is that of the pair with a winner alone; the ties are counted."""
    out = on(name, TIED_PAIRS, batch=TIED, imitation=0.3)
    alone = on(name, [[2, 1]], batch=TIED | {"votes": [(1.0, 0.0)]}, imitation=0.3, singletons="drop")
    assert out.metrics.pop("ties_dropped") == 2
    assert (out.loss, out.metrics) == (alone.loss, alone.metrics)
    np.testing.assert_array_equal(out.grad, alone.grad)


@pytest.mark.parametrize("name", ["dpo", "ipo", "pair_consistency"])
def test_votes_of_a_tie_are_read(name: str) -> None:
    """p = ½: the loss is least at h = 0, whichever of the two stands first; neither is praised."""
    extra: dict[str, Any] = {"winner": 0.2} if name == "dpo" else {}
    how: dict[str, Any] = {"votes": "mean", "imitation": 0.3, "singletons": "drop", **extra}
    out = on(name, [[0, 1], [2, 1]], batch={"votes": [(2.0, 2.0), (1.0, 0.0)]}, **how)
    turned = on(name, [[1, 0], [2, 1]], batch={"votes": [(2.0, 2.0), (1.0, 0.0)]}, **how)
    assert out.loss == pytest.approx(turned.loss, rel=1e-14)
    np.testing.assert_allclose(out.grad, turned.grad, rtol=1e-13)
    assert {k: v for k, v in out.metrics.items() if v != turned.metrics[k]} == {}
    assert out.grad[0, 1] == pytest.approx(
        -out.grad[1, 1] - out.grad[2, 1] - 0.3 - extra_slope(extra), rel=1e-12
    )


def extra_slope(extra: dict[str, Any]) -> float:
    """Of −0.2 log σ(β ρ) in the one winner's log-prob, ρ = ½; of two pairs it is half of that."""
    return 0.5 * 0.2 * 0.4 / (1 + exp(0.4 * 0.5)) if extra else 0.0


def test_ties_alone_train_nothing() -> None:
    batch = {"votes": [(1.0, 1.0)] * 2}
    assert "the votes of all 2 pairs are equal (for one: sample 1 over sample 2)" in refusal(
        "dpo", [[0, 1], [3, 4]], batch=batch
    )
    assert on("dpo", [[0, 1], [3, 4]], [0.0] * 6, batch=batch, votes="mean").loss == pytest.approx(log(2))
