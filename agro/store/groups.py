"""A group has one prompt: in all of a store a prompt_id names one, whoever adds samples."""

from __future__ import annotations

import json
from collections.abc import Iterable

from agro.errors import Refused
from agro.types import Text

AROUND = 20  # characters shown before the first difference of two prompts


class OtherPrompt(Refused):
    """A prompt_id that names another prompt already."""

    def __init__(self, prompt_id: str, known: Text, place: str, got: Text) -> None:
        """`place`: where the known prompt is."""
        before, now = _apart(_text(known), _text(got))
        super().__init__(
            f"prompt_id: expected {prompt_id} to name one prompt, {before!r} ({place}), got {now!r}; "
            "give ids that are unique, or leave prompt_id out so that the prompt's hash is used"
        )


def are_repeats(responses: Iterable[str]) -> list[bool]:
    """Whether each of the responses of a group, in the order of their ids, equals an earlier one."""
    seen = set[str]()
    repeats = []
    for response in responses:
        repeats.append(response in seen)
        seen.add(response)
    return repeats


def _text(prompt: Text) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)


def _apart(a: str, b: str) -> tuple[str, str]:
    """80 characters of each of two texts, from shortly before their first difference."""
    first = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    start = max(0, first - AROUND)
    dots = "…" if start else ""
    return dots + a[start : start + 80], dots + b[start : start + 80]
