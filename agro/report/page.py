"""The page of a run: one file that asks for nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agro.report.experience import Experience
from agro.report.health import health, troubles
from agro.report.learning import learning, nearness
from agro.report.markup import aside, duration, escape, facts, fill, number, unknown
from agro.report.material import material
from agro.report.metrics import RunData, load_run
from agro.report.responses import LATE, Responses
from agro.types import Sample, Text

LONGEST = 2000  # characters of a prompt or response


def page(run: RunData) -> str:
    """The whole page as text."""
    experience = Experience.of(run)
    return fill(
        "page.html",
        name=escape(run.folder.resolve().name),
        lead=_lead(run),
        notes=_notes(run),
        learning=learning(run, experience),
        nearness=nearness(run),
        material=material(run, experience),
        health=health(run),
        responses=unknown(experience.problem)
        if experience.responses is None
        else _responses(experience.responses),
        facts=_facts(run),
        config=escape(json.dumps(run.values, indent=2, ensure_ascii=False)),
    )


def _lead(run: RunData) -> str:
    first, last = run.heldout(0, 0), run.heldout(1, run.spans[-1].ends)
    steps, seconds = run.spans[-1].ends, run.total("seconds")
    asked = sum(run.config.phase(name).train.steps for name in run.config.phase_names)
    done = f"{steps} step{'s' * (steps != 1)}" + (f" of {asked}" if steps < asked else "")
    said = (
        f"{escape(_model(run))} was trained for {done}"
        + ("" if seconds is None else f" in {duration(seconds)}")
        + "."
    )
    if first and last:
        said += f" Held-out reward went from <b>{first.value:.3f}</b> to <b>{last.value:.3f}</b>."
    elif last:
        said += f" Held-out reward at step {last.step}: <b>{last.value:.3f}</b>."
    return said


def _model(run: RunData) -> str:
    policy = run.config.policy
    if policy.new is None:
        return policy.model or "A model"
    return f"A new model ({policy.new.layers} layers of {policy.new.hidden})"


def _notes(run: RunData) -> str:
    notes = []
    if run.torn:
        notes.append(
            "The last line of metrics.jsonl is torn, as a run that was killed leaves it; it is left out."
        )
    if found := troubles(run):
        notes.append(f'Counted on the way: {", ".join(found)}. <a href="#wrong">More</a>')
    return "".join(f'<p class="note">{note}</p>' for note in notes)


def _facts(run: RunData) -> str:
    seconds, versions, best = run.total("seconds"), run.values.get("versions"), run.best
    items: dict[str, str | None] = {
        "time in steps": None if seconds is None else duration(seconds),
        "seed": str(run.config.train.seed),
    }
    if best is not None:
        items["best model, kept in best/"] = number(best.value, se=best.se) + aside(
            f"held-out reward, step {best.step}"
        )
    said = (
        ", ".join(f"{k} {v}" for k, v in versions.items())
        if isinstance(versions, dict)
        else "versions not noted"
    )
    return facts(items) + aside(said)


def _responses(found: Responses) -> str:
    if not found.best:
        return unknown("The store holds no scored response.")
    said = "that this run sampled" if found.own else "in the store that it learnt from"
    among = f"the last {found.of:,}" if found.of == LATE else f"{found.of:,}"
    return (
        f'<p class="aside">Of {among} scored responses {said}, one a prompt.</p><div class="pair">'
        + "".join(
            f"<div><h3>{title}</h3>{''.join(map(_response, samples))}</div>"
            for title, samples in (("Best", found.best), ("Worst", found.worst))
            if samples
        )
        + "</div>"
    )


def _response(sample: Sample) -> str:
    said = [f"reward {sample.reward:g}"]
    if sample.meta.get("answer") is not None:
        said.append(f"answer {sample.meta['answer']!s:.80}")
    if sample.meta.get("finish") == "length":
        said.append("truncated")
    said.append(sample.source or sample.role)
    if isinstance(sample.version, int) and sample.version >= 0:
        said.append(f"after {sample.version} updates")
    return (
        f'<article><p class="aside">{escape(" · ".join(said))}</p>'
        f"<pre>{_shorten(_prompt_text(sample.prompt))}</pre><pre>{_shorten(sample.response)}</pre></article>"
    )


def _prompt_text(prompt: Text) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(map(_message, prompt))


def _message(message: dict[str, Any]) -> str:
    """The role and the text; what isn't text, such as calls of tools, as JSON."""
    content = message.get("content")
    rest = {
        k: v
        for k, v in message.items()
        if k not in ("role", "content") or (k == "content" and not isinstance(v, str | None))
    }
    said = [content] if isinstance(content, str) else []
    return f"{message['role']}: " + " ".join(said + ([json.dumps(rest, ensure_ascii=False)] if rest else []))


def _shorten(text: str) -> str:
    cut = len(text) - LONGEST
    shown = escape(text[:LONGEST]) or '<span class="unknown">empty</span>'
    return shown + (f' <span class="unknown">… {cut:,} more characters</span>' if cut > 0 else "")


def write_page(folder: Path) -> Path:
    path = folder / "report.html"
    text = page(load_run(folder))
    temporary = path.with_name(".report.html.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    return path
