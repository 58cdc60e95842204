"""The page of a run: one file that asks for nothing else."""

from __future__ import annotations

import html
import json
import math
from collections import Counter
from importlib.resources import files
from pathlib import Path
from string import Template

from agro.report.figures import NARROW, SECOND, WIDE, Series, draw, learning_curve, smoothing, svg
from agro.report.metrics import Measured, RunData, Span, load_run
from agro.report.responses import LATE, choose
from agro.types import Sample, Text

LONGEST = 2000  # characters of a prompt or response
UNKNOWN = '<span class="unknown">not measured</span>'


def page(run: RunData) -> str:
    """The whole page as text."""
    here = files("agro.report")
    torn = "<p class='note'>The last line of metrics.jsonl is torn, as a run that was killed leaves it; it is left out.</p>"
    return Template((here / "page.html").read_text(encoding="utf-8")).substitute(
        style=(here / "page.css").read_text(encoding="utf-8").strip(),
        name=_escape(run.folder.resolve().name),
        lead=_lead(run),
        notes=torn if run.torn else "",
        curve=_curve(run),
        phases=_phases(run),
        facts=_facts(run),
        panels="\n".join(_panels(run)),
        counts=_counts(run),
        responses=_responses(run),
        config=_escape(json.dumps(run.values, indent=2, ensure_ascii=False)),
    )


def _lead(run: RunData) -> str:
    first, last = run.heldout(0, 0), run.heldout(1, run.spans[-1].ends)
    steps, seconds = run.spans[-1].ends, run.total("seconds")
    asked = sum(run.config.phase(name).train.steps for name in run.config.phase_names)
    done = f"{steps} step{'s' * (steps != 1)}" + (f" of {asked}" if steps < asked else "")
    said = f"{_escape(_model(run))} was trained for {done}" + ("" if seconds is None else f" in {_time(seconds)}") + "."
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


def _curve(run: RunData) -> str:
    if not any(math.isfinite(x) for name in ("reward_mean", "eval_reward") for x in run.column(name)):
        return '<p class="unknown">No reward was measured.</p>'
    width = smoothing(len(run.rows))
    mean = f", running mean over {width} steps" if width > 1 else ""
    ends = run.heldout(0, run.spans[-1].ends)
    heldout = "" if ends is None else " Held-out: prompts that aren't trained on, ±1 standard error."
    return (
        '<figure role="img" aria-label="Training and held-out reward against steps">'
        f'<div class="wide">{svg(learning_curve(run, WIDE), "wide")}</div>'
        f'<div class="narrow">{svg(learning_curve(run, NARROW), "narrow")}</div>'
        f"<figcaption>Training: mean reward of the responses that a step trained on, whoever wrote them{mean}.{heldout}"
        "</figcaption></figure>"
    )


def _phases(run: RunData) -> str:
    rows = "".join(_phase(run, span) for span in run.spans)
    return (
        "<table><thead><tr><th>phase</th><th>objective</th><th>steps</th><th>before</th><th>after</th><th>change</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
        '<p class="aside">Held-out reward before and after each phase ± one standard error over prompts. Both ends are measured on the same prompts, so that of '
        "a change, given as if they weren't, is rather too large.</p>"
    )


def _phase(run: RunData, span: Span) -> str:
    before, after = run.heldout(span.begins, span.begins), run.heldout(span.begins + 1, span.ends)
    change = UNKNOWN
    if before and after:
        se = math.hypot(before.se, after.se)
        change = f"<b>{after.value - before.value:+.3f}</b>{_se(se)}"
    names = run.config.phase_names
    config = run.config.phase(span.name) if span.name in names else run.config
    options = ", ".join(f"{k} = {v}" for k, v in config.objective.options.items())
    data = {0.0: "fresh samples", 1.0: "from the store"}.get(
        config.data.replay, f"{config.data.replay:.0%} from the store"
    )
    steps = span.ends - span.begins
    cells = {
        "phase": _escape(span.name),
        "objective": _escape(config.objective.name) + _aside(options) + _aside(data),
        "steps": f"{steps}" + _aside(f"of {config.train.steps}" if steps < config.train.steps else ""),
        "before": _measured(before),
        "after": _measured(after, span.ends),
        "change": change,
    }
    return "<tr>" + "".join(f'<td data-label="{name}"><div>{cell}</div></td>' for name, cell in cells.items()) + "</tr>"


def _measured(found: Measured | None, expected: int | None = None) -> str:
    if found is None:
        return UNKNOWN
    late = f"at step {found.step}" if expected not in (None, found.step) else ""
    return f"<b>{found.value:.3f}</b>{_se(found.se)}{_aside(late)}"


def _se(value: float) -> str:
    return f' <span class="aside">± {value:.3f}</span>' if math.isfinite(value) else ""


def _aside(text: str) -> str:
    return f'<div class="aside">{_escape(text)}</div>' if text else ""


def _facts(run: RunData) -> str:
    config, seconds = run.config, run.total("seconds")
    trained, sampled = run.total("tokens"), run.total("sampled_tokens")
    heldout = next((row["eval_n"] for row in reversed(run.rows) if row.get("eval_n") is not None), None)
    versions = run.values.get("versions")
    facts = {
        "time in steps": None if seconds is None else _time(seconds),
        "tokens trained on": None if trained is None else f"{trained:,.0f}",
        "tokens sampled": None if sampled is None else f"{sampled:,.0f}",
        "held-out responses": None if heldout is None else f"{heldout:,}",
        "reward": config.reward.title,
        "prompts": config.data.prompts or "none",
        "seed": str(config.train.seed),
        "versions": ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else None,
    }
    items = "".join(f"<div><dt>{k}</dt><dd>{UNKNOWN if v is None else _escape(v)}</dd></div>" for k, v in facts.items())
    return f"<dl>{items}</dl>"


def _panels(run: RunData) -> list[str]:
    def series(label: str, name: str, **options: object) -> Series:
        return Series(label, run.column(name), **options)  # type: ignore[arg-type]

    kl, heldout_kl = run.column("kl_ref"), run.column("eval_kl_ref")
    kl[kl == heldout_kl] = math.nan  # without fresh responses kl_ref is the held-out one

    def panel(title: str, caption: str, lines: list[Series], **options: object) -> str:
        if not any(math.isfinite(x) for s in lines for x in s.values):
            return f'<figure><h3>{title}</h3><p class="unknown">not measured</p></figure>'
        drawn = svg(draw(run, lines, **options), title)  # type: ignore[arg-type]
        return f'<figure role="img" aria-label="{title}"><h3>{title}</h3>{drawn}<figcaption>{caption}</figcaption></figure>'

    return [
        panel(
            "KL to the reference",
            "Mean log-ratio of a whole response. Training: fresh responses; held-out: responses to held-out prompts.",
            [Series("training", kl), series("held-out", "eval_kl_ref", colour=SECOND, points=True)],
            unit="nats a response",
        ),
        panel(
            "Gradient norm",
            "Before and after clipping.",
            [series("after", "grad_norm_clipped", colour=SECOND), series("before", "grad_norm")],
            scale="log",
        ),
        panel("Response length", "Mean of a step.", [series("length", "length_mean")], unit="tokens"),
        panel(
            "Truncated responses",
            "Share that reached the limit of tokens before their end.",
            [series("truncated", "truncated_share")],
            percent=True,
        ),
        panel(
            "Sampler against trainer",
            "Difference between the log-probs that the sampler noted and the trainer's own, on fresh tokens.",
            [series("maximum", "logp_diff_max", colour=SECOND), series("mean", "logp_diff_mean")],
            unit="nats a token",
            scale="log",
        ),
        panel(
            "Staleness",
            "Updates between the weights that wrote a response and those that learn from it.",
            [series("maximum", "staleness_max", colour=SECOND), series("mean", "staleness_mean")],
            unit="optimiser steps",
        ),
    ]


def _counts(run: RunData) -> str:
    reasons: Counter[str] = Counter()
    for row in run.rows:
        found = row.get("left_out_reasons")
        reasons.update(found if isinstance(found, dict) else {})
    why = ", ".join(f"{reason}: {n:,}" for reason, n in reasons.most_common())
    total = {name: run.total(name) for name in ("rewards_failed", "left_out", "skipped", "groups", "groups_equal")}
    shown = {name: UNKNOWN if n is None else f"{n:,.0f}" for name, n in total.items()}
    equal = UNKNOWN
    if total["groups"] and total["groups_equal"] is not None:
        equal = f"{shown['groups_equal']} of {shown['groups']} ({total['groups_equal'] / total['groups']:.0%})"
    items = {
        "rewards that failed": shown["rewards_failed"],
        "responses left out": shown["left_out"] + _aside(why),
        "updates skipped (gradient not finite)": shown["skipped"],
        "groups whose rewards are all equal": equal,
    }
    return "<dl>" + "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in items.items()) + "</dl>"


def _responses(run: RunData) -> str:
    path = Path(run.config.data.store) if run.config.data.store else run.folder / "store.db"
    if not path.exists():
        return f'<p class="unknown">There is no store at {_escape(str(path))}.</p>'
    found = choose(path, run.values.get("run"))
    if not found.best:
        return '<p class="unknown">The store holds no scored response.</p>'
    said = "that this run sampled" if found.own else "in the store that it learnt from"
    among = f"the last {found.of:,}" if found.of == LATE else f"{found.of:,}"
    return f'<p class="aside">Of {among} scored responses {said}, one a prompt.</p><div class="pair">' + "".join(
        f"<div><h3>{title}</h3>{''.join(map(_response, samples))}</div>"
        for title, samples in (("Best", found.best), ("Worst", found.worst))
        if samples
    ) + "</div>"  # fmt: skip


def _response(sample: Sample) -> str:
    facts = [f"reward {sample.reward:g}"]
    if sample.meta.get("answer") is not None:
        facts.append(f"answer {sample.meta['answer']!s:.80}")
    if sample.meta.get("finish") == "length":
        facts.append("truncated")
    facts.append(sample.source or sample.role)
    if isinstance(sample.version, int) and sample.version >= 0:
        facts.append(f"after {sample.version} updates")
    return (
        f'<article><p class="aside">{_escape(" · ".join(facts))}</p>'
        f"<pre>{_shorten(_prompt_text(sample.prompt))}</pre><pre>{_shorten(sample.response)}</pre></article>"
    )


def _prompt_text(prompt: Text) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)


def _shorten(text: str) -> str:
    cut = len(text) - LONGEST
    shown = _escape(text[:LONGEST]) or '<span class="unknown">empty</span>'
    return shown + (f' <span class="unknown">… {cut:,} more characters</span>' if cut > 0 else "")


def _escape(text: str) -> str:
    """Text as text, whatever it holds: lone surrogates, which UTF-8 has no place for, become their escapes."""
    return html.escape(text.encode("utf-8", "backslashreplace").decode("utf-8"))


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"


def write_page(folder: Path) -> Path:
    path = folder / "report.html"
    text = page(load_run(folder))
    temporary = path.with_name(".report.html.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    return path
