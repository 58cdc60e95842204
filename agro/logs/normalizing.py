"""`agro import --center-by FIELD`: rewards relative to those of the same value of a field.

A log with one response a prompt has nothing to compare it with. Where the rewards of one user, task or grader
are of one kind, a response is compared with the others of that user, task or grader. It isn't a baseline of
the prompt: prompts that are easier than others of their value keep higher rewards.

A reward becomes reward − λ (m − m̄), m the mean of the value's *other* records and m̄ of all records. The shift
doesn't read the record's own reward, so that noise in it doesn't count twice. λ = n τ² / (n τ² + σ²) of n
other records, σ² the variance of rewards within values and τ² between them (Searle, Casella and McCulloch,
Variance Components, 1992), so that a value with few records is hardly moved, and none is where values don't
differ. Rewards stay on their scale.

The normalizer is recorded in `meta["normalizer"]` of each sample: the `field` and its `value`, the `shift`,
and the `reward` before. `agro import FILE --replace` without the option goes back to it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from agro.errors import Refused
from agro.store.store import Store
from agro.types import Sample

CHUNK = 500  # samples whose rewards are set at once


@dataclass
class Statistics:
    """Of the rewards with one value of the field (Welford's algorithm)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # of differences to the mean

    def add(self, reward: float) -> None:
        self.count += 1
        difference = reward - self.mean
        self.mean += difference / self.count
        self.squares += difference * (reward - self.mean)


@dataclass(frozen=True)
class Components:
    """Variances of rewards: between the values of a field, and within them.

    `surprise`: by how many standard errors the variance of the values' means is above that of chance.
    """

    mean: float
    between: float
    within: float
    surprise: float

    @classmethod
    def of(cls, values: Iterable[Statistics]) -> Components:
        """By the method of moments, of unbalanced data; a negative variance is 0.

        One value, or none with two rewards: nothing is between them.
        """
        every = list(values)
        n, groups = sum(v.count for v in every), len(every)
        mean = sum(v.count * v.mean for v in every) / n if n else 0.0
        if groups < 2 or n == groups:
            return cls(mean, 0.0, 0.0, 0.0)
        within = sum(v.squares for v in every) / (n - groups)
        among = sum(v.count * (v.mean - mean) ** 2 for v in every) / (groups - 1)
        typical = (n - sum(v.count**2 for v in every) / n) / (groups - 1)  # records of a value
        error = within * math.sqrt(2 / (groups - 1) + 2 / (n - groups))
        surprise = (among - within) / error if error else math.inf * (among > within)
        return cls(mean, max(0.0, (among - within) / typical), within, surprise)

    @property
    def share(self) -> float:
        """Of the variance that is between values."""
        total = self.between + self.within
        return self.between / total if total else 0.0

    def shift(self, value: Statistics, reward: float) -> float:
        """What is subtracted from a reward, one of `value`."""
        others = value.count - 1
        if not others or not self.between:
            return 0.0
        mean = value.mean + (value.mean - reward) / others
        return (mean - self.mean) * others * self.between / (others * self.between + self.within)


def center_rewards(store: Store, field: str, files: Sequence[str] | None = None) -> str:
    """Center the rewards of the samples that aren't centered yet, and say what became of them.

    `files`: of these imported files (by their hashes), by default of the store. `field`: source, role, or a
    field of `meta`, dotted where it is inside of another. Raises `Refused` for scored samples without it. All
    rewards change, or none.
    """
    statistics: dict[str, Statistics] = {}
    for sample, key in _scored(store, files, field):
        assert sample.reward is not None
        statistics.setdefault(key, Statistics()).add(sample.reward)
    components, done = Components.of(statistics.values()), 0
    with store.transaction():
        samples = _scored(store, files, field)
        while part := list(islice(samples, CHUNK)):
            scores = []
            for sample, key in part:
                assert sample.id is not None
                assert sample.reward is not None
                shift = components.shift(statistics[key], sample.reward)
                normalizer = {"field": field, "value": json.loads(key), "shift": shift}
                entries: dict[str, Any] = {"normalizer": normalizer | {"reward": sample.reward}}
                if "reward_parts" in sample.meta:  # which a later scoring would drop
                    entries["reward_parts"] = sample.meta["reward_parts"]
                scores.append((sample.id, sample.reward - shift, entries))
            store.set_rewards(scores)
            done += len(part)
    by = f"{done} rewards by {len(statistics)} values of {field}"
    return f"centered: {by}, between which {components.share:.0%} of their variance was"


def _scored(store: Store, files: Sequence[str] | None, field: str) -> Iterator[tuple[Sample, str]]:
    """The scored samples that aren't centered, with the value of the field as JSON."""
    ids = None if files is None else [i for file in files for i in store.imports.file_samples(file)[0]]
    column = field.removeprefix("meta.")
    for sample in store.samples(ids=ids, scored=True):
        if "normalizer" in sample.meta:
            continue
        value: Any = sample.meta
        if field in ("source", "role"):
            value = getattr(sample, field)
        else:
            for name in column.split("."):
                value = value.get(name) if isinstance(value, dict) else None
        if value is None:
            names = ", ".join(("source", "role", *sample.meta))
            raise Refused(
                f"--center-by {field}: sample {sample.id} (prompt {sample.prompt_id}) has a reward and no "
                f"such field; it has {names}. What to do: name one that all scored records have; beside "
                f"--map, map it too: --map meta.{column}=COLUMN"
            )
        yield sample, json.dumps(value, sort_keys=True)
