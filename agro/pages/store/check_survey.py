"""One pass over all responses of a store, group by group: counts, rewards, lengths, repeats, and the fields
that explain rewards whatever the responses: users, tasks, graders."""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from agro.io.terminal import first_of, plain
from agro.logs.importing import Components, Statistics
from agro.rollout.prompts import load_prompts
from agro.store import Store
from agro.store.split import clusters, normalized
from agro.store.survey import SurveyRow
from agro.types import Prompt, Text, end_in


def numbers() -> array[float]:
    """Those that come one by one."""
    return array("d")


def spread(numbers: Sequence[float]) -> dict[str, Any]:
    """Number, mean, standard deviation (with n − 1), least and largest; None where there are too few, and
    where differences or squares are too large for a float."""
    if not numbers:
        return {"count": 0, **dict.fromkeys(("mean", "std", "min", "max"))}
    first = numbers[0]  # from which the others are counted: large numbers lose no digits
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(first + (np.array(numbers) - first).mean())
        std = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else math.nan
    return {
        "count": len(numbers),
        "mean": mean if math.isfinite(mean) else None,
        "std": std if math.isfinite(std) else None,
        "min": min(numbers),
        "max": max(numbers),
    }


@dataclass(frozen=True)
class PromptCopies:
    """Clusters of near-equal prompts. `prompts`: how many are in one of two or more."""

    prompts: int
    clusters: int

    @classmethod
    def of(cls, texts: Sequence[str], least: float) -> PromptCopies:
        """`least`: as of data.near_copies."""
        sizes = np.unique(clusters(texts, least), return_counts=True)[1]
        copied = sizes[sizes > 1]
        return cls(int(copied.sum()), len(copied))


@dataclass(frozen=True)
class Contamination:
    """Ids of the prompts that are among `trained` ones, up to case, spaces and labels, and of near-copies."""

    prompts: int
    trained: int
    exact: tuple[str, ...]
    near: tuple[str, ...]

    @classmethod
    def of(cls, prompts: Sequence[Prompt], trained: Sequence[Text], least: float) -> Contamination:
        """`least`: how alike near-copies are, as `data.near_copies`."""
        seen, asked = ([plain(text) for text in texts] for texts in (trained, [p.text for p in prompts]))
        labels = clusters([*seen, *asked], least).tolist()
        of_trained, words = set(labels[: len(seen)]), set(map(normalized, seen))
        exact = tuple(p.id for p, text in zip(prompts, asked, strict=True) if normalized(text) in words)
        near = tuple(
            p.id
            for p, label in zip(prompts, labels[len(seen) :], strict=True)
            if label in of_trained and p.id not in exact
        )
        return cls(len(prompts), len(trained), exact, near)

    @property
    def sentence(self) -> str:
        parts = []
        for ids, what in (
            (self.exact, "were trained on"),
            (self.near, "are near-copies of training prompts"),
        ):
            parts.append(f"{len(ids)} {what}" + (f" ({first_of(ids)})" if ids else ""))
        return f"of {self.prompts} prompts {', '.join(parts)}; the run has {self.trained} training prompts"


# Rows of a source: all, those whose version says that a run of agro sampled them, whose record says how they
# ended, and of these those that were cut off.
COUNTED = ("rows", "with_tokens", "with_behavior", "with_version", "ended", "truncated")


@dataclass
class SourceSurvey:
    """What is known of the responses of one source."""

    rewards: array[float] = field(default_factory=numbers)
    lengths: array[float] = field(default_factory=numbers)  # characters
    tokens: array[float] = field(default_factory=numbers)  # actions, of rows with tokens
    roles: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)  # of `COUNTED`

    def to_json(self) -> dict[str, Any]:
        return {
            **{name: self.counts[name] for name in COUNTED},
            "roles": sorted(self.roles),
            "rewards": spread(self.rewards),
            "characters": spread(self.lengths),
            "tokens": spread(self.tokens),
        }


@dataclass
class StoreSurvey:
    """What a store has.

    A group is all responses to one prompt; the rows of one episode are one response, scored when all of them
    are. `quality` (TQ) and `coverage` (SACo) are those of Schweighofer et al. (arXiv 2111.04714) for each
    prompt: (mean r − min r) / (max r − min r) where rewards differ, and distinct responses / responses where
    there are two or more.
    """

    held_out: Contamination | None = None
    copies: PromptCopies | None = None
    groups: int = 0
    responses: int = 0
    sizes: Counter[int] = field(default_factory=Counter)  # groups by responses
    scored_groups: int = 0  # with two or more scored responses
    equal: int = 0  # of those, with equal rewards
    repeats: int = 0  # responses equal to an earlier one of their group
    quality: array[float] = field(default_factory=numbers)
    coverage: array[float] = field(default_factory=numbers)
    sources: dict[str, SourceSurvey] = field(default_factory=lambda: defaultdict(SourceSurvey))

    def add(self, rows: Sequence[SurveyRow]) -> None:
        """The rows of one group."""
        for row in rows:
            source = self.sources[row.source]
            source.roles.add(row.role)
            end = end_in(row.finish)
            source.counts["rows"] += 1
            source.counts["with_tokens"] += row.knows_tokens
            source.counts["with_behavior"] += row.knows_behavior
            source.counts["with_version"] += row.version >= 0
            source.counts["ended"] += end in ("finished", "cut")
            source.counts["truncated"] += end == "cut"
            source.lengths.append(len(row.response))
            if row.length is not None:
                source.tokens.append(row.length)
            if row.reward is not None:
                source.rewards.append(row.reward)
        episodes: dict[int | str, list[SurveyRow]] = defaultdict(list)
        for row in rows:
            episodes[row.id if row.episode is None else row.episode].append(row)
        self.groups += 1
        self.responses += len(episodes)
        self.sizes[len(episodes)] += 1
        scored = [[row.reward for row in of if row.reward is not None] for of in episodes.values()]
        rewards = [of[0] for of, all_of in zip(scored, episodes.values()) if len(of) == len(all_of)]
        if len(rewards) > 1:
            self.scored_groups += 1
            lowest, highest = min(rewards), max(rewards)
            if lowest < highest:
                mean = sum(rewards) / len(rewards)
                self.quality.append((mean - lowest) / (highest - lowest))
            else:
                self.equal += 1
        if len(episodes) > 1:
            responses = [of[-1].response for of in episodes.values()]
            distinct = len(set(responses))
            self.repeats += len(responses) - distinct
            self.coverage.append(distinct / len(responses))

    def total(self, name: str) -> int:
        """Over all sources."""
        return sum(source.counts[name] for source in self.sources.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "responses": self.responses,
            "sizes": {str(size): count for size, count in sorted(self.sizes.items())},
            "groups_equal": self.equal,
            "groups_of_one": self.sizes[1],
            "groups_with_rewards": self.scored_groups,
            "near_copies": None if self.copies is None else asdict(self.copies),
            "repeats": self.repeats,
            "trajectory_quality": spread(self.quality),
            "coverage": spread(self.coverage),
            "by_source": {name: source.to_json() for name, source in self.sources.items()},
            "held_out": None if self.held_out is None else asdict(self.held_out),
        }


def survey(store: Store, held_out: Path | None = None, near_copies: float = 1.0) -> StoreSurvey:
    """`held_out`: a file of prompts that the store shouldn't have. `near_copies`: as of the configuration's
    data."""
    result = StoreSurvey()
    prompts = [prompt for _, prompt in store.survey.each_prompt()]
    result.copies = PromptCopies.of([plain(prompt) for prompt in prompts], near_copies)
    if held_out is not None:
        result.held_out = Contamination.of(load_prompts(held_out), prompts, near_copies)
    for rows in store.survey.each_group_rows():
        result.add(rows)
    return result


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
