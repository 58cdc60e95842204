"""Does on-policy AGRO with the baselines of the recipe `fresh` still have the trap? Exact descents.

    python reproductions/trap/baseline.py [--only step]

The recipe compares R with the step's other prompts, b = Σ g R / Σ g over their responses, g = Σ_t (1 − π_t)²;
before, with that mean of the own group, b_g, own response included. That is the pathwise part, c = 0. Here
both take the place of the mean of the others in the likelihood-ratio part too: Σ_i [−β a_i + c ½ a_i²]
∇log π(y_i), with a_i = (R_i − b_g) n/(n − 1) in expectation over all groups of n, as `over_groups` of
remedies.py has it for the mean; or a_i = R_i − b, the expectations over the other prompts in place of sums,
on networks of four prompts, which are one step.
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
NETWORKS, STEPS = 60, 1000
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


def of_step(size: int, c: Callable[[Tensor], Tensor | float]) -> Weights:
    """With the mean of nearly least variance of the other prompts of an instance, where these are `size`."""

    def weights(p: Tensor, anchor: Tensor, R: Tensor, done: float) -> Tensor:
        share = p * norms(p)
        above, total = ((v.sum(1).unflatten(0, (-1, size))) for v in (share * R, share))
        others = [v.sum(1, keepdim=True) - v for v in (above, total)]
        a = R - (others[0] / others[1].clamp(min=1e-300)).flatten()[:, None]
        return p * (c(a) * a.square() / 2 - a)

    return weights


def of_steps() -> None:
    """A step of four prompts, whose networks share parameters, kind of rewards and β."""
    problems = remedies.networks(NETWORKS)
    for name, share in (("0", SHARES["0"]), ("1", SHARES["1"]), ("per response", remedies.per_response)):
        c = lambda a, share=share: torch.as_tensor(share(a))  # noqa: E731
        for weights in (remedies.shared(lambda p, a, done, c=c: c(a)), of_step(problems.size, c)):
            ends = Ends.of(problems, by_weights(problems, weights, STEPS)).to_json()
            print("step,", name, f"{ends['fell']:.1%} {ends['reached']:.1%} {ends['near']}", flush=True)


def main() -> None:
    print("c of the step: fell, reached, updates with the prompt's own mean; with the others'")
    of_steps()
    if sys.argv[1:] == ["--only", "step"]:
        return
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
