"""What a step consists of, and its time: its operations, at the rates of `agro.api.plan.probes`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import numpy as np

from agro.api.plan.probes import Rates, StepSequence, decoding, operations, rates, update
from agro.config import RunConfig
from agro.models.encoding import InvalidSample
from agro.models.policy import Policy
from agro.objectives.core import wanted_streams
from agro.objectives.needs import REF_LOGP, provided_by
from agro.rollout.engines.capabilities import capabilities
from agro.rollout.rollout import embedded
from agro.store import Store
from agro.store.queries import chosen
from agro.train.micro import MicroBatch
from agro.train.phases import Phase, options_at
from agro.types import Prompt

INSPECTED = 256  # prompts and stored samples, for the lengths


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


def work(
    phase: Phase, policy: Policy, prompts: Sequence[Prompt], store: Store | None, group_size: float | None
) -> Work:
    """Of the last step of a phase. `group_size`: responses of a stored group, None where that is unknown."""
    config = phase.config
    groups = phase.stored_groups(phase.steps - 1)
    fresh = _fresh(config, policy, prompts, config.train.groups - groups)
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


def _fresh(config: RunConfig, policy: Policy, prompts: Sequence[Prompt], groups: int) -> list[StepSequence]:
    """The longest prompts come first, with random responses as long as they may be."""
    random, limit = np.random.default_rng(0), min(policy.context, config.train.max_length or policy.context)
    encoded = sorted((policy.encode_prompt(p.text) for p in prompts[:INSPECTED]), key=len, reverse=True)
    rows = []
    for group in range(groups if encoded else 0):
        ids = encoded[group % len(encoded)]
        new = max(0, min(most_new(config), limit - len(ids)))
        for _ in range(config.sampler.n):
            rows.append(StepSequence(ids + random.integers(0, policy.vocab_size, new).tolist(), new, group))
    return rows


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


def seconds(
    phase: Phase,
    policy: Policy,
    reference: Policy | None,
    step: Work,
    budget: float,
    say: Callable[[str], None],
) -> tuple[dict[str, float | None], Rates | None]:
    """Of each part of a step, and what a pass costs. None is unknown.

    `budget`: seconds that the measurements take, about. `say` gets what is being measured.
    """
    config, needs = phase.config, phase.needs
    parts: dict[str, float | None] = {"sampling": None, "reference": None, "training": None, "update": None}
    if not step.rows:
        if not unknown_sampling(config):
            parts["sampling"] = 0.0
        return parts, None
    limit = budget / 10  # about as many passes are timed, and sampling may take three of them
    say("measuring passes of a step")
    rate = rates(policy, reference, step.passes[0], wanted_streams(needs), limit)
    if not unknown_sampling(config):
        say("measuring sampling")
        row = step.rows[0]
        seconds_per_token = rate.scoring * operations(policy, [row]) / len(row.tokens)
        tokens = int(3 * limit / seconds_per_token)
        parts["sampling"] = _sampling(config, policy, step.fresh, tokens) if step.fresh else 0.0
    count = operations(policy, step.rows)
    scored = operations(policy, step.fresh) if config.evaluate.beta is not None else 0.0
    if REF_LOGP in needs:
        scored = count
    parts["reference"] = 0.0 if config.policy.cache_reference else scored * rate.reference
    scoring = rate.scoring * count
    passes = rate.training * count + (scoring if step.twice else 0.0)
    parts["training"] = config.train.updates * passes + scoring * len(provided_by("draw", needs))
    parts["update"] = config.train.updates * update(policy, config.train, limit)
    return parts, rate


def unknown_sampling(config: RunConfig) -> str:
    """Why the time of sampling can't be measured here; empty where it can."""
    reasons = {
        "other processes sample": config.source.kind == "elsewhere",
        "a server samples": "shares_weights" not in capabilities(config.engine.kind),
        "an environment takes its own time": config.environment is not None,
        "a draft model's accepted share is unknown": config.sampler.draft is not None,
        "groups are completed": bool(config.data.complete_groups),
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds and config.data.samples)


def _sampling(config: RunConfig, policy: Policy, rows: Sequence[StepSequence], tokens: int) -> float | None:
    contexts: dict[int, list[int]] = {}  # one list for all responses to a prompt
    for row in rows:
        contexts.setdefault(row.group, row.tokens[: len(row.tokens) - row.learned])
    new, batch = max(row.learned for row in rows), min(config.sampler.batch, len(rows))
    engine = embedded(policy, fused=config.engine.fused)
    batch_contexts = [contexts[row.group] for row in rows[:batch]]
    time = decoding(engine, batch_contexts, new, config.sampler, policy.device, tokens)
    return None if time is None else -(-len(rows) // batch) * time
