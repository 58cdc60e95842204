"""Section of the page: what was it trained on?"""

from __future__ import annotations

from typing import Any

import numpy as np

from agro.io.numbers import count, percent
from agro.pages.run.axes import COLORS, FIRST, MUTED, SECOND, css
from agro.pages.run.curves import smoothing
from agro.pages.run.experience import RunExperience, begin_and_end
from agro.pages.run.figures import Look, Series, svg
from agro.pages.run.panels import caption, panel, present, training
from agro.pages.run.render import Fact, Panel
from agro.pages.run.shares import histogram, sources
from agro.runs.metrics import METRICS
from agro.runs.rundata import RunData, Values
from agro.store import Draw

# Of what learns or lags beside the policy, where a run has it.
MECHANISMS = {
    "sampler_version": "Version of the sampler",
    "learned_auc": "AUC of the learned reward",
    "aggregate_kl": "KL of responses together",
    "draft_accepted": "Draft tokens accepted",
}


def material(run: RunData, experience: RunExperience) -> dict[str, Any]:
    """What the template's section about the training data shows."""
    # A row per phase and source, the most frequent source of a phase first.
    phase = {row["step"]: row["phase"] for row in run.rows}
    draws_of: dict[str, dict[str, list[Draw]]] = {span.name: {} for span in run.spans}
    for draw, source in zip(experience.draws, experience.sources, strict=True):
        draws_of[phase[draw.step]].setdefault(source, []).append(draw)
    rows = []
    for name, source_draws in draws_of.items():
        total = sum(map(len, source_draws.values()))
        for source, draws in sorted(source_draws.items(), key=lambda item: -len(item[1])):
            rows.append({"phase": name, "source": source, "share": len(draws) / total, **_row(draws)})
    width = smoothing(len(run.rows))
    mean = f" Running mean over {width} steps." if width > 1 else ""
    length, truncated = (training(run, m, smooth=width) for m in ("length_mean", "truncated_share"))
    staleness = [
        training(run, "staleness_max", "maximum", color=SECOND),
        training(run, "staleness_mean", "mean"),
    ]
    again = [training(run, "asked_again", "asked again"), training(run, "groups", "all", color=SECOND)]
    share, tokens, steps = Look(percent=True), Look("tokens"), Look(METRICS["staleness_mean"].unit)
    panels = [
        _sources_panel(run, experience),
        _distribution("Rewards", "reward", experience.steps, experience.rewards),
        _distribution("Lengths", "tokens", experience.steps, experience.lengths, integer=True),
        panel(run, "Length over steps", [length], caption("length_mean") + mean, tokens),
    ]
    if run.total("truncated_share"):
        panels.append(
            panel(run, "Truncated responses", [truncated], caption("truncated_share") + mean, share)
        )
    if run.measures("asked_again"):
        panels.append(panel(run, "Groups asked again", again, caption("asked_again"), Look("groups")))
    if run.total("staleness_max"):
        panels.append(panel(run, "Staleness", staleness, caption("staleness_mean", "staleness_max"), steps))
    for metric, title in MECHANISMS.items():
        look = Look(METRICS[metric].unit)
        panels.append(panel(run, title, [training(run, metric, smooth=width)], caption(metric) + mean, look))
    return {
        "facts": _facts(run),
        "sources": rows,
        "phased": len(run.spans) > 1,
        "problem": experience.problem or "The store has no draws of this run, so sources are unknown.",
        "panels": present([*panels, _critic_panel(run)]),
    }


def _facts(run: RunData) -> list[Fact]:
    totals = {
        "tokens trained on": run.total("tokens"),
        "tokens sampled": run.total("sampled_tokens"),
        "held-out responses": run.latest("eval_n"),
    }
    prompts = ", ".join(run.config.data.paths("prompts"))
    facts = [Fact("reward", run.config.reward.title), Fact("prompts", prompts or "none")]
    for name, value in totals.items():
        facts.append(Fact(name, None if value is None else count(value)))
    if run.total("truncated_share") == 0:
        facts.append(Fact("truncated responses", "none"))
    if run.measures("asked_again"):
        answers = count((run.total("hinted") or 0) + (run.total("experts") or 0))
        facts.append(
            Fact("groups asked again", count(run.total("asked_again") or 0), f"{answers} trained on")
        )
    if run.measures("searched"):
        facts.append(Fact("states searched", count(run.total("searched") or 0), "turns were tried in them"))
    if run.measures("same_meaning"):
        alike = count(run.total("same_meaning") or 0)
        facts.append(Fact("responses that mean the same", alike, "as another one to their prompt"))
    if run.measures("draft_accepted"):
        accepted = float(np.nanmean(run.column("draft_accepted")))
        facts.append(Fact("draft tokens accepted", percent(accepted), "mean over steps"))
    return facts


def _row(draws: list[Draw]) -> dict[str, Any]:
    rewards = [d.reward for d in draws if d.reward is not None]
    staleness = [d.staleness for d in draws if d.staleness is not None]
    return {
        "drawn": len(draws),
        "distinct": len({d.sample for d in draws}),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "staleness": sum(staleness) / len(staleness) if staleness else None,
        "stalest": max(staleness, default=None),
    }


def _critic_panel(run: RunData) -> Panel | None:
    """Of an objective with a critic, whose metric it is."""
    explained = [(row.get("objective") or {}).get("explained_variance") for row in run.rows]
    text = "Share of the variance of the value's targets that the value explained before the step. 0 is no "
    series = Series("training", np.array(explained, dtype=np.float64))
    return panel(run, "Variance explained by the critic", [series], f"{text}better than a constant.")


def _sources_panel(run: RunData, experience: RunExperience) -> Panel | None:
    names = experience.source_names
    if len(names) < 2:  # the table says it all
        return None
    labels = [names.index(n) for n in experience.sources]
    title = "Sources over steps"
    figure = svg(sources(run, experience.steps, labels, len(names)), title)
    key = tuple((css(COLORS[i]), name[:60]) for i, name in enumerate(names))
    return Panel(title, "Where the responses of a step came from.", figure, key)


def _distribution(
    title: str, unit: str, steps: Values, values: Values, *, integer: bool = False
) -> Panel | None:
    windows = begin_and_end(steps, values)
    if windows is None:
        return None
    begin, end = windows
    key = []
    for color, w in ((MUTED, begin), (FIRST, end)):
        key.append((css(color), f"steps {w.start} to {w.stop}, mean {w.values.mean():.3g}"))
    counts = f"{count(len(begin.values))} and {count(len(end.values))}"
    text = f"Responses drawn in the first and the last tenth of the steps: {counts}."
    figure = svg(histogram(begin.values, end.values, unit, integer=integer), title)
    return Panel(title, text, figure, tuple(key))
