"""A reward that responses of random bytes differ in."""

from __future__ import annotations

from typing import Any


def bytes_above(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """The share of characters beyond ASCII."""
    return [sum(ord(c) > 127 for c in text) / max(1, len(text)) for text in completions]
