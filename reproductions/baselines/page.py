"""README.md of this reproduction, from its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reproductions.baselines.enumerated import BASELINES

HEAD = """# Baselines of weighted updates

Made by `python reproductions/baselines/run.py` (seeds 0, 1, 5, 9 and 13). The update is
Σ_i w_i (R_i − b) ∇log π(y_i), w = min(1, (π/π_ref)^p): p = 0 is "none", ½ "root", 1 "reference".
[proofs.md](proofs.md) derives what is measured here, for [the guide](../../docs/guide/concepts.md).

| name | b |
|---|---|
| mean, weighted, optimal | R̄; R̄_w, the mean by w; b_g, the mean by w (1 − π)² |
| lower, balanced | min(R̄, R̄_w); min(b_g, R̄_w) |
| mixed | R̄_w + w̄ (b_g − R̄_w), w̄ the mean weight of the group |
| other groups | R̄_w where b_g would push the step's other groups down, else b_g |
| optimal, imitation λ | b_g, and λ is added to the factor of each response |

## Where noisy rewards end

KL(π ‖ π\\*) in nats where Adam and then Newton's method end, of {count} problems: four responses, β = 0.25,
rewards 0 and 1 or uniform, a random reference and behavior. First the median over groups of {sizes}, of
the median over problems; in brackets the worst of all. "0" is below 1e-7. Fixed rewards (± 0) have two starts
each. Ends whose residual stays above 1e-8 are left out, and counted in the last column: a choice between two
means has kinks, which Newton's method can't pass. For "other groups" a step has two groups.

"""
HELD = """
## What it does to what responses share

{seeds} logs of 32 prompts with 4 responses each, {updates} updates of Adam on complete logs. Logged responses
share one logit over all prompts, and begin with a mass of ½ (log ½ = −0.69); the rest stands for other text.
Each cell has the mean log of that mass at the end (0 is best), and the mean probability of right responses
(standard error at most {error:.3f}, mostly of the logs, which all rows share).

"""
SINGLE = """
## One response a prompt

Two prompts of three responses, β = 0.25. KL(π ‖ π\\*) where it ends, the median of {count} problems and in
brackets the worst, over how far the V\\* of the two prompts are apart. "Batch" is without end; "four rows"
are steps of four.

"""
USERS = """
## One response a prompt, of two users

Two users with two prompts each, whose V\\* are "V\\* apart"; the second user gives more to every response.
w = min(1, (π/π_ref)^½), β = 0.25, batches without end with the baseline "optimal". "Centered": rewards less
the mean reward of their user, as by `agro import --center-by`. "Alike": but for what the second user gives
on top, that user's prompts are the first one's; else all four are drawn. KL(π ‖ π\\*) where it ends, median
and worst of {count}.

"""


def readme(found: dict[str, Any], count: int, seeds: int, updates: int) -> str:
    sizes = sorted({row["n"] for row in found["noisy"]})
    parts = [HEAD.format(count=count, sizes=listed(sizes))]
    parts += [noisy_table(found["noisy"])]
    error = max(row["error"] for row in found["held"])
    parts += [HELD.format(seeds=seeds, updates=updates, error=error), held_table(found["held"])]
    parts += [SINGLE.format(count=count), single_table(found["single"])]
    parts += [USERS.format(count=count), users_table(found["users"])]
    return "".join(parts)


def listed(sizes: Sequence[int]) -> str:
    return " and ".join(filter(None, [", ".join(map(str, sizes[:-1])), str(sizes[-1])]))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def nats(value: float) -> str:
    return "0" if value < 1e-7 else f"{value:.2g}"


def spread_of(rows: Sequence[dict[str, Any]]) -> str:
    """The median of medians, and the worst."""
    known = [row for row in rows if row["median"] is not None]
    if not known:
        return "–"
    medians = sorted(row["median"] for row in known)
    return f"{nats(medians[len(medians) // 2])} ({nats(max(row['worst'] for row in known))})"


def noisy_table(rows: list[dict[str, Any]]) -> str:
    head = ["data", "noise", "baseline", "w: none", "root", "reference", "not arrived"]
    lines = []
    for data in ("off-policy", "on-policy"):
        for noise in sorted({row["noise"] for row in rows}):
            for name in BASELINES:
                at = [r for r in rows if (r["data"], r["noise"], r["baseline"]) == (data, noise, name)]
                by_weight = [
                    spread_of([r for r in at if r["weight"] == weight])
                    for weight in ("none", "root", "reference")
                ]
                left_out = sum(r["of"] - r["arrived"] for r in at)
                lines.append(
                    [data, f"± {noise:g}", name, *by_weight, f"{left_out} of {sum(r['of'] for r in at)}"]
                )
    return table(head, lines)


def held_table(rows: list[dict[str, Any]]) -> str:
    settings = list(dict.fromkeys((row["beta"], row["lr"]) for row in rows))
    head = ["weight", "noise", "baseline", *(f"β {beta:g}, rate {lr:g}" for beta, lr in settings)]
    lines = []
    for weight in ("root", "reference"):
        for noise in sorted({row["noise"] for row in rows}):
            for name in BASELINES:
                at = [r for r in rows if (r["weight"], r["noise"], r["baseline"]) == (weight, noise, name)]
                cells = [f"{r['mass']:.2f}, {r['right']:.3f}" for r in at]
                lines.append([weight, f"± {noise:g}", name, *cells])
    return table(head, lines)


def single_table(rows: list[dict[str, Any]]) -> str:
    spreads = sorted({row["spread"] for row in rows})
    head = ["data", "weight", "in place of the mean", *(f"V\\* apart {s:g}" for s in spreads), "not arrived"]
    lines = []
    for data in ("reference", "other"):
        for weight in ("none", "root", "reference"):
            for name in dict.fromkeys(row["stands"] for row in rows):
                at = [r for r in rows if (r["data"], r["weight"], r["stands"]) == (data, weight, name)]
                left_out = sum(r["of"] - r["arrived"] for r in at)
                cells = [spread_of([r]) for r in at]
                lines.append([data, weight, name, *cells, f"{left_out} of {sum(r['of'] for r in at)}"])
    return table(head, lines)


def users_table(rows: list[dict[str, Any]]) -> str:
    more = sorted({row["lenience"] for row in rows})
    head = ["data", "users", "V\\* apart", "compared with", *(f"more {m:g}" for m in more), "not arrived"]
    lines = []
    keys = ("data", "users", "spread", "stands")
    for place in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        at = [row for row in rows if tuple(row[key] for key in keys) == place]
        left_out = sum(row["of"] - row["arrived"] for row in at)
        named = [f"{part:g}" if isinstance(part, float) else part for part in place]
        lines.append([*named, *(spread_of([row]) for row in at), f"{left_out} of {sum(r['of'] for r in at)}"])
    return table(head, lines)
