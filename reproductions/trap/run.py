"""The trap of on-policy AGRO: where descent from π_ref ends, with the paper's loss and with remedies.

    python reproductions/trap/run.py [--small] [--out FOLDER]

First 0/1 rewards over a grid of success rates p and β: a reference that gives the one rewarded response of
four with probability p. Theory (README.md): the paper's loss (c = 1) raises the reward from π_ref only where
β > ½ − p. The same with c = "adaptive" is shown beside it. Then remedies (remedies.py) on random
problems. Writes figure.png, remedies.png and result.json.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agro.proof.enumerable import Enumerable, Space, optimum
from agro.proof.expectation import DataDistribution
from reproductions import harness
from reproductions.descent import DescentSettings, follow
from reproductions.trap import remedies

FOLDER = Path(__file__).resolve().parent
RESPONSES, UPDATES = 4, 800
SAMPLED = 4  # responses a prompt and update, where groups are drawn
SHARES: dict[str, float | str] = {"1": 1.0, "adaptive": "adaptive"}  # c, of the likelihood-ratio part


def reference(p: NDArray[np.float64], seed: int = 0) -> Enumerable:
    """A policy over one token: response 0 with probability p of each prompt, the others at random."""
    space = Space(RESPONSES, 1, len(p))
    policy = Enumerable.table(space, seed)
    with torch.no_grad():
        logits = policy.weights()["logits"]
        rest = logits[:, 0, 1:].log_softmax(-1)
        logits[:, 0, 0] = torch.from_numpy(np.log(p))
        logits[:, 0, 1:] = rest + torch.from_numpy(np.log1p(-p))[:, None]
    return policy


def gained(
    p: NDArray[np.float64], betas: NDArray[np.float64], share: float | str, updates: int
) -> NDArray[np.float64]:
    """[β,p] (E r at the end − p) / (E r at the optimum − p): 1 is the optimum, below 0 a fall.

    All in one table: β = 1 and rewards r/β are the same problem in units of β.
    """
    rates = np.tile(p, len(betas))
    anchor, start = reference(rates), reference(rates)
    reward = torch.zeros(len(rates), RESPONSES, dtype=torch.float64)
    reward[:, 0] = torch.from_numpy(1 / np.repeat(betas, len(p)))
    star = optimum(anchor.logp().detach(), reward, 1.0)
    options, how = {"beta": 1.0, "likelihood_ratio": share}, DescentSettings(updates=updates)
    follow(start, anchor, DataDistribution(start, reward), star, "agro_onpolicy", options, how)
    end, best = (x.exp()[:, 0].numpy() for x in (start.logp().detach(), star))
    return ((end - rates) / (best - rates)).reshape(len(betas), len(p))


def grid(small: bool) -> dict[str, Any]:
    p = np.linspace(0.02, 0.58, 8 if small else 29)
    betas = np.linspace(0.04, 0.6, 6 if small else 29)
    updates = 300 if small else UPDATES
    grids = {c: gained(p, betas, share, updates) for c, share in SHARES.items()}
    below = betas[:, None] < 0.5 - p[None] - 0.02  # clear of the line by a grid's step
    above = betas[:, None] > 0.5 - p[None] + 0.02
    paper, adaptive = grids["1"], grids["adaptive"]
    return {
        "p": p.tolist(),
        "beta": betas.tolist(),
        "gained": {c: g.round(4).tolist() for c, g in grids.items()},
        "fell below the line, c = 1": float((paper[below] < 0).mean()),
        "rose above the line, c = 1": float((paper[above] > 0).mean()),
        "least gained, adaptive": float(adaptive.min()),
        "updates": updates,
    }


def measure(small: bool) -> dict[str, Any]:
    began, updates = time.perf_counter(), 300 if small else 600
    few, many, several, drawn = (12, 12, 6, 6) if small else (300, 150, 60, 99)
    families = {
        "tables, 4 responses": remedies.compare(remedies.tables(2, few), updates),
        "tables, 9 responses": remedies.compare(remedies.tables(3, many), updates),
        "networks, 4 prompts": remedies.compare(remedies.networks(several), 200 if small else 1000),
        f"tables, sampled groups of {SAMPLED}": remedies.compare(
            remedies.tables(2, drawn), updates, SAMPLED, range(1 if small else 3)
        ),
    }
    return {**grid(small), "remedies": families, "seconds": time.perf_counter() - began, **harness.machine()}


def figure(found: dict[str, Any], path: Path) -> None:
    out = Figure(figsize=(9, 4), layout="constrained")
    axes = out.subplots(1, 2, sharey=True)
    p, beta = np.array(found["p"]), np.array(found["beta"])
    for axis, (c, grid) in zip(axes, found["gained"].items()):
        image = axis.pcolormesh(
            p, beta, np.clip(grid, -1, 1), cmap="RdBu", vmin=-1, vmax=1, shading="nearest"
        )
        axis.plot(p, 0.5 - p, color=harness.INK, linewidth=1.5, label="theory: β = ½ − p")
        axis.set(
            title=f"c = {c}",
            xlabel="success rate p of the reference",
            ylim=(beta[0], beta[-1]),
            xlim=(p[0], p[-1]),
        )
    axes[0].set_ylabel("β, reward per nat")
    axes[0].legend(loc="upper right", frameon=True)
    out.colorbar(image, ax=axes, label="share of the optimum's gain in reward")
    out.savefig(path, dpi=130)
    remedies.figure(found["remedies"], path.with_name("remedies.png"))


def tell(found: dict[str, Any]) -> str:
    said = ("fell below the line, c = 1", "rose above the line, c = 1", "least gained, adaptive")
    lines = [f"{key}: {found[key]:.4g}" for key in said]
    return "\n".join([*lines, *remedies.tell(found["remedies"]), f"{found['seconds']:.0f} s"])


if __name__ == "__main__":
    harness.enumerate_and_draw(__doc__, FOLDER, measure, figure, tell)
