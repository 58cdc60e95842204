"""Sections of the page: did it learn, and did it stay near the reference?"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from markupsafe import Markup

from agro.io.numbers import fixed, with_error
from agro.pages.run.axes import COLORS, MUTED, NARROW, SECOND, WIDE, Size, cut
from agro.pages.run.curves import against_kl, kl_pairs, learning_curve, reward_series, smoothing
from agro.pages.run.experience import RunExperience
from agro.pages.run.figures import Axis, Look, Series, columns, svg
from agro.pages.run.hover import hover
from agro.pages.run.panels import caption, heldout, panel, present, ring, training
from agro.pages.run.render import Fact, Panel
from agro.runs.metrics import METRICS
from agro.runs.rundata import PhaseSpan, RunData, to_array

REFERENCES = {
    "start": "the weights at the start of the run",
    "phase": "the weights at the start of each phase, so KL is measured anew in each",
    "model": "another model",
    "ema": "a moving average of the policy's weights, so KL doesn't add up over the run",
    "periodic": "a copy of the policy that is renewed regularly, so KL doesn't add up over the run",
    "sampler": "the earlier weights that sample, so KL doesn't add up over the run",
}


PARTS = {
    "reward_parts": "Parts of the reward",
    "eval_reward_parts": "Parts of the held-out reward",
    "reward_shares": "What the reward's differences are made of",
}


def learning(run: RunData, experience: RunExperience) -> dict[str, Any]:
    """What the template's first section shows."""
    stored_only = run.total("sampled_tokens") == 0 and not run.measures("eval_reward")
    curves = {}
    if run.measures("reward_mean", "eval_reward") and not stored_only:
        # The learning curve by the name of its axis: those axes that were measured.
        axes = {"steps": Axis.steps(run)}
        time = Axis.time(run)
        if time is not None:
            axes["time"] = time
        if experience.draws:
            axes["responses"] = Axis(experience.seen(run), "responses drawn")
        curves = {
            name: (_curve(run, name, axis, WIDE), _curve(run, name, axis, NARROW))
            for name, axis in axes.items()
        }
        if kl_pairs(run):
            curves["KL"] = (against_kl(run, WIDE), against_kl(run, NARROW))
    panels = (_ranking(run), _best_and_worst(run), _stored(run), _own(run), _regret(run))
    parts = [_parts(run, metric, title) for metric, title in PARTS.items()]
    # The decays of train.weights_average; empty where no phase has one.
    phases = {name: run.config.phase(name) for name in run.config.phase_names}
    decays = {name: phase.train.weights_average for name, phase in phases.items()}
    texts = {name: f"train.weights_average = {decay:g}" for name, decay in decays.items() if decay}
    if len(phases) > 1:
        texts = {name: f"{text} in phase {name}" for name, text in texts.items()}
    return {
        "curves": curves,
        "stored_only": stored_only,
        "width": smoothing(len(run.rows)),
        "evaluated": run.heldout(0, run.steps) is not None,
        "ring": ring(run, run.mark("eval_reward")),
        "averages": ", ".join(texts.values()),
        "reference": REFERENCES[run.config.policy.reference],
        "phases": [_phase(run, span) for span in run.spans],
        "panels": present([*panels, *parts]),
    }


def _curve(run: RunData, name: str, axis: Axis, size: Size) -> Markup:
    figure = learning_curve(run, size, axis=axis)
    values = columns(run, reward_series(run), axis)
    return svg(figure, f"Reward against {name} {size}", hover(figure.axes[0], values))


def _phase(run: RunData, span: PhaseSpan) -> dict[str, Any]:
    """A row of the table of phases."""
    start = run.heldout(span.begins, span.begins)
    end = run.heldout(span.begins + 1, span.ends)
    config = run.config.phase(span.name) if span.name in run.config.phase_names else run.config
    data = f"{config.data.replay_text} from the store"
    if not config.data.draws_stored:
        data = "fresh samples"
    elif not config.data.samples_fresh:
        data = "from the store"
    return {
        "name": span.name,
        "objective": config.objective.name,
        "options": ", ".join(f"{k} = {v}" for k, v in config.objective.options.items()),
        "data": data,
        "steps": span.ends - span.begins,
        "configured": config.train.steps,
        "ends": span.ends,
        "before": start,
        "after": end,
        "change": end.value - start.value if start and end else None,
    }


def _stored(run: RunData) -> Panel | None:
    """½ Var(R) on held-out groups of a store, where there were any."""
    values, improvement = run.column("eval_consistency"), run.column("eval_consistency_fall")
    if not np.isfinite(values).any():
        return None
    reference = Series("reference", values + improvement, MUTED, points=True)
    text = caption("eval_consistency")
    latest = run.rows[int(np.flatnonzero(np.isfinite(values))[-1])]
    if latest.get("eval_consistency_fall") is not None:
        better = with_error(latest["eval_consistency_fall"], latest.get("eval_consistency_fall_se"), 4)
        groups = latest.get("eval_groups", "an unknown number of")
        text += f" At step {latest['step']} it was {better} below the reference's, on {groups} groups."
    return panel(run, "Held-out ½ Var(R)", [reference, heldout(run, "eval_consistency", "policy")], text)


def _ranking(run: RunData) -> Panel | None:
    """AUC of log π/π_ref on held-out groups of a store, where there were any."""
    values = run.column("eval_auc")
    if not np.isfinite(values).any():
        return None
    chance = Series("chance", np.where(np.isfinite(values), 0.5, math.nan), MUTED, points=True)
    series = [chance, heldout(run, "eval_auc", "policy")]
    return panel(run, "Held-out ranking (AUC)", series, caption("eval_auc"))


def _best_and_worst(run: RunData) -> Panel | None:
    """Log-ratios of the best and the worst stored responses, where there were any."""
    if not run.measures("log_ratio_best", "eval_log_ratio_best"):
        return None
    width = smoothing(len(run.rows))
    series = [
        replace(heldout(run, "eval_log_ratio_worst", "held-out worst"), color=COLORS[4]),
        replace(heldout(run, "eval_log_ratio_best", "held-out best"), color=COLORS[2]),
        training(run, "log_ratio_worst", "worst", color=SECOND, smooth=width),
        training(run, "log_ratio_best", "best", smooth=width),
    ]
    text = (
        "Mean log π/π_ref of the stored responses with the highest and with the lowest reward of a group. "
        "The best should rise above 0; below 0, the policy moves away from them, which is right only where "
        "even these are poor."
    )
    ratio = run.latest("ratio_mean")
    if ratio is not None:
        text += f" The mean of π/π_ref over stored responses ended at {ratio:.3g} (1 at the reference)."
    look = Look(METRICS["log_ratio_best"].unit)
    return panel(run, "Log-ratio of the best and worst responses", series, text, look)


def _own(run: RunData) -> Panel | None:
    """½ Var(R) of the policy's own responses to held-out prompts."""
    if not run.measures("eval_fresh_consistency"):
        return None
    text = caption("eval_fresh_consistency")
    text += (
        " It is 0 too where all responses are the same, near 0 where no rewards differ, and it may rise "
        "first: read it beside the reward."
    )
    series = [heldout(run, "eval_fresh_consistency", "policy")]
    return panel(run, "½ Var(R) of held-out responses", series, text)


def _regret(run: RunData) -> Panel | None:
    """Estimated regret of fresh and of held-out groups."""
    if not run.measures("regret", "eval_regret"):
        return None
    series = [training(run, "regret", smooth=smoothing(len(run.rows))), heldout(run, "eval_regret")]
    text = f"{caption('regret')} {METRICS['regret'].computed}; R = r − β log π/π_ref."
    return panel(run, "Estimated regret", series, text, Look(METRICS["regret"].unit))


def _parts(run: RunData, metric: str, title: str) -> Panel | None:
    """A metric of the parts of the reward, where there are several."""
    parts = [row.get(metric) or {} for row in run.rows]
    names = list(dict.fromkeys(name for row in parts for name in row))
    if len(names) < 2:
        return None
    points = metric.startswith("eval_")
    errors = [row.get(f"{metric}_se") or {} for row in run.rows]
    series = []
    for name, color in zip(names, COLORS, strict=False):
        values = to_array([row.get(name) for row in parts])
        width = 1 if points else smoothing(len(run.rows))
        se = to_array([row.get(name) for row in errors]) if points else None
        series.append(Series(cut(name, 16), values, color, se=se, points=points, smooth=width))
    text = caption(metric)
    more = len(names) - len(series)
    if more:
        text += f" {more} more in metrics.jsonl."
    return panel(run, title, series, text, Look(METRICS[metric].unit))


def nearness(run: RunData) -> dict[str, Any]:
    """What the template's section about the reference shows."""
    split = run.config.policy.reference == "phase"
    fresh = Series("training", run.training_kl)
    name = "held-out" if run.config.asks_held_out else "sampled"
    kl = [fresh, replace(heldout(run, "eval_kl_ref", name), split=split)]
    text = caption("kl_ref", "eval_kl_ref")
    if run.measures("kl_of_best") and run.measures("kl_ref", "eval_kl_ref"):
        best = Series("best of store", run.column("kl_of_best"), MUTED, smooth=smoothing(len(run.rows)))
        kl.insert(0, best)
        text += f" Gray: {caption('kl_of_best')}"
    look = Look(METRICS["kl_ref"].unit, log=True)
    panels = [panel(run, "KL to the reference", kl, text, look)]
    betas = run.column("beta")
    if len(set(betas[np.isfinite(betas)])) > 1:
        panels.append(panel(run, "β", [Series("β", betas)], caption("beta"), Look(METRICS["beta"].unit)))
    spread = run.column("kl_to_reward_spread")
    if np.isfinite(spread).any():
        optimum = Series("optimum", np.ones_like(spread), MUTED)
        text = caption("kl_to_reward_spread")
        text += " It is 1 at the optimum (gray); far above it, the rewards hardly count."
        series = [optimum, Series("policy", spread)]
        panels.append(panel(run, "KL spread to reward spread", series, text, Look("ratio", log=True)))
    return {"panels": present(panels), "facts": _kl_facts(run)}


def _kl_facts(run: RunData) -> list[Fact]:
    policy = run.config.policy
    reference = REFERENCES[policy.reference]
    if policy.reference_model:
        reference += f": {policy.reference_model}"
    facts = [Fact("reference", reference)]
    name = "held-out KL at the end" if run.config.asks_held_out else "KL at the end"
    kl = {name: run.column("eval_kl_ref"), "highest KL in training": run.training_kl}
    for name, values in kl.items():
        if not np.isfinite(values).any():
            continue
        row = int(np.flatnonzero(np.isfinite(values))[-1])
        if name.startswith("highest"):
            row = int(np.nanargmax(values))
        facts.append(Fact(name, fixed(values[row]), f"nats per response, step {run.rows[row]['step']}"))
    return facts
