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
    """Return an empty array, to be filled one by one."""
    return array("d")


def spread(numbers: Sequence[float]) -> dict[str, Any]:
    """Summarize numbers: count, mean, standard deviation (with n − 1), minimum and maximum; None if there are
    too few, and if differences or squares overflow."""
    if not numbers:
        return {"count": 0, **dict.fromkeys(("mean", "std", "min", "max"))}
    offset = numbers[0]  # subtracted first, so that large numbers keep their digits
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(offset + (np.array(numbers) - offset).mean())
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
    """Clusters of near-equal prompts. `prompts`: number in clusters of two or more."""

    prompts: int
    clusters: int

    @classmethod
    def of(cls, texts: Sequence[str], similarity: float) -> PromptCopies:
        """`similarity`: as data.near_copies."""
        sizes = np.unique(clusters(texts, similarity), return_counts=True)[1]
        copied = sizes[sizes > 1]
        return cls(int(copied.sum()), len(copied))


@dataclass(frozen=True)
class Contamination:
    """Ids of prompts that are among `trained` ones, up to case, spaces and labels, and of near-copies."""

    prompts: int
    trained: int
    exact: tuple[str, ...]
    near: tuple[str, ...]

    @classmethod
    def of(cls, prompts: Sequence[Prompt], trained: Sequence[Text], similarity: float) -> Contamination:
        """`similarity`: from which prompts are near-copies, as data.near_copies."""
        seen, tested = ([plain(text) for text in texts] for texts in (trained, [p.text for p in prompts]))
        labels = clusters([*seen, *tested], similarity).tolist()
        trained_labels, known = set(labels[: len(seen)]), set(map(normalized, seen))
        exact = tuple(p.id for p, text in zip(prompts, tested, strict=True) if normalized(text) in known)
        near = tuple(
            p.id
            for p, label in zip(prompts, labels[len(seen) :], strict=True)
            if label in trained_labels and p.id not in exact
        )
        return cls(len(prompts), len(trained), exact, near)

    @property
    def sentence(self) -> str:
        parts = []
        for ids, relation in (
            (self.exact, "were trained on"),
            (self.near, "are near-copies of training prompts"),
        ):
            parts.append(f"{len(ids)} {relation}" + (f" ({first_of(ids)})" if ids else ""))
        return f"of {self.prompts} prompts {', '.join(parts)}; the run has {self.trained} training prompts"


# Counts of a source's rows: all, and those with tokens, with behavior log-probs, with an agro run's version,
# with a recorded end, and truncated ones.
COUNTED = ("rows", "with_tokens", "with_behavior", "with_version", "ended", "truncated")


@dataclass
class SourceSurvey:
    """The survey of one source's responses."""

    rewards: array[float] = field(default_factory=numbers)
    lengths: array[float] = field(default_factory=numbers)  # characters
    tokens: array[float] = field(default_factory=numbers)  # policy tokens, of rows with tokens
    roles: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)  # by `COUNTED`

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
    """The survey of a store.

    A group is all responses to one prompt; the rows of an episode are one response, scored if all of them
    are. `quality` (TQ) and `coverage` (SACo) of each prompt are those of Schweighofer et al. (arXiv
    2111.04714): (mean r − min r) / (max r − min r) if rewards differ, and distinct responses / responses if
    there are two or more.
    """

    held_out: Contamination | None = None
    copies: PromptCopies | None = None
    groups: int = 0
    responses: int = 0
    sizes: Counter[int] = field(default_factory=Counter)  # number of groups by number of responses
    scored_groups: int = 0  # with two or more scored responses
    equal: int = 0  # scored groups with equal rewards
    repeats: int = 0  # responses equal to an earlier one of their group
    quality: array[float] = field(default_factory=numbers)
    coverage: array[float] = field(default_factory=numbers)
    sources: dict[str, SourceSurvey] = field(default_factory=lambda: defaultdict(SourceSurvey))

    def add(self, rows: Sequence[SurveyRow]) -> None:
        """Add the rows of one group."""
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
        scored = [[row.reward for row in turns if row.reward is not None] for turns in episodes.values()]
        rewards = [values[0] for values, turns in zip(scored, episodes.values()) if len(values) == len(turns)]
        if len(rewards) > 1:
            self.scored_groups += 1
            lowest, highest = min(rewards), max(rewards)
            if lowest < highest:
                mean = sum(rewards) / len(rewards)
                self.quality.append((mean - lowest) / (highest - lowest))
            else:
                self.equal += 1
        if len(episodes) > 1:
            responses = [turns[-1].response for turns in episodes.values()]
            distinct = len(set(responses))
            self.repeats += len(responses) - distinct
            self.coverage.append(distinct / len(responses))

    def total(self, name: str) -> int:
        """Sum a count over all sources."""
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
    """Survey a store. `held_out`: a file of prompts that the store shouldn't contain. `near_copies`: as
    data.near_copies."""
    result = StoreSurvey()
    prompts = [prompt for _, prompt in store.survey.each_prompt()]
    result.copies = PromptCopies.of([plain(prompt) for prompt in prompts], near_copies)
    if held_out is not None:
        result.held_out = Contamination.of(load_prompts(held_out), prompts, near_copies)
    for rows in store.survey.each_group_rows():
        result.add(rows)
    return result


MOST = 20_000  # maximal number of rewards to use
LEAST = 0.05  # minimal share of the variance to report
CLEAR = 4.0  # standard errors above chance
# Entries of `meta` that agro itself writes about a response.
RESPONSE_KEYS = ("finish", "index", "last_turn", "reward_parts", "thought")


@dataclass(frozen=True)
class Explaining:
    """A field, its number of values, the number of rewards, and the variance share between values."""

    field: str
    values: int
    rewards: int
    share: float


def explaining(store: Store) -> Explaining | None:
    """Find the field of `meta` that explains the most variance; None if none clearly does, or if rewards are
    centered already. Only fields with at least two rewards per value, on average, qualify."""
    fields: dict[str, dict[Any, Statistics]] = {}
    for sample in islice(store.samples(scored=True), MOST):
        if "normalizer" in sample.meta:
            return None
        assert sample.reward is not None
        for name, value in sample.meta.items():
            if isinstance(value, str | int) and name not in RESPONSE_KEYS:
                fields.setdefault(name, {}).setdefault(value, Statistics()).add(sample.reward)
    candidates = []
    for name, values in fields.items():
        rewards = sum(each.count for each in values.values())
        components = Components.of(values.values())
        if 2 * len(values) <= rewards and components.surprise > CLEAR and components.share >= LEAST:
            candidates.append(Explaining(name, len(values), rewards, components.share))
    return max(candidates, key=lambda each: each.share, default=None)
