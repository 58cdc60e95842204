"""The page of a run: one self-contained file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agro.io.files import write
from agro.io.numbers import count, fixed, percent, with_error
from agro.pages.run.course import course
from agro.pages.run.experience import RunExperience
from agro.pages.run.health import health
from agro.pages.run.held_out_samples import LONGEST, held_out_samples
from agro.pages.run.learning import learning, nearness
from agro.pages.run.material import material
from agro.pages.run.render import Fact, render, script, with_script
from agro.pages.run.responses import LATE
from agro.runs.metrics import FOLLOWED
from agro.runs.problems import problems
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
