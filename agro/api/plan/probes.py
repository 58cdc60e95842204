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

from agro.config import SamplerConfig, TrainConfig
from agro.models.policy import Policy
from agro.rollout.engines import Engine, Request

DECODED = 8  # tokens of a response that are timed at each end
FIRST = 8  # tokens of the first pass, which isn't timed
SHORT = 64  # tokens of the pass that tells how much of a step can be timed
WEIGHTS = 2**22  # whose update is timed, at most


@dataclass(frozen=True)
class StepSequence:
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
    saved: float  # bytes that are saved for the backward pass


def read_clock(device: torch.device) -> float:
    """A time in seconds. Of one thread it is the CPU's, which other programs don't prolong."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


def operations(policy: Policy, rows: Sequence[StepSequence]) -> float:
    """Of a forward pass: two for each weight and position, and those of attention to earlier tokens."""
    config = policy.model.config.get_text_config()
    head = policy.model.get_output_embeddings().weight
    embeddings = {id(m.weight): m.weight for m in policy.model.modules() if isinstance(m, nn.Embedding)}
    embedded = sum(w.numel() for w in {**embeddings, id(head): head}.values())
    body = sum(p.numel() for p in policy.model.parameters()) - embedded
    total = 0.0
    for row in rows:
        attention = config.num_hidden_layers * config.hidden_size * len(row.tokens) ** 2
        total += 2 * (body * len(row.tokens) + head.numel() * row.learned + attention)
    return total


def rates(
    policy: Policy,
    reference: Policy | None,
    rows: Sequence[StepSequence],
    want: Collection[str],
    limit: float,
) -> Rates:
    """Measured on the first of `rows`, which the step has in one pass. No gradient remains.

    `limit`: seconds of a pass. Of a longer one a part is timed, also of a single sequence.
    """
    short = [_last_tokens(rows[0], SHORT)]
    _Pass([_last_tokens(rows[0], FIRST)], want).train(policy, reference)  # it takes longer in any process
    began = read_clock(policy.device)
    _Pass(short, want).train(policy, reference)
    each = max(read_clock(policy.device) - began, 1e-6) / operations(policy, short)
    rows = _within(policy, rows, limit / each)
    probe, count = _Pass(rows, want), operations(policy, rows)
    recomputes, policy.recompute = policy.recompute, False
    with _saved_for_backward(policy.model) as saved:
        probe.train(policy, reference)
    policy.recompute = recomputes
    device = policy.device
    read = 0.0 if reference is None else _seconds(lambda: probe.score(reference), device, limit)
    return Rates(
        training=_seconds(lambda: probe.train(policy, reference), device, limit) / count,
        scoring=_seconds(lambda: probe.score(policy), device, limit) / count,
        reference=read / count,
        saved=sum(saved.values()) / count,
    )


def _last_tokens(row: StepSequence, count: int) -> StepSequence:
    return StepSequence(row.tokens[-count:], min(row.learned, count - 1), row.group)


def _within(policy: Policy, rows: Sequence[StepSequence], limit: float) -> list[StepSequence]:
    """The first rows of at most so many operations; of the first row a part, where it alone has more."""
    head = rows[0]
    while operations(policy, [head]) > limit and len(head.tokens) > SHORT:
        head = _last_tokens(head, max(SHORT, len(head.tokens) // 2))
    chosen, remaining = [head], limit - operations(policy, [head])
    for row in rows[1:]:
        remaining -= operations(policy, [row])
        if remaining < 0:
            break
        chosen.append(row)
    return chosen


class _Pass:
    """One pass over some sequences."""

    def __init__(self, rows: Sequence[StepSequence], want: Collection[str]) -> None:
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


def _seconds(work: Callable[[], None], device: torch.device, limit: float) -> float:
    """The median of three times, or of fewer that take long."""
    seconds: list[float] = []
    while len(seconds) < 3 and sum(seconds) < limit / 4:
        began = read_clock(device)
        work()
        seconds.append(read_clock(device) - began)
    return median(seconds)


@contextmanager
def _saved_for_backward(model: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes that autograd saves, by address, without the model's weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield saved


def decoding(
    engine: Engine,
    contexts: Sequence[list[int]],
    new: int,
    sampler: SamplerConfig,
    device: torch.device,
    tokens: int,
) -> float | None:
    """Seconds of sampling one batch of `contexts`, a list for each response; None where responses are too
    short to measure it.

    Responses to one prompt share the list, which is then read once. `tokens`: processed at most, about.
    Where the batch has more, fewer and shorter responses are timed, and it takes longer in proportion.
    """
    batch = len(contexts)
    contexts = _read_within(contexts, tokens)
    factor = batch / len(contexts)
    timed = min(new, max(tokens - len(contexts[0]), DECODED + 1))
    if len(contexts) == 1:
        contexts = [contexts[0]] * 2
    sampler = sampler.model_copy(update={"batch": len(contexts), "stop": ()})
    begin, early = _decoded(engine, contexts, new, sampler, device)
    longest = max(contexts, key=len)
    more = np.random.default_rng(0).choice(longest, max(0, timed - DECODED - 1)).tolist()
    _, late = _decoded(engine, [longest + more] * len(contexts), timed, sampler, device)
    if early is None or late is None:
        return None
    late = early + max(0.0, late - early) * new / timed
    return factor * (max(0.0, begin - early) + new * (early + late) / 2)


def _read_within(contexts: Sequence[list[int]], tokens: int) -> Sequence[list[int]]:
    """The first contexts whose responses need so many tokens; those of a prompt read it once."""
    prompts: set[int] = set()
    for i, ids in enumerate(contexts):
        if id(ids) not in prompts:
            prompts.add(id(ids))
            tokens -= len(ids)
        tokens -= 2 * DECODED
        if tokens < 0:
            return contexts[: max(1, i)]
    return contexts


def _decoded(
    engine: Engine, contexts: Sequence[list[int]], new: int, sampler: SamplerConfig, device: torch.device
) -> tuple[float, float | None]:
    """Seconds until the first response has its only token, and of a token of the others."""
    requests = [Request(i, ids, min(new, 1 + DECODED)) for i, ids in enumerate(contexts)]
    requests[0] = Request(0, contexts[0], 1)
    finished: list[tuple[int, float]] = []
    began = read_clock(device)
    for done in engine.decode(deque(requests), sampler, 0):
        finished.append((len(done.tokens), read_clock(device) - began))
    (early, begin), (late, end) = finished[0], finished[-1]
    return begin, (end - begin) / (late - early) if late > early else None


def update(policy: Policy, config: TrainConfig, limit: float) -> float:
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
    return _seconds(move, policy.device, limit) * count / sample.numel()
