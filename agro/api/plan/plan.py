"""What a run would do: steps, samples, tokens, memory, time (`agro train --dry-run`).

Everything is loaded and checked as for the run, so that the same settings are refused. Counts are exact,
except those of tokens, which are upper bounds. Time and memory of a step follow from some seconds of the
model's own work, see `agro.api.plan.measure` and `agro.api.plan.memory`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from agro.api.plan.measure import Rates, Work, measured, most_new, peak, step_seconds, unknown_sampling, work
from agro.config import RunConfig
from agro.io.numbers import UNKNOWN, count, duration, size
from agro.models.policy import Policy
from agro.models.pretrained import parameters
from agro.runs.progress import LONG
from agro.store import Store
from agro.store.draw_rules import At, pick_pairs
from agro.store.queries import chosen
from agro.train.check import samples_kl
from agro.train.phases import Phase
from agro.train.trainable import pairs_among
from agro.types import Prompt

MEASURING = 0.8  # seconds of each measurement of a run, about
ADAPTED = 100_000_000  # weights from which an adapter is chosen on a CPU


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


@dataclass
class Machine:
    """A loaded run, and what was measured of it on this machine."""

    policy: Policy
    reference: Policy | None
    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]
    store: Store | None
    loaded: int | None  # bytes that are allocated before any step
    load: float | None = field(default_factory=lambda: load_average())  # before the first measurement
    measured: dict[str, Rates | None] = field(default_factory=dict)  # by phase
    limit: float = MEASURING
    seconds: float = 0.0  # that the measurements took
    cpu_seconds: float = 0.0

    def rates(self, phase: Phase) -> Rates | None:
        """What a token of a step of the phase takes; measured once."""
        if phase.name not in self.measured:
            reference = self.reference if phase.reads_reference else None
            began, cpu = time.perf_counter(), time.process_time()
            rates = measured(phase, self.policy, reference, self.work(phase), self.limit)
            self.measured[phase.name] = rates
            self.seconds += time.perf_counter() - began
            self.cpu_seconds += time.process_time() - cpu
        return self.measured[phase.name]

    def work(self, phase: Phase) -> Work:
        responses = _stored_responses(phase, self.store)
        return work(phase, self.policy, self.prompts, self.store, responses)

    def forecast(self, phase: Phase) -> dict[str, Any]:
        """Counts, seconds and bytes of a phase."""
        rates = self.rates(phase)
        policy, reference, config = self.policy, self.reference, phase.config
        counts = phase_counts(phase, _stored_responses(phase, self.store), len(self.held_out))
        if samples_kl(config) and reference is not None:  # responses for the KL alone
            evaluations = _evaluations(
                phase, at_start=phase.begins == 0 and config.policy.reference == "model"
            )
            responses = evaluations * config.evaluate.kl_samples
            counts |= {"evaluations": evaluations, "responses_evaluated": responses}
        step = self.work(phase)
        policy.checkpoint_gradients(config.train.gradient_checkpointing)
        relative = 1.0 if reference is None else parameters(reference.model) / parameters(policy.model)
        parts = step_seconds(phase, policy, step, rates, relative)
        # Upper bounds of the seconds of a phase, as far as they are known, and tokens per second.
        sampled, trained = sum(row.learned for row in step.fresh), sum(len(row.tokens) for row in step.rows)
        computing = [parts[name] for name in ("reference", "training", "update")]
        training = None if None in computing else sum(filter(None, computing))
        totals: dict[str, float | None] = {
            "sampled_tokens_per_second": None,
            "trained_tokens_per_second": None,
        }
        if parts["sampling"]:
            totals["sampled_tokens_per_second"] = sampled / parts["sampling"]
            totals["seconds_sampling_at_most"] = phase.steps * parts["sampling"]
        if rates is not None and rates.sampling is not None:
            tokens = counts["responses_evaluated"] * most_new(phase.config)
            totals["seconds_evaluating_at_most"] = tokens * (rates.sampling + rates.scoring)
        if training and counts["responses_trained"] is not None:
            totals["trained_tokens_per_second"] = trained * phase.config.train.updates / training
            totals["seconds_training_at_most"] = phase.steps * training
        return {
            "phase": phase.name,
            **counts,
            "longest_sequence": step.width,
            "step_seconds": parts,
            "step_unknown": unknown_sampling(config),
            **totals,
            "peak": peak(policy, config, step, rates, self.loaded),
        }


def plan(config: RunConfig, machine: Machine) -> dict[str, Any]:
    """A JSON document: phases, totals, memory in bytes, and an upper bound of the seconds."""
    machine.limit = MEASURING / len(config.phase_names)
    phases = [machine.forecast(phase) for phase in Phase.all(config)]
    policy = machine.policy
    return {
        "model": policy.name,
        "device": str(policy.device),
        "parameters": parameters(policy.model),
        "parameters_trained": sum(w.numel() for w in policy.weights().values()),
        "prompts": len(machine.prompts),
        "eval_prompts": len(machine.held_out),
        "phases": phases,
        "measured": {
            "seconds": machine.seconds,
            "cpu_seconds": machine.cpu_seconds,
            "threads": torch.get_num_threads(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "load_before": machine.load,
        },
        "seconds_at_most": sum(map(seconds_of, phases)),
    }


def seconds_of(phase: dict[str, Any]) -> float:
    """Of a phase's forecast, as far as they are known."""
    names = ("seconds_sampling_at_most", "seconds_training_at_most", "seconds_evaluating_at_most")
    return float(sum(phase.get(name) or 0.0 for name in names))


def load_average() -> float | None:
    """Processes that ran or waited for a core in the last minute, on average; None where it is unknown."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def describe(plan: dict[str, Any]) -> str:
    """The plan as text."""
    weights, trained = count(plan["parameters"]), count(plan["parameters_trained"])
    lines = [
        *(f"note: {note}" for note in plan["notes"]),
        f"{plan['model']} on {plan['device']}: {weights} parameters, {trained} of them trained",
        f"{count(plan['prompts'])} prompts, {count(plan['eval_prompts'])} held-out",
    ]
    for phase in plan["phases"]:
        lines += _phase_lines(phase)
    lines += _measured_lines(plan["measured"])
    return "\n".join([*lines, time_line(plan)])


def time_line(plan: dict[str, Any]) -> str:
    """The time of the run and, of a long one, what makes it shorter."""
    seconds = plan["seconds_at_most"]
    text = (
        f"about {duration(seconds)} of computation on this machine, if every response has the maximal "
        "length; rewards, drawing and writing come on top"
    )
    if seconds <= LONG:
        return text
    return f"{text}. {shorter(plan)}"


def shorter(plan: dict[str, Any]) -> str:
    """What makes a run shorter, the settings that cost most first."""
    parts: dict[str, float] = {}
    for phase in plan["phases"]:
        for name, seconds in phase["step_seconds"].items():
            parts[name] = parts.get(name, 0.0) + phase["steps"] * (seconds or 0.0)
    samples = any(phase["fresh_groups"] for phase in plan["phases"])
    names = ["train.steps", "train.groups"]
    names = ["sampler.max_new", "sampler.n", *names] if samples else [*names, "data.group_size"]
    if plan["parameters"] == plan["parameters_trained"] >= ADAPTED:
        names = ["an adapter (policy.lora.rank)", *names]
    return (
        f"Most of it is {max(parts, key=lambda name: parts[name])}. What to do: the same command with --fit "
        f'30min (fit="30min" in Python) chooses {", ".join(names)} for that time, and says them'
    )


def _measured_lines(m: dict[str, Any]) -> list[str]:
    """How the times were measured, and whether other programs prolonged them."""
    took = f"measured in {duration(m['seconds'])}, with {duration(m['cpu_seconds'])} of CPU time"
    lines = [f"{took}, on {m['threads']} of {m['cores']} cores"]
    load = m["load_before"]
    if load is not None and load - 1 + m["threads"] > m["cores"]:
        several = " and more so on several threads, which wait for each other" if m["threads"] > 1 else ""
        lines.append(
            f"note: other programs use the cores (load average {load:.1f} before the measurement, of which "
            f"about 1 is this command's): beside them the run takes longer{several}"
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
    known = {name: p[f"{name}_tokens_per_second"] for name in ("sampled", "trained")}
    speeds = [f"{name} {count(speed)} tokens/s" for name, speed in known.items() if speed]
    merged = ""
    if p["groups_per_step_at_least"] < p["groups_per_step"]:
        merged = (
            f", {p['groups_per_step_at_least']} to {p['groups_per_step']} groups a step: a prompt that is "
            "both sampled and drawn is one group"
        )
    # The time of a step and of its parts.
    measured = {name: part for name, part in p["step_seconds"].items() if part}
    listed = ", ".join(f"{name} {duration(part)}" for name, part in measured.items())
    line = f"  a step: {duration(sum(measured.values()))} at the maximal lengths ({listed}), without rewards"
    missing = [name for name, part in p["step_seconds"].items() if part is None]
    if missing:
        reason = f" ({p['step_unknown']})" if p["step_unknown"] else ""
        line += f"; unknown: {', '.join(missing)}{reason}"
    return [
        f"{p['phase']}: {p['objective']}, {count(p['steps'])} steps, {count(p['updates'])} updates{merged}",
        f"  sampled: {count(p['responses_sampled'])} responses to {count(p['fresh_groups'])} prompts, "
        f"at most {count(p['tokens_sampled_at_most'])} tokens",
        f"  from the store: {count(p['stored_groups'])} groups; trained on: {trained} responses "
        f"of up to {count(p['longest_sequence'])} tokens",
        f"  held-out: {p['evaluations']} evaluations, {count(p['responses_evaluated'])} responses",
        f"  speed on this machine: {', '.join(speeds) or UNKNOWN}",
        line,
        f"  peak of all memory: {peak}",
    ]
