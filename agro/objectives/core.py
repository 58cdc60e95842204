"""How an objective is declared.

An objective is a pure function `(streams, batch, *, …options) -> Terms` of complete groups. `streams["logp"]`
and the other streams that it needs are float64, those of tokens with zeros outside the mask; it never sees
the model. What it returns is differentiated in `agro.objectives.evaluation`, so that a function holds its
equation and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel

from agro.errors import Refused
from agro.objectives import imitation, kl_term, weights
from agro.objectives.imitation import Imitation
from agro.objectives.needs import NEEDS, PAIRS, Column, Need, Stream, ordered, provided_by
from agro.objectives.options import REQUIRED, Singletons, checked, defaults_of, model_of
from agro.types import Batch

if TYPE_CHECKING:
    from torch import Tensor

    Streams = Mapping[str, Tensor]
else:
    Streams = Mapping[str, Any]  # evaluated with the types of options, which need no torch

Coupling = Literal["row", "group", "step"]
# How the equation is known: read in the authors' code or in that of the library in `called`; in the paper; in
# notes that quote it; or inferred from the abstract.
Certainty = Literal["code", "paper", "notes", "reconstructed"]
Options = Mapping[str, Any]
STREAMS = ("logp", *(need for need in NEEDS if isinstance(need, Stream)))
VALUES = frozenset(map(str, provided_by("value_head", NEEDS)))  # the streams of a value head


@dataclass(frozen=True)
class Terms:
    """What an objective returns. Its gradient is the surrogate's where there is one, else the loss's."""

    loss: Tensor  # the quantity to plot
    surrogate: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Warnings:
    """What a method has to say of its own: functions that return a text, or None."""

    of_options: Callable[[Options], str | None] = lambda options: None  # before a run
    of_rewards: Callable[[NDArray[np.float64], Options], str | None] = lambda rewards, options: None
    """Before the first step, from held-out rewards [prompts, responses], NaN where unknown."""
    of_metrics: Callable[[Mapping[str, float], Options], str | None] = lambda metrics, options: None
    """In each step, from `Evaluation.metrics`."""


@dataclass(frozen=True)
class Objective:
    """An entry of the table: the function, what it needs and how far it couples, and what the trainer uses of
    it.

    The functions of options take the given ones with defaults filled in; a required one may not be there yet,
    and then the answer is the most that the objective may need or couple.
    """

    function: Callable[..., Terms]
    source: str  # paper, equation
    requires: Callable[[Options], set[Need]]  # what the function itself needs
    couples: Callable[[Options], Coupling]  # how far one row's gradient depends on other rows' streams
    drops_groups: bool = True  # whether it has the option `singletons`
    weighted: bool = False  # whether it has the options of `agro.objectives.weights`
    centered: bool = False  # and `weight_baseline`: without a weight its gradients in a group sum to 0
    kl_term: bool = False  # whether it has the options `beta`, `kl` and `unbiased_kl`
    imitates: bool = False  # whether it has the options `imitation` and `imitation_reward`
    excludes: Callable[[Options], str] = lambda options: ""
    """Why the function's options exclude each other, "" where they don't."""
    anchor: Callable[[Options], Column | None] = lambda options: None
    """The log-probs in ρ, where it weighs a response by r − βρ; None where β's term is separate, token by
    token."""
    warnings: Warnings = Warnings()
    certainty: Certainty = "paper"
    called: str = ""  # in other libraries, such as 'TRL loss_type = "dapo"'
    of: str = ""  # of a preset: the objective whose function it is
    preset: Options = field(default_factory=dict)  # its defaults that differ from that function's
    about: str = ""  # of a preset: what it is, with its equation

    @cached_property
    def options(self) -> type[BaseModel]:
        """A pydantic model, from the function's signature."""
        return model_of(self.function, self.preset, **self._added())

    def _added(self) -> dict[str, tuple[Any, Any]]:
        """(annotation, default) of the options that aren't the function's own."""
        added = dict(weights.OPTIONS) if self.weighted else {}
        if self.centered:
            added |= weights.OF_GROUPS
        if self.kl_term:
            added |= kl_term.OPTIONS
        if self.imitates:
            added |= imitation.OPTIONS
        if self.drops_groups:
            added["singletons"] = (Singletons, "error")
        return added

    @property
    def summary(self) -> str:
        """What it computes."""
        return self.about or (self.function.__doc__ or "").strip()

    def with_preset(self, given: Options) -> dict[str, Any]:
        """The given options, and of a preset its own values of the others."""
        return {key: value for key, value in self.preset.items() if value is not REQUIRED} | dict(given)

    def of_function(self, options: Options) -> dict[str, Any]:
        """Those of `options` that the function takes."""
        return {key: value for key, value in options.items() if key not in self._added()}

    def needs(self, options: Options) -> set[Need]:
        """What it needs with these options, defaults filled in."""
        needs = self.requires(options)
        if self.weighted:
            needs = weights.needs(options) | needs  # its needs allow for stale samples, which it corrects
        if self.kl_term:
            needs = needs | kl_term.needs(options)
        if self.imitates:
            needs = needs | imitation.needs(options)
        return needs

    def conflict(self, options: Options) -> str:
        """Why these options exclude each other, "" where they don't."""
        found = self.excludes(options)
        if self.weighted and not found:
            found = weights.conflict(options)
        return found

    def weights(self, options: Options, logp_BT: Tensor, batch: Batch) -> Tensor | None:
        """[B,T] of each token's part of the gradient; None where all are 1."""
        return weights.weights(options, logp_BT, batch) if self.weighted else None

    def added_kl(self, options: Options, logp_BT: Tensor, batch: Batch) -> Terms | None:
        """The KL term that is added to the loss and isn't weighted; None without one."""
        terms = kl_term.kl_term(options, logp_BT, batch) if self.kl_term else None
        return None if terms is None else Terms(*terms)

    def imitation(self, options: Options, logp_BT: Tensor, batch: Batch) -> Imitation | None:
        """What imitation adds to the loss and its gradient; None without a share of it."""
        if not self.imitates:
            return None
        return imitation.imitation(options, logp_BT, batch, judged=PAIRS in self.requires(options))

    def defaults(self) -> dict[str, Any]:
        return defaults_of(self.function, self.preset, self._added())

    def checked(self, name: str, given: Options) -> dict[str, Any]:
        """The given options and the defaults of the others; raises `Refused` for an unknown or invalid
        one."""
        return checked(name, self.options, given, partial=True)

    def resolve(self, name: str, given: Options) -> dict[str, Any]:
        """All options with defaults filled in; raises `Refused` for an unknown, missing or invalid one."""
        out = checked(name, self.options, given, partial=False)
        why = self.conflict(out)
        if self.imitates and not why:
            why = imitation.conflict(given)
        if why:
            raise Refused(f"objective {name}: {why}")
        return out

    def needed(self, given: Options) -> set[Need]:
        """`needs` of options that may be schedules, without defaults."""
        return self.needs(self.defaults() | dict(given))

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


def masked(batch: Batch, stream: Tensor) -> Tensor:
    """A stream [B,T] with 0 outside the mask; one of [B] as it is."""
    return torch.where(batch.mask, stream, 0.0) if stream.dim() == 2 else stream
