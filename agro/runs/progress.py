"""Show the activity of a process on the terminal, watch it for hanging, and stop it on request.

The terminal has a line per step and, if it can redraw, a last line with the current activity. A thread names
a stage that makes no progress; it only reports, since the stage may still recover. After Ctrl-C or SIGTERM
work stops at the next point where nothing is incomplete.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TextIO

from agro.errors import Interrupted
from agro.io import numbers
from agro.io.numbers import clock, short, with_error
from agro.io.terminal import cut, drawn, plain, visible
from agro.rollout import Activity
from agro.types import Sample, Text

PACE = 20  # steps whose median duration predicts the time left
LONGEST = 600  # characters of a displayed text
PAUSE = 0.5  # seconds between displayed counts of a stage, at least
CLEAR = "\r\x1b[K"  # clears the cursor's line
KINDS = 10  # number of kinds of reward failures to show


def responses_text(step: int, samples: Sequence[Sample]) -> str:
    """The best and the worst response of a step, with prompt and reward; only one if rewards are equal."""
    scored = sorted((s for s in samples if s.reward is not None), key=lambda s: s.reward or 0.0)
    shown = list(samples[:1])
    if scored and scored[-1].reward != scored[0].reward:
        shown = [scored[-1], scored[0]]
    lines = []
    for s in shown:
        reward = "unknown" if s.reward is None else f"{s.reward:g}"
        lines.append(f"step {step}, reward {reward}, {cut(s.source or s.role, 80)}")
        lines.append(f"  prompt    {_indented(s.prompt)}\n  response  {_indented(s.response)}")
    return "\n".join(lines)


def _indented(text: Text) -> str:
    return cut(plain(text), LONGEST).replace("\n", "\n" + " " * 12)


class RunActivity(Activity):
    """The `agro.rollout.Activity` of a run, a context manager for the thread that works.

    Within it the first SIGINT or SIGTERM requests a stop, and the second stops at once. A stage without
    progress for `seconds` is reported, then again after twice that time, and so on.
    """

    def __init__(
        self,
        final_step: int = 0,
        seconds: float = 0.0,
        file: Path | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """`final_step`: the run's last step. `seconds`: 0 turns off watching. `file`: receives the stage, for
        the page of a run without a step. `stream`: stderr by default."""
        self.final_step, self.seconds, self.file = final_step, seconds, file
        self.stream = drawn(stream or sys.stderr)
        self.durations: list[float] = []  # seconds of the last steps
        plain_only = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") in ("dumb", "unknown")
        self.redraws = self.stream.isatty() and not plain_only
        self.stop_requested = False
        self._stage = self._stage_text = ""
        self._shown = -math.inf  # time of the last display of the stage
        self._since, self._limit = time.monotonic(), seconds  # time of the last progress; idle time to report
        self._failures: set[Hashable] = set()  # the kinds of reward failures that were shown

    def __enter__(self) -> Self:
        try:
            self._handlers = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: signals are the caller's
            self._handlers = {}
        self._ended = threading.Event()
        if self.seconds:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self.seconds:
            self._thread.join()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.close()

    def close(self) -> None:
        """Clear the stage's line."""
        if self.redraws:
            print(CLEAR, end="", file=self.stream, flush=True)

    def say(self, text: str) -> None:
        print(f"{CLEAR if self.redraws else ''}{visible(text)}", file=self.stream, flush=True)

    def stage(self, name: str, done: int | None = None, total: int | None = None) -> None:
        is_new, self._stage = name != self._stage, name
        self._stage_text = f"{name} {numbers.progress(done, total)}".strip()
        self._since, self._limit = time.monotonic(), self.seconds
        if not is_new and self._since - self._shown < PAUSE:
            return
        self._shown = self._since
        if self.redraws:
            room = shutil.get_terminal_size().columns - 1
            text = visible(self._stage_text)[:room]
            print(f"{CLEAR}{text}", end="", file=self.stream, flush=True)
        if self.file is not None:
            with suppress(OSError):  # a full disk is reported elsewhere, when something is lost
                self.file.write_text(self._stage_text, encoding="utf-8")

    def step(self, m: Mapping[str, Any]) -> None:
        """Print a line for a row of metrics: phase, step, reward, KL, speed, time left."""
        parts = [f"{m['phase']} {m['step']}/{self.final_step}"]
        if m["seconds"] is not None:
            self.durations = [*self.durations, m["seconds"]][-PACE:]
            pace = sorted(self.durations)[len(self.durations) // 2]
            parts += [
                f"loss {short(m['loss'])}",
                f"reward {short(m['reward_mean'])}",
                f"KL {short(m['kl_ref'])}",
                f"{short(m['tokens_per_second'])} tok/s",
                f"{clock((self.final_step - m['step']) * pace)} left",
            ]
        titles = {"eval_reward": ("", 3), "eval_consistency": ("½Var(R) ", 5), "eval_auc": ("AUC ", 3)}
        for name, (title, digits) in titles.items():
            if m.get(name) is not None:
                parts.append(f"held-out {title}{with_error(m[name], m[f'{name}_se'], digits)}")
        if m["dropped"]:
            reasons = (f"{n} ({reason})" for reason, n in m["dropped_reasons"].items())
            parts.append(f"dropped {', '.join(reasons)}")
        if m["skipped"]:
            parts.append("update skipped")
        self.say("  ".join(parts))

    def fail(self, kind: Hashable, error: str) -> None:
        if kind in self._failures or len(self._failures) == KINDS:
            return
        self._failures.add(kind)
        text = f"a reward is unknown, the first for this reason: {error}"
        if len(self._failures) == KINDS:
            text += "; other reasons aren't shown here, but in the store and on the page"
        self.say(text)

    def check(self) -> None:
        self._since, self._limit = time.monotonic(), self.seconds
        if self.stop_requested:
            raise Interrupted

    def _ask(self, number: int, frame: object) -> None:
        if self.stop_requested:
            raise KeyboardInterrupt
        self.stop_requested = True
        end = f"{self._stage} can be interrupted or ends" if self._stage else "the model is loaded"
        self.say(
            f"stopping, with a checkpoint, when {end}. Again: stop at once, with everything up to the last "
            "checkpoint"
        )

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self.seconds / 4)):
            idle = time.monotonic() - self._since
            if idle >= self._limit:
                self._limit *= 2
                stage = self._stage_text or "the run"
                self.say(f"{stage} has made no progress for {idle:.0f} s")
