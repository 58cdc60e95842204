"""The objectives a second time, one family a file; see `independent.base`."""

from importlib import import_module
from typing import Any

from independent.base import Case, Result

FAMILIES = [
    import_module(f"independent.{name}")
    for name in (
        *("consistency", "policy_gradient", "clipped", "corrections", "critic", "experts", "teaching"),
        *("token_weights", "trust_region", "preference", "labeled", "advantages"),
    )
]


def names() -> set[str]:
    """The objectives that are there."""
    return {name for family in FAMILIES for name in vars(family)}


def result(name: str, case: Case, **options: object) -> Result:
    """Loss and gradients of an objective."""
    functions: list[Any] = [getattr(family, name) for family in FAMILIES if hasattr(family, name)]
    found: Result = functions[0](case, **options)
    return found
