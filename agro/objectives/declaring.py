"""What entries of objectives have in common: functions of the options that they are declared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from agro.objectives.core import Certainty, Coupling, Objective, Options
from agro.objectives.needs import GROUPS, REF_LOGP, REWARD, STORED_VALUE, Column, Need


def always(*needs: Need) -> Callable[[Options], set[Need]]:
    return lambda options: set(needs)


def regularized(*needs: Need) -> Callable[[Options], set[Need]]:
    """These, and the reference's log-probs unless β is 0."""

    def given(options: Options) -> set[Need]:
        return set(needs) if options.get("beta") == 0 else {*needs, REF_LOGP}

    return given


def by(coupling: Coupling) -> Callable[[Options], Coupling]:
    return lambda options: coupling


def by_regularized_reward(options: Options) -> Coupling:
    """By group through the R_i of the others, unless β is 0."""
    return "row" if options.get("beta") == 0 else "group"


def needs_baseline(options: Options) -> set[Need]:
    """Of an objective on regularized rewards with the option `baseline`."""
    return regularized(REWARD, STORED_VALUE if options["baseline"] == "stored" else GROUPS)(options)


def couples_baseline(options: Options) -> Coupling:
    """By group through the others' R, unless the baseline is stored or β is 0, or by their weights."""
    if options.get("weight_baseline") == "lower":
        return "group"
    return "row" if options["baseline"] == "stored" else by_regularized_reward(options)


def to_reference(options: Options) -> Column:
    return REF_LOGP


def preset(
    of: str,
    base: Objective,
    source: str,
    about: str,
    *,
    certainty: Certainty = "paper",
    called: str = "",
    **options: Any,
) -> Objective:
    """An entry for objective `of` with other defaults, under the name that its paper gives it."""
    return replace(
        base, source=source, certainty=certainty, called=called, of=of, preset=options, about=about
    )
