"""Section of the page: what was it trained on?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure

from agro.report.curves import smoothing
from agro.report.experience import Experience, begin_and_end, mean_of
from agro.report.figures import COLOURS, FIRST, MUTED, SECOND, Series, draw
from agro.report.markup import UNKNOWN, aside, escape, facts, key, panel, table, unknown
from agro.report.metrics import RunData, Values
from agro.report.shares import sources, spread
from agro.store import Draw


def material(run: RunData, experience: Experience) -> str:
    return (
        _facts(run)
        + (_sources(run, experience) if experience.draws else unknown(_why(experience)))
        + f'<div class="panels">{"".join(_panels(run, experience))}</div>'
    )


def _why(experience: Experience) -> str:
    return (
        experience.problem
        or "The store holds no draw of this run, so sources and distributions aren't known."
    )


def _facts(run: RunData) -> str:
    def total(name: str) -> str | None:
        value = run.total(name)
        return None if value is None else f"{value:,.0f}"

    heldout = next((row["eval_n"] for row in reversed(run.rows) if row.get("eval_n") is not None), None)
    return facts(
        {
            "reward": escape(run.config.reward.title),
            "prompts": escape(run.config.data.prompts or "none"),
            "tokens trained on": total("tokens"),
            "tokens sampled": total("sampled_tokens"),
            "held-out responses": None if heldout is None else f"{heldout:,}",
        }
    )


def _sources(run: RunData, experience: Experience) -> str:
    """A row a source and phase, the most frequent source of a phase first."""
    phase = {row["step"]: row["phase"] for row in run.rows}
    found: dict[tuple[str, str], list[Draw]] = {}
    for draw_, source in zip(experience.draws, experience.sources, strict=True):
        found.setdefault((phase[draw_.step], source), []).append(draw_)
    total = {name: sum(len(d) for (p, _), d in found.items() if p == name) for name in phase.values()}
    order = [span.name for span in run.spans]
    rows = [
        {
            **({"phase": escape(name)} if len(run.spans) > 1 else {}),
            "source": escape(source),
            "drawn": f"{len(draws):,}" + aside(_share(len(draws) / total[name])),
            "different": f"{len({d.sample for d in draws}):,}",
            "mean reward": _mean(draws, lambda d: d.reward, ".3f"),
            "age": _age(draws),
        }
        for (name, source), draws in sorted(
            found.items(), key=lambda item: (order.index(item[0][0]), -len(item[1]))
        )
    ]
    return table(rows, {"drawn": "responses drawn", "age": "age in steps"})


def _share(share: float) -> str:
    return "all" if share == 1 else f"{share:.1%}"


def _mean(draws: list[Draw], value: Callable[[Draw], float | None], form: str) -> str:
    mean = mean_of(draws, value)
    return UNKNOWN if mean is None else f"{mean:{form}}"


def _age(draws: list[Draw]) -> str:
    ages = [d.age for d in draws if d.age is not None]
    if not ages:
        return '<span class="unknown">unknown</span>'
    return "0" if max(ages) == 0 else f"{sum(ages) / len(ages):.1f}" + aside(f"at most {max(ages)}")


def _panels(run: RunData, experience: Experience) -> list[str]:
    width = smoothing(len(run.rows))
    mean = f", running mean over {width} steps" if width > 1 else ""
    return [
        *_sources_figure(run, experience),
        _spread("Rewards", "reward", experience, experience.rewards),
        _spread("Lengths", "tokens", experience, experience.lengths, whole=True),
        panel(
            "Length over steps",
            f"Mean length of what a step trained on{mean}.",
            _lines(run, {"length": "length_mean"}, unit="tokens", smooth=width),
        ),
        panel(
            "Truncated responses",
            f"Share that reached the limit of tokens before their end{mean}.",
            _lines(run, {"truncated": "truncated_share"}, percent=True, smooth=width),
        ),
        panel(
            "Staleness",
            "Updates between the weights that wrote a response and those that learn from it.",
            _lines(run, {"maximum": "staleness_max", "mean": "staleness_mean"}, unit="optimiser steps"),
        ),
    ]


def _lines(
    run: RunData, columns: dict[str, str], *, unit: str = "", percent: bool = False, smooth: int = 1
) -> Figure | None:
    """Metrics against steps, the one that is drawn last in the first colour."""
    series = [
        Series(label, run.column(name), SECOND if i < len(columns) - 1 else FIRST, smooth=smooth)
        for i, (label, name) in enumerate(columns.items())
    ]
    known = any(np.isfinite(s.values).any() for s in series)
    return draw(run, series, unit=unit, percent=percent) if known else None


def _sources_figure(run: RunData, experience: Experience) -> list[str]:
    names = experience.source_names
    if len(names) < 2:
        return []  # the table says it all
    labels = [names.index(n) for n in experience.sources]
    figure = sources(run, experience.steps, labels, len(names))
    entries = [(COLOURS[i], name[:60]) for i, name in enumerate(names)]
    return [panel("Sources over steps", "Where the responses of a step came from.", figure, key(entries))]


def _spread(title: str, unit: str, experience: Experience, values: Values, *, whole: bool = False) -> str:
    found = begin_and_end(experience.steps, values)
    if found is None:
        return panel(title, "", None)
    begin, end = found
    entries = [
        (colour, f"steps {w.first} to {w.last}, mean {w.values.mean():.3g}")
        for colour, w in ((MUTED, begin), (FIRST, end))
    ]
    figure = spread(begin.values, end.values, unit, whole=whole)
    caption = f"Responses drawn in the first and the last tenth of the steps: {len(begin.values):,} and {len(end.values):,}."
    return panel(title, caption, figure, key(entries))
