"""Text that others wrote, shown on a terminal: it is read there, and never obeyed."""

from __future__ import annotations

import unicodedata

from agro.types import Text

KEPT = "\n\t"
DIRECTIONS = frozenset(
    "\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)  # reorder what follows


def visible(text: str) -> str:
    """`text` with control characters, lone surrogates and marks of direction as escapes such as \\x1b.

    Line ends and tabs stay: they harm nothing.
    """
    return "".join(c if c in KEPT or not _controls(c) else c.encode("unicode_escape").decode() for c in text)


def _controls(c: str) -> bool:
    return c in DIRECTIONS or unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")


def cut(text: str, limit: int) -> str:
    """The first `limit` characters, visible, and how many more there are; 0 shows all."""
    more = len(text) - limit if limit else 0
    return visible(text[:limit] if limit else text) + (f" … {more:,} more characters" if more > 0 else "")


def plain(text: Text) -> str:
    """A prompt as one text, messages one after the other under their roles."""
    return text if isinstance(text, str) else "\n".join(f"{m['role']}: {m['content']}" for m in text)
