"""The phases of a run: the steps of each, and the quantities that change over them.

Earlier steps lower the learning rate by two measures: the share of the predicted gain that they lost
(`train.gain_ratio`, Armijo's condition), and how far they changed the policy (`train.step_kl`, a trust region
by k2). One forward pass after each step measures both. A higher value takes effect at once and decays slowly;
no step is undone. The rate is set before a step's samples are drawn and is independent of their rewards, so
an expected step of 0 stays 0. The rules are in docs/guide/concepts.md.

`train.epochs` are converted into steps once, when the run begins. `config.json` records the steps, and under
"epochs" what they were computed from.
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
SHIFT = "baseline shift"  # the monitor with the shift as its state if objective.baseline_shift is "measured"
FIRST_RATE = 1e-5  # the first trial of train.lr = "auto"
POSITION = "position.json"  # a file of each checkpoint
DECAY = 0.7  # the share of speed or loss that remains after a step with less
MIN_FACTOR = 0.1  # after a step that lost more than all, the rate falls to at least this share
FEW_STEPS = 100  # a phase of fewer optimizer steps has a larger bound
STEP_KL = 0.005  # the bound for train.lr = "auto" if train.step_kl sets none


@dataclass(frozen=True)
class Position:
    """The position of a run between two steps."""

    phase: str = ""
    step: int = 0  # the run's last completed step
    version: int = 0  # optimizer steps
    prompts: int = 0  # prompts sampled to in this phase
    skipped: int = 0  # consecutive skipped updates
    beta: float | None = None  # if it is tuned to a target KL
    # Earlier steps' effect per unit of learning rate: √(2 KL), and the lost share of their predicted gain.
    speed: float | None = None
    lost: float | None = None
    rate: float | None = None  # the phase's largest learning rate, as train.lr = "auto" determined it
    rollbacks: int = 0  # to an earlier checkpoint; each halves the learning rate
    # The last entry of other runs in the cache of reference log-probs that this run may use; -1: not set yet.
    cached: int = -1
    monitors: Mapping[str, Any] = field(default_factory=dict)  # state of each monitor, by its name
    stopped: str = ""  # why the run ended before its last step
    anchor: str = ""  # digest of the checkpoint that the phase began with
    digest: str = ""  # the last checkpoint's digest, which that checkpoint can't contain

    def columns(self) -> dict[str, Any]:
        """The columns of metrics.jsonl that identify a step."""
        return {"step": self.step, "phase": self.phase, "version": self.version}


def is_checkpoint(folder: Path) -> bool:
    """Whether `folder` is a checkpoint, RUN/checkpoints/step-N."""
    return (folder / POSITION).is_file()


def read_position(folder: Path, digest: str) -> Position:
    content = json.loads((folder / POSITION).read_text(encoding="utf-8"))
    return Position(**{**content, "digest": digest})


def lr_at(config: TrainConfig, step: int, steps: int, measured: float | None = None) -> float:
    """The learning rate of optimizer step `step` (from 0) of a phase with `steps` steps.

    `measured`: the largest rate if train.lr is "auto"; None before an update determined it.
    """
    largest = (measured or FIRST_RATE) if config.lr == "auto" else config.lr
    if step < config.warmup:
        return largest * (step + 1) / config.warmup
    if config.schedule == "constant":
        return largest
    done = (step - config.warmup) / max(1, steps - config.warmup)
    if config.schedule == "linear":
        return largest * (1 - done)
    return largest * (0.5 * (1 + math.cos(math.pi * done)))


def step_bound(step_kl: float, steps: int) -> float:
    """How far one of `steps` optimizer steps may change the policy, in nats per token."""
    return step_kl * max(1.0, math.sqrt(FEW_STEPS / steps))


def lowered(lr: float, train: TrainConfig, bound: float, position: Position) -> float:
    """The learning rate, lowered to what earlier steps allow.

    The first step of a phase has none before it; warm-up keeps it small.
    """
    if train.step_kl is not None and position.speed:
        lr = min(lr, math.sqrt(2 * bound) / position.speed)
    if train.gain_ratio is not None and position.lost:
        lr = min(lr, (1 - train.gain_ratio) / position.lost)
    return lr


def speed_of(kl: float, lr: float) -> float | None:
    """√(2 KL) of a step per unit of learning rate; None if it is undefined."""
    return math.sqrt(2 * kl) / lr if lr > 0 and math.isfinite(kl) else None


def loss_of(promise: float, gain: float | None, lr: float, ratio: float | None) -> float | None:
    """The share of its predicted gain that a step lost, per unit of learning rate; None if it is undefined.

    A step against its own gradient, along older ones, predicts no gain. If the prediction is small, the loss
    can exceed it many times; it is capped so that the next rate is at least a tenth of this one.
    """
    if ratio is None or gain is None or lr == 0 or not 0 < promise < math.inf or not math.isfinite(gain):
        return None
    return min(max(1 - gain / promise, 0.0), (1 - ratio) / MIN_FACTOR) / lr


def recalled(latest: float | None, previous: float | None) -> float | None:
    """The latest value if it is the higher one, else an average that approaches it; None: no value yet."""
    if latest is None or previous is None or latest > previous:
        return previous if latest is None else latest
    return DECAY * previous + (1 - DECAY) * latest


def options_at(
    options: Mapping[str, Any],
    step: int,
    tuned: float | None = None,
    shift: float = 0.0,
    steps: int | None = None,
) -> dict[str, Any]:
    """The values of options at step `step` (from 0) of a phase of `steps` steps; None: not known yet.

    A schedule `{start, end, steps, shape}` goes from `start` to `end` in `steps` steps, by default all of the
    phase; `shape` is "linear" (the default) or "cosine". With `warmup` it first rises from 0 to `start` for
    that many steps (CHORD, arXiv 2508.11408). For `{start, target_kl, rate}` the value is `tuned`, which
    `tune` returned, or `start` if that is None. For "measured" it is `shift`. Other values are constant.
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
    """Whether an option is tuned to a target KL. Raises `Refused` if its table is malformed."""
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
    Lagrangian of E r subject to KL <= target_kl, in log β so that β stays positive, as for the temperature
    of SAC (arXiv 1812.05905).
    """
    return beta * math.exp(value["rate"] * max(-1.0, min(1.0, kl / value["target_kl"] - 1)))


GOLDEN = (5**0.5 - 1) / 2  # its multiples are equidistributed mod 1, so every share is met over the steps


@dataclass(frozen=True)
class Phase:
    """Steps `begins` + 1 to `ends` of the run, under one configuration. Its needs are resolved once."""

    name: str
    config: RunConfig
    begins: int
    ends: int

    @classmethod
    def all(cls, config: RunConfig) -> tuple[Phase, ...]:
        """The phases of a run. A phase in epochs has no steps before `resolve` counts them."""
        phases: list[Phase] = []
        begins = 0
        for name in config.phase_names:
            resolved = config.phase(name)
            phases.append(cls(name, resolved, begins, begins + (resolved.train.steps or 0)))
            begins = phases[-1].ends
        return tuple(phases)

    @cached_property
    def entry(self) -> Objective:
        return get(self.config.objective.name)

    @cached_property
    def needs(self) -> set[Need]:
        """What the objective needs at any step, whatever the values of schedules."""
        return self.entry.needed(self.config.objective.options)

    @property
    def reads_reference(self) -> bool:
        """Whether the phase needs the reference in memory."""
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

        It is `evaluate.beta`, or else the β of an objective that uses rewards and the reference. None if
        there is no such β or it is 0. `options`: the objective's, at this step.
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
        """All options of the objective with a step's values; values of a schedule are checked again."""
        return self._constant or self.entry.resolve(self.config.objective.name, options)

    @cached_property
    def _constant(self) -> dict[str, Any] | None:
        """The options of every step; None if they differ between steps."""
        name, options = self.config.objective.name, self.config.objective.options
        if any(isinstance(value, Mapping) or value == MEASURED for value in options.values()):
            return None
        return self.entry.resolve(name, options)

    def lr(self, position: Position, update: int) -> float:
        """The learning rate of update `update` (from 0) of the next step."""
        train = self.config.train
        done = self.at(position) * train.updates + update
        return lr_at(train, done, self.steps * train.updates, position.rate) * 0.5**position.rollbacks

    @property
    def bound(self) -> float:
        """How far an optimizer step of the phase may change the policy, in nats per token."""
        train = self.config.train
        return step_bound(train.step_kl or STEP_KL, self.steps * train.updates)

    def stored_groups(self, step: int) -> int:
        """Groups that a step (from 0) draws from the store: data.replay is met exactly over many steps."""
        return self.config.train.groups - (int(self._fresh(step + 1) + 1e-9) - int(self._fresh(step) + 1e-9))

    def _fresh(self, steps: int) -> float:
        """Number of groups to sample in the first `steps` steps, not rounded."""
        data = self.config.data
        changing = min(steps, data.replay_steps)
        shares = sum(1 - data.replay_at(step) for step in range(changing))
        constant = (steps - changing) * (1 - data.replay_at(data.replay_steps))
        return self.config.train.groups * (shares + constant)

    def rules(self, step: int) -> list[DrawRule]:
        """What a step (from 0) draws from the store, for each role or source with its own share."""
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
        """The rule that draws `groups` groups from the store; `name`: the role or source, see data.replay."""
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
            fewer=data.samples_fresh,  # a store that is still filling may give fewer
            wait=source.wait_seconds if source.kind == "elsewhere" else 0.0,
        )

    def joining(self) -> DrawRule | None:
        """The rule that adds experts' responses to a step's groups; None without experts."""
        data = self.config.data
        if not data.experts:
            return None
        experts = data.model_copy(update={"roles": ("expert",), "group_size": data.experts})
        scored = "expert" in scored_roles(self.needs)
        return DrawRule(1, experts, scored_only=scored, pairs=judging(self.needs) is not None)


def scored_roles(needs: Collection[Need]) -> set[str]:
    """The roles whose samples an objective uses only if they are scored."""
    return {role for role in ROLES for need in needs if need.optional and need.applies_to(role)}


def derive(*parts: object) -> int:
    """A 63-bit seed from any parts, the same on every machine."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Epochs(TypedDict):
    """The passes of a phase, the groups that it may draw, and the resulting number of steps."""

    epochs: float
    groups: int
    steps: int


def resolve(
    config: RunConfig, phases: Sequence[Phase], folder: Path, *, resume: bool
) -> tuple[RunConfig, dict[str, Epochs]]:
    """The configuration with steps in place of epochs, and what they were computed from, by phase.

    A resumed run keeps its steps, although its store may have grown. Raises `Refused` if a phase with epochs
    or an earlier one samples, or if the store has no groups for it.
    """
    file, recorded = folder / "config.json", {}
    if resume and file.exists():
        recorded = json.loads(file.read_text(encoding="utf-8")).get("epochs", {})
    epochs_of: dict[str, Epochs] = {}
    for number, phase in enumerate(phases, 1):
        epochs, groups = phase.config.train.epochs, phase.config.train.groups
        if epochs is None:
            continue
        if any(earlier.config.data.samples_fresh for earlier in phases[:number]):
            got = ", ".join(f"{p.config.data.replay} ({p.name})" for p in phases)
            raise Refused(
                f"phase {phase.name}: train.epochs = {epochs:g} counts passes over groups that are stored "
                "when the run begins: expected data.replay = 1 in this phase and all earlier ones, got "
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
    """Count the stored groups that a phase may draw."""
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
