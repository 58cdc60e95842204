"""Texts that repeat: in a group, in held-out prompts, and prompts that are near-copies of each other.

Words are what spaces separate, lower-cased. Two responses are near-repeats where the sets of their runs of
`SHINGLE` words have a Jaccard similarity of at least `NEAR`. A text overlaps with a held-out one where both
have a run of `RUN` equal words (the 13-grams of GPT-3's report, arXiv 2005.14165, appendix C).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agro.io.near_copies import cluster_names
from agro.io.numbers import count

SHINGLE = 3
NEAR = 0.8
RUN = 13
NAMED, SHOWN = 3, 60  # clusters that are named, and characters of a prompt there
# Each run of 13 words has one of 7 words that begins at a multiple of 7: only these are looked up.
ANCHOR = (RUN + 1) // 2


def words_of(text: str) -> list[str]:
    return text.lower().split()


def shingles(words: Sequence[str]) -> frozenset[tuple[str, ...]]:
    """The runs of `SHINGLE` = 3 words; all words where there are fewer."""
    if len(words) <= SHINGLE:
        return frozenset([tuple(words)])
    return frozenset(zip(words, words[1:], words[2:], strict=False))


def near_repeats(texts: Iterable[str]) -> int:
    """How many texts are near-repeats of an earlier one, equal ones included."""
    earlier: list[frozenset[tuple[str, ...]]] = []
    repeats = 0
    for text in texts:
        runs = shingles(words_of(text))
        repeats += any(_similar(runs, other) for other in earlier)
        earlier.append(runs)
    return repeats


def _similar(a: frozenset[tuple[str, ...]], b: frozenset[tuple[str, ...]]) -> bool:
    if min(len(a), len(b)) < NEAR * max(len(a), len(b)):  # they can't be
        return False
    common = len(a & b)
    return common >= NEAR * (len(a) + len(b) - common)


@dataclass(frozen=True)
class PromptCopies:
    """Clusters of near-equal prompts. `prompts`: how many are in one of two or more.

    `largest`: sizes of the largest clusters, and in each the smallest id and the text of its prompt.
    """

    prompts: int
    clusters: int
    largest: tuple[tuple[int, str, str], ...]

    @classmethod
    def of(cls, texts: Mapping[str, str], least: float) -> PromptCopies:
        """`texts`: of prompts by their ids. `least`: as of data.near_copies."""
        sizes = Counter(cluster_names(texts, least).values())
        copied = sorted((-size, name) for name, size in sizes.items() if size > 1)
        largest = tuple((-size, name, texts[name]) for size, name in copied[:NAMED])  # the largest first
        return cls(-sum(size for size, _ in copied), len(copied), largest)

    @property
    def named(self) -> str:
        """The largest clusters in words."""
        parts = [f"{size} of {_short(text)!r} ({name})" for size, name, text in self.largest]
        return ", ".join(parts) + (", …" if self.clusters > len(parts) else "")

    def __str__(self) -> str:
        return f"{count(self.prompts)} prompts in {count(self.clusters)} clusters"

    def to_json(self) -> dict[str, Any]:
        largest = [{"size": size, "prompt_id": name, "prompt": text} for size, name, text in self.largest]
        return {"prompts": self.prompts, "clusters": self.clusters, "largest": largest}


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


@dataclass
class HeldOutOverlap:
    """Held-out prompts, and how many texts overlap with them.

    A prompt of fewer than `RUN` words overlaps with an equal text only.
    """

    path: str
    prompts: int = 0
    prompts_seen: set[int] = field(default_factory=set)  # numbers of those with an overlap
    stored_prompts: int = 0  # prompts of the store that overlap
    responses: int = 0
    _runs: dict[tuple[str, ...], int] = field(default_factory=dict)
    _anchors: set[tuple[str, ...]] = field(default_factory=set)
    _short: dict[tuple[str, ...], int] = field(default_factory=dict)

    def learn(self, text: str) -> None:
        """Add a held-out prompt."""
        words, number = words_of(text), self.prompts
        self.prompts += 1
        if len(words) < RUN:
            self._short.setdefault(tuple(words), number)
        for i in range(len(words) - RUN + 1):
            self._runs.setdefault(tuple(words[i : i + RUN]), number)
        for i in range(len(words) - ANCHOR + 1):
            self._anchors.add(tuple(words[i : i + ANCHOR]))

    def overlaps(self, text: str) -> bool:
        """Whether a text of the store does, which is counted for the held-out prompt."""
        words = words_of(text)
        if len(words) < RUN:
            number = self._short.get(tuple(words))
            if number is not None:
                self.prompts_seen.add(number)
            return number is not None
        overlaps = False
        for i in range(0, len(words) - ANCHOR + 1, ANCHOR):
            if tuple(words[i : i + ANCHOR]) in self._anchors:
                overlaps = self._around(words, i) or overlaps
        return overlaps

    def _around(self, words: Sequence[str], index: int) -> bool:
        """Whether a run of `RUN` words that has word `index` to `index + ANCHOR` is a held-out one."""
        overlaps = False
        for i in range(max(0, index + ANCHOR - RUN), min(index, len(words) - RUN) + 1):
            number = self._runs.get(tuple(words[i : i + RUN]))
            if number is not None:
                self.prompts_seen.add(number)
                overlaps = True
        return overlaps

    def to_json(self) -> dict[str, object]:
        return {
            "file": self.path,
            "prompts": self.prompts,
            "prompts_seen": len(self.prompts_seen),
            "stored_prompts": self.stored_prompts,
            "responses": self.responses,
            "words": RUN,
        }
