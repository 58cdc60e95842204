"""What a run would do, before it does it: steps, samples, tokens, memory, time (`agro train --dry-run`).

Everything is loaded and checked as for the run, which finds what would be refused. Counts are exact but for tokens,
which are at most so many; time is extrapolated from one short decoding and one micro-batch on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import torch

from agro.config import RunConfig
from agro.objectives import get
from agro.policy import Policy, Unusable
from agro.rollout import Rollout
from agro.rollout.load import embedded
from agro.store import Store
from agro.store.select import At, pick_pairs
from agro.train.check import reads_reference
from agro.train.micro import MicroBatch
from agro.train.phases import Phase
from agro.train.trainable import pairs_among
from agro.types import Prompt

PROBED = 16  # tokens decoded to see how fast it goes
LOOKED_AT = 256  # prompts and stored samples, for the longest sequence


def phase_counts(phase: Phase, store: Store | None, evaluated: int) -> dict[str, Any]:
    """What one phase samples and trains on. `evaluated`: held-out prompts, which a run's first phase asks before it begins too.

    A number that only time tells is None.
    """
    config = phase.config
    train, sampler = config.train, config.sampler
    stored = sum(phase.stored_groups(at) for at in range(train.steps))
    fresh = train.steps * train.groups - stored
    rows = _stored_rows(phase, store)
    every = config.evaluate.every
    evaluations = (
        (phase.begins == 0) + 1 + (len(range(every, train.steps, every)) if every else 0) if evaluated else 0
    )
    return {
        "objective": config.objective.name,
        "steps": train.steps,
        "updates": train.steps * train.updates,
        "fresh_groups": fresh,
        "stored_groups": stored,
        "responses_sampled": fresh * sampler.n,
        "tokens_sampled_at_most": fresh * sampler.n * _most_new(config),
        "responses_trained": None
        if stored and rows is None
        else round(fresh * sampler.n + stored * (rows or 0)),
        "evaluations": evaluations,
        "responses_evaluated": evaluations * evaluated * config.evaluate.n,
    }


def _most_new(config: RunConfig) -> int:
    """Tokens of a response at most that the policy writes itself."""
    return config.sampler.max_new * (config.environment.max_turns if config.environment else 1)


def _stored_rows(phase: Phase, store: Store | None) -> float | None:
    """Mean responses of a stored group that a draw takes."""
    config = phase.config
    if store is None or not config.data.replay:
        return None
    rule = phase.rule(1)
    if rule.pairs:
        needs = get(config.objective.name).needed(config.objective.options)
        judged = pairs_among(store.known(roles=rule.roles, sources=rule.sources), needs, store)
        joined = ([(p.winner, p.loser) for p in of_group] for of_group in judged.values())
        sizes = [len(pick_pairs(pairs, rule, At("", 0, 0, 0), "")) for pairs in joined]
    else:
        sizes = [
            min(g.scored if rule.scored_only else g.size, rule.group_size or g.size)
            for g in store.groups(roles=rule.roles, sources=rule.sources)
            if (g.scored if rule.scored_only else g.size) >= rule.min_group
        ]
    return sum(sizes) / len(sizes) if sizes else None


def longest(policy: Policy, config: RunConfig, prompts: Sequence[Prompt], store: Store | None) -> int:
    """Tokens of the longest sequence, as far as the first prompts and stored samples show; without what an environment says."""
    found = [2]
    if config.data.replay < 1:
        found += [len(policy.encode_prompt(p.text)) + _most_new(config) for p in prompts[:LOOKED_AT]]
    if config.data.replay > 0 and store is not None:
        for sample in islice(store.samples(roles=config.data.roles, sources=config.data.sources), LOOKED_AT):
            with suppress(Unusable):  # it is left out of the run as well
                tokens = policy.encode(sample, config.train.max_length).tokens
                assert tokens is not None
                found.append(len(tokens))
    return min(max(found), policy.context, config.train.max_length or policy.context)


def memory(policy: Policy, reference: Policy | None, config: RunConfig, width: int) -> dict[str, int]:
    """Bytes by what takes them, for sequences of `width` tokens; activations are left out, which depend on the kernels."""
    everything = sum(p.nbytes for p in policy.model.parameters())
    trained = sum(w.nbytes for w in policy.weights().values())
    c = policy.model.config.get_text_config()
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    per_head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    batch = min(config.sampler.batch, config.train.groups * config.sampler.n) if config.data.replay < 1 else 0
    return {
        "weights": everything,
        "gradients": trained,
        "optimiser": 2 * trained,
        "reference": 0 if reference is None else sum(w.nbytes for w in reference.weights().values()),
        "keys_and_values": 2 * batch * width * c.num_hidden_layers * heads * per_head * policy.dtype.itemsize,
        "logits": 3 * config.policy.chunk * policy.vocab_size * 4,
    }


def speeds(
    policy: Policy, config: RunConfig, prompts: Sequence[Prompt], width: int
) -> dict[str, float | None]:
    """Tokens a second of a full batch that is sampled, and of a micro-batch of `width` tokens that is trained on."""
    sampled = None
    if prompts and config.data.replay < 1:
        batch = min(config.sampler.batch, config.train.groups * config.sampler.n)
        asked = [Prompt(prompts[i % len(prompts)].text, id=str(i)) for i in range(batch)]
        changes = {"max_new": min(PROBED, config.sampler.max_new), "batch": batch, "stop": ()}
        rollout = Rollout(policy.encoder, embedded(policy))
        began = time.perf_counter()
        found = list(rollout.sample(asked, 1, config.sampler.model_copy(update=changes)))
        sampled = sum(int(s.action.sum()) for s in found if s.action is not None) / (
            time.perf_counter() - began
        )
    micro = MicroBatch.of(config.train)
    rows = 1
    while micro.holds(rows + 1, width) and rows < config.train.groups * config.sampler.n:
        rows += 1
    tokens = torch.randint(0, policy.vocab_size, (rows, width), generator=torch.Generator().manual_seed(0))
    lengths, mask = torch.full((rows,), width), (torch.arange(width) > 0).expand(rows, width)
    policy.recompute = config.train.gradient_checkpointing
    began = time.perf_counter()
    out = policy.streams(tokens, lengths, mask)["logp"]
    out.nan_to_num().sum().backward()
    if reads_reference(config):
        with torch.no_grad():
            policy.streams(tokens, lengths, mask)
    if policy.device.type == "cuda":
        torch.cuda.synchronize()
    trained = rows * width / (time.perf_counter() - began)
    policy.model.zero_grad(set_to_none=True)
    return {"sampled_tokens_per_second": sampled, "trained_tokens_per_second": trained}


def plan(
    config: RunConfig,
    policy: Policy,
    reference: Policy | None,
    prompts: Sequence[Prompt],
    eval_prompts: Sequence[Prompt],
    store: Store | None,
) -> dict[str, Any]:
    """A JSON document: phases, totals, memory in bytes, and at most so many seconds."""
    phases: list[dict[str, Any]] = []
    seconds = 0.0
    for phase in Phase.all(config):
        part = phase.config
        width = longest(policy, part, prompts, store)
        counts = phase_counts(phase, store, len(eval_prompts))
        pace = speeds(policy, part, prompts, width)
        counts["longest_sequence"] = width
        if pace["sampled_tokens_per_second"]:
            at_most = counts["responses_evaluated"] * _most_new(part) + counts["tokens_sampled_at_most"]
            counts["seconds_sampling_at_most"] = at_most / pace["sampled_tokens_per_second"]
            seconds += counts["seconds_sampling_at_most"]
        if counts["responses_trained"] is not None:
            assert pace["trained_tokens_per_second"]
            tokens = counts["responses_trained"] * part.train.updates * width
            counts["seconds_training_at_most"] = tokens / pace["trained_tokens_per_second"]
            seconds += counts["seconds_training_at_most"]
        phases.append(
            {"phase": phase.name, **counts, **pace, "memory": memory(policy, reference, part, width)}
        )
    return {
        "model": policy.name,
        "device": str(policy.device),
        "parameters": sum(p.numel() for p in policy.model.parameters()),
        "parameters_trained": sum(w.numel() for w in policy.weights().values()),
        "prompts": len(prompts),
        "eval_prompts": len(eval_prompts),
        "phases": phases,
        "seconds_at_most": seconds,
    }


def describe(found: dict[str, Any]) -> str:
    """The plan as lines."""
    lines = [
        f"{found['model']} on {found['device']}: {found['parameters']:,} parameters, {found['parameters_trained']:,} of them trained",
        f"{found['prompts']:,} prompts, {found['eval_prompts']:,} held out",
    ]
    for p in found["phases"]:
        trained = (
            "as many as the store has by then"
            if p["responses_trained"] is None
            else f"{p['responses_trained']:,}"
        )
        lines += [
            f"{p['phase']}: {p['objective']}, {p['steps']:,} steps, {p['updates']:,} updates",
            f"  sampled: {p['responses_sampled']:,} responses to {p['fresh_groups']:,} prompts, at most {p['tokens_sampled_at_most']:,} tokens",
            f"  from the store: {p['stored_groups']:,} groups; trained on: {trained} responses of up to {p['longest_sequence']:,} tokens",
            f"  held out: {p['evaluations']} evaluations, {p['responses_evaluated']:,} responses",
            "  memory, activations left out: "
            + ", ".join(f"{k.replace('_', ' ')} {_bytes(v)}" for k, v in p["memory"].items() if v)
            + f"; together {_bytes(sum(p['memory'].values()))}",
            "  speed here: "
            + ", ".join(
                f"{k.split('_')[0]} {p[k]:,.0f} tokens/s"
                for k in ("sampled_tokens_per_second", "trained_tokens_per_second")
                if p[k]
            ),
        ]
    minutes = found["seconds_at_most"] / 60
    return "\n".join(
        [
            *lines,
            f"at most about {minutes:.1f} minutes, if every response were as long as it may be; rewards not counted",
        ]
    )


def _bytes(count: int) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000  # type: ignore[assignment]
    return f"{count:.3g} GB"
