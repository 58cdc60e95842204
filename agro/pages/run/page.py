"""The page of a run: one self-contained file."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from agro.io.files import write
from agro.io.numbers import count, duration, fixed, percent, short, with_error
from agro.pages.run.experience import LATE, RunExperience, begin_and_end
from agro.pages.run.figures import (
    COLORS,
    FIRST,
    MUTED,
    NARROW,
    PLAIN,
    SECOND,
    WIDE,
    Axis,
    Look,
    Series,
    Size,
    against_kl,
    columns,
    css,
    cut,
    histogram,
    hover,
    kl_pairs,
    learning_curve,
    picture,
    reward_series,
    smoothing,
    sources,
    svg,
)
from agro.pages.run.held_out_samples import LONGEST, held_out_samples
from agro.pages.run.render import Fact, Panel, render, script, with_script
from agro.runs.metrics import FOLLOWED, METRICS
from agro.runs.problems import (
    COUNTED,
    Problem,
    kept_share,
    problems,
    steps_of,
    way_out,
    without_share,
    without_signal,
)
from agro.runs.rundata import Outcome, PhaseSpan, RunData, Values, load_run, to_array
from agro.runs.verdict import Verdict
from agro.store import Draw
from agro.types import Sample, Text


def training(run: RunData, metric: str, label: str = "training", **style: object) -> Series:
    """A metric of every step."""
    return replace(Series(label, run.column(metric)), **style)  # type: ignore[arg-type]


def heldout(run: RunData, metric: str, label: str = "held-out") -> Series:
    """A metric of the steps that evaluate, with its standard error where there is one."""
    error = f"{metric}_se"
    se = run.column(error) if error in METRICS else None
    return Series(label, run.column(metric), SECOND, se, points=True, mark=run.mark(metric))


def ring(run: RunData, row: int | None) -> str:
    """What the mark at a row means; empty where there is none."""
    return "" if row is None else f"The ring is the best measurement, at step {run.rows[row]['step']}."


def caption(*metrics: str) -> str:
    """The captions of metrics, without the marks of code."""
    return " ".join(METRICS[name].caption for name in metrics).replace("`", "")


def panel(run: RunData, title: str, series: Sequence[Series], text: str, look: Look = PLAIN) -> Panel | None:
    """Series against steps; None where none has a value."""
    if not any(np.isfinite(s.values).any() for s in series):
        return None
    for s in series:
        text = f"{text} {ring(run, s.mark)}".rstrip()
    return Panel(title, text, picture(run, series, title, look))


def present(panels: Iterable[Panel | None]) -> list[Panel]:
    """Those that have something to show."""
    return [p for p in panels if p is not None]


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


def page(run: RunData) -> str:
    """The page as text."""
    experience, report, shown = RunExperience.of(run), problems(run), held_out_samples(run)
    facts = [Fact("seed", str(run.config.train.seed))]
    if run.config.data.hold_out:
        note = f"never trained on (data.hold_out); set_aside.jsonl has {run.set_aside} of them"
        facts.append(Fact("held-out prompts", percent(run.config.data.hold_out, 1), note))
    if run.best_model is not None:
        best = run.best_model.measured
        value = fixed(best.value)
        if best.se is not None:
            value = with_error(best.value, best.se)
        note = f"{FOLLOWED[run.best_model.metric].title}, step {best.step}"
        facts.append(Fact("best model, kept in best/", value, note))
    for name, epochs in (run.values.get("epochs") or {}).items():
        if name in run.config.phase_names and run.config.phase(name).train.steps == epochs["steps"]:
            note = f"passes over {count(epochs['groups'])} stored groups, {count(epochs['steps'])} steps"
            facts.append(Fact(f"epochs of {name}", f"{epochs['epochs']:g}", note))
    text = render(
        "page.html",
        run=run,
        model=_model(run),
        problems=report,
        outcome=Outcome.of(run),
        verdict=Verdict.of(run),
        shown=shown,
        learning=learning(run, experience),
        nearness=nearness(run),
        course=course(run),
        material=material(run, experience),
        health=health(run, report, experience),
        experience=experience,
        late=LATE,
        longest=LONGEST,
        facts=facts,
        config=json.dumps(run.values, indent=2, ensure_ascii=False),
        summarize=summarize,
        prompt_text=prompt_text,
    )
    return text if shown is None else with_script(text, script("samples.js"))


def _model(run: RunData) -> str:
    policy = run.config.policy
    if policy.new is None:
        return policy.model or "A model"
    return f"A new model ({policy.new.layers} layers of {policy.new.hidden})"


def summarize(sample: Sample) -> str:
    """A response's reward, answer, source and version in a line."""
    parts = [] if sample.reward is None else [f"reward {sample.reward:g}"]
    if sample.meta.get("answer") is not None:
        parts.append(f"answer {sample.meta['answer']!s:.80}")
    if sample.end == "cut":
        parts.append("truncated")
    parts.append(sample.source or sample.role)
    if isinstance(sample.version, int) and sample.version >= 0:
        parts.append(f"after {sample.version} updates")
    return " · ".join(parts)


def prompt_text(prompt: Text) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(map(_message, prompt))


def _message(message: dict[str, Any]) -> str:
    """The role and the text; what isn't text, such as tool calls, as JSON."""
    remaining = {k: v for k, v in message.items() if k != "role"}
    text = f"{message['role']}:"
    content = remaining.pop("content", None)
    if isinstance(content, str):
        text += f" {content}"
    elif content is not None:
        remaining["content"] = content
    return f"{text} {json.dumps(remaining, ensure_ascii=False)}" if remaining else text


def write_page(folder: Path) -> Path:
    path = folder / "report.html"
    write(path, page(load_run(folder)))
    return path


def course(run: RunData) -> dict[str, Any]:
    """What the template's section about the optimization shows."""
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
    rates = _rates(run)
    if len(rates) == 1:
        facts.append(Fact("learning rate", f"{rates.pop():.3g}", "constant"))
    return {"facts": facts, "panels": present([loss(run), _learning_rate(run), _kept(run), _speed(run)])}


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


def health(run: RunData, problems: Sequence[Problem], experience: RunExperience) -> dict[str, Any]:
    """`problems`: of the run."""
    explained = [Fact(p.title, p.value, p.detail, bad=True) for p in problems if p.detail]
    reasons: Counter[str] = Counter()
    for row in run.rows:
        reasons.update(row.get("dropped_reasons") or {})
    facts = []
    for name, title in COUNTED.items():
        n = run.total(name)
        note = ""
        if name == "dropped":
            note = ", ".join(f"{reason}: {count(k)}" for reason, k in reasons.most_common())
        if name == "rewards_failed":
            note = "; ".join(f"{count(k)} × {cut(error, 200)}" for error, k in experience.failures[:3])
        facts.append(Fact(title, None if n is None else count(n), note, bad=bool(n)))
    norm, clipped_norm = run.column("grad_norm"), run.column("grad_norm_clipped")
    measured = np.isfinite(norm)
    text = caption("grad_norm", "grad_norm_clipped")
    if measured.any():
        clipped = clipped_norm[measured] < norm[measured]
        text += f" Clipped at {percent(float(np.mean(clipped)))} of the steps."
        if clipped.all():
            middle = float(np.median(norm[measured]))
            text += f" The learning rate alone decides the size of a step (median norm {middle:.3g})."
    series = [training(run, "grad_norm_clipped", "after", color=SECOND), training(run, "grad_norm", "before")]
    return {
        "facts": [*explained, *facts, _equal_groups(run), *_signal(run)],
        "panels": present([panel(run, "Gradient norm", series, text, Look(log=True)), _difference(run)]),
    }


def _equal_groups(run: RunData) -> Fact:
    title = "groups of equal rewards"
    groups, equal = run.total("groups"), run.total("groups_equal")
    if not groups or equal is None:
        return Fact(title, None)
    text = f"{count(equal)} of {count(groups)} ({percent(equal / groups)})"
    return Fact(title, text, bad=equal > groups / 2)


def _signal(run: RunData) -> list[Fact]:
    signal, share = without_signal(run), without_share(run)
    facts = []
    if signal is None:
        facts.append(Fact("steps without a signal", None))
    else:
        data = run.config.phase(run.spans[-1].name).data
        ways = [f"{reason}: {way_out(reason, data)}" for reason in signal.reasons]
        facts.append(Fact("steps without a signal", steps_of(signal), ". ".join(ways), bad=signal.is_said))
    if share is not None and share.count:
        note = "fewer groups of the store than data.replay asks for; data.sources and the like limit them"
        facts.append(Fact("steps with less replay", steps_of(share), note, bad=share.is_said))
    return facts


def _difference(run: RunData) -> Panel | None:
    series = [
        training(run, "logp_diff_max", "maximum", color=SECOND),
        training(run, "logp_diff_mean", "mean"),
    ]
    text = caption("logp_diff_mean", "logp_diff_max")
    if np.isfinite(run.column("push_error")).any():
        series.append(training(run, "push_error", "after a push", color=MUTED))
        text += f" {caption('push_error')}"
    return panel(run, "Sampler and trainer", series, text, Look("nats per token", log=True))


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
