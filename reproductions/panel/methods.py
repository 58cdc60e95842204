"""The methods of the panel, by methods.toml: functions that give settings for the trainer, or why not.

The settings are a recipe and what is changed of it. All have the same rates and updates. A recipe keeps its
own schedule; all others have that of the recipe `log`. Baselines read what a log has and no more.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

from reproductions import harness
from reproductions.panel.jobs import Data, Job

Facts = Mapping[str, Any]
Values = dict[str, Any]
Settings = Callable[[Job, Facts], Values | str]
RATES = (1e-3, 3e-4, 3e-3)  # the first one runs first
NOTHING, SHIFTED = "nothing", "the default with a reward"
STORED: Values = {"replay": 1.0, "group_size": 8}
RECIPES = {"groups": "log", "one each": "feedback", "pairs": "pairs", "fresh": "fresh"}
NO_RULES: Values = {"gain_ratio": None, "step_kl": None}
OF_TRAINER = ("recipe", "objective", "data", "center_by")
KEYS = (*OF_TRAINER, "only", "otherwise", "refused", "stored", "good", "rules", "betas", "on", "part")
FEATURES: dict[str, Callable[[Job], bool]] = {
    "environment": lambda job: job.environment,
    "no users": lambda job: not job.users,
    "other authors": lambda job: not job.logs_start,
}


def _settings(job: Job, facts: Facts, *, declared: Values) -> Values | str:
    """What a method of methods.toml changes for a job, or why it doesn't apply."""
    if declared.get("only", job.data) != job.data:
        return str(declared["otherwise"])
    for what, why in declared.get("refused", {}).items():
        if FEATURES[what](job) if what in FEATURES else job.data == what:
            return str(why)
    declared = declared | declared.get("on", {}).get(job.data, {})
    given: Values = {key: declared[key] for key in OF_TRAINER if key in declared}
    if given.get("recipe") == "default":
        given["recipe"] = RECIPES[job.data]
    if "objective" in given:
        given["objective"] = {name: _filled(value, facts) for name, value in given["objective"].items()}
    if declared.get("stored"):
        stored = {} if job.data == "fresh" else STORED
        given["data"] = stored | given.get("data", {}) | (_good(job, facts) if declared.get("good") else {})
    if "rules" in declared:
        given["train"] = NO_RULES | declared["rules"]
    return given


def _filled(value: Any, facts: Facts) -> Any:
    if not isinstance(value, str):
        return value
    if value.startswith("$"):
        return facts[value[1:]]
    return value.replace("HERE", str(Path(__file__).parent))


def _good(job: Job, facts: Facts) -> Values:
    """Draws the right responses, the winners, the best of each group, or the upper quarter of all ratings."""
    if job.rewards == "graded":
        return {"best_of_group": True}
    if job.rewards == "stars":
        return {"min_reward": facts["upper_quartile"]}
    return {"min_reward": 1.0}


def declared(methods: Mapping[str, Values]) -> dict[str, Values]:
    """Those of methods.toml, one for each β where several are named."""
    found: dict[str, Values] = {}
    kinds = get_args(Data)
    for name, values in methods.items():
        harness.refuse_unknown(values, KEYS, f"methods.toml: {name}")
        harness.refuse_unknown(
            values.get("refused", ()), (*kinds, *FEATURES), f"methods.toml: {name}, refused"
        )
        harness.refuse_unknown(values.get("on", ()), kinds, f"methods.toml: {name}, on")
        for kind, changes in values.get("on", {}).items():
            harness.refuse_unknown(changes, KEYS, f"methods.toml: {name}, on {kind}")
        for beta in values.get("betas", [None]):
            of_beta = {} if beta is None else {"objective": values["objective"] | {"beta": beta}}
            found[name.format(beta=beta)] = values | of_beta
    return found


_DECLARED = declared(tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")))
METHODS: dict[str, Settings] = {
    name: partial(_settings, declared=values) for name, values in _DECLARED.items()
}
PUBLISHED = tuple(METHODS)[: list(METHODS).index("the default")]  # the others are of the library
# The default without one of its parts.
PARTS = tuple(name for name, values in _DECLARED.items() if values.get("part"))
