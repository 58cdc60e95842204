"""What a run would do: steps, samples, tokens, memory, time (`agro train --dry-run`).

Everything is loaded and checked as for the run, so that the same settings are refused. Counts are exact,
except those of tokens, which are upper bounds. For time a part of a step is made: a pass over some of its
sequences, and some tokens in the middle of responses; other tokens are taken to take as long. Memory is what
is allocated when all is loaded, and what the pass saved a token (`agro.models.footprint`).
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from agro.config import RunConfig
from agro.io.numbers import count, duration, size
from agro.models.encoding import InvalidSample
from agro.models.footprint import Footprint, Shape, activations, saved_for_backward
from agro.models.policy import Policy
from agro.models.pretrained import cores, parameters
from agro.objectives.core import wanted_streams
from agro.objectives.needs import REF_LOGP, provided_by
from agro.rollout.engines import ENGINES, Request, capabilities
from agro.rollout.rollout import embedded
from agro.store import Store
from agro.store.draw_rules import At, pick_pairs
from agro.store.location import exists
from agro.store.samples import chosen
from agro.train.check import samples_kl
from agro.train.phases import Phase, options_at
from agro.train.step import MicroBatch
from agro.train.trainable import pairs_among
from agro.train.trainer import BaseTrainer, notes
from agro.types import Prompt

MEASURING = 0.8  # seconds of each measurement of a run, about
LONG = 3600.0  # seconds of a run from which the way to a shorter one is said
INSPECTED = 256  # prompts and stored samples, for the lengths
SHORT = 48  # tokens of the pass that tells how much of a step can be timed
DECODED = 8  # tokens of a response that are timed


class StepSequence(NamedTuple):
    """A sequence of a step. The last `learned` of its tokens have log-probs."""

    length: int
    learned: int
    group: int

    def last(self, count: int) -> StepSequence:
        """Its last tokens, at most so many."""
        length = min(self.length, count)
        return StepSequence(length, min(self.learned, length - 1), self.group)


class Work(NamedTuple):
    """The sequences of a step, the longest that they may be, and its passes over them.

    `twice`: whether log-probs of all passes are needed before the first backward pass.
    """

    fresh: list[StepSequence]
    stored: list[StepSequence]
    passes: list[list[StepSequence]]
    twice: bool


class Rates(NamedTuple):
    """Seconds of a token, and the bytes that a pass saves of it. `sampling`: None where it is unknown."""

    training: float  # forward and backward
    scoring: float  # forward alone
    sampling: float | None  # one of as many responses as are decoded at once
    saved: float


@dataclass(frozen=True)
class LoadedFootprint(Footprint):
    """The memory of a run that is loaded, of which `loaded` bytes are known, and not counted.

    Only the `text`, `trained` and `saved` of its shape are known.

    `trained_bytes`: of the weights that are trained, whose moments and gradients have their type.
    `on_cpu`: memory that sampling and other passes used isn't there for a pass, for the C library keeps it in
    pieces that seldom fit again.
    """

    loaded: float
    trained_bytes: int
    on_cpu: bool

    @property
    def gradients(self) -> float:
        return self.trained_bytes

    @property
    def resting(self) -> float:
        """With the moments, and the average of the weights if there is one."""
        train = self.config.train
        moments = 2 * self.trained_bytes
        if train.optimizer == "adamw_8bit":
            moments = 2 * self.shape.trained
        average = 0
        if train.weights_average is not None:
            average = 4 * self.shape.trained
        return self.loaded + moments + average

    def serving(self, tokens: int, sequences: int) -> float:
        """Bytes of what samples in this process; a server's own memory isn't the trainer's."""
        if self.config.engine.starts_server:
            return 0.0
        return super().serving(tokens, sequences)

    def peak_of(self, tokens: int, sequences: int, length: int) -> float:
        """The most bytes at once, of a pass of so many tokens, and of so many sequences of `length` tokens
        that are sampled."""
        if not self.on_cpu:
            sampling = self.resting + self.gradients + self.serving(length, sequences)
            return max(self.training(tokens), sampling)
        again = activations(self.shape.text, self.shape.saved, tokens, self.config.train, self.itemsize)
        return self.training(tokens) + self.serving(length, sequences) + sum(again)


@dataclass
class Machine:
    """A loaded run, and what was measured of it on this machine."""

    policy: Policy
    reference: Policy | None
    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]
    store: Store | None
    load: float | None = field(default_factory=lambda: load_average())  # before the first measurement
    measured: dict[str, Rates | None] = field(default_factory=dict)  # by phase
    seconds: float = 0.0  # that the measurements took
    cpu_seconds: float = 0.0
    loaded: int | None = None  # bytes that are allocated before any step, on Linux or the GPU

    def __post_init__(self) -> None:
        statm = Path("/proc/self/statm")
        if self.policy.device.type == "cuda":
            self.loaded = torch.cuda.memory_allocated(self.policy.device)
        elif statm.exists():
            self.loaded = int(statm.read_text().split()[1]) * 4096

    def rates(self, phase: Phase, limit: float = MEASURING) -> Rates | None:
        """What a token of a step of the phase takes; measured once, in about `limit` seconds each."""
        if phase.name not in self.measured:
            reference = self.reference if phase.reads_reference else None
            began, cpu = time.perf_counter(), time.process_time()
            self.measured[phase.name] = measured(phase, self.policy, reference, self.work(phase), limit)
            self.seconds += time.perf_counter() - began
            self.cpu_seconds += time.process_time() - cpu
        return self.measured[phase.name]

    def forecast(self, phase: Phase, held_out: int | None = None) -> dict[str, Any]:
        """Counts, bytes, and upper bounds of the seconds of a phase, as far as they are known.

        `held_out`: prompts, where it is to be another number of them.
        """
        config, rates, step = phase.config, self.rates(phase), self.work(phase)
        counts = self._counts(phase, len(self.held_out) if held_out is None else held_out)
        self.policy.checkpoint_gradients(config.train.gradient_checkpointing)
        parts = self._seconds(phase, step, rates)
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
            "longest_sequence": max((row.length for row in step.fresh + step.stored), default=2),
            "step_seconds": parts,
            "step_unknown": unknown_sampling(config),
            **totals,
            "seconds_at_most": sum(totals.values()),  # as far as they are known
            "peak": self.peak(config, step, rates),
        }

    def _counts(self, phase: Phase, held_out: int) -> dict[str, Any]:
        """What one phase samples and trains on. A number that is known only later is None."""
        config, groups, every = phase.config, phase.config.train.groups, phase.config.evaluate.every
        shares = [phase.stored_groups(step) for step in range(phase.steps)]
        stored, drawn = sum(shares), self._drawn(phase)
        fresh = phase.steps * groups - stored
        sampled = fresh * config.sampler.n + stored * (config.data.complete_groups or 0)
        answered, at_start = held_out * config.evaluate.n, phase.begins == 0
        if samples_kl(config) and self.reference is not None:  # responses for the KL alone
            answered = config.evaluate.kl_samples
            at_start = at_start and config.policy.reference == "model"
        evaluations = 0
        if answered:  # after every so many steps, at the end, and before the first step
            evaluations = (len(range(every, phase.steps, every)) if every else 0) + 1 + at_start
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
            "responses_trained": (
                None if drawn is None and stored else round(sampled + stored * (drawn or 0))
            ),
            "evaluations": evaluations,
            "responses_evaluated": evaluations * answered,
        }

    def _drawn(self, phase: Phase) -> float | None:
        """Mean responses that are drawn from a stored group; None where that is unknown."""
        if self.store is None or not phase.config.data.draws_stored:
            return None
        rule = phase.rule(1)
        if rule.pairs:
            judged = pairs_among(self.store.survey.summaries(**chosen(rule.data)), phase.needs, self.store)
            pairs_of = [[(p.winner, p.loser) for p in preferences] for preferences in judged.values()]
            sizes = [len(pick_pairs(pairs, rule, At("", 0, 0, 0), "")) for pairs in pairs_of]
        else:
            groups = self.store.groups(**chosen(rule.data))
            stored = [group.scored if rule.scored_only else group.size for group in groups]
            sizes = [min(size, rule.data.group_size or size) for size in stored if size >= rule.min_group]
        return sum(sizes) / len(sizes) if sizes else None

    def work(self, phase: Phase) -> Work:
        """Of the last step of a phase."""
        config, policy = phase.config, self.policy
        groups, n = phase.stored_groups(phase.steps - 1), config.sampler.n
        # The longest prompts come first, with responses as long as they may be.
        limit = min(policy.context, config.train.max_length or policy.context)
        prompts = self.prompts[:INSPECTED]
        lengths = sorted((len(policy.encoder.prompt(p.text)) for p in prompts), reverse=True)
        fresh: list[StepSequence] = []
        for group in range((config.train.groups - groups) if lengths else 0):
            prompt = lengths[group % len(lengths)]
            new = max(0, min(most_new(config), limit - prompt))
            fresh += n * [StepSequence(prompt + new, new, group)]
        stored: list[StepSequence] = []
        drawn = self._drawn(phase)
        if drawn is None:  # the run fills the store: with responses as long as its fresh ones
            stored = [row._replace(group=-1 - i // n) for i, row in enumerate((fresh * groups)[: groups * n])]
        elif groups and self.store is not None:
            found = []
            for sample in islice(self.store.samples(**chosen(config.data)), INSPECTED):
                with suppress(InvalidSample):  # the run drops it as well
                    for read in policy.encoder.rows(sample, config.train.max_length):
                        assert read.tokens is not None
                        assert read.mask is not None
                        found.append(StepSequence(len(read.tokens), int(read.mask.sum()), 0))
            size = max(1, round(drawn))
            repeated = islice(cycle(found), round(groups * drawn))
            stored = [row._replace(group=-1 - i // size) for i, row in enumerate(repeated)]
        rows, micro = fresh + stored, MicroBatch.of(config.train)
        row_lengths = [row.length for row in rows]
        coupling = phase.entry.coupling(phase.resolved(options_at(config.objective.options, 0)))
        blocks: dict[int, list[int]] = {}  # rows that one pass has to hold, where it can
        for i, row in enumerate(rows):
            blocks.setdefault({"row": i, "group": row.group, "step": 0}[coupling], []).append(i)
        together = micro.pack(list(blocks.values()), row_lengths)
        passes = together or micro.pack([[i] for i in range(len(rows))], row_lengths)
        assert passes is not None  # single rows always fit
        return Work(fresh, stored, [[rows[i] for i in part] for part in passes], together is None)

    def _seconds(self, phase: Phase, step: Work, rates: Rates | None) -> dict[str, float | None]:
        """Of each part of a step; None: unknown."""
        config, needs, policy = phase.config, phase.needs, self.policy
        parts: dict[str, float | None] = {"sampling": None, "reference": None, "training": None}
        if not unknown_sampling(config) and not step.fresh:
            parts["sampling"] = 0.0
        if rates is None:
            return parts
        if step.fresh and rates.sampling is not None:
            prompts = {row.group: row.length - row.learned for row in step.fresh}
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
        compares = bool(config.train.gain_ratio or config.train.step_kl)
        again = step.twice + len(provided_by("draw", needs)) + compares
        parts["training"] = computed * (config.train.updates * rates.training + again * rates.scoring)
        return parts

    def peak(self, config: RunConfig, step: Work, rates: Rates | None) -> int | None:
        """The most bytes at once; None where a part is unknown."""
        if self.loaded is None or rates is None:
            return None
        from agro.rollout.engines.fused import is_fusable  # which loads code of transformers' models

        model, loaded, at_once = self.policy.model, self.loaded, 0
        if "shares_weights" in capabilities(config.engine.kind) and config.source.kind == "inline":
            at_once = min(config.sampler.batch, len(step.fresh))
        if at_once and config.engine.fused and is_fusable(self.policy):  # which packs what it multiplies by
            products = [module for module in model.modules() if isinstance(module, nn.Linear)]
            loaded += sum(module.weight.nbytes for module in products)
        if at_once and config.source.lags:  # and samples with a copy of earlier weights
            loaded += sum(weights.nbytes for weights in model.parameters())
        text = model.config.get_text_config()
        trained = self.policy.trained().values()
        shape = Shape(
            text=text,
            context=0,
            weights=0,
            packed=0,
            widest=0,
            trained=sum(weights.numel() for weights in trained),
            saved=rates.saved / text.num_hidden_layers,
        )
        footprint = LoadedFootprint(
            config,
            shape,
            others=0.0,
            loaded=loaded,
            trained_bytes=sum(weights.nbytes for weights in trained),
            on_cpu=self.policy.device.type == "cpu",
        )
        largest = max(positions(self.policy, rows) for rows in step.passes)
        longest = max((row.length for row in step.fresh), default=0)
        return int(footprint.peak_of(largest, at_once, longest))


class PlanningTrainer(BaseTrainer):
    """A trainer that can say what its run would do; nothing is written then."""

    def plan(self) -> dict[str, Any]:
        """What `run` would do. All is loaded and checked; see `plan` of this module."""
        with self.loaded() as machine:
            report = plan(self.config, machine)
            return {**report, "notes": [*self.notes, *notes(machine.policy, self.prompts, self.config)]}

    @contextmanager
    def loaded(self) -> Iterator[Machine]:
        """What a plan measures. All is checked as for a run."""
        print("loading, checking and measuring", file=sys.stderr, flush=True)
        path = self._prepare()
        if self.reward is not None:
            self.reward.close()
        with Store.open(path, read_only=True) if exists(path) else nullcontext() as store:
            policy, reference = self._load()
            yield Machine(policy, reference, self.prompts, self.eval_prompts, store)


def plan(config: RunConfig, machine: Machine, held_out: int | None = None) -> dict[str, Any]:
    """A JSON document: phases, totals, memory in bytes, and an upper bound of the seconds."""
    phases, policy = Phase.all(config), machine.policy
    for phase in phases:
        machine.rates(phase, MEASURING / len(phases))
    forecasts = [machine.forecast(phase, held_out) for phase in phases]
    return {
        "model": policy.name,
        "device": str(policy.device),
        "parameters": parameters(policy.model),
        "parameters_trained": sum(w.numel() for w in policy.weights().values()),
        "prompts": len(machine.prompts),
        "eval_prompts": len(machine.held_out) if held_out is None else held_out,
        "phases": forecasts,
        "measured": {
            "seconds": machine.seconds,
            "cpu_seconds": machine.cpu_seconds,
            "threads": torch.get_num_threads(),
            "cores": cores(),
            "load_before": machine.load,
        },
        "seconds_at_most": sum(forecast["seconds_at_most"] for forecast in forecasts),
    }


def most_new(config: RunConfig) -> int:
    """An upper bound of the tokens in a response that the policy samples."""
    return config.sampler.max_new * (config.environment.max_turns if config.environment else 1)


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
    """Of a part of a step; None of one without sequences. `limit`: seconds of each measurement, about.

    On a CPU seconds are the process's own by thread, which other programs don't prolong. No gradient remains.
    """
    if not step.passes:
        return None

    def seconds(rows: Sequence[StepSequence], *, backward: bool = True) -> float:
        """Of one pass."""
        want = wanted_streams(phase.needs) if backward else ("logp",)
        began = _clock(policy.device)
        _pass(policy, reference if backward else None, want, rows, backward=backward)
        return max(_clock(policy.device) - began, 1e-6)

    short = step.passes[0][0].last(SHORT)
    seconds([short.last(DECODED)])  # the first one takes longer in any process
    rows = within(step.passes[0], int(3 * limit * SHORT / seconds([short])))
    computed = positions(policy, rows)
    recomputes, policy.recompute = policy.recompute, False
    with saved_for_backward(policy.model) as saved:
        training = seconds(rows) / computed
    policy.recompute = recomputes
    scoring = seconds(rows, backward=False) / computed
    sampling = None
    if step.fresh and not unknown_sampling(phase.config):
        sampling = _decoding(policy, phase.config, step.fresh, int(limit / scoring))
    return Rates(training, scoring, sampling, sum(saved.values()) / computed)


def within(rows: Sequence[StepSequence], limit: int) -> list[StepSequence]:
    """The first rows of at most so many tokens; of the first row a part, where it alone has more."""
    found = [rows[0].last(max(SHORT, limit))]
    for row in rows[1:]:
        limit -= found[-1].length
        if row.length > limit:
            break
        found.append(row)
    return found


def _clock(device: torch.device) -> float:
    """A time in seconds; on a CPU the process's own, by thread."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time() / torch.get_num_threads()


def _random_tokens(policy: Policy, *shape: int) -> torch.Tensor:
    return torch.randint(policy.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def _pass(
    policy: Policy,
    reference: Policy | None,
    want: Collection[str],
    rows: Sequence[StepSequence],
    *,
    backward: bool = True,
) -> None:
    """One pass over sequences of random tokens, of which those of a group share the prompt."""
    lengths = torch.tensor([row.length for row in rows])
    tokens = _random_tokens(policy, len(rows), int(lengths.max()))
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    first: dict[int, int] = {}  # by group, the row that the others have the prompt of
    for i, row in enumerate(rows):
        prompt = row.length - row.learned
        tokens[i, :prompt] = tokens[first.setdefault(row.group, i), :prompt]
        tokens[i, row.length :] = 0
        mask[i, max(1, row.length - row.learned) : row.length] = True
    with torch.set_grad_enabled(backward):
        streams = policy.streams(tokens, lengths, mask, want, reference)
        if backward:
            torch.stack([s.nan_to_num().sum() for s in streams.values()]).sum().backward()
            policy.zero_grad()


def _decoding(policy: Policy, config: RunConfig, fresh: Sequence[StepSequence], tokens: int) -> float | None:
    """Seconds of a token in the middle of responses, with as many at once as the step has; None where
    responses are too short to measure it.

    `tokens`: decoded at most, about; where that is fewer, so are the responses.
    """
    longest = max(fresh, key=lambda row: row.length)
    context = _random_tokens(policy, max(1, longest.length - longest.learned // 2 - 1)).tolist()
    new = min(DECODED, longest.learned - 1)
    batch = min(config.sampler.batch, len(fresh), max(2, tokens // DECODED))
    engine = embedded(policy, fused=config.engine.fused)
    sampler = config.sampler.model_copy(update={"batch": batch + 1, "stop": ()})
    requests = [Request(0, context, 1), *(Request(1 + i, context, 1 + new) for i in range(batch))]
    ended: list[tuple[int, float]] = []
    for done in engine.decode(deque(requests), sampler, 0):
        ended.append((len(done.tokens), _clock(policy.device)))
    (early, begin), (late, end) = ended[0], ended[-1]
    return max(end - begin, 1e-9) / (late - early) / batch if late > early else None


def positions(policy: Policy, rows: Sequence[StepSequence]) -> int:
    """That a pass computes: the prompt of a group once, where the policy can."""
    if not policy.packs:
        return sum(row.length for row in rows)
    prompts = {row.group: row.length - row.learned for row in rows}
    return sum(prompts.values()) + sum(row.learned for row in rows)


def load_average() -> float | None:
    """Processes that ran or waited for a core in the last minute, on average; None where it is unknown."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def describe(plan: dict[str, Any]) -> str:
    """The plan as text: also how the times were measured, and whether other programs prolonged them."""
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
            "measurement, of which about 1 is this command's): beside them the run takes longer"
        )
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
    return (
        f'{text}. What to do: the same command with --fit 30min (fit="30min" in Python) chooses settings for '
        "that time, such as an adapter, lengths, responses and steps, and says them"
    )


def _phase_lines(p: dict[str, Any]) -> list[str]:
    groups = ""
    if p["groups_per_step_at_least"] < p["groups_per_step"]:
        groups = (
            f", {p['groups_per_step_at_least']} to {p['groups_per_step']} groups a step: a prompt that is "
            "both sampled and drawn is one group"
        )
    trained = "as many as the store will have"
    if p["responses_trained"] is not None:
        trained = count(p["responses_trained"])
    known = {name: part for name, part in p["step_seconds"].items() if part}
    listed = ", ".join(f"{name} {duration(part)}" for name, part in known.items())
    step = f"  a step: {duration(sum(known.values()))} at the maximal lengths ({listed}), without rewards"
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
