"""Figure 1 of AGRO (arXiv 2503.19612): tabular, off-policy, KL(π ‖ π*) against updates.

    python reproductions/figure1/run.py [--small] [--out FOLDER]

AGRO and the policy gradient with a KL term (kl_pg), for several β, on random problems: two tokens of a
vocabulary of two, rewards uniform in 0 … 1. The data are the reference's, a uniform policy's or another
policy's. Beyond the paper they are also an unknown mixture of the three, or those of a policy that never
gives some responses. First with exact expectations: all groups of two, weighted by their probability. Then,
beyond the paper, with samples: groups of 2, 4, 8 and 16 drawn anew at every update, through the step that
trains. Writes figure.png, sampled.png and result.json.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agro.proof.enumerable import Enumerable, Space, optimum
from agro.proof.expectation import DataDistribution
from reproductions import harness
from reproductions.descent import DescentSettings, follow, table_of
from reproductions.descent import Path as Descent

FOLDER = Path(__file__).resolve().parent
BEHAVIORS = ("reference", "uniform", "another", "mixture", "lacks support")
OBJECTIVES = ("agro", "kl_pg")
BETAS = {0.1: 1, 0.3: 20, 1.0: 1}  # and how many times UPDATES the policy gradient gets
UPDATES = 2000
SIZES, SAMPLED_BETA, SEEDS = (2, 4, 8, 16), 0.3, 3  # of the groups that are drawn
LEVELS = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)


def problems(instances: int) -> tuple[Enumerable, Enumerable, torch.Tensor]:
    """Reference and behavior over all behaviors' copies of the same random problems, and their rewards."""
    space = Space(2, 2, instances)
    reference, uniform, another = (Enumerable.table(space, *args) for args in ((2, 0.7), (0, 0.0), (3, 1.0)))
    mixture = torch.stack([p.logp().detach() for p in (reference, uniform, another)]).logsumexp(0) - math.log(
        3
    )
    lacking = Enumerable.table(space, 4, 1.0)
    with torch.no_grad():  # the last token is never the first one
        lacking.weights()["logits"][:, 0, -1] = -math.inf
    reward = torch.rand(instances, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    tables = [reference, uniform, another, table_of(space, mixture), lacking]
    behavior = Enumerable.joined(tables)
    return Enumerable.joined([reference] * len(tables)), behavior, reward.repeat(len(tables), 1)


def run(name: str, beta: float, instances: int, updates: int) -> Descent:
    reference, behavior, reward = problems(instances)
    start = Enumerable.joined([reference])
    star = optimum(reference.logp().detach(), reward, beta)
    return follow(
        start,
        reference,
        DataDistribution(behavior, reward),
        star,
        name,
        {"beta": beta},
        DescentSettings(updates=updates, looks=60),
    )


def run_sampled(name: str, n: int, instances: int, updates: int) -> Descent:
    """Every problem `SEEDS` times, as prompts of one table: each has responses of its own."""
    reference, behavior, reward = problems(instances)
    reference, behavior, start = (Enumerable.joined([p] * SEEDS) for p in (reference, behavior, reference))
    reward = reward.repeat(SEEDS, 1)
    star = optimum(reference.logp().detach(), reward, SAMPLED_BETA)
    options = {"beta": SAMPLED_BETA}
    how = DescentSettings(n=n, seed=0, updates=updates, looks=60)
    return follow(start, reference, DataDistribution(behavior, reward), star, name, options, how)


def curves(path: Descent, seeds: int = 1) -> dict[str, dict[str, Any]]:
    """By behavior: quartiles over problems (and seeds) of KL(π ‖ π*) in nats, and the worst at the end."""
    split = path.distance.clamp(min=0).view(len(path.updates), seeds, len(BEHAVIORS), -1)
    found = {}
    for i, behavior in enumerate(BEHAVIORS):
        every = split[:, :, i].flatten(1)
        quartiles = dict(zip(("low", "median", "high"), every.quantile(LEVELS, 1).tolist()))
        rounded = {k: [float(f"{x:.4g}") for x in line] for k, line in quartiles.items()}
        found[behavior] = {"updates": path.updates.tolist(), **rounded, "worst": every[-1].max().item()}
    return found


def measure(small: bool) -> dict[str, Any]:
    instances, began, rows, sampled = (4 if small else 16), time.perf_counter(), [], []
    for beta, times in BETAS.items():
        for name in OBJECTIVES:
            updates = 400 if small else UPDATES * (times if name == "kl_pg" else 1)
            for behavior, curve in curves(run(name, beta, instances, updates)).items():
                rows.append({"objective": name, "beta": beta, "behavior": behavior, **curve})
    for name in OBJECTIVES:
        for n in SIZES:
            path = run_sampled(name, n, instances, 400 if small else UPDATES)
            for behavior, curve in curves(path, SEEDS).items():
                sampled.append({"objective": name, "n": n, "behavior": behavior, **curve})
    return {
        "rows": rows,
        "sampled": sampled,
        "instances": instances,
        "seeds": SEEDS,
        "beta of sampled": SAMPLED_BETA,
        "seconds": time.perf_counter() - began,
        **harness.machine(),
    }


def draw(axis: Any, row: dict[str, Any], x: Any, style: str, label: str, color: str) -> None:
    """A median and its quartiles, in logarithms; what is 0 to rounding stands at the bottom."""
    low, middle, high = (np.maximum(row[k], 1e-17) for k in ("low", "median", "high"))
    axis.plot(x, middle, style, color=color, label=label)
    axis.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)
    axis.set(xscale="log", yscale="log")
    axis.spines[["top", "right"]].set_visible(False)


def figure(found: dict[str, Any], path: Path) -> None:
    out = Figure(figsize=(13, 3.9), layout="constrained")
    axes = out.subplots(1, len(BEHAVIORS), sharey=True)
    for row in found["rows"]:
        axis, label = axes[BEHAVIORS.index(row["behavior"])], f"{row['objective']}, β = {row['beta']:g}"
        style = dict(zip(BETAS, (":", "-", "--")))[row["beta"]]
        color = harness.COLORS[OBJECTIVES.index(row["objective"])]
        draw(axis, row, np.array(row["updates"]) + 1, style, label, color)
    for axis, behavior in zip(axes, BEHAVIORS):
        axis.set(title=f"data: {behavior}", xlabel="updates")
    axes[0].set_ylabel(f"KL(π ‖ π*), nats\nmedian and quartiles of {found['instances']}")
    out.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    out.savefig(path, dpi=130)
    figure_sampled(found, path.with_name("sampled.png"))


def figure_sampled(found: dict[str, Any], path: Path) -> None:
    """Groups that are drawn from the mixture: against updates, and against samples."""
    out = Figure(figsize=(9, 3.9), layout="constrained")
    axes = out.subplots(1, 2, sharey=True)
    for row in found["sampled"]:
        if row["behavior"] == "mixture":
            style = dict(zip(SIZES, (":", "-.", "--", "-")))[row["n"]]
            color = harness.COLORS[OBJECTIVES.index(row["objective"])]
            updates = np.array(row["updates"]) + 1
            for axis, x in zip(axes, (updates, updates * row["n"])):
                draw(axis, row, x, style, f"{row['objective']}, n = {row['n']}", color)
    axes[0].set(xlabel="updates", title=f"sampled groups of a mixture, β = {found['beta of sampled']:g}")
    axes[1].set(xlabel="samples a prompt")
    instances = f"{found['instances']} × {found['seeds']} seeds"
    axes[0].set_ylabel(f"KL(π ‖ π*), nats\nmedian and quartiles of {instances}")
    out.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    out.savefig(path, dpi=130)


def tell(found: dict[str, Any]) -> str:
    lines = (
        f"{r['objective']:6} {'β' if 'beta' in r else 'n'} {r.get('beta', r.get('n')):<4g} "
        f"data of {r['behavior']:14} "
        f"{r['updates'][-1]:6} updates: KL median {r['median'][-1]:.2g}, worst {r['worst']:.2g}"
        for r in (*found["rows"], *found["sampled"])
    )
    return "\n".join([*lines, f"{found['seconds']:.0f} s"])


if __name__ == "__main__":
    harness.enumerate_and_draw(__doc__, FOLDER, measure, figure, tell)
