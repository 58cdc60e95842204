"""Untrusted text on a terminal: its control characters are shown, never executed."""

from __future__ import annotations

import unicodedata

from agro.io.numbers import count
from agro.types import Text
from agro.types.conversation import without_tools

KEPT = "\n\t"
# Marks of direction, which reorder the text after them.
DIRECTIONS = frozenset("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def visible(text: str) -> str:
    """`text` with control characters, lone surrogates and marks of direction as escapes such as \\x1b.

    Line ends and tabs are kept.
    """
    shown = ""
    for c in text:
        if c not in KEPT and _is_control(c):
            c = c.encode("unicode_escape").decode()
        shown += c
    return shown


def _is_control(c: str) -> bool:
    return c in DIRECTIONS or unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")


def cut(text: str, limit: int) -> str:
    """The first `limit` characters, visible, and the number of the others; 0 shows all."""
    if not limit or len(text) <= limit:
        return visible(text)
    return f"{visible(text[:limit])} … {count(len(text) - limit)} more characters"


def plain(text: Text) -> str:
    """A prompt as one text: messages in order, each after its role, and the names of declared tools."""
    messages, tools = without_tools(text)
    if isinstance(messages, str):
        return messages
    names = [f"tools: {', '.join(tool['function']['name'] for tool in tools)}"] * bool(tools)
    return "\n".join([*names, *(f"{m['role']}: {m['content']}" for m in messages)])
