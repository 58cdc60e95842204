"""The methods of the panel: functions that give settings for the library's trainer, or why they don't apply.

The settings are a recipe and what is changed of it.

All have the same rates and updates. A recipe keeps its own schedule; all others have that of the recipe
`log`. Baselines read what a log has and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from reproductions.panel.jobs import Job

Facts = Mapping[str, Any]
Values = dict[str, Any]
Settings = Callable[[Job, Facts], Values | str]
RATES = (1e-3, 3e-4, 3e-3)  # the first one runs first
NOTHING = "nothing"
BETA = 0.1  # of objectives that need one, as in their recipes
STORED: Values = {"replay": 1.0, "group_size": 8}
RULES: dict[str, Values] = {  # for the size of a step
    "no rule for a step": {"gain_ratio": None, "step_kl": None},
    "nats alone": {"gain_ratio": None, "step_kl": 0.005},  # the default's for pairs and single responses
    "the ratio alone": {"gain_ratio": 0.75, "step_kl": None},  # that of the default for fresh samples
    "both rules": {"gain_ratio": 0.75, "step_kl": 0.005},  # that of the default for groups of a log
}
SPREAD = {"all groups": False, "different rewards alone": True}
RECIPES = {"groups": "log", "one each": "feedback", "pairs": "pairs", "fresh": "fresh"}
SQUARED = Path(__file__).with_name("squared_preference.py")
SINGLE = Path(__file__).with_name("single_responses.py")


def _imitation(job: Job, facts: Facts, *, of_all: bool) -> Values | str:
    if job.data == "fresh":
        return "reads no rewards: of fresh samples it would imitate all"
    chosen = {} if of_all else _good(job, facts)
    return {"objective": {"name": "sft"}, "data": {**STORED, **chosen}}


def _good(job: Job, facts: Facts) -> Values:
    """Draws the right responses, the winners, the best of each group, or the upper quarter of all ratings."""
    if job.rewards == "graded":
        return {"best_of_group": True}
    if job.rewards == "stars":
        return {"min_reward": facts["upper_quartile"]}
    return {"min_reward": 1.0}


def _stored(job: Job, facts: Facts, *, objective: Callable[[Facts], Values]) -> Values | str:
    """An objective that reads the rewards of a log, response by response."""
    if job.data == "fresh":
        return "is compared on logs"
    return {"objective": objective(facts), "data": STORED}


def _topr(job: Job, facts: Facts) -> Values | str:
    if not job.logs_start:
        return "needs the log-probs of whoever wrote the log"
    return {"objective": {"name": "topr", "baseline": facts["mean"]}, "data": STORED}


def _reinforce(job: Job, facts: Facts) -> Values:
    return {"objective": {"name": "reinforce"}, "data": {} if job.data == "fresh" else STORED}


def _of_pairs(job: Job, facts: Facts, *, values: Values) -> Values | str:
    if job.data != "pairs":
        return "needs judged pairs"
    return {"data": STORED, **values}


def _on_fresh(job: Job, facts: Facts, *, values: Values) -> Values | str:
    return values if job.data == "fresh" else "needs fresh samples"


def _default(job: Job, facts: Facts) -> Values:
    """The recipe that the library has for the job's data."""
    return {"recipe": RECIPES[job.data]}


def _shifted(job: Job, facts: Facts) -> Values | str:
    """The default where a reward scores the start: recipe `log` measures how much better the author is."""
    if job.data != "groups":
        return "the recipe has no shift"
    return {**_default(job, facts), "data": {"eval_prompts": True}}


def _imitating(job: Job, facts: Facts) -> Values | str:
    """The default of a log with a share of imitation, which falls to 0."""
    if job.data != "groups":
        return "is compared on groups of a log"
    return {**_default(job, facts), "objective": {"imitation": {"start": 1.0, "end": 0.0}}}


def _centered(job: Job, facts: Facts) -> Values | str:
    """The default on ratings less what their user gives to others."""
    if not job.users:
        return "the log says nothing of users"
    return {**_default(job, facts), "center_by": "user"}


def _rival(job: Job, facts: Facts, *, objective: Values) -> Values | str:
    """An objective of others on a log, with the default's rules for a step."""
    if job.data == "fresh":
        return "is compared on logs"
    return {"objective": objective, "data": STORED, "train": RULES["both rules"]}


def _fpa(job: Job, facts: Facts) -> Values | str:
    if job.data == "one each":
        return "compares the responses of a prompt"
    return _rival(job, facts, objective={"name": "fpa", "extrapolation": 1.0})


def _qrpo(job: Job, facts: Facts, *, beta: float) -> Values | str:
    """Eight responses of the start to each prompt, rewarded as the log's, are the reference's samples."""
    given = _rival(job, facts, objective={"name": "qrpo", "beta": beta})
    if isinstance(given, str):
        return given
    if job.data == "pairs" or job.environment:
        return "needs rewards of the reference's samples" if job.data == "pairs" else "is compared on texts"
    return {**given, "data": {**STORED, "value_store": True}}


def _other(job: Job, facts: Facts, *, recipe: str, spread: float) -> Values | str:
    """The recipes `replay` for fresh samples, and `mixed` for a log and as many fresh samples."""
    if recipe == "replay":
        return _on_fresh(job, facts, values={"recipe": recipe, "data": {"spread": spread}})
    if job.data != "groups":
        return "needs a log with several responses a prompt"
    return {"recipe": recipe, "data": {"spread": spread, "prompts": True}}


def _without(job: Job, facts: Facts, *, part: str) -> Values | str:
    """The default with one of its parts left out, or as another recipe has it."""
    given = _default(job, facts)
    if part in RULES:
        of_data = {"fresh": "the ratio alone", "groups": "both rules"}
        same = of_data.get(job.data, "nats alone")
        return "is the default" if part == same else {**given, "train": RULES[part]}
    if part == "the plain mean":
        fresh = {"baseline": "others"}  # of the group
        return {**given, "objective": fresh if job.data == "fresh" else {"weight_baseline": "mean"}}
    if part in SPREAD:
        return {**given, "data": {"spread": SPREAD[part]}} if job.data == "groups" else "draws all groups"
    if job.data == "fresh":
        return "fresh samples have no weight"
    root, ratio = {"weight_power": 0.5, "weight_max": 1.0}, {"weight_power": 1.0, "weight_max": 2.0}
    options: dict[str, Values] = {
        "no weight": {"weight": "none", "weight_normalize": "none", "weight_power": 1.0, "weight_max": 1.0},
        "the other power": ratio if job.data == "groups" else root,
        "not normalized": {"weight_normalize": "none"},
    }
    return {**given, "objective": options[part]}


def _single(job: Job, facts: Facts, *, name: str, mean: str) -> Values | str:
    """A candidate for one response a prompt. `mean`: its option that is the log's mean reward."""
    if job.data != "one each":
        return "is for one response a prompt"
    return _rival(job, facts, objective={"name": f"{SINGLE}:{name}", mean: facts["mean"]})


def _dro(facts: Facts) -> Values:
    return {"name": "dro", "beta": BETA}


def _kto(facts: Facts) -> Values:
    return {"name": "kto", "beta": BETA, "threshold": facts["mean"]}


def _squared(beta: float) -> Values:
    objective = {"name": f"{SQUARED}:SQUARED", "beta": beta, "singletons": "drop"}
    return {"objective": objective, "train": RULES["both rules"]}


PARTS = (  # the default without one of its parts
    "no weight",
    "the other power",  # min(2, π/π_ref) on logs; min(1, √(π/π_ref)) on pairs and single responses
    "not normalized",
    "the plain mean",  # of fresh samples the baseline of the others
    *SPREAD,
    *RULES,
)
METHODS: dict[str, Settings] = {
    NOTHING: lambda job, facts: {},
    "imitation of the good": partial(_imitation, of_all=False),
    "imitation of all": partial(_imitation, of_all=True),
    "TOPR": _topr,
    "REINFORCE": _reinforce,
    "DPO": partial(_of_pairs, values={"recipe": "dpo"}),
    "IPO": partial(_of_pairs, values={"objective": {"name": "ipo", "beta": BETA, "singletons": "drop"}}),
    **{f"SquaredPO, β = {beta}": partial(_of_pairs, values=_squared(beta)) for beta in (0.1, 1.0)},
    "KTO": partial(_stored, objective=_kto),
    "DRO": partial(_stored, objective=_dro),
    "FPA": _fpa,
    **{f"QRPO, β = {beta}": partial(_qrpo, beta=beta) for beta in (0.03, 0.1, 0.3)},
    **{
        f"TBRM, β = {beta}": partial(_rival, objective={"name": "tbrm", "beta": beta})
        for beta in (0.01, 0.03)
    },
    "negative token filtering": partial(_single, name="NTF", mean="threshold"),
    "RAE": partial(_single, name="RAE", mean="start"),
    "GRPO": partial(_on_fresh, values={"objective": {"name": "grpo"}}),
    "RLOO": partial(_on_fresh, values={"objective": {"name": "rloo"}}),
}
SIMPLE = (NOTHING, "imitation of the good")  # those that a default must not end below
SHIFTED = "the default with a reward"
PUBLISHED = tuple(METHODS)  # the others are of the library
METHODS |= {
    "the default": _default,
    SHIFTED: _shifted,
    "centered by user": _centered,
    "falling imitation": _imitating,
    **{
        f"{recipe}, spread = {str(spread).lower()}": partial(_other, recipe=recipe, spread=spread)
        for recipe in ("mixed", "replay")
        for spread in (True, 0.1, False)
    },
    **{part: partial(_without, part=part) for part in PARTS},
}
