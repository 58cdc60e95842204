"""Does on-policy AGRO with the optimal baseline still have the trap? Exact descents on tables.

    python reproductions/trap/baseline.py

The recipe `fresh` compares the R of a group with b_g = Σ g R / Σ g, g = Σ_t (1 − π_t)², the own response
included. That is the pathwise part, c = 0. Here it takes the place of the mean of the others in the
likelihood-ratio part too: (1/n) Σ_i [−β a_i + c ½ a_i²] ∇log π(y_i), a_i = (R_i − b_g) n/(n − 1). The
expectation is over all groups of n, as `over_groups` of remedies.py has it for the mean.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agro.proof.enumerable import multisets
from reproductions import harness
from reproductions.trap import remedies
from reproductions.trap.compare import Ends
from reproductions.trap.remedies import Weights, by_weights, over_groups

INSTANCES, UPDATES, RESPONSES = 150, 600, 4
SHARES: Mapping[str, Callable[[Tensor], Tensor | float]] = {
    "0": lambda advantage: 0.0,
    "1": lambda advantage: 1.0,
    "adaptive": lambda advantage: 1 / advantage.amax(-1, keepdim=True).clamp(min=1),
}


def norms(p: Tensor) -> Tensor:
    """[X,Y] Σ_t (1 − π_t)² of responses of two tokens, from their probabilities."""
    vocabulary = math.isqrt(p.shape[1])
    both = p.unflatten(1, (vocabulary, vocabulary))
    first = both.sum(-1, keepdim=True)
    return ((1 - first).square() + (1 - both / first).square()).flatten(1)


def with_optimal_baseline(n: int, c: Callable[[Tensor], Tensor | float]) -> Weights:
    """The expectation over all groups of n with b_g in both parts."""
    groups, orders = multisets(RESPONSES, n)

    def weights(p: Tensor, anchor: Tensor, R: Tensor, done: float) -> Tensor:
        each, norm = R[:, groups], norms(p)[:, groups]  # [X,G,n]
        total = norm.sum(-1, keepdim=True).clamp(min=1e-300)
        advantage = (each - (norm * each).sum(-1, keepdim=True) / total) * n / (n - 1)
        chance = orders * p[:, groups].prod(-1) / n
        pull = (c(advantage) * advantage.square() / 2 - advantage) * chance[..., None]
        return torch.zeros_like(p).index_add(1, groups.flatten(), pull.flatten(1))

    return weights


def main() -> None:
    problems = remedies.tables(math.isqrt(RESPONSES), INSTANCES)
    print("n, c: fell, reached, updates (quartiles, worst) with the mean; with b_g")
    for n in (2, 3):
        for name, c in SHARES.items():
            means = over_groups(n, RESPONSES, lambda advantage, c=c: torch.as_tensor(c(advantage)))
            for weights in (means, with_optimal_baseline(n, c)):
                ends = Ends.of(problems, by_weights(problems, weights, UPDATES)).to_json()
                print(n, name, f"{ends['fell']:.1%} {ends['reached']:.1%} {ends['near']}", flush=True)


if __name__ == "__main__":
    harness.guarded(main)
