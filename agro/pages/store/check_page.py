"""The page of `agro check`: one self-contained file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from agro.errors import Refused
from agro.io.files import write
from agro.io.numbers import count, fixed, percent
from agro.pages.run.figures import BINS, COLORS, FEW, css, shares, svg
from agro.pages.run.render import Fact, Panel, render
from agro.pages.store.check_report import Report, model_lines, survey_lines

ROWS = 12  # sources in the table
Values = NDArray[np.float64]


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
        groups=list(_groups(report)),
        sources=[_row(report, name) for name in report.sources[:ROWS]],
        more=max(0, len(report.sources) - ROWS),
        texts=list(_texts(report)),
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


MOST = 4  # series of a figure

LENGTHS = sorted({round(2 ** (i / 2)) for i in range(45)})  # edges of bins, which grow by √2


def _by_source(report: Report, name: str) -> dict[str, Values]:
    """The values of each source that has any."""
    sources = report.survey.sources
    spreads = {key: getattr(sources[key], name) for key in report.sources}
    return {key: spread.values for key, spread in spreads.items() if spread.count}


def _groups(report: Report) -> Iterator[Panel]:
    survey = report.survey
    if survey.sizes:
        title = "Sizes of groups"
        sizes = np.array(sorted(survey.sizes.elements()), np.float64)
        edges = np.linspace(sizes[0] - 0.5, sizes[-1] + 0.5, BINS + 1)
        figure = _shares({"": sizes}, "responses in a group", title, edges, few=2 * FEW, of="groups")
        yield Panel(title, "Responses to one prompt. One alone can't be compared.", figure)
    higher = survey.highest if survey.highest > survey.lowest else survey.lowest + 1
    edges = np.linspace(survey.lowest, higher, BINS + 1)
    yield from _panel("Rewards", "By source, all responses.", _by_source(report, "rewards"), "reward", edges)
    of_groups = (
        (
            "Trajectory quality",
            "(mean − worst) / (best − worst) reward of each group with unequal rewards (TQ, arXiv "
            "2111.04714). Near 1 imitation is enough; near 0 few responses show what is good.",
            survey.quality,
            "TQ",
        ),
        (
            "Coverage",
            "Distinct responses per response, of each group (SACo). Near 0 the responses repeat each other.",
            survey.coverage,
            "SACo",
        ),
    )
    for title, text, spread, unit in of_groups:
        if spread.count:
            text = f"{text} Mean {fixed(spread.mean)} of {count(spread.count)} groups."
            figure = _shares({"": spread.values}, unit, title, np.linspace(0, 1, 11), of="groups")
            yield Panel(title, text, figure)


def _texts(report: Report) -> Iterator[Panel]:
    lengths, tokens = _by_source(report, "lengths"), _by_source(report, "tokens")
    edges = np.array(LENGTHS, np.float64)
    yield from _panel("Lengths", "Of responses, in characters.", lengths, "characters", edges, log=True)
    text = "Of responses whose tokens are stored."
    yield from _panel("Tokens", text, tokens, "tokens", edges, log=True)


def _panel(
    title: str, text: str, series: dict[str, Values], unit: str, edges: Values, *, log: bool = False
) -> Iterator[Panel]:
    """Of each source, the first `MOST` of them; none where there is none."""
    if not series:
        return
    shown = dict(islice(series.items(), MOST))
    if len(series) > MOST:
        text += f" The {MOST} largest sources; {len(series) - MOST} more aren't shown."
    key = [(css(COLORS[i]), f"{name:.40}, {count(len(x))}") for i, (name, x) in enumerate(shown.items())]
    figure = _shares(shown, unit, title, edges, log=log)
    yield Panel(title, text, figure, tuple(key) if len(key) > 1 else ())


def _model(report: Report) -> Iterator[Panel]:
    measured = report.measured
    if measured is None or not measured.groups:
        return
    per_token = {name: values[np.isfinite(values)] for name, values in measured.per_token.items()}
    if len(per_token["best"]):
        title = "Log π of a token"
        text = "Mean over the tokens of a response: the best and the worst responses of each group."
        edges = np.histogram_bin_edges(np.concatenate(list(per_token.values())), BINS)
        figure = _shares(per_token, "nats", title, edges, few=0)
        yield Panel(title, text, figure, tuple((css(color), name) for color, name in zip(COLORS, per_token)))
    balance = measured.balance[np.isfinite(measured.balance)]
    if len(np.unique(balance)) > 1:
        title = "Where rewards and log-ratios balance"
        text = (
            "The β of each group at which β times the log-ratio differs as much as its rewards. "
            "Below it the rewards lead, above it the reference."
        )
        edges = np.geomspace(balance.min(), balance.max() * (1 + 1e-9), BINS + 1)
        yield Panel(title, text, _shares({"": balance}, "β", title, edges, few=0, log=True, of="groups"))


def _shares(series: Mapping[str, Values], unit: str, title: str, edges: Values, **how: Any) -> Markup:
    return svg(shares(list(zip(series.values(), COLORS)), unit, edges, **how), title)
