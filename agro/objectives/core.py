"""How an objective is declared.

An objective is a pure function `(streams, batch, *, …options) -> Terms` of complete groups. `streams["logp"]`
and the other streams that it needs are float64, those of tokens with zeros outside the mask; it never sees
the model. What it returns is differentiated in `agro.objectives.evaluation`, so that a function holds its
equation and nothing else.

What entries of objectives have in common: functions of the options that they are declared with.

An objective of the user's own: `objective.name = "file.py:NAME"`, `"module:NAME"`, or the name of an
installed one, an entry point of `agro.objectives` (`agro.io.plugins`).

NAME is a function like those of agro,

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
# How the equation is known: read in the authors' code or in that of the library in `called`; in the paper; in
# notes that quote it; or inferred from the abstract.
Certainty = Literal["code", "paper", "notes", "reconstructed"]
Options = Mapping[str, Any]
STREAMS = ("logp", *(need for need in NEEDS if isinstance(need, Stream) and need != OBSERVED_LOGP))


@dataclass(frozen=True)
class Terms:
    """What an objective returns. Its gradient is the surrogate's where there is one, else the loss's."""

    loss: Tensor | float  # the quantity to plot
    surrogate: Tensor | None = None
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Gradient:
    """Loss and gradient of an objective on one batch, which its ingredients change one after the other."""

    loss: float
    logp_BT: Tensor  # d loss / d logp, or the `stream` of an ingredient
    metrics: Mapping[str, float]

    def likelier(self, share: float, logp_BT: Tensor, weight_BT: Tensor, metric: str) -> Gradient:
        """With −log π in the loss, mean by the weights, times `share`; NaN as `metric` of no weights."""
        if not weight_BT.any():
            return replace(self, metrics={**self.metrics, metric: math.nan})
        weight_BT = weight_BT / weight_BT.sum()
        mean = -float((weight_BT * logp_BT.detach()).sum())
        metrics = {**self.metrics, metric: mean}
        return Gradient(self.loss + share * mean, self.logp_BT - share * weight_BT, metrics)


@dataclass(frozen=True)
class Rule:
    """What options must be for each other, or one of them by itself. It says nothing of an objective that
    lacks one of them."""

    options: tuple[str, ...]
    needs: str  # what the first one's value needs, in words
    holds: Callable[..., bool]  # of their values

    def broken(self, options: Options) -> str:
        """What of these options isn't so, "" where all is."""
        if not options.keys() >= {*self.options}:
            return ""
        value, *others = (options[key] for key in self.options)
        if self.holds(value, *others):
            return ""
        got = "".join(f", got {json.dumps(other)}" for other in others)
        change = " or ".join(self.options)
        return f"{self.options[0]} = {json.dumps(value)} needs {self.needs}{got}; change {change}"


def only_with(option: str, values: Collection[Any], **others: tuple[Any, ...]) -> tuple[Rule, ...]:
    """Where `option` has one of these values, each of the others has one of its own."""

    def rule(other: str, allowed: tuple[Any, ...]) -> Rule:
        needs = f"{other} = {' or '.join(map(json.dumps, allowed))}"
        return Rule((option, other), needs, lambda value, got: value not in values or got in allowed)

    return tuple(rule(other, allowed) for other, allowed in others.items())


def ascending(lower: str, upper: str) -> Rule:
    """The first number isn't above the second one; None is no bound."""
    return Rule((lower, upper), f"{upper} of that or more", lambda low, high: high is None or low <= high)


class Ingredient:
    """A part that objectives share beside their functions: subclass it, and list an instance in entries."""

    options: ClassVar[Mapping[str, tuple[Any, Any]]]  # (annotation, default)
    metrics: ClassVar[tuple[str, ...]] = ()  # that it adds where its first option isn't at its default
    stream: ClassVar[str] = "logp"  # whose gradient it changes; without the stream it isn't applied
    rules: ClassVar[tuple[Rule, ...]] = ()

    def needs(self, options: Options) -> set[Need]:
        """What it needs with these options, defaults filled in."""
        return needed_by(self.options, options)

    def apply(self, options: Options, logp_BT: Tensor, batch: Batch, gradient: Gradient) -> Gradient:
        """The gradient with this part, at these log-probs."""
        return gradient


class SmallGroups(Ingredient):
    """What to do with groups that are too small, before the function sees the batch."""

    options: ClassVar = {"singletons": (Singletons, "error")}


class Observations(Ingredient):
    """Adds a share of −log π of what the environment answered, mean over these tokens of the step (ECHO,
    arXiv 2605.24517). A weight w counts the rows of a group w times."""

    options: ClassVar = {"observations": (Observing, 0.0)}
    metrics: ClassVar = ("observation_loss",)
    stream: ClassVar = OBSERVED_LOGP

    def apply(self, options: Options, logp_BT: Tensor, batch: Batch, gradient: Gradient) -> Gradient:
        """Adds the metric `observation_loss` as well: NaN in a step without an answer."""
        weight_BT = masked(batch, batch.weight.double()[:, None].expand(batch.mask.shape), OBSERVED_LOGP)
        return gradient.likelier(options["observations"], logp_BT, weight_BT, "observation_loss")


SINGLETONS, OBSERVATIONS = SmallGroups(), Observations()


@dataclass(frozen=True)
class MethodWarnings:
    """What a method has to say of its own: functions that return a text, or None."""

    options_warning: Callable[[Options], str | None] = lambda options: None  # before a run
    rewards_warning: Callable[[NDArray[np.float64], Options], str | None] = lambda rewards, options: None
    """Before the first step, from held-out rewards [prompts, responses], NaN where unknown."""
    metrics_warning: Callable[[Mapping[str, float], Options], str | None] = lambda metrics, options: None
    """In each step, from `Evaluation.metrics`."""


@dataclass(frozen=True)
class MethodRecipe:
    """What the recipe of a method, `agro train NAME`, says beyond its base, one of
    `agro.config.recipes.BASES`."""

    title: str
    """the method and its paper, in a sentence or two"""
    base: str = "samples"
    options: Mapping[str, Any] = field(default_factory=dict)
    """of the objective: those without a default, and those that differ from it"""
    shown: tuple[str, ...] = ()
    """options that the text shows with their defaults, since one may want to change them"""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """by dotted key, such as train.updates; None: the recipe doesn't set what its base does"""
    missing: str = ""
    """what the recipe lacks of the method"""
    commands: tuple[str, ...] = ()
    """lines that start it, where they aren't those of the base; {name} stands for the recipe's name"""
    required: str = ""
    """what must be given, where it isn't what the base requires"""


@dataclass(frozen=True)
class Objective:
    """An entry of the table: the function, what it needs and how far it couples, and what the trainer uses of
    it.

    The functions of options take the given ones with defaults filled in; a required one may not be there yet,
    and then the answer is the most that the objective may need or couple.
    """

    function: Callable[..., Terms]
    source: str  # paper, equation
    requires: Callable[[Options], set[Need]]  # what the function needs besides what its options say
    couples: Callable[[Options], Coupling] = lambda options: "row"
    """How far one row's gradient depends on other rows' streams."""
    ingredients: tuple[Ingredient, ...] = (SINGLETONS,)
    """Its other parts, in the order in which they are applied to the gradient."""
    metrics: tuple[str, ...] = ()  # that the function may report
    rules: tuple[Rule, ...] = ()  # of the function's options
    anchor: Callable[[Options], ColumnNeed | None] = lambda options: None
    """The log-probs in ρ, where it weighs a response by r − βρ; None where β's term is separate, token by
    token."""
    warnings: MethodWarnings = MethodWarnings()
    certainty: Certainty = "paper"
    called: str = ""  # in other libraries, such as 'TRL loss_type = "dapo"'
    of: str = ""  # of a preset: the objective whose function it is
    preset: Options = field(default_factory=dict)  # its defaults that differ from that function's
    about: str = ""  # of a preset: what it is, with its equation
    recipe: MethodRecipe | None = None
    """What `agro train NAME` trains with, by `methods.toml`; None where another file says it."""

    @cached_property
    def options(self) -> type[BaseModel]:
        """A pydantic model, from the function's signature."""
        added = {key: option for part in self.parts for key, option in part.options.items()}
        return model_of(self.function.__name__, {**self._own, **added}, self.preset)

    @cached_property
    def _own(self) -> Declared:
        """The options of the function."""
        return options_of(self.function)

    @property
    def parts(self) -> tuple[Ingredient, ...]:
        """The ingredients, and the share of what an environment answers, which every objective has."""
        return (*self.ingredients, OBSERVATIONS)

    @property
    def summary(self) -> str:
        """What it computes."""
        return self.about or (self.function.__doc__ or "").strip()

    def with_preset(self, explicit: Options) -> dict[str, Any]:
        """The given options, and of a preset its own values of the others."""
        return {key: value for key, value in self.preset.items() if value is not REQUIRED} | dict(explicit)

    def function_options(self, options: Options) -> dict[str, Any]:
        """Those of `options` that the function takes."""
        return {key: value for key, value in options.items() if key in self._own}

    def needs(self, options: Options) -> set[Need]:
        """What it needs with these options, defaults filled in."""
        # Of two with one name the ingredient's stays: a weight allows for stale samples, which it corrects.
        parts = (part.needs(options) for part in self.parts)
        needs = set[Need]().union(*parts, self.requires(options), needed_by(self._own, options))
        return needs - {GROUPS} if options.get("singletons") == "pool" else needs

    def conflict(self, options: Options) -> str:
        """Why these options exclude each other, "" where they don't."""
        rules = chain(self.rules, *(part.rules for part in self.ingredients))
        reason = next(filter(None, (rule.broken(options) for rule in rules)), "")
        need = grouping(self.needs({**options, "singletons": "error"}))
        if reason or options.get("singletons") != "pool" or need == GROUPS:
            return reason
        compared = "doesn't compare responses" if need is None else f"needs {need.what}"
        return f'singletons = "pool" is for objectives that compare rewards in a group; this one {compared}'

    def coupling(self, options: Options) -> Coupling:
        """`couples`, and by step where groups of one response are one group."""
        couples = self.couples(options)
        return "step" if options.get("singletons") == "pool" and couples == "group" else couples

    def defaults(self) -> dict[str, Any]:
        return defaults_of(self.options)

    def checked(self, name: str, explicit: Options) -> dict[str, Any]:
        """The given options and the defaults of the others; raises `Refused` for an unknown or invalid
        one."""
        return checked(name, self.options, explicit, partial=True)

    def resolve(self, name: str, explicit: Options) -> dict[str, Any]:
        """All options with defaults filled in; raises `Refused` for an unknown, missing or invalid one."""
        resolved = checked(name, self.options, explicit, partial=False)
        reason = self.conflict(resolved)
        if reason:
            raise Refused(f"objective {name}: {reason}")
        return resolved

    def needed(self, explicit: Options) -> set[Need]:
        """`needs` of options that may be schedules, without defaults."""
        return self.needs(self.defaults() | dict(explicit))

    def averages(self, options: Options) -> str:
        """How ρ is taken over the tokens of a response: "sum" or "token", their mean."""
        return "sum" if self.anchor(options) is None else str(options.get("average", "sum"))


def wanted_streams(needs: Collection[Need]) -> list[str]:
    """Log-probs, and what else is needed."""
    return ["logp", *(need for need in ordered(needs) if isinstance(need, Stream))]


def blank(batch: Batch, stream: str) -> Tensor:
    """Zeros [B,T], or [B] for the value of a prompt."""
    shape = batch.mask.shape[:1] if stream == "value" else batch.mask.shape
    return torch.zeros(shape, dtype=torch.float64, device=batch.mask.device)


def masked(batch: Batch, values: Tensor, stream: str = "logp") -> Tensor:
    """Values [B,T] of a stream with 0 outside its mask, which is the batch's of all but the observations'
    log-probs; [B] as they are."""
    mask = batch.extra["observed"].bool() if stream == OBSERVED_LOGP else batch.mask
    return torch.where(mask, values, 0.0) if values.dim() == 2 else values


def always(*needs: Need) -> Callable[[Options], set[Need]]:
    return lambda options: set(needs)


def coupling(scope: Coupling) -> Callable[[Options], Coupling]:
    return lambda options: scope


def couples_regularized_reward(options: Options) -> Coupling:
    """By group through the R_i of the others, unless β is 0."""
    return "row" if options.get("beta") == 0 else "group"


def couples_baseline(options: Options) -> Coupling:
    """By group through the others' R, unless the baseline is stored or β is 0, or by their weights; by
    step where other groups are it, or advantages are normalized over the step."""
    if options["baseline"] == "step" or options.get("normalize"):
        return "step"
    if options.get("weight_baseline", "mean") != "mean":
        return "group"
    return "row" if options["baseline"] == "stored" else couples_regularized_reward(options)


def to_reference(options: Options) -> ColumnNeed:
    return REF_LOGP


def entry_of(name: str, target: Any) -> Objective:
    """The entry of a plug-in; raises `Refused` where it is neither an objective nor a function."""
    if isinstance(target, Objective):
        return target
    if not inspect.isfunction(target):
        raise Refused(f"objective.name: {name}: expected a function or an Objective, got {target!r:.80}")
    return _of_function(name, target)


@cache
def _of_function(name: str, function: Callable[..., Terms]) -> Objective:
    """The entry of a user's function."""
    needs = {REWARD, GROUPS}
    if "beta" in inspect.signature(function).parameters:
        needs.add(REF_LOGP)
    return Objective(function, name, requires=always(*needs), couples=coupling("step"))
