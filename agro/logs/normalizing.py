"""`agro import --group-by FIELD`: rewards relative to those of records with the same value of a field.

A log with one response a prompt has nothing to compare it with. Where the rewards of one user, task or grader
are of one kind, (reward − mean) / standard deviation over the records with the same value compares a response
with the others of that user, task or grader. It isn't a baseline of the prompt: prompts that are easier than
others of their value keep higher rewards.

The normalizer is recorded in `meta["normalizer"]` of each sample: the `field` and its `value`, the `mean` and
`std` (n − 1) over the scored records of the import, and the `reward` before. `agro import FILE --replace`
without the option goes back to it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from agro.errors import Refused
from agro.store.sqlite import Store
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

    @property
    def std(self) -> float:
        """0 for a single reward."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def normalized(self, reward: float) -> float:
        return (reward - self.mean) / (self.std or 1.0)


@dataclass(frozen=True)
class Normalization:
    """What became of the rewards of an import: equal ones, and those of a single record, are 0 now."""

    field: str
    samples: int = 0
    values: int = 0
    constant: int = 0  # values of the field whose rewards are all equal, or that one record has

    def __str__(self) -> str:
        text = f"normalized: {self.samples} rewards by {self.values} values of {self.field}"
        if self.constant:
            text += f"; {self.constant} of them have equal rewards, or one, which are 0 now"
        return text


def normalize(store: Store, files: Sequence[str], field: str) -> Normalization:
    """Normalize the rewards of the samples of imported files (by their hashes) that aren't normalized yet.

    `field`: source, role, or a field of `meta`, dotted where it is inside of another. Raises `Refused` for
    scored samples without it. All rewards change, or none.
    """
    statistics: dict[str, Statistics] = {}
    for sample, key in _scored(store, files, field):
        assert sample.reward is not None
        statistics.setdefault(key, Statistics()).add(sample.reward)
    done = 0
    with store.transaction():
        samples = _scored(store, files, field)
        while part := list(islice(samples, CHUNK)):
            store.set_rewards(_score(sample, field, key, statistics[key]) for sample, key in part)
            done += len(part)
    constant = sum(each.std == 0 for each in statistics.values())
    return Normalization(field, done, len(statistics), constant)


def _score(sample: Sample, field: str, key: str, statistics: Statistics) -> tuple[int, float, dict[str, Any]]:
    """Id, reward and entries of `meta` of a sample."""
    assert sample.id is not None
    assert sample.reward is not None
    normalizer = {
        "field": field,
        "value": json.loads(key),
        "mean": statistics.mean,
        "std": statistics.std,
        "reward": sample.reward,
    }
    entries: dict[str, Any] = {"normalizer": normalizer}
    if "reward_parts" in sample.meta:  # which a later scoring would drop
        entries["reward_parts"] = sample.meta["reward_parts"]
    return sample.id, statistics.normalized(sample.reward), entries


def _scored(store: Store, files: Sequence[str], field: str) -> Iterator[tuple[Sample, str]]:
    """The scored samples that aren't normalized, with the value of the field as JSON."""
    ids = [i for file in files for i in store.imports.file_samples(file)[0]]
    for sample in store.samples(ids=ids, scored=True):
        if "normalizer" not in sample.meta:
            yield sample, json.dumps(_value(sample, field), sort_keys=True)


def _value(sample: Sample, field: str) -> Any:
    if field in ("source", "role"):
        return getattr(sample, field)
    value: Any = sample.meta
    for name in field.removeprefix("meta.").split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if value is None:
        names = ", ".join(("source", "role", *sample.meta))
        column = field.removeprefix("meta.")
        raise Refused(
            f"--group-by {field}: sample {sample.id} (prompt {sample.prompt_id}) has a reward and no such "
            f"field; it has {names}. What to do: name one that all scored records have; beside --map, map it "
            f"too: --map meta.{column}=COLUMN"
        )
    return value
