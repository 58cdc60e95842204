"""The reward of the sums: 1 where what follows the last `#` is the answer, else 0."""

from __future__ import annotations


def right_sum(prompts: list[str], completions: list[str], answer: list[str], **_: object) -> list[float]:
    return [
        float("#" in text and text.rsplit("#", 1)[1] == a)
        for text, a in zip(completions, answer, strict=True)
    ]
