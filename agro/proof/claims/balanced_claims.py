"""Claims of agro.objectives.methods.balanced.

Sums over the step are those of its groups: groups have one size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from agro.proof.claim import Claims
from agro.proof.claims.trust_region_claims import bapo, bapo_code
from agro.proof.families import BEHAVIOR, OLD, ratio_claims

LOW, HIGH = (0.6, 0.9, 0.02), (1.2, 3.0, 0.05)
LOW_CODE, HIGH_CODE = (0.8, 0.95, 0.05), (1.2, 2.0, 0.1)
OTHER_LOW, OTHER_HIGH = (0.5, 0.7, 0.1), (1.1, 1.9, 0.2)
OTHER: dict[str, Any] = {"criterion": "gradient", "low": OTHER_LOW, "high": OTHER_HIGH}


_pair_claims = partial(ratio_claims, n=(2,))

CLAIMS: dict[str, tuple[Claims, ...]] = {
    "bapo": (
        _pair_claims(lambda s: bapo(s, 0.4 / 0.6, LOW, HIGH), updates=200),
        _pair_claims(lambda s: bapo(s, 0.6 / 0.4, OTHER_LOW, OTHER_HIGH, gradient=True), target=0.6, **OTHER),
        _pair_claims(
            lambda s: bapo(s, 0.4 / 0.6, LOW, HIGH), (*BEHAVIOR, "old_logp"), drifted=True, ratio="old"
        ),
    ),
    "bapo_code": (
        _pair_claims(lambda s: bapo_code(s, 0.5, LOW_CODE, HIGH_CODE), updates=200),
        _pair_claims(lambda s: bapo_code(s, 1.1, OTHER_LOW, OTHER_HIGH, gradient=True), target=1.1, **OTHER),
        _pair_claims(lambda s: bapo_code(s, 0.5, LOW_CODE, HIGH_CODE), OLD, drifted=True, ratio="old"),
    ),
}
