"""The methods of the panel. Each gives settings for the library's trainer, or why it doesn't apply.

All have the same rates and updates. A recipe keeps its own schedule; all others have that of the recipe
`log`. Baselines read what a log has and no more; candidates are settings of the objective `agro` that could
become a default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from reproductions.panel.jobs import Job

Facts = Mapping[str, Any]
Values = dict[str, Any]
RATES = (1e-3, 3e-4, 3e-3)  # the first one runs first
NOTHING = "nothing"
BETA = 0.1  # of objectives that need one, as in their recipes
RIVAL_BETAS = (0.1, 0.01)  # as in recipes of others, and as in the default
STORED: Values = {"replay": 1.0, "group_size": 8}
HELD_OUT: Values = {"hold_out": 0.1, "hold_out_most": 128}
UNBOUNDED: Values = {"gain_ratio": None, "step_kl": None}
BOUNDED: Values = {"gain_ratio": None, "step_kl": 0.005}  # until 28 November 2026 that of the default
ROOT: Values = {"weight_max": 1.0, "weight_power": 0.5}
BEFORE: dict[str, Values] = {
    "fresh": {"baseline": "others", "weight_baseline": "optimal"},
    "pairs": ROOT,
    "one each": ROOT,
}
RECIPES = {"groups": "log", "one each": "feedback", "pairs": "pairs", "fresh": "fresh"}


@dataclass(frozen=True)
class Method:
    """`settings(job, facts)`: a recipe and what is changed of it, or why the method doesn't apply."""

    name: str
    about: str
    settings: Callable[[Job, Facts], Values | str]
    candidate: bool = False  # of the library, and no published method
    simple: bool = False  # one of those that a default must not end below


def _nothing(job: Job, facts: Facts) -> Values:
    return {}


def _imitation(job: Job, facts: Facts, *, of_all: bool) -> Values | str:
    if job.data == "fresh":
        return "reads no rewards: of fresh samples it would imitate all"
    chosen: Values = {}
    if not of_all:
        chosen = _good(job, facts)
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
    return {**values, "data": STORED}


def _on_fresh(job: Job, facts: Facts, *, values: Values) -> Values | str:
    return values if job.data == "fresh" else "needs fresh samples"


def _other(job: Job, facts: Facts, *, recipe: str, options: Values, train: Values) -> Values | str:
    """The recipes `replay` and `lora` for fresh samples, and `mixed` for a log and as many fresh samples."""
    values: Values = {"recipe": recipe, "objective": options, "train": train}
    if recipe == "mixed":
        if job.data != "groups":
            return "needs a log with several responses a prompt"
        return {**values, "data": {"prompts": True}}
    if recipe == "lora":  # all of it in float32, as these models are small
        values |= {"train": {**train, "gradient_checkpointing": False}, "policy": {"dtype": "float32"}}
    return _on_fresh(job, facts, values=values)


def _default(job: Job, facts: Facts) -> Values:
    """The recipe that the library has for the job's data."""
    return {"recipe": RECIPES[job.data]}


def _before(job: Job, facts: Facts, *, train: Values) -> Values:
    """The recipes as they were until 24 November 2026: fresh samples were compared in their group, and pairs
    and single responses had the weight of the recipe `log`."""
    return {**_default(job, facts), "objective": BEFORE.get(job.data, {}), "train": train}


def _held_out(job: Job, facts: Facts) -> Values | str:
    """The same without the prompts that the recipe holds out, which the panel's other runs train on."""
    if job.prompts < 200:
        return "a tenth of the prompts is fewer than 20, and none are held out"
    return {**_default(job, facts), "data": HELD_OUT}


def _by_nats(job: Job, facts: Facts) -> Values:
    return {**_default(job, facts), "train": BOUNDED}


def _shifted(job: Job, facts: Facts) -> Values | str:
    """The default where a reward scores the start: recipe `log` measures how much better the author is."""
    if job.data != "groups":
        return "the recipe has no shift"
    return {**_default(job, facts), "data": {"eval_prompts": True}}


def _centered(job: Job, facts: Facts) -> Values | str:
    """The default on ratings less what their user gives to others."""
    if not job.users:
        return "the log says nothing of users"
    return {**_default(job, facts), "center_by": "user"}


def _candidate(job: Job, facts: Facts, *, options: Values) -> Values | str:
    """The recipe for rewards of the job's data with other options of the objective."""
    if job.data == "fresh":
        return "is compared on logs"
    recipe = "feedback" if job.data == "one each" else "log"
    return {"recipe": recipe, "objective": options, "train": UNBOUNDED}


def _baseline_on_fresh(job: Job, facts: Facts, *, options: Values) -> Values | str:
    values = {"recipe": "fresh", "objective": {"baseline": "others", **options}, "train": UNBOUNDED}
    return _on_fresh(job, facts, values=values)


def _rival(job: Job, facts: Facts, *, objective: Values) -> Values | str:
    """An objective of others on a log, with the bound on a step's change that the default has."""
    if job.data == "fresh":
        return "is compared on logs"
    return {"objective": objective, "data": STORED, "train": BOUNDED}


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


def _of_reference(baseline: str, *, power: float = 1.0, most: float = 1.0, normalize: str = "none") -> Values:
    return {
        "weight": "reference",
        "weight_max": most,
        "weight_power": power,
        "weight_normalize": normalize,
        "weight_baseline": baseline,
    }


def _dro(facts: Facts) -> Values:
    return {"name": "dro", "beta": BETA}


def _kto(facts: Facts) -> Values:
    return {"name": "kto", "beta": BETA, "threshold": facts["mean"]}


LIKE_LOG = _of_reference("optimal", power=0.5, normalize="group")
CANDIDATES = {
    "balanced": ("min(1, √(π/π_ref)), the balanced baseline", _of_reference("balanced", power=0.5)),
    "no root": ("min(2, π/π_ref), the balanced baseline", _of_reference("balanced", most=2.0)),
    "optimal": ("min(1, √(π/π_ref)), the optimal baseline", _of_reference("optimal", power=0.5)),
    "crossfit": ("the same, the cross-fitted baseline", _of_reference("crossfit", power=0.5)),
    "normalized, balanced": (
        "min(1, √(π/π_ref)) normalized by group, the balanced baseline",
        _of_reference("balanced", power=0.5, normalize="group"),
    ),
    "normalized, crossfit": (
        "the same, the cross-fitted baseline",
        _of_reference("crossfit", power=0.5, normalize="group"),
    ),
    "geometric mean": (
        "the geometric mean of π/π_ref over the tokens, the group's mean",
        {**_of_reference("mean"), "weight_level": "mean"},
    ),
    "earlier": (
        "the recipe until November 2026: min(2, π/π_ref), the lower baseline",
        _of_reference("lower", most=2.0),
    ),
}
ON_FRESH = {
    "fresh, balanced": ("β = 0.01, the balanced baseline", {"weight_baseline": "balanced"}),
    "fresh, the mean": ("β = 0.01, the group's mean", {"weight_baseline": "mean"}),
    "fresh, earlier": ("β = 0.05, the group's mean", {"weight_baseline": "mean", "beta": 0.05}),
}

# By method: a recipe, the settings in words, and options of its objective.
OTHER_RECIPES: dict[str, tuple[str, str, Values]] = {
    "replay, by the sampler": (
        "replay",
        "min(1, π/μ), the lower baseline",
        {
            "weight": "behavior",
            "weight_max": 1.0,
            "weight_power": 1.0,
            "weight_normalize": "none",
            "weight_baseline": "lower",
        },
    ),
    "replay, root": (
        "replay",
        "the weight and the baseline of `log`",
        LIKE_LOG,
    ),
    "replay, no root": (
        "replay",
        "the weight and the baseline of `feedback`: min(2, π/π_ref)",
        _of_reference("optimal", most=2.0, normalize="group"),
    ),
    "mixed, β = 0.05": (
        "mixed",
        "β = 0.05, the weight and the baseline of `log`",
        {**LIKE_LOG, "beta": 0.05},
    ),
    "mixed, β = 0.01": ("mixed", "β = 0.01, the same", {**LIKE_LOG, "beta": 0.01}),
    "lora, in groups": ("lora", "compared in groups, with the optimal baseline", BEFORE["fresh"]),
    "lora": ("lora", "as it is", {}),
}

BOTH_WAYS = ("replay, by the sampler", "mixed, β = 0.05", "lora, in groups")  # run without the bound too

METHODS = {
    method.name: method
    for method in [
        Method(NOTHING, "the start", _nothing, simple=True),
        Method(
            "imitation of the good",
            "`sft` on the right responses, on the best of each group, the winners, or the upper quarter",
            partial(_imitation, of_all=False),
            simple=True,
        ),
        Method("imitation of all", "`sft` on all responses", partial(_imitation, of_all=True)),
        Method("TOPR", "the baseline is the log's mean reward", _topr),
        Method("REINFORCE", "without a baseline", _reinforce),
        Method("DPO", "the recipe `dpo`, β = 0.1", partial(_of_pairs, values={"recipe": "dpo"})),
        Method(
            "IPO",
            "β = 0.1",
            partial(
                _of_pairs,
                values={"objective": {"name": "ipo", "beta": BETA, "singletons": "drop"}},
            ),
        ),
        Method("KTO", "β = 0.1, the threshold is the log's mean reward", partial(_stored, objective=_kto)),
        Method("DRO", "β = 0.1", partial(_stored, objective=_dro)),
        Method("FPA", "λ = 1", _fpa),
        *(
            Method(f"QRPO, β = {beta}", "its quantiles are of eight samples", partial(_qrpo, beta=beta))
            for beta in RIVAL_BETAS
        ),
        *(
            Method(f"TBRM, β = {beta}", "", partial(_rival, objective={"name": "tbrm", "beta": beta}))
            for beta in RIVAL_BETAS
        ),
        Method("GRPO", "", partial(_on_fresh, values={"objective": {"name": "grpo"}})),
        Method("RLOO", "", partial(_on_fresh, values={"objective": {"name": "rloo"}})),
        Method(
            "the default", "the recipe for the data: log, feedback, pairs or fresh", _default, candidate=True
        ),
        Method(
            "by nats alone",
            "the same, a step bounded by `train.step_kl = 0.005` alone",
            _by_nats,
            candidate=True,
        ),
        Method(
            "the default before",
            "of fresh samples the optimal baseline of each group; of pairs and single responses the weight "
            "min(1, √(π/π_ref))",
            partial(_before, train=BOUNDED),
            candidate=True,
        ),
        Method(
            "without the bound",
            "the same, `train.step_kl` not given",
            partial(_before, train=UNBOUNDED),
            candidate=True,
        ),
        Method("a tenth held out", "the same, `data.hold_out` as in the recipe", _held_out, candidate=True),
        Method(
            "the default with a reward",
            "the same, which measures the start's mean reward on the held-out prompts: `baseline_shift`",
            _shifted,
            candidate=True,
        ),
        Method(
            "centered by user",
            "the same on a log of `agro import --center-by user`",
            _centered,
            candidate=True,
        ),
        Method(
            "log on 1 and 0",
            "the recipe `log`, pairs as rewards",
            partial(_of_pairs, values={"recipe": "log", "train": UNBOUNDED}),
            candidate=True,
        ),
        *(
            Method(
                name + ending,
                f"the recipe `{recipe}`, {about}{ending}",
                partial(_other, recipe=recipe, options=options, train=train),
                candidate=True,
            )
            for name, (recipe, about, options) in OTHER_RECIPES.items()
            for ending, train in (("", BOUNDED), (", without the bound", UNBOUNDED))
            if train is BOUNDED or name in BOTH_WAYS
        ),
        *(
            Method(name, about, partial(_candidate, options=options), candidate=True)
            for name, (about, options) in CANDIDATES.items()
        ),
        *(
            Method(name, about, partial(_baseline_on_fresh, options=options), candidate=True)
            for name, (about, options) in ON_FRESH.items()
        ),
        Method(
            "fresh, one each",
            "the default with one response to each of four times as many prompts",
            partial(_on_fresh, values={"recipe": "fresh", "responses": 1}),
            candidate=True,
        ),
        Method(
            "REINFORCE, one each",
            "the same without a baseline",
            partial(_on_fresh, values={"objective": {"name": "reinforce"}, "responses": 1}),
        ),
    ]
}
