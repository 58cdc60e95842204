"""Section of the page: was anything wrong?"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from agro.report.figures import FIRST, SECOND, Series, draw
from agro.report.markup import aside, facts, panel
from agro.report.metrics import RunData

# What is counted over the run, and what a reader is told that it is.
COUNTED = {
    "skipped": "updates skipped",
    "rolled_back": "returns to a checkpoint",
    "rewards_failed": "rewards that failed",
    "left_out": "responses left out",
    "eval_unscored": "held-out without a reward",
}


def troubles(run: RunData) -> list[str]:
    """Such as "3 updates skipped"; none where all is well."""
    total = {name: run.total(name) or 0 for name in COUNTED}
    return [f"{COUNTED[name]}: {n:,.0f}" for name, n in total.items() if n]


def health(run: RunData) -> str:
    return _counts(run) + f'<div class="panels">{_gradient(run)}{_difference(run)}</div>'


def _counts(run: RunData) -> str:
    reasons: Counter[str] = Counter()
    for row in run.rows:
        found = row.get("left_out_reasons")
        reasons.update(found if isinstance(found, dict) else {})
    why = {"left_out": ", ".join(f"{reason}: {n:,}" for reason, n in reasons.most_common())}
    items: dict[str, str | None] = {}
    for name, title in COUNTED.items():
        n = run.total(name)
        shown = None if n is None else f"{n:,.0f}" if n == 0 else f'<b class="bad">{n:,.0f}</b>'
        items[title] = None if shown is None else shown + aside(why.get(name, ""))
    groups, equal = run.total("groups"), run.total("groups_equal")
    if groups and equal is not None:
        said = f"{equal:,.0f} of {groups:,.0f} ({equal / groups:.0%})"
        items["groups of equal rewards"] = f'<b class="bad">{said}</b>' if equal > groups / 2 else said
    else:
        items["groups of equal rewards"] = None
    return facts(items)


def _gradient(run: RunData) -> str:
    before, after = run.column("grad_norm"), run.column("grad_norm_clipped")
    known = np.isfinite(before)
    clipped = f" Clipped at {np.mean(after[known] < before[known]):.0%} of the steps." if known.any() else ""
    lines = [Series("after", after, SECOND), Series("before", before, FIRST)]
    return panel(
        "Gradient norm",
        f"Before and after clipping.{clipped}",
        draw(run, lines, scale="log") if known.any() else None,
    )


def _difference(run: RunData) -> str:
    most, mean = run.column("logp_diff_max"), run.column("logp_diff_mean")
    lines = [Series("maximum", most, SECOND), Series("mean", mean, FIRST)]
    known = any(math.isfinite(x) for x in [*most, *mean])
    return panel(
        "Sampler against trainer",
        "Difference between the log-probs that the sampler noted and the trainer's own, on fresh tokens.",
        draw(run, lines, unit="nats a token", scale="log") if known else None,
    )
