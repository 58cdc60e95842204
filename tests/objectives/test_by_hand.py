"""Loss, slopes and metrics of responses of one token, by hand: a row each.

They differ from an anchor by a log-ratio ρ; h = ρ_w − ρ_l is that of a pair, β = 0.4, σ the logistic
function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

import numpy as np
import pytest

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
    """An objective of responses with one token each: their log-ratios to an anchor, and their rewards."""

    name: str
    ratio: Sequence[float]
    batch: Batch
    logp: list[list[float]]
    options: dict[str, Any]

    def __call__(self) -> Evaluation:
        return objectives.evaluate(self.name, self.logp, self.batch, **self.options)

    def slopes(self) -> np.ndarray:
        return np.asarray(self().grad)[:, 1]


def of(
    name: str,
    ratio: Sequence[float],
    reward: Sequence[float] = (),
    /,
    *,
    at: Sequence[float] = (),
    **given: Any,
) -> Of:
    """One group, and β = 0.4, unless `given` has others: fields of the batch as `batch`, else options.

    `at`: the anchor's log-probs. β = None leaves the objective its own.
    """
    n = len(ratio)
    anchor = [[0.0, x] for x in at or [FAR] * n]
    fields: dict[str, Any] = {
        "mask": [[False, True]] * n,
        "reward": reward or [np.nan] * n,
        "group": [0] * n,
        "staleness": [0] * n,
        **dict.fromkeys(("ref_logp", "behavior_logp", "old_logp"), anchor),
    }
    batch = Batch.of(**fields | given.pop("batch", {}))
    logp = [[0.0, row[1] + x] for row, x in zip(anchor, ratio, strict=True)]
    options = {key: value for key, value in ({"beta": BETA} | given).items() if value is not None}
    return Of(name, ratio, batch, logp, options)


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
weights = {"threshold": 0.5, "desirable": 2.0, "undesirable": 3.0}
row("½ each, by λ", of("kto", [0.0, 0.0], [0.7, 0.3], **weights), 5 / 4, [-2 * BETA / 8, 3 * BETA / 8])
for kl in ("step", "none"):
    below, above = of("kto", [-1.0, -3.0], [1.0, 0.0], kl=kl), of("kto", [1.0, 3.0], [1.0, 0.0], kl="none")
    row(
        f"a mean of −2 is no divergence, {kl}",
        below,
        (sigmoid(BETA) + sigmoid(-3 * BETA)) / 2,
        reference_point=0,
    )
    row("without a reference point", above, (sigmoid(-BETA) + sigmoid(3 * BETA)) / 2, reference_point=0)

# Online DPO: −log σ(β h) of the best over the worst; a group of equal rewards counts 0 in the mean.
s = BETA * sigmoid(-BETA) / 2
two = of("online_dpo", [1.0, 0.0, 2.0, -1.0], [1.0, 0.0, 1.0, 1.0], batch={"group": [*"aabb"]})
row("one group of two", two, nll(BETA) / 2, [-s, s, 0, 0], ordered_share=1, implicit_margin=BETA)
row("equal rewards", of("online_dpo", [1.0, 0.0], [1.0, 1.0]), 0.0, [0, 0], ordered_share=np.nan)

# GEPO: −log σ(β (ρ̄_good − ρ̄_bad)) and the variance of βρ over good responses, or over those of one meaning.
good = np.var([0.8, 0.3, -0.4])
row("all good", of("gepo", [0.8, 0.3, -0.4], [1.0] * 3), BETA**2 * good)
row("all good, in nats", of("gepo", [0.8, 0.3, -0.4], [1.0] * 3, unit="nat"), good)
row("good ones alike", of("gepo", [0.8, 0.8], [1.0] * 2), 0.0)
row("none good", of("gepo", [0.8, 0.3], [0.0, 0.0]), 0.0)
for shift in (0.0, 0.7):  # ρ̄ are 0.55 and −0.2, the variance is 0.25²
    shifted = of("gepo", [x + shift for x in (0.8, 0.3, -0.4, 0.0)], [1.0, 1.0, 0.0, 0.0])
    row("a shift of all ρ says nothing", shifted, nll(BETA * 0.75) + BETA**2 * 0.0625)
meaning = {"batch": {"extra": {"meaning": [7.0, 7.0, 3.0]}}, "equivalent": "meaning"}
row(
    "variances 0.09 and 0 of two meanings", of("gepo", [0.8, 0.2, 5.0], [1.0] * 3, **meaning), BETA**2 * 0.045
)

# SLiC: max(0, 1 − βh); with log-probs in the place of ρ it is 1 − (log π_w − log π_l).
for h in (-1.0, 0.0, 2.0, 4.0):
    slope = BETA if h < 2.5 else 0.0
    row(f"the hinge at {h}", of_pairs("slic", [0.0, h], (1, 0)), max(0.0, 1 - BETA * h), [slope, -slope])
for pair, imitation, loss in (((1, 0), 0.0, 0.0), ((0, 1), 0.0, 9.0), ((0, 1), 0.1, 9.9)):
    given = of_pairs(
        "slic", [0.0, 0.0], pair, at=[-9.0, -1.0], anchor="none", beta=1.0, imitation=imitation or None
    )
    row(f"of log-probs −9 and −1, {pair} {imitation}", given, loss)

# SEPPO: where the winner's ρ is negative the sample is taken for a second loser, or dropped.
row("both down", of_pairs("seppo", [-0.6, 0.2], (0, 1)), nll(-BETA * 0.4), [-BETA * sigmoid(BETA * 0.4)] * 2)
dropped = of_pairs("seppo", [-0.6, 0.2], (0, 1), doubt="drop")
row("the winner alone", dropped, nll(-BETA * 0.6), [-BETA * sigmoid(BETA * 0.6), 0])
row("ρ_w = 0 fits", of_pairs("seppo", [0.0, 0.2], (0, 1)), nll(-BETA * 0.2))

# OPA-DPO: two DPO losses over the model's own answer, response 2, and −log σ(βρ) of both winners.
both = (nll(BETA * 1.2) + nll(BETA * 0.7)) / 2
own: Any = ("opa_dpo", [0.8, 0.3, -0.4], (0, 2), (1, 2))
row("no term of winners", of_pairs(*own, winner=0.0), both)
row("and the winners", of_pairs(*own), both + (nll(BETA * 0.8) + nll(BETA * 0.3)) / 2)
row("fresh pairs", of_pairs("agent_q", [0.0, 0.0], (0, 1)), log(2), [-BETA / 2, BETA / 2], implicit_margin=0)
ties = of_pairs("dpo", [0.0] * 3, (0, 1), (0, 2), (1, 2), at=[-1.0, -2.0, -1.0])
row("ties are out of order, ranked right", ties, ordered_share=0, ranked_share=2 / 3)
for pair, sign in (((0, 1), 1), ((1, 0), -1)):  # labels swapped at h = 0
    row(f"{pair}", of_pairs("dpo", [0.0, 0.0], pair), log(2), [-sign * BETA / 2, sign * BETA / 2])
    row(f"{pair}", of_pairs("ipo", [0.0, 0.0], pair), 1 / (4 * BETA**2), [-sign / BETA, sign / BETA])
row("least at its gap", of_pairs("ipo", [1 / (2 * BETA), 0.0], (0, 1)), 0.0, [0, 0])

# DPO is −log σ(βh); pair consistency with a gap of ½ is IPO's (β²/4)(h − 1/(2β))².
for h in (-3.0, -0.5, 0.0, 0.25, 2.0):
    for beta in (0.1, 1.3):
        slope, off = beta * sigmoid(-beta * h), h - 1 / (2 * beta)
        row(f"β = {beta}", of_pairs("dpo", [0.0, h], (1, 0), beta=beta), nll(beta * h), [slope, -slope])
        ipo = of_pairs("pair_consistency", [0.0, h], (1, 0), beta=beta)
        row(f"β = {beta}", ipo, beta**2 / 4 * off**2, [-(beta**2) / 2 * off, beta**2 / 2 * off])
    # 3 votes against 1: p = 4/6. VIPO differs by a constant, so that the slopes are the same.
    p, b = 4 / 6, 0.7
    mixed = b**2 / 2 * (p * (h - 1 / (2 * b)) + (1 - p) * (h + 1 / (2 * b)))
    voted: dict[str, Any] = {"batch": {"votes": [(3, 1)]}, "votes": "mean", "beta": b}
    row("by votes", of_pairs("dpo", [0.0, h], (1, 0), **voted), p * nll(b * h) + (1 - p) * nll(-b * h))
    row("by votes", of_pairs("pair_consistency", [0.0, h], (1, 0), **voted), None, [-mixed, mixed])
    smooth = of_pairs("dpo", [0.0, h], (1, 0), beta=b, label_smoothing=0.2)
    row("a fifth turned round", smooth, 0.8 * nll(b * h) + 0.2 * nll(-b * h))
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

# ¼ (r₁ − r₂ − β (ρ₁ − ρ₂))² is AGRO's of two responses and GVPO's, CoPG's and REBEL's over 4.
off = 0.75 - BETA * 0.9
for name, factor in (("gvpo", 1.0), ("vargrad", 1 / BETA**2), ("copg", 4.0), ("rebel", 4.0)):
    slope = factor * BETA / 2 * off
    row("of two", of(name, [0.7, -0.2], [1.0, 0.25]), factor * off**2 / 4, [-slope, slope])
for h in (-3.0, 0.0, 0.25, 2.0):  # IPO, whichever response is first
    off = h - 1 / (2 * BETA)
    slope = 2 * BETA**2 * off
    row("IPO", of("copg", [h, 0.0], [0.5, 0.0]), BETA**2 * off**2, [slope, -slope])
    row("IPO", of("copg", [0.0, h], [0.0, 0.5]), BETA**2 * off**2, [-slope, slope])
for name in ("copg", "rebel"):
    row("equal rewards draw ρ together", of(name, [0.5, -0.5], [1.0, 1.0]), BETA**2)
    row("and are content", of(name, [0.5, 0.5], [1.0, 1.0]), 0.0, [0, 0])
V = log((exp(1.0) + 1) / 2)  # the soft maximum of rewards 1 and 0: the mean as β₁ → ∞, the maximum as β₁ → 0
row("where it begins", of("oapl", [0.0, 0.0], [1.0, 0.0], beta=None), None, [-1e-3 * (1 - V), 1e-3 * V])
row("equal rewards", of("oapl", [0.0, 0.0], [1.0, 1.0], beta=None), None, [0, 0])
row("V = ½", of("oapl", [0.0, 0.0], [1.0, 0.0], beta=None, value_beta=1e9), 0.25, rel=1e-6)
row("V = 1", of("oapl", [0.0, 0.0], [1.0, 0.0], beta=None, value_beta=1e-4), 0.5, rel=1e-3)
apo = of(
    "apo", [(1.0 - 0.3) / BETA, (0.2 - 0.3) / BETA], [1.0, 0.2], batch={"extra": {"stored_value": [0.3, 0.3]}}
)
row("π* = π_ref exp((r − V)/β)", apo, 0.0, [0, 0])
# r − r̄ − τe with e = 1 of both: (0.5 − τ)² and (0.5 + τ)².
row("not centered in ρ", of("kimi", [1.0, 1.0], [1.0, 0.0]), (0.1**2 + 0.9**2) / 2, [-BETA * 0.1, BETA * 0.9])
# log π/π_ref = q/β − log Z, where Z = ∫₀¹ exp(q/β) dq = β (e^{1/β} − 1); rewards don't count.
log_z = log(0.5 * (exp(2.0) - 1))
quantiles = {"batch": {"extra": {"stored_quantile": [0.9, 0.2]}}, "beta": 0.5}
row("its optimum", of("qrpo", [1.8 - log_z, 0.4 - log_z], [7.0, -3.0], **quantiles), 0.0)
row("one moved by 1", of("qrpo", [2.8 - log_z, 0.4 - log_z], [7.0, -3.0], **quantiles), 0.5**2 / 2)


def clipped(name: str, w: float, reward: tuple[float, float] = (1.0, 0.0), **options: Any) -> Of:
    """Rewards 1 and 0, so A = ±½ without std; the second one's ratio is w. KL to a reference of ±½."""
    batch = {"ref_logp": [[0.0, -2.5], [0.0, -1.5]]} | options.pop("batch", {})
    return of(name, [0.0, log(w)], reward, at=[-2.0, -2.0 - log(w)], batch=batch, **{"beta": None} | options)


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
# A wrong response is dropped where log μ/π = 0.69 is above δ.
for delta, slope in ((0.7, 0.125), (0.5, 0.0)):
    row(f"δ = {delta}", clipped("deepseek_v32", 0.5, clip=(0.9, 0.9), off_policy=delta), None, [-0.25, slope])
# A ratio of 5 is kept where it is 0.04 of probability; one of 2.5 is masked where it is 0.3.
for new, old, right, is_kept in ((0.5, 0.2, 1, 0), (0.05, 0.01, 1, 1), (0.1, 0.4, 0, 0), (0.5, 0.2, 0, 1)):
    given = of("dppo", [log(new / old), 0.0], [float(right), 1.0 - right], at=[log(old), log(0.5)], beta=None)
    sign = -0.25 if right else 0.25
    row(f"{old} to {new}", given, None, [sign * new / old if is_kept else 0.0, -sign])
# −w A/2 + 2τe/2 with e = log 1.5.
row("pulled back", clipped("kimi_k25", 1.5, pull=0.1), None, [-0.25, 1.5 * 0.25 + 0.1 * log(1.5)])
# Weights that mask every token leave β/n times k3's slope, 1 − e^−d with d = ½ and −½.
masked = {"beta": 0.3, "weight": "mismatch", "weight_rule": "mask", "weight_max": 1.5}
twice = [[0.0, -2.0 + log(2.0)]] * 2
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


@pytest.mark.parametrize(
    ("given", "other", "factor"),
    [
        # of the best over the worst; all that are as good make pairs
        (of("online_dpo", [0.3, 1.0, -0.5], [0.5, 0.1, 0.9]), of_pairs("dpo", [0.3, 1.0, -0.5], (2, 1)), 1),
        (
            of("online_dpo", [0.3, 1.0, -0.5, 0.1], [1.0, 0.0, 1.0, 0.5]),
            of_pairs("dpo", [0.3, 1.0, -0.5, 0.1], (0, 1), (2, 1)),
            1,
        ),
        (of("gepo", [0.8, 0.3], [1.0, 0.0]), of_pairs("dpo", [0.8, 0.3], (0, 1)), 1),
        # the variance over n
        (of("gepo", [0.8, 0.3, 0.1], [1.0] * 3), of("agro", [0.8, 0.3, 0.1], [1.0] * 3, scale="loss"), 4 / 3),
        (of_pairs("seppo", [0.6, 0.2], (0, 1)), of_pairs("dpo", [0.6, 0.2], (0, 1)), 1),
    ],
    ids=lambda x: x.name if isinstance(x, Of) else str(round(x, 2)),
)  # fmt: skip
def test_two_are_one(given: Of, other: Of, factor: float) -> None:
    found, wanted = given(), other()
    assert found.loss == pytest.approx(factor * wanted.loss, rel=1e-13)
    np.testing.assert_allclose(found.grad, factor * wanted.grad, rtol=1e-12)


def test_two_spellings_share_the_weight_of_one_response() -> None:
    """Good ones: two spellings of one answer, and another answer. Without the variance, whose share is 0, the
    slope of each spelling is half that of the other answer; by reward all three have the same one."""
    rho, rewards, meaning = [0.8, 0.8, 0.3, -0.4], [1.0, 1.0, 1.0, 0.0], [7.0, 7.0, 3.0, 9.0]
    by_meaning = {"batch": {"extra": {"meaning": meaning}}, "equivalent": "meaning"}
    out = of("gepo", rho, rewards, variance=0.0, **by_meaning).slopes()
    assert out[0] == out[1] == pytest.approx(out[2] / 2, rel=1e-14)
    assert out.sum() == pytest.approx(0, abs=1e-15)
    by_reward = of("gepo", rho, rewards, variance=0.0).slopes()
    assert by_reward[0] == by_reward[2] == pytest.approx(-by_reward[3] / 3, rel=1e-14)
    once = of("gepo", rho[1:], rewards[1:], batch={"extra": {"meaning": meaning[1:]}}, equivalent="meaning")
    assert of("gepo", rho, rewards, **by_meaning)().loss == pytest.approx(once().loss, rel=1e-14)


@pytest.mark.parametrize("c", [-2.0, -0.1, 0.3, 2.0])
@pytest.mark.parametrize("h", [-1.0, 0.2, 0.35, 3.0])
def test_a_pair_is_ranked_where_the_loss_is_below_its_threshold(c: float, h: float) -> None:
    """log π_w ≥ log π_l exactly where DPO's loss is −log σ(βc) at most, c = f_l − f_w (arXiv 2405.19534)."""
    out = of_pairs("dpo", [h, 0.0], (0, 1), at=[-9.0 - c, -9.0])()
    assert (out.loss <= nll(BETA * c)) == bool(out.metrics["ranked_share"])
    assert out.metrics["ranked_share"] == (h - c >= 0)
    assert out.metrics["ranked_share_anchor"] == (c <= 0)
    assert out.metrics["ranked_share_ideal"] == 1
    smooth = of_pairs("dpo", [h, 0.0], (0, 1), at=[-9.0 - c, -9.0], label_smoothing=0.4)()
    assert smooth.metrics["ranked_share_ideal"] == (-c + log(0.6 / 0.4) / BETA >= 0)


def test_the_ranking_per_token() -> None:
    """−3 over two tokens is more than −2 over one, per token."""
    mask, ref = [[0, 1, 1], [0, 1, 0]], [[0, -1, -1]] * 2
    batch = Batch.of(mask=mask, reward=[0, 0], group=[0, 0], ref_logp=ref, pairs=[[0, 1]])
    found = objectives.evaluate("dpo", [[0, -1.5, -1.5], [0, -2.0, 0]], batch, beta=BETA).metrics
    assert (found["ranked_share"], found["ranked_share_per_token"]) == (0, 1)


def test_tbrm() -> None:
    """β/2 (ρ + V − r/β)²: ρ = 0.5, V = 2, r = 1 are 0; ρ = −0.5, V = 1, r = 0 are 0.05. Slope of ρ and
    V: β (ρ + V − r/β)/n."""
    given = of("tbrm", [0.5, -0.5], [1.0, 0.0], streams={"normalizer": [[0.0, 2.0], [0.0, 1.0]]})
    out = given()
    assert out.loss == pytest.approx((0.0 + 0.05) / 2, rel=1e-12)
    for stream in ("logp", "normalizer"):
        np.testing.assert_allclose(out.grads[stream][:, 1], [0.0, BETA * 0.5 / 2], atol=1e-15)


def test_fpa_of_a_pair_is_simper_with_other_weights() -> None:
    """SimPER's −exp(mean log π_w) + exp(mean log π_l) has the slopes ∓c/T; half of that, as two responses are
    averaged. λ = 0: c of π; else that of π̂, which is given."""
    logp, future = [[0.0, -1.0, -2.0], [0.0, -0.5, 9.0]], [[0.0, -2.0, -2.0], [0.0, -4.0, 9.0]]
    batch = Batch.of(mask=[[0, 1, 1], [0, 1, 0]], reward=[1.0, 0.0], group=[0, 0])
    own = objectives.evaluate("fpa", logp, batch, extrapolation=0.0)
    assert own.loss == pytest.approx((exp(-0.5) - exp(-1.5)) / 2, rel=1e-12)
    np.testing.assert_allclose(own.grad, [[0, *[-exp(-1.5) / 4] * 2], [0, exp(-0.5) / 2, 0]], rtol=1e-12)
    beyond = objectives.evaluate("fpa", logp, batch, streams={"future": future})
    np.testing.assert_allclose(beyond.grad, [[0, *[-exp(-2.0) / 4] * 2], [0, exp(-4.0) / 2, 0]], rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "slope"),
    [
        ({}, lambda w, d: 1 - np.exp(-d)),
        ({"kl": "k2"}, lambda w, d: d),
        ({"unbiased_kl": True}, lambda w, d: w * d),
        ({"kl": "k2", "unbiased_kl": True}, lambda w, d: w * (d + d**2 / 2)),
    ],
    ids=["k3", "k2", "k3 unbiased", "k2 unbiased"],
)
def test_the_slope_of_the_kl_term(options: dict[str, Any], slope: Any) -> None:
    """β/n times it; d = ½ and −½, w = 1 and 1.1."""
    with_kl, without = (clipped("grpo", 1.1, beta=beta, **options).slopes() for beta in (0.3, 0.0))
    np.testing.assert_allclose(
        with_kl - without, 0.15 * slope(np.array([1.0, 1.1]), np.array([0.5, -0.5])), atol=1e-15
    )


def test_a_constant_length_weighs_tokens_and_the_own_length_responses() -> None:
    """Lengths 1 and 2, w = 1: A/(n T) becomes A/(n 8), and over all three tokens A/3."""
    logp, mask = [[0.0, -2.0, 0.0], [0.0, -2.0, -1.0]], [[False, True, False], [False, True, True]]
    batch = Batch.of(mask=mask, reward=[1.0, 0.0], group=[0, 0], behavior_logp=logp)
    for average, first, second in (("response", 0.25, 0.125), (8.0, 1 / 32, 1 / 32), ("token", 1 / 6, 1 / 6)):
        out = objectives.evaluate("grpo", logp, batch, std=False, average=average)
        np.testing.assert_allclose(out.grad[:, 1], [-first, second], atol=1e-15)
