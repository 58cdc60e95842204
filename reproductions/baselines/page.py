"""README.md of this reproduction, from its result: of the weight "root", that of the recipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reproductions import harness
from reproductions.baselines.enumerated import BASELINES

Row = dict[str, Any]
PAGE = """# Baselines of weighted updates

    python reproductions/baselines/run.py        # seeds 0, 1, 5, 9 and 13; three minutes on one core

The update is Σ_i w_i (R_i − b) ∇log π(y_i) with w = min(1, (π/π_ref)^½). [proofs.md](proofs.md) derives
what is measured here, for [the guide](../../docs/guide/concepts.md). `result.json` has the weights 1 and
min(1, π/π_ref) too.

| name | b |
|---|---|
| mean, weighted, optimal | R̄; R̄_w, the mean by w; b_g, the mean by w (1 − π)² |
| lower, balanced | min(R̄, R̄_w); min(b_g, R̄_w): with noisy rewards they move the end |
| mixed | R̄_w + w̄ (b_g − R̄_w), w̄ the mean weight of the group |
| other groups | R̄_w where b_g would push the step's other groups down, else b_g |
| optimal, imitation λ | b_g, and λ is added to the factor of each response |

## Where noisy rewards end

KL(π ‖ π\\*) in nats where Adam and then Newton's method end, of {count} problems: four responses, β = 0.25,
rewards 0 and 1 or uniform, a random reference and behavior. The median over groups of {sizes} of the median
over problems; in brackets the worst. "0" is below 1e-7. {left_out} ends didn't arrive (residual above 1e-8)
and are left out: a choice between two means has kinks.

{noisy}
## What it does to what responses share

{seeds} logs of 32 prompts with 4 responses each, {updates} updates of Adam at rate 0.3. Logged responses
share one logit over all prompts, and begin with a mass of ½ (log ½ = −0.69). Each cell has the mean log of
that mass at the end (0 is best), and the mean probability of right responses (standard error at most
{error:.3f}).

{held}
## One response a prompt

Two prompts of three responses, β = 0.25; what stands in place of the group's mean. KL(π ‖ π\\*) where it
ends, the median of {count} problems and the worst, on data of the reference and of another policy, by how
far the V\\* of the two prompts are apart. Where they are equal all end at π\\*.

{single}
**Of two users**, different in what they ask, the second of whom gives more to every response: data of
another policy, the baseline "optimal" over the batch. "Centered": rewards less the mean reward of their
user, as by `agro import --center-by`.

{users}"""


def readme(found: dict[str, Any], count: int, seeds: int, updates: int) -> str:
    noisy, held, single, users = (
        [row for row in found[name] if row.get("weight", "root") == "root"]
        for name in ("noisy", "held", "single", "users")
    )
    others = [r for r in users if (r["data"], r["users"]) == ("other", "different")]
    others = [row for row in others if row["lenience"] in (0.0, 1.0)]
    stands = list(dict.fromkeys(row["stands"] for row in single))
    apart = [row for row in single if row["spread"] in (0.25, 1.0)]
    compared = list(dict.fromkeys(row["stands"] for row in others))
    left_out = sum(row["of"] - row["arrived"] for row in (*noisy, *single, *others))
    return PAGE.format(
        count=count,
        seeds=seeds,
        updates=updates,
        sizes=", ".join(sorted({str(row["n"]) for row in noisy})),
        left_out=f"{left_out} of {sum(row['of'] for row in (*noisy, *single, *others))}",
        error=max(row["error"] for row in held),
        noisy=table(noisy, "baseline", BASELINES, lambda r: f"{r['data']}, ± {r['noise']:g}", spread_of),
        held=table(
            [row for row in held if row["lr"] == 0.3],
            "baseline",
            BASELINES,
            lambda r: f"± {r['noise']:g}, β {r['beta']:g}",
            mass_of,
        ),
        single=table(apart, "stands", stands, lambda r: f"{r['data']}, {r['spread']:g} apart", spread_of),
        users=table(
            others,
            "stands",
            compared,
            lambda r: f"V\\* {r['spread']:g} apart, {r['lenience']:g} more",
            spread_of,
        ),
    )


def table(
    rows: Sequence[Row],
    key: str,
    names: Sequence[str],
    column: Callable[[Row], str],
    cell: Callable[[Sequence[Row]], str],
) -> str:
    """A line for each of `names`, the values of `key`, and a column for each kind of row."""
    columns = list(dict.fromkeys(map(column, rows)))
    lines = []
    for name in names:
        of_name = [row for row in rows if row[key] == name]
        lines.append([name, *(cell([row for row in of_name if column(row) == each]) for each in columns)])
    return harness.markdown(["", *columns], lines) + "\n"


def nats(value: float) -> str:
    return "0" if value < 1e-7 else f"{value:.2g}"


def spread_of(rows: Sequence[Row]) -> str:
    """The median of medians, and the worst."""
    known = [row for row in rows if row["median"] is not None]
    if not known:
        return "–"
    medians = sorted(row["median"] for row in known)
    return f"{nats(medians[len(medians) // 2])} ({nats(max(row['worst'] for row in known))})"


def mass_of(rows: Sequence[Row]) -> str:
    return ", ".join(f"{row['mass']:.2f}, {row['right']:.3f}" for row in rows)
