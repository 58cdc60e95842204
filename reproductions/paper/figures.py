"""The figure of each part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from reproductions.paper import drawing
from reproductions.paper import plans as m
from reproductions.paper.drawing import STYLES, Line, Panel, Style
from reproductions.paper.experiments import PARTS
from reproductions.paper.plans import CAREFUL, CARELESS, LAGS, METHODS, MIXTURE, PLANS, SHARES
from reproductions.paper.rules import Found, end
from reproductions.paper.task import OTHER, START

KL_NAME, UPDATES = r"KL($\pi\,\Vert\,\pi_\mathrm{ref}$), nats", "updates"


def figures(found: Mapping[str, Found]) -> dict[str, Figure]:
    """By file name, of the parts that were run."""
    makers = {"offline": _offline, "replay": _replay, "lag": _lag, "fresh": _fresh, "beta": _beta}
    return {name: make(found[name]) for name, make in makers.items() if name in found}


def _style(name: str) -> Style:
    """A method looks the same in every figure."""
    return STYLES[METHODS[name].look]


def _lines(found: Found, plan: str, methods: Sequence[str]) -> list[Line]:
    return [
        Line(name, _style(name), found[name, plan, None])
        for name in sorted(methods, key=list(METHODS).index)
        if (name, plan, None) in found
    ]


def _against_kl(panel: Panel) -> Panel:
    return replace(panel, title="", x=drawing.kl, x_name=KL_NAME, own_x=True)


def _offline(found: Found) -> Figure:
    titles = {START: "the start's log", OTHER: "another model's log", MIXTURE: "unknown mixture"}
    first = [
        Panel(
            f"{title}, n = 4",
            _lines(found, f"{log}, n = 4", PARTS["offline"].methods),
            drawing.updates,
            drawing.accuracy,
            UPDATES,
            "accuracy" if log == START else "",
        )
        for log, title in titles.items()
    ]
    return drawing.draw([first, [_against_kl(panel) for panel in first]])


def _replay(found: Found) -> Figure:
    shades = (STYLES[0], STYLES[2], STYLES[8])
    rows = []
    for name in (m.AGRO, m.WEIGHTED, m.BY_SAMPLER):
        lines = [
            Line(f"replay {share:.0%}", style, found.get((name, f"replay {share:g}", None), []))
            for share, style in zip(SHARES, shades, strict=True)
        ]
        panel = Panel(name, lines, drawing.updates, drawing.accuracy, UPDATES, "accuracy")
        sampled = replace(panel, title="", x=drawing.generated, x_name="responses generated", y_name="")
        rows.append([panel, replace(_against_kl(panel), y_name=""), sampled])
    return drawing.draw(rows, height=1.7)


def _lag(found: Found) -> Figure:
    """Accuracy at the end over the lag, and on the way with the largest one."""
    methods = PARTS["lag"].methods
    over_lag = []
    lags = [lag for lag in LAGS if (m.AGRO, f"sync {lag}", None) in found]
    shown = [name for name in methods if all((name, f"sync {lag}", None) in found for lag in lags)]
    for name in sorted(shown, key=list(METHODS).index):
        ends = [[end(run) for run in found[name, f"sync {lag}", None]] for lag in lags]
        by_seed = [{"ends": of_seed} for of_seed in zip(*ends)]  # of the seeds that all have
        over_lag.append(Line(name, _style(name), by_seed))
    last = f"sync {LAGS[-1]}"
    panels = [
        Panel("at the end", over_lag, lambda _: lags, _ends, "lag, updates", "accuracy", log_x=True),
        Panel(f"lag {LAGS[-1]}", _lines(found, last, methods), drawing.updates, drawing.accuracy, UPDATES),
    ]
    return drawing.draw([[*panels, _against_kl(panels[1])]], height=2.3)


def _ends(run: Mapping[str, Any]) -> list[float]:
    return list(run["ends"])


def _fresh(found: Found) -> Figure:
    rows = []
    for start in (CARELESS, CAREFUL):
        plan = f"fresh, {start}"
        right = "3 times in 10" if start == CARELESS else "2 times in 3"
        lines = _lines(found, plan, PARTS["fresh"].methods)
        every = PLANS[plan].every
        panel = Panel(
            f"start right {right}",
            lines,
            lambda run, every=every: [every * (i + 0.5) for i in range(len(run["rewards"]))],
            drawing.rewarded,
            UPDATES,
            "training reward",
        )
        held_out = replace(panel, title="held out", x=drawing.updates, y=drawing.accuracy, y_name="accuracy")
        rows.append([panel, held_out, replace(_against_kl(held_out), y_name="")])
    return drawing.draw(rows)


def _beta(found: Found) -> Figure:
    shown = (
        (m.ON_POLICY, f"fresh, {CAREFUL}", "on-policy AGRO, fresh"),
        (m.AGRO, f"fresh, {CAREFUL}", "AGRO, fresh"),
        (m.AGRO, f"{START}, n = 4", "AGRO, the start's log"),
    )
    shades = (STYLES[1], STYLES[0], STYLES[2], STYLES[6], STYLES[8])
    first = []
    for name, plan, title in shown:
        lines = [
            Line(rf"$\beta$ = {beta:g}", style, found.get((name, plan, beta), []))
            for beta, style in zip(PARTS["beta"].betas or (), shades, strict=True)
        ]
        panel = Panel(title, lines, drawing.updates, drawing.accuracy, UPDATES)
        first.append(panel)
    first[0] = replace(first[0], y_name="accuracy")
    return drawing.draw([first, [_against_kl(panel) for panel in first]])
