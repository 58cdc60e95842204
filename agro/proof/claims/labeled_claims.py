"""Claims of agro.objectives.methods.labeled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from agro.proof.claim import DESCENT, Claims
from agro.proof.claims import preference_claims
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
}
