"""One pass over all responses of a store, group by group: counts, rewards, lengths, repeats, and the fields
that explain rewards whatever the responses: users, tasks, graders.

Near-repeats are near-copies (`agro.io.near_copies`) with an index of at least `NEAR`. Words are what spaces
separate, lower-cased. A text overlaps with a held-out one where both have a run of `RUN` equal words (the
13-grams of GPT-3's report, arXiv 2005.14165, appendix C).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from agro.io.near_copies import cluster_names, clusters
from agro.io.numbers import count
from agro.io.terminal import cut
from agro.logs.normalizing import Components, Statistics
from agro.rollout.prompts import load_prompts
from agro.store import Store
from agro.store.survey import SurveyRow
from agro.types import Text, end_in

FEW = 8  # distinct values that are counted each
BINS = 24


@dataclass(slots=True)
class Spread:
    """Of numbers that come one by one.

    `values` counts each value while there are at most `FEW`, and is empty afterwards; `bins` counts those
    between two of `edges`, the last of which belongs to the last bin.
    """

    edges: Sequence[float] = ()
    count: int = 0
    lowest: float | None = None
    highest: float | None = None
    values: Counter[float] = field(default_factory=Counter)
    bins: list[int] = field(default_factory=list)
    _first: float = 0.0
    _sum: float = 0.0  # of differences to the first, so that large numbers lose no digits
    _squares: float = 0.0
    _many: bool = False
    _inner: Sequence[float] = ()  # edges between two bins

    def __post_init__(self) -> None:
        self.bins = [0] * max(len(self.edges) - 1, 0)
        self._inner = self.edges[1:-1]

    def add(self, value: float) -> None:
        if self.lowest is None or self.highest is None:
            self._first = self.lowest = self.highest = value
        elif value < self.lowest:
            self.lowest = value
        elif value > self.highest:
            self.highest = value
        self.count += 1
        difference = value - self._first
        self._sum += difference
        self._squares += difference * difference
        if not self._many:
            self.values[value] += 1
            if len(self.values) > FEW:
                self._many = True
                self.values.clear()
        if self.bins:
            self.bins[bisect_right(self._inner, value)] += 1

    @property
    def mean(self) -> float | None:
        """None of no numbers, and where their differences are too large for a float."""
        if not self.count or not math.isfinite(self._sum):
            return None
        return self._first + self._sum / self.count

    @property
    def std(self) -> float | None:
        """With n − 1; None of fewer than two numbers, and where their squares are too large for a float."""
        squares = self._squares - self._sum * self._sum / max(self.count, 1)
        if self.count < 2 or not math.isfinite(squares):
            return None
        return math.sqrt(max(squares, 0.0) / (self.count - 1))

    @property
    def se(self) -> float | None:
        """Standard error of the mean."""
        return None if self.std is None else self.std / math.sqrt(self.count)

    def to_json(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "mean": self.mean,
            "std": self.std,
            "min": self.lowest,
            "max": self.highest,
        }


def equal_bins(lowest: float, highest: float, count: int = BINS) -> list[float]:
    """Edges of so many equal bins."""
    if highest <= lowest:
        highest = lowest + 1
    width = (highest - lowest) / count
    return [lowest + width * i for i in range(count + 1)]


# Bins of lengths: their edges grow by √2.
LENGTHS = tuple(sorted({round(2 ** (i / 2)) for i in range(45)}))


NEAR = 0.8
RUN = 13
NAMED, SHOWN = 3, 60  # clusters that are named, and characters of a prompt there
# Each run of 13 words has one of 7 words that begins at a multiple of 7: only these are looked up.
ANCHOR = (RUN + 1) // 2


def words_of(text: str) -> list[str]:
    return text.lower().split()


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

    def __str__(self) -> str:
        """With the largest clusters."""
        parts = [f"{size} of {cut(text, SHOWN)!r} ({name})" for size, name, text in self.largest]
        named = ", ".join(parts) + (", …" if self.clusters > len(parts) else "")
        return f"{count(self.prompts)} in {count(self.clusters)} clusters: {named}"

    def to_json(self) -> dict[str, Any]:
        largest = [{"size": size, "prompt_id": name, "prompt": text} for size, name, text in self.largest]
        return {"prompts": self.prompts, "clusters": self.clusters, "largest": largest}


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


INSPECTED = 2000  # groups, about, whose responses are compared pairwise
LARGEST = 16  # responses of such a group, at most: of 20 what most of them share wouldn't count


@dataclass
class SourceSurvey:
    """What is known of the responses of one source."""

    rewards: Spread
    lengths: Spread = field(default_factory=lambda: Spread(LENGTHS))  # characters
    tokens: Spread = field(default_factory=lambda: Spread(LENGTHS))  # actions, of rows with tokens
    roles: set[str] = field(default_factory=set)
    rows: int = 0
    with_tokens: int = 0
    with_behavior: int = 0
    with_version: int = 0  # sampled by a run of agro
    ended: int = 0  # whose record says how they ended
    truncated: int = 0

    def to_json(self) -> dict[str, Any]:
        names = ("rows", "with_tokens", "with_behavior", "with_version", "ended", "truncated")
        return {
            **{name: getattr(self, name) for name in names},
            "roles": sorted(self.roles),
            "rewards": self.rewards.to_json(),
            "characters": self.lengths.to_json(),
            "tokens": self.tokens.to_json(),
        }


@dataclass
class StoreSurvey:
    """What a store has.

    A group is all responses to one prompt; the rows of one episode are one response, scored when all of them
    are. `quality` (TQ) and `coverage` (SACo) are those of Schweighofer et al. (arXiv 2111.04714) for each
    prompt: (mean r − min r) / (max r − min r) where rewards differ, and distinct responses / responses where
    there are two or more.
    """

    edges: Sequence[float]  # of the bins of rewards
    stride: int = 1  # every so many groups are looked at for near-repeats
    held_out: HeldOutOverlap | None = None
    copies: PromptCopies | None = None
    groups: int = 0
    responses: int = 0
    sizes: Counter[int] = field(default_factory=Counter)  # groups by responses
    scored_groups: int = 0  # with two or more scored responses
    equal: int = 0  # of those, with equal rewards
    equal_at: Counter[str] = field(default_factory=Counter)  # of those: all lowest, all highest, between
    mixed: int = 0  # groups with several sources
    repeats: int = 0  # responses equal to an earlier one of their group
    inspected: int = 0  # responses that were compared for near-repeats
    near_repeats: int = 0
    quality: Spread = field(default_factory=lambda: Spread(equal_bins(0, 1, 10)))
    coverage: Spread = field(default_factory=lambda: Spread(equal_bins(0, 1, 10)))
    truncated_rewards: Spread = field(default_factory=Spread)  # rewards
    complete_rewards: Spread = field(default_factory=Spread)
    sources: dict[str, SourceSurvey] = field(default_factory=dict)

    def add(self, rows: Sequence[SurveyRow]) -> None:
        """The rows of one group."""
        for row in rows:
            source = self.sources.get(row.source)
            if source is None:
                source = self.sources[row.source] = SourceSurvey(Spread(self.edges))
            source.rows += 1
            source.roles.add(row.role)
            source.with_tokens += row.knows_tokens
            source.with_behavior += row.knows_behavior
            source.with_version += row.version >= 0
            source.lengths.add(len(row.response))
            if row.length is not None:
                source.tokens.add(row.length)
            if row.reward is not None:
                source.rewards.add(row.reward)
            end = end_in(row.finish)
            if end in ("finished", "cut"):
                truncated = end == "cut"
                source.ended += 1
                source.truncated += truncated
                if row.reward is not None:
                    (self.truncated_rewards if truncated else self.complete_rewards).add(row.reward)
            if self.held_out is not None:
                self.held_out.responses += self.held_out.overlaps(row.response)
        ends = {row.id if row.episode is None else row.episode: row for row in rows}
        rewards = _rewards(rows)
        self.groups += 1
        self.responses += len(ends)
        self.sizes[len(ends)] += 1
        self.mixed += len({row.source for row in rows}) > 1
        self._rewards(rewards)
        if len(ends) > 1:
            responses = [row.response for row in ends.values()]
            distinct = len(set(responses))
            self.repeats += len(responses) - distinct
            self.coverage.add(distinct / len(responses))
            if self.groups % self.stride == 0:
                part = responses[:LARGEST]
                self.inspected += len(part)
                self.near_repeats += len(part) - len(set(clusters(part, NEAR).tolist()))

    def _rewards(self, rewards: Sequence[float]) -> None:
        """Of the scored responses of one group."""
        if len(rewards) < 2:
            return
        self.scored_groups += 1
        lowest, highest = min(rewards), max(rewards)
        if lowest < highest:
            mean = sum(rewards) / len(rewards)
            self.quality.add((mean - lowest) / (highest - lowest))
            return
        self.equal += 1
        level = "between"
        if highest == self.edges[0]:
            level = "lowest"
        elif lowest == self.edges[-1]:
            level = "highest"
        self.equal_at[level] += 1

    def total(self, name: str) -> int:
        """Over all sources."""
        return sum(getattr(source, name) for source in self.sources.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "responses": self.responses,
            "sizes": {str(size): count for size, count in sorted(self.sizes.items())},
            "groups_equal": self.equal,
            "groups_equal_at": dict(self.equal_at),
            "groups_of_one": self.sizes[1],
            "groups_mixed": self.mixed,
            "groups_with_rewards": self.scored_groups,
            "near_copies": None if self.copies is None else self.copies.to_json(),
            "repeats": self.repeats,
            "near_repeats": {"compared": self.inspected, "found": self.near_repeats},
            "trajectory_quality": self.quality.to_json(),
            "coverage": self.coverage.to_json(),
            "reward_of_truncated": self.truncated_rewards.to_json(),
            "reward_of_ended": self.complete_rewards.to_json(),
            "by_source": {name: source.to_json() for name, source in self.sources.items()},
            "held_out": None if self.held_out is None else self.held_out.to_json(),
        }


def survey(store: Store, groups: int, held_out: Path | None = None, near_copies: float = 1.0) -> StoreSurvey:
    """Survey a store of so many `groups`. `held_out`: a file of prompts that it shouldn't have.

    `near_copies`: as of the configuration's data.
    """
    lowest, highest = store.survey.spread_of_rewards() or (0.0, 1.0)
    edges = equal_bins(lowest, highest)
    edges[-1] = max(highest, edges[-1] if highest <= lowest else highest)
    result = StoreSurvey(edges, stride=max(1, groups // INSPECTED))
    texts = {prompt_id: plain(text) for prompt_id, text in store.survey.each_prompt()}
    result.copies = PromptCopies.of(texts, near_copies)
    if held_out is not None:
        result.held_out = HeldOutOverlap(str(held_out))
        for prompt in load_prompts(held_out):
            result.held_out.learn(plain(prompt.text))
        for text in texts.values():
            result.held_out.stored_prompts += result.held_out.overlaps(text)
    for rows in store.survey.each_group_rows():
        result.add(rows)
    return result


def plain(prompt: Text) -> str:
    """The words of a prompt: of messages all that is text."""
    if isinstance(prompt, str):
        return prompt
    return " ".join(m["content"] for m in prompt if isinstance(m.get("content"), str))


def _rewards(rows: Sequence[SurveyRow]) -> list[float]:
    """Of the scored responses."""
    if all(row.episode is None for row in rows):
        return [row.reward for row in rows if row.reward is not None]
    episode_rewards: dict[int | str, list[float | None]] = defaultdict(list)
    for row in rows:
        episode_rewards[row.id if row.episode is None else row.episode].append(row.reward)
    scored = []
    for rewards in episode_rewards.values():
        if rewards[0] is not None and None not in rewards:
            scored.append(rewards[0])
    return scored


MOST = 20_000  # rewards that are looked at
LEAST = 0.05  # share of the variance that is worth a word
CLEAR = 4.0  # standard errors above chance
# What agro itself writes of a response.
OF_RESPONSES = ("finish", "index", "last_turn", "reward_parts", "thought")


@dataclass(frozen=True)
class Explaining:
    """A field, how many values it has in so many rewards, and the share of their variance between these."""

    field: str
    values: int
    rewards: int
    share: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def explaining(store: Store) -> Explaining | None:
    """The field of `meta` that explains the most; None where none does clearly, and of rewards that are
    relative to a field already. A field has two rewards a value at least, on average."""
    by_field: dict[str, dict[Any, Statistics]] = {}
    for sample in islice(store.samples(scored=True), MOST):
        if "normalizer" in sample.meta:
            return None
        assert sample.reward is not None
        for name, value in sample.meta.items():
            if isinstance(value, str | int) and name not in OF_RESPONSES:
                by_field.setdefault(name, {}).setdefault(value, Statistics()).add(sample.reward)
    found = []
    for name, values in by_field.items():
        rewards = sum(each.count for each in values.values())
        components = Components.of(values.values())
        if 2 * len(values) <= rewards and components.surprise > CLEAR and components.share >= LEAST:
            found.append(Explaining(name, len(values), rewards, components.share))
    return max(found, key=lambda each: each.share, default=None)
