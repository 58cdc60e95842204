"""What a step consists of, and its time and memory by the token, from some seconds of the run's own model.

A pass over sequences of the step is timed, and some tokens that are decoded in the middle of responses. Other
tokens take as long. On a CPU one thread is measured by its CPU time, which other programs don't prolong, and
the run's threads are taken to share its work evenly.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import nn

from agro.config import RunConfig
from agro.models.encoding import InvalidSample
from agro.models.footprint import activations, cached, logits, saved_for_backward
from agro.models.policy import Policy
from agro.models.pretrained import LARGE, parameters
from agro.models.tiles import sum_dtype
from agro.objectives.core import wanted_streams
from agro.objectives.needs import REF_LOGP, provided_by
from agro.rollout.engines import Request
from agro.rollout.engines.capabilities import ENGINES, capabilities
from agro.rollout.rollout import embedded
from agro.store import Store
from agro.store.queries import chosen
from agro.train.micro import MicroBatch
from agro.train.phases import Phase, options_at
from agro.types import Prompt

INSPECTED = 256  # prompts and stored samples, for the lengths
SHORT = 48  # tokens of the pass that tells how much of a step can be timed
DECODED = 8  # tokens of a response that are timed
WEIGHTS = 2**22  # whose update is timed, at most


@dataclass(frozen=True)
class StepSequence:
    """A sequence of a step. The last `learned` tokens have log-probs."""

    tokens: list[int]
    learned: int
    group: int


@dataclass(frozen=True)
class Work:
    """The sequences of a step, the longest that they may be."""

    fresh: list[StepSequence]
    stored: list[StepSequence]
    passes: list[list[StepSequence]]
    twice: bool  # whether log-probs of all passes are needed before the first backward pass

    @property
    def rows(self) -> list[StepSequence]:
        return self.fresh + self.stored

    @property
    def width(self) -> int:
        """Tokens of the longest."""
        return max((len(row.tokens) for row in self.rows), default=2)


@dataclass(frozen=True)
class Rates:
    """Seconds and bytes of a token, and seconds of a pass and of an update."""

    each_pass: float  # forward and backward, whatever its tokens
    training: float  # forward and backward
    scoring: float  # forward alone
    sampling: float | None  # one of as many responses as are decoded at once; None: unknown
    saved: float  # bytes that are saved for the backward pass
    update: float


def work(
    phase: Phase, policy: Policy, prompts: Sequence[Prompt], store: Store | None, group_size: float | None
) -> Work:
    """Of the last step of a phase. `group_size`: responses of a stored group, None where that is unknown."""
    config = phase.config
    groups = phase.stored_groups(phase.steps - 1)
    # The longest prompts come first, with random responses as long as they may be.
    random, limit = np.random.default_rng(0), min(policy.context, config.train.max_length or policy.context)
    encoded = sorted((policy.encode_prompt(p.text) for p in prompts[:INSPECTED]), key=len, reverse=True)
    fresh = []
    for group in range((config.train.groups - groups) if encoded else 0):
        ids = encoded[group % len(encoded)]
        new = max(0, min(most_new(config), limit - len(ids)))
        for _ in range(config.sampler.n):
            fresh.append(StepSequence(ids + random.integers(0, policy.vocab_size, new).tolist(), new, group))
    stored: list[StepSequence] = []
    if groups and store is not None and group_size is not None:
        stored = _stored(config, policy, store, round(groups * group_size), round(group_size))
    rows = fresh + stored
    micro, lengths = MicroBatch.of(config.train), [len(row.tokens) for row in rows]
    packed = micro.pack([[i] for i in range(len(rows))], lengths)
    assert packed is not None  # single rows always fit
    options = phase.resolved(options_at(config.objective.options, 0))
    couples, blocks = phase.entry.coupling(options), dict[int, list[int]]()
    for i, row in enumerate(rows):
        blocks.setdefault({"row": i, "group": row.group, "step": 0}[couples], []).append(i)
    together = micro.pack(list(blocks.values()), lengths)
    passes = packed if together is None else together
    return Work(fresh, stored, [[rows[i] for i in part] for part in passes], together is None)


def most_new(config: RunConfig) -> int:
    """An upper bound of the tokens in a response that the policy samples."""
    return config.sampler.max_new * (config.environment.max_turns if config.environment else 1)


def _stored(config: RunConfig, policy: Policy, store: Store, count: int, size: int) -> list[StepSequence]:
    """So many rows like the first in the store, in groups of `size`."""
    rows: list[StepSequence] = []
    for sample in islice(store.samples(**chosen(config.data)), INSPECTED):
        with suppress(InvalidSample):  # the run drops it as well
            for encoded in policy.encoder.rows(sample, config.train.max_length):
                assert encoded.tokens is not None
                assert encoded.mask is not None
                rows.append(StepSequence(encoded.tokens.tolist(), int(encoded.mask.sum()), 0))
    repeated = []
    for i in range(count if rows else 0):
        row = rows[i % len(rows)]
        repeated.append(StepSequence(row.tokens, row.learned, -1 - i // max(1, size)))
    return repeated


def unknown_sampling(config: RunConfig) -> str:
    """Why the time of sampling can't be measured here; empty where it can."""
    reasons = {
        "other processes sample": config.source.kind == "elsewhere",
        "a server samples": "shares_weights" not in capabilities(config.engine.kind),
        "an environment takes its own time": config.environment is not None,
        "another engine samples": config.engine.kind not in ENGINES,
        "groups are completed": bool(config.data.complete_groups),
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds and config.data.samples)


def measured(
    phase: Phase, policy: Policy, reference: Policy | None, step: Work, limit: float
) -> Rates | None:
    """The rates of a step; None of one without sequences. `limit`: seconds of each of four measurements.

    No gradient remains.
    """
    if not step.rows:
        return None
    want, config = wanted_streams(phase.needs), phase.config
    seconds = partial(_seconds, policy.device)
    with one_thread(policy.device) as threads:
        train = partial(_pass, policy, reference, want)
        short = [_last_tokens(step.passes[0][0], SHORT)]
        # The first one takes longer in any process; of a large model the backward pass hardly does.
        warm, is_small = [_last_tokens(short[0], DECODED)], parameters(policy.model) < LARGE
        _pass(
            policy, reference if is_small else None, want if is_small else ("logp",), warm, backward=is_small
        )
        first, few = seconds(partial(train, short)), len(short[0].tokens)
        rows = _within(step.passes[0], int(3 * limit * few / first))
        count = sum(len(row.tokens) for row in rows)
        recomputes, policy.recompute = policy.recompute, False
        with saved_for_backward(policy.model) as saved:
            second = seconds(partial(train, rows))
        policy.recompute = recomputes
        training, each_pass = second / count, 0.0
        if 1.5 * few < count and second > first:
            training = (second - first) / (count - few)
            each_pass = max(0.0, first - few * training)
        scoring = seconds(partial(_pass, policy, None, ("logp",), rows, backward=False)) / count
        sampling = None
        if step.fresh and not unknown_sampling(config):
            sampling = _decoding(policy, config, step, int(limit / scoring))
        return Rates(
            each_pass=each_pass / threads,
            training=training / threads,
            scoring=scoring / threads,
            sampling=None if sampling is None else sampling / threads,
            saved=sum(saved.values()) / count,
            update=_update(policy, config) / threads,
        )


@contextmanager
def one_thread(device: torch.device) -> Iterator[int]:
    """On a CPU, one thread while it lasts; gives the number of threads that the run has."""
    threads = torch.get_num_threads()
    if device.type == "cuda":
        yield 1
        return
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def positions(policy: Policy, rows: Sequence[StepSequence]) -> int:
    """That a pass computes: the prompt of a group once, where the policy can."""
    if not policy.packs:
        return sum(len(row.tokens) for row in rows)
    return sum({row.group: len(row.tokens) - row.learned for row in rows}.values()) + sum(
        row.learned for row in rows
    )


def step_seconds(
    phase: Phase, policy: Policy, step: Work, rates: Rates | None, relative: float
) -> dict[str, float | None]:
    """Of each part of a step; None: unknown. `relative`: weights of the reference, in those of the policy."""
    config, needs = phase.config, phase.needs
    parts: dict[str, float | None] = {"sampling": None, "reference": None, "training": None, "update": None}
    if not unknown_sampling(config) and not step.fresh:
        parts["sampling"] = 0.0
    if rates is None:
        return parts
    if step.fresh and rates.sampling is not None:
        contexts = {row.group: len(row.tokens) - row.learned for row in step.fresh}
        new = sum(row.learned for row in step.fresh)
        parts["sampling"] = sum(contexts.values()) * rates.scoring + new * rates.sampling
    count = sum(positions(policy, rows) for rows in step.passes)
    scored = positions(policy, step.fresh) if config.evaluate.beta is not None else 0
    if REF_LOGP in needs:
        scored = count
    parts["reference"] = 0.0 if config.policy.cache_reference else scored * rates.scoring * relative
    if config.policy.reference_is_served:
        parts["reference"] = None
    again = (
        step.twice + len(provided_by("draw", needs)) + bool(config.train.gain_ratio or config.train.step_kl)
    )
    passes = len(step.passes) * rates.each_pass + count * rates.training
    parts["training"] = config.train.updates * passes + count * again * rates.scoring
    parts["update"] = config.train.updates * rates.update
    return parts


def _clock(device: torch.device) -> float:
    """A time in seconds; on a CPU the process's own, which other programs don't prolong."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    if device.type == "cuda":
        work()  # what is loaded and tuned the first time
    began = _clock(device)
    work()
    return max(_clock(device) - began, 1e-6)


def _last_tokens(row: StepSequence, count: int) -> StepSequence:
    return StepSequence(row.tokens[-count:], min(row.learned, count - 1), row.group)


def _within(rows: Sequence[StepSequence], limit: int) -> list[StepSequence]:
    """The first rows of at most so many tokens; of the first row a part, where it alone has more."""
    found = [_last_tokens(rows[0], max(SHORT, limit))]
    for row in rows[1:]:
        limit -= len(found[-1].tokens)
        if len(row.tokens) > limit:
            break
        found.append(row)
    return found


def _pass(
    policy: Policy,
    reference: Policy | None,
    want: Collection[str],
    rows: Sequence[StepSequence],
    *,
    backward: bool = True,
) -> None:
    """One pass over some sequences."""
    lengths = torch.tensor([len(row.tokens) for row in rows])
    tokens = torch.zeros((len(rows), int(lengths.max())), dtype=torch.long)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        length = len(row.tokens)
        tokens[i, :length] = torch.tensor(row.tokens)
        mask[i, max(1, length - row.learned) : length] = True
    with torch.set_grad_enabled(backward):
        streams = policy.streams(tokens, lengths, mask, want, reference)
        if backward:
            torch.stack([s.nan_to_num().sum() for s in streams.values()]).sum().backward()
            policy.zero_grad()


def _decoding(policy: Policy, config: RunConfig, step: Work, tokens: int) -> float | None:
    """Seconds of a token in the middle of responses, with as many at once as the step has; None where
    responses are too short to measure it.

    `tokens`: decoded at most, about; where that is fewer, so are the responses.
    """
    longest = max(step.fresh, key=lambda row: len(row.tokens))
    context = longest.tokens[: max(1, len(longest.tokens) - longest.learned // 2 - 1)]
    new, batch = (
        min(DECODED, longest.learned - 1),
        min(config.sampler.batch, len(step.fresh), max(2, tokens // DECODED)),
    )
    engine = embedded(policy, fused=config.engine.fused)
    sampler = config.sampler.model_copy(update={"batch": batch + 1, "stop": ()})
    requests = [Request(0, context, 1), *(Request(1 + i, context, 1 + new) for i in range(batch))]
    ended: list[tuple[int, float]] = []
    for done in engine.decode(deque(requests), sampler, 0):
        ended.append((len(done.tokens), _clock(policy.device)))
    (early, begin), (late, end) = ended[0], ended[-1]
    return max(end - begin, 1e-9) / (late - early) / batch if late > early else None


def _update(policy: Policy, config: RunConfig) -> float:
    """Seconds of one optimizer step, from the update of fewer weights."""
    weights = list(policy.trained().values())
    count = sum(w.numel() for w in weights)
    sample = torch.zeros(
        min(count, WEIGHTS), dtype=weights[0].dtype, device=policy.device, requires_grad=True
    )
    sample.grad = torch.zeros_like(sample)
    adam = torch.optim.AdamW([sample], fused=True)

    def move() -> None:
        torch.nn.utils.clip_grad_norm_([sample], config.train.clip)
        adam.step()

    move()
    return _seconds(policy.device, move) * count / sample.numel()


_JOINED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # see `agro.rollout.engines.fused`
_SLACK = 256  # columns that `agro.rollout.engines.decoding_rows` adds where responses wait


def resident(device: torch.device) -> int | None:
    """Bytes that are allocated now: on the GPU, or by the process (Linux; None elsewhere)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    pages = Path("/proc/self/statm")
    if not pages.exists():
        return None
    return int(pages.read_text().split()[1]) * 4096


def peak(policy: Policy, config: RunConfig, step: Work, rate: Rates | None, loaded: int | None) -> int | None:
    """The most bytes at once: while responses are sampled, or in a pass. None where a part is unknown.

    In the only pass of a step, gradients come as activations go. On a CPU the C library keeps what sampling
    and a pass of activations used, in pieces that seldom fit again, so both count besides a pass.

    Args:
        loaded: bytes that are allocated when everything is loaded.
    """
    if loaded is None or rate is None:
        return None
    trained = policy.trained().values()
    gradients = sum(w.nbytes for w in trained)
    is_8bit = config.train.optimizer == "adamw_8bit"
    constant = loaded + 2 * (sum(w.numel() for w in trained) if is_8bit else gradients)
    if config.train.weights_average is not None:
        constant += sum(w.numel() * max(w.itemsize, 4) for w in trained)
    head = policy.model.get_output_embeddings().weight
    head_gradient = head.numel() * sum_dtype(head).itemsize if head.requires_grad else 0
    learned = max((sum(row.learned for row in rows) for rows in step.passes), default=0)
    batch, columns = _batch(config, step), max((len(row.tokens) for row in step.fresh), default=0)
    if len(step.fresh) > batch:
        columns += _SLACK
    text, size = policy.model.config.get_text_config(), policy.dtype.itemsize
    sampling = batch * columns * cached(text, size) + _sampler_bytes(policy, config, step)
    largest = max(positions(policy, rows) for rows in step.passes)
    saved = round(sum(activations(text, rate.saved / text.num_hidden_layers, largest, config.train, size)))
    in_pass = saved + head_gradient + logits(learned, policy.vocab_size, config.policy.chunk)
    if policy.device.type == "cpu":
        return constant + gradients + sampling + in_pass + saved
    if len(step.passes) > 1:
        in_pass += gradients
    return constant + max(gradients + sampling, in_pass)


def _batch(config: RunConfig, step: Work) -> int:
    """Responses that are sampled at once in this process."""
    shares = "shares_weights" in capabilities(config.engine.kind)
    if not shares or config.source.kind != "inline":
        return 0
    return min(config.sampler.batch, len(step.fresh))


def _sampler_bytes(policy: Policy, config: RunConfig, step: Work) -> int:
    """Logits of a batch, twice, the copies of weights that the fused sampler packs, and those that lag."""
    batch = _batch(config, step)
    count = 2 * batch * policy.vocab_size * 4
    if batch and config.source.lags:
        count += sum(p.nbytes for p in policy.model.parameters())
    from agro.rollout.engines.fused import is_fusable

    if not (batch and config.engine.fused and is_fusable(policy)):
        return count
    for name, module in policy.model.named_modules():
        if isinstance(module, nn.Linear):
            copies = 1 + (name.endswith(_JOINED) and policy.dtype == torch.float32)
            count += copies * module.weight.nbytes
    return count
