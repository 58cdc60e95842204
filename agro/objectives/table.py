"""The table of objectives: what is declared of each besides its function and options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agro.errors import Refused
from agro.objectives import own, trap
from agro.objectives.clipped import grpo, gspo
from agro.objectives.consistency import agro, agro_onpolicy
from agro.objectives.core import Coupling, Objective, Options, Warnings
from agro.objectives.learned_value import dro, prefix_consistency
from agro.objectives.needs import (
    BEHAVIOR_LOGP,
    FRESH,
    GROUPS,
    KL,
    OLD_LOGP,
    PREFIX_VALUE,
    REF_LOGP,
    REWARD,
    STORED_VALUE,
    TRIPLES,
    VALUE,
    Column,
    Need,
)
from agro.objectives.options import described
from agro.objectives.policy_gradient import kl_pg, reinforce, rloo, topr
from agro.objectives.preference import (
    dpo,
    judged_needs,
    pair_consistency,
    pair_consistency_conflict,
    pair_consistency_needs,
)
from agro.objectives.squares import squared_consistency
from agro.objectives.supervised import sft


def _always(*needs: Need) -> Callable[[Options], set[Need]]:
    return lambda options: set(needs)


def _regularized(*needs: Need) -> Callable[[Options], set[Need]]:
    """These, and the reference's log-probs unless β is 0."""

    def given(options: Options) -> set[Need]:
        return set(needs) if options.get("beta") == 0 else {*needs, REF_LOGP}

    return given


def _by(coupling: Coupling) -> Callable[[Options], Coupling]:
    return lambda options: coupling


def _by_regularized_reward(options: Options) -> Coupling:
    """By group through the R_i of the others, unless β is 0."""
    return "row" if options.get("beta") == 0 else "group"


def _to_reference(options: Options) -> Column:
    return REF_LOGP


def _token_level(options: Options, key: str) -> set[Need]:
    """What the token-level estimate in this option needs; at β = 0 there is nothing to estimate."""
    if options.get("beta") == 0:
        return set()
    estimates: dict[str, set[Need]] = {"sequence": set(), "triangular": {FRESH}, "local": {FRESH, KL}}
    return estimates[options[key]]


def _agro_needs(options: Options) -> set[Need]:
    return _regularized(REWARD, GROUPS)(options) | _token_level(options, "regularizer")


def _agro_couples(options: Options) -> Coupling:
    return _by_regularized_reward(options) if options["regularizer"] == "sequence" else "row"


def _agro_conflict(options: Options) -> str:
    estimate, weight, average = options["regularizer"], options["weight"], options["average"]
    if estimate == "sequence":
        return ""
    if weight != "none":
        return (
            f'regularizer = "{estimate}" is for fresh samples, weight = "{weight}" for stored ones; set one '
            "of the two"
        )
    if average != "sum":
        return f'regularizer = "{estimate}" is that of sums, but average = "{average}"; set one of the two'
    return ""


def _onpolicy_needs(options: Options) -> set[Need]:
    size = TRIPLES if options["baseline"] else GROUPS
    return _regularized(REWARD, FRESH, size)(options) | _token_level(options, "squared")


def _onpolicy_conflict(options: Options) -> str:
    if options["squared"] == "sequence" or options["likelihood_ratio"] != "adaptive":
        return ""
    return (
        f'squared = "{options["squared"]}" drops what has zero mean, but likelihood_ratio = "adaptive" '
        "weighs it by the "
        "response itself, and then it hasn't; set one of the two"
    )


def _squares_anchor(options: Options) -> Column:
    return BEHAVIOR_LOGP if options.get("anchor") == "behavior" else REF_LOGP


def _squares_needs(options: Options) -> set[Need]:
    baseline = STORED_VALUE if options["baseline"] == "stored" else GROUPS
    return {REWARD, _squares_anchor(options), baseline}


def _squares_couples(options: Options) -> Coupling:
    return "group" if options["baseline"] == "mean" else "row"


def _squares_conflict(options: Options) -> str:
    if options["baseline"] != "stored" or options["scale"] in ("square", "trajectory"):
        return ""
    return (
        f'scale = "{options["scale"]}" divides by n − 1, but baseline = "stored" allows n = 1; '
        'use scale = "square" or "trajectory"'
    )


def _reinforce_needs(options: Options) -> set[Need]:
    return {REWARD, GROUPS} if options["baseline"] == "mean" else {REWARD}


def _ratio_needs(options: Options) -> set[Need]:
    return {REWARD, GROUPS, OLD_LOGP if options["ratio"] == "old" else BEHAVIOR_LOGP}


def _grpo_needs(options: Options) -> set[Need]:
    return _ratio_needs(options) | _regularized()(options)


AGRO = "AGRO, arXiv 2503.19612"

OBJECTIVES: dict[str, Objective] = {
    "agro": Objective(
        agro,
        f"{AGRO}, eq. 4; section 6",
        _agro_needs,
        _agro_couples,
        excludes=_agro_conflict,
        anchor=_to_reference,
        weighted=True,
        imitates=True,
    ),
    "agro_onpolicy": Objective(
        agro_onpolicy,
        f"{AGRO}, eqs. 5 and 6",
        _onpolicy_needs,
        _by_regularized_reward,
        excludes=_onpolicy_conflict,
        anchor=_to_reference,
        warnings=Warnings(trap.of_options, trap.of_rewards, trap.of_metrics),
        imitates=True,
    ),
    "squared_consistency": Objective(
        squared_consistency,
        "GVPO, arXiv 2504.19599; VarGrad, arXiv 2503.18929; CoPG, arXiv 2406.19185; OAPL, arXiv 2602.19362; "
        "A*PO, arXiv 2505.20686",
        _squares_needs,
        _squares_couples,
        excludes=_squares_conflict,
        anchor=_squares_anchor,
        weighted=True,
        imitates=True,
    ),
    "dro": Objective(
        dro,
        "DRO-V, arXiv 2405.19107",
        _regularized(REWARD, VALUE),
        _by("row"),
        drops_groups=False,
        anchor=_to_reference,
        weighted=True,
        imitates=True,
    ),
    "prefix_consistency": Objective(
        prefix_consistency,
        f"{AGRO}, for every prefix; path consistency, arXiv 1702.08892",
        _regularized(REWARD, PREFIX_VALUE),
        _by("row"),
        drops_groups=False,
        imitates=True,
    ),
    "rloo": Objective(
        rloo,
        "RLOO, arXiv 2402.14740",
        _regularized(REWARD, GROUPS),
        _by_regularized_reward,
        anchor=_to_reference,
        weighted=True,
        imitates=True,
    ),
    "reinforce": Objective(
        reinforce,
        "REINFORCE, Williams 1992",
        _reinforce_needs,
        _by("row"),
        weighted=True,
        imitates=True,
    ),
    "kl_pg": Objective(kl_pg, f"{AGRO}, section 8", _always(REWARD, GROUPS, KL), _by("row"), imitates=True),
    "topr": Objective(
        topr,
        "TOPR, arXiv 2503.14286, eqs. 4 and 7",
        _always(REWARD, BEHAVIOR_LOGP),
        _by("row"),
        drops_groups=False,
        imitates=True,
    ),
    "grpo": Objective(
        grpo,
        "GRPO, arXiv 2402.03300, eq. 3",
        _grpo_needs,
        _by("row"),
        imitates=True,
    ),
    "gspo": Objective(
        gspo,
        "GSPO, arXiv 2507.18071, eqs. 5 to 7",
        _ratio_needs,
        _by("row"),
        imitates=True,
    ),
    "pair_consistency": Objective(
        pair_consistency,
        f"{AGRO}, Theorem 1 for two responses; IPO, arXiv 2310.12036; CoPG, arXiv 2406.19185; VIPO, arXiv "
        "2410.22891",
        pair_consistency_needs,
        _by("group"),
        excludes=pair_consistency_conflict,
        weighted=True,
        imitates=True,
    ),
    "dpo": Objective(
        dpo,
        "DPO, arXiv 2305.18290, eq. 7; VDPO, arXiv 2410.22891",
        judged_needs,
        _by("group"),
        weighted=True,
        imitates=True,
    ),
    "sft": Objective(
        sft,
        "maximum likelihood; with a weight iw-SFT, arXiv 2507.12856",
        _always(),
        _by("row"),
        drops_groups=False,
        weighted=True,
    ),
}


def names() -> list[str]:
    """Every objective."""
    return list(OBJECTIVES)


def get(name: str) -> Objective:
    """The entry of an objective; `file.py:NAME` and `module:NAME` are of the user's own."""
    if ":" in name:
        return own.load(name)
    if name not in OBJECTIVES:
        raise Refused(
            f"objective: expected one of {', '.join(OBJECTIVES)}, file.py:NAME or module:NAME, got {name!r}"
        )
    return OBJECTIVES[name]


def describe(name: str, **options: Any) -> dict[str, Any]:
    """What an objective needs and how far it couples (both given the options), its options, its source."""
    entry = get(name)
    given = entry.checked(name, options)
    return {
        "name": name,
        "source": entry.source,
        "summary": (entry.function.__doc__ or "").strip(),
        "needs": sorted(map(str, entry.needs(given))),
        "couples": entry.couples(given),
        "options": described(entry.options),
    }
