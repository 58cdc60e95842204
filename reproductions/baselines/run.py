"""Baselines of weighted updates: where they end with noisy rewards, and what stands for the group's mean
where a prompt has one response.

    python reproductions/baselines/run.py [--recorded] [--out FOLDER] [--small]

Every group of a small table is enumerated: P problems at once, X prompts of K responses of one token. An
outcome is a response of a prompt, with a noise of its reward. The update of a step is
Σ_i w_i (R_i − b) ∇log π(y_i), R = r − β log π/π_ref; w and b are constants.

Writes result.json into --out, and where that is this folder the tables of README.md. It takes about two
minutes on one free core. With --recorded the tables are made anew of what result.json has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro.proof.enumerable import kl, multisets  # noqa: E402
from reproductions import harness  # noqa: E402

SIZES, NOISES, SPREADS = (2, 3, 4), (0.0, 0.5), (0.0, 1.0)
Found = dict[str, Any]
Update = Callable[[Tensor], Tensor]
POWER = 0.5  # of the weight min(1, (π/π_ref)^POWER)
DESCENT, NEWTON, NEAR = 400, 60, 1e-11  # updates of Adam, then of Newton; the residual that counts as 0


@dataclass(frozen=True)
class Problems:
    """What P tables of X prompts and K responses are trained on.

    `behavior` None: samples of the policy itself.
    """

    reference: Tensor  # [P,X,K] log-probs
    behavior: Tensor | None  # [P,X,K] log-probs
    reward: Tensor  # [P,X,K]
    beta: float = 0.25
    noise: float = 0.0  # r ± noise, each with probability one half

    @property
    def optimum(self) -> Tensor:
        """[P,X,K] log π*."""
        return (self.reference + self.reward / self.beta).log_softmax(-1)

    @property
    def value(self) -> Tensor:
        """[P,X] V* = β log E_{π_ref} exp(r/β)."""
        return self.beta * (self.reference + self.reward / self.beta).logsumexp(-1)


@dataclass(frozen=True)
class Outcomes:
    """All outcomes at a policy, O = X·K, times two where rewards are noisy."""

    chance: Tensor  # [P,O]
    weight: Tensor  # [P,O]
    norm: Tensor  # [P,O] (1 − π)²
    R: Tensor  # [P,O]


Baseline = Callable[[Tensor, Tensor, Tensor], Tensor]  # w, w·norm, R [P,G,n] -> [P,G]


def outcomes(problems: Problems, logp: Tensor) -> Outcomes:
    ratio = logp - problems.reference
    mu = logp if problems.behavior is None else problems.behavior
    R = (problems.reward - problems.beta * ratio).flatten(1)
    parts = [mu.exp().flatten(1) / logp.shape[1], (POWER * ratio).clamp(max=0).exp().flatten(1)]
    parts.append((1 - logp.exp()).square().flatten(1))
    if not problems.noise:
        return Outcomes(*parts, R)
    chance, weight, norm = (torch.cat([part, part], 1) for part in parts)
    return Outcomes(chance / 2, weight, norm, torch.cat([R + problems.noise, R - problems.noise], 1))


def mean_by(share: Tensor, R: Tensor) -> Tensor:
    return (share * R).sum(-1) / share.sum(-1)


BASELINES: dict[str, Baseline] = {
    "mean": lambda w, wg, R: R.mean(-1),
    "weighted": lambda w, wg, R: mean_by(w, R),
    "optimal": lambda w, wg, R: mean_by(wg, R),
    "lower": lambda w, wg, R: torch.minimum(R.mean(-1), mean_by(w, R)),
    "balanced": lambda w, wg, R: torch.minimum(mean_by(wg, R), mean_by(w, R)),
}


def gradient_of_groups(problems: Problems, name: str, n: int) -> Callable[[Tensor], Tensor]:
    """The expected update of logits [P,X,K] over all groups of n outcomes, as a function of them."""
    P, X, K = problems.reward.shape
    copies = 2 if problems.noise else 1
    groups, orders = multisets(X * K * copies, n)

    def update(logits: Tensor) -> Tensor:
        logp = logits.log_softmax(-1)
        all_ = outcomes(problems, logp)
        chance = orders * all_.chance[:, groups].prod(-1)
        w, R = all_.weight[:, groups], all_.R[:, groups]
        b = BASELINES[name](w, w * all_.norm[:, groups], R)
        force = chance[..., None] * w * (R - b[..., None])
        each = torch.zeros(P, X * K * copies, dtype=torch.float64)
        each.index_add_(1, groups.flatten(), force.flatten(1))
        return projected(each.view(P, copies, X, K).sum(1), logp)

    return update


def gradient_of_rows(
    problems: Problems, baseline: Callable[[Outcomes], Tensor]
) -> Callable[[Tensor], Tensor]:
    """The same where each row alone is compared with b [P,X] or [P,1], as of a batch without end."""
    P, X, K = problems.reward.shape

    def update(logits: Tensor) -> Tensor:
        logp = logits.log_softmax(-1)
        all_ = outcomes(problems, logp)
        b = baseline(all_).expand(P, X)[..., None]
        force = (all_.chance * all_.weight).view(P, X, K) * (all_.R.view(P, X, K) - b)
        return projected(force, logp)

    return update


def projected(force: Tensor, logp: Tensor) -> Tensor:
    """[P,X,K] Σ force ∇log π in logits."""
    return force - logp.exp() * force.sum(-1, keepdim=True)


def end(start: Tensor, update: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Log-probs where Adam and then Newton's method end, and [P] whether each problem arrived."""
    logits, first, second = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step in range(1, DESCENT + 1):
        g = update(logits)
        first, second = 0.9 * first + 0.1 * g, 0.95 * second + 0.05 * g.square()
        rate = 0.1 * 0.05 ** (step / DESCENT)
        logits = logits + rate * (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-12)
    for _ in range(NEWTON):
        g = update(logits)
        size = g.flatten(1).norm(dim=1)
        if bool((size < NEAR).all()):
            break
        move = -(torch.linalg.pinv(jacobian(update, logits)) @ g.flatten(1)[..., None])[..., 0]
        logits = line_search(update, logits, move.view_as(logits).clamp(-1, 1), size)
    g = update(logits)
    return logits.log_softmax(-1), g.flatten(1).norm(dim=1) < 1e-8


def jacobian(update: Callable[[Tensor], Tensor], logits: Tensor, h: float = 1e-6) -> Tensor:
    """[P,D,D] by central differences."""
    flat = logits.flatten(1)
    columns = []
    for d in range(flat.shape[1]):
        ahead, behind = flat.clone(), flat.clone()
        ahead[:, d] += h
        behind[:, d] -= h
        gap = update(ahead.view_as(logits)) - update(behind.view_as(logits))
        columns.append(gap.flatten(1) / (2 * h))
    return torch.stack(columns, -1)


def line_search(update: Callable[[Tensor], Tensor], logits: Tensor, move: Tensor, size: Tensor) -> Tensor:
    """Half the move, for each problem, until the residual is smaller."""
    share = torch.ones_like(size)
    for _ in range(12):
        tried = logits + share[:, None, None] * move
        worse = update(tried).flatten(1).norm(dim=1) > size
        if not bool(worse.any()):
            break
        share = torch.where(worse, share / 2, share)
    return logits + share[:, None, None] * move


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
