"""The only backward: an objective's gradient, exact whatever the micro-batch.

An objective depends on the parameters through its streams alone, so its gradient is Σ g · ∂stream/∂θ with
g = ∂loss/∂stream. Whole-step streams without gradient give g; micro-batches back-propagate Σ g · stream. Where a
micro-batch holds all that a row's g depends on (the row, or its whole group), its own forward gives g and the first
pass falls away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agro.objectives import Evaluation, differentiate, get
from agro.objectives.core import blank, wanted_streams
from agro.policy import Policy
from agro.store import Pair
from agro.train.micro import MicroBatch
from agro.train.offload import activations
from agro.types import Batch, Sample


@dataclass(frozen=True)
class Step:
    """What one backward leaves besides the parameters' `.grad`."""

    evaluation: Evaluation
    streams: dict[str, Tensor]  # [B,T] ([B] for "value") before the update; outside the mask they hold 0
    batch: Batch  # with ref_logp where it was computed


def collate(samples: Sequence[Sample], version: int, pairs: Sequence[Pair] = ()) -> Batch:
    """Encoded samples as a batch, right-padded; `version` is the trainer's, from which ages count.

    `pairs`: judgements of these samples. Raises `Refused` for what `Batch.of` and `Sample` refuse. The reward of a response includes its token rewards.
    """
    T = max(len(s.tokens) for s in samples if s.tokens is not None)

    def padded(values: Sequence[Any], fill: float, dtype: torch.dtype) -> Tensor:
        out = torch.full((len(samples), T), fill, dtype=dtype)
        for row, value in zip(out, values):
            if value is not None:
                row[: len(value)] = torch.as_tensor(value.copy())
        return out

    knows = any(s.behavior_logp is not None for s in samples)
    rewarded = any(s.token_reward is not None for s in samples)
    at = {s.id: row for row, s in enumerate(samples)}
    return Batch.of(
        mask=padded([s.mask for s in samples], 0, torch.bool),
        reward=[total_reward(s) for s in samples],
        group=[s.prompt_id for s in samples],
        response=[(s.prompt_id, s.episode) if s.episode is not None else i for i, s in enumerate(samples)],
        behavior_logp=padded([s.behavior_logp for s in samples], math.nan, torch.float32) if knows else None,
        age=[None if s.oldest_version < 0 else version - s.oldest_version for s in samples],
        role=[s.role for s in samples],
        extra={"token_reward": padded([s.token_reward for s in samples], math.nan, torch.float64)}
        if rewarded
        else None,
        pairs=[(at[p.winner], at[p.loser]) for p in pairs] if pairs else None,
        votes=[(p.votes_winner, p.votes_loser) for p in pairs] if pairs else None,
        tokens=padded([s.tokens for s in samples], 0, torch.long),
        lengths=[len(s.tokens) for s in samples if s.tokens is not None],
        ids=[f"sample {s.id} (prompt {s.prompt_id})" for s in samples],
    )


def total_reward(sample: Sample) -> float:
    """Of the response and of its tokens; NaN where neither is known."""
    if sample.token_reward is None:
        return math.nan if sample.reward is None else sample.reward
    known = sample.token_reward[~torch.as_tensor(sample.token_reward.copy()).isnan().numpy()]
    if sample.reward is None and not len(known):
        return math.nan
    return (sample.reward or 0.0) + float(known.sum(dtype="float64"))


def streams_of(
    policy: Policy, batch: Batch, want: Sequence[str], micro: MicroBatch, reference: Policy | None = None
) -> dict[str, Tensor]:
    """Streams of the whole step without gradient, [B,T] each ([B] for "value"), 0 outside the mask."""

    @torch.no_grad()
    def forward() -> dict[str, Tensor]:
        out = {s: blank(batch, s) for s in want}
        for rows in by_length(batch, micro):
            _put(out, _forward(policy, batch, rows, want, reference), rows)
        return out

    return micro.within_memory(forward, len(batch.mask))


def backward(
    policy: Policy,
    batch: Batch,
    name: str,
    options: Mapping[str, Any],
    *,
    micro: MicroBatch,
    reference: Policy | None = None,
    between: Callable[[], None] = lambda: None,
    offload: bool = False,
) -> Step:
    """Put the gradient of objective `name` (resolved `options`) over `batch` into the parameters' `.grad`.

    `reference` gives ref_logp, and the exact KL where the objective needs them. `between` is called before each
    forward; what it raises leaves the parameters as they were. `offload`: activations wait in the CPU's memory.
    """
    objective = get(name)
    needs = objective.needs(options)
    want = wanted_streams(needs)
    batch = batch.to(policy.device)
    if "ref_logp" in needs and batch.ref_logp is None:
        assert reference is not None
        batch = batch.replace(ref_logp=streams_of(reference, batch, ["logp"], micro)["logp"])

    def attempt() -> Step:
        policy.zero_grad()  # what an attempt that ran out of memory had added, too
        parts = whole(batch, objective.couples(options), micro)
        if parts is None:
            seen = streams_of(policy, batch, want, micro, reference)
            evaluation = differentiate(name, objective, seen, batch, options)
            for rows in by_length(batch, micro):
                between()
                with activations(policy.model, offload):
                    live = _forward(policy, batch, rows, want, reference)
                _pull(live, evaluation.grads, batch, rows)
            return Step(evaluation, seen, batch)
        seen = {s: blank(batch, s) for s in want}
        for rows in parts:
            between()
            with activations(policy.model, offload):
                live = _forward(policy, batch, rows, want, reference)
            _put(seen, live, rows)
            part = differentiate(name, objective, seen, batch, options, rows)
            _pull(live, part.grads, batch, rows)
        return Step(differentiate(name, objective, seen, batch, options), seen, batch)

    return micro.within_memory(attempt, len(batch.mask))


def _pull(live: Mapping[str, Tensor], grads: Mapping[str, Tensor], batch: Batch, rows: Tensor) -> None:
    total = torch.zeros((), dtype=torch.float64, device=batch.mask.device)
    for s, value in live.items():
        g = grads[s][rows]
        if value.dim() == 2:
            g = g[:, : value.shape[1]]
        total = total + (g * value.double()).sum()
    total.backward()


def _put(into: Mapping[str, Tensor], live: Mapping[str, Tensor], rows: Tensor) -> None:
    """Write some rows' streams, without gradient, into those of the step."""
    for s, value in live.items():
        if value.dim() == 2:
            into[s][rows, : value.shape[1]] = value.detach().double()
        else:
            into[s][rows] = value.detach().double()


def _forward(
    policy: Policy, batch: Batch, rows: Tensor, want: Sequence[str], reference: Policy | None
) -> dict[str, Tensor]:
    """Streams of some rows, [K,T'] with 0 outside the mask ([K] for "value"); T' is the longest of them."""
    assert batch.tokens is not None
    assert batch.lengths is not None
    width = int(batch.lengths[rows].max())
    mask = batch.mask[rows, :width]
    out = policy.streams(
        batch.tokens[rows, :width], batch.lengths[rows], mask, want, reference if "kl" in want else None
    )
    return {s: torch.where(mask, v, 0.0) if v.dim() == 2 else v for s, v in out.items()}


def by_length(batch: Batch, micro: MicroBatch) -> list[Tensor]:
    """Row numbers in micro-batches, rows of like length together."""
    parts = _packed([[row] for row in range(len(batch.mask))], batch, micro)
    assert parts is not None
    return parts


def whole(batch: Batch, couples: str, micro: MicroBatch) -> list[Tensor] | None:
    """Micro-batches each of which holds all that its rows' gradients depend on; None where that can't be.

    A response in several rows couples them, so by "row" is meant by response.
    """
    member = {"step": torch.zeros_like(batch.group), "group": batch.group, "row": batch.response}[couples]
    blocks: dict[int, list[int]] = {}
    for row, m in enumerate(member.tolist()):
        blocks.setdefault(m, []).append(row)
    return _packed(list(blocks.values()), batch, micro)


def _packed(blocks: list[list[int]], batch: Batch, micro: MicroBatch) -> list[Tensor] | None:
    assert batch.lengths is not None
    parts = micro.pack(blocks, batch.lengths.tolist())
    return None if parts is None else [torch.tensor(rows, device=batch.mask.device) for rows in parts]
