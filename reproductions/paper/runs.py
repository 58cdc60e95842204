"""Runs in lockstep: an update of all of them, then the next one; measured on the way, and made once.

Objectives, their needs and their gradients are the library's own (`agro.objectives`). What is around them is
not: no store, no checkpoints, no metrics, and the models of all runs in one pass (`world`). So a run takes a
fifth of the time of `agro train`.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agro import objectives
from agro.config import TrainConfig
from agro.models.logprobs import OF_REFERENCE, Head, Outputs, token_streams
from agro.models.policy import VALUES, ValueHead
from agro.objectives import NotFinite
from agro.objectives.core import blank, wanted_streams
from agro.objectives.evaluation import differentiate
from agro.objectives.needs import OLD_LOGP, REF_LOGP, STORED_QUANTILE
from agro.types import Batch
from reproductions import harness
from reproductions.paper import plans
from reproductions.paper.plans import METHODS, PLANS, STORED, Plan
from reproductions.paper.world import Rows, World, order

Run = dict[str, Any]
SETTINGS = TrainConfig()  # of the optimizer: the library's defaults
TOGETHER = 12  # runs in lockstep


@dataclass(frozen=True)
class Trial:
    """One run: `objective` is the name of a method, `kind` that of a plan."""

    objective: str
    kind: str
    rate: float
    beta: float | None = None  # None: the objective's default, or it has none
    seed: int = 0

    @property
    def file(self) -> str:
        words = (self.objective, self.kind, f"lr={self.rate:g}", f"beta={self.beta}", f"seed={self.seed}")
        return "_".join(words).replace(" ", "-").replace("'", "").replace("/", "-") + ".json"

    @property
    def data(self) -> Plan:
        return PLANS[self.kind]


@dataclass
class Fresh:
    """Responses to the prompts of each run's update."""

    numbers: list[list[int]]  # [R,B] of the prompts
    tokens: Tensor  # [R,B,T]
    mask: Tensor  # [R,B,N]
    behavior: Tensor
    staleness: int


class Racer:
    """One run: its objective, its order of the data, its optimizer, and its own earlier groups."""

    def __init__(self, trial: Trial, world: World, weights: Tensor) -> None:
        """`weights` [P]: the run's, which are moved in place."""
        self.trial, self.world, self.plan = trial, world, trial.data
        method = METHODS[trial.objective]
        self.name, self.entry = method.objective, objectives.get(method.objective)
        self.options = self.entry.resolve(self.name, method.options_for(self.plan.n, trial.beta))
        self.needs = self.entry.needs(self.options)
        self.streams = wanted_streams(self.needs)
        self.weights = nn.Parameter(weights)
        groups = [{"params": [self.weights], "of_lr": 1.0}]
        self.value: ValueHead | None = None
        if VALUES & set(self.streams):
            self.value = ValueHead(world.stack.width)
            groups.append({"params": list(self.value.parameters()), "of_lr": SETTINGS.value_lr / trial.rate})
        self.adam = torch.optim.AdamW(
            groups, betas=SETTINGS.adam_betas, eps=SETTINGS.adam_eps, weight_decay=0.0, fused=True
        )
        stored = round(self.plan.groups * self.plan.replay)
        self.asked = order(range(len(world.fresh.names)), self.plan.groups - stored, trial.seed, "prompts")
        if self.plan.log:
            usable = world.logs[self.plan.log].groups(self.needs)
            self.logged = order(usable, stored, trial.seed, "log")
        self.replayed = 0 if self.plan.log else stored
        self.own: deque[Rows] = deque(maxlen=STORED)
        self.rewards: list[float] = []  # the mean of each update's fresh responses
        self.skipped = 0

    def rows(self, fresh: Fresh | None, r: int) -> Rows:
        """Those of the log, or the fresh ones, of which this run has number `r`, and its own earlier ones."""
        if fresh is None:
            return self.world.logs[self.plan.log].part([i for group in next(self.logged) for i in group])
        found = self._fresh(fresh, r)
        self.rewards.append(float(found.reward.mean()))
        if self.replayed:
            drawn, n = self._draw(), self.plan.n
            self.own.extend(found.part(range(i, i + n)) for i in range(0, len(found.names), n))
            for group in drawn:
                found = found.followed_by(group)
        return found

    def _fresh(self, fresh: Fresh, r: int) -> Rows:
        at, tokens, mask = fresh.numbers[r], fresh.tokens[r], fresh.mask[r]
        world, count = self.world, len(at)
        ref = torch.full(mask.shape, torch.nan)
        if REF_LOGP in self.needs:
            ref = world.reference(tokens, mask)
        right = (tokens[:, world.stack.prompt :] == world.fresh.answers[at]).all(1)
        names = [world.fresh.names[i] for i in at]
        staleness = torch.full((count,), float(fresh.staleness))
        return Rows(
            names, ["policy"] * count, tokens, mask, fresh.behavior[r], ref, right.double(), staleness
        )

    def _draw(self) -> list[Rows]:
        """Earlier groups, any of them alike, an update older now; none before the first update."""
        self.own = deque((group._replace(staleness=group.staleness + 1) for group in self.own), maxlen=STORED)
        rng = random.Random(f"{self.trial.seed}/{len(self.rewards)}/own")
        return rng.sample(list(self.own), min(self.replayed, len(self.own)))

    def batch(self, rows: Rows, logp: Tensor) -> Batch:
        """`logp` [B,N]: of the weights as they are. The first column is for the prompt, as everywhere."""
        extra = {}
        if STORED_QUANTILE in self.needs:
            of_each = zip(rows.names, rows.reward.tolist(), strict=True)
            quantiles = [self.world.values.quantile(name, reward) for name, reward in of_each]
            extra["stored_quantile"] = torch.tensor(quantiles, dtype=torch.float64)
        return Batch.of(
            mask=_after_prompt(rows.mask, False),
            reward=rows.reward,
            group=rows.names,
            behavior_logp=_after_prompt(rows.behavior.where(rows.mask, torch.nan), torch.nan),
            ref_logp=_after_prompt(rows.ref.double(), 0.0) if REF_LOGP in self.needs else None,
            old_logp=_after_prompt(logp.double(), 0.0) if OLD_LOGP in self.needs else None,
            staleness=rows.staleness,
            role=rows.roles,
            extra=extra,
        )

    def gradient(self, rows: Rows, logp: Tensor, hidden: Tensor, embedding: Tensor) -> Tensor | None:
        """A number whose gradient is the objective's; None where the update is skipped.

        Args:
            logp: [B,N]
            hidden: [B,N,H]
            embedding: [V,H]
        """
        batch = self.batch(rows, logp.detach())
        live = {"logp": _after_prompt(logp.where(rows.mask, 0.0), 0.0)}
        if len(self.streams) > 1:
            live |= self._others(rows, batch, hidden, embedding)
        seen = {name: blank(batch, name) + stream.detach() for name, stream in live.items()}
        try:
            found = differentiate(self.name, self.entry, seen, batch, self.options)
        except NotFinite:
            self.skipped += 1
            return None
        parts = [(found.grads[name] * live[name].double()).sum() for name in self.streams]
        return torch.stack(parts).sum()

    def _others(self, rows: Rows, batch: Batch, hidden: Tensor, embedding: Tensor) -> dict[str, Tensor]:
        """The streams besides log-probs, in the library's own way."""
        read = _hidden(hidden)
        want = set(self.streams) - VALUES
        tokens = rows.tokens[:, self.world.stack.prompt - 1 :]
        other = None
        if OF_REFERENCE & want:
            stack = self.world.stack
            with torch.no_grad():
                other_hidden = stack.logits(self.world.start, rows.tokens[None])[1][0]
                other_embedding = stack.embedding(self.world.start)[0]
            other = Outputs(_hidden(other_hidden), Head(other_embedding, None))
        out = token_streams(
            Outputs(read, Head(embedding, None)), tokens, batch.mask, want=want, reference=other
        )
        out.pop("logp")
        if self.value is not None:
            out |= {s: v for s, v in self.value.streams(read, batch.mask).items() if s in self.streams}
        return {s: v.where(batch.mask, 0.0) if v.dim() == 2 else v for s, v in out.items()}

    def move(self, grad: Tensor) -> None:
        """One step along `grad` [P], clipped; none where it isn't finite."""
        self.weights.grad = grad
        for group in self.adam.param_groups:
            group["lr"] = self.trial.rate * group["of_lr"]
            grads = [weights.grad for weights in group["params"] if weights.grad is not None]
            norm = torch.cat([grad.flatten() for grad in grads]).norm().item() if grads else 0.0
            if not math.isfinite(norm):
                self.skipped += 1
                return
            for grad in grads:
                grad.mul_(min(1.0, SETTINGS.clip / (norm + 1e-6)))
        self.adam.step()
        if self.value is not None:
            self.value.zero_grad()


def _after_prompt(values: Tensor, first: float | bool) -> Tensor:
    """[B,N] -> [B,1+N]"""
    return nn.functional.pad(values, (1, 0), value=first)


def _hidden(hidden: Tensor) -> Tensor:
    """[B,N,H], which predict the tokens of responses -> [B,1+N,H], of which the last predicts nothing."""
    return nn.functional.pad(hidden, (0, 0, 0, 1))


Watch = Callable[[int, Tensor], object]  # the number of an update, and the weights [R,P] before it


def train(
    trials: Sequence[Trial], world: World, updates: int, watch: Watch = lambda update, weights: None
) -> tuple[list[Racer], Tensor]:
    """Runs on one plan, at its end, and their weights [R,P]."""
    plan = trials[0].data
    weights = world.start.repeat(len(trials), 1)
    racers = [Racer(trial, world, of_run) for trial, of_run in zip(trials, weights, strict=True)]
    sampler = weights
    for update in range(updates):
        watch(update, weights)
        staleness = update % plan.sync_every
        if staleness == 0:
            sampler = weights.clone()
        fresh = None if plan.log else _sample(racers, world, sampler, update, staleness)
        _update(racers, world, weights, fresh)
    return racers, weights


def _sample(racers: Sequence[Racer], world: World, weights: Tensor, update: int, staleness: int) -> Fresh:
    """A run's responses depend on its seed, the number of the update, and the weights."""
    n = racers[0].plan.n
    numbers = [[i for i in next(racer.asked) for _ in range(n)] for racer in racers]
    prompts = world.fresh.tokens[torch.tensor(numbers)]
    shape = (len(numbers[0]), world.stack.length)
    uniform = [np.random.default_rng([racer.trial.seed, update]).random(shape) for racer in racers]
    drawn = world.stack.draw(weights, prompts, torch.tensor(np.stack(uniform)))
    return Fresh(numbers, torch.cat([prompts, drawn.tokens], 2), drawn.mask, drawn.logp, staleness)


def _update(racers: Sequence[Racer], world: World, weights: Tensor, fresh: Fresh | None) -> None:
    """One step of each run."""
    rows = [racer.rows(fresh, r) for r, racer in enumerate(racers)]
    leaf = weights.clone().requires_grad_()
    tokens = nn.utils.rnn.pad_sequence([of_run.tokens for of_run in rows], batch_first=True)
    logits, hidden = world.stack.logits(leaf, tokens)
    logp, embedding = world.logp(logits, tokens), world.stack.embedding(leaf)
    totals = []
    for i, racer in enumerate(racers):
        count = len(rows[i].names)
        totals.append(racer.gradient(rows[i], logp[i, :count], hidden[i, :count], embedding[i]))
    known = [total for total in totals if total is not None]
    if known:
        torch.stack(known).sum().backward()
        assert leaf.grad is not None
        for total, racer, grad in zip(totals, racers, leaf.grad, strict=True):
            if total is not None:
                racer.move(grad)


def measure(world: World, weights: Tensor) -> list[dict[str, float]]:
    """Accuracy on the prompts for validation and on those of the test, and KL(π ‖ π_ref) on the latter.

    `weights` [R,P]. One response each, at temperature 1, with the same random numbers for every policy.
    """
    asked = world.held_out
    shape = (1, len(asked.names), world.stack.length)
    uniform = torch.tensor(np.random.default_rng(0).random(shape))
    test = slice(world.size.validation, None)
    found = []
    for of_run in weights:
        drawn = world.stack.draw(of_run[None], asked.tokens[None], uniform)
        tokens, mask = torch.cat([asked.tokens, drawn.tokens[0]], 1), drawn.mask[0]
        ref = world.reference(tokens, mask)
        right = (drawn.tokens[0] == asked.answers).all(1).double()
        ratio = (drawn.logp[0].double() - ref.double()).sum(1)[test]
        found.append(
            {
                "validation": float(right[: world.size.validation].mean()),
                "accuracy": float(right[test].mean()),
                "kl": float(ratio.mean()),
                "kl_se": float(ratio.std() / len(ratio) ** 0.5),
            }
        )
    return found


def complete(trials: Iterable[Trial], out: Path, *, small: bool) -> list[Run]:
    """What is measured of trials on any plan, which are made, those on one plan in lockstep, unless that was
    done before."""
    found: list[Run] = []
    of_plan: dict[str, list[Trial]] = {}
    for trial in trials:
        of_plan.setdefault(trial.kind, []).append(trial)
    for kind, same in of_plan.items():
        for i in range(0, len(same), TOGETHER):
            part = same[i : i + TOGETHER]
            files = [out / "runs" / trial.file for trial in part]
            new = [trial for trial, file in zip(part, files, strict=True) if not file.exists()]
            made = dict(zip(new, _play(new, out, small) if new else [], strict=True))
            found += [harness.once(f, partial(made.get, t)) for f, t in zip(files, part, strict=True)]
            print(f"{kind}: {min(i + TOGETHER, len(same))} of {len(same)}", file=sys.stderr)
    return found


def _play(trials: Sequence[Trial], out: Path, small: bool) -> list[Run]:
    plan = trials[0].data
    world = plans.load(out, plan.start, small)
    updates, every = (4, 2) if small else (plan.updates, plan.every)
    began = time.process_time()
    points: list[tuple[int, list[dict[str, float]]]] = []

    def watch(update: int, weights: Tensor) -> None:
        if update % every == 0:
            points.append((update, measure(world, weights)))

    racers, weights = train(trials, world, updates, watch)
    watch(updates, weights)
    spent = (time.process_time() - began) / len(trials)
    return [
        {
            **asdict(trial),
            "curve": [{"update": update, **of_all[i]} for update, of_all in points],
            "rewards": [  # means of `every` updates
                statistics.mean(racer.rewards[first : first + every])
                for first in range(0, len(racer.rewards) - every + 1, every)
            ],
            "generated": updates * plan.fresh_an_update,
            "skipped": racer.skipped,
            "cpu_seconds": spent,
            "validation": points[-1][1][i]["validation"],
        }
        for i, (trial, racer) in enumerate(zip(trials, racers, strict=True))
    ]
