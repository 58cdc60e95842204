"""What a run takes that names no method, β or learning rate: the recipe for its data, β by lengths and
rewards, and a rate that the run finds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from agro.config import RunConfig
from agro.io.numbers import short
from agro.objectives import get
from agro.objectives.options import described
from agro.store import Store
from agro.store.location import exists, location_of
from agro.train.trainable import kind_of

# The recipes' β = 0.01 is for rewards from 0 to 1 and 256 tokens. It goes with the rewards, and with 1/length
# of longer responses. On shorter ones 0.1 ended .01 to .03 lower (reproductions/panel/arguments.py).
LARGEST, PER_TOKEN = 0.01, 0.01 * 256
LETTERS = 4  # of a token, about, where a log has none
OF_METHOD = {
    "data": ("spread",),
    "train": ("gain_ratio", "step_kl", "schedule"),
}  # of a recipe, besides its objective


class Chosen(NamedTuple):
    """Settings by dotted key, and a sentence on each."""

    settings: dict[str, Any]
    notes: list[str]


def choose(values: Mapping[str, Any]) -> Chosen:
    """What nested values of a run leave open, of the method, `objective.beta` and `train.lr`."""
    config = RunConfig.of(values, "agro.train")
    chosen = Chosen({}, [])
    recipe = _recipe(config)
    if recipe:
        # What a recipe says of the method, but for β and what is given, by dotted key.
        theirs = RunConfig.load(recipe)
        options = {name: value for name, value in theirs.objective.options.items() if name != "beta"}
        found = {f"objective.{name}": value for name, value in options.items()}
        for section, names in OF_METHOD.items():
            given = getattr(config, section).model_fields_set
            said = getattr(theirs, section).model_fields_set
            for name in names:
                if name in said and name not in given:
                    found[f"{section}.{name}"] = getattr(getattr(theirs, section), name)
        chosen.settings.update(found)
        chosen.notes.append(f"the method is that of recipe {recipe}")
    entry = get(config.objective.name)
    is_asked = described(entry.options).get("beta", {}).get("required", False)
    if is_asked and "beta" not in config.objective.options:
        length, of_length = _length(config)
        spread, of_spread = _spread(config)
        beta = float(short(spread * min(LARGEST, PER_TOKEN / length)))
        chosen.settings["objective.beta"] = beta
        chosen.notes.append(f"objective.beta = {beta:g}, for {of_spread} and {of_length}")
    if "lr" not in config.train.model_fields_set:
        chosen.settings["train.lr"] = "auto"
        chosen.notes.append("train.lr = auto, found at the first step")
    return chosen


def _recipe(config: RunConfig) -> str:
    """The recipe for the data of a run that says no more of its method than agro and β; empty for another."""
    if config.objective.name != "agro" or config.objective.options.keys() - {"beta"} or config.phases:
        return ""
    share = config.data.replay_at(0)
    opened = None if share == 0 else _store(config)
    if opened is None:
        return "fresh" if share == 0 and config.train.groups > 1 else ""
    with opened as store:
        kind, _ = kind_of(store)
    if kind == "log" and share < 1:
        return "mixed"
    return kind if kind in ("log", "feedback") else ""


def _length(config: RunConfig) -> tuple[float, str]:
    """Tokens of a response: the mean of a log, else the most that are sampled."""
    lengths = []
    opened = None if config.data.replay_at(0) == 0 else _store(config)
    if opened is not None:
        with opened as store:
            rows = (row for group in store.survey.each_group_rows() for row in group)
            lengths = [row.length or len(row.response) / LETTERS for row in rows]
    if not lengths:
        return config.sampler.max_new, f"responses of at most {config.sampler.max_new} tokens"
    mean = max(1.0, math.fsum(lengths) / len(lengths))
    return mean, f"responses of {short(mean)} tokens on average"


def _spread(config: RunConfig) -> tuple[float, str]:
    """Of the rewards: from the lowest to the highest of a log; of 0 to 1 where nothing is known."""
    opened = _store(config)
    if opened is not None:
        with opened as store:
            found = store.survey.spread_of_rewards()
        if found is not None and found[1] > found[0]:
            return found[1] - found[0], f"rewards from {found[0]:g} to {found[1]:g}"
    return 1.0, "rewards from 0 to 1 (taken to be; none is known yet)"


def _store(config: RunConfig) -> Store | None:
    location = None if config.data.store is None else location_of(config.data.store)
    return None if location is None or not exists(location) else Store.open(location, read_only=True)
