"""Claims of agro.objectives.preference."""

from __future__ import annotations

from dataclasses import replace

from agro.proof import formulas
from agro.proof import preference_formulas as of
from agro.proof.claim import DESCENT, Claims
from agro.proof.end_points import BY_VOTED_WINS, BY_WINS
from agro.proof.families import JUDGED, imitating, itself, weighted
from agro.proof.formulas import half_variance
from agro.proof.measuring import BETA

OF_BEHAVIOR = ("pairs", "behavior_logp")
VOTED = (*JUDGED, "votes")

CLAIMS: dict[str, tuple[Claims, ...]] = {
    "pair_consistency": (
        Claims(
            half_variance, "optimum", (*JUDGED, "reward"), {"gap": "reward"}, policy_gradient=itself, n=(2,)
        ),
        weighted(
            Claims(half_variance, "optimum", (*JUDGED, "reward"), {"gap": "reward"}, n=(2,)), "reference"
        ),
        # IPO: judgments that are drawn by σ(r − r') say ½ (2σ − 1), which isn't r − r'.
        Claims(formulas.ipo, "elsewhere", JUDGED, n=(2,), updates=300, end=BY_WINS),
        # Three votes of four say ⅔ after the uniform prior.
        Claims(
            lambda s: formulas.ipo(s, 0.8 / 3),
            "elsewhere",
            VOTED,
            {"gap": 0.8, "votes": "mean"},
            n=(2,),
            updates=0,
        ),
        Claims(
            lambda s: s.beta**2 / 4 * of.square(s, of.to_behavior(s)),
            "unknown",
            OF_BEHAVIOR,
            {"anchor": "behavior"},
            n=(2,),
            updates=0,
        ),
    ),
    "dpo": (
        Claims(formulas.bradley_terry, "optimum", JUDGED, n=(2,)),
        weighted(Claims(formulas.bradley_terry, "optimum", JUDGED, n=(2,)), "reference"),
        imitating(Claims(formulas.bradley_terry, "optimum", JUDGED, n=(2,)), formulas.wins),
        Claims(
            lambda s: formulas.bradley_terry(s, 0.9),
            "unknown",
            JUDGED,
            {"label_smoothing": 0.1},
            n=(2,),
            updates=0,
        ),
        Claims(
            lambda s: formulas.bradley_terry(s, 2 / 3),
            "unknown",
            VOTED,
            {"votes": "mean"},
            n=(2,),
            updates=0,
        ),
        Claims(
            lambda s: of.likelihood(s, of.to_behavior(s)),
            "unknown",
            OF_BEHAVIOR,
            {"anchor": "behavior"},
            n=(2,),
            updates=0,
        ),
        Claims(
            lambda s: of.likelihood(s, s.d) + 0.7 * of.winners(s),
            "unknown",
            JUDGED,
            {"winner": 0.7},
            reference_shift=False,
            n=(2,),
            updates=0,
        ),
    ),
    "ipo": (
        Claims(lambda s: of.square(s, s.d), "elsewhere", JUDGED, n=(2,), updates=300, end=BY_WINS),
        Claims(
            lambda s: of.square(s, s.d, 0.5 / 3), "elsewhere", VOTED, {"votes": "mean"}, n=(2,), updates=0
        ),
        Claims(
            lambda s: of.square(s, of.to_behavior(s)),
            "unknown",
            OF_BEHAVIOR,
            {"anchor": "behavior"},
            n=(2,),
            updates=0,
        ),
        Claims(
            lambda s: of.square(s, of.per_token(s)),
            "elsewhere",
            JUDGED,
            {"average": "token"},
            reference_shift=False,
            n=(2,),
            updates=0,
        ),
    ),
    "vipo": (
        Claims(
            lambda s: of.square(s, s.d, 0.5 / 3), "elsewhere", VOTED, n=(2,), updates=300, end=BY_VOTED_WINS
        ),
    ),
    "vdpo": (Claims(lambda s: of.likelihood(s, s.d, 2 / 3), "elsewhere", VOTED, n=(2,), updates=DESCENT),),
    "slic": (
        Claims(lambda s: of.hinge(s, s.d), "elsewhere", JUDGED, n=(2,), updates=DESCENT),
        Claims(lambda s: of.hinge(s, s.d, 0.2), "elsewhere", JUDGED, {"margin": 0.2}, n=(2,), updates=0),
        Claims(
            lambda s: of.hinge(s, of.to_behavior(s)),
            "unknown",
            OF_BEHAVIOR,
            {"anchor": "behavior"},
            n=(2,),
            updates=0,
        ),
        Claims(
            lambda s: of.hinge(s, s.policy.logp()),
            "elsewhere",
            ("pairs",),
            {"anchor": "none"},
            n=(2,),
            updates=0,
        ),
    ),
    "seppo": (
        Claims(
            lambda s: of.flipping(s, -1.0),
            "elsewhere",
            JUDGED,
            reference_shift=False,
            n=(2,),
            updates=DESCENT,
        ),
        Claims(
            lambda s: of.flipping(s, 0.0),
            "elsewhere",
            JUDGED,
            {"doubt": "drop"},
            reference_shift=False,
            n=(2,),
            updates=0,
        ),
    ),
    "agent_q": (
        Claims(
            lambda s: of.likelihood(s, of.to_behavior(s)), "unknown", OF_BEHAVIOR, n=(2,), updates=DESCENT
        ),
    ),
    "opa_dpo": (
        Claims(
            lambda s: of.likelihood(replace(s, beta=0.1), s.d) + of.winners(replace(s, beta=0.1)),
            "unknown",
            JUDGED,
            reference_shift=False,
            n=(2,),
            updates=0,
        ),
        Claims(
            lambda s: of.likelihood(s, s.d) + of.winners(s),
            "elsewhere",
            JUDGED,
            {"beta": BETA},
            reference_shift=False,
            n=(2,),
            updates=DESCENT,
        ),
    ),
}
