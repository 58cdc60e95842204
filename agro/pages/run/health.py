"""Section of the page: was anything wrong?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from agro.io.numbers import count, percent
from agro.pages.run.axes import MUTED, SECOND, cut
from agro.pages.run.experience import RunExperience
from agro.pages.run.figures import Look
from agro.pages.run.panels import caption, panel, present, training
from agro.pages.run.render import Fact, Panel
from agro.runs.problems import COUNTED, Problem, steps_of, way_out, without_share, without_signal
from agro.runs.rundata import RunData


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
