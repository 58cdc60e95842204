"""The activity of a process: shown on the terminal, watched for hanging, and stopped on request.

The terminal has a line per step, or a display that is redrawn in place. A thread names the stage that makes
no progress; it only reports, since the stage may still recover. After Ctrl-C and SIGTERM work stops at the
next point where nothing is incomplete.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text as Styled

from agro.errors import Interrupted
from agro.io import numbers
from agro.io.numbers import clock, duration, short, with_error
from agro.io.terminal import cut, drawn, plain, visible
from agro.rollout import Activity
from agro.store.location import Location, url_of
from agro.types import Sample, Text

BARS = "▁▂▃▄▅▆▇█"
REMEMBERED = 32  # rewards in the display's small curve
PACE = 20  # steps whose median duration predicts the time left
LONGEST = 600  # characters of a text that is shown
LONG = 3600.0  # seconds of a run from which the way to a shorter one is said
PAUSE = 0.1  # seconds at least between two redrawings
PACKAGE = str(Path(__file__).parents[1])


class Progress:
    """One line per step: phase, step, reward, KL, speed, time left. `final_step`: of the run."""

    def __init__(self, final_step: int, stream: TextIO | None = None) -> None:
        self.final_step = final_step
        self.stream = stream or sys.stderr
        self.durations: list[float] = []  # of the last steps

    @classmethod
    def on(cls, final_step: int, store: Location) -> Progress:
        """On stderr: a display where that is a terminal that can redraw, else plain lines."""
        plain_only = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") in ("dumb", "unknown")
        if plain_only or not sys.stderr.isatty():
            return Progress(final_step)
        return Display(final_step, store)

    def say(self, text: str) -> None:
        print(visible(text), file=self.stream, flush=True)

    def stage(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """What the run is doing, and how far it is."""

    def step(self, m: Mapping[str, Any]) -> None:
        """A row of metrics."""
        parts = [f"{m['phase']} {m['step']}/{self.final_step}"]
        if m["seconds"] is not None:
            parts += [
                f"loss {short(m['loss'])}",
                f"reward {short(m['reward_mean'])}",
                f"KL {short(m['kl_ref'])}",
                f"{short(m['tokens_per_second'])} tok/s",
                f"{clock(self._time_left(m))} left",
            ]
        self.say("  ".join(parts + _events(m)))

    def close(self) -> None:
        """Restore the terminal."""

    def _time_left(self, m: Mapping[str, Any]) -> float:
        """Seconds, at the median speed of the last steps."""
        self.durations = [*self.durations, m["seconds"]][-PACE:]
        return float((self.final_step - m["step"]) * sorted(self.durations)[len(self.durations) // 2])


class Display(Progress):
    """Three lines that are redrawn in place. Messages, and steps with events, are printed above them.

    It is redrawn when something is reported, not by a thread of its own.
    """

    def __init__(self, final_step: int, store: Location, console: Console | None = None) -> None:
        super().__init__(final_step)
        self.store = store
        self.console = console or Console(file=drawn(sys.stderr), markup=False, highlight=False)
        self.metrics: Mapping[str, Any] = {}  # of the last step
        self.rewards: list[float | None] = []
        self.remaining_seconds: float | None = None
        self.stage_name = self.stage_text = ""  # the stage, without and with how far it is
        self.redraw_time = 0.0
        redirects = sys.stdout.isatty()
        self.live = Live(
            get_renderable=self._render, console=self.console, auto_refresh=False, redirect_stdout=redirects
        )

    def say(self, text: str) -> None:
        self.console.print(Styled(visible(text)))

    def stage(self, name: str, done: int | None = None, total: int | None = None) -> None:
        is_new, self.stage_name = name != self.stage_name, name
        self.stage_text = f"{name} {numbers.progress(done, total)}".strip()
        self._redraw(immediately=is_new)

    def step(self, m: Mapping[str, Any]) -> None:
        self.metrics = m
        if m["seconds"] is not None:
            self.remaining_seconds = self._time_left(m)
            self.rewards = [*self.rewards, m["reward_mean"]][-REMEMBERED:]
        events = _events(m)
        if events:
            prefix = f"{m['phase']} {m['step']}/{self.final_step}"
            self.say("  ".join([prefix, f"reward {short(m['reward_mean'])}", *events]))
        self._redraw(immediately=m["step"] == self.final_step)

    def close(self) -> None:
        self.stage_text = ""
        self.live.stop()

    def _redraw(self, *, immediately: bool) -> None:
        if not self.live.is_started:
            self.live.start()
        if immediately or time.monotonic() - self.redraw_time >= PAUSE:
            self.redraw_time = time.monotonic()
            self.live.refresh()

    def _render(self) -> Group:
        stage = Styled(self.stage_text, "cyan", no_wrap=True, overflow="ellipsis")
        step = self.metrics.get("step", 0)
        row = Table.grid(padding=(0, 2))
        for _ in range(4):
            row.add_column(no_wrap=True)
        row.add_row(
            Styled(str(self.metrics.get("phase", "")), "bold"),
            Styled(f"{step}/{self.final_step}"),
            ProgressBar(self.final_step, step, width=max(10, min(40, self.console.width - 50))),
            Styled("" if self.remaining_seconds is None else f"{clock(self.remaining_seconds)} left", "dim"),
        )
        return Group(row, self._numbers(), stage)

    def _numbers(self) -> Styled:
        m = self.metrics
        # The store's file and its write-ahead log; unknown in a database.
        files = [] if url_of(self.store) else [Path(self.store), Path(f"{self.store}-wal")]
        stored = sum(file.stat().st_size for file in files if file.exists())
        line = Styled(no_wrap=True, overflow="ellipsis")
        for name, value, unit in (
            ("reward ", short(m.get("reward_mean")), ""),
            ("KL ", short(m.get("kl_ref")), " nats"),
            ("loss ", short(m.get("loss")), ""),
            ("", short(m.get("tokens_per_second")), " tokens/s"),
            ("store ", numbers.size(stored) if stored else numbers.UNKNOWN, ""),
        ):
            line.append(name, "dim").append(value).append(f"{unit}  ", "dim")
        room = max(0, self.console.width - line.cell_len)
        newest = self.rewards[-room:] if room else []
        return line.append(_curve(newest), "cyan")


def _events(m: Mapping[str, Any]) -> list[str]:
    """What a step has in addition to its usual numbers."""
    events = []
    titles = {"eval_reward": ("", 3), "eval_consistency": ("½Var(R) ", 5), "eval_auc": ("AUC ", 3)}
    for name, (title, digits) in titles.items():
        if m.get(name) is not None:
            events.append(f"held-out {title}{with_error(m[name], m[f'{name}_se'], digits)}")
    if m["dropped"]:
        events.append("dropped " + ", ".join(f"{n} ({reason})" for reason, n in m["dropped_reasons"].items()))
    if m["skipped"]:
        events.append("update skipped")
    return events


def responses_text(step: int, samples: Sequence[Sample]) -> str:
    """The best and the worst response of a step, with prompt and reward; one where they are equal."""
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


def _curve(values: Sequence[float | None]) -> str:
    """One bar per value, from the lowest to the highest; a blank where it is unknown."""
    finite = [v for v in values if v is not None and math.isfinite(v)]
    low, span, top = min(finite, default=0), max(finite, default=0) - min(finite, default=0), len(BARS) - 1

    def bar(value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return " "
        return BARS[round((value - low) / span * top) if span else top // 2]

    return "".join(map(bar, values)) if finite else ""


class Interruption:
    """Whether a stop was requested."""

    def __init__(self) -> None:
        self.requested = False

    def check(self) -> None:
        """Called between pieces of work: raises `Interrupted` if a stop was requested."""
        if self.requested:
            raise Interrupted

    @contextmanager
    def on_signals(self, say: Callable[[str], None], pending: Callable[[], str]) -> Iterator[None]:
        """Make the first SIGINT or SIGTERM request a stop; the second stops at once.

        `pending`: what has to end before the stop, in words.
        """

        def ask(number: int, frame: object) -> None:
            if self.requested:
                raise KeyboardInterrupt
            self.requested = True
            say(
                f"stopping, with a checkpoint, when {pending()}. Again: stop at once, with everything up to "
                "the last checkpoint"
            )

        try:
            previous = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: signals are the caller's
            previous = {}
        try:
            yield
        finally:
            for s, handler in previous.items():
                signal.signal(s, handler)


class Watchdog:
    """Reports where its creator's thread is once a stage has made no progress for `seconds`.

    It reports again after twice that time, and so on. `seconds` = 0 watches nothing.
    """

    def __init__(self, seconds: float, say: Callable[[str], None]) -> None:
        self.seconds, self.say = seconds, say
        self._watched = threading.get_ident()
        self._stage_text = ""
        self._since = time.monotonic()
        self._limit = seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="agro watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self.seconds:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self.seconds:
            self._thread.join()

    def stage(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """A stage starts, or `done` of `total` of it are done."""
        self._stage_text = f"{name} {numbers.progress(done, total)}".strip()
        self.beat()

    def beat(self) -> None:
        """The stage makes progress."""
        self._since, self._limit = time.monotonic(), self.seconds

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self.seconds / 4)):
            idle = time.monotonic() - self._since
            if idle >= self._limit:
                self._limit *= 2
                self.say(
                    f"{self._stage_text or 'the run'} has made no progress for {idle:.0f} s{self._location()}"
                )

    def _location(self) -> str:
        """The innermost line of agro in the watched thread."""
        frame = sys._current_frames().get(self._watched)
        stack = [] if frame is None else traceback.extract_stack(frame)
        for innermost in reversed(stack):
            if innermost.filename.startswith(PACKAGE):
                path = Path(innermost.filename).relative_to(PACKAGE)
                return f"; it is in {path}:{innermost.lineno} ({innermost.name})"
        return ""


KINDS = 10  # of failures of rewards that are shown


class RunActivity(Activity):
    """See `agro.rollout.Activity`."""

    def __init__(
        self, progress: Progress, watchdog: Watchdog, interruption: Interruption, file: Path | None = None
    ) -> None:
        """`file`: gets the stage, for the page of a run that has no step yet."""
        self.progress, self.watchdog, self.interruption = progress, watchdog, interruption
        self.file, self._written = file, -math.inf
        self._stage, self._start = "", time.monotonic()
        self._seconds: dict[str, float] = {}  # that each stage took when it ran last
        self._failures: set[Hashable] = set()  # of rewards, the kinds that were shown

    def stage(self, name: str, done: int | None = None, total: int | None = None) -> None:
        is_new = name != self._stage
        if is_new:
            moment = time.monotonic()
            self._seconds[self._stage] = moment - self._start
            self._stage, self._start = name, moment
        self.progress.stage(name, done, total)
        self.watchdog.stage(name, done, total)
        if self.file is not None and (is_new or time.monotonic() - self._written >= 1.0):
            self._written = time.monotonic()
            with suppress(OSError):  # a full disk is told where something is lost
                self.file.write_text(f"{name} {numbers.progress(done, total)}".strip(), encoding="utf-8")

    def fail(self, kind: Hashable, error: str) -> None:
        if kind in self._failures or len(self._failures) == KINDS:
            return
        self._failures.add(kind)
        text = f"a reward is unknown, the first for this reason: {error}"
        if len(self._failures) == KINDS:
            text += "; other reasons aren't shown here, but in the store and on the page"
        self.progress.say(text)

    def check(self) -> None:
        self.watchdog.beat()
        self.interruption.check()

    def pending(self) -> str:
        """The present stage, which may end before the run can stop, and how long it still takes at most."""
        if not self._stage:
            return "the model is loaded"
        previous = self._seconds.get(self._stage)
        if previous is None:
            return f"{self._stage} can be interrupted or ends, after an unknown time: it runs the first time"
        remaining = duration(max(0.0, previous - (time.monotonic() - self._start)))
        return f"{self._stage} can be interrupted or ends, in about {remaining} at most by the last time"
