"""Claims of agro.objectives.supervised."""

from __future__ import annotations

from agro.proof import formulas
from agro.proof.claim import Claims
from agro.proof.end_points import SAMPLER
from agro.proof.families import weighted

CLAIMS: dict[str, tuple[Claims, ...]] = {
    "sft": (
        Claims(formulas.imitation, "elsewhere", (), n=(1, 2), end=SAMPLER),
        weighted(Claims(formulas.imitation, "elsewhere", (), n=(1, 2)), "reference", updates=0),
    ),
}
