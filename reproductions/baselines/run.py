"""Baselines of weighted updates: where they end with noisy rewards, what they do to what a log's responses
share, and what stands for the group's mean where a prompt has one response.

    python reproductions/baselines/run.py [--recorded]

Writes result.json and README.md beside this file. It takes about three minutes on one free core.
With --recorded the page is made anew of what result.json has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agro.proof.enumerable import kl
from reproductions import harness
from reproductions.baselines import users
from reproductions.baselines.enumerated import (
    BASELINES,
    WEIGHTS,
    Outcomes,
    Problems,
    end,
    gradient_of_groups,
    gradient_of_rows,
    mean_by,
)
from reproductions.baselines.page import readme
from reproductions.baselines.shared import Log, mass_kept

HERE = Path(__file__).resolve().parent
SIZES, NOISES, SPREADS = (2, 3, 4), (0.0, 0.3, 0.5), (0.0, 0.25, 0.5, 1.0)
HELD = ((0.02, 0.03), (0.02, 0.3), (0.2, 0.03), (0.2, 0.3))  # β and Adam's rate
Found = dict[str, Any]


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


def measured(problems: Problems, update: Callable[[Tensor], Tensor], starts: list[Tensor]) -> Found:
    """KL(π ‖ π*) in nats where it ends, over problems and starts; those that didn't arrive are counted."""
    far, arrived = [], []
    for start in starts:
        logp, ok = end(start, update)
        far.append(kl(logp, problems.optimum).mean(1).clamp(min=0))
        arrived.append(ok)
    all_, ok = torch.cat(far), torch.cat(arrived)
    if not bool(ok.any()):
        return {"median": None, "worst": None, "arrived": 0, "of": len(ok)}
    return {
        "median": float(all_[ok].median()),
        "worst": float(all_[ok].max()),
        "arrived": int(ok.sum()),
        "of": len(ok),
    }


def noisy(count: int, sizes: tuple[int, ...]) -> list[Found]:
    """Each baseline with each size of noise, weight, group and kind of data."""
    reference, behavior, reward = drawn(count, 1, 4, seed=0)
    elsewhere = drawn(count, 1, 4, seed=5)[0]
    rows = []
    for data in ("off-policy", "on-policy"):
        mu = behavior if data == "off-policy" else None
        for noise in NOISES:
            problems = Problems(reference, mu, reward, noise=noise)
            starts = [reference, elsewhere] if not noise else [reference]
            for name in BASELINES:
                for weight, power in WEIGHTS.items():
                    for n in sizes:
                        update = gradient_of_groups(problems, name, power, n)
                        at = {"baseline": name, "data": data, "noise": noise, "weight": weight, "n": n}
                        rows.append(at | measured(problems, update, starts))
    return rows


def held(seeds: int, updates: int) -> list[Found]:
    """Each baseline with each weight, noise, β and rate: what is left of the logged responses' mass."""
    rows = []
    for noise in (0.0, 0.5):
        for weight in ("root", "reference"):
            for beta, lr in HELD:
                for name in BASELINES:
                    log = Log(seeds=seeds, noise=noise, beta=beta)
                    mass, right = mass_kept(name, WEIGHTS[weight], log, lr, updates)
                    rows.append(
                        {
                            "baseline": name,
                            "noise": noise,
                            "weight": weight,
                            "beta": beta,
                            "lr": lr,
                            "mass": float(mass.mean()),
                            "right": float(right.mean()),
                            "error": float(right.std() / len(right) ** 0.5),
                        }
                    )
    return rows


def single(count: int) -> list[Found]:
    """What stands for the mean of a group of one, over how far apart the V* of two prompts are."""
    reference, behavior, reward = drawn(count, 2, 3, seed=9)
    rows = []
    for data in ("reference", "other"):
        mu = reference if data == "reference" else behavior
        for spread in SPREADS:
            problems = Problems(reference, mu, reward)
            shift = spread - problems.value.diff(dim=1)[..., None]
            shifted = torch.cat([reward[:, :1], reward[:, 1:] + shift], 1)
            problems = replace(problems, reward=shifted)
            for weight, power in WEIGHTS.items():
                for name, update in singles(problems, power, spread).items():
                    at = {"stands": name, "data": data, "spread": spread, "weight": weight}
                    rows.append(at | measured(problems, update, [reference]))
    return rows


def singles(problems: Problems, power: float, spread: float) -> dict[str, Callable[[Tensor], Tensor]]:
    """By name, the expected updates of groups of one response."""
    P, X, K = problems.reward.shape

    def learned(all_: Outcomes) -> Tensor:
        return mean_by(all_.chance.view(P, X, K), all_.R.view(P, X, K))

    def pooled(all_: Outcomes) -> Tensor:
        return mean_by(all_.chance, all_.R)[:, None]

    def pooled_optimal(all_: Outcomes) -> Tensor:
        return mean_by(all_.chance * all_.weight * all_.norm, all_.R)[:, None]

    def pooled_balanced(all_: Outcomes) -> Tensor:
        return torch.minimum(pooled_optimal(all_), mean_by(all_.chance * all_.weight, all_.R)[:, None])

    def stored(all_: Outcomes) -> Tensor:
        return problems.value

    def biased(all_: Outcomes) -> Tensor:
        return problems.value + torch.tensor([spread / 2, -spread / 2], dtype=torch.float64)

    bases = {
        "a value that is learned": learned,
        "V* itself": stored,
        "V* ∓ half the spread": biased,
        "mean of the batch": pooled,
        "batch, optimal": pooled_optimal,
        "batch, balanced": pooled_balanced,
    }
    found = {name: gradient_of_rows(problems, power, base) for name, base in bases.items()}
    return found | {"mean of four rows": gradient_of_groups(problems, "mean", power, 4)}


def of_users(count: int) -> list[Found]:
    """What a batch of single responses is compared with, over how much more lenient one of two users is."""
    made = drawn(count, users.PROMPTS, users.RESPONSES, seed=13)
    rows = []
    for at in users.settings():
        problems = users.tables(
            made,
            alike=at["users"] == "alike",
            of_reference=at["data"] == "reference",
            lenience=at["lenience"],
            spread=at["spread"],
        )
        for name, update in users.updates(problems).items():
            rows.append(at | {"stands": name} | measured(problems, update, [problems.reference]))
    return rows


def main() -> None:
    recorded = "write the page anew from what is recorded"
    args = harness.parser(__doc__, HERE, small=harness.SMALL, recorded=recorded).parse_args()
    torch.set_num_threads(1)
    sizes = (2, 3) if args.small else SIZES
    count, seeds, updates = (2, 4, 40) if args.small else (12, 24, 300)
    if args.recorded:
        found = json.loads((HERE / "result.json").read_text())
    else:
        found = {"noisy": noisy(count, sizes), "held": held(seeds, updates), "single": single(count)}
        found["users"] = of_users(count)
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "result.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.out / "README.md").write_text(readme(found, count, seeds, updates))


if __name__ == "__main__":
    main()
