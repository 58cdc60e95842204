"""Forecast a run: steps, samples, tokens, memory, time (`agro train --dry-run`).

Everything is loaded and checked as for the run, so that the same settings are refused. Counts are exact,
except for tokens, which are upper bounds. Part of a step is run and timed: a pass over some of its sequences,
and the decoding of some tokens in the middle of responses. Seconds are the measured time per token times the
number of tokens. Memory is what is allocated once all is loaded, plus the bytes that the pass saved per token
times the tokens of the largest pass (`agro.models.footprint`).
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from agro.config import DataConfig, RunConfig
from agro.io.numbers import count, duration, size
from agro.io.processes import cores
from agro.models.encoding import InvalidSample
from agro.models.footprint import Footprint, optimized, saved_for_backward
from agro.models.policy import Policy
from agro.models.pretrained import parameters
from agro.objectives.core import wanted_streams
from agro.objectives.needs import REF_LOGP, provided_by
from agro.rollout.engines import ENGINES, Request, capabilities
from agro.rollout.rollout import embedded
from agro.store import Store
from agro.store.draw_rules import At, pick_pairs
from agro.store.samples import chosen
from agro.train.check import unscored
from agro.train.phases import Phase, options_at
from agro.train.step import MicroBatch
from agro.train.trainable import drawn_groups, pairs_among, trained
from agro.types import Prompt

MEASURING = 0.8  # approximate seconds of each measurement of a run
LONG = 3600.0  # seconds; for a longer run, --fit is suggested
INSPECTED = 256  # prompts and stored samples whose lengths are measured
SHORT = 48  # tokens of the first pass, which decides how much of a step is timed
DECODED = 8  # tokens per response whose decoding is timed


class Row(NamedTuple):
    """A sequence of a step: a prompt that its group shares, then `learned` tokens with log-probs."""

    prompt: int
    learned: int
    group: int

    @property
    def length(self) -> int:
        return self.prompt + self.learned

    def last(self, count: int) -> Row:
        """Return its last `count` tokens, or all if it is shorter."""
        length = min(self.length, count)
        learned = min(self.learned, length - 1)
        return Row(length - learned, learned, self.group)


class PlannedStep(NamedTuple):
    """The fresh sequences of a step at maximal length, and the passes over all of its sequences."""

    fresh: list[Row]
    passes: list[list[Row]]
    twice: bool  # whether log-probs of all passes are needed before the first backward pass
    stored_size: float | None  # mean responses per stored group; None if unknown


class Rates(NamedTuple):
    """Seconds per token, and bytes per token that a pass saves. `sampling`: None if unknown."""

    training: float  # forward and backward
    scoring: float  # forward alone
    sampling: float | None  # at the step's decoding batch
    saved: float


@dataclass
class Machine:
    """A loaded run, and its measurements on this machine."""

    policy: Policy
    reference: Policy | None
    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]
    store: Store | None
    rates: dict[str, Rates | None] = field(default_factory=dict)  # by phase; None for a phase without steps
    measured: dict[str, Any] = field(default_factory=dict)  # the cost of `measure`
    loaded: int | None = None  # bytes allocated before any step, on Linux or the GPU

    def __post_init__(self) -> None:
        statm = Path("/proc/self/statm")
        if self.policy.device.type == "cuda":
            self.loaded = torch.cuda.memory_allocated(self.policy.device)
        elif statm.exists():
            self.loaded = int(statm.read_text().split()[1]) * 4096

    def measure(self, phases: Sequence[Phase]) -> None:
        """Measure the rates of all phases."""
        load, began, cpu = load_average(), time.perf_counter(), time.process_time()
        for phase in phases:
            reference = self.reference if phase.reads_reference else None
            step, limit = self.step(phase), MEASURING / len(phases)
            self.rates[phase.name] = measured(phase, self.policy, reference, step, limit)
        self.measured = {
            "seconds": time.perf_counter() - began,
            "cpu_seconds": time.process_time() - cpu,
            "threads": torch.get_num_threads(),
            "cores": cores(),
            "load_before": load,
        }

    def forecast(self, phase: Phase) -> dict[str, Any]:
        """Return counts, bytes, and upper bounds on the seconds of a phase, as far as they are known."""
        config, rates, step = phase.config, self.rates[phase.name], self.step(phase)
        counts, parts = self.counts(phase, step.stored_size), self.seconds(phase, step, rates)
        totals: dict[str, float] = {}
        if parts["sampling"]:
            totals["seconds_sampling_at_most"] = phase.steps * parts["sampling"]
        if rates is not None and rates.sampling is not None:
            tokens = counts["responses_evaluated"] * most_new(config)
            totals["seconds_evaluating_at_most"] = tokens * (rates.sampling + rates.scoring)
        if parts["training"] is not None and parts["reference"] is not None:
            totals["seconds_training_at_most"] = phase.steps * (parts["training"] + parts["reference"])
        return {
            "phase": phase.name,
            **counts,
            "longest_sequence": max((row.length for rows in step.passes for row in rows), default=2),
            "step_seconds": parts,
            "step_unknown": unknown_sampling(config),
            **totals,
            "seconds_at_most": sum(totals.values()),  # as far as they are known
            "peak": self.peak(config, step, rates),
        }

    def counts(self, phase: Phase, stored_size: float | None) -> dict[str, Any]:
        """Count what one phase samples and trains on. A number that is known only later is None."""
        config, groups, every = phase.config, phase.config.train.groups, phase.config.evaluate.every
        shares = [phase.stored_groups(step) for step in range(phase.steps)]
        stored = sum(shares)
        fresh = phase.steps * groups - stored
        sampled = fresh * config.sampler.n + stored * (config.data.complete_groups or 0)
        trained = sampled if not stored else None
        if stored_size is not None:
            trained = round(sampled + stored * stored_size)
        answered = self.answering(config.data) * config.evaluate.n
        if not answered:
            answered = unscored(config, has_reference=self.reference is not None)
        evaluations = 0
        if answered:  # at every interval, at the end, and before the first step
            evaluations = (len(range(every, phase.steps, every)) if every else 0) + 1 + (phase.begins == 0)
        return {
            "objective": config.objective.name,
            "steps": phase.steps,
            "updates": phase.steps * config.train.updates,
            "groups_per_step": groups,
            # Fresh and stored responses to one prompt are one group.
            "groups_per_step_at_least": min((max(n, groups - n) for n in shares), default=groups),
            "fresh_groups": fresh,
            "stored_groups": stored,
            "responses_sampled": sampled,
            "tokens_sampled_at_most": sampled * most_new(config),
            "responses_trained": trained,
            "evaluations": evaluations,
            "responses_evaluated": evaluations * answered,
        }

    def answering(self, data: DataConfig) -> int:
        """Count the held-out prompts in use: `data` may allow fewer than were loaded."""
        if data.hold_out_most is None or data.eval_prompts is not None:
            return len(self.held_out)
        return min(len(self.held_out), data.hold_out_most)

    def _drawn(self, phase: Phase) -> float | None:
        """Return the mean number of responses drawn per stored group; None if unknown."""
        if self.store is None or not phase.config.data.draws_stored:
            return None
        rule = phase.rule(1)
        if rule.pairs:
            rows = trained(self.store.survey.each_summary(**chosen(rule.data)), rule.data, self.store)
            judged = pairs_among(rows, phase.needs, self.store)
            pairs_of = [[(p.winner, p.loser) for p in preferences] for preferences in judged.values()]
            sizes = [len(pick_pairs(pairs, rule, At("", 0, 0, 0), "")) for pairs in pairs_of]
        else:
            groups = drawn_groups(rule.data, self.store)
            stored = [group.scored if rule.scored_only else group.size for group in groups]
            sizes = [min(size, rule.data.group_size or size) for size in stored if size >= rule.min_group]
        return sum(sizes) / len(sizes) if sizes else None

    def step(self, phase: Phase) -> PlannedStep:
        """Plan the last step of a phase."""
        config, stored, stored_size = phase.config, phase.stored_groups(phase.steps - 1), self._drawn(phase)
        fresh = self._fresh(config, config.train.groups - stored)
        rows, micro = [*fresh, *self._stored(config, stored, stored_size)], MicroBatch.of(config.train)
        lengths = [row.length for row in rows]
        coupling = phase.entry.coupling(phase.resolved(options_at(config.objective.options, 0)))
        blocks: dict[int, list[int]] = {}  # rows that belong in one pass if they fit
        for i, row in enumerate(rows):
            blocks.setdefault({"row": i, "group": row.group, "step": 0}[coupling], []).append(i)
        together = micro.pack(list(blocks.values()), lengths)
        passes = together or micro.pack([[i] for i in range(len(rows))], lengths)
        assert passes is not None  # single rows always fit
        return PlannedStep(fresh, [[rows[i] for i in part] for part in passes], together is None, stored_size)

    @cached_property
    def prompt_lengths(self) -> list[int]:
        encoder = self.policy.encoder
        return sorted((len(encoder.prompt(p.text)) for p in self.prompts[:INSPECTED]), reverse=True)

    def _fresh(self, config: RunConfig, groups: int) -> list[Row]:
        """Plan fresh rows: the longest prompts, with responses of maximal length."""
        limit = min(self.policy.context, config.train.max_length or self.policy.context)
        rows: list[Row] = []
        for group, prompt in enumerate(islice(cycle(self.prompt_lengths), groups)):
            new = max(0, min(most_new(config), limit - prompt))
            rows += config.sampler.n * [Row(prompt, new, group)]
        return rows

    def _stored(self, config: RunConfig, groups: int, mean_size: float | None) -> list[Row]:
        if not groups:
            return []
        if mean_size is None:  # the run fills the store, with responses as long as fresh ones
            return [row._replace(group=-1 - row.group) for row in self._fresh(config, groups)]
        assert self.store is not None
        rows: list[Row] = []
        samples = trained(self.store.samples(**chosen(config.data)), config.data, self.store)
        for sample in islice(samples, INSPECTED):
            with suppress(InvalidSample):  # the run drops it as well
                for encoded in self.policy.encoder.rows(sample, config.train.max_length):
                    assert encoded.tokens is not None
                    assert encoded.mask is not None
                    learned = int(encoded.mask.sum())
                    rows.append(Row(len(encoded.tokens) - learned, learned, 0))
        each = max(1, round(mean_size))
        repeated = islice(cycle(rows), round(groups * mean_size))
        return [row._replace(group=-1 - i // each) for i, row in enumerate(repeated)]

    def seconds(self, phase: Phase, step: PlannedStep, rates: Rates | None) -> dict[str, float | None]:
        """Return the seconds of each part of a step; None: unknown."""
        config, needs, policy = phase.config, phase.needs, self.policy
        parts: dict[str, float | None] = {"sampling": None, "reference": None, "training": None}
        if not unknown_sampling(config) and not step.fresh:
            parts["sampling"] = 0.0
        if rates is None:
            return parts
        if step.fresh and rates.sampling is not None:
            prompts = {row.group: row.prompt for row in step.fresh}
            new = sum(row.learned for row in step.fresh)
            parts["sampling"] = sum(prompts.values()) * rates.scoring + new * rates.sampling
        computed = sum(positions(policy, rows) for rows in step.passes)
        if config.policy.cache_reference:
            parts["reference"] = 0.0
        elif not config.policy.reference_is_served:
            fresh = positions(policy, step.fresh) if config.evaluate.beta is not None else 0
            scored, larger = computed if REF_LOGP in needs else fresh, 1.0
            if self.reference is not None:
                larger = parameters(self.reference.model) / parameters(policy.model)
            parts["reference"] = scored * rates.scoring * larger
        train = config.train
        forward = step.twice + len(provided_by("draw", needs)) + bool(train.gain_ratio or train.step_kl)
        if train.gradient_checkpointing:  # recomputes the layers' outputs
            forward += train.updates
        parts["training"] = computed * (train.updates * rates.training + forward * rates.scoring)
        return parts

    def peak(self, config: RunConfig, step: PlannedStep, rates: Rates | None) -> int | None:
        """Return the peak memory in bytes; None if a part is unknown."""
        if self.loaded is None or rates is None:
            return None
        from agro.rollout.engines.fused import is_fusable  # imports model code of transformers

        model, at_once, copied = self.policy.model, 0, list[Tensor]()
        if "shares_weights" in capabilities(config.engine.kind) and config.source.kind == "inline":
            at_once = min(config.sampler.batch, len(step.fresh))
        if at_once and config.engine.fused and is_fusable(self.policy):  # it packs copies of the weights
            copied += [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
        if at_once and config.source.lags:  # it samples with a copy of earlier weights
            copied += model.parameters()
        trained, text = self.policy.trained().values(), model.config.get_text_config()
        state = optimized(config.train, sum(w.numel() for w in trained), sum(w.nbytes for w in trained))
        footprint = Footprint(
            config,
            text,
            resting=self.loaded + sum(weights.nbytes for weights in copied) + state,
            saved=rates.saved / text.num_hidden_layers,
            on_cpu=self.policy.device.type == "cpu",
        )
        largest = max(positions(self.policy, rows) for rows in step.passes)
        longest = max((row.length for row in step.fresh), default=0)
        return int(footprint.peak(largest, at_once, longest))


def plan(config: RunConfig, machine: Machine) -> dict[str, Any]:
    """Return a JSON document: phases, totals, memory in bytes, and an upper bound on the seconds."""
    phases, policy = Phase.all(config), machine.policy
    if not machine.rates:
        machine.measure(phases)
    forecasts = [machine.forecast(phase) for phase in phases]
    return {
        "model": policy.name,
        "device": str(policy.device),
        "parameters": parameters(policy.model),
        "parameters_trained": sum(w.numel() for w in policy.weights().values()),
        "prompts": len(machine.prompts),
        "eval_prompts": machine.answering(config.data),
        "phases": forecasts,
        "measured": machine.measured,
        "seconds_at_most": sum(forecast["seconds_at_most"] for forecast in forecasts),
    }


def most_new(config: RunConfig) -> int:
    """Return an upper bound on the tokens that the policy samples per response."""
    return config.sampler.max_new * (config.environment.max_turns if config.environment else 1)


def unknown_sampling(config: RunConfig) -> str:
    """Say why the sampling time can't be measured here; empty if it can."""
    reasons = {
        "other processes sample": config.source.kind == "elsewhere",
        "a server samples": "shares_weights" not in capabilities(config.engine.kind),
        "an environment takes its own time": config.environment is not None,
        "another engine samples": config.engine.kind not in ENGINES,
        "groups are completed": bool(config.data.complete_groups),
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds and config.data.samples)


def measured(
    phase: Phase, policy: Policy, reference: Policy | None, step: PlannedStep, limit: float
) -> Rates | None:
    """Measure part of a step; None if it has no sequences. `limit`: approximate seconds per measurement.

    On a CPU seconds are CPU time per thread, which other programs don't prolong. Gradients are cleared.
    """
    policy.checkpoint_gradients(phase.config.train.gradient_checkpointing)  # refuses a model without it
    policy.recompute = False  # measure the bytes saved without recomputation
    if not step.passes:
        return None

    full_pass = partial(_pass, policy, wanted_streams(phase.needs), reference)
    short = step.passes[0][0].last(SHORT)
    full_pass([short.last(DECODED)])  # warm up
    rows = within(step.passes[0], int(3 * limit * SHORT / full_pass([short])))
    computed = positions(policy, rows)
    with saved_for_backward(policy.model) as saved:
        training = full_pass(rows) / computed
    with torch.no_grad():
        scoring = _pass(policy, ("logp",), None, rows) / computed
    sampling = None
    if step.fresh and not unknown_sampling(phase.config):
        sampling = _decoding(policy, phase.config, step.fresh, int(limit / scoring))
    return Rates(training, scoring, sampling, sum(saved.values()) / computed)


def within(rows: Sequence[Row], limit: int) -> list[Row]:
    """Return the first rows with at most `limit` tokens together; a first row that exceeds it is cut."""
    selected = [rows[0].last(max(SHORT, limit))]
    for row in rows[1:]:
        limit -= selected[-1].length
        if row.length > limit:
            break
        selected.append(row)
    return selected


def positions(policy: Policy, rows: Sequence[Row]) -> int:
    """Count the positions that a pass computes: a group's prompt once, if the policy packs."""
    if not policy.packs:
        return sum(row.length for row in rows)
    prompts = {row.group: row.prompt for row in rows}
    return sum(prompts.values()) + sum(row.learned for row in rows)


def _clock(device: torch.device) -> float:
    """Read a clock in seconds; on a CPU the process's CPU time per thread."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time() / torch.get_num_threads()


def _random_tokens(policy: Policy, *shape: int) -> Tensor:
    return torch.randint(policy.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def _pass(policy: Policy, want: Collection[str], reference: Policy | None, rows: Sequence[Row]) -> float:
    """Time a forward pass over sequences of random tokens, which share their group's prompt, and the backward
    pass if gradients are enabled."""
    began = _clock(policy.device)
    lengths = torch.tensor([row.length for row in rows])
    tokens = _random_tokens(policy, len(rows), int(lengths.max()))
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    prompt_row: dict[int, int] = {}  # by group, the row whose prompt the others share
    for i, row in enumerate(rows):
        tokens[i, : row.prompt] = tokens[prompt_row.setdefault(row.group, i), : row.prompt]
        mask[i, max(1, row.prompt) : row.length] = True
    streams = policy.streams(tokens, lengths, mask, want, reference)
    if torch.is_grad_enabled():
        torch.stack([s.nan_to_num().sum() for s in streams.values()]).sum().backward()
        policy.zero_grad()
    return max(_clock(policy.device) - began, 1e-6)


def _decoding(policy: Policy, config: RunConfig, fresh: Sequence[Row], tokens: int) -> float | None:
    """Measure seconds per token in the middle of responses, at the step's decoding batch; None if responses
    are too short.

    `tokens`: approximate limit of tokens to decode; a small limit reduces the batch.
    """
    longest = max(fresh, key=lambda row: row.length)
    context = _random_tokens(policy, max(1, longest.length - longest.learned // 2 - 1)).tolist()
    new = max(0, min(DECODED, longest.learned - 1))
    batch = min(config.sampler.batch, len(fresh), max(2, tokens // DECODED))
    engine = embedded(policy, fused=config.engine.fused)
    sampler = config.sampler.model_copy(update={"batch": batch + 1, "stop": ()})
    requests = [Request(0, context, 1), *(Request(1 + i, context, 1 + new) for i in range(batch))]
    finishes: list[tuple[int, float]] = []
    for done in engine.decode(deque(requests), sampler, 0):
        finishes.append((len(done.tokens), _clock(policy.device)))
    (early, begin), (late, end) = finishes[0], finishes[-1]
    return max(end - begin, 1e-9) / (late - early) / batch if late > early else None


def load_average() -> float | None:
    """Return the mean number of running or waiting processes in the last minute; None if unknown."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def describe(plan: dict[str, Any]) -> str:
    """Format the plan, with how the times were measured and whether other programs prolonged them."""
    weights, trained = count(plan["parameters"]), count(plan["parameters_trained"])
    m = plan["measured"]
    lines = [f"note: {note}" for note in plan["notes"]]
    lines += [
        f"{plan['model']} on {plan['device']}: {weights} parameters, {trained} of them trained",
        f"{count(plan['prompts'])} prompts, {count(plan['eval_prompts'])} held-out",
    ]
    for phase in plan["phases"]:
        lines += _phase_lines(phase)
    lines.append(
        f"measured in {duration(m['seconds'])}, with {duration(m['cpu_seconds'])} of CPU time, "
        f"on {m['threads']} of {m['cores']} cores"
    )
    if m["load_before"] is not None and m["load_before"] - 1 + m["threads"] > m["cores"]:
        lines.append(
            f"note: other programs use the cores (load average {m['load_before']:.1f} before the "
            "measurement, of which about 1 is this command's): next to them the run takes longer"
        )
    return "\n".join([*lines, time_line(plan)])


def time_line(plan: dict[str, Any]) -> str:
    """State the time of the run and, if it is long, how to shorten it."""
    seconds = plan["seconds_at_most"]
    text = (
        f"about {duration(seconds)} of computation on this machine, if every response has the maximal "
        "length; rewards, drawing and writing come on top"
    )
    if seconds <= LONG:
        return text
    return (
        f'{text}. What to do: the same command with --fit 30min (fit="30min" in Python) chooses settings for '
        "that time, such as an adapter, lengths, responses and steps, and reports them"
    )


def _phase_lines(p: dict[str, Any]) -> list[str]:
    groups, low, high = "", p["groups_per_step_at_least"], p["groups_per_step"]
    if low < high:
        groups = f", {low} to {high} groups per step: a prompt that is both sampled and drawn is one group"
    trained = "as many as the store will have"
    if p["responses_trained"] is not None:
        trained = count(p["responses_trained"])
    parts = {name: part for name, part in p["step_seconds"].items() if part}
    listed = ", ".join(f"{name} {duration(part)}" for name, part in parts.items())
    step = f"  per step: {duration(sum(parts.values()))} at the maximal lengths ({listed}), without rewards"
    missing = [name for name, part in p["step_seconds"].items() if part is None]
    if missing:
        reason = f" ({p['step_unknown']})" if p["step_unknown"] else ""
        step += f"; unknown: {', '.join(missing)}{reason}"
    memory = "unknown" if p["peak"] is None else f"{size(p['peak'])}, with the process's own"
    return [
        f"{p['phase']}: {p['objective']}, {count(p['steps'])} steps, {count(p['updates'])} updates{groups}",
        f"  sampled: {count(p['responses_sampled'])} responses to {count(p['fresh_groups'])} prompts, "
        f"at most {count(p['tokens_sampled_at_most'])} tokens",
        f"  from the store: {count(p['stored_groups'])} groups; trained on: {trained} responses "
        f"of up to {count(p['longest_sequence'])} tokens",
        f"  held-out: {p['evaluations']} evaluations, {count(p['responses_evaluated'])} responses",
        step,
        f"  peak of all memory: {memory}",
    ]
