"""The page of `agro check`: one self-contained file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from agro.errors import Refused
from agro.io.files import write
from agro.io.numbers import count, fixed, percent
from agro.pages.run.figures import (
    COLORS,
    FIRST,
    css,
    draw_bars,
    draw_bins,
    is_beside,
    name_axes,
    share_axes,
    svg,
)
from agro.pages.run.page import present
from agro.pages.run.render import Fact, Panel, render
from agro.pages.store.check_report import Report, model_lines, survey_lines
from agro.pages.store.check_survey import BINS, Spread

ROWS = 12  # sources in the table


def write_page(report: Report, folder: Path) -> Path:
    """Write check.html and check.json into `folder`, which is made, and return the page's path."""
    if folder.exists() and not folder.is_dir():
        raise Refused(f"--out {folder}: expected a folder, got a file; give another path")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "check.html"
    write(path, page(report))
    write(folder / "check.json", json.dumps(report.to_json(), ensure_ascii=False, indent=1) + "\n")
    return path


def page(report: Report) -> str:
    """The page as text."""
    return render(
        "check.html",
        report=report,
        facts=[Fact(name, value) for name, value in survey_lines(report)],
        groups=present(_groups(report)),
        sources=[_row(report, name) for name in report.sources[:ROWS]],
        more=max(0, len(report.sources) - ROWS),
        texts=present(_texts(report)),
        model_facts=[Fact(name, value) for name, value in model_lines(report)],
        model=list(_model(report)),
        json=json.dumps(report.to_json(), ensure_ascii=False, indent=1),
    )


def _row(report: Report, name: str) -> dict[str, Any]:
    source = report.survey.sources[name]
    return {
        "name": name or "(no name)",
        "role": ", ".join(sorted(source.roles)),
        "rows": source.rows,
        "rewards": source.rewards,
        "length": source.lengths.mean,
        "truncated": percent(source.truncated / source.ended) if source.ended else None,
        "behavior": percent(source.with_behavior / source.rows),
        "license": report.licenses.get(name),
    }


def _source_spreads(report: Report, name: str) -> dict[str, Spread]:
    """A spread of each source that has any values."""
    sources = report.survey.sources
    spreads = {key: getattr(sources[key], name) for key in report.sources}
    return {key: spread for key, spread in spreads.items() if spread.count}


def _groups(report: Report) -> Iterator[Panel | None]:
    survey = report.survey
    if survey.sizes:
        yield Panel(
            "Sizes of groups",
            "Responses to one prompt. One alone can't be compared.",
            sizes(survey.sizes),
        )
    yield _panel("Rewards", "By source, all responses.", _source_spreads(report, "rewards"), "reward")
    yield _spread_panel(
        "Trajectory quality",
        "(mean − worst) / (best − worst) reward of each group with unequal rewards (TQ, arXiv 2111.04714). "
        "Near 1 imitation is enough; near 0 few responses show what is good.",
        survey.quality,
        "TQ",
    )
    yield _spread_panel(
        "Coverage",
        "Distinct responses per response, of each group (SACo). Near 0 the responses repeat each other.",
        survey.coverage,
        "SACo",
    )


def _spread_panel(title: str, text: str, spread: Spread, unit: str) -> Panel | None:
    if not spread.count:
        return None
    text = f"{text} Mean {fixed(spread.mean)} of {count(spread.count)} groups."
    return Panel(title, text, spreads({"": spread}, unit, title, of="groups"))


def _texts(report: Report) -> Iterator[Panel | None]:
    lengths = _source_spreads(report, "lengths")
    yield _panel("Lengths", "Of responses, in characters.", lengths, "characters", log=True)
    tokens = _source_spreads(report, "tokens")
    yield _panel("Tokens", "Of responses whose tokens are stored.", tokens, "tokens", log=True)


def _panel(title: str, text: str, series: dict[str, Spread], unit: str, *, log: bool = False) -> Panel | None:
    if not series:
        return None
    more = len(series) - MOST
    if more > 0:
        text += f" The {MOST} largest sources; {more} more aren't shown."
    return Panel(title, text, spreads(series, unit, title, log=log), key(series))


def _model(report: Report) -> Iterator[Panel]:
    measured = report.measured
    if measured is None or not measured.groups:
        return
    per_token = measured.per_token
    if len(per_token["best"]):
        title = "Log π of a token"
        figure = densities(per_token, "nats", title)
        text = "Mean over the tokens of a response: the best and the worst responses of each group."
        yield Panel(title, text, figure, tuple((css(color), name) for color, name in zip(COLORS, per_token)))
    balance = measured.balance
    if len(np.unique(balance)) > 1:
        title = "Where rewards and log-ratios balance"
        figure = densities({"": balance}, "β", title, log=True)
        text = (
            "The β of each group at which β times the log-ratio differs as much as its rewards. "
            "Below it the rewards lead, above it the reference."
        )
        yield Panel(title, text, figure)


MOST = 4  # series of a figure
MOST_BARS = 16
Key = tuple[tuple[str, str], ...]


def sizes(groups: Mapping[int, int]) -> Markup:
    """The share of groups by their number of responses."""
    figure, axes = share_axes(below=1)
    numbers = sorted(groups)
    shares = np.array([groups[n] for n in numbers]) / sum(groups.values())
    if len(numbers) <= MOST_BARS:
        draw_bars(axes, list(map(str, numbers)), [(shares, FIRST)])
    else:
        edges = np.linspace(numbers[0] - 0.5, numbers[-1] + 0.5, BINS + 1)
        draw_bins(axes, edges, [(np.histogram(numbers, edges, weights=shares)[0], FIRST)])
    name_axes(axes, "responses in a group", "share of groups")
    return svg(figure, "group sizes")


def spreads(
    series: Mapping[str, Spread], unit: str, title: str, *, log: bool = False, of: str = "responses"
) -> Markup:
    """Shares of each of the series, which have the same edges; bars where all have few distinct values."""
    figure, axes = share_axes(below=int(not is_beside(unit)))
    shown = list(zip(series.values(), COLORS[:MOST]))
    values = sorted({value for spread, _ in shown for value in spread.values})
    if values and len(values) <= 2 * MOST and all(spread.values for spread, _ in shown):
        bars = [([spread.values[v] / spread.count for v in values], color) for spread, color in shown]
        draw_bars(axes, [f"{value:.4g}" for value in values], bars)
    else:
        used = np.flatnonzero(np.sum([spread.bins for spread, _ in shown], axis=0))
        begin, end = used[0], used[-1] + 1
        bins = [(np.array(spread.bins[begin:end]) / max(spread.count, 1), color) for spread, color in shown]
        draw_bins(axes, np.array(shown[0][0].edges[begin : end + 1], np.float64), bins, log=log)
    name_axes(axes, unit, f"share of {of}")
    return svg(figure, title)


def key(series: Mapping[str, Spread]) -> Key:
    """Colors and names of the series, the first `MOST`; empty for a single one."""
    if len(series) < 2:
        return ()
    shown = list(series.items())[:MOST]
    return tuple((css(COLORS[i]), f"{name:.40}, {count(s.count)}") for i, (name, s) in enumerate(shown))


def densities(series: Mapping[str, Any], unit: str, title: str, *, log: bool = False) -> Markup:
    """Shares of arrays of numbers, in common bins."""
    finite = {name: values[np.isfinite(values)] for name, values in series.items()}
    every = np.concatenate(list(finite.values()))
    if log:
        edges = np.geomspace(every.min(), every.max() * (1 + 1e-9), BINS + 1)
    else:
        edges = np.histogram_bin_edges(every, BINS)
    figure, axes = share_axes(below=int(not is_beside(unit)))
    bins = [np.histogram(values, edges)[0] / max(len(values), 1) for values in finite.values()]
    draw_bins(axes, edges, list(zip(bins, COLORS)), log=log)
    name_axes(axes, unit, "share")
    return svg(figure, title)
