"""A thread that names the stage which hangs. It only says so: what hangs may still come back."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Self

HERE = str(Path(__file__).parents[1])


class Watchdog:
    """Says what the thread that made it is at, once a stage has made no progress for `seconds`, and at twice that, and so on.

    `seconds` = 0 watches nothing.
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
        """A stage begins, or has come so far."""
        self._at = name + (
            "" if done is None else f" ({done} done)" if total is None else f" ({done} of {total})"
        )
        self.beat()

    def beat(self) -> None:
        """The stage goes on."""
        self._since, self._limit = time.monotonic(), self.seconds

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self.seconds / 4)):
            idle = time.monotonic() - self._since
            if idle >= self._limit:
                self._limit *= 2
                self.say(f"{self._at or 'the run'} has made no progress for {idle:.0f} s{self._place()}")

    def _place(self) -> str:
        """The innermost line of agro that the watched thread is in."""
        frame = sys._current_frames().get(self._watched)
        found = [f for f in traceback.extract_stack(frame) if f.filename.startswith(HERE)] if frame else []
        return (
            f"; it is in {Path(found[-1].filename).relative_to(HERE)}:{found[-1].lineno} ({found[-1].name})"
            if found
            else ""
        )
