"""Baselines of weighted updates: where they end with noisy rewards, and what stands for the group's mean
where a prompt has one response.

    python reproductions/baselines/run.py [--recorded] [--out FOLDER] [--small]

Writes result.json into --out, and where that is this folder the tables of README.md. It takes about two
minutes on one free core. With --recorded the tables are made anew of what result.json has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro.proof.enumerable import kl  # noqa: E402
from reproductions import harness  # noqa: E402
from reproductions.baselines.enumerated import (  # noqa: E402
    BASELINES,
    Outcomes,
    Problems,
    end,
    gradient_of_groups,
    gradient_of_rows,
    mean_by,
)

SIZES, NOISES, SPREADS = (2, 3, 4), (0.0, 0.5), (0.0, 1.0)
Found = dict[str, Any]
Update = Callable[[Tensor], Tensor]


def drawn(problems: int, prompts: int, responses: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """[P,X,K] log-probs of the reference and of the behavior, and rewards: uniform, or 1 for the best two."""
    generator = torch.Generator().manual_seed(seed)
    shape = (problems, prompts, responses)
    reference, behavior = (
        torch.randn(shape, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2)
    )
    reward = torch.rand(shape, generator=generator, dtype=torch.float64)
    best_two = (reward >= reward.topk(2, -1).values[..., -1:]).double()
    is_graded = (torch.arange(problems) % 2 == 1)[:, None, None]
    return reference, behavior, torch.where(is_graded, reward, best_two)


def measured(problems: Problems, update: Update, starts: list[Tensor]) -> Found:
    """KL(π ‖ π*) in nats where it ends, over problems and starts; those that didn't arrive are counted."""
    far, arrived = [], []
    for start in starts:
        logp, ok = end(start, update)
        far.append(kl(logp, problems.optimum).mean(1).clamp(min=0))
        arrived.append(ok)
    all_, ok = torch.cat(far), torch.cat(arrived)
    if not bool(ok.any()):
        return {"median": None, "worst": None, "arrived": 0, "of": len(ok)}
    ends = {"median": float(all_[ok].median()), "worst": float(all_[ok].max())}
    return ends | {"arrived": int(ok.sum()), "of": len(ok)}


def noisy(count: int, sizes: Sequence[int]) -> list[Found]:
    """Each baseline with each size of noise, group and kind of data."""
    reference, behavior, reward = drawn(count, 1, 4, seed=0)
    elsewhere = drawn(count, 1, 4, seed=5)[0]
    rows = []
    for data, mu in (("off-policy", behavior), ("on-policy", None)):
        for noise in NOISES:
            problems = Problems(reference, mu, reward, noise=noise)
            starts = [reference, elsewhere] if not noise else [reference]
            for name in BASELINES:
                for n in sizes:
                    at = {"baseline": name, "data": data, "noise": noise, "n": n}
                    rows.append(at | measured(problems, gradient_of_groups(problems, name, n), starts))
    return rows


def single(count: int, spreads: Sequence[float] = SPREADS) -> list[Found]:
    """What stands for the mean of a group of one, over how far apart the V* of two prompts are."""
    reference, behavior, reward = drawn(count, 2, 3, seed=9)
    rows = []
    for data, mu in (("reference", reference), ("other", behavior)):
        for spread in spreads:
            problems = Problems(reference, mu, reward)
            shift = spread - problems.value.diff(dim=1)[..., None]
            shifted = torch.cat([reward[:, :1], reward[:, 1:] + shift], 1)
            problems = replace(problems, reward=shifted)
            for name, update in singles(problems, spread).items():
                at = {"stands": name, "data": data, "spread": spread}
                rows.append(at | measured(problems, update, [reference]))
    return rows


def singles(problems: Problems, spread: float) -> dict[str, Update]:
    """By name, the expected updates of groups of one response."""
    shape = problems.reward.shape

    def pooled_optimal(all_: Outcomes) -> Tensor:
        return mean_by(all_.chance * all_.weight * all_.norm, all_.R)[:, None]

    def pooled_weighted(all_: Outcomes) -> Tensor:
        return mean_by(all_.chance * all_.weight, all_.R)[:, None]

    half = torch.tensor([spread / 2, -spread / 2], dtype=torch.float64)
    bases: dict[str, Callable[[Outcomes], Tensor]] = {
        "a value that is learned": lambda all_: mean_by(all_.chance.view(shape), all_.R.view(shape)),
        "V* itself": lambda all_: problems.value,
        "V* ∓ half the spread": lambda all_: problems.value + half,
        "mean of the batch": lambda all_: mean_by(all_.chance, all_.R)[:, None],
        "batch, optimal": pooled_optimal,
        "batch, balanced": lambda all_: torch.minimum(pooled_optimal(all_), pooled_weighted(all_)),
    }
    found = {name: gradient_of_rows(problems, base) for name, base in bases.items()}
    return found | {"mean of four rows": gradient_of_groups(problems, "mean", 4)}


def tables(found: Found) -> dict[str, str]:
    """Those of README.md."""
    apart = [row for row in found["single"] if row["spread"] == 1.0]
    of_data = {"reference": "data of the reference", "other": "of another policy"}
    return {
        "noisy": table(found["noisy"], "baseline", lambda row: f"{row['data']}, ± {row['noise']:g}"),
        "single": table(apart, "stands", lambda row: of_data[row["data"]]),
    }


def table(rows: Sequence[Found], key: str, column: Callable[[Found], str]) -> str:
    """A line for each value of `key`, and a column for each kind of row: the median of medians, and the
    worst; those that end at the optimum everywhere are one line."""
    columns = list(dict.fromkeys(map(column, rows)))
    lines, right = [], []
    for name in dict.fromkeys(row[key] for row in rows):
        of_name = [row for row in rows if row[key] == name]
        cells = [spread_of([row for row in of_name if column(row) == each]) for each in columns]
        if set(cells) == {"0 (0)"}:
            right.append(name)
        else:
            lines.append([name, *cells])
    if right:
        lines.insert(0, ["; ".join(right), *["0 (0)"] * len(columns)])
    return harness.markdown(["", *columns], lines)


def spread_of(rows: Sequence[Found]) -> str:
    known = [row for row in rows if row["median"] is not None]
    if not known:
        return "–"
    medians = sorted(row["median"] for row in known)
    middle, worst = medians[len(medians) // 2], max(row["worst"] for row in known)
    return "{} ({})".format(*("0" if value < 1e-7 else f"{value:.2g}" for value in (middle, worst)))


def main() -> None:
    recorded = "write the tables anew from what is recorded"
    args = harness.parser(__doc__, HERE, small=harness.SMALL, recorded=recorded).parse_args()
    torch.set_num_threads(1)
    if args.recorded:
        found = json.loads((HERE / "result.json").read_text())
    else:
        count, sizes = (2, (2, 3)) if args.small else (12, SIZES)
        found = {"noisy": noisy(count, sizes), "single": single(count)}
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "result.json").write_text(json.dumps(found, indent=1) + "\n")
    made = tables(found)
    if args.out == HERE:
        for name, text in made.items():
            harness.put(HERE / "README.md", text, name)
    print(*made.values(), sep="\n\n")


if __name__ == "__main__":
    main()
