"""The page of a run: one self-contained file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agro.io.files import write
from agro.io.numbers import count, duration, fixed, percent, short, with_error
from agro.pages.run.axes import MUTED, SECOND, cut
from agro.pages.run.curves import smoothing
from agro.pages.run.experience import RunExperience
from agro.pages.run.figures import Look
from agro.pages.run.held_out_samples import LONGEST, held_out_samples
from agro.pages.run.learning import learning, nearness
from agro.pages.run.material import material
from agro.pages.run.panels import caption, panel, present, training
from agro.pages.run.render import Fact, Panel, render, script, with_script
from agro.pages.run.responses import LATE
from agro.runs.metrics import FOLLOWED, METRICS
from agro.runs.problems import COUNTED, Problem, problems, steps_of, way_out, without_share, without_signal
from agro.runs.rundata import Outcome, RunData, load_run
from agro.runs.verdict import Verdict
from agro.types import Sample, Text


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
    return {"facts": facts, "panels": present([loss(run), _learning_rate(run), _speed(run)])}


def loss(run: RunData) -> Panel | None:
    """The loss of each step."""
    text = "Loss of the objective on the responses of each step. Losses of two objectives can't be compared."
    return panel(run, "Loss", [training(run, "loss", smooth=smoothing(len(run.rows)))], text)


def _learning_rate(run: RunData) -> Panel | None:
    """Where it changed; a constant one is a fact."""
    if len(_rates(run)) < 2:
        return None
    return panel(run, "Learning rate", [training(run, "lr")], caption("lr"))


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
