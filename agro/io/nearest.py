"""The name that was meant, for the answers to unknown ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Of several names that are as near the one that most people mean.
FAMOUS = ("grpo", "dpo", "ppo", "sft", "rloo", "kto", "dapo", "reinforce", "gspo", "agro", "ipo")


def nearest(name: str, names: Iterable[str], least: float = 0.5) -> str | None:
    """Of `names` the one that a slip turns into `name`: two letters swapped, or one more, less or another.

    Without any the most alike one whose likeness (of difflib, from 0 to 1) is `least` or more; else None.
    """
    known = list(names)
    slips = [(a, b, each) for each in known for a, b in [_rest(name.lower(), each.lower())]]
    swapped = [each for a, b, each in slips if len(a) == 2 and a == b[::-1]]
    near = swapped or [each for a, b, each in slips if len(a) < 2 and len(b) < 2]
    if not near:
        return next(iter(difflib.get_close_matches(name, known, 1, least)), None)
    return min(near, key=lambda each: FAMOUS.index(each) if each in FAMOUS else len(FAMOUS))


def _rest(a: str, b: str) -> tuple[str, str]:
    """What is left of two names without the letters that both begin and end with."""
    while a and b and a[0] == b[0]:
        a, b = a[1:], b[1:]
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    return a, b
