"""Where remedies of the trap end and how fast: shares and quartiles over random problems, and a figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from agro.proof.descent import Path as Descent
from reproductions import harness
from reproductions.trap.remedies import (
    EXACT,
    KINDS,
    LIBRARY,
    MIXED,
    Problems,
    by_library,
    by_weights,
    group_moments,
    over_groups,
    per_response,
)

NEAR = 1e-2  # nats: what is called reached
OUTCOMES = {
    "reached the optimum": harness.COLORS[0],
    "neither": harness.GRID,
    "ended below the reference's reward": harness.COLORS[1],
}
MOST = 2000  # updates at the right edge of the figure


@dataclass(frozen=True)
class Ends:
    """Of each instance [I]: where a descent ended and how fast it went; inf where it never got there."""

    kl: Tensor  # KL(π ‖ π*) at the end, nats
    gained: Tensor  # E r − E_ref r, in units of β
    halved: Tensor  # updates until the KL is below half of the first one
    near: Tensor  # and until it is below NEAR for good

    @classmethod
    def of(cls, problems: Problems, path: Descent) -> Ends:
        distance = problems.of_instance(path.distance).clamp(min=0)
        at = path.updates.double()

        def first_from(holds: Tensor) -> Tensor:
            """[K,I] -> [I] the update from which it holds at every later look."""
            later = holds.flip(0).cummin(0).values.flip(0)
            return torch.where(later, at[:, None], torch.inf).amin(0)

        anchor = problems.make().logp().detach().exp()
        more = ((path.policy.logp().detach().exp() - anchor) * problems.reward).sum(1)
        return cls(
            distance[-1],
            problems.of_instance(more),
            first_from(distance < distance[0] / 2),
            first_from(distance < NEAR),
        )

    @classmethod
    def joined(cls, parts: Sequence[Ends]) -> Ends:
        return cls(*(torch.cat([getattr(e, f.name) for e in parts]) for f in fields(cls)))

    def of_kind(self, kind: int) -> Ends:
        assert len(self.kl) % 3 == 0
        return Ends(*(getattr(self, f.name)[kind::3] for f in fields(self)))

    def to_json(self) -> dict[str, Any]:
        """Shares of the instances and quartiles over them; null is never."""
        return {
            "instances": len(self.kl),
            "fell": float((self.gained < -1e-6).double().mean()),
            "reached": float(self.near.isfinite().double().mean()),
            **{k: _quartiles(getattr(self, k)) for k in ("kl", "halved", "near")},
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


def measured(problems: Problems, paths: Mapping[str, Callable[[], Sequence[Descent]]]) -> dict[str, Any]:
    """Where each remedy ends, over all instances and by kind of rewards, and pairs of remedies compared."""
    ends = {name: Ends.joined([Ends.of(problems, path) for path in run()]) for name, run in paths.items()}
    pairs = (("adaptive", "c = 1"), ("adaptive", "c = 0"), ("c = 1", "c = 0"), (MIXED, "c = 0"))
    return {
        "ends": {
            name: {"all": e.to_json(), **{k: e.of_kind(i).to_json() for i, k in enumerate(KINDS)}}
            for name, e in ends.items()
        },
        "against": {f"{a} / {b}": ends[a].against(ends[b]) for a, b in pairs},
    }


def expectations(problems: Problems, updates: int, sizes: Sequence[int] = (2,)) -> dict[str, Any]:
    """All remedies on exact expectations; `sizes` of the groups, on which some expectations depend."""
    paths: dict[str, Callable[[], Sequence[Descent]]] = {}
    for name in LIBRARY:
        paths[name] = lambda name=name: [by_library(problems, name, updates)]
    for n in sizes[1:]:
        paths[f"adaptive, n = {n}"] = lambda n=n: [by_library(problems, "adaptive", updates, n)]
        for label, c in (("per response", per_response), ("group's half bound", group_moments)):
            weights = over_groups(n, problems.reward.shape[1], c)
            paths[f"{label}, n = {n}"] = lambda w=weights: [by_weights(problems, w, updates)]
    for name, remedy in EXACT.items():
        paths[name] = lambda remedy=remedy: [by_weights(problems, remedy(), updates)]
    return measured(problems, paths)


def samples(problems: Problems, updates: int, n: int, seeds: int) -> dict[str, Any]:
    """The library's remedies on groups of n that are drawn anew at every update, through its step."""

    def runs(name: str) -> Callable[[], Sequence[Descent]]:
        return lambda: [by_library(problems, name, updates, n, seed) for seed in range(seeds)]

    return measured(problems, {name: runs(name) for name in LIBRARY})


def figure(families: Mapping[str, Any], path: Path) -> None:
    """Above, shares of the descents by where they end; below, updates until the optimum is near."""
    out = Figure(figsize=(13, 7), layout="constrained")
    axes = out.subplots(2, len(families), sharey=True, squeeze=False)
    names = list(next(iter(families.values()))["ends"])
    for (shares, speed), (family, found) in zip(axes.T, families.items()):
        for y, name in enumerate(names):
            if name in found["ends"]:
                _bar(shares, speed, y, found["ends"][name]["all"])
        shares.set(title=f"{family}\n({found['ends']['c = 1']['all']['instances']} descents)", xlim=(0, 1))
        label = f"updates until KL(π ‖ π*) < {NEAR} nats\n(median, quartiles; ▸ never)"
        speed.set(xscale="log", xlim=(10, MOST), xlabel=label)
        for axis in (shares, speed):
            axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))
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
        lines += [
            "",
            f"{family}: fell, reached; KL at the end, updates to half of it, to {NEAR} (quartiles, worst)",
        ]
        for name, ends in found["ends"].items():
            e = ends["all"]
            lines.append(
                f"{name:31} {e['fell']:4.0%} {e['reached']:5.1%} {e['kl']} {e['halved']} {e['near']}"
            )
        lines += [f"{pair:31} {against}" for pair, against in found["against"].items()]
    return lines
