"""Objectives: pure functions of log-probs over whole groups, one family a file, listed in `OBJECTIVES`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from agro.errors import Refused
from agro.objectives.clipped import grpo
from agro.objectives.consistency import agro, agro_onpolicy, squared_consistency
from agro.objectives.core import (
    REQUIRED,
    WAYS_OUT,
    Coupling,
    Evaluation,
    Need,
    NotFinite,
    Objective,
    Option,
    as_stream,
    differentiate,
    lack,
    least_responses,
    like,
)
from agro.objectives.learned_value import dro, prefix_consistency
from agro.objectives.policy_gradient import kl_pg, reinforce, rloo
from agro.objectives.preference import dpo, pair_consistency
from agro.objectives.supervised import sft
from agro.types import Batch

__all__ = [
    "OBJECTIVES",
    "WAYS_OUT",
    "Evaluation",
    "NotFinite",
    "Objective",
    "describe",
    "differentiate",
    "evaluate",
    "get",
    "lack",
    "least_responses",
    "names",
]


def _number(value: Any) -> bool:
    return (
        isinstance(value, (int, float, np.integer, np.floating))
        and not isinstance(value, bool)
        and bool(np.isfinite(value))
    )


def _not_negative(value: Any) -> bool:
    return _number(value) and value >= 0


def _one_of(*choices: Any) -> tuple[str, Any]:
    return f"one of {', '.join(map(repr, choices))}", lambda v: any(
        v is c or (isinstance(v, str) and v == c) for c in choices
    )


def _beta(default: Any = REQUIRED) -> Option:
    unit = "reward per nat of the response's log-ratio"
    return Option(
        default,
        unit,
        "strength of the regularisation towards the reference",
        "a number, 0 or more",
        _not_negative,
    )


def _beta_above_0() -> Option:
    """Where β = 0 would leave nothing to learn."""
    return replace(_beta(), expected="a number above 0", valid=lambda v: _number(v) and v > 0)


def _choice(default: Any, meaning: str, *choices: Any) -> Option:
    return Option(default, "choice", meaning, *_one_of(*choices))


SINGLETONS = _choice("error", "what to do with groups that have too few responses", "error", "drop")
UNJUDGED = _choice("error", "what to do with groups that have no pair", "error", "drop")
VOTES = _choice(
    "ignore",
    "the chance that the winner is the better one: 1, or the posterior mean of its votes",
    "ignore",
    "mean",
)
SCALE = _choice("reward", "whether the gradient carries the factor beta", "reward", "loss")


def _regularised(*always: Need) -> Any:
    """Needs of an objective that reads the reference's log-probs unless β is 0."""
    return lambda o: set(always) | ({"ref_logp"} if o.get("beta") != 0 else set())


def _coupled(o: Mapping[str, Any]) -> Coupling:
    """Group-coupled through R_i unless β is 0."""
    return "row" if o.get("beta") == 0 else "group"


def _fresh_for(o: Mapping[str, Any]) -> set[Need]:
    """What a token-level estimate of AGRO's regulariser needs besides."""
    kinds: dict[str, set[Need]] = {"triangular": {"fresh"}, "local": {"fresh", "kl"}}
    return kinds.get(o.get("regulariser", o.get("squared")), set())


def _agro_needs(o: Mapping[str, Any]) -> set[Need]:
    reference: set[Need] = {"ref_logp"} if o.get("weight") == "reference" else set()
    needs: set[Need] = _regularised("reward", "groups", *_fresh_for(o))(o)
    return needs | reference


def _agro_conflict(o: Mapping[str, Any]) -> str:
    if o["regulariser"] == "sequence":
        return ""
    if o["weight"] != "none":
        return f'regulariser = "{o["regulariser"]}" is for fresh samples, weight = "{o["weight"]}" for stored ones; set one of the two'
    if o["average"] == "sum":
        return ""
    return f'regulariser = "{o["regulariser"]}" estimates the pull of sums, but average = "{o["average"]}"; set one of the two'


def _onpolicy_conflict(o: Mapping[str, Any]) -> str:
    if o["squared"] == "sequence" or o["likelihood_ratio"] != "adaptive":
        return ""
    return (
        f'squared = "{o["squared"]}" leaves out what has zero mean, but likelihood_ratio = "adaptive" weighs it by the response itself, '
        "and then it hasn't; set one of the two"
    )


def _squares_of(o: Mapping[str, Any]) -> set[Need]:
    """Needs of squared_consistency."""
    anchor: Need = "behavior_logp" if o.get("anchor") == "behavior" else "ref_logp"
    return {"reward", anchor, "stored_value" if o.get("baseline") == "stored" else "groups"}


def _squares_conflict(o: Mapping[str, Any]) -> str:
    if o["baseline"] != "stored" or o["scale"] in ("square", "trajectory"):
        return ""
    return f'scale = "{o["scale"]}" divides by n − 1, which a stored baseline has no need of; take scale = "square" or "trajectory"'


def _valued(value: Need) -> Any:
    return lambda o: _regularised("reward", value)(o)


def _judged(o: Mapping[str, Any]) -> set[Need]:
    """What an objective on pairs needs."""
    votes: set[Need] = {"votes"} if o.get("votes") == "mean" else set()
    return {"pairs", "ref_logp", *votes}


def _judged_conflict(o: Mapping[str, Any]) -> str:
    if o["gap"] != "reward" or o["votes"] == "ignore":
        return ""
    return f'gap = "reward" knows the gap, but votes = "{o["votes"]}" estimates it; set one of the two'


def _fixed(value: Any) -> Any:
    return lambda o: value


AGRO = "AGRO, arXiv 2503.19612"

OBJECTIVES: dict[str, Objective] = {
    "agro": Objective(
        agro,
        f"{AGRO}, eq. 4; section 6",
        _agro_needs,
        lambda o: _coupled(o) if o["regulariser"] == "sequence" else "row",
        {
            "beta": _beta(),
            "scale": SCALE,
            "average": _choice(
                "sum",
                "over a response's tokens: with 'token' beta is per nat of the mean log-ratio, and stays of one size as responses grow",
                "sum",
                "token",
            ),
            "regulariser": _choice(
                "sequence",
                "estimate of the pull to the reference: on any data, or on fresh samples with less variance",
                "sequence",
                "triangular",
                "local",
            ),
            "weight": _choice(
                "none",
                "of each response's part of the gradient: 1, or min(1, π/π_ref) of the response, for stored samples",
                "none",
                "reference",
            ),
            "singletons": SINGLETONS,
        },
        _agro_conflict,
    ),
    "agro_onpolicy": Objective(
        agro_onpolicy,
        f"{AGRO}, eqs. 5 and 6",
        lambda o: _regularised(
            "reward", "fresh", "triples" if o.get("baseline") else "groups", *_fresh_for(o)
        )(o),
        _coupled,
        {
            "beta": _beta(),
            "baseline": _choice(
                False, "lower the variance of the likelihood-ratio part; some bias, groups of 3", False, True
            ),
            "likelihood_ratio": Option(
                1.0,
                "share",
                "of the likelihood-ratio part: 1 as in the paper, or 'adaptive', which keeps clear of its trap",
                "a number from 0 to 1, or 'adaptive'",
                lambda v: v == "adaptive" if isinstance(v, str) else _not_negative(v) and v <= 1,
            ),
            "squared": _choice(
                "sequence",
                "estimate of the squared log-ratio in that part: as it stands, or with less variance",
                "sequence",
                "triangular",
                "local",
            ),
            "singletons": SINGLETONS,
        },
        _onpolicy_conflict,
    ),
    "squared_consistency": Objective(
        squared_consistency,
        "GVPO, arXiv 2504.19599; VarGrad, arXiv 2503.18929; CoPG, arXiv 2406.19185; OAPL, arXiv 2602.19362; A*PO, arXiv 2505.20686",
        _squares_of,
        lambda o: "group" if o["baseline"] == "mean" else "row",
        {
            "beta": replace(_beta_above_0(), meaning="strength of the pull to the anchor"),
            "anchor": _choice(
                "reference",
                "the policy that β pulls to: the reference, or the recorded behaviour",
                "reference",
                "behavior",
            ),
            "baseline": _choice(
                "mean",
                "the group's mean, its soft maximum of the rewards, or one that data.value_store gives",
                "mean",
                "soft",
                "stored",
            ),
            "value_beta": Option(
                None,
                "reward",
                "β₁ of the soft maximum; beta where it is not given",
                "a number above 0",
                lambda v: v is None or (_number(v) and v > 0),
            ),
            "scale": _choice(
                "half_variance",
                "what multiplies the squares",
                "half_variance",
                "square",
                "pairs",
                "trajectory",
            ),
            "singletons": SINGLETONS,
        },
        _squares_conflict,
    ),
    "dro": Objective(
        dro, "DRO-V, arXiv 2405.19107", _valued("value"), _fixed("row"), {"beta": _beta(), "scale": SCALE}
    ),
    "prefix_consistency": Objective(
        prefix_consistency,
        f"{AGRO}, for every prefix; path consistency, arXiv 1702.08892",
        _valued("prefix_value"),
        _fixed("row"),
        {"beta": _beta(), "scale": SCALE},
    ),
    "rloo": Objective(
        rloo,
        "RLOO, arXiv 2402.14740",
        _regularised("reward", "groups"),
        _coupled,
        {"beta": _beta(0.0), "singletons": SINGLETONS},
    ),
    "reinforce": Objective(
        reinforce,
        "REINFORCE, Williams 1992",
        lambda o: {"reward", "groups"} if o.get("baseline") == "mean" else {"reward"},
        _fixed("row"),
        {
            "baseline": Option(
                "none",
                "reward",
                "b in r − b: none, the mean of the group, or a number",
                "'none', 'mean' or a number",
                lambda v: (isinstance(v, str) and v in ("none", "mean")) or _number(v),
            ),
            "singletons": SINGLETONS,
        },
    ),
    "kl_pg": Objective(
        kl_pg,
        f"{AGRO}, section 8",
        _fixed({"reward", "groups", "kl"}),
        _fixed("row"),
        {"beta": _beta(), "singletons": SINGLETONS},
    ),
    "grpo": Objective(
        grpo,
        "GRPO, arXiv 2402.03300, eq. 3",
        lambda o: {
            *_regularised("reward", "groups")(o),
            "old_logp" if o.get("ratio") == "old" else "behavior_logp",
        },
        _fixed("row"),
        {
            "ratio": _choice(
                "behavior",
                "what the importance ratio is against: the recorded behaviour, or the trainer when the batch was drawn",
                "behavior",
                "old",
            ),
            "clip": Option(
                (0.2, 0.2),
                "ratio",
                "how far below and above 1 the ratio may go",
                "two numbers, 0 or more",
                lambda v: isinstance(v, tuple) and len(v) == 2 and all(_not_negative(x) for x in v),
            ),
            "std": _choice(True, "divide the advantage by the group's standard deviation", True, False),
            "beta": _beta(0.0),
            "singletons": SINGLETONS,
        },
    ),
    "pair_consistency": Objective(
        pair_consistency,
        f"{AGRO}, Theorem 1 for two responses; IPO, arXiv 2310.12036; CoPG, arXiv 2406.19185; VIPO, arXiv 2410.22891",
        lambda o: _judged(o) | ({"reward"} if o.get("gap") == "reward" else set()),
        _fixed("group"),
        {
            "beta": _beta_above_0(),
            "gap": Option(
                0.5,
                "reward",
                "how much better the winner is: a number, or 'reward' for what the rewards say",
                "a number above 0, or 'reward'",
                lambda v: v == "reward" if isinstance(v, str) else _number(v) and v > 0,
            ),
            "votes": VOTES,
            "singletons": UNJUDGED,
        },
        _judged_conflict,
    ),
    "dpo": Objective(
        dpo,
        "DPO, arXiv 2305.18290, eq. 7; VDPO, arXiv 2410.22891",
        _judged,
        _fixed("group"),
        {
            "beta": replace(_beta_above_0(), unit="logit of a judgement per nat of the response's log-ratio"),
            "label_smoothing": Option(
                0.0,
                "probability",
                "that a judgement is the wrong way round",
                "a number from 0 to below 0.5",
                lambda v: _not_negative(v) and v < 0.5,
            ),
            "votes": VOTES,
            "singletons": UNJUDGED,
        },
    ),
    "sft": Objective(sft, "maximum likelihood", _fixed(set()), _fixed("row"), {}),
}


def names() -> list[str]:
    """Every objective."""
    return list(OBJECTIVES)


def get(name: str) -> Objective:
    if name not in OBJECTIVES:
        raise Refused(f"objective: expected one of {', '.join(OBJECTIVES)}, got {name!r}")
    return OBJECTIVES[name]


def describe(name: str, **options: Any) -> dict[str, Any]:
    """What an objective needs and how far it couples (both given the options), its options, its source."""
    entry = get(name)
    given = entry.defaults() | entry.checked(name, options)
    return {
        "name": name,
        "source": entry.source,
        "summary": (entry.function.__doc__ or "").strip(),
        "needs": sorted(entry.needs(given)),
        "couples": entry.couples(given),
        "options": {
            k: {
                "default": None if v.default is REQUIRED else v.default,
                "required": v.default is REQUIRED,
                "unit": v.unit,
                "meaning": v.meaning,
                "expected": v.expected,
            }
            for k, v in entry.options.items()
        },
    }


def evaluate(
    name: str, logp: Any, batch: Batch, *, streams: Mapping[str, Any] | None = None, **options: Any
) -> Evaluation:
    """Value and gradient of an objective at given log-probs.

    `logp` [B,T] and each of `streams` ("kl", "entropy", "prefix_value" [B,T]; "value" [B]) may be tensors, arrays or lists; the
    gradients come back as tensors for a tensor, else as arrays, in the dtype of `logp`. Positions outside the mask may hold anything and
    get a gradient of exactly 0. What the objective doesn't need it doesn't read. Computed in float64.

    Raises `Refused` naming the objective, the field and the rows where the batch lacks what it needs.
    """
    entry = get(name)
    resolved = entry.resolve(name, options)
    if "logp" in (streams or {}):
        raise Refused(
            f"objective {name}: streams: logp is the second argument; streams hold what is needed besides it"
        )
    needs = entry.needs(resolved)
    given = {"logp": as_stream(logp, "logp")}
    given |= {k: as_stream(v, k) for k, v in (streams or {}).items() if k in needs}
    out = differentiate(name, entry, given, batch.to(given["logp"].device), resolved)
    return Evaluation(out.loss, {k: like(v, logp) for k, v in out.grads.items()}, out.metrics)
