"""What a run says on the way: a line a step, or, on a terminal, a display that stays in its place."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text as Shown

from agro.terminal import cut, plain
from agro.types import Sample, Text

BARS = "▁▂▃▄▅▆▇█"
REMEMBERED = 32  # rewards in the display's small curve
LONGEST = 600  # characters of a text that is shown
PAUSE = 0.1  # seconds at least between two redrawings


class Progress:
    """One line a step: phase, step, reward, KL, speed, time left."""

    def __init__(self, last: int, out: TextIO | None = None) -> None:
        self.last = last
        self.out = out or sys.stderr
        self.paces: list[float] = []  # seconds of the present phase's steps

    @classmethod
    def on(cls, last: int, store: Path) -> Progress:
        """On stderr: a display where that is a terminal which can redraw, else plain lines."""
        dull = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") in ("dumb", "unknown")
        return Progress(last) if dull or not sys.stderr.isatty() else Display(last, store)

    def say(self, text: str) -> None:
        print(text, file=self.out, flush=True)

    def stage(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """What the run is at, and how far in it."""

    def step(self, m: Mapping[str, Any]) -> None:
        shown = [f"{m['phase']} {m['step']}/{self.last}"]
        if m["seconds"] is not None:
            left = self._left(m)
            shown += [
                f"loss {_short(m['loss'])}",
                f"reward {_short(m['reward_mean'])}",
                f"KL {_short(m['kl_ref'])}",
            ]
            shown += [f"{_short(m['tokens_per_second'])} tok/s", f"{_clock(left)} left"]
        self.say("  ".join(shown + _events(m)))

    def close(self) -> None:
        """Leave the terminal as it was."""

    def _left(self, m: Mapping[str, Any]) -> float:
        """Seconds, at the median pace of the last steps."""
        self.paces = [*self.paces[-19:], m["seconds"]]
        return float((self.last - m["step"]) * sorted(self.paces)[len(self.paces) // 2])


class Display(Progress):
    """Three lines that are redrawn in their place; what is said, and steps with something to keep, stand above them.

    It is redrawn when something is reported, not by a thread of its own.
    """

    def __init__(self, last: int, store: Path, console: Console | None = None) -> None:
        super().__init__(last)
        self.store = store
        self.console = console or Console(stderr=True, markup=False, highlight=False)
        self.now: Mapping[str, Any] = {}  # the last step's metrics
        self.rewards: list[float | None] = []
        self.left: float | None = None
        self.name = self.at = ""  # the stage, without and with how far it is
        self.drawn = 0.0
        self.live = Live(
            get_renderable=self._render,
            console=self.console,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
        )

    def say(self, text: str) -> None:
        self.console.print(Shown(text))

    def stage(self, name: str, done: int | None = None, total: int | None = None) -> None:
        is_new, self.name = name != self.name, name
        self.at = name + ("" if done is None else f" {done}" if total is None else f" {done}/{total}")
        self._redraw(now=is_new)

    def step(self, m: Mapping[str, Any]) -> None:
        self.now = m
        if m["seconds"] is not None:
            self.left = self._left(m)
            self.rewards = [*self.rewards[1 - REMEMBERED :], m["reward_mean"]]
        if events := _events(m):
            self.say(
                "  ".join(
                    [f"{m['phase']} {m['step']}/{self.last}", f"reward {_short(m['reward_mean'])}", *events]
                )
            )
        self._redraw(now=m["step"] == self.last)

    def close(self) -> None:
        self.at = ""
        self.live.stop()

    def _redraw(self, *, now: bool) -> None:
        if not self.live.is_started:
            self.live.start()
        if now or time.monotonic() - self.drawn >= PAUSE:
            self.drawn = time.monotonic()
            self.live.refresh()

    def _render(self) -> Group:
        m, step = self.now, self.now.get("step", 0)
        place = Table.grid(padding=(0, 2))
        for _ in range(4):
            place.add_column(no_wrap=True)
        place.add_row(
            Shown(str(m.get("phase", "")), "bold"),
            Shown(f"{step}/{self.last}"),
            ProgressBar(self.last, step, width=max(10, min(40, self.console.width - 50))),
            Shown("" if self.left is None else f"{_clock(self.left)} left", "dim"),
        )
        numbers = Shown(no_wrap=True, overflow="ellipsis")
        for name, value, unit in (
            ("reward ", m.get("reward_mean"), ""),
            ("KL ", m.get("kl_ref"), " nats"),
            ("loss ", m.get("loss"), ""),
            ("", m.get("tokens_per_second"), " tokens/s"),
            ("store ", _size(self.store), ""),
        ):
            numbers.append(name, "dim").append(value if isinstance(value, str) else _short(value))
            numbers.append(f"{unit}  ", "dim")
        numbers.append(_curve(self.rewards), "cyan")
        return Group(place, numbers, Shown(self.at, "cyan", no_wrap=True, overflow="ellipsis"))


def _events(m: Mapping[str, Any]) -> list[str]:
    """What a step has besides its usual numbers."""
    shown = []
    if m.get("eval_reward") is not None:
        shown.append(f"held-out {m['eval_reward']:.3f} ± {m['eval_reward_se']:.3f}")
    if m.get("eval_consistency") is not None:
        shown.append(f"held-out ½Var(R) {m['eval_consistency']:.5f} ± {m['eval_consistency_se']:.5f}")
    if m["dropped"]:
        shown.append(
            "dropped " + ", ".join(f"{n} ({reason})" for reason, n in m["dropped_reasons"].items())
        )
    if m["skipped"]:
        shown.append("update skipped")
    return shown


def responses_text(step: int, samples: Sequence[Sample]) -> str:
    """The best and the worst response of a step, with prompt and reward; one where they don't differ."""
    known = sorted((s for s in samples if s.reward is not None), key=lambda s: s.reward or 0.0)
    ends = [known[-1], known[0]] if known and known[-1].reward != known[0].reward else list(samples[:1])
    return "\n".join(
        f"step {step}, reward {'unknown' if s.reward is None else f'{s.reward:g}'}, {cut(s.source or s.role, 80)}\n"
        f"  prompt    {_indented(s.prompt)}\n  response  {_indented(s.response)}"
        for s in ends
    )


def _indented(text: Text) -> str:
    return cut(plain(text), LONGEST).replace("\n", "\n" + " " * 12)


def _curve(values: Sequence[float | None]) -> str:
    """One bar a value, from the lowest to the highest of them; a blank where it is unknown."""
    known = [v for v in values if v is not None and math.isfinite(v)]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    top = len(BARS) - 1
    return "".join(
        " "
        if v is None or not math.isfinite(v)
        else BARS[round((v - low) / span * top) if span else top // 2]
        for v in values
    )


def _size(store: Path) -> str | None:
    """Of a store's file and its log, in binary units."""
    files = [f for f in (store, store.with_name(f"{store.name}-wal")) if f.exists()]
    size = float(sum(f.stat().st_size for f in files))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.3g} {unit}" if files else None
        size /= 1024
    raise AssertionError


def _short(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
