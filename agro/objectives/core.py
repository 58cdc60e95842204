"""How an objective is declared.

An objective is a pure function `(streams, batch, *, …options) -> Terms` of complete groups. It reads
`streams["logp"]` and the other streams that it needs, in float64 (streams [B,T] are 0 outside the mask), and
never sees the model. `agro.objectives.evaluation` differentiates what it returns, so a function contains its
equation and nothing else.

A user's own objective is named as `objective.name = "file.py:NAME"`, `"module:NAME"`, or by its entry point
of `agro.objectives` if it is installed (`agro.io.plugins`). NAME is a function like agro's,

    def mine(streams: Streams, batch: Batch, *, beta: float = 0.1) -> Terms: ...

which may read rewards in complete groups, and the reference's log-probs if it has an option `beta`. For
anything else NAME is an `agro.objectives.Objective` that declares what its function needs.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel

from agro.errors import Refused
from agro.objectives.needs import (
    GROUPS,
    NEEDS,
    OBSERVED_LOGP,
    REF_LOGP,
    REWARD,
    ColumnNeed,
    Need,
    Stream,
    grouping,
    ordered,
)
from agro.objectives.options import (
    REQUIRED,
    Declared,
    Observing,
    Singletons,
    checked,
    defaults_of,
    model_of,
    needed_by,
    options_of,
)
from agro.types import Batch, Tensor

Streams = Mapping[str, Tensor]
Coupling = Literal["row", "group", "step"]
# Where the equation was read: in the code of the authors or of the library in `called`; in the paper; in
# notes that quote it; or in the abstract, from which it was inferred.
Certainty = Literal["code", "paper", "notes", "reconstructed"]
Options = Mapping[str, Any]
STREAMS = ("logp", *(need for need in NEEDS if isinstance(need, Stream) and need != OBSERVED_LOGP))


@dataclass(frozen=True)
class Terms:
    """What an objective returns. Its gradient is the surrogate's if there is one, else the loss's."""

    loss: Tensor | float  # the quantity to plot
    surrogate: Tensor | None = None
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Gradient:
    """An objective's loss and gradient on one batch, which its ingredients change in turn."""

    loss: float
    logp_BT: Tensor  # d loss / d logp, or / d the ingredient's `stream`
    metrics: Mapping[str, float]

    def likelier(self, share: float, logp_BT: Tensor, weight_BT: Tensor, metric: str) -> Gradient:
        """Add `share` times the weighted mean of −log π, which is `metric`: NaN if all weights are 0."""
        if not weight_BT.any():
            return replace(self, metrics={**self.metrics, metric: math.nan})
        weight_BT = weight_BT / weight_BT.sum()
        mean = -float((weight_BT * logp_BT.detach()).sum())
        metrics = {**self.metrics, metric: mean}
        return Gradient(self.loss + share * mean, self.logp_BT - share * weight_BT, metrics)


@dataclass(frozen=True)
class Rule:
    """A constraint on one or more options. It doesn't apply to an objective that lacks one of them."""

    options: tuple[str, ...]
    needs: str  # what the first option's value needs, in words
    holds: Callable[..., bool]  # takes their values

    def broken(self, options: Options) -> str:
        """How these options break the rule, "" if they don't."""
        if not options.keys() >= {*self.options}:
            return ""
        value, *actual = (options[key] for key in self.options)
        if self.holds(value, *actual):
            return ""
        got = "".join(f", got {json.dumps(other)}" for other in actual)
        change = " or ".join(self.options)
        return f"{self.options[0]} = {json.dumps(value)} needs {self.needs}{got}; change {change}"


def only_with(option: str, values: Collection[Any], **allowed: tuple[Any, ...]) -> tuple[Rule, ...]:
    """If `option` has one of `values`, each option in `allowed` must have one of the values listed there."""

    def rule(other: str, choices: tuple[Any, ...]) -> Rule:
        needs = f"{other} = {' or '.join(map(json.dumps, choices))}"
        return Rule((option, other), needs, lambda value, got: value not in values or got in choices)

    return tuple(rule(other, choices) for other, choices in allowed.items())


def ascending(lower: str, upper: str) -> Rule:
    """The first number must not exceed the second; None means no bound."""
    return Rule((lower, upper), f"{upper} at least as large", lambda low, high: high is None or low <= high)


class Ingredient:
    """A part that several objectives share: subclass it, and list an instance in entries."""

    options: ClassVar[Mapping[str, tuple[Any, Any]]]  # (annotation, default)
    metrics: ClassVar[tuple[str, ...]] = ()  # that it adds unless its first option has its default
    stream: ClassVar[str] = "logp"  # whose gradient it changes; it is skipped without this stream
    rules: ClassVar[tuple[Rule, ...]] = ()

    def needs(self, options: Options) -> set[Need]:
        """What it needs with these options, defaults filled in."""
        return needed_by(self.options, options)

    def apply(self, options: Options, logp_BT: Tensor, batch: Batch, gradient: Gradient) -> Gradient:
        """Return the gradient with this part added, at these log-probs."""
        return gradient


class SmallGroups(Ingredient):
    """What happens to groups that are too small, before the function sees the batch."""

    options: ClassVar = {"singletons": (Singletons, "error")}


class Observations(Ingredient):
    """Adds a share of the mean −log π over the step's tokens that an environment wrote (ECHO, arXiv
    2605.24517). The rows of a group with weight w count w times."""

    options: ClassVar = {"observations": (Observing, 0.0)}
    metrics: ClassVar = ("observation_loss",)
    stream: ClassVar = OBSERVED_LOGP

    def apply(self, options: Options, logp_BT: Tensor, batch: Batch, gradient: Gradient) -> Gradient:
        """Also adds the metric `observation_loss`, NaN in a step without such tokens."""
        weight_BT = masked(batch, batch.weight.double()[:, None].expand(batch.mask.shape), OBSERVED_LOGP)
        return gradient.likelier(options["observations"], logp_BT, weight_BT, "observation_loss")


SINGLETONS, OBSERVATIONS = SmallGroups(), Observations()


@dataclass(frozen=True)
class MethodWarnings:
    """A method's own warnings: functions that return a text, or None."""

    options_warning: Callable[[Options], str | None] = lambda options: None  # before a run
    rewards_warning: Callable[[NDArray[np.float64], Options], str | None] = lambda rewards, options: None
    """Before the first step, from held-out rewards [prompts, responses], NaN where unknown."""
    metrics_warning: Callable[[Mapping[str, float], Options], str | None] = lambda metrics, options: None
    """In each step, from `Evaluation.metrics`."""


@dataclass(frozen=True)
class MethodRecipe:
    """What a method's recipe (`agro train NAME`) adds to its base, one of `agro.config.recipes.BASES`."""

    title: str
    """the method and its paper, in a sentence or two"""
    base: str = "samples"
    options: Mapping[str, Any] = field(default_factory=dict)
    """of the objective: required ones, and those that differ from their defaults"""
    shown: tuple[str, ...] = ()
    """options that the recipe shows with their defaults, since users may want to change them"""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """by dotted key, such as train.updates; None removes a setting of the base"""
    missing: str = ""
    """parts of the method that the recipe lacks"""
    commands: tuple[str, ...] = ()
    """lines that start it, if they differ from the base's; {name} stands for the recipe's name"""
    required: str = ""
    """what the user must supply, if it differs from the base's"""


@dataclass(frozen=True)
class Objective:
    """An entry of the table: the function, what it needs, how far it couples, and what the trainer uses.

    Fields that are functions take options with defaults filled in. If a required option is still missing,
    they return the most that the objective may need, or the farthest that it may couple.
    """

    function: Callable[..., Terms]
    source: str  # paper, equation
    requires: Callable[[Options], set[Need]]  # needs in addition to those of its options
    couples: Callable[[Options], Coupling] = lambda options: "row"
    """How far one row's gradient depends on other rows' streams."""
    ingredients: tuple[Ingredient, ...] = (SINGLETONS,)
    """Its other parts, in the order in which they change the gradient."""
    metrics: tuple[str, ...] = ()  # that the function may report
    rules: tuple[Rule, ...] = ()  # on the function's options
    anchor: Callable[[Options], ColumnNeed | None] = lambda options: None
    """The anchor in ρ, if it weights a response by r − βρ; None if β's term is separate, per token."""
    warnings: MethodWarnings = MethodWarnings()
    certainty: Certainty = "paper"
    called: str = ""  # in other libraries, such as 'TRL loss_type = "dapo"'
    of: str = ""  # a preset's base, the objective whose function it uses
    preset: Options = field(default_factory=dict)  # a preset's defaults that differ from its base's
    about: str = ""  # a preset's description, with its equation
    recipe: MethodRecipe | None = None
    """The recipe of `agro train NAME`, from `methods.toml`; None if another file declares it."""

    @cached_property
    def options(self) -> type[BaseModel]:
        """A pydantic model of the options of the function and of its ingredients."""
        added = {key: option for part in self.parts for key, option in part.options.items()}
        return model_of(self.function.__name__, {**self._declared, **added}, self.preset)

    @cached_property
    def _declared(self) -> Declared:
        """The function's own options."""
        return options_of(self.function)

    @property
    def parts(self) -> tuple[Ingredient, ...]:
        """The ingredients, and `OBSERVATIONS`, which every objective has."""
        return (*self.ingredients, OBSERVATIONS)

    @property
    def summary(self) -> str:
        """What it computes."""
        return self.about or (self.function.__doc__ or "").strip()

    def with_preset(self, explicit: Options) -> dict[str, Any]:
        """These options, and a preset's values for the others."""
        return {key: value for key, value in self.preset.items() if value is not REQUIRED} | dict(explicit)

    def function_options(self, options: Options) -> dict[str, Any]:
        """Those of `options` that the function takes."""
        return {key: value for key, value in options.items() if key in self._declared}

    def needs(self, options: Options) -> set[Need]:
        """What it needs with these options, defaults filled in."""
        # Of two needs with one name the ingredient's wins: a weight accepts stale samples, and corrects them.
        parts = (part.needs(options) for part in self.parts)
        needs = set[Need]().union(*parts, self.requires(options), needed_by(self._declared, options))
        return needs - {GROUPS} if options.get("singletons") == "pool" else needs

    def conflict(self, options: Options) -> str:
        """Why these options exclude each other, "" if they don't."""
        rules = chain(self.rules, *(part.rules for part in self.ingredients))
        reason = next(filter(None, (rule.broken(options) for rule in rules)), "")
        need = grouping(self.needs({**options, "singletons": "error"}))
        if reason or options.get("singletons") != "pool" or need == GROUPS:
            return reason
        compared = "doesn't compare responses" if need is None else f"needs {need.what}"
        return f'singletons = "pool" is for objectives that compare rewards in a group; this one {compared}'

    def coupling(self, options: Options) -> Coupling:
        """How far it couples with these options: pooled groups couple the step."""
        couples = self.couples(options)
        return "step" if options.get("singletons") == "pool" and couples == "group" else couples

    def defaults(self) -> dict[str, Any]:
        return defaults_of(self.options)

    def checked(self, name: str, explicit: Options) -> dict[str, Any]:
        """Fill in the defaults that exist; raises `Refused` for an unknown or invalid option."""
        return checked(name, self.options, explicit, partial=True)

    def resolve(self, name: str, explicit: Options) -> dict[str, Any]:
        """Fill in all defaults; raises `Refused` for an unknown, missing or invalid option."""
        resolved = checked(name, self.options, explicit, partial=False)
        reason = self.conflict(resolved)
        if reason:
            raise Refused(f"objective {name}: {reason}")
        return resolved

    def needed(self, explicit: Options) -> set[Need]:
        """`needs` of these options, which may be schedules, and of the others' defaults."""
        return self.needs(self.defaults() | dict(explicit))

    def averages(self, options: Options) -> str:
        """How ρ reduces over a response's tokens: "sum", or "token" for their mean."""
        return "sum" if self.anchor(options) is None else str(options.get("average", "sum"))


def wanted_streams(needs: Collection[Need]) -> list[str]:
    """The names of the streams needed, "logp" first."""
    return ["logp", *(need for need in ordered(needs) if isinstance(need, Stream))]


def blank(batch: Batch, stream: str) -> Tensor:
    """Zeros in a stream's shape: [B] for "value", else [B,T]."""
    shape = batch.mask.shape[:1] if stream == "value" else batch.mask.shape
    return torch.zeros(shape, dtype=torch.float64, device=batch.mask.device)


def masked(batch: Batch, values: Tensor, stream: str = "logp") -> Tensor:
    """Set a stream [B,T] to 0 outside its mask: the observed tokens for `OBSERVED_LOGP`, else the batch's
    mask. Values [B] stay as they are."""
    mask = batch.extra["observed"].bool() if stream == OBSERVED_LOGP else batch.mask
    return torch.where(mask, values, 0.0) if values.dim() == 2 else values


def always(*needs: Need) -> Callable[[Options], set[Need]]:
    return lambda options: set(needs)


def coupling(scope: Coupling) -> Callable[[Options], Coupling]:
    return lambda options: scope


def couples_regularized_reward(options: Options) -> Coupling:
    """By group, through the others' R, unless β is 0."""
    return "row" if options.get("beta") == 0 else "group"


def couples_baseline(options: Options) -> Coupling:
    """By step if the baseline is other groups or advantages are normalized over the step; else by group,
    through the others' weights, or their R unless the baseline is stored or β is 0."""
    if options["baseline"] == "step" or options.get("normalize"):
        return "step"
    if options.get("weight_baseline", "mean") != "mean":
        return "group"
    return "row" if options["baseline"] == "stored" else couples_regularized_reward(options)


def to_reference(options: Options) -> ColumnNeed:
    return REF_LOGP


def entry_of(name: str, target: Any) -> Objective:
    """The entry of a plug-in; raises `Refused` if it is neither an objective nor a function."""
    if isinstance(target, Objective):
        return target
    if not inspect.isfunction(target):
        raise Refused(f"objective.name: {name}: expected a function or an Objective, got {target!r:.80}")
    return _function_entry(name, target)


@cache
def _function_entry(name: str, function: Callable[..., Terms]) -> Objective:
    """The entry of a user's function."""
    needs = {REWARD, GROUPS}
    if "beta" in inspect.signature(function).parameters:
        needs.add(REF_LOGP)
    return Objective(function, name, requires=always(*needs), couples=coupling("step"))
