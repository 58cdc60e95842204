"""The phases of a run: which steps each has, and what changes over them.

The learning rate of a step is lowered by what the steps before it did: the share of their promised gain that
they lost (`train.gain_ratio`, Armijo's condition), and how far they changed the policy (`train.step_kl`, a
trust region by k2). Both are measured by one forward pass after each, the highest value counts at once and is
forgotten slowly, and no step is taken back. The rate is set before a step's samples are drawn and knows
nothing of their rewards: where the expected step is 0 it stays so. The rules are in docs/guide/concepts.md.

`train.epochs` become steps once, when the run begins. `config.json` has the steps, and under "epochs" what
they were computed from.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

from agro.config import RunConfig, TrainConfig
from agro.config.data import EXPECTED, are_numbers, is_schedule, value_at
from agro.config.override import LENGTH
from agro.errors import Refused
from agro.io.numbers import count
from agro.objectives import Need, Objective, get, least_responses
from agro.objectives.ingredients import MEASURED
from agro.objectives.needs import REWARD, judging, provided_by
from agro.store import DrawRule, Store
from agro.store.location import exists, located
from agro.types.sample import ROLES

TUNED = {"start", "target_kl", "rate"}
SHIFT = "baseline shift"  # the monitor whose state it is, where objective.baseline_shift is "measured"
TRIED = 1e-5  # the first rate that is tried where train.lr is "auto"
POSITION = "position.json"  # of a checkpoint
KEPT = 0.7  # of the speed, or of the loss, in a step that has less
LEAST = 0.1  # of its rate, which the step after one that lost more than all has at least
FEW_STEPS = 100  # a phase of fewer optimizer steps has a larger bound
STEP_KL = 0.005  # the bound that a rate is found for, where train.step_kl gives none


@dataclass(frozen=True)
class Position:
    """The position of a run between two steps."""

    phase: str = ""
    step: int = 0  # of the run, the last one done
    version: int = 0  # optimizer steps
    prompts: int = 0  # sampled from in this phase
    skipped: int = 0  # updates in a row that weren't made
    beta: float | None = None  # where it is tuned to a target KL
    # Of the steps before, per unit of learning rate: √(2 KL), and the share of their promise that they lost.
    speed: float | None = None
    lost: float | None = None
    rate: float | None = None  # the phase's largest, which was found where train.lr is "auto"
    rollbacks: int = 0  # to an earlier checkpoint; each halves the learning rate
    # The last entry of other runs that may be used from the cache of reference log-probs; -1: not begun.
    cached: int = -1
    monitors: Mapping[str, Any] = field(default_factory=dict)  # state of each monitor, by its name
    stopped: str = ""  # why the run ended before its last step
    anchor: str = ""  # digest of the checkpoint that the phase began with
    digest: str = ""  # of the last checkpoint; it can't stand in that checkpoint itself

    def columns(self) -> dict[str, Any]:
        """Those of metrics.jsonl that tell steps apart."""
        return {"step": self.step, "phase": self.phase, "version": self.version}


def is_checkpoint(folder: Path) -> bool:
    """Whether it is RUN/checkpoints/step-N."""
    return (folder / POSITION).is_file()


def read_position(folder: Path, digest: str) -> Position:
    content = json.loads((folder / POSITION).read_text(encoding="utf-8"))
    return Position(**{**content, "digest": digest})


def lr_at(config: TrainConfig, step: int, steps: int, found: float | None = None) -> float:
    """The learning rate of optimizer step `step` (from 0) of a phase with `steps` steps.

    `found`: the largest one where train.lr is "auto"; None where nothing moved yet that would tell.
    """
    largest = (found or TRIED) if config.lr == "auto" else config.lr
    if step < config.warmup:
        return largest * (step + 1) / config.warmup
    if config.schedule == "constant":
        return largest
    done = (step - config.warmup) / max(1, steps - config.warmup)
    if config.schedule == "linear":
        return largest * (1 - done)
    return largest * (0.5 * (1 + math.cos(math.pi * done)))


def step_bound(step_kl: float, steps: int) -> float:
    """What one of so many optimizer steps may change the policy, nats a token."""
    return step_kl * max(1.0, math.sqrt(FEW_STEPS / steps))


def lowered(lr: float, train: TrainConfig, bound: float, position: Position) -> float:
    """The learning rate, lowered to what the steps before allow.

    Nothing is known of them before the first step of a phase, which warm-up makes small.
    """
    if train.step_kl is not None and position.speed:
        lr = min(lr, math.sqrt(2 * bound) / position.speed)
    if train.gain_ratio is not None and position.lost:
        lr = min(lr, (1 - train.gain_ratio) / position.lost)
    return lr


def speed_of(kl: float, lr: float) -> float | None:
    """√(2 KL) of a step per unit of learning rate; None where it tells nothing."""
    return math.sqrt(2 * kl) / lr if lr > 0 and math.isfinite(kl) else None


def loss_of(promise: float, gain: float | None, lr: float, ratio: float | None) -> float | None:
    """The share of its promise that a step lost, per unit of learning rate; None where it tells nothing.

    A step against its own gradient, along older ones, promised nothing. Where little was promised much more
    may be lost, of which so much counts that the next rate is a tenth of this one.
    """
    if ratio is None or gain is None or lr == 0 or not 0 < promise < math.inf or not math.isfinite(gain):
        return None
    return min(max(1 - gain / promise, 0.0), (1 - ratio) / LEAST) / lr


def recalled(now: float | None, before: float | None) -> float | None:
    """What a step tells, or more of those before it, forgotten slowly; None: it tells nothing."""
    if now is None or before is None or now > before:
        return before if now is None else now
    return KEPT * before + (1 - KEPT) * now


def options_at(
    options: Mapping[str, Any],
    step: int,
    tuned: float | None = None,
    shift: float = 0.0,
    steps: int | None = None,
) -> dict[str, Any]:
    """The values of options at step `step` (from 0) of a phase of `steps` steps; None: not known yet.

    A schedule `{start, end, steps, shape}` goes from `start` to `end` in `steps` steps, all of the phase
    where it names none; `shape` is "linear" (the default) or "cosine". With `warmup` it begins so many steps
    later, and rises from 0 to `start` in them (CHORD, arXiv 2508.11408). For `{start, target_kl, rate}` the
    value is `tuned`, the result of `tune`, or `start` where that is None, and for "measured" it is `shift`.
    Other values are constant.
    """
    current = dict(options)
    for name, value in options.items():
        if name == "baseline_shift" and value == MEASURED:
            current[name] = shift
        elif isinstance(value, Mapping) and is_tuned(value):
            current[name] = value["start"] if tuned is None else tuned
        elif isinstance(value, Mapping):
            timed = {"steps": max(1, steps or step), **value}
            if not is_schedule(timed):
                raise Refused(f"schedule of an option: expected {EXPECTED}, got {dict(value)}")
            if "steps" not in value:
                timed["steps"] = max(1, timed["steps"] - value.get("warmup", 0))
            current[name] = value_at(timed, step)
    return current


def is_tuned(value: Any) -> bool:
    """Whether an option is tuned to a target KL; raises `Refused` for one that is malformed."""
    if not isinstance(value, Mapping) or "target_kl" not in value:
        return False
    numeric = value.keys() == TUNED and are_numbers(value, TUNED)
    if not numeric or not all(x > 0 for x in value.values()):
        raise Refused(
            "objective.beta: expected {start, target_kl, rate}, numbers above 0 (reward per nat, nats per "
            f"response, change of log β per step), got {dict(value)}"
        )
    return True


def tune(value: Mapping[str, float], beta: float, kl: float) -> float:
    """β after a step whose fresh samples, or evaluation, had a KL to the reference of `kl` nats per response.

    log β moves by rate · (kl / target_kl − 1), by at most `rate` up or down. This is dual ascent on the
    Lagrangian of E r subject to KL <= target_kl. It is done in log β so that β stays positive, as for the
    temperature of SAC (arXiv 1812.05905).
    """
    return beta * math.exp(value["rate"] * max(-1.0, min(1.0, kl / value["target_kl"] - 1)))


GOLDEN = (5**0.5 - 1) / 2  # its multiples are spread evenly, so that each of several shares is met over steps


@dataclass(frozen=True)
class Phase:
    """Steps `begins` + 1 to `ends` of the run, under one configuration. What it needs is resolved once."""

    name: str
    config: RunConfig
    begins: int
    ends: int

    @classmethod
    def all(cls, config: RunConfig) -> tuple[Phase, ...]:
        """The phases of a run. One has no steps yet where its epochs aren't counted, see `resolve`."""
        phases: list[Phase] = []
        begins = 0
        for name in config.phase_names:
            own = config.phase(name)
            phases.append(cls(name, own, begins, begins + (own.train.steps or 0)))
            begins = phases[-1].ends
        return tuple(phases)

    @cached_property
    def entry(self) -> Objective:
        return get(self.config.objective.name)

    @cached_property
    def needs(self) -> set[Need]:
        """What the objective needs in any step, whatever the values of schedules."""
        return self.entry.needed(self.config.objective.options)

    @property
    def reads_reference(self) -> bool:
        """Whether it needs the reference in memory."""
        data, rule = self.config.data, self.config.evaluate
        is_measured = rule.beta is not None or data.has_held_out_groups
        measures_kl = rule.kl and data.eval_prompts is not None
        return bool(provided_by("reference", self.needs)) or is_measured or measures_kl

    @property
    def takes_stored_value(self) -> bool:
        """Whether the objective needs values from data.value_store."""
        return bool(provided_by("value_store", self.needs))

    def diagnostic_beta(self, options: Mapping[str, Any]) -> Any:
        """β of ½ Var(R) and regret, in units of reward per nat.

        It is `evaluate.beta`, or else the β of an objective that uses rewards and the reference. None where
        there is no such β, or where it is 0. `options`: the objective's, at this step.
        """
        if self.config.evaluate.beta is not None:
            return self.config.evaluate.beta
        if REWARD not in self.needs or not provided_by("reference", self.needs):
            return None
        return self.entry.with_preset(options).get("beta") or None

    @property
    def steps(self) -> int:
        return self.ends - self.begins

    def at(self, position: Position) -> int:
        """Steps of the phase that are done."""
        return position.step - self.begins

    def options(self, position: Position) -> dict[str, Any]:
        """The objective's options at the next step: the current values of schedules and of a tuned β."""
        objective = self.config.objective
        measured = position.monitors.get(SHIFT) or 0.0  # unknown: none
        shift = measured * (1 - self.at(position) / self.steps)
        current = options_at(objective.options, self.at(position), position.beta, shift, self.steps)
        return self.entry.with_preset(current)

    def resolved(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """All options of the objective, for those of a step. They are checked again where a schedule changes
        them."""
        return self._constant or self.entry.resolve(self.config.objective.name, options)

    @cached_property
    def _constant(self) -> dict[str, Any] | None:
        """Those of every step; None where steps have different ones."""
        name, given = self.config.objective.name, self.config.objective.options
        if any(isinstance(value, Mapping) or value == MEASURED for value in given.values()):
            return None
        return self.entry.resolve(name, given)

    def lr(self, position: Position, update: int) -> float:
        """The learning rate of update `update` (from 0) of the next step."""
        train = self.config.train
        done = self.at(position) * train.updates + update
        return lr_at(train, done, self.steps * train.updates, position.rate) * 0.5**position.rollbacks

    @property
    def bound(self) -> float:
        """What an optimizer step of the phase may change the policy, nats a token."""
        train = self.config.train
        return step_bound(train.step_kl or STEP_KL, self.steps * train.updates)

    def stored_groups(self, step: int) -> int:
        """Groups that a step (from 0) draws from the store: data.replay is met exactly over many steps."""
        return self.config.train.groups - (int(self._fresh(step + 1) + 1e-9) - int(self._fresh(step) + 1e-9))

    def _fresh(self, steps: int) -> float:
        """Groups to sample in the first `steps` steps, not rounded."""
        data = self.config.data
        changing = min(steps, data.replay_steps)
        shares = sum(1 - data.replay_at(step) for step in range(changing))
        constant = (steps - changing) * (1 - data.replay_at(data.replay_steps))
        return self.config.train.groups * (shares + constant)

    def rules(self, step: int) -> list[DrawRule]:
        """What a step (from 0) draws from the store, for each role or source that has a share of its own."""
        stored, shares = self.stored_groups(step), self.config.data.shares_at(step)
        total, offset = sum(shares.values()), step * GOLDEN % 1.0
        rules, start = [], 0
        for name, below in zip(shares, itertools.accumulate(shares.values())):
            end = math.floor(stored * below / total + offset) if total else 0
            if end > start:
                rules.append(self.rule(end - start, name))
            start = end
        return rules

    def rule(self, groups: int, name: str = "") -> DrawRule:
        """So many groups from the store; `name`: of the role or source, see data.replay."""
        data, source, needs = self.config.data, self.config.source, self.needs
        min_group = least_responses(needs, "expert") - (data.complete_groups or 0)  # these join each group
        judged = judging(needs)
        return DrawRule(
            groups,
            data.part(name),
            min_group=max(1, min_group),
            scored_only=not scored_roles(needs).isdisjoint(data.roles or ROLES),
            pairs=judged is not None,
            ties=judged is not None and judged.reads_ties,
            fewer=data.samples_fresh,  # a store that is still filling gives what it has
            wait=source.wait_seconds if source.kind == "elsewhere" else 0.0,
        )

    def joining(self) -> DrawRule | None:
        """What a step draws of experts beside its samples; None without them."""
        data = self.config.data
        if not data.experts:
            return None
        experts = data.model_copy(update={"roles": ("expert",), "group_size": data.experts})
        scored = "expert" in scored_roles(self.needs)
        return DrawRule(1, experts, scored_only=scored, pairs=judging(self.needs) is not None)


def scored_roles(needs: Collection[Need]) -> set[str]:
    """The roles of which an objective takes scored samples alone."""
    return {role for role in ROLES for need in needs if need.optional and need.applies_to(role)}


def derive(*parts: object) -> int:
    """A 63-bit seed from any parts, the same on every machine."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Epochs(TypedDict):
    """The passes of a phase, the groups that it may draw, and the steps that follow."""

    epochs: float
    groups: int
    steps: int


def resolve(
    config: RunConfig, phases: Sequence[Phase], folder: Path, *, resume: bool
) -> tuple[RunConfig, dict[str, Epochs]]:
    """The configuration with steps in place of epochs, and what they were computed from, by phase.

    A run that is resumed keeps its steps, although its store may have grown. Raises `Refused` where a phase
    or one before it samples, and where the store has no groups for it.
    """
    file, recorded = folder / "config.json", {}
    if resume and file.exists():
        recorded = json.loads(file.read_text(encoding="utf-8")).get("epochs", {})
    epochs_of: dict[str, Epochs] = {}
    for number, phase in enumerate(phases, 1):
        epochs, groups = phase.config.train.epochs, phase.config.train.groups
        if epochs is None:
            continue
        if any(before.config.data.samples_fresh for before in phases[:number]):
            got = ", ".join(f"{p.config.data.replay} ({p.name})" for p in phases)
            raise Refused(
                f"phase {phase.name}: train.epochs = {epochs:g} counts passes over groups that are stored "
                "when the run begins: expected data.replay = 1 in this phase and all before it, got "
                f"data.replay = {got}. What to do: set train.steps instead, for fresh samples the number of "
                f"prompts × {epochs:g} / {groups}"
            )
        counted: Epochs | None = recorded.get(phase.name)
        if counted is None or counted["epochs"] != epochs:
            available = _available(phase, epochs, folder)
            steps = math.ceil(epochs * available / groups - 1e-9)  # .1 × 30 is 3.0000000000000004
            counted = {"epochs": epochs, "groups": available, "steps": max(1, steps)}
        epochs_of[phase.name] = counted
    return (_with_steps(config, epochs_of) if epochs_of else config), epochs_of


def describe(name: str, epochs: Epochs) -> str:
    return (
        f"{name}: train.epochs = {epochs['epochs']:g}: {count(epochs['steps'])} steps over "
        f"{count(epochs['groups'])} stored groups"
    )


def _available(phase: Phase, epochs: float, folder: Path) -> int:
    """How many stored groups a phase may draw."""
    path, groups = located(phase.config.data.store, folder), 0
    if exists(path):
        with Store.open(path, read_only=True) as store:
            groups = len(store.draws.candidates(phase.rule(1), "", 0))
    if not groups:
        raise Refused(
            f"phase {phase.name}: train.epochs = {epochs:g} counts passes over stored groups, but {path} has "
            "none that may be drawn. What to do: import samples (agro import), widen the choice (agro "
            "check), or set train.steps"
        )
    return groups


def _with_steps(config: RunConfig, epochs: dict[str, Epochs]) -> RunConfig:
    values = config.model_dump()
    sections = {phase["name"]: phase for phase in values["phases"]} or {config.phase_names[0]: values}
    for section in [values, *values["phases"]]:
        train = section.get("train", {})
        if train.get("epochs") is not None:
            section["train"] = {key: value for key, value in train.items() if key not in LENGTH}
    for name, counted in epochs.items():
        sections[name]["train"] = {**sections[name].get("train", {}), "steps": counted["steps"]}
    return RunConfig.of(values)
