"""The objectives a second time, one family a file; see `independent.base`."""

from independent import (
    advantages,
    clipped,
    consistency,
    corrections,
    critic,
    experts,
    labeled,
    policy_gradient,
    preference,
    teaching,
    token_weights,
    trust_region,
)
from independent.base import Case, Result, groups_of, imitating, shares, shifted, weighted, with_kl

__all__ = [
    "Case",
    "Result",
    "groups_of",
    "imitating",
    "names",
    "result",
    "shares",
    "shifted",
    "weighted",
    "with_kl",
]

FAMILIES = (
    consistency,
    policy_gradient,
    clipped,
    corrections,
    critic,
    experts,
    teaching,
    token_weights,
    trust_region,
    preference,
    labeled,
    advantages,
)


def names() -> set[str]:
    """The objectives that are there."""
    return {name for family in FAMILIES for name in vars(family)}


def result(name: str, case: Case, **options: object) -> Result:
    """Loss and gradients of an objective."""
    functions = [getattr(family, name) for family in FAMILIES if hasattr(family, name)]
    found: Result = functions[0](case, **options)
    return found
