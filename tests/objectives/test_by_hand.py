"""Loss, slopes and metrics of responses of one token, by hand: a row each. At the end, of two and one token.

They differ from an anchor by a log-ratio ρ; h = ρ_w − ρ_l is that of a pair, β = 0.4, σ the logistic
function. test_agreement.py compares loss and gradient at any numbers with plain loops; here are metrics,
edges, and numbers that can be followed on paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

import numpy as np
import pytest
from cases import FIELDS, at, of_one_token

from agro import Batch, objectives
from agro.objectives import Evaluation

BETA = 0.4
FAR = -9.0  # a log-prob that leaves room for any log-ratio


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


def nll(x: float) -> float:
    """-log σ(x)."""
    return log(1 + exp(-x))


@dataclass(frozen=True)
class Of:
    """An objective of responses with one token each, whose log-probs differ by `ratio` from an anchor's."""

    name: str
    ratio: Sequence[float]
    batch: Batch
    logp: np.ndarray
    options: dict[str, Any]

    def __call__(self) -> Evaluation:
        return at(self.logp, self.name, self.batch, **self.options)


def of(
    name: str, ratio: Sequence[float], reward: Sequence[float] = (), /, *, base: Any = FAR, **given: Any
) -> Of:
    """One group, and β = 0.4, unless `given` has others: fields of the batch as `batch`, else options.

    `base`: the anchor's log-probs, or one for all. β = None leaves the objective its own.
    """
    n = len(ratio)
    fields = {"staleness": [0] * n, **dict.fromkeys(FIELDS, base), **given.pop("batch", {})}
    batch = of_one_token(reward or [np.nan] * n, **fields)
    options = {key: value for key, value in ({"beta": BETA} | given).items() if value is not None}
    return Of(name, ratio, batch, np.add(base, ratio), options)


def of_pairs(name: str, ratio: Sequence[float], *pairs: tuple[int, int], batch: Any = (), **given: Any) -> Of:
    """Judged pairs (winner, loser) of one group."""
    return of(name, ratio, batch={"pairs": pairs, **dict(batch)}, **given)


ROWS: list[Any] = []


def row(
    said: str, given: Of, loss: float | None = None, slopes: Any = None, rel: float = 1e-12, **metrics: Any
) -> None:
    ROWS.append(pytest.param(given, loss, slopes, rel, metrics, id=f"{given.name}: {said} {given.ratio}"))


# KTO: σ(β(z₀ − ρ)) of a good response and σ(β(ρ − z₀)) of a bad one, averaged; z₀ is the mean of ρ or 0
v = [sigmoid(BETA * x) for x in (-0.6, -0.8, -0.2)]
slopes_of_kto = [sign * BETA * x * (1 - x) / 3 for sign, x in zip((-1, 1, -1), v)]
row(
    "good, bad, good",
    of("kto", [1.0, -0.4, 0.6], [1.0, 0.0, 1.0]),
    sum(v) / 3,
    slopes_of_kto,
    reference_point=0.4,
)
below = of("kto", [-1.0, -3.0], [1.0, 0.0])
row("a mean of −2 is no divergence", below, (sigmoid(BETA) + sigmoid(-3 * BETA)) / 2, reference_point=0)

# Online DPO: −log σ(β h) of the best over the worst; a group of equal rewards counts 0 in the mean.
s = BETA * sigmoid(-BETA) / 2
two = of("online_dpo", [1.0, 0.0, 2.0, -1.0], [1.0, 0.0, 1.0, 1.0], batch={"group": [*"aabb"]})
row("one group of two", two, nll(BETA) / 2, [-s, s, 0, 0], ordered_share=1, implicit_margin=BETA)
two_best = of("online_dpo", [0.3, 1.0, -0.5], [1.0, 0.0, 1.0])
row("all of the best make pairs", two_best, (nll(-BETA * 0.7) + nll(-BETA * 1.5)) / 2)
row("equal rewards", of("online_dpo", [1.0, 0.0], [1.0, 1.0]), 0.0, [0, 0], ordered_share=np.nan)

# GEPO: −log σ(β (ρ̄_good − ρ̄_bad)) and the variance of βρ over good responses.
row("all good", of("gepo", [0.8, 0.3, -0.4], [1.0] * 3), BETA**2 * np.var([0.8, 0.3, -0.4]))
half_good = of("gepo", [0.8, 0.3, -0.4, 0.0], [1.0, 1.0, 0.0, 0.0])
row("half good", half_good, nll(BETA * 0.75) + BETA**2 * 0.0625)
row("none good", of("gepo", [0.8, 0.3], [0.0, 0.0]), 0.0)

# SLiC: max(0, 1 − βh). SEPPO: where the winner's ρ is negative the sample is a second loser.
for h in (0.0, 4.0):
    slope = BETA if h < 2.5 else 0.0
    row(f"the hinge at {h}", of_pairs("slic", [0.0, h], (1, 0)), max(0.0, 1 - BETA * h), [slope, -slope])
row("both down", of_pairs("seppo", [-0.6, 0.2], (0, 1)), nll(-BETA * 0.4), [-BETA * sigmoid(BETA * 0.4)] * 2)
row("ρ_w = 0 fits", of_pairs("seppo", [0.0, 0.2], (0, 1)), nll(-BETA * 0.2))
row("fresh pairs", of_pairs("agent_q", [0.0, 0.0], (0, 1)), log(2), [-BETA / 2, BETA / 2], implicit_margin=0)
ties = of_pairs("dpo", [0.0] * 3, (0, 1), (0, 2), (1, 2), base=[-1.0, -2.0, -1.0])
row("ties are out of order, ranked right", ties, ordered_share=0, ranked_share=2 / 3)

# DPO is −log σ(βh); pair consistency with a gap of ½ is IPO's (β²/4)(h − 1/(2β))².
for h in (-1e4, -800.0, 800.0, 1e4):  # which no exponential may spoil
    row("far", of_pairs("dpo", [0.0, h], (1, 0), beta=1.0), max(-h, 0.0), [1, -1] if h < 0 else [0, 0])
    row("far", of_pairs("pair_consistency", [0.0, h], (1, 0), beta=1.0), (0.5 - h) ** 2 / 4)
for votes in ((1, 0), (5, 0), (3, 2), (0, 0)):  # VDPO ends at βh = logit p, VIPO at βh = (2p − 1)/2
    p = (votes[0] + 1) / (sum(votes) + 2)
    for name, h, slope in (("dpo", log(p / (1 - p)) / BETA, 0.0), ("dpo", 0.0, -BETA * (p - 0.5)),
                           ("pair_consistency", (2 * p - 1) / 2 / BETA, 0.0)):  # fmt: skip
        given = of_pairs(name, [h, 0.0], (0, 1), batch={"votes": [votes]}, votes="mean")
        row(f"{votes} votes", given, None, [slope, -slope])
# h = 1, 1.5 and −1.75 are averaged as the loss is, by group.
for name in ("dpo", "pair_consistency"):
    ratio, groups = [0.0, -1.0, 0.5, -2.0, 0.0, -0.25], {"group": [*"aaabbb"]}
    three = of_pairs(name, ratio, (0, 1), (2, 1), (3, 5), batch=groups)
    row("three pairs", three, ordered_share=0.5, implicit_margin=(0.4 + 0.6) / 4 - 0.7 / 2)

# The soft maximum of rewards 1 and 0 is their mean as β₁ → ∞, the largest as β₁ → 0.
row("V = ½", of("oapl", [0.0, 0.0], [1.0, 0.0], beta=None, value_beta=1e9), 0.25, rel=1e-6)
row("V = 1", of("oapl", [0.0, 0.0], [1.0, 0.0], beta=None, value_beta=1e-4), 0.5, rel=1e-3)


def clipped(name: str, w: float, reward: tuple[float, float] = (1.0, 0.0), **options: Any) -> Of:
    """Rewards 1 and 0, so A = ±½ without std; the second one's ratio is w. KL to a reference of ±½."""
    batch = {"ref_logp": [-2.5, -1.5]} | options.pop("batch", {})
    options = {"beta": None, "base": [-2.0, -2.0 - log(w)]} | options
    return of(name, [0.0, log(w)], reward, batch=batch, **options)


# w A / n: a wrong token's gradient ends at the dual clip of 3, and below the clip at 0.8.
for w, moves in ((0.7, False), (2.9, True), (3.1, False)):
    row(
        f"dual clip at {w}",
        clipped("grpo", w, std=False, dual_clip=3.0),
        None,
        [-0.25, w / 4 if moves else 0],
    )
# clip = (0.2, 0.3) holds (A > 0, w > 1.3) and (A < 0, w < 0.8) alone.
for w, better, moves in ((1.31, True, False), (1.29, True, True), (0.2, True, True), (0.79, False, False),
                         (0.81, False, True), (3.0, False, True)):  # fmt: skip
    A, share = (0.5 if better else -0.5), (0.0 if moves else 0.5)
    for ratio in ("behavior", "old"):
        given = clipped(
            "grpo", w, (0.0, 1.0) if better else (1.0, 0.0), std=False, clip=(0.2, 0.3), ratio=ratio
        )
        slopes = [A / 2, -w * A / 2 if moves else 0]
        row(f"clip of {ratio} at {w}", given, None, slopes, clipped_share=share, ratio_max=max(w, 1.0))
for ratios, share in (((0.5, 2.0), 0.0), ((2.0, 2.0), 0.5), ((2.0, 0.5), 1.0)):  # too far the right way
    row(f"clipped {share}", of("gspo", np.log(ratios).tolist(), [1, 0], beta=None), clipped_share=share)
# RAFT++ imitates the best one, by −min(w, 1.2)/n. REC's ring keeps w A = −w/2 again beyond w = 1 + 2.
for w, moves in ((0.1, True), (1.19, True), (1.21, False)):
    given = of("raft_pp", [log(w), 0.0], [1, 0], beta=None)
    row(f"{w}", given, -min(w, 1.2) / 2, [-w / 2 if moves else 0, 0], clipped_share=0.0 if moves else 0.5)
for w, moves in ((2.9, False), (3.1, True)):
    row(f"the ring at {w}", clipped("rec", w, mask="ring"), None, [-0.25, 0.25 if moves else 0])
# Weights that mask every token leave β/n times k3's slope, 1 − e^−d with d = ½ and −½.
masked = {"beta": 0.3, "weight": "mismatch", "weight_rule": "mask", "weight_max": 1.5}
twice = [-2.0 + log(2.0)] * 2
row(
    "the KL term has no weight",
    clipped("grpo", 1.0, batch={"old_logp": twice}, **masked),
    None,
    [0.15 * (1 - exp(-0.5)), 0.15 * (1 - exp(0.5))],
)


@pytest.mark.parametrize(("given", "loss", "slopes", "rel", "metrics"), ROWS)
def test_by_hand(given: Of, loss: float | None, slopes: Any, rel: float, metrics: dict[str, float]) -> None:
    out = given()
    if loss is not None:
        assert out.loss == pytest.approx(loss, rel=rel, abs=1e-15)
    if slopes is not None:
        np.testing.assert_allclose(out.grad[:, 1], slopes, rtol=1e-10, atol=1e-15)
    assert {key: out.metrics[key] for key in metrics} == pytest.approx(metrics, nan_ok=True, abs=1e-12)


@pytest.mark.parametrize("c", [-2.0, -0.1, 0.3, 2.0])
@pytest.mark.parametrize("h", [-1.0, 0.2, 0.35, 3.0])
def test_a_pair_is_ranked_where_the_loss_is_below_its_threshold(c: float, h: float) -> None:
    """log π_w ≥ log π_l exactly where DPO's loss is −log σ(βc) at most, c = f_l − f_w (arXiv 2405.19534)."""
    out = of_pairs("dpo", [h, 0.0], (0, 1), base=[-9.0 - c, -9.0])()
    assert (out.loss <= nll(BETA * c)) == bool(out.metrics["ranked_share"])
    assert out.metrics["ranked_share"] == (h - c >= 0)
    assert out.metrics["ranked_share_anchor"] == (c <= 0)
    assert out.metrics["ranked_share_ideal"] == 1
    smooth = of_pairs("dpo", [h, 0.0], (0, 1), base=[-9.0 - c, -9.0], label_smoothing=0.4)()
    assert smooth.metrics["ranked_share_ideal"] == (-c + log(0.6 / 0.4) / BETA >= 0)


def test_the_ranking_per_token() -> None:
    """−3 over two tokens is more than −2 over one, per token."""
    mask, ref = [[0, 1, 1], [0, 1, 0]], [[0, -1, -1]] * 2
    batch = Batch.of(mask=mask, reward=[0, 0], group=[0, 0], ref_logp=ref, pairs=[[0, 1]])
    found = objectives.evaluate("dpo", [[0, -1.5, -1.5], [0, -2.0, 0]], batch, beta=BETA).metrics
    assert (found["ranked_share"], found["ranked_share_per_token"]) == (0, 1)


def judged(name: str, *votes: tuple[int, int, float, float], **options: Any) -> Evaluation:
    """Two groups of three, and some of their pairs: who won, who lost, and the votes for both."""
    ratio, pairs = [0.0, -1.0, 0.5, -2.0, 0.0, -0.25], [(w, x) for w, x, _, _ in votes]
    batch = {"group": [*"aaabbb"], "votes": [(a, b) for _, _, a, b in votes]}
    return of_pairs(name, ratio, *pairs, batch=batch, imitation=0.3, **options)()


@pytest.mark.parametrize("name", ["dpo", "ipo", "slic", "seppo", "pair_consistency"])
def test_a_tie_is_no_pair_unless_votes_are_read(name: str) -> None:
    """The result is that of the pair with a winner alone; the ties are counted."""
    out = judged(name, (0, 1, 2, 2), (2, 1, 1, 0), (3, 4, 0.5, 0.5))  # group b has nothing else
    alone = judged(name, (2, 1, 1, 0), singletons="drop")
    assert out.metrics.pop("ties_dropped") == 2
    assert (out.loss, out.metrics) == (alone.loss, alone.metrics)
    np.testing.assert_array_equal(out.grad, alone.grad)


@pytest.mark.parametrize("name", ["dpo", "ipo", "pair_consistency"])
def test_votes_of_a_tie_are_read(name: str) -> None:
    """p = ½: the loss is least at h = 0, whichever of the two stands first; neither is praised."""
    how: dict[str, Any] = {"votes": "mean", "singletons": "drop"}
    of_winner = 0.0
    if name == "dpo":
        # −0.2 log σ(β ρ) in the one winner's log-prob, ρ = ½; of two pairs it is half of that
        how["winner"], of_winner = 0.2, 0.5 * 0.2 * 0.4 / (1 + exp(0.4 * 0.5))
    out, turned = (judged(name, (*tied, 2, 2), (2, 1, 1, 0), **how) for tied in ((0, 1), (1, 0)))
    assert out.loss == pytest.approx(turned.loss, rel=1e-14)
    np.testing.assert_allclose(out.grad, turned.grad, rtol=1e-13)
    assert out.metrics == turned.metrics
    assert out.grad[:3, 1].sum() == pytest.approx(-0.3 - of_winner, rel=1e-12)


# Two responses of one prompt, rewards 1 and 0, two tokens and one token.
# ρ = (0.2 + 0.1, -0.4) = (0.3, -0.4). At β = 0.5: R = (1 - 0.15, 0 + 0.2) = (0.85, 0.2), R_1 - R_2 = 0.65.
HAND: dict[str, Any] = {
    "mask": [[False, True, True], [False, True, False]],
    "reward": [1.0, 0.0],
    "group": ["a", "a"],
    "ref_logp": [[9.0, -1.2, -2.1], [9.0, -0.6, 9.0]],
    "behavior_logp": [
        [9.0, -1.0 - np.log(1.1), -2.0 - np.log(1.5)],
        [9.0, -1.0 - np.log(0.5), 9.0],
    ],  # w = 1.1, 1.5, 0.5
    "staleness": [0, 0],
}
HAND_LOGP = [[0.0, -1.0, -2.0], [0.0, -1.0, -3.0]]
HAND_KL = [[7.0, 0.1, 0.2], [7.0, 0.4, 7.0]]
# A of grpo: ±0.5 / (√0.5 + 1e-6), as std² = ½(1 - 0)². Its clip keeps w A = 1.1 A, limits 1.5 to 1.2 (A > 0)
# and, as A < 0, takes max(0.5, 0.8) = 0.8. Shares: ½ · ½ for each of two tokens, ½ for the one.
A = 0.5 / (0.5**0.5 + 1e-6)
HAND_CASES: list[tuple[str, dict[str, Any], float, list[float]]] = [
    # ¼ · 0.65² = 0.105625; reward: ∓½ · 0.65; loss: times 0.5
    ("agro", {"beta": 0.5}, 0.105625, [-0.325, -0.325, 0.325]),
    ("agro", {"beta": 0.5, "scale": "loss"}, 0.105625, [-0.1625, -0.1625, 0.1625]),
    # ½ (-0.5 · ±0.65 + ½ · 0.4225) = ½ (∓0.325 + 0.21125)
    ("agro_onpolicy", {"beta": 0.5}, 0.105625, [-0.056875, -0.056875, 0.268125]),
    # -½ (1 · -3 + -1 · -1) = 1
    ("rloo", {}, 1.0, [-0.5, -0.5, 0.5]),
    ("rloo", {"beta": 0.5}, 0.65, [-0.325, -0.325, 0.325]),
    # -½ · 1 · -3; means: -½ (½ · -3 - ½ · -1) = ½; b = 0.25: -½ (0.75 · -3 - 0.25 · -1) = 1
    ("reinforce", {}, 1.5, [-0.5, -0.5, 0.0]),
    ("reinforce", {"baseline": "mean"}, 0.5, [-0.25, -0.25, 0.25]),
    ("reinforce", {"baseline": 0.25}, 1.0, [-0.375, -0.375, 0.125]),
    # 1 + 0.5 · ½ · (0.3 + 0.4)
    ("kl_pg", {"beta": 0.5}, 1.175, [-0.5, -0.5, 0.5]),
    ("grpo", {}, -A * ((1.1 + 1.2) / 4 - 0.8 / 2), [-1.1 * A / 4, 0.0, 0.0]),
    (
        "grpo",
        {"std": False, "clip": (0.6, 0.5)},
        -0.5 * ((1.1 + 1.5) / 4 - 0.5 / 2),
        [-0.1375, -0.1875, 0.125],
    ),
    ("sft", {}, 4 / 3, [-1 / 3, -1 / 3, -1 / 3]),
]


@pytest.mark.parametrize(
    ("name", "options", "loss", "grad"), HAND_CASES, ids=[f"{n}-{o}" for n, o, *_ in HAND_CASES]
)
def test_two_responses_by_hand(name: str, options: dict[str, Any], loss: float, grad: list[float]) -> None:
    if "clip" in options:
        # w = 1.5 lies on the edge of the clip: a hair inside, so that rounding can't tip it over
        options = {**options, "clip": (0.6, 0.5 + 1e-9)}
    out = objectives.evaluate(name, HAND_LOGP, Batch.of(**HAND), streams={"kl": HAND_KL}, **options)
    assert out.loss == pytest.approx(loss, abs=1e-14)
    np.testing.assert_allclose(out.grad[np.array(HAND["mask"])], grad, rtol=1e-14, atol=1e-14)
    if name == "kl_pg":
        np.testing.assert_allclose(out.grads["kl"], [[0, 0.25, 0.25], [0, 0.25, 0]], atol=1e-14)
