"""The activity of a process: shown on the terminal, watched for hanging, and stopped on request."""

from __future__ import annotations

from agro.runs.interruption import Interruption
from agro.runs.progress import Progress
from agro.runs.watchdog import Watchdog


class RunActivity:
    """See `agro.rollout.Activity`."""

    def __init__(self, progress: Progress, watchdog: Watchdog, interruption: Interruption) -> None:
        self.progress, self.watchdog, self.interruption = progress, watchdog, interruption

    def stage(self, name: str, done: int | None = None, total: int | None = None) -> None:
        self.progress.stage(name, done, total)
        self.watchdog.stage(name, done, total)

    def check(self) -> None:
        self.watchdog.beat()
        self.interruption.check()
