"""What a race tries on the data at hand: the default, imitation of the best, and what else fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agro.config import DataConfig, RunConfig
from agro.errors import Refused
from agro.objectives.needs import REF_LOGP
from agro.store import Store
from agro.store.location import location_of
from agro.train.collate import total_reward
from agro.train.instead import kind_of
from agro.train.phases import Phase


@dataclass(frozen=True)
class Candidate:
    """A recipe, changed by KEY=VALUE. `prompts`: those that it can draw; None where it samples."""

    name: str
    recipe: str
    changes: tuple[str, ...] = ()
    prompts: int | None = None


def default_for(data: DataConfig) -> str:
    """The recipe for what [data] names.

    Raises `Refused` where it names both prompts and a store, or neither.
    """
    if (data.prompts is None) == (data.store is None):
        got = "neither" if data.prompts is None else "both"
        raise Refused(
            "agro race: expected either data.store, a log to learn from, or data.prompts, to sample from; "
            f"got {got}"
        )
    if data.store is None:
        return "fresh"
    with Store.open(location_of(data.store), read_only=True, create=False) as store:
        return kind_of(store)[0]


def candidates(recipe: str, config: RunConfig, out: Path) -> list[Candidate]:
    """Those for the data of a default recipe, which is the first. `out`: for a store of winners alone."""
    if config.data.store is None:
        imitating = Candidate("reinforce", "reinforce", ("objective.baseline=none",))  # rloo has the other
        return [Candidate(recipe, recipe), Candidate("rloo", "rloo"), imitating]
    with Store.open(location_of(config.data.store), read_only=True) as store:
        return _of_pairs(store, config, out) if recipe == "pairs" else _of_rewards(store, config, recipe)


def _of_rewards(store: Store, config: RunConfig, kind: str) -> list[Candidate]:
    rewards: dict[str, list[float]] = {}
    is_held_out = store.split.held_out(config.data)
    for sample in store.samples():
        reward = total_reward(sample)
        if reward == reward and not is_held_out(sample.prompt_id):
            rewards.setdefault(sample.prompt_id, []).append(reward)
    every = np.array([reward for group in rewards.values() for reward in group])
    if not len(every) or every.min() == every.max():
        raise Refused(
            f"agro race: {store.path}: expected responses of different rewards, got {len(every)} rewards"
            + (f", all {every[0]:g}" if len(every) else "")
            + ". What to do: score them (agro score), or imitate all (agro train sft)"
        )
    is_right_or_wrong = len(np.unique(every)) == 2
    least = float(every.max() if is_right_or_wrong else np.quantile(every, 0.75))
    good = sum(max(group) >= least for group in rewards.values())
    imitated = Candidate("imitation", "sft", (f"data.min_reward={least!r}",), good)
    if kind == "feedback":
        middle = float(every.min() + every.max()) / 2
        dro = Candidate("dro", "dro", ("data.replay=1",), len(rewards))
        kto = Candidate("kto", "kto", (f"objective.threshold={middle!r}",), len(rewards))
        return [Candidate("feedback", "feedback", (), len(rewards)), imitated, dro, kto]
    if not is_right_or_wrong:
        imitated = Candidate("imitation", "sft", ("data.best_of_group=true",), len(rewards))
    unequal = sum(min(group) < max(group) for group in rewards.values())
    falling = f"objective.imitation={{start=1.0, end=0.0, steps={config.train.steps}}}"
    mixed = Candidate("log+imitation", "log", (falling,), unequal)
    return [Candidate("log", "log", (), unequal), imitated, mixed]


def _of_pairs(store: Store, config: RunConfig, out: Path) -> list[Candidate]:
    pairs = [pair for pair in store.pairs() if not pair.is_tie]
    winners = list(store.samples(ids=sorted({pair.winner for pair in pairs})))
    path = out / "winners.db"
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        with Store.open(path) as copied:
            copied.append(winner.replace(id=None) for winner in winners)
    is_held_out = store.split.held_out(config.data)
    prompts = len({winner.prompt_id for winner in winners if not is_held_out(winner.prompt_id)})
    imitated = Candidate("imitation", "sft", (f"data.store={path}",), prompts)
    return [Candidate("pairs", "pairs", (), prompts), imitated, Candidate("dpo", "dpo", (), prompts)]


def settings_of(
    candidate: Candidate, recipe: str, default: RunConfig, overrides: Sequence[str], own: Sequence[str]
) -> RunConfig:
    """The configuration of a candidate, with groups, warm-up, schedule and lengths as of `default`.

    `overrides`: the user's; options of the objective are for `recipe`, the default one. `own`: changes that
    the race makes, such as the rate and the steps.
    """
    train = default.train
    groups = train.groups if candidate.prompts is None else min(train.groups, max(candidate.prompts, 1))
    assert train.steps is not None
    same = [
        f"train.warmup={min(train.warmup, train.steps // 8)}",
        f"train.schedule={train.schedule}",
        f"sampler.max_new={default.sampler.max_new}",
        "evaluate.every=0",
        "train.keep=1",
    ]
    if candidate.prompts is not None and default.data.group_size is not None:
        same.append(f"data.group_size={default.data.group_size}")
    theirs = [item for item in overrides if candidate.recipe == recipe or not item.startswith("objective.")]
    changes = [*same, *theirs, *candidate.changes, f"train.groups={groups}", *own]
    config = RunConfig.load(candidate.recipe, changes)
    caches = config.data.replay == 1 and any(REF_LOGP in phase.needs for phase in Phase.all(config))
    if not caches or config.policy.cache_reference:
        return config
    return RunConfig.load(candidate.recipe, [*changes, "policy.cache_reference=true"])
