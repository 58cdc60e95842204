"""Section of the page: how was it optimized? Loss, learning rate and speed."""

from __future__ import annotations

from typing import Any

import numpy as np

from agro.io.numbers import duration, percent, short
from agro.pages.run.axes import SECOND
from agro.pages.run.curves import smoothing
from agro.pages.run.figures import Look
from agro.pages.run.panels import caption, panel, present, training
from agro.pages.run.render import Fact, Panel
from agro.runs.metrics import METRICS
from agro.runs.problems import kept_share
from agro.runs.rundata import RunData


def course(run: RunData) -> dict[str, Any]:
    """What the template's section about the optimization shows."""
    return {
        "facts": _facts(run),
        "panels": present([loss(run), _learning_rate(run), _kept(run), _speed(run)]),
    }


def loss(run: RunData) -> Panel | None:
    """The loss of each step."""
    text = "Loss of the objective on the responses of each step. Losses of two objectives can't be compared."
    return panel(run, "Loss", [training(run, "loss", smooth=smoothing(len(run.rows)))], text)


def _learning_rate(run: RunData) -> Panel | None:
    """Where it changed; a constant one is a fact."""
    if len(_rates(run)) < 2:
        return None
    return panel(run, "Learning rate", [training(run, "lr")], caption("lr"))


def _kept(run: RunData) -> Panel | None:
    text, share = caption("promised", "kept"), kept_share(run.rows)
    if share is not None:
        text += f" The median of the last steps kept {percent(share)}."
    series = [training(run, "promised", "promised", color=SECOND), training(run, "kept", "kept")]
    return panel(run, "Promised and kept", series, text)


def _rates(run: RunData) -> set[float]:
    rates = run.column("lr")
    return set(rates[np.isfinite(rates)].tolist())


def _speed(run: RunData) -> Panel | None:
    series = [training(run, "tokens_per_second", smooth=smoothing(len(run.rows)))]
    text = "Tokens sampled and trained on, by the time of the step."
    return panel(run, "Speed", series, text, Look(METRICS["tokens_per_second"].unit))


def _facts(run: RunData) -> list[Fact]:
    facts = []
    seconds, tokens = (
        run.total("seconds"),
        (run.total("tokens") or 0.0) + (run.total("sampled_tokens") or 0.0),
    )
    if seconds:
        facts.append(Fact("time of all steps", duration(seconds), "without loading and evaluations"))
        facts.append(Fact("tokens per second", short(tokens / seconds), "mean over the run"))
        titles = {"seconds_sample": "drawing, sampling and scoring", "seconds_train": "training"}
        for name, title in titles.items():
            part = run.total(name)
            if part is not None:
                facts.append(Fact(title, percent(part / seconds), "of the time"))
    rates = _rates(run)
    if len(rates) == 1:
        facts.append(Fact("learning rate", f"{rates.pop():.3g}", "constant"))
    return facts
