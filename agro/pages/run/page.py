"""The page of a run, one self-contained file. Units and captions of metrics come from `agro.runs.rundata`."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from agro.io.numbers import count, duration, fixed, percent, short, with_error
from agro.pages.run import figures
from agro.pages.run.experience import LATE, LONGEST, RunExperience, begin_and_end, held_out_samples
from agro.pages.run.figures import Look, Series, css, cut, heldout, smoothing, svg, training
from agro.pages.run.render import Fact, Panel, render, script, with_script
from agro.pages.run.verdict import Verdict
from agro.runs.problems import COUNTED, Problem, kept_share, problems, way_out, without_share, without_signal
from agro.runs.rundata import FOLLOWED, METRICS, Outcome, RunData, to_array
from agro.store import Draw
from agro.types import Sample, Text

REFERENCES = {
    "start": "the weights at the start of the run",
    "phase": "the weights at the start of each phase, so KL is measured anew in each",
    "model": "another model",
    "ema": "a moving average of the policy's weights, so KL doesn't add up over the run",
    "periodic": "a copy of the policy that is renewed regularly, so KL doesn't add up over the run",
    "sampler": "the earlier weights that sample, so KL doesn't add up over the run",
}
# Panels of metrics alone by section: a title and the metrics, each with its label, the first one above.
PANELS: dict[str, dict[str, dict[str, str]]] = {
    "course": {
        "Loss": {"loss": "training"},
        "Learning rate": {"lr": "training"},
        "Promised and kept": {"kept": "kept", "promised": "promised"},
        "Speed": {"tokens_per_second": "training"},
    },
    "material": {
        "Length over steps": {"length_mean": "training"},
        "Truncated responses": {"truncated_share": "training"},
        "Groups asked again": {"asked_again": "asked again", "groups": "all"},
        "Staleness": {"staleness_mean": "mean", "staleness_max": "maximum"},
        "Version of the sampler": {"sampler_version": "training"},
        "AUC of the learned reward": {"learned_auc": "training"},
        "KL of responses together": {"aggregate_kl": "training"},
        "Draft tokens accepted": {"draft_accepted": "training"},
    },
    "health": {
        "Gradient norm": {"grad_norm": "before", "grad_norm_clipped": "after"},
        "Sampler and trainer": {
            "logp_diff_mean": "mean",
            "logp_diff_max": "maximum",
            "push_error": "after a push",
        },
    },
}
LOG_SCALED = ("Gradient norm", "Sampler and trainer")
UNSMOOTHED = ("Learning rate", *LOG_SCALED, "Promised and kept", "Staleness", "Groups asked again")
FURTHER = {  # of methods that make more of a prompt than its responses
    "searched": "states in which turns were tried",
    "same_meaning": "responses that mean the same as another one",
    "hinted": "responses written with a hint",
    "experts": "responses of an expert",
}
PARTS = {
    "reward_parts": "Parts of the reward",
    "eval_reward_parts": "Parts of the held-out reward",
    "reward_shares": "What the reward's differences are made of",
}


def ring(run: RunData, row: int | None) -> str:
    """What the mark at a row means; empty where there is none."""
    return "" if row is None else f"The ring is the best measurement, at step {run.rows[row]['step']}."


def caption(*metrics: str) -> str:
    """The captions of metrics, without the marks of code."""
    return " ".join(METRICS[name].caption for name in metrics).replace("`", "")


def unit(metric: str, *, log: bool = False) -> Look:
    return Look(METRICS[metric].unit, log=log)


class Panels(list[Panel]):
    """The small figures of a section, of a run's series against steps."""

    def __init__(self, run: RunData) -> None:
        super().__init__()
        self.run = run

    def draw(self, title: str, text: str, *series: Series, look: Look = figures.PLAIN) -> None:
        """Add a figure of the series, where any has a value."""
        if not any(np.isfinite(s.values).any() for s in series):
            return
        for s in series:
            text = f"{text} {ring(self.run, s.mark)}".rstrip()
        self.append(Panel(title, text, figures.picture(self.run, series, title, look)))

    def draw_section(self, name: str, said: Mapping[str, str] = MappingProxyType({})) -> None:
        """Add those of `PANELS` whose first metric is known and not always 0. `said`: by title what more to
        say."""
        run, width = self.run, smoothing(len(self.run.rows))
        for title, metrics in PANELS[name].items():
            first, known = next(iter(metrics)), [metric for metric in metrics if run.measures(metric)]
            if not run.total(first):
                continue
            smooth, text = 1 if title in UNSMOOTHED else width, caption(*known)
            if smooth > 1:
                text += f" Running mean over {width} steps."
            colors = (figures.FIRST, figures.SECOND, figures.MUTED)
            series = [
                training(run, metric, metrics[metric], color=color, smooth=smooth)
                for metric, color in zip(known, colors)
            ]
            is_share = METRICS[first].unit == "share"
            look = Look(percent=True) if is_share else unit(first, log=title in LOG_SCALED)
            self.draw(title, f"{text} {said.get(title, '')}".rstrip(), *reversed(series), look=look)


def learning(run: RunData) -> dict[str, Any]:
    """What the template's first section shows: did it learn?"""
    stored_only = run.total("sampled_tokens") == 0 and not run.measures("eval_reward")
    curves = {}
    if run.measures("reward_mean", "eval_reward") and not stored_only:
        sizes, values = (figures.WIDE, figures.NARROW), figures.columns(run, figures.reward_series(run))
        drawn = {size: figures.learning_curve(run, size) for size in sizes}
        curves["steps"] = [
            svg(figure, f"Reward against steps {size}", figures.hover(figure.axes[0], values))
            for size, figure in drawn.items()
        ]
        if figures.kl_pairs(run):
            curves["KL"] = [figures.against_kl(run, size) for size in sizes]
    # The decays of train.weights_average; empty where no phase has one.
    names = run.config.phase_names
    decays = {name: run.config.phase(name).train.weights_average for name in names}
    where = {name: f" in phase {name}" if len(names) > 1 else "" for name in names}
    averages = [f"train.weights_average = {x:g}{where[name]}" for name, x in decays.items() if x]
    phases = []
    for span in run.spans:  # a row of the table of phases
        start, end = run.heldout(span.begins, span.begins), run.heldout(span.begins + 1, span.ends)
        config = run.config.phase(span.name) if span.name in names else run.config
        data = f"{config.data.replay_text} from the store"
        if not config.data.draws_stored:
            data = "fresh samples"
        elif not config.data.samples_fresh:
            data = "from the store"
        options = ", ".join(f"{k} = {v}" for k, v in config.objective.options.items())
        change = end.value - start.value if start and end else None
        row = {"config": config, "options": options, "data": data, "before": start, "after": end}
        phases.append({**row, "span": span, "change": change})
    panels = _learning_panels(run)
    for metric, title in PARTS.items():
        _draw_parts(panels, metric, title)
    return {
        "curves": curves,
        "stored_only": stored_only,
        "width": smoothing(len(run.rows)),
        "evaluated": run.heldout(0, run.steps) is not None,
        "ring": ring(run, run.mark("eval_reward")),
        "averages": ", ".join(averages),
        "reference": REFERENCES[run.config.policy.reference],
        "phases": phases,
        "panels": panels,
    }


def _learning_panels(run: RunData) -> Panels:
    """How it ranks stored responses, and what it gave up of the rewards, as far as these were measured."""
    panels, width = Panels(run), smoothing(len(run.rows))
    auc, consistency = run.column("eval_auc"), run.column("eval_consistency")
    chance = Series("chance", np.where(np.isfinite(auc), 0.5, math.nan), figures.MUTED, points=True)
    panels.draw("Held-out ranking (AUC)", caption("eval_auc"), chance, heldout(run, "eval_auc", "policy"))
    text = (
        "Mean log π/π_ref of the stored responses with the highest and with the lowest reward of a group. "
        "The best should rise above 0; below 0, the policy moves away from them, which is right only where "
        "even these are poor."
    )
    ratio = run.latest("ratio_mean")
    if ratio is not None:
        text += f" The mean of π/π_ref over stored responses ended at {ratio:.3g} (1 at the reference)."
    panels.draw(
        "Log-ratio of the best and worst responses",
        text,
        heldout(run, "eval_log_ratio_worst", "held-out worst", figures.COLORS[4]),
        heldout(run, "eval_log_ratio_best", "held-out best", figures.COLORS[2]),
        training(run, "log_ratio_worst", "worst", color=figures.SECOND, smooth=width),
        training(run, "log_ratio_best", "best", smooth=width),
        look=unit("log_ratio_best"),
    )
    text = caption("eval_consistency")
    latest = run.rows[int(max(np.flatnonzero(np.isfinite(consistency)), default=0))]
    if latest.get("eval_consistency_fall") is not None:
        better = with_error(latest["eval_consistency_fall"], latest.get("eval_consistency_fall_se"), 4)
        groups = latest.get("eval_groups", "an unknown number of")
        text += f" At step {latest['step']} it was {better} below the reference's, on {groups} groups."
    of_reference = consistency + run.column("eval_consistency_fall")
    reference = Series("reference", of_reference, figures.MUTED, points=True)
    panels.draw("Held-out ½ Var(R)", text, reference, heldout(run, "eval_consistency", "policy"))
    text = (
        f"{caption('eval_fresh_consistency')} It is 0 too where all responses are the same, near 0 where no "
        "rewards differ, and it may rise first: read it beside the reward."
    )
    panels.draw("½ Var(R) of held-out responses", text, heldout(run, "eval_fresh_consistency", "policy"))
    text = f"{caption('regret')} {METRICS['regret'].computed}; R = r − β log π/π_ref."
    series = training(run, "regret", smooth=width), heldout(run, "eval_regret")
    panels.draw("Estimated regret", text, *series, look=unit("regret"))
    return panels


def _draw_parts(panels: Panels, metric: str, title: str) -> None:
    """A metric of the parts of the reward, where there are several."""
    run, is_heldout = panels.run, metric.startswith("eval_")
    parts = [row.get(metric) or {} for row in run.rows]
    names = list(dict.fromkeys(name for row in parts for name in row))
    if len(names) < 2:
        return
    errors = [row.get(f"{metric}_se") or {} for row in run.rows]
    width = 1 if is_heldout else smoothing(len(run.rows))
    series = []
    for name, color in zip(names, figures.COLORS, strict=False):
        values = to_array([row.get(name) for row in parts])
        se = to_array([row.get(name) for row in errors]) if is_heldout else None
        series.append(Series(cut(name, 16), values, color, se=se, points=is_heldout, smooth=width))
    more = len(names) - len(series)
    text = caption(metric) + (f" {more} more in metrics.jsonl." if more else "")
    panels.draw(title, text, *series, look=unit(metric))


def nearness(run: RunData) -> dict[str, Any]:
    """What the template's section about the reference shows: did it stay near?"""
    policy, held_out, panels = run.config.policy, run.config.asks_held_out, Panels(run)
    measured = heldout(run, "eval_kl_ref", "held-out" if held_out else "sampled")
    kl = [Series("training", run.training_kl), replace(measured, split=policy.reference == "phase")]
    text = caption("kl_ref", "eval_kl_ref")
    if run.measures("kl_of_best") and run.measures("kl_ref", "eval_kl_ref"):
        smooth = smoothing(len(run.rows))
        kl.insert(0, training(run, "kl_of_best", "best of store", color=figures.MUTED, smooth=smooth))
        text += f" Gray: {caption('kl_of_best')}"
    panels.draw("KL to the reference", text, *kl, look=unit("kl_ref", log=True))
    betas = run.column("beta")
    if len(set(betas[np.isfinite(betas)])) > 1:
        panels.draw("β", caption("beta"), Series("β", betas), look=unit("beta"))
    spread = run.column("kl_to_reward_spread")
    text = caption("kl_to_reward_spread")
    text += " It is 1 at the optimum (gray); far above it, the rewards hardly count."
    if np.isfinite(spread).any():
        optimum = Series("optimum", np.ones_like(spread), figures.MUTED)
        look = Look("ratio", log=True)
        panels.draw("KL spread to reward spread", text, optimum, Series("policy", spread), look=look)
    reference = REFERENCES[policy.reference]
    if policy.reference_model:
        reference += f": {policy.reference_model}"
    facts = [Fact("reference", reference)]
    for name, values, choose in (
        ("held-out KL at the end" if held_out else "KL at the end", run.column("eval_kl_ref"), None),
        ("highest KL in training", run.training_kl, np.nanargmax),
    ):
        known = np.flatnonzero(np.isfinite(values))
        if known.size:
            row = int(known[-1] if choose is None else choose(values))
            note = f"nats per response, step {run.rows[row]['step']}"
            facts.append(Fact(name, fixed(values[row]), note))
    return {"panels": panels, "facts": facts}


def page(run: RunData) -> str:
    """The page as text."""
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
        note = f"{FOLLOWED[best.metric].title}, step {best.step}"
        facts.append(Fact("best model, kept in best/", value, note))
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
        experience=experience,
        late=LATE,
        longest=LONGEST,
        facts=facts,
        config=json.dumps(run.values, indent=2, ensure_ascii=False),
        summarize=summarize,
        prompt_text=prompt_text,
    )
    return text if shown is None else with_script(text, script("samples.js"))


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
    """Of messages the role and the text of each; what isn't text, such as tool calls, as JSON."""
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
    rates = set(run.column("lr")[np.isfinite(run.column("lr"))].tolist())
    if len(rates) == 1:
        facts.append(Fact("learning rate", f"{rates.pop():.3g}", "constant"))
    share = kept_share(run.rows)
    said = {"Loss": "Losses of two objectives can't be compared."}
    if share is not None:
        said["Promised and kept"] = f"The median of the last steps kept {percent(share)}."
    panels = Panels(run)
    panels.draw_section("course", said)
    return {"facts": facts, "panels": [p for p in panels if p.title != "Learning rate" or rates]}


def health(run: RunData, problems: Sequence[Problem], experience: RunExperience) -> dict[str, Any]:
    """`problems`: of the run."""
    facts = [Fact(p.title, p.value, p.detail, bad=True) for p in problems if p.detail]
    reasons: Counter[str] = Counter()
    for row in run.rows:
        reasons.update(row.get("dropped_reasons") or {})
    notes = {
        "dropped": ", ".join(f"{reason}: {count(k)}" for reason, k in reasons.most_common()),
        "rewards_failed": "; ".join(f"{count(k)} × {cut(e, 200)}" for e, k in experience.failures[:3]),
    }
    for name, title in COUNTED.items():
        n = run.total(name)
        facts.append(Fact(title, None if n is None else count(n), notes.get(name, ""), bad=bool(n)))
    groups, equal = run.total("groups"), run.total("groups_equal")
    equal_groups, unsignaled = Fact("groups of equal rewards", None), Fact("steps without a signal", None)
    if groups and equal is not None:
        text = f"{count(equal)} of {count(groups)} ({percent(equal / groups)})"
        equal_groups = replace(equal_groups, value=text, bad=equal > groups / 2)
    signal, share = without_signal(run), without_share(run)
    if signal is not None:
        data = run.config.phase(run.spans[-1].name).data
        ways = ". ".join(f"{reason}: {way_out(reason, data)}" for reason in signal.reasons)
        unsignaled = replace(unsignaled, value=signal.text, note=ways, bad=signal.is_said)
    facts += [equal_groups, unsignaled]
    if share is not None and share.count:
        note = "fewer groups of the store than data.replay asks for; data.sources and the like limit them"
        facts.append(Fact("steps with less replay", share.text, note, bad=share.is_said))
    norm, clipped_norm = run.column("grad_norm"), run.column("grad_norm_clipped")
    measured, said = np.isfinite(norm), ""
    if measured.any():
        clipped = clipped_norm[measured] < norm[measured]
        said = f"Clipped at {percent(float(np.mean(clipped)))} of the steps."
        if clipped.all():
            middle = float(np.median(norm[measured]))
            said += f" The learning rate alone decides the size of a step (median norm {middle:.3g})."
    panels = Panels(run)
    panels.draw_section("health", {"Gradient norm": said})
    return {"facts": facts, "panels": panels}


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
    prompts = ", ".join(run.config.data.paths("prompts"))
    facts = [Fact("reward", run.config.reward.title), Fact("prompts", prompts or "none")]
    for name, value in (
        ("tokens trained on", run.total("tokens")),
        ("tokens sampled", run.total("sampled_tokens")),
        ("held-out responses", run.latest("eval_n")),
    ):
        facts.append(Fact(name, None if value is None else count(value)))
    if run.total("truncated_share") == 0:
        facts.append(Fact("truncated responses", "none"))
    facts += [Fact(title, count(run.total(name) or 0)) for name, title in FURTHER.items() if run.total(name)]
    return {
        "facts": facts,
        "sources": rows,
        "phased": len(run.spans) > 1,
        "problem": experience.problem or "The store has no draws of this run, so sources are unknown.",
        "panels": _material_panels(run, experience),
    }


def _material_panels(run: RunData, experience: RunExperience) -> Panels:
    panels, names, title = Panels(run), experience.source_names, "Sources over steps"
    if len(names) > 1:  # else the table says it all
        labels = [names.index(n) for n in experience.sources]
        figure = svg(figures.sources(run, experience.column("step"), labels, len(names)), title)
        key = tuple((css(figures.COLORS[i]), name[:60]) for i, name in enumerate(names))
        panels.append(Panel(title, "Where the responses of a step came from.", figure, key))
    for title, name, unit in (("Rewards", "reward", "reward"), ("Lengths", "length", "tokens")):
        windows = begin_and_end(experience.column("step"), experience.column(name))
        if windows is not None:
            begin, end = windows
            means = [f"steps {w.start} to {w.stop}, mean {w.values.mean():.3g}" for w in windows]
            counts = f"{count(len(begin.values))} and {count(len(end.values))}"
            text = f"Responses drawn in the first and the last tenth of the steps: {counts}."
            figure = svg(figures.histogram(begin.values, end.values, unit, integer=unit == "tokens"), title)
            key = tuple(zip(map(css, (figures.MUTED, figures.FIRST)), means))
            panels.append(Panel(title, text, figure, key))
    panels.draw_section("material")
    # Of an objective with a critic, whose metric it is.
    explained = [(row.get("objective") or {}).get("explained_variance") for row in run.rows]
    text = (
        "Share of the variance of the value's targets that the value explained before the step. 0 is no "
        "better than a constant."
    )
    panels.draw("Variance explained by the critic", text, Series("training", to_array(explained)))
    return panels
