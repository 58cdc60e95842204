"""The kinds of data that the objectives are compared on, and which objective can use which."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from agro import objectives
from agro.config.recipes import recipes
from agro.objectives.core import Objective
from agro.objectives.needs import (
    BEHAVIOR_LOGP,
    GROUPS,
    PAIRS,
    REWARD,
    STORED_QUANTILE,
    TRIPLES,
    Need,
    ordered,
)
from reproductions.arena.task import GROUPS as ASKED
from reproductions.arena.task import OTHER, START, N

RATES = (1e-4, 3e-4, 1e-3)
RATE = 3e-4  # that counts as the default: the trainer's own is for models a thousand times larger
BETAS = (0.1, 0.01)  # of objectives whose β has no default; the first one counts as it
# `agro` with the weight and the baseline of a recipe, which aren't its defaults.
RECIPES = {"agro, log recipe": "log", "agro, fresh recipe": "fresh"}

LOGGED = frozenset({REWARD, BEHAVIOR_LOGP, GROUPS, TRIPLES})  # what the samples have


@dataclass(frozen=True)
class Kind:
    """Where the samples of an update come from."""

    name: str
    about: str
    replay: float = 0.0  # share of the groups that come from the log
    log: str = ""  # the model that wrote it
    lag: int = 0  # age of the fresh samples, in updates
    groups: int = ASKED  # prompts of an update
    n: int = N  # responses to each, where they are sampled

    def version(self, update: int) -> int:
        """The update after which the weights were as those that sample."""
        return max(0, update - self.lag)

    def of_rate(self, update: int, updates: int) -> float:
        """The share of the learning rate: it falls linearly to 0."""
        return 1 - update / updates

    @property
    def provided(self) -> frozenset[Need]:
        """What its samples have. Logs are judged too, but fresh samples aren't."""
        return LOGGED | {PAIRS} if self.replay == 1 else LOGGED


KINDS = {
    kind.name: kind
    for kind in (
        Kind("fresh", "samples of the present weights"),
        Kind("stale 1", "samples of the weights 1 update ago", lag=1),
        Kind("stale 10", "of those 10 updates ago", lag=10),
        Kind("stale 100", "of those 100 updates ago", lag=100),
        Kind("half", "half fresh, half from the log", 0.5, START),
        Kind("log", "a log of the start", 1.0, START),
        Kind("other's log", "a log of another model", 1.0, OTHER),
    )
}


@dataclass(frozen=True)
class Row:
    """One run."""

    objective: str
    kind: str
    rate: float = RATE
    beta: float | None = None  # None: the objective's default, or it has none
    seed: int = 0

    @property
    def file(self) -> str:
        words = (self.objective, self.kind, f"lr={self.rate:g}", f"beta={self.beta}", f"seed={self.seed}")
        return "_".join(words).replace(" ", "-").replace("'", "").replace("/", "-") + ".json"

    @property
    def data(self) -> Kind:
        return KINDS[self.kind]

    @property
    def base(self) -> str:
        """The objective that is trained."""
        return base(self.objective)

    @property
    def options(self) -> dict[str, Any]:
        of_beta = {} if self.beta is None else {"beta": self.beta}
        return {**settings(self.objective), **of_beta}


def names() -> list[str]:
    """All that take part: the objectives, and the recipes beside their own."""
    every = objectives.names()
    place = every.index("agro") + 1
    return [*every[:place], *RECIPES, *every[place:]]


def base(name: str) -> str:
    """The objective that is trained under this name."""
    return "agro" if name in RECIPES else name


def entry(name: str) -> Objective:
    return objectives.get(base(name))


@cache
def settings(name: str) -> dict[str, Any]:
    """Options that aren't the objective's defaults: a recipe's weight and baseline. β is of the grid."""
    if name not in RECIPES:
        return {}
    recipe = tomllib.loads(recipes()[RECIPES[name]].text)
    return {key: value for key, value in recipe["objective"].items() if "weight" in key or key == "baseline"}


@cache
def betas(name: str) -> tuple[float | None, ...]:
    """The values of β that an objective tries, the one that counts as its default first.

    (None,) where its default is taken, as of GRPO, whose β is 0.
    """
    option = entry(name).options.model_fields.get("beta")
    return BETAS if option is not None and option.is_required() else (None,)


@cache
def needs(name: str) -> frozenset[Need]:
    """With its defaults."""
    return frozenset(entry(name).needed(Row(name, "", beta=betas(name)[0]).options))


def same(name: str, known: Sequence[str]) -> str:
    """The first of `known` that is the same function with the same options; they have the same runs."""
    return next((other for other in known if _identity(other) == _identity(name)), name)


@cache
def _identity(name: str) -> tuple[Any, ...]:
    found = entry(name)
    options = found.defaults() | settings(name)
    return found.function, found.requires, json.dumps(options, sort_keys=True, default=str), betas(name)


def obstacle(name: str, kind: Kind) -> str:
    """Why an objective can't take part, "" where it can."""
    if base(name) == "props":
        return "trains a sampler, not a policy"
    required = [key for key, option in entry(name).options.model_fields.items() if option.is_required()]
    unknown = [key for key in required if key != "beta"]
    if unknown:
        return f"its option {', '.join(unknown)} has no default"
    needed = needs(name)
    for need in ordered(needed):
        if need.fresh_only:
            if kind.name != "fresh":
                return f"needs {need.what}"
        elif need.provider == "record" and need not in kind.provided:
            return f"needs {need.what}"
    if not chooses_by_reward(needed) and kind.replay < 1:
        return "reads no rewards, so that of fresh samples it would imitate all"
    return ""


def chooses_by_reward(needed: Collection[Need]) -> bool:
    """Whether an objective knows a good response from a bad one; one that doesn't is given the right ones."""
    return not {REWARD, PAIRS, STORED_QUANTILE}.isdisjoint(needed)
