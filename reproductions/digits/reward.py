"""How far a response goes along the right answer, from the start of it."""

from __future__ import annotations

from typing import Any


def prefix(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Matched prefix characters / characters of the answer; 1 for an immediate end where the answer is empty.

    The signature is the one that TRL's trainers call. Text after the complete answer costs nothing, as in the
    task's source.
    """
    return [
        matched(text, right) / len(right) if right else float(not text)
        for text, right in zip(completions, answer, strict=True)
    ]


def matched(text: str, right: str) -> int:
    """Characters of `right` that `text` begins with."""
    at = 0
    while at < min(len(text), len(right)) and text[at] == right[at]:
        at += 1
    return at
