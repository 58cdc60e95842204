"""What each objective's source claims: the expected gradient, what it needs, and where descent goes."""

from __future__ import annotations

from agro.errors import Refused
from agro.io import plugins
from agro.proof.claim import Claims
from agro.proof.claims import (
    balanced_claims,
    clipped_claims,
    consistency_claims,
    critic_claims,
    experts_claims,
    labeled_claims,
    mirror_claims,
    policy_gradient_claims,
    preference_claims,
    rec_claims,
    teaching_claims,
    truncated_claims,
    trust_region_claims,
)

CLAIMS: dict[str, tuple[Claims, ...]] = {
    **consistency_claims.CLAIMS,
    **policy_gradient_claims.CLAIMS,
    **critic_claims.CLAIMS,
    **balanced_claims.CLAIMS,
    **clipped_claims.CLAIMS,
    **clipped_claims.CORRECTION_CLAIMS,
    **experts_claims.CLAIMS,
    **mirror_claims.CLAIMS,
    **rec_claims.CLAIMS,
    **teaching_claims.CLAIMS,
    **truncated_claims.CLAIMS,
    **trust_region_claims.CLAIMS,
    **preference_claims.CLAIMS,
    **labeled_claims.CLAIMS,
    **teaching_claims.SUPERVISED_CLAIMS,
}


def claims_of(name: str) -> tuple[Claims, ...]:
    """Of an objective; of a plug-in those that `CLAIMS` of its module has, by the name of its object.

    Raises `Refused` where nothing is claimed.
    """
    if name in CLAIMS:
        return CLAIMS[name]
    location, _, attribute = plugins.absolute("objectives", name, "agro prove").rpartition(":")
    try:
        return tuple(plugins.load("objectives", f"{location}:CLAIMS", "agro prove")[attribute])
    except (Refused, LookupError, TypeError):
        raise Refused(
            f"agro prove: nothing is claimed of {name}. What to do: add CLAIMS to {location}, a dictionary "
            f"that has by the name {attribute!r} a tuple of agro.proof.claim.Claims"
        ) from None
