"""The groups that an import adds to: one prompt each, and responses of which some repeat."""

from __future__ import annotations

import json

from agro.errors import Refused
from agro.store.sqlite import Store
from agro.types import Sample, Text

AROUND = 20  # characters shown before the first difference of two prompts


class Groups:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._prompts: dict[str, tuple[Text, str]] = {}  # prompt_id: prompt, and where it is from
        self._responses: dict[str, set[int]] = {}  # prompt_id: hashes
        self._added: set[str] = set()

    @property
    def added(self) -> int:
        """The number of groups that got a sample."""
        return len(self._added)

    def look_up(self, prompt_ids: set[str]) -> None:
        """Read what the store has of these groups, before samples of them are added."""
        for prompt_id in prompt_ids - self._responses.keys():
            self._responses[prompt_id] = set()
            for sample in self._store.samples(prompt_id=prompt_id):
                self._responses[prompt_id].add(hash(sample.response))
                self._prompts.setdefault(prompt_id, (sample.prompt, "the store"))

    def check(self, sample: Sample, where: str) -> None:
        """Raise `Refused` where the group of a sample has another prompt."""
        prompt, place = self._prompts.setdefault(sample.prompt_id, (sample.prompt, where))
        if prompt != sample.prompt:
            before, now = _apart(_text(prompt), _text(sample.prompt))
            raise Refused(
                f"prompt_id: expected {sample.prompt_id} to name one prompt, {before!r} ({place}), "
                f"got {now!r}; give ids that are unique, or leave prompt_id out so that the prompt's hash is "
                "used"
            )

    def add(self, sample: Sample) -> bool:
        """Note a new sample; whether its response equals another one of its group."""
        self._added.add(sample.prompt_id)
        responses, key = self._responses[sample.prompt_id], hash(sample.response)
        is_repeat = key in responses
        responses.add(key)
        return is_repeat


def _text(prompt: Text) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)


def _apart(a: str, b: str) -> tuple[str, str]:
    """80 characters of each of two texts, from shortly before their first difference."""
    first = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    start = max(0, first - AROUND)
    dots = "…" if start else ""
    return dots + a[start : start + 80], dots + b[start : start + 80]
