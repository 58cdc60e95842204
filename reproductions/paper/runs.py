"""Runs in the arena's lockstep, measured on the way; what is complete isn't run again."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from reproductions.arena import play
from reproductions.arena.kinds import Row
from reproductions.arena.lockstep import Fresh, Racer, Rows, measure, train
from reproductions.arena.world import World
from reproductions.paper import plans
from reproductions.paper.methods import METHODS
from reproductions.paper.plans import PLANS, STORED, Plan

Run = dict[str, Any]
TOGETHER = 12  # runs in lockstep


@dataclass(frozen=True)
class Trial(Row):
    """One run: `objective` is the name of a method, `kind` that of a plan."""

    @property
    def data(self) -> Plan:
        return PLANS[self.kind]

    @property
    def base(self) -> str:
        return METHODS[self.objective].objective

    @property
    def options(self) -> dict[str, Any]:
        return METHODS[self.objective].options_for(self.data.n, self.beta)


class Recorded(Racer):
    """Remembers the rewards of what was sampled, and replays the run's own earlier groups."""

    def __init__(self, row: Row, world: World, weights: Tensor) -> None:
        super().__init__(row, world, weights)
        self.rewards: list[float] = []  # the mean of each update's fresh responses
        self.own: deque[Rows] = deque(maxlen=STORED)
        self.replayed = 0 if self.kind.log else round(self.kind.groups * self.kind.replay)

    def rows(self, fresh: Fresh | None, r: int) -> Rows:
        found = super().rows(fresh, r)
        if fresh is None:
            return found
        self.rewards.append(float(found.reward.mean()))
        if not self.replayed:
            return found
        drawn = self._draw()
        n = self.kind.n
        self.own.extend(found.part(range(i, i + n)) for i in range(0, len(found.names), n))
        for group in drawn:
            found = found.followed_by(group)
        return found

    def _draw(self) -> list[Rows]:
        """Earlier groups, any of them alike, an update older now; none before the first update."""
        self.own = deque((group._replace(age=group.age + 1) for group in self.own), maxlen=STORED)
        rng = random.Random(f"{self.row.seed}/{len(self.rewards)}/own")
        return rng.sample(list(self.own), min(self.replayed, len(self.own)))


def complete(trials: Iterable[Trial], out: Path, *, small: bool) -> list[Run]:
    """What is measured of trials on any data, a part of those on the same data in lockstep."""
    found: list[Run] = []
    of_plan: dict[str, list[Trial]] = {}
    for trial in trials:
        of_plan.setdefault(trial.kind, []).append(trial)
    for kind, same in of_plan.items():
        files = plans.prepare(out, PLANS[kind].start, small=small)
        for i in range(0, len(same), TOGETHER):
            playing = partial(_play, small=small)
            found += play.complete(same[i : i + TOGETHER], files, out, playing)
            print(f"{kind}: {min(i + TOGETHER, len(same))} of {len(same)}", file=sys.stderr)
    return found


def _play(trials: Sequence[Trial], files: plans.Files, small: bool) -> list[Run]:
    world, plan = plans.load(files), trials[0].data
    updates, every = (4, 2) if small else (plan.updates, plan.every)
    began = time.process_time()
    points: list[tuple[int, list[dict[str, float]]]] = []

    def watch(update: int, weights: Tensor) -> None:
        if update % every == 0:
            points.append((update, measure(world, weights)))

    racers, weights = train(trials, world, updates, Recorded, watch)
    watch(updates, weights)
    spent = (time.process_time() - began) / len(trials)
    return [
        {
            **asdict(trial),
            "curve": [{"update": update, **of_all[i]} for update, of_all in points],
            "rewards": _averaged(racer.rewards, every),
            "generated": updates * plan.fresh_an_update,
            "skipped": racer.skipped,
            "stopped": racer.stopped,
            "cpu_seconds": spent,
            "validation": points[-1][1][i]["validation"],
        }
        for i, (trial, racer) in enumerate(zip(trials, racers, strict=True))
    ]


def _averaged(values: Sequence[float], every: int) -> list[float]:
    """Means of `every` values each."""
    return [statistics.mean(values[i : i + every]) for i in range(0, len(values) - every + 1, every)]
