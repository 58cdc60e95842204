"""Remedies of the trap of on-policy AGRO: where they end and how fast, on random problems.

Here β is 1 and rewards are r/β. That is the same problem in units of β, so that problems of different β stand
in one table. KL(π ‖ π*) in nats is then the regret too (Lemma 5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from agro.proof.enumerable import Enumerable, Network, Space, TabularValues, optimum
from agro.proof.expectation import DataDistribution
from reproductions import harness
from reproductions.descent import DescentSettings, follow
from reproductions.descent import Path as Descent

LOOKS = 160  # of a descent
NEAR = 1e-2  # nats: what is called reached
MOST = 2000  # updates at the right edge of the figure
OUTCOMES = {
    "reached the optimum": harness.COLORS[0],
    "neither": harness.GRID,
    "ended below the reference's reward": harness.COLORS[1],
}
MIXED = "c = 0, 1/2 reference"  # off-policy AGRO on the mixture: data.replay = 0.5
LIBRARY: Mapping[str, tuple[str, dict[str, Any]]] = {
    "c = 1": ("agro_onpolicy", {"likelihood_ratio": 1.0}),
    "c = 0": ("agro_onpolicy", {"likelihood_ratio": 0.0}),
    "adaptive": ("agro_onpolicy", {"likelihood_ratio": "adaptive"}),
    MIXED: ("agro", {}),
}
PAIRS = (("adaptive", "c = 1"), ("adaptive", "c = 0"), ("c = 1", "c = 0"), (MIXED, "c = 0"))


@dataclass(frozen=True)
class Problems:
    """X prompts, `size` of which in turn are one instance: they share parameters, kind and β."""

    make: Callable[[], Enumerable]  # the reference, anew
    reward: Tensor  # [X,Y] r/β
    size: int = 1
    lr: float = 0.1

    def of_instance(self, per_prompt: Tensor) -> Tensor:
        """[...,X] -> [...,I] means."""
        return per_prompt.unflatten(-1, (-1, self.size)).mean(-1)


def rewards(instances: int, prompts: int, responses: int, seed: int) -> Tensor:
    """r/β, [I·prompts,Y], of three kinds in turn.

    Sparse: 1 for one or two responses, else 0. Uniform in 0 … 1. Heavy: log-normal (σ = 2) over its maximum.
    β is log-uniform in 0.05 … 0.5.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (instances, prompts, responses)
    drawn, twice = (torch.rand(s, generator=generator, dtype=torch.float64) for s in (shape, shape[:2]))
    place = drawn.argsort(-1).argsort(-1)  # a random order
    heavy = (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).exp()
    kinds = ((place <= (twice < 0.5)[..., None]).double(), drawn, heavy / heavy.amax(-1, keepdim=True))
    reward = torch.stack([kinds[i % 3][i] for i in range(instances)])
    beta = 0.05 * 10 ** torch.rand(instances, 1, 1, generator=generator, dtype=torch.float64)
    return (reward / beta).flatten(0, 1)


def tables(vocabulary: int, instances: int, seed: int = 11) -> Problems:
    """Two tokens; logits of the reference are normal, σ = 1.5."""
    space = Space(vocabulary, 2, instances)
    return Problems(lambda: Enumerable.table(space, seed, 1.5), rewards(instances, 1, vocabulary**2, seed))


class Several(nn.Module):
    """Networks that share nothing with each other, as one over all their prompts: logits [X,C,V]."""

    def __init__(self, networks: list[Network]) -> None:
        super().__init__()
        self.stacked = nn.ParameterDict(stack_module_state(networks)[0])
        self.one = networks[:1]  # in a list, so that its parameters aren't this module's

    def forward(self) -> Tensor:
        out: Tensor = vmap(lambda weights: functional_call(self.one[0], weights, ()))(dict(self.stacked))
        return out.flatten(0, 1)


def networks(instances: int, prompts: int = 4, seed: int = 100) -> Problems:
    """Two tokens of a vocabulary of two, four prompts, two layers that prompts and contexts share."""
    space = Space(2, 2, prompts)

    def make() -> Enumerable:
        made = [Network(space, 0.7, torch.Generator().manual_seed(seed + i)) for i in range(instances)]
        whole = replace(space, prompts=prompts * instances)
        return Enumerable(whole, Several(made), TabularValues(whole, 0.0, torch.Generator()))

    return Problems(make, rewards(instances, prompts, 4, seed), prompts, lr=0.02)


@dataclass(frozen=True, eq=False)
class Mixed(DataDistribution):
    """Half of the samples from the behavior as it is, half from what it was at the start."""

    anchor: Tensor | None = None  # [X,Y] log π_ref

    def probability(self) -> Tensor:
        assert self.anchor is not None
        return (super().probability() + self.anchor.exp()) / 2


def descent(problems: Problems, name: str, updates: int, n: int = 2, seed: int | None = None) -> Descent:
    """Through the library's objective, on exact expectations over groups of `n`; with a `seed` on sampled
    groups, through its step."""
    reference, start = problems.make(), problems.make()
    anchor = reference.logp().detach()
    objective, options = LIBRARY[name]
    data = DataDistribution(start, problems.reward)
    if name == MIXED:
        data = Mixed(start, problems.reward, anchor=anchor)
    how = DescentSettings(n=n, seed=seed, updates=updates, lr=problems.lr, looks=LOOKS)
    star = optimum(anchor, problems.reward, 1.0)
    return follow(start, reference, data, star, objective, {"beta": 1.0, **options}, how)


class Ends(NamedTuple):
    """Of each instance [I]: where a descent ended, and how fast it got there."""

    gained: Tensor  # E r − E_ref r, in units of β
    near: Tensor  # updates until KL(π ‖ π*) is below NEAR for good; inf: never

    @classmethod
    def of(cls, problems: Problems, paths: Sequence[Descent]) -> Ends:
        anchor, gained, near = problems.make().logp().detach().exp(), [], []
        for path in paths:
            more = ((path.policy.logp().detach().exp() - anchor) * problems.reward).sum(1)
            gained.append(problems.of_instance(more))
            is_near = problems.of_instance(path.distance).clamp(min=0) < NEAR  # [K,I] at each look
            for_good = is_near.flip(0).cummin(0).values.flip(0)
            near.append(torch.where(for_good, path.updates.double()[:, None], torch.inf).amin(0))
        return cls(torch.cat(gained), torch.cat(near))

    def to_json(self) -> dict[str, Any]:
        """Shares of the instances, and quartiles over them; null is never."""
        return {
            "instances": len(self.near),
            "fell": float((self.gained < -1e-6).double().mean()),
            "reached": float(self.near.isfinite().double().mean()),
            "near": _quartiles(self.near),
        }

    def against(self, other: Ends) -> dict[str, Any]:
        """Shares of the instances that only one of the two reached.

        Where both did, also the ratio of their numbers of updates.
        """
        ours, theirs = self.near.isfinite(), other.near.isfinite()
        both = ours & theirs & (other.near > 0)  # some start there
        return {
            "alone": float((ours & ~theirs).double().mean()),
            "other alone": float((theirs & ~ours).double().mean()),
            "ratio": _quartiles((self.near / other.near)[both]),
        }


def _quartiles(x: Tensor) -> list[float | None]:
    """The lower quartile, the median, the upper one, and the worst: members of x, so that inf stays inf."""
    if not len(x):
        return [None] * 4
    levels = (x.quantile(q, interpolation="higher").item() for q in (0.25, 0.5, 0.75, 1.0))
    return [float(f"{v:.4g}") if v < float("inf") else None for v in levels]


def compare(
    problems: Problems, updates: int, n: int = 2, seeds: Sequence[int | None] = (None,)
) -> dict[str, Any]:
    """Where each remedy ends, over all instances, and pairs of remedies compared."""
    ends = {
        name: Ends.of(problems, [descent(problems, name, updates, n, seed) for seed in seeds])
        for name in LIBRARY
    }
    return {
        "ends": {name: of.to_json() for name, of in ends.items()},
        "against": {f"{a} / {b}": ends[a].against(ends[b]) for a, b in PAIRS},
    }


def figure(families: Mapping[str, Any], path: Path) -> None:
    """Above, shares of the descents by where they end; below, updates until the optimum is near."""
    out = Figure(figsize=(13, 4.5), layout="constrained")
    axes = out.subplots(2, len(families), sharey=True, squeeze=False)
    for (shares, speed), (family, found) in zip(axes.T, families.items()):
        for y, name in enumerate(LIBRARY):
            _bar(shares, speed, y, found["ends"][name])
        shares.set(title=f"{family}\n({found['ends']['c = 1']['instances']} descents)", xlim=(0, 1))
        label = f"updates until KL(π ‖ π*) < {NEAR} nats\n(median, quartiles; ▸ never)"
        speed.set(xscale="log", xlim=(10, MOST), xlabel=label)
        for axis in (shares, speed):
            axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set(yticks=range(len(LIBRARY)), yticklabels=LIBRARY, ylim=(len(LIBRARY) - 0.5, -0.5))
    handles = [Patch(color=c) for c in OUTCOMES.values()]
    out.legend(handles, list(OUTCOMES), loc="outside lower center", ncols=3, frameon=False)
    out.savefig(path, dpi=110)


def _bar(shares: Any, speed: Any, y: int, ends: Mapping[str, Any]) -> None:
    left = 0.0
    parts = (ends["reached"], 1 - ends["reached"] - ends["fell"], ends["fell"])
    for share, color in zip(parts, OUTCOMES.values()):
        shares.barh(y, share, left=left, color=color)
        left += share
    low, middle, high = (np.inf if v is None else v for v in ends["near"][:3])
    speed.plot([low, min(high, MOST)], [y, y], color=harness.MUTED, linewidth=1.5)
    speed.plot(min(middle, MOST), y, "o" if middle < MOST else ">", color=harness.INK, markersize=5)


def tell(families: Mapping[str, Any]) -> list[str]:
    lines = []
    for family, found in families.items():
        lines += ["", f"{family}: fell, reached; updates until {NEAR} nats (quartiles, worst)"]
        for name, e in found["ends"].items():
            lines.append(f"{name:31} {e['fell']:4.0%} {e['reached']:5.1%} {e['near']}")
        lines += [f"{pair:31} {against}" for pair, against in found["against"].items()]
    return lines
