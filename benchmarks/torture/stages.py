"""Which stage of its work a process is in, for the process that kills it, and how it kills itself.

Events are what the work does to the world: SQL statements; files opened, renamed or removed; the places
between two pieces of work; messages to and from the reward's process.
"""

from __future__ import annotations

import itertools
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import agro.logs.importing
from agro.rewards.function import FunctionReward
from agro.rewards.workers import Pool
from agro.rollout.engines.hf import HF
from agro.runs.progress import RunActivity
from agro.store import Store
from agro.store.database import SqliteDatabase
from agro.store.drawing import Draws
from agro.train.loop import Loop
from agro.train.monitors.heldout import HeldOutPrompts

STAGES = (
    "other",
    "resuming",
    "sampling",
    "scoring",
    "appending",
    "updating",
    "saving",
    "evaluating",
    "importing",
)
_FILES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}
_PLACES: list[tuple[Any, str, str]] = [
    (Loop, "go_back", "resuming"),
    (FunctionReward, "score", "scoring"),
    (Store, "append", "appending"),
    (Store, "set_rewards", "appending"),
    (Draws, "draw_picked", "appending"),
    (Loop, "update", "updating"),
    (Loop, "commit", "saving"),
    (HeldOutPrompts, "after", "evaluating"),
    (agro.logs.importing, "import_files", "importing"),
]
_TICKS: tuple[tuple[Any, str], ...] = (
    (SqliteDatabase, "run"),
    (SqliteDatabase, "insert"),
    (RunActivity, "check"),
    (Pool, "call"),
    (Pool, "_ask"),
)


@dataclass(frozen=True)
class Plan:
    """Die in `stage`, when it is entered for the `entry`-th time, at its `event`-th event.

    With 0 for `event` the parent kills the process.
    """

    stage: str
    entry: int
    event: int


@dataclass
class Measured:
    """Of a stage in undisturbed work."""

    entries: int = 0
    seconds: float = 0.0
    events: int = 0


class Watch:
    """Shared memory that says in which stage a child is. Made by the parent, kept up to date by the child."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 1)
        self.measured: dict[str, Measured] = {stage: Measured() for stage in STAGES}

    @property
    def stage(self) -> str:
        return STAGES[self._shared[0]]

    def follow(self, plan: Plan | None, entered: Callable[[], None]) -> None:
        """In the child: wrap the places where stages begin.

        `entered` is called where the plan's time begins.
        """
        self._shared[0] = 0
        self._plan, self._entered = plan, entered
        self._due = False  # the planned entry has come
        self._events = itertools.count(1)
        decode = HF.decode

        def sampling(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with self._within("sampling"):
                yield from decode(*args, **kwargs)

        HF.decode = sampling  # type: ignore[method-assign]
        for owner, name, stage in _PLACES:
            if plan is None or plan.stage != "importing" or owner is not Store:  # an import appends, too
                setattr(owner, name, self._staged(getattr(owner, name), stage))
        for owner, name in _TICKS:
            setattr(owner, name, self._ticking(getattr(owner, name)))
        sys.addaudithook(lambda name, args: self._tick() if name in _FILES else None)

    @contextmanager
    def _within(self, stage: str) -> Iterator[None]:
        before, self._shared[0] = self._shared[0], STAGES.index(stage)
        here, began = self.measured[stage], time.monotonic()
        here.entries += 1
        plan = self._plan
        if plan is not None and stage == plan.stage and here.entries == plan.entry:
            self._due = True
            if not plan.event:
                self._entered()
        try:
            yield
        finally:
            self._shared[0] = before
            here.seconds += time.monotonic() - began

    def _tick(self) -> None:
        self.measured[self.stage].events += 1
        plan = self._plan
        if plan is None or not plan.event or not self._due or self.stage != plan.stage:
            return
        if next(self._events) == plan.event:
            os.kill(os.getpid(), signal.SIGKILL)

    def _staged(self, plain: Any, stage: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._within(stage):
                return plain(*args, **kwargs)

        return call

    def _ticking(self, plain: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._tick()
            return plain(*args, **kwargs)

        return call
