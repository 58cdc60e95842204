"""Short measurements of the run's own model, from which a dry run extrapolates the time of a step.

The operations alone, at the rate of a matrix product, would be a bound that no step reaches. So one pass over
sequences of the step is timed, and the others take as long by the operation. Decoding is timed at the first
and at the last tokens of responses, since attention costs more there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn

from agro.config import Sampler, Train
from agro.engines import Engine, Request
from agro.policy import Policy

DECODED = 8  # tokens of a response that are timed at each end
LONGEST = 2.0  # seconds of a pass that is timed; of a longer one a part is
WEIGHTS = 2**22  # whose update is timed, at most


@dataclass(frozen=True)
class Row:
    """A sequence of a step. The last `learned` tokens have log-probs."""

    tokens: list[int]
    learned: int
    group: int


@dataclass(frozen=True)
class Rates:
    """Of passes as the step has them: seconds and bytes per operation, as `operations` counts them."""

    training: float  # forward and backward
    scoring: float  # forward alone
    reference: float  # forward of the reference; 0 where there is none
    kept: float  # bytes that are kept for the backward pass


@dataclass(frozen=True)
class Decoding:
    """Seconds of sampling one batch of responses."""

    begin: float  # before the first token: prompts are read
    first: float  # of the first tokens, each
    last: float  # of the last tokens, each


def now(device: torch.device) -> float:
    """A time in seconds. Of one thread it is the CPU's, which other programs don't prolong."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


def operations(policy: Policy, rows: Sequence[Row]) -> float:
    """Of a forward pass: two for each weight and position, and those of attention to earlier tokens."""
    config = policy.model.config.get_text_config()
    head = policy.model.get_output_embeddings().weight
    embeddings = {id(m.weight): m.weight for m in policy.model.modules() if isinstance(m, nn.Embedding)}
    apart = sum(w.numel() for w in {**embeddings, id(head): head}.values())
    body = sum(p.numel() for p in policy.model.parameters()) - apart
    total = 0.0
    for row in rows:
        attention = config.num_hidden_layers * config.hidden_size * len(row.tokens) ** 2
        total += 2 * (body * len(row.tokens) + head.numel() * row.learned + attention)
    return total


def rates(policy: Policy, reference: Policy | None, rows: Sequence[Row], want: Collection[str]) -> Rates:
    """Measured on the first of `rows`, which the step has in one pass. No gradient remains."""
    single = _Pass(rows[:1], want)
    single.train(policy, reference)  # the first pass of a process takes longer
    began = now(policy.device)
    single.train(policy, reference)
    each = now(policy.device) - began
    rows = rows[: max(1, int(LONGEST / max(each, 1e-6)))]
    probe, count = _Pass(rows, want), operations(policy, rows)
    recomputes, policy.recompute = policy.recompute, False
    with _kept_for_backward(policy.model) as kept:
        probe.train(policy, reference)
    policy.recompute = recomputes
    read = 0.0 if reference is None else _seconds(lambda: probe.score(reference), policy.device)
    return Rates(
        training=_seconds(lambda: probe.train(policy, reference), policy.device) / count,
        scoring=_seconds(lambda: probe.score(policy), policy.device) / count,
        reference=read / count,
        kept=sum(kept.values()) / count,
    )


class _Pass:
    """One pass over some sequences."""

    def __init__(self, rows: Sequence[Row], want: Collection[str]) -> None:
        self.want = want
        self.lengths = torch.tensor([len(row.tokens) for row in rows])
        self.tokens = torch.zeros((len(rows), int(self.lengths.max())), dtype=torch.long)
        self.mask = torch.zeros(self.tokens.shape, dtype=torch.bool)
        for i, row in enumerate(rows):
            length = len(row.tokens)
            self.tokens[i, :length] = torch.tensor(row.tokens)
            self.mask[i, max(1, length - row.learned) : length] = True

    def train(self, policy: Policy, reference: Policy | None) -> None:
        streams = policy.streams(self.tokens, self.lengths, self.mask, self.want, reference)
        torch.stack([s.nan_to_num().sum() for s in streams.values()]).sum().backward()
        policy.zero_grad()

    @torch.no_grad()
    def score(self, policy: Policy) -> None:
        policy.streams(self.tokens, self.lengths, self.mask)


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """The median of three times, or of fewer that take long."""
    seconds: list[float] = []
    while len(seconds) < 3 and sum(seconds) < LONGEST / 4:
        began = now(device)
        work()
        seconds.append(now(device) - began)
    return median(seconds)


@contextmanager
def _kept_for_backward(model: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes that autograd keeps, by address, without the model's weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield kept


def decoding(
    engine: Engine, contexts: Sequence[list[int]], new: int, sampler: Sampler, device: torch.device
) -> Decoding | None:
    """Measured on a batch of `contexts`, a list for each response; None where responses are too short.

    Responses to one prompt share the list, which is then read once.
    """
    if len(contexts) == 1:
        contexts = [contexts[0]] * 2
    sampler = sampler.model_copy(update={"batch": len(contexts), "stop": ()})
    begin, first = _decoded(engine, contexts, new, sampler, device)
    longest = max(contexts, key=len)
    more = np.random.default_rng(0).choice(longest, max(0, new - DECODED - 1)).tolist()
    _, last = _decoded(engine, [longest + more] * len(contexts), new, sampler, device)
    if first is None or last is None:
        return None
    return Decoding(max(0.0, begin - first), first, last)


def _decoded(
    engine: Engine, contexts: Sequence[list[int]], new: int, sampler: Sampler, device: torch.device
) -> tuple[float, float | None]:
    """Seconds until the first response has its only token, and of a token of the others."""
    requests = [Request(i, ids, min(new, 1 + DECODED)) for i, ids in enumerate(contexts)]
    requests[0] = Request(0, contexts[0], 1)
    ended: list[tuple[int, float]] = []
    began = now(device)
    for done in engine.decode(deque(requests), sampler, 0):
        ended.append((len(done.tokens), now(device) - began))
    (early, begin), (late, end) = ended[0], ended[-1]
    return begin, (end - begin) / (late - early) if late > early else None


def update(policy: Policy, config: Train) -> float:
    """Seconds of one optimizer step, from the update of fewer weights."""
    weights = list(policy.trained().values())
    dtype, count = weights[0].dtype, sum(w.numel() for w in weights)
    sample = torch.zeros(min(count, WEIGHTS), dtype=dtype, device=policy.device, requires_grad=True)
    sample.grad = torch.zeros_like(sample)
    adam = torch.optim.AdamW([sample], lr=config.lr, fused=True)

    def move() -> None:
        torch.nn.utils.clip_grad_norm_([sample], config.clip)
        adam.step()

    move()
    return _seconds(move, policy.device) * count / sample.numel()
