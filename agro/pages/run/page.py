"""The page of a run, one self-contained file. Units and captions of metrics come from `agro.runs.rundata`."""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup
from pydantic import TypeAdapter

from agro.io.numbers import count, duration, fixed, percent, short, with_error
from agro.pages.run import figures
from agro.pages.run.experience import LONGEST, RunExperience, begin_and_end, held_out_samples
from agro.pages.run.figures import Series, css, cut, heldout, smoothing, svg
from agro.pages.run.render import render, template_text, with_script
from agro.pages.run.verdict import Verdict
from agro.runs.problems import COUNTED, Problem, problems, way_out, without_share, without_signal
from agro.runs.rundata import (
    FOLLOWED,
    METRICS,
    TOKENS,
    Outcome,
    RunData,
    Values,
    data_text,
    options_text,
    to_array,
)
from agro.store import Draw
from agro.types import Text

REFERENCES = {
    "start": "the weights at the start of the run",
    "phase": "the weights at the start of each phase, so KL restarts in each",
    "model": "another model",
    "ema": "a moving average of the policy's weights, so KL doesn't add up over the run",
    "periodic": "a regularly updated copy of the policy, so KL doesn't add up over the run",
    "sampler": "the earlier weights that sampled, so KL doesn't add up over the run",
}
FURTHER = {  # counts of methods that do more with a prompt than sample responses
    "searched": "states in which turns were tried",
    "same_meaning": "responses that mean the same as another one",
    "hinted": "responses written with a hint",
    "experts": "responses of an expert",
}
PARTS = {
    "reward_parts": "Parts of the reward",
    "eval_reward_parts": "Parts of the held-out reward",
    "reward_shares": "Components of the reward differences",
}


@dataclass(frozen=True)
class Chart:
    """A small figure of templates/charts.toml, which documents the fields."""

    title: str
    lines: Mapping[str, str]
    text: str = ""
    gray: tuple[str, str | float] | None = None
    log: bool = False
    smoothed: bool = True
    varies: bool = False
    nonzero: bool = False
    explained: tuple[str, ...] | None = None


CHARTS = TypeAdapter(dict[str, list[Chart]]).validate_python(tomllib.loads(template_text("charts.toml")))


@dataclass(frozen=True)
class Panel:
    """A small figure with its title, caption and key: (CSS color, meaning)."""

    title: str
    caption: str
    figure: Markup
    key: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Fact:
    """A name and its value, with a note. `value` None: not measured. `bad`: highlighted."""

    name: str
    value: str | None
    note: str = ""
    bad: bool = False


def ring(run: RunData, row: int | None) -> str:
    """Explain the ring at a row; empty if there is none."""
    return "" if row is None else f"The ring is the best measurement, at step {run.rows[row]['step']}."


def caption(*metrics: str) -> str:
    """Join the captions of metrics, without backticks."""
    captions = [METRICS[name].caption for name in metrics if name in METRICS]
    return " ".join(captions).replace("`", "")


def column(run: RunData, name: str) -> Values:
    """Return a line's value in each row, of a metric or derived from several."""
    if name == "kl_ref":
        return run.training_kl
    if name == "consistency_of_reference":
        return run.column("eval_consistency") + run.column("eval_consistency_fall")
    if name == "explained_variance":  # a metric of objectives with a critic
        return to_array([(row.get("objective") or {}).get(name) for row in run.rows])
    return run.column(name)


def panels(run: RunData, section: str) -> list[Panel]:
    """Draw the charts of a section that have data."""
    charts = []
    for chart in CHARTS[section]:
        columns = {name: column(run, name) for name in chart.lines}
        available = {name: values for name, values in columns.items() if np.isfinite(values).any()}
        if not available:
            continue
        main = next(iter(chart.lines))
        main_values = columns[main][np.isfinite(columns[main])]
        if chart.nonzero and not main_values.any():
            continue
        if chart.varies and len(np.unique(main_values)) < 2:
            continue
        width = smoothing(len(run.rows)) if chart.smoothed else 1
        colors = figures.COLORS[1:] if main.startswith("eval_") else figures.COLORS
        series = []
        for (name, label), color in zip(chart.lines.items(), colors):
            if name.startswith("eval_"):
                series.append(heldout(run, name, label, color))
            else:
                series.append(Series(label, columns[name], color, smooth=width))
        texts = [caption(*available) if chart.explained is None else caption(*chart.explained)]
        if width > 1 and not all(name.startswith("eval_") for name in available):
            texts.append(f"Running mean over {width} steps.")
        texts.append(chart.text)
        if chart.gray is not None:
            name, compared = chart.gray
            smooth = 1
            if isinstance(compared, str):
                values = column(run, compared)
                smooth = smoothing(len(run.rows))
                if compared in METRICS and run.measures(compared):
                    texts.append(f"Gray: {caption(compared)}")
            else:
                values = np.where(np.isfinite(series[0].values), compared, math.nan)
            gray = Series(name, values, figures.MUTED, points=series[0].points, smooth=smooth)
            series.append(gray)
        unit = METRICS[main].unit if main in METRICS else ""
        style: dict[str, Any] = {"unit": unit, "log": chart.log}
        if unit == "share":
            style = {"percent": True}
        charts += panel(run, chart.title, " ".join(filter(None, texts)), series, **style)
    return charts


def panel(run: RunData, title: str, text: str, series: Sequence[Series], **style: Any) -> list[Panel]:
    """Draw series against steps, the first on top; no panel if no value is known. `style`: as for
    `figures.draw`."""
    if not any(np.isfinite(s.values).any() for s in series):
        return []
    rings = {ring(run, s.mark): None for s in series if s.mark is not None}
    figure = svg(figures.draw(run, series[::-1], **style), title)
    return [Panel(title, " ".join([text, *rings]), figure)]


def learning(run: RunData) -> dict[str, Any]:
    """Build the context of the section "Did it learn?"."""
    stored_only = run.total("sampled_tokens") == 0 and not run.measures("eval_reward")
    curves = {}
    if run.measures("reward_mean", "eval_reward") and not stored_only:
        sizes = (figures.WIDE, figures.NARROW)
        curves["steps"] = [svg(figures.learning_curve(run, size), f"steps {size}") for size in sizes]
        if figures.kl_pairs(run):
            curves["KL"] = [svg(figures.against_kl(run, size), f"KL {size}") for size in sizes]
    phases = []
    for span in run.spans:  # one row of the table per phase
        start, end = run.heldout(span.begins, span.begins), run.heldout(span.begins + 1, span.ends)
        config = run.config_of(span)
        row = {"config": config, "options": options_text(config), "data": data_text(config), "before": start}
        change = end.value - start.value if start and end else None
        phases.append({**row, "after": end, "span": span, "change": change})
    charts = panels(run, "learning")
    for metric, title in PARTS.items():
        charts += _parts(run, metric, title)
    return {
        "curves": curves,
        "stored_only": stored_only,
        "width": smoothing(len(run.rows)),
        "evaluated": run.heldout(0, run.steps) is not None,
        "ring": ring(run, run.mark("eval_reward")),
        "averages": run.averages,
        "reference": REFERENCES[run.policy.reference],
        "phases": phases,
        "panels": charts,
    }


def _parts(run: RunData, metric: str, title: str) -> list[Panel]:
    """Draw a metric of the reward's parts, if there are several."""
    is_heldout = metric.startswith("eval_")
    parts = [row.get(metric) or {} for row in run.rows]
    names = list(dict.fromkeys(name for row in parts for name in row))
    if len(names) < 2:
        return []
    errors = [row.get(f"{metric}_se") or {} for row in run.rows]
    width = 1 if is_heldout else smoothing(len(run.rows))
    series = []
    for name, color in zip(names, figures.COLORS, strict=False):
        values = to_array([row.get(name) for row in parts])
        se = to_array([row.get(name) for row in errors]) if is_heldout else None
        series.append(Series(cut(name, 16), values, color, se=se, points=is_heldout, smooth=width))
    more = len(names) - len(series)
    text = caption(metric) + (f" {more} more in metrics.jsonl." if more else "")
    return panel(run, title, text, series, unit=METRICS[metric].unit)


def nearness(run: RunData) -> dict[str, Any]:
    """Build the context of the section "Did it stay near the reference?"."""
    policy, held_out = run.policy, run.config.asks_held_out
    reference = REFERENCES[policy.reference]
    if policy.reference_model:
        reference += f": {policy.reference_model}"
    facts = [Fact("reference", reference)]
    for name, values, choose in (
        ("held-out KL at the end" if held_out else "KL at the end", run.column("eval_kl_ref"), None),
        ("highest KL in training", run.training_kl, np.nanargmax),
    ):
        finite = np.flatnonzero(np.isfinite(values))
        if finite.size:
            row = int(finite[-1] if choose is None else choose(values))
            note = f"nats per response, step {run.rows[row]['step']}"
            facts.append(Fact(name, fixed(values[row]), note))
    return {"panels": panels(run, "nearness"), "facts": facts}


def page(run: RunData) -> str:
    """Render the page of a run."""
    experience, report, shown = RunExperience.of(run), problems(run), held_out_samples(run)
    policy = run.config.policy
    model = policy.model or "A model"
    if policy.new is not None:
        model = f"A new model ({policy.new.layers} layers of {policy.new.hidden})"
    facts = [Fact("seed", str(run.config.train.seed))]
    if run.config.data.hold_out:
        note = f"never trained on (data.hold_out); set_aside.jsonl has {run.set_aside} of them"
        facts.append(Fact("held-out prompts", percent(run.config.data.hold_out, 1), note))
    if run.best_model is not None:
        best = run.best_model
        value = fixed(best.value) if best.se is None else with_error(best.value, best.se)
        note = f"{FOLLOWED[best.metric]}, step {best.step}"
        facts.append(Fact("best model, saved in best/", value, note))
    for name, epochs in (run.values.get("epochs") or {}).items():
        if name in run.config.phase_names and run.config.phase(name).train.steps == epochs["steps"]:
            note = f"passes over {count(epochs['groups'])} stored groups, {count(epochs['steps'])} steps"
            facts.append(Fact(f"epochs of {name}", f"{epochs['epochs']:g}", note))
    text = render(
        "page.html",
        run=run,
        model=model,
        problems=report,
        outcome=Outcome.of(run),
        verdict=Verdict.of(run),
        shown=shown,
        learning=learning(run),
        nearness=nearness(run),
        course=course(run),
        material=material(run, experience),
        health=health(run, report, experience),
        longest=LONGEST,
        facts=facts,
        config=json.dumps(run.values, indent=2, ensure_ascii=False),
        prompt_text=prompt_text,
    )
    return text if shown is None else with_script(text, template_text("samples.js"))


def prompt_text(prompt: Text) -> str:
    """Format messages by role and text; anything else, such as tool calls, as JSON."""
    if isinstance(prompt, str):
        return prompt
    lines = []
    for message in prompt:
        remaining = {k: v for k, v in message.items() if k != "role"}
        content, line = remaining.pop("content", None), f"{message['role']}:"
        if isinstance(content, str):
            line += f" {content}"
        elif content is not None:
            remaining["content"] = content
        lines.append(f"{line} {json.dumps(remaining, ensure_ascii=False)}" if remaining else line)
    return "\n".join(lines)


def course(run: RunData) -> dict[str, Any]:
    """Build the context of the section "How was it optimized?"."""
    facts = []
    seconds = run.total("seconds")
    tokens = (run.total("tokens") or 0.0) + (run.total("sampled_tokens") or 0.0)
    if seconds:
        facts.append(Fact("time of all steps", duration(seconds), "without loading and evaluations"))
        facts.append(Fact("tokens per second", short(tokens / seconds), "mean over the run"))
        titles = {"seconds_sample": "drawing, sampling and scoring", "seconds_train": "training"}
        for name, title in titles.items():
            part = run.total(name)
            if part is not None:
                facts.append(Fact(title, percent(part / seconds), "of the time"))
    rates = set(run.column("lr")[np.isfinite(run.column("lr"))].tolist())
    if len(rates) == 1:
        facts.append(Fact("learning rate", f"{rates.pop():.3g}", "constant"))
    return {"facts": facts, "panels": panels(run, "course")}


def health(run: RunData, problems: Sequence[Problem], experience: RunExperience) -> dict[str, Any]:
    """Build the context of the section "Was anything wrong?". `problems`: the run's."""
    facts = [Fact(p.title, p.value, p.detail, bad=True) for p in problems if p.detail]
    reasons: Counter[str] = Counter()
    for row in run.rows:
        reasons.update(row.get("dropped_reasons") or {})
    notes = {
        "dropped": ", ".join(f"{reason}: {count(k)}" for reason, k in reasons.most_common()),
        "rewards_failed": "; ".join(f"{count(k)} × {cut(e, 200)}" for e, k in experience.failures[:3]),
    }
    for name, title in COUNTED.items():
        facts.append(Fact(title, run.counted(name), notes.get(name, ""), bad=bool(run.total(name))))
    groups, equal = run.total("groups"), run.total("groups_equal")
    equal_groups, unsignaled = Fact("groups of equal rewards", None), Fact("steps without a signal", None)
    if groups and equal is not None:
        text = f"{count(equal)} of {count(groups)} ({percent(equal / groups)})"
        equal_groups = replace(equal_groups, value=text, bad=equal > groups / 2)
    signal, share = without_signal(run), without_share(run)
    if signal is not None:
        data = run.config_of(run.spans[-1]).data
        ways = ". ".join(f"{reason}: {way_out(reason, data)}" for reason in signal.reasons)
        unsignaled = replace(unsignaled, value=signal.text, note=ways, bad=signal.is_said)
    facts += [equal_groups, unsignaled]
    if share is not None and share.count:
        note = "fewer stored groups than data.replay requests; filters such as data.sources limit them"
        facts.append(Fact("steps with less replay", share.text, note, bad=share.is_said))
    return {"facts": facts, "panels": panels(run, "health")}


def material(run: RunData, experience: RunExperience) -> dict[str, Any]:
    """Build the context of the section "What was it trained on?"."""
    # One row per phase and source, the most frequent source of a phase first.
    phase = {row["step"]: row["phase"] for row in run.rows}
    draws_of: dict[str, dict[str, list[Draw]]] = {span.name: {} for span in run.spans}
    for draw, source in zip(experience.draws, experience.sources, strict=True):
        draws_of[phase[draw.step]].setdefault(source, []).append(draw)
    rows = []
    for name, source_draws in draws_of.items():
        total = sum(map(len, source_draws.values()))
        for source, draws in sorted(source_draws.items(), key=lambda item: -len(item[1])):
            rewards = [d.reward for d in draws if d.reward is not None]
            staleness = [d.staleness for d in draws if d.staleness is not None]
            rows.append(
                {
                    "phase": name,
                    "source": source,
                    "share": len(draws) / total,
                    "drawn": len(draws),
                    "distinct": len({d.sample for d in draws}),
                    "reward": sum(rewards) / len(rewards) if rewards else None,
                    "staleness": sum(staleness) / len(staleness) if staleness else None,
                    "stalest": max(staleness, default=None),
                }
            )
    histograms = []
    for title, name, unit in (("Rewards", "reward", "reward"), ("Lengths", "length", "tokens")):
        windows = begin_and_end(experience.column("step"), experience.column(name))
        if windows is not None:
            begin, end = windows
            means = [f"steps {w.start} to {w.stop}, mean {w.values.mean():.3g}" for w in windows]
            counts = f"{count(len(begin.values))} and {count(len(end.values))}"
            text = f"Responses drawn in the first and the last tenth of the steps: {counts}."
            figure = svg(figures.histogram(begin.values, end.values, unit), title)
            key = tuple(zip(map(css, (figures.MUTED, figures.FIRST)), means))
            histograms.append(Panel(title, text, figure, key))
    prompts = ", ".join(run.config.data.paths("prompts"))
    facts = [Fact("reward", run.config.reward.title), Fact("prompts", prompts or "none")]
    facts += [Fact(title, run.counted(name)) for title, name in TOKENS.items()]
    responses = run.latest("eval_n")
    facts.append(Fact("held-out responses", None if responses is None else count(responses)))
    if run.total("truncated_share") == 0:
        facts.append(Fact("truncated responses", "none"))
    facts += [Fact(title, run.counted(name)) for name, title in FURTHER.items() if run.total(name)]
    return {
        "facts": facts,
        "sources": rows,
        "phased": len(run.spans) > 1,
        "problem": experience.problem or "The store has no draws of this run, so sources are unknown.",
        "panels": [*histograms, *panels(run, "material")],
    }
