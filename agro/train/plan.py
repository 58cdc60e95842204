"""What a run would do: steps, samples, tokens, memory, time (`agro train --dry-run`).

Everything is loaded and checked as for the run, so that the same settings are refused. Counts are exact,
except those of tokens, which are upper bounds. Time is extrapolated from one short decoding and one
micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import torch

from agro.config import RunConfig
from agro.numbers import count, duration, size
from agro.objectives import get
from agro.policy import InvalidSample, Policy
from agro.rollout import Rollout
from agro.rollout.load import embedded
from agro.store import Store
from agro.store.draw_rules import At, pick_pairs
from agro.store.queries import chosen
from agro.tiles import TILE
from agro.train.check import reads_reference
from agro.train.check_followed import samples_kl
from agro.train.micro import MicroBatch
from agro.train.phases import Phase
from agro.train.trainable import pairs_among
from agro.types import Prompt

PROBED = 16  # tokens decoded to measure the speed
INSPECTED = 256  # prompts and stored samples, for the longest sequence


def phase_counts(phase: Phase, store: Store | None, heldout: int) -> dict[str, Any]:
    """What one phase samples and trains on. A number that is known only later is None.

    Args:
        phase: a run's first phase evaluates before its first step too.
        store: the store that the phase draws from.
        heldout: held-out prompts.
    """
    config = phase.config
    train, sampler, every = config.train, config.sampler, config.evaluate.every
    stored = sum(phase.stored_groups(at) for at in range(phase.steps))
    fresh = phase.steps * train.groups - stored
    joining = config.data.complete_groups or 0
    sampled = fresh * sampler.n + stored * joining
    per_group = _stored_responses(phase, store)
    trained = None
    if per_group is not None or not stored:
        trained = round(sampled + stored * (per_group or 0))
    evaluations = 0
    if heldout:
        evaluations = 1 + (phase.begins == 0)
        if every:
            evaluations += len(range(every, phase.steps, every))
    return {
        "objective": config.objective.name,
        "steps": phase.steps,
        "updates": phase.steps * train.updates,
        "fresh_groups": fresh,
        "stored_groups": stored,
        "responses_sampled": sampled,
        "tokens_sampled_at_most": sampled * _most_new(config),
        "responses_trained": trained,
        "evaluations": evaluations,
        "responses_evaluated": evaluations * heldout * config.evaluate.n,
    }


def _kl_counts(phase: Phase) -> dict[str, int]:
    """The evaluations of a phase that samples responses for the KL alone, see `agro.train.monitors`."""
    rule, steps = phase.config.evaluate, phase.ends - phase.begins
    evaluations = 1
    if rule.every:
        evaluations += len(range(rule.every, steps, rule.every))
    if phase.begins == 0 and phase.config.policy.reference == "model":
        evaluations += 1
    return {"evaluations": evaluations, "responses_evaluated": evaluations * rule.kl_samples}


def _most_new(config: RunConfig) -> int:
    """An upper bound of the tokens in a response that the policy samples."""
    return config.sampler.max_new * (config.environment.max_turns if config.environment else 1)


def _stored_responses(phase: Phase, store: Store | None) -> float | None:
    """Mean responses that are drawn from a stored group."""
    config = phase.config
    if store is None or not config.data.draws_stored:
        return None
    rule = phase.rule(1)
    sizes: list[int] = []
    if rule.pairs:
        needs = get(config.objective.name).needed(config.objective.options)
        judged = pairs_among(store.known(**chosen(rule.data)), needs, store)
        for of_group in judged.values():
            pairs = [(p.winner, p.loser) for p in of_group]
            sizes.append(len(pick_pairs(pairs, rule, At("", 0, 0, 0), "")))
    else:
        for group in store.groups(**chosen(rule.data)):
            size = group.scored if rule.scored_only else group.size
            if size >= rule.min_group:
                sizes.append(min(size, rule.data.group_size or size))
    return sum(sizes) / len(sizes) if sizes else None


def longest(policy: Policy, config: RunConfig, prompts: Sequence[Prompt], store: Store | None) -> int:
    """Tokens of the longest sequence among the first prompts and stored samples, without observations."""
    lengths = [2]
    if config.data.samples_fresh:
        lengths += [len(policy.encode_prompt(p.text)) + _most_new(config) for p in prompts[:INSPECTED]]
    if config.data.draws_stored and store is not None:
        for sample in islice(store.samples(**chosen(config.data)), INSPECTED):
            with suppress(InvalidSample):  # the run drops it as well
                tokens = policy.encode(sample, config.train.max_length).tokens
                assert tokens is not None
                lengths.append(len(tokens))
    return min(max(lengths), policy.context, config.train.max_length or policy.context)


def memory(policy: Policy, reference: Policy | None, config: RunConfig, width: int) -> dict[str, int]:
    """Bytes by purpose, for sequences of `width` tokens, without activations, which depend on the kernels."""
    trained = sum(w.nbytes for w in policy.trained().values())
    average = 0
    if config.train.weights_average is not None:
        average = sum(w.numel() * max(w.itemsize, 4) for w in policy.trained().values())
    c = policy.model.config.get_text_config()
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    per_head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    per_token = 2 * c.num_hidden_layers * heads * per_head * policy.dtype.itemsize
    return {
        "weights": sum(p.nbytes for p in policy.model.parameters()),
        "float32_weights": 0 if policy.masters is None else trained,
        "gradients": trained,
        "optimizer": 2 * trained,
        "average": average,
        "reference": 0 if reference is None else sum(w.nbytes for w in reference.weights().values()),
        "keys_and_values": _sampling_batch(config) * width * per_token,
        "logits": 4 * config.policy.chunk * min(TILE, policy.vocab_size) * 4,
    }


def _sampling_batch(config: RunConfig) -> int:
    """Responses that are sampled at once; 0 for a phase that only draws from the store."""
    if not config.data.samples:
        return 0
    return min(config.sampler.batch, config.train.groups * config.sampler.n)


def speeds(
    policy: Policy, config: RunConfig, prompts: Sequence[Prompt], width: int
) -> dict[str, float | None]:
    """Tokens per second of sampling a full batch, and of training on a micro-batch of `width` tokens."""
    sampled = None
    if prompts and config.data.samples_fresh:
        sampled = _sampling_speed(policy, config, prompts)
    return {
        "sampled_tokens_per_second": sampled,
        "trained_tokens_per_second": _training_speed(policy, config, width),
    }


def _sampling_speed(policy: Policy, config: RunConfig, prompts: Sequence[Prompt]) -> float:
    batch = _sampling_batch(config)
    requests = [Prompt(prompts[i % len(prompts)].text, id=str(i)) for i in range(batch)]
    changes = {"max_new": min(PROBED, config.sampler.max_new), "batch": batch, "stop": ()}
    rollout = Rollout(policy.encoder, embedded(policy, fused=config.engine.fused))
    start = time.perf_counter()
    samples = list(rollout.sample(requests, 1, config.sampler.model_copy(update=changes)))
    seconds = time.perf_counter() - start
    return sum(int(s.action.sum()) for s in samples if s.action is not None) / seconds


def _training_speed(policy: Policy, config: RunConfig, width: int) -> float:
    micro = MicroBatch.of(config.train)
    rows = 1
    while micro.holds(rows + 1, width) and rows < config.train.groups * config.sampler.n:
        rows += 1
    tokens = torch.randint(0, policy.vocab_size, (rows, width), generator=torch.Generator().manual_seed(0))
    lengths = torch.full((rows,), width)
    mask = (torch.arange(width) > 0).expand(rows, width)
    policy.checkpoint_gradients(config.train.gradient_checkpointing)
    start = time.perf_counter()
    policy.streams(tokens, lengths, mask)["logp"].nan_to_num().sum().backward()
    if reads_reference(config):
        with torch.no_grad():
            policy.streams(tokens, lengths, mask)
    if policy.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    policy.model.zero_grad(set_to_none=True)
    return rows * width / seconds


def plan(
    config: RunConfig,
    policy: Policy,
    reference: Policy | None,
    prompts: Sequence[Prompt],
    eval_prompts: Sequence[Prompt],
    store: Store | None,
) -> dict[str, Any]:
    """A JSON document: phases, totals, memory in bytes, and an upper bound of the seconds."""
    phases: list[dict[str, Any]] = []
    for phase in Phase.all(config):
        part = phase.config
        width = longest(policy, part, prompts, store)
        counts = phase_counts(phase, store, len(eval_prompts))
        if samples_kl(part) and reference is not None:
            counts |= _kl_counts(phase)
        speed = speeds(policy, part, prompts, width)
        phases.append(
            {
                "phase": phase.name,
                **counts,
                "longest_sequence": width,
                **_seconds(part, counts, speed, width),
                **speed,
                "memory": memory(policy, reference, part, width),
            }
        )
    times = ("seconds_sampling_at_most", "seconds_training_at_most")
    return {
        "model": policy.name,
        "device": str(policy.device),
        "parameters": sum(p.numel() for p in policy.model.parameters()),
        "parameters_trained": sum(w.numel() for w in policy.weights().values()),
        "prompts": len(prompts),
        "eval_prompts": len(eval_prompts),
        "phases": phases,
        "seconds_at_most": sum(entry.get(key, 0.0) for entry in phases for key in times),
    }


def _seconds(
    config: RunConfig, counts: dict[str, Any], speed: dict[str, float | None], width: int
) -> dict[str, float]:
    """Upper bounds of the seconds of a phase, as far as they are known."""
    bounds: dict[str, float] = {}
    sampling, training = speed["sampled_tokens_per_second"], speed["trained_tokens_per_second"]
    if sampling:
        tokens = counts["responses_evaluated"] * _most_new(config) + counts["tokens_sampled_at_most"]
        bounds["seconds_sampling_at_most"] = tokens / sampling
    if training and counts["responses_trained"] is not None:
        tokens = counts["responses_trained"] * config.train.updates * width
        bounds["seconds_training_at_most"] = tokens / training
    return bounds


def describe(plan: dict[str, Any]) -> str:
    """The plan as text."""
    parameters, trained = count(plan["parameters"]), count(plan["parameters_trained"])
    lines = [
        *(f"note: {note}" for note in plan["notes"]),
        f"{plan['model']} on {plan['device']}: {parameters} parameters, {trained} of them trained",
        f"{count(plan['prompts'])} prompts, {count(plan['eval_prompts'])} held-out",
    ]
    for phase in plan["phases"]:
        lines += _phase_lines(phase)
    time_left = duration(plan["seconds_at_most"])
    lines.append(f"at most about {time_left}, if every response has the maximal length, without rewards")
    return "\n".join(lines)


def _phase_lines(p: dict[str, Any]) -> list[str]:
    trained = "as many as the store will have"
    if p["responses_trained"] is not None:
        trained = count(p["responses_trained"])
    memory = [f"{key.replace('_', ' ')} {size(n)}" for key, n in p["memory"].items() if n]
    speeds = []
    for name in ("sampled", "trained"):
        if p[f"{name}_tokens_per_second"]:
            speeds.append(f"{name} {count(p[f'{name}_tokens_per_second'])} tokens/s")
    return [
        f"{p['phase']}: {p['objective']}, {count(p['steps'])} steps, {count(p['updates'])} updates",
        f"  sampled: {count(p['responses_sampled'])} responses to {count(p['fresh_groups'])} prompts, "
        f"at most {count(p['tokens_sampled_at_most'])} tokens",
        f"  from the store: {count(p['stored_groups'])} groups; trained on: {trained} responses "
        f"of up to {count(p['longest_sequence'])} tokens",
        f"  held-out: {p['evaluations']} evaluations, {count(p['responses_evaluated'])} responses",
        f"  memory without activations: {', '.join(memory)}; total {size(sum(p['memory'].values()))}",
        f"  speed on this machine: {', '.join(speeds)}",
    ]
