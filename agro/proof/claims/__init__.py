"""What each objective's source claims: the expected gradient, what it needs, and where descent goes."""

from __future__ import annotations

from agro.errors import Refused
from agro.io import plugins
from agro.objectives.table import registered
from agro.proof.claim import Claims
from agro.proof.claims import (
    clipped_claims,
    consistency_claims,
    policy_gradient_claims,
    preference_claims,
    teaching_claims,
)

CLAIMS: dict[str, tuple[Claims, ...]] = {
    **consistency_claims.CLAIMS,
    **policy_gradient_claims.CLAIMS,
    **clipped_claims.CLAIMS,
    **teaching_claims.CLAIMS,
    **preference_claims.CLAIMS,
}


def claims_of(name: str) -> tuple[Claims, ...]:
    """The claims of an objective. A plug-in has them in `CLAIMS` of its module, by the name of its object, or
    of each objective if it has several. `CLAIMS` may be module:NAME, which only `agro prove` imports.

    Raises `Refused` if nothing is claimed.
    """
    if name in CLAIMS:
        return CLAIMS[name]
    location, _, attribute = plugins.absolute("objectives", registered(name), "agro prove").rpartition(":")
    key = name if registered(name) != name else attribute
    try:
        claims = plugins.load("objectives", f"{location}:CLAIMS", "agro prove")
    except Refused:
        claims = {}
    if isinstance(claims, str):
        claims = plugins.load("objectives", claims, "agro prove")
    try:
        return tuple(claims[key])
    except (LookupError, TypeError):
        raise Refused(
            f"agro prove: nothing is claimed of {name}. What to do: add CLAIMS to {location}, a dictionary "
            f"whose key {key!r} has a tuple of agro.proof.claim.Claims"
        ) from None
