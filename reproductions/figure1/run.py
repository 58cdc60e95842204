"""Figure 1 of AGRO (arXiv 2503.19612): tabular, off-policy, KL(π ‖ π*) against updates, by exact expectations.

    python reproductions/figure1/run.py [--small] [--out FOLDER]

AGRO and the policy gradient with a KL term (kl_pg), for several β, on data of the reference, of a uniform policy, of another
policy, and beyond the paper of a mixture of the three that nobody knows, and of a policy that never gives some responses.
Each on random problems: two tokens of a vocabulary of two, rewards uniform in 0 … 1. Groups of two, all of them, weighed by their
probability. Writes figure.png and result.json.
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

from agro.proof.descent import Path as Descent
from agro.proof.descent import descend
from agro.proof.enumerable import Enumerable, Space, optimum
from agro.proof.expectation import Data
from reproductions import harness

FOLDER = Path(__file__).resolve().parent
BEHAVIORS = ("reference", "uniform", "another", "mixture", "lacks support")
OBJECTIVES = ("agro", "kl_pg")
BETAS = {0.1: 1, 0.3: 20, 1.0: 1}  # and how many times UPDATES the policy gradient gets
UPDATES = 2000


def problems(instances: int) -> tuple[Enumerable, Enumerable, torch.Tensor]:
    """Reference and behaviour over all behaviours' copies of the same random problems, and their rewards."""
    space = Space(2, 2, instances)
    reference, uniform, another = (Enumerable.table(space, *args) for args in ((2, 0.7), (0, 0.0), (3, 1.0)))
    mixture = torch.stack([p.logp().detach() for p in (reference, uniform, another)]).logsumexp(0) - math.log(3)
    lacking = Enumerable.table(space, 4, 1.0)
    with torch.no_grad():  # the last token is never the first one
        lacking.weights()["logits"][:, 0, -1] = -math.inf
    reward = torch.rand(instances, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    tables = [reference, uniform, another, Enumerable.of(space, mixture), lacking]
    behavior = Enumerable.joined(tables)
    return Enumerable.joined([reference] * len(tables)), behavior, reward.repeat(len(tables), 1)


def run(name: str, beta: float, instances: int, updates: int) -> Descent:
    reference, behavior, reward = problems(instances)
    start = Enumerable.joined([reference])
    star = optimum(reference.logp().detach(), reward, beta)
    return descend(start, reference, Data(behavior, reward), star, name, {"beta": beta}, updates=updates, looks=60)


def measure(small: bool) -> dict[str, Any]:
    instances, began, rows = (4 if small else 16), time.perf_counter(), []
    for beta, times in BETAS.items():
        for name in OBJECTIVES:
            updates = 400 if small else UPDATES * (times if name == "kl_pg" else 1)
            path = run(name, beta, instances, updates)
            split = path.distance.view(len(path.updates), len(BEHAVIORS), instances)
            for i, behavior in enumerate(BEHAVIORS):
                low, middle, high = (
                    split[:, i].clamp(min=0).quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), 1)
                )
                rows.append({
                    "objective": name, "beta": beta, "behavior": behavior, "updates": path.updates.tolist(),
                    "median": middle.tolist(), "low": low.tolist(), "high": high.tolist(), "worst": split[-1, i].max().item(),
                })  # fmt: skip
    return {"rows": rows, "instances": instances, "seconds": time.perf_counter() - began, **harness.machine()}


def figure(found: dict[str, Any], path: Path) -> None:
    out = Figure(figsize=(13, 3.9), layout="constrained")
    axes = out.subplots(1, len(BEHAVIORS), sharey=True)
    for axis, behavior in zip(axes, BEHAVIORS):
        for row in found["rows"]:
            if row["behavior"] == behavior:
                colour = harness.COLOURS[OBJECTIVES.index(row["objective"])]
                style = dict(zip(BETAS, (":", "-", "--")))[row["beta"]]
                x, floor = np.array(row["updates"]) + 1, 1e-17
                axis.plot(
                    x,
                    np.maximum(row["median"], floor),
                    style,
                    color=colour,
                    label=f"{row['objective']}, β = {row['beta']:g}",
                )
                axis.fill_between(
                    x,
                    np.maximum(row["low"], floor),
                    np.maximum(row["high"], floor),
                    color=colour,
                    alpha=0.12,
                    linewidth=0,
                )
        axis.set(title=f"data: {behavior}", xlabel="updates", xscale="log", yscale="log")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(f"KL(π ‖ π*), nats\nmedian and quartiles of {found['instances']}")
    out.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    out.savefig(path, dpi=130)


def tell(found: dict[str, Any]) -> str:
    lines = (
        f"{r['objective']:6} β {r['beta']:<4g} data of {r['behavior']:14} {r['updates'][-1]:6} updates: "
        f"KL median {r['median'][-1]:.2g}, worst {r['worst']:.2g}"
        for r in found["rows"]
    )
    return "\n".join([*lines, f"{found['seconds']:.0f} s"])


if __name__ == "__main__":
    harness.enumerate_and_draw(__doc__, FOLDER, measure, figure, tell)
