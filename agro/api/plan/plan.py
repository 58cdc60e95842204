"""What a run would do: steps, samples, tokens, memory, time (`agro train --dry-run`).

Everything is loaded and checked as for the run, so that the same settings are refused. Counts are exact,
except those of tokens, which are upper bounds. Time and memory of a step are predicted, see
`agro.api.plan.cost` and `agro.api.plan.memory`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from agro.api.plan.cost import Work, most_new, seconds, unknown_sampling, work
from agro.api.plan.memory import memory_by_purpose, peak, resident
from agro.api.plan.probes import Rates
from agro.config import RunConfig
from agro.io.numbers import UNKNOWN, count, duration, size
from agro.models.policy import Policy
from agro.store import Store
from agro.store.draw_rules import At, pick_pairs
from agro.store.queries import chosen
from agro.train.check_objective import samples_kl
from agro.train.phases import Phase
from agro.train.trainable import pairs_among
from agro.types import Prompt

PROBING = 12.0  # seconds of all measurements, about; loading and checking come on top


def phase_counts(phase: Phase, per_group: float | None, heldout: int) -> dict[str, Any]:
    """What one phase samples and trains on. A number that is known only later is None.

    Args:
        phase: a run's first phase evaluates before its first step too.
        per_group: mean responses that are drawn from a stored group.
        heldout: held-out prompts.
    """
    config = phase.config
    train, sampler = config.train, config.sampler
    shares = [phase.stored_groups(step) for step in range(phase.steps)]
    stored = sum(shares)
    fresh = phase.steps * train.groups - stored
    joining = config.data.complete_groups or 0
    sampled = fresh * sampler.n + stored * joining
    trained = None
    if per_group is not None or not stored:
        trained = round(sampled + stored * (per_group or 0))
    evaluations = _evaluations(phase, at_start=phase.begins == 0) if heldout else 0
    return {
        "objective": config.objective.name,
        "steps": phase.steps,
        "updates": phase.steps * train.updates,
        "groups_per_step": train.groups,
        # Fresh and stored responses to one prompt are one group.
        "groups_per_step_at_least": min((max(n, train.groups - n) for n in shares), default=train.groups),
        "fresh_groups": fresh,
        "stored_groups": stored,
        "responses_sampled": sampled,
        "tokens_sampled_at_most": sampled * most_new(config),
        "responses_trained": trained,
        "evaluations": evaluations,
        "responses_evaluated": evaluations * heldout * config.evaluate.n,
    }


def _evaluations(phase: Phase, *, at_start: bool) -> int:
    """After every so many steps, at the end, and before the first step where `at_start` says so."""
    every = phase.config.evaluate.every
    between = len(range(every, phase.steps, every)) if every else 0
    return at_start + between + 1


def _stored_responses(phase: Phase, store: Store | None) -> float | None:
    """Mean responses that are drawn from a stored group."""
    config = phase.config
    if store is None or not config.data.draws_stored:
        return None
    rule = phase.rule(1)
    sizes: list[int] = []
    if rule.pairs:
        judged = pairs_among(store.survey.summaries(**chosen(rule.data)), phase.needs, store)
        for preferences in judged.values():
            pairs = [(p.winner, p.loser) for p in preferences]
            sizes.append(len(pick_pairs(pairs, rule, At("", 0, 0, 0), "")))
    else:
        for group in store.groups(**chosen(rule.data)):
            size = group.scored if rule.scored_only else group.size
            if size >= rule.min_group:
                sizes.append(min(size, rule.data.group_size or size))
    return sum(sizes) / len(sizes) if sizes else None


def plan(
    config: RunConfig,
    policy: Policy,
    reference: Policy | None,
    prompts: Sequence[Prompt],
    eval_prompts: Sequence[Prompt],
    store: Store | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """A JSON document: phases, totals, memory in bytes, and an upper bound of the seconds.

    `say` gets what is being measured.
    """
    loaded = resident(policy.device)
    load, began, cpu = _load_average(), time.perf_counter(), time.process_time()
    phases = []
    every = Phase.all(config)
    for phase in every:
        say_of = lambda text, name=phase.name: say(f"{name}: {text}")  # noqa: E731
        measure = partial(seconds, budget=PROBING / len(every), say=say_of)
        phases.append(_plan_phase(phase, policy, reference, (prompts, eval_prompts), store, loaded, measure))
    times = ("seconds_sampling_at_most", "seconds_training_at_most")
    return {
        "model": policy.name,
        "device": str(policy.device),
        "parameters": sum(p.numel() for p in policy.model.parameters()),
        "parameters_trained": sum(w.numel() for w in policy.weights().values()),
        "prompts": len(prompts),
        "eval_prompts": len(eval_prompts),
        "phases": phases,
        "measured": {
            "seconds": time.perf_counter() - began,
            "cpu_seconds": time.process_time() - cpu,
            "threads": torch.get_num_threads(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "load_before": load,
        },
        "seconds_at_most": sum(entry.get(key, 0.0) for entry in phases for key in times),
    }


def _load_average() -> float | None:
    """Processes that ran or waited for a core in the last minute, on average; None where it is unknown."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def _plan_phase(
    phase: Phase,
    policy: Policy,
    reference: Policy | None,
    prompts: tuple[Sequence[Prompt], Sequence[Prompt]],
    store: Store | None,
    loaded: int | None,
    measure: Callable[..., tuple[dict[str, float | None], Rates | None]],
) -> dict[str, Any]:
    """`prompts`: to train on, and held-out ones. `loaded`: bytes that are allocated before any step.

    `measure`: `agro.api.plan.cost.seconds`.
    """
    config = phase.config
    per_group = _stored_responses(phase, store)
    counts = phase_counts(phase, per_group, len(prompts[1]))
    if samples_kl(config) and reference is not None:  # responses for the KL alone, see `agro.train.monitors`
        evaluations = _evaluations(phase, at_start=phase.begins == 0 and config.policy.reference == "model")
        responses = evaluations * config.evaluate.kl_samples
        counts |= {"evaluations": evaluations, "responses_evaluated": responses}
    step = work(phase, policy, prompts[0], store, per_group)
    policy.checkpoint_gradients(config.train.gradient_checkpointing)
    phase_reference = reference if phase.reads_reference else None
    parts, rate = measure(phase, policy, phase_reference, step)
    memory = memory_by_purpose(policy, reference, config, step, rate)
    return {
        "phase": phase.name,
        **counts,
        "longest_sequence": step.width,
        "step_seconds": parts,
        "step_unknown": unknown_sampling(config),
        **_totals(phase, counts, parts, step),
        "memory": memory,
        "peak": peak(memory, loaded, len(step.passes), heap=policy.device.type == "cpu"),
    }


def _totals(
    phase: Phase, counts: dict[str, Any], parts: dict[str, float | None], step: Work
) -> dict[str, float | None]:
    """Upper bounds of the seconds of a phase, as far as they are known, and tokens per second."""
    sampled, trained = sum(row.learned for row in step.fresh), sum(len(row.tokens) for row in step.rows)
    computing = [parts[name] for name in ("reference", "training", "update")]
    training = None if None in computing else sum(filter(None, computing))
    totals: dict[str, float | None] = {"sampled_tokens_per_second": None, "trained_tokens_per_second": None}
    if parts["sampling"]:
        totals["sampled_tokens_per_second"] = speed = sampled / parts["sampling"]
        evaluated = counts["responses_evaluated"] * most_new(phase.config)
        totals["seconds_sampling_at_most"] = (counts["tokens_sampled_at_most"] + evaluated) / speed
    if training and counts["responses_trained"] is not None:
        totals["trained_tokens_per_second"] = trained * phase.config.train.updates / training
        totals["seconds_training_at_most"] = phase.steps * training
    return totals


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
    lines.append(
        f"about {time_left} of computation, if every response has the maximal length; rewards, drawing and "
        "writing come on top"
    )
    lines += _measured_lines(plan["measured"])
    return "\n".join(lines)


def _measured_lines(m: dict[str, Any]) -> list[str]:
    """How the times were measured, and whether other programs prolonged them."""
    took = f"measured in {duration(m['seconds'])}, with {duration(m['cpu_seconds'])} of CPU time"
    lines = [f"{took}, on {m['threads']} of {m['cores']} cores"]
    load = m["load_before"]
    if load is not None and load - 1 + m["threads"] > m["cores"]:
        # One thread's times are of the CPU, see `probes.read_clock`.
        effect = "beside them the run takes longer"
        if m["threads"] > 1:
            effect = "beside them the run takes this long, and less alone"
        lines.append(
            f"note: other programs use the cores (load average {load:.1f} before the measurement, of which "
            f"about 1 is this command's): {effect}"
        )
    return lines


def _phase_lines(p: dict[str, Any]) -> list[str]:
    trained, peak = (
        "as many as the store will have",
        "unknown: the process's own, or the step's sequences are",
    )
    if p["responses_trained"] is not None:
        trained = count(p["responses_trained"])
    if p["peak"] is not None:
        peak = f"{size(p['peak'])}, with the process's own"
    memory = [f"{key.replace('_', ' ')} {size(n)}" for key, n in p["memory"].items() if n]
    known = {name: p[f"{name}_tokens_per_second"] for name in ("sampled", "trained")}
    speeds = [f"{name} {count(speed)} tokens/s" for name, speed in known.items() if speed]
    merged = ""
    if p["groups_per_step_at_least"] < p["groups_per_step"]:
        merged = (
            f", {p['groups_per_step_at_least']} to {p['groups_per_step']} groups a step: a prompt that is "
            "both sampled and drawn is one group"
        )
    return [
        f"{p['phase']}: {p['objective']}, {count(p['steps'])} steps, {count(p['updates'])} updates{merged}",
        f"  sampled: {count(p['responses_sampled'])} responses to {count(p['fresh_groups'])} prompts, "
        f"at most {count(p['tokens_sampled_at_most'])} tokens",
        f"  from the store: {count(p['stored_groups'])} groups; trained on: {trained} responses "
        f"of up to {count(p['longest_sequence'])} tokens",
        f"  held-out: {p['evaluations']} evaluations, {count(p['responses_evaluated'])} responses",
        f"  speed on this machine: {', '.join(speeds) or UNKNOWN}",
        _step_line(p),
        f"  memory: {', '.join(memory)}",
        f"  peak of all memory: {peak}",
    ]


def _step_line(p: dict[str, Any]) -> str:
    """The time of a step and of its parts."""
    measured = {name: part for name, part in p["step_seconds"].items() if part}
    listed = ", ".join(f"{name} {duration(part)}" for name, part in measured.items())
    line = f"  a step: {duration(sum(measured.values()))} at the maximal lengths ({listed}), without rewards"
    missing = [name for name, part in p["step_seconds"].items() if part is None]
    if missing:
        reason = f" ({p['step_unknown']})" if p["step_unknown"] else ""
        line += f"; unknown: {', '.join(missing)}{reason}"
    return line
