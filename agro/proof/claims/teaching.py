"""Claims of agro.objectives.teaching."""

from __future__ import annotations

from agro.proof import formulas
from agro.proof import teaching_formulas as teaching
from agro.proof.claim import DESCENT, Claims
from agro.proof.end_points import TEACHER

PROPOSALS = ("proposal", "proposal_mean")
SAMPLED = ("ref_logp", "behavior_logp")

CLAIMS: dict[str, tuple[Claims, ...]] = {
    "otr": (
        Claims(teaching.one_token, "elsewhere", PROPOSALS, n=(1, 2), updates=DESCENT),
        Claims(
            lambda s: teaching.one_token(s, -0.3, 1.5),
            "elsewhere",
            PROPOSALS,
            {"negative": -0.3, "temperature": 1.5},
            n=(1, 2),
            updates=0,
        ),
        # Given the draws; their mean is the first claim.
        Claims(
            lambda s: teaching.one_token(s, kappa=1.5, draws=4),
            "elsewhere",
            PROPOSALS,
            {"temperature": 1.5, "draws": 4.0, "seed": 3.0},
            n=(1, 2),
            updates=0,
        ),
    ),
    "distill": (
        Claims(teaching.distilled, "elsewhere", SAMPLED, n=(1, 2), updates=300, end=TEACHER),
        Claims(
            lambda s: teaching.distilled(s, "forward"),
            "elsewhere",
            ("ref_logp", "old_logp"),
            {"divergence": "forward", "ratio": "old"},
            reference_shift=False,
            n=(1, 2),
            updates=0,
        ),
        Claims(
            lambda s: teaching.distilled(s, 0.3),
            "elsewhere",
            SAMPLED,
            {"divergence": 0.3},
            reference_shift=False,
            n=(1, 2),
            updates=0,
        ),
        Claims(
            lambda s: teaching.sampled(s, "reverse", weighted=False),
            "elsewhere",
            ("ref_logp",),
            {"ratio": "none"},
            reference_shift=False,
            n=(1, 2),
            updates=0,
        ),
        Claims(teaching.exact, "elsewhere", ("kl",), {"over": "vocabulary"}, n=(1, 2), updates=0),
    ),
    "middle_band": (
        Claims(
            lambda s: formulas.imitation(s, teaching.in_band(s, 0.2, 0.7)),
            "elsewhere",
            (),
            {"low": 0.2, "high": 0.7},
            n=(1, 2),
            updates=100,
        ),
    ),
    "sophia": (Claims(formulas.imitation, "elsewhere", (), n=(1, 2), updates=0),),
    "reward_conditioned": (Claims(formulas.imitation, "elsewhere", (), n=(1, 2), updates=0),),
}
