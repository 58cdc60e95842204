"""Claims of agro.objectives.methods.labeled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from agro.proof.claim import DESCENT, Claims
from agro.proof.claims import preference_claims, truncated_claims
from agro.proof.families import GROUPED, REGULARIZED
from agro.proof.formulas import Situation


def kto_claims(expects: Callable[[Situation], Tensor], updates: int = 0, **options: Any) -> Claims:
    return Claims(
        expects,
        "elsewhere",
        REGULARIZED,
        {"threshold": 0.5, **options},
        shift=False,
        reference_shift=False,
        noise=False,
        n=(1, 2),
        updates=updates,
    )


def gepo_claims(expects: Callable[[Situation], Tensor], updates: int = 0, **options: Any) -> Claims:
    chosen = {"threshold": 0.5, **options}
    needs = (*GROUPED, "meaning") if options.get("equivalent") == "meaning" else GROUPED
    return Claims(expects, "elsewhere", needs, chosen, shift=False, noise=False, updates=updates)


def oorl_claims(weight: float, updates: int = 0, **options: Any) -> Claims:
    clipped = truncated_claims.masked("one_side", "is", 0.8, 1.2)
    by_meaning = options.get("equivalent") == "meaning"
    preference = preference_claims.equivalent_by_meaning if by_meaning else preference_claims.equivalent
    needs = (*GROUPED, "behavior_logp", "meaning") if by_meaning else (*GROUPED, "behavior_logp")
    return Claims(
        lambda s: truncated_claims.weighed(s, "reinforce_pp", clipped) + weight * preference(s, s.beta**2),
        "elsewhere",
        needs,
        {"threshold": 0.5, **options},
        shift=False,
        noise=False,
        n=(2,),
        updates=updates,
    )


CLAIMS: dict[str, tuple[Claims, ...]] = {
    "kto": (
        kto_claims(preference_claims.labels, updates=DESCENT),
        kto_claims(
            lambda s: preference_claims.labels(s, 0.5, 0.7, 1.3, kl=False),
            desirable=0.7,
            undesirable=1.3,
            kl="none",
        ),
    ),
    "online_dpo": (
        Claims(preference_claims.extremes, "elsewhere", GROUPED, noise=False, updates=DESCENT),
        Claims(
            lambda s: preference_claims.extremes(s, 0.9),
            "elsewhere",
            GROUPED,
            {"label_smoothing": 0.1},
            noise=False,
            updates=0,
        ),
    ),
    "gepo": (
        gepo_claims(lambda s: preference_claims.equivalent(s, s.beta**2), updates=DESCENT),
        gepo_claims(lambda s: preference_claims.equivalent(s, 0.3), variance=0.3, unit="nat"),
        gepo_claims(
            lambda s: preference_claims.equivalent_by_meaning(s, s.beta**2),
            updates=DESCENT,
            equivalent="meaning",
        ),
    ),
    "oorl": (
        oorl_claims(0.01, updates=DESCENT),
        oorl_claims(0.5, share=0.5),
        oorl_claims(0.01, equivalent="meaning"),
    ),
}
