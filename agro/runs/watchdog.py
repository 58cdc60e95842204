"""A thread that names the stage that makes no progress. It only reports: the stage may still recover."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Self

from agro import numbers

PACKAGE = str(Path(__file__).parents[1])


class Watchdog:
    """Reports where its creator's thread is once a stage has made no progress for `seconds`.

    It reports again after twice that time, and so on. `seconds` = 0 watches nothing.
    """

    def __init__(self, seconds: float, say: Callable[[str], None]) -> None:
        self.seconds, self.say = seconds, say
        self._watched = threading.get_ident()
        self._at = ""
        self._since = time.monotonic()
        self._limit = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="agro watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self.seconds:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self.seconds:
            self._thread.join()

    def stage(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """A stage starts, or `done` of `total` of it are done."""
        self._at = f"{name} {numbers.progress(done, total)}".strip()
        self.beat()

    def beat(self) -> None:
        """The stage makes progress."""
        self._since, self._limit = time.monotonic(), self.seconds

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self.seconds / 4)):
            idle = time.monotonic() - self._since
            if idle >= self._limit:
                self._limit *= 2
                self.say(f"{self._at or 'the run'} has made no progress for {idle:.0f} s{self._place()}")

    def _place(self) -> str:
        """The innermost line of agro in the watched thread."""
        frame = sys._current_frames().get(self._watched)
        if frame is None:
            return ""
        frames = [f for f in traceback.extract_stack(frame) if f.filename.startswith(PACKAGE)]
        if not frames:
            return ""
        last = frames[-1]
        return f"; it is in {Path(last.filename).relative_to(PACKAGE)}:{last.lineno} ({last.name})"
