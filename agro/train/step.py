"""The only backward pass: an objective's gradient, exact for micro-batches of any size.

An objective depends on the parameters only through its streams (log-probs, values and others), so its
gradient is Σ g · ∂stream/∂θ with g = ∂loss/∂stream. A first pass computes the streams of the complete step
without gradient, and g from them. Then each micro-batch back-propagates Σ g · stream. If a micro-batch has
all that its rows' g depends on (the row, or its complete group), its own forward pass suffices to compute g.

The batch and g are on the CPU: an objective reads small numbers in many ways, each of which would synchronize
with a GPU. So a step synchronizes once in the first pass, or, without one, once per micro-batch.

When memory runs out, the limits of a pass are halved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from agro.config import TrainConfig
from agro.errors import Refused
from agro.models.logprobs import OF_REFERENCE
from agro.models.policy import Policy
from agro.objectives import Evaluation, differentiate, get
from agro.objectives.core import blank, wanted_streams
from agro.objectives.needs import OBSERVED_LOGP
from agro.types import Batch

SMALL = 1 << 16  # tensors of fewer elements stay on the GPU: a copy costs more than it frees
TOKENS = 2048  # the default limit of a pass
R = TypeVar("R")


@dataclass(frozen=True)
class Step:
    """The results of one backward pass, in addition to the parameters' `.grad`."""

    evaluation: Evaluation
    streams: dict[str, Tensor]  # [B,T] ([B] for "value") before the update; 0 outside the mask
    batch: Batch
    norm: float = math.nan  # gradient norm before clipping


@dataclass(eq=False)
class MicroBatch:
    """The limits of one forward pass; None: no limit. They change a gradient only by rounding."""

    sequences: int | None = None
    tokens: int | None = None  # padding included
    say: Callable[[str], None] = lambda text: None  # reports that memory ran out
    adapts: bool = True  # whether passes get smaller when memory runs out

    @classmethod
    def of(cls, config: TrainConfig, say: Callable[[str], None] = lambda text: None) -> MicroBatch:
        neither = config.micro_batch is None and config.micro_tokens is None
        return cls(config.micro_batch, TOKENS if neither else config.micro_tokens, say)

    def holds(self, sequences: int, width: int) -> bool:
        """Whether one pass may have `sequences` sequences, the longest of `width` tokens."""
        if self.sequences is not None and sequences > self.sequences:
            return False
        return self.tokens is None or sequences * width <= self.tokens

    def pack(self, blocks: Sequence[Sequence[int]], length: Sequence[int]) -> list[list[int]] | None:
        """Pack blocks of rows that must stay together into passes; blocks of similar length share a pass.

        A single row that is too long gets its own pass. None if a larger block doesn't fit.
        """
        widest = [max(length[r] for r in rows) for rows in blocks]
        passes: list[list[int]] = []
        width = 0  # the last pass's width, which its first block sets
        for i in sorted(range(len(blocks)), key=lambda i: -widest[i]):
            rows = list(blocks[i])
            if passes and self.holds(len(passes[-1]) + len(rows), width):
                passes[-1] += rows
            elif len(rows) == 1 or self.holds(len(rows), widest[i]):
                passes.append(rows)
                width = widest[i]
            else:
                return None
        return passes

    def within_memory(self, work: Callable[[], R], total: int) -> R:
        """Return `work()`, retried with smaller passes when memory runs out. `total`: its sequences."""
        while True:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                has_class = isinstance(error, (torch.OutOfMemoryError, MemoryError))  # a CPU's has none
                if not self.adapts or not (has_class or "can't allocate memory" in str(error)):
                    raise
                message = str(error).partition("\n")[0]
            # The failed pass's tensors are freed only here: the exception referred to them.
            previous = min(self.sequences or total, total)
            if previous == 1:
                raise Refused(
                    f"out of memory on a single sequence ({message:.200}). What to do: a lower "
                    "train.max_length, train.gradient_checkpointing = true, a lower policy.chunk, or an "
                    "adapter ([policy.lora])"
                )
            self.sequences = -(-previous // 2)
            self.tokens = None if self.tokens is None else -(-self.tokens // 2)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            limits = f"{self.sequences} sequences" + (f" and {self.tokens} tokens" if self.tokens else "")
            end = "in a forward pass from here on, which doesn't change the result"
            self.say(f"out of memory: at most {limits} {end}")


@dataclass(eq=False)
class Passes:
    """How a step's forward passes are computed: here, all of them in this process."""

    micro: MicroBatch
    check: Callable[[], None] = lambda: None
    """Called before each pass; if it raises, the weights stay unchanged."""
    offload: bool = False  # whether activations are kept in the CPU's memory until the backward pass

    def tolerating(self) -> AbstractContextManager[None]:
        """The context for the gradient of a pass. It may ignore errors, which the evaluation of the complete
        step raises again."""
        return nullcontext()

    def share(self, parts: list[Tensor]) -> list[Tensor | None]:
        """The passes to compute here, as row numbers. None is a pass without rows, which keeps the ranks of a
        sharded model in step."""
        return list(parts)

    def gather(self, streams: Mapping[str, Tensor]) -> None:
        """Add up, in place, the streams that each rank computed for its rows."""


def streams_of(
    policy: Policy, batch: Batch, want: Sequence[str], passes: Passes, reference: Policy | None = None
) -> dict[str, Tensor]:
    """Streams of the complete step without gradient, [B,T] each ([B] for "value"), 0 outside the mask."""

    @torch.no_grad()
    def forward() -> dict[str, Tensor]:
        streams = {s: blank(batch, s).to(policy.device, non_blocking=True) for s in want}
        parts = None
        if policy.packs:  # then a prefix that rows of a group share is computed once
            parts = complete(batch, "group", passes.micro)
        for rows in passes.share(parts or by_length(batch, passes.micro)):
            live = _forward(policy, batch, rows, want, reference)
            _put(streams, live, rows)
        passes.gather(streams)
        return _on_cpu(streams)

    return passes.micro.within_memory(forward, len(batch.mask))


def backward(
    policy: Policy,
    batch: Batch,
    name: str,
    options: Mapping[str, Any],
    passes: Passes,
    reference: Policy | None = None,
) -> Step:
    """Put the gradient of objective `name` (resolved `options`) over `batch` into the parameters' `.grad`.

    The batch has all that the objective needs except the policy's own streams. The exact KL uses `reference`.
    """
    objective = get(name)
    want = wanted_streams(objective.needs(options))

    def forward(rows: Tensor | None) -> dict[str, Tensor]:
        passes.check()
        with activations(passes.offload):
            return _forward(policy, batch, rows, want, reference)

    def in_one_pass(parts: list[Tensor]) -> dict[str, Tensor]:
        """Each part contains all that its rows' gradients depend on."""
        seen = {s: blank(batch, s) for s in want}
        for rows in passes.share(parts):
            live = forward(rows)
            _put(seen, _on_cpu(live), rows)
            grads = None
            if rows is not None:
                with passes.tolerating():
                    grads = differentiate(name, objective, seen, batch, options, rows).grads
            _back_propagate(live, grads, rows)
        passes.gather(seen)
        return seen

    def in_two_passes() -> dict[str, Tensor]:
        seen = streams_of(policy, batch, want, passes, reference)
        grads = differentiate(name, objective, seen, batch, options).grads
        for rows in passes.share(by_length(batch, passes.micro)):
            _back_propagate(forward(rows), grads, rows)
        return seen

    def attempt() -> dict[str, Tensor]:
        policy.zero_grad()  # an attempt that ran out of memory may have added to it
        parts = complete(batch, objective.coupling(options), passes.micro)
        return in_two_passes() if parts is None else in_one_pass(parts)

    streams = passes.micro.within_memory(attempt, len(batch.mask))
    return Step(differentiate(name, objective, streams, batch, options), streams, batch)


@contextmanager
def activations(active: bool) -> Iterator[None]:
    """If `active`, keep what autograd saves on the CPU, except weights and small tensors."""
    if not active:
        yield
        return

    def pack(x: Tensor) -> tuple[torch.device, Tensor]:
        if x.numel() < SMALL or isinstance(x if x._base is None else x._base, nn.Parameter):
            return x.device, x
        copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
        return x.device, copy.copy_(x, non_blocking=x.is_cuda)

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        return packed[1].to(packed[0], non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _back_propagate(
    live: Mapping[str, Tensor], grads: Mapping[str, Tensor] | None, rows: Tensor | None
) -> None:
    """Back-propagate Σ g · stream over some rows, or zero times the streams for a pass without rows."""
    total = torch.zeros((), dtype=torch.float64, device=next(iter(live.values())).device)
    for s, value in live.items():
        if rows is None or grads is None:
            total = total + 0.0 * value.double().sum()
            continue
        g = grads[s][rows]
        if value.dim() == 2:
            g = g[:, : value.shape[1]]
        g = g.to(value.device, non_blocking=True)
        total = total + (g * value.double()).sum()
    total.backward()


def _on_cpu(streams: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The streams without gradient, in one copy that synchronizes."""
    values = [value.detach().double() for value in streams.values()]
    if all(value.device.type == "cpu" for value in values):
        return dict(zip(streams, values))
    parts = torch.cat([value.flatten() for value in values]).cpu().split([v.numel() for v in values])
    return {s: part.view(value.shape) for s, part, value in zip(streams, parts, values, strict=True)}


def _put(streams: Mapping[str, Tensor], live: Mapping[str, Tensor], rows: Tensor | None) -> None:
    """Write some rows' streams, without gradient, into the step's streams on the same device."""
    if rows is None:
        return
    rows = rows.to(next(iter(live.values())).device, non_blocking=True)
    for s, value in live.items():
        if value.dim() == 2:
            streams[s][rows, : value.shape[1]] = value.detach().double()
        else:
            streams[s][rows] = value.detach().double()


def _forward(
    policy: Policy, batch: Batch, rows: Tensor | None, want: Sequence[str], reference: Policy | None
) -> dict[str, Tensor]:
    """Streams of some rows, [K,T'] with 0 outside the mask ([K] for "value"); T' is their largest length.

    If `rows` is None, computes the first row's, so that every rank of a sharded model runs it.
    """
    assert batch.tokens is not None
    assert batch.lengths is not None
    if rows is None:
        rows = torch.zeros(1, dtype=torch.long)
    width = int(batch.lengths[rows].max())
    mask = places = batch.mask[rows, :width]
    observed = batch.extra["observed"][rows, :width] if OBSERVED_LOGP in want else None
    if observed is not None:  # one pass computes the log-probs at the tokens of both masks
        places = mask | observed
    ref = reference if OF_REFERENCE & set(want) else None
    kept_sets = None if batch.kept is None else batch.kept.rows(rows, width)
    names = [stream for stream in want if stream != OBSERVED_LOGP]
    streams = policy.streams(batch.tokens[rows, :width], batch.lengths[rows], places, names, ref, kept_sets)
    observed_logp: dict[str, Tensor] = {}
    if observed is not None:
        replies = observed.to(policy.device, non_blocking=True)
        observed_logp[OBSERVED_LOGP] = torch.where(replies, streams["logp"], 0.0)
    mask = mask.to(policy.device, non_blocking=True)
    for stream, value in streams.items():
        if value.dim() == 2:
            streams[stream] = torch.where(mask, value, 0.0)
    return streams | observed_logp


def by_length(batch: Batch, micro: MicroBatch) -> list[Tensor]:
    """Micro-batches of row numbers, with rows of similar length together."""
    assert batch.lengths is not None
    parts = micro.pack([[row] for row in range(len(batch.mask))], batch.lengths.tolist())
    assert parts is not None
    return list(map(torch.tensor, parts))


def complete(batch: Batch, couples: str, micro: MicroBatch) -> list[Tensor] | None:
    """Micro-batches that each contain all that their rows' gradients depend on; None if one is too large.

    A response in several rows couples them, so "row" groups rows by response.
    """
    assert batch.lengths is not None
    member = {"step": torch.zeros_like(batch.group), "group": batch.group, "row": batch.response}[couples]
    blocks: dict[int, list[int]] = {}
    for row, m in enumerate(member.tolist()):
        blocks.setdefault(m, []).append(row)
    parts = micro.pack(list(blocks.values()), batch.lengths.tolist())
    return None if parts is None else list(map(torch.tensor, parts))
