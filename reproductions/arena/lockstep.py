"""Runs in lockstep: an update of all of them, then the next one.

Objectives, their needs and their gradients are the library's own (`agro.objectives`). What is around them is
the arena's: no store, no checkpoints, no metrics, and the models of all runs in one pass (`stack`). So a run
takes a fifth of the time of `agro train`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from agro import objectives
from agro.config import TrainConfig
from agro.errors import Refused
from agro.models.logprobs import Outputs, token_streams
from agro.models.policy import VALUES, ValueHead
from agro.models.tiles import OF_REFERENCE, Head
from agro.objectives import NotFinite
from agro.objectives.core import blank, wanted_streams
from agro.objectives.evaluation import differentiate
from agro.objectives.needs import OLD_LOGP, REF_LOGP, STORED_QUANTILE, STORED_VALUE
from agro.types import Batch
from reproductions.arena.kinds import Row
from reproductions.arena.world import Asked, World, joined, order, parts_of

SETTINGS = TrainConfig()  # of the optimizer: the library's defaults


class Rows(NamedTuple):
    """The samples of one run's update."""

    names: list[str]  # [B] of the prompts
    roles: list[str]  # [B]
    tokens: Tensor  # [B,T]
    mask: Tensor  # [B,N]
    behavior: Tensor  # [B,N]
    ref: Tensor  # [B,N] NaN where it isn't needed
    reward: Tensor  # [B]
    age: Tensor  # [B] NaN: unknown
    pairs: list[tuple[int, int]]

    def part(self, at: Sequence[int]) -> Rows:
        """These rows, without pairs."""
        return Rows(*parts_of(self[:-1], at), pairs=[])

    def followed_by(self, other: Rows) -> Rows:
        """Both, where neither has pairs."""
        return Rows(*joined(self, other))


@dataclass
class Fresh:
    """Responses to the prompts of each run's update."""

    numbers: list[list[int]]  # [R,B] of the prompts
    tokens: Tensor  # [R,B,T]
    mask: Tensor  # [R,B,N]
    behavior: Tensor
    age: int


class Racer:
    """One run: its objective, its order of the data, its optimizer."""

    def __init__(self, row: Row, world: World, weights: Tensor) -> None:
        """`weights` [P]: the run's, which are moved in place."""
        self.row, self.world, self.kind = row, world, row.data
        self.name, self.entry = row.base, objectives.get(row.base)
        self.options = self.entry.resolve(self.name, row.options)
        self.needs = self.entry.needs(self.options)
        self.streams = wanted_streams(self.needs)
        self.weights = nn.Parameter(weights)
        groups = [{"params": [self.weights], "of_lr": 1.0}]
        self.value: ValueHead | None = None
        if VALUES & set(self.streams):
            self.value = ValueHead(self.world.stack.width)
            groups.append({"params": list(self.value.parameters()), "of_lr": SETTINGS.value_lr / row.rate})
        self.adam = torch.optim.AdamW(
            groups, betas=SETTINGS.adam_betas, eps=SETTINGS.adam_eps, weight_decay=0.0, fused=True
        )
        stored = round(self.kind.groups * self.kind.replay)
        self.asked = order(range(len(world.fresh.names)), self.kind.groups - stored, row.seed, "prompts")
        if self.kind.log:
            usable = world.logs[self.kind.log].groups(self.needs)
            self.logged = order(usable, stored, row.seed, "log")
        self.updates = self.skipped = 0
        self.stopped, self.seconds = "", 0.0

    def rows(self, fresh: Fresh | None, r: int) -> Rows:
        """The fresh ones, of which this run has number `r`, and those of the log."""
        if fresh is None:
            return self._logged()
        first = self._fresh(fresh, r)
        return first.followed_by(self._logged()) if self.kind.log else first

    def _fresh(self, fresh: Fresh, r: int) -> Rows:
        at, tokens, mask = fresh.numbers[r], fresh.tokens[r], fresh.mask[r]
        world, count = self.world, len(at)
        ref = torch.full(mask.shape, torch.nan)
        if REF_LOGP in self.needs:
            ref = world.reference(tokens, mask)
        right = (tokens[:, world.stack.prompt :] == world.fresh.answers[at]).all(1)
        names = [world.fresh.names[i] for i in at]
        age = torch.full((count,), float(fresh.age))
        return Rows(names, ["policy"] * count, tokens, mask, fresh.behavior[r], ref, right.double(), age, [])

    def _logged(self) -> Rows:
        log = self.world.logs[self.kind.log]
        at = [i for group in next(self.logged) for i in group]
        place = {i: row for row, i in enumerate(at)}
        pairs = []
        if "pairs" in self.needs:
            pairs = [(place[a], place[b]) for a, b in log.pairs if a in place and b in place]
        age = torch.full((len(at),), torch.nan)
        tensors = (log.tokens[at], log.mask[at], log.behavior[at], log.ref[at], log.reward[at].double(), age)
        return Rows([log.names[i] for i in at], ["log"] * len(at), *tensors, pairs)

    def batch(self, rows: Rows, logp: Tensor) -> Batch:
        """`logp` [B,N]: of the weights as they are. The first column is for the prompt, as everywhere."""
        extra = {"hinted": torch.zeros(len(rows.names), dtype=torch.float64)}
        if STORED_VALUE in self.needs:
            beta = self.options.get("value_beta") or self.options["beta"]
            values = [self.world.values.value(name, beta) for name in rows.names]
            extra["stored_value"] = torch.tensor(values, dtype=torch.float64)
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
            age=rows.age,
            role=rows.roles,
            pairs=rows.pairs or None,
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
        except Refused as error:
            self.stopped = str(error)
            return None
        parts = [(found.grads[name] * live[name].double()).sum() for name in self.streams]
        return torch.stack(parts).sum()

    def _others(self, rows: Rows, batch: Batch, hidden: Tensor, embedding: Tensor) -> dict[str, Tensor]:
        """The streams besides log-probs, in the library's own way."""
        read = _hidden(hidden)
        want = set(self.streams) - VALUES
        head = Head(embedding, None)
        tokens = rows.tokens[:, self.world.stack.prompt - 1 :]
        other = None
        if OF_REFERENCE & want:
            stack = self.world.stack
            with torch.no_grad():
                other_hidden = stack.logits(self.world.start, rows.tokens[None])[1][0]
                other_embedding = stack.embedding(self.world.start)[0]
            other = Outputs(_hidden(other_hidden), Head(other_embedding, None))
        out = token_streams(Outputs(read, head), tokens, batch.mask, want=want, reference=other)
        out.pop("logp")
        if self.value is not None:
            out |= {s: v for s, v in self.value.streams(read, batch.mask).items() if s in self.streams}
        return {s: v.where(batch.mask, 0.0) if v.dim() == 2 else v for s, v in out.items()}

    def move(self, grad: Tensor, lr: float) -> None:
        """One step along `grad` [P], clipped; none where it isn't finite."""
        self.weights.grad = grad
        for group in self.adam.param_groups:
            group["lr"] = lr * group["of_lr"]
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
        self.updates += 1


def _after_prompt(values: Tensor, first: float | bool) -> Tensor:
    """[B,N] -> [B,1+N]"""
    return nn.functional.pad(values, (1, 0), value=first)


def _hidden(hidden: Tensor) -> Tensor:
    """[B,N,H], which predict the tokens of responses -> [B,1+N,H], of which the last predicts nothing."""
    return nn.functional.pad(hidden, (0, 0, 0, 1))


Watch = Callable[[int, Tensor], object]  # the number of an update, and the weights [R,P] before it


def train(
    rows: Sequence[Row],
    world: World,
    updates: int,
    kind_of_racer: type[Racer] = Racer,
    watch: Watch | None = None,
) -> tuple[list[Racer], Tensor]:
    """Runs on one kind of data, at its end, and their weights [R,P]."""
    data = rows[0].data
    weights = world.start.repeat(len(rows), 1)
    racers = [kind_of_racer(row, world, of_run) for row, of_run in zip(rows, weights, strict=True)]
    last_use = {data.version(update): update for update in range(updates)}
    earlier: dict[int, Tensor] = {}
    for update in range(updates):
        if watch is not None:
            watch(update, weights)
        if last_use.get(update, update) > update:
            earlier[update] = weights.clone()
        version = data.version(update)
        fresh = _sample(racers, world, earlier.get(version, weights), update, update - version)
        if last_use[version] == update:
            earlier.pop(version, None)
        _update(racers, world, weights, fresh, data.of_rate(update, updates))
    return racers, weights


def _sample(racers: Sequence[Racer], world: World, weights: Tensor, update: int, age: int) -> Fresh | None:
    """A run's responses depend on its seed, the number of the update, and the weights."""
    if racers[0].kind.replay == 1:
        return None
    n = racers[0].kind.n
    numbers = [[i for i in next(racer.asked) for _ in range(n)] for racer in racers]
    prompts = world.fresh.tokens[torch.tensor(numbers)]
    shape = (len(numbers[0]), world.stack.length)
    uniform = [np.random.default_rng([racer.row.seed, update]).random(shape) for racer in racers]
    drawn = world.stack.draw(weights, prompts, torch.tensor(np.stack(uniform)))
    return Fresh(numbers, torch.cat([prompts, drawn.tokens], 2), drawn.mask, drawn.logp, age)


def _update(
    racers: Sequence[Racer], world: World, weights: Tensor, fresh: Fresh | None, share: float
) -> None:
    """One step of each run; `share` of its learning rate."""
    live = [r for r, racer in enumerate(racers) if not racer.stopped]
    if not live:
        return
    rows = [racers[r].rows(fresh, r) for r in live]
    leaf = weights[live].requires_grad_()
    tokens = nn.utils.rnn.pad_sequence([of_run.tokens for of_run in rows], batch_first=True)
    logits, hidden = world.stack.logits(leaf, tokens)
    logp, embedding = world.logp(logits, tokens), world.stack.embedding(leaf)
    totals: list[Tensor | None] = []
    for i, r in enumerate(live):
        began, count = time.process_time(), len(rows[i].names)
        totals.append(racers[r].gradient(rows[i], logp[i, :count], hidden[i, :count], embedding[i]))
        racers[r].seconds += time.process_time() - began
    known = [total for total in totals if total is not None]
    if known:
        torch.stack(known).sum().backward()
        assert leaf.grad is not None
        for total, r, grad in zip(totals, live, leaf.grad, strict=True):
            if total is not None:
                racers[r].move(grad, racers[r].row.rate * share)


def measure(world: World, weights: Tensor) -> list[dict[str, Any]]:
    """Accuracy on the prompts for validation and on those of the test, and KL(π ‖ π_ref) on the latter.

    `weights` [R,P]. One response each, at temperature 1, with the same random numbers for every policy.
    """
    asked: Asked = world.held_out
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
