"""The two logs, how they are imported, split by prompt, and described."""

from __future__ import annotations

import hashlib
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agro.config import RunConfig
from agro.models.encoding import InvalidSample
from agro.models.policy import Policy
from agro.store import Store
from agro.types import Sample


@dataclass(frozen=True)
class Log:
    """A log, and how it is imported. Prompts are split by hash into two halves, each held out once."""

    title: str
    file: str
    columns: tuple[str, ...]
    auc: float  # the goal, of the lowest seed
    errors: float  # the goal, in standard errors above 0.5


LOGS = {
    name: Log(**{**of, "columns": tuple(of["columns"])})
    for name, of in tomllib.loads(Path(__file__).with_name("logs.toml").read_text("utf-8")).items()
}
FOLDS = 2


def split(store: Path, fold: int, most: int | None) -> tuple[Path, Path]:
    """Stores of the training and of the held-out groups (`most` of each at most, where that is given)."""
    parts: list[list[list[Sample]]] = [[], []]
    for group in groups_of(store):
        # By a hash of the prompt's id: the same on every machine, whatever else the log has.
        part = int(hashlib.sha256(group[0].prompt_id.encode()).hexdigest(), 16) % FOLDS
        parts[part == fold].append(group)
    train, heldout = (store.with_name(f"{name}-{fold}.db") for name in ("train", "heldout"))
    for path, groups in zip((train, heldout), parts, strict=True):
        _write(path, groups[:most])
    return train, heldout


def mixed(train: Path) -> Path:
    """The groups of a store whose rewards differ. The others rank nothing: at π_ref their gradient is 0."""
    path = train.with_name(f"{train.stem}-mixed.db")
    _write(path, [group for group in groups_of(train) if len({s.reward for s in group}) > 1])
    return path


def shuffled(train: Path, seed: int) -> Path:
    """A store like `train` whose rewards are permuted within each prompt: nothing can be learned from it."""
    path = train.with_name(f"{train.stem}-shuffled-{seed}.db")
    random = np.random.default_rng(seed)
    groups = []
    for group in groups_of(train):
        rewards = random.permutation([s.reward for s in group])
        groups.append([s.replace(reward=float(r)) for s, r in zip(group, rewards, strict=True)])
    _write(path, groups)
    return path


def _write(path: Path, groups: Sequence[Sequence[Sample]]) -> None:
    """A new store, or the one that is there from an interrupted run."""
    if path.exists():
        return
    unfinished = path.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    with Store.open(unfinished) as store:
        store.append(s for group in groups for s in group)
    unfinished.rename(path)


def groups_of(path: Path) -> list[list[Sample]]:
    """The samples of a store, by prompt."""
    by_prompt: dict[str, list[Sample]] = {}
    with Store.open(path, read_only=True) as store:
        for sample in store.samples():
            by_prompt.setdefault(sample.prompt_id, []).append(sample)
    return list(by_prompt.values())


def describe(path: Path, config: RunConfig) -> dict[str, Any]:
    """What a store has, and how many of its rows the model can't be trained on, by reason."""
    policy, dropped, by_source = Policy.load(config.policy), Counter[str](), dict[str, list[float]]()
    groups = groups_of(path)
    for sample in (s for group in groups for s in group):
        by_source.setdefault(sample.source, []).append(float(sample.reward or 0))
        try:
            policy.encode(sample, config.train.max_length)
        except InvalidSample as error:
            dropped[error.reason] += 1
    return {
        "groups": len(groups),
        "samples": sum(map(len, groups)),
        "dropped": dict(dropped),
        "groups_equal": sum(len({s.reward for s in group}) == 1 for group in groups),
        "reward_mean": {source: float(np.mean(r)) for source, r in by_source.items()},
        "parameters": sum(p.numel() for p in policy.model.parameters()),
    }
