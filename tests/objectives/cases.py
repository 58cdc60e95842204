"""Random batches for the tests of objectives, and variants of every objective, made from its entry."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import independent
import numpy as np
import pytest
from independent.base import Case, Result, imitating, shares, shifted, weighted, with_kl

from agro import Batch, objectives
from agro.errors import Refused
from agro.objectives import Evaluation, Ingredient, Need
from agro.objectives.ingredients import BASELINE_SHIFT, KL_TERM, WEIGHT, WEIGHT_BASELINE, Imitation

FIELDS = ("ref_logp", "behavior_logp", "old_logp")
DRAWN = (*FIELDS, "old_value")
TOKEN_STREAMS = (
    *("logp", "kl", "ref_mean", "ref_square", "prefix_value", "proposal", "proposal_mean", "normalizer"),
)
EXTRA = (
    *("token_reward", "stored_value", "stored_quantile", "hinted", "meaning"),
    *("reward_parts", "part_weights"),
)

NUMBER = 0.4  # a number that every option takes; of two numbers the first is another
OWN = 2  # responses of a group that are the policy's, without a hint; others may be an expert's
PAIRS = 4  # variants of an objective that differ from its defaults in two places, at most
THOROUGH = ("agro", "grpo", "deepseek_v32", "rloo", "dpo", "sft")


def values_of(kind: Any, number: float = NUMBER) -> list[Any]:
    """Each choice that a type has, and a representative of its numbers."""
    if kind is bool:
        return [False, True]
    if kind is float:
        return [number]
    if get_origin(kind) is tuple:
        return [(0.1, number, 0.1)[: len(get_args(kind))]]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [
        value for member in get_args(kind) if member is not type(None) for value in values_of(member, number)
    ]


def declared(function: Any) -> dict[str, list[Any]]:
    """By option of an objective's function the values to try, the default first.

    They include 0 where β may be 0.
    """
    out = {}
    hints = get_type_hints(function, include_extras=True)
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            kind, option = get_args(hints[key])
            values = values_of(kind, NUMBER + (option.gt or 0.0))
            if key == "beta" and option.ge == 0:
                values.append(0.0)
            if parameter.default is not parameter.empty:
                values = [parameter.default, *(v for v in values if v != parameter.default)]
            out[key] = values
    return out


def variants_of(name: str) -> list[dict[str, Any]]:
    """The first values, those that differ from them in one place, and some that differ in two, without
    conflicting ones.

    Besides, with everything else at its first value, each advantage and those of the ingredients that it has.
    """
    entry = objectives.get(name)
    if entry.of:  # its other options are those of another objective
        return [{key: NUMBER for key, field in entry.options.model_fields.items() if field.is_required()}]
    of_option = declared(entry.function)
    required = {
        k: values[0] for k, values in of_option.items() if entry.options.model_fields[k].is_required()
    }
    singles, pairs = (
        [required | options for options in differing(of_option, places) if fits(entry, required | options)]
        for places in (1, 2)
    )
    pairs = pairs[:: len(pairs) // PAIRS + 1]
    ingredients = [required | options for options in variants_of_ingredients(name, entry)]
    return [required, *singles, *pairs, *ingredients]


def differing(of_option: dict[str, list[Any]], places: int) -> list[dict[str, Any]]:
    """Options that differ from the first values in so many places; each advantage is tried alone."""
    out = []
    for keys in itertools.combinations(of_option, places):
        if places == 1 or "advantage" not in keys:
            chosen = itertools.product(*(of_option[key][1:] for key in keys))
            out += [dict(zip(keys, values)) for values in chosen]
    return out


def fits(entry: objectives.Objective, options: dict[str, Any]) -> bool:
    return not entry.conflict(entry.defaults() | options)


def variants_of_ingredients(name: str, entry: objectives.Objective) -> list[dict[str, Any]]:
    """Options that aren't the function's own: all for some objectives, since they are computed in one place,
    and one of each kind for the others."""
    weighs = WEIGHT in entry.ingredients
    imitates = any(isinstance(part, Imitation) for part in entry.ingredients)
    out: list[dict[str, Any]] = []
    if weighs:
        out.append({"weight": "reference"})
    if imitates:
        out.append({"imitation": NUMBER})
    if KL_TERM in entry.ingredients:
        out.append({"beta": NUMBER, "unbiased_kl": True})
    return out + variants_of_all(entry, weighs, imitates) if name in THOROUGH else out


def variants_of_all(entry: objectives.Objective, weighs: bool, imitates: bool) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    bounds = {"weight_min": 1 - NUMBER, "weight_max": 1 + NUMBER}
    if weighs:
        out.append({"weight": "behavior", **bounds})
        out.append({"weight": "mismatch", "weight_level": "token", "weight_max": None})
        out.append({"weight": "behavior", "weight_level": "mean", "weight_rule": "mask", **bounds})
    if WEIGHT_BASELINE in entry.ingredients:
        out.append({"weight": "reference", "weight_power": 0.5, "weight_baseline": "optimal"})
        out.append({"weight": "reference", "weight_normalize": "group", "weight_baseline": "optimal"})
        out.append({"weight_baseline": "optimal"})
    if BASELINE_SHIFT in entry.ingredients:
        out.append({"baseline_shift": NUMBER})
        out.append({"baseline_shift": NUMBER, "weight": "reference"})
    if KL_TERM in entry.ingredients:
        for kl in ({}, {"kl": "k2"}, {"kl": "k2", "unbiased_kl": True}):
            out.append({"beta": NUMBER} | kl)
    if imitates and weighs:
        out.append({"imitation": NUMBER, "weight": "reference"})
    return out


def in_one_row(name: str, options: dict[str, Any]) -> bool:
    """Whether each response has to be one row."""
    try:
        evaluate(draw_for(objectives.get(name).needed(options), 0, sizes=(3, 3)), name, options)
    except Refused as error:
        return "each response in one row" in str(error)
    return False


# Filled at the end: (objective, options, what it needs); "rows" among the needs: each response is one row.
VARIANTS: list[tuple[str, dict[str, Any], set[Any]]] = []
NIGHTLY = pytest.mark.nightly


def least(needs: set[Any]) -> int:
    """Responses that a group must have."""
    return objectives.least_responses({need for need in needs if isinstance(need, Need)})


def least_groups(options: dict[str, Any]) -> int:
    """Groups that a step must have."""
    return 2 if options.get("baseline") == "step" else 1


@dataclass(frozen=True)
class Shape:
    """What a random batch looks like."""

    groups: int = 4
    sizes: tuple[int, int] = (3, 5)  # least and most responses of a group
    length: int = 7  # tokens of a row
    rewards: str = "normal"  # or binary, equal
    spread: float = 0.3  # standard deviation of the log-ratios
    far: float = 1.0  # factor on the log-probs
    episodes: bool = True  # some responses have up to three rows
    weights: bool = True  # groups differ in weight
    junk: bool = True  # NaN, infinities and huge numbers where the mask isn't set


def draw(seed: int, **how: Any) -> Case:
    """A random batch; `how` are fields of `Shape`.

    Groups and lengths are ragged, the rows of a group are scattered, the mask has holes. Some responses of a
    group are judged.
    """
    case: Case = pickle.loads(_drawn(seed, Shape(**how)))
    return case


@functools.cache
def _drawn(seed: int, shape: Shape) -> bytes:
    """The pickled batch: hundreds of tests ask for the same one, and some change theirs."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[Any, Any, float, float]] = []
    for g in range(shape.groups):
        name = [f"prompt {g}", g, ("prompt", g), frozenset({g}), None, g + 0.5][g % 6 if g < 6 else 0]
        weight = float(rng.choice([0.25, 1.0, 3.0])) if shape.weights else 1.0
        equal = float(rng.normal())
        for i in range(int(rng.integers(shape.sizes[0], shape.sizes[1] + 1))):
            reward = {"normal": rng.normal(), "binary": rng.integers(2), "equal": equal}[shape.rewards]
            pieces = int(rng.integers(1, 4)) if shape.episodes and rng.random() < 0.3 else 1
            rows += [(name, (g, i), float(reward), weight)] * pieces
    rows = [rows[i] for i in rng.permutation(len(rows))]
    B, T = len(rows), shape.length
    mask = rng.random((B, T)) < 0.6
    mask[np.arange(T) >= rng.integers(2, T + 1, size=(B, 1))] = False
    mask[:, 0] = False
    mask[~mask.any(1), 1] = True
    logp = -shape.far * np.exp(rng.normal(size=(B, T)))
    near = [np.minimum(logp + shape.spread * rng.normal(size=(B, T)), 0.0) for _ in FIELDS]
    streams = [logp, *near, np.exp(rng.normal(size=(B, T)))]
    if shape.junk:
        for x in streams:
            x[~mask] = rng.choice([np.nan, np.inf, -np.inf, 1e300, 0.0, 5.0], size=int((~mask).sum()))
    group, response, reward, weight = zip(*rows)
    # Of generators of their own, so that what is drawn before stays as it was.
    more, late, last = (np.random.default_rng([seed, number]) for number in (1, 3, 4))
    pairs, votes = judgments(group, response, np.random.default_rng([seed, 2]))

    def masked(values: np.ndarray) -> np.ndarray:
        return np.where(mask, values, np.nan if shape.junk else 0.0)

    prefix_value = masked(more.normal(size=(B, T)))
    token_reward = np.where(more.random((B, T)) < 0.5, more.normal(size=(B, T)), np.nan)
    known = {g: float(more.normal()) for g in dict.fromkeys(group)}
    kinds = {y: late.choice(["policy", "policy", "expert", "hint"]) for y in dict.fromkeys(response)}
    kinds |= {(g, i): "policy" for g, i in kinds if i < OWN}
    quantiles = {y: float(last.random()) for y in dict.fromkeys(response)}
    parts = {y: last.normal(size=2).tolist() for y in dict.fromkeys(response)}
    case = Case(
        *(streams[0], mask, list(reward), list(group), list(response), list(weight), *streams[1:]),
        prefix_value=prefix_value,
        token_reward=token_reward,
        value=list(more.normal(size=B)),
        stored_value=[known[g] for g in group],
        pairs=pairs,
        votes=votes,
        role=["expert" if kinds[y] == "expert" else "policy" for y in response],
        hinted=[float(kinds[y] == "hint") for y in response],
        meaning=[float(i // 2) for _, i in response],  # two and two responses of a group have one
        proposal=masked(late.random((B, T))),
        proposal_mean=masked(late.normal(size=(B, T)) - 2),
        old_value=masked(prefix_value + 0.5 * late.normal(size=(B, T))),
        ref_mean=masked(-late.random((B, T))),
        ref_square=masked(late.random((B, T))),
        normalizer=masked(last.normal(size=(B, T))),
        stored_quantile=[quantiles[y] for y in response],
        reward_parts=[parts[y] for y in response],
        part_weights=[[1.0, 0.5] for _ in response],
    )
    return pickle.dumps(case)


def judgments(
    group: Any, response: Any, rng: np.random.Generator
) -> tuple[list[Any], list[tuple[float, float]]]:
    """One to three judged pairs of each group that has two responses, and their votes, which differ: ties are
    in tests/objectives/test_by_hand.py."""
    pairs: list[Any] = []
    for g in dict.fromkeys(group):
        members = list(dict.fromkeys(y for y, h in zip(response, group) if h == g))
        every = [(a, b) for a in members for b in members if a != b]
        pairs += [every[i] for i in rng.integers(len(every), size=rng.integers(1, 4))] if every else []
    votes = rng.integers(6, size=(len(pairs), 2))
    return pairs, [(float(a + (a == b)), float(b)) for a, b in votes]


def draw_for(needs: set[str], seed: int, **how: Any) -> Case:
    """`draw`, without episodes where a response has to be one row; of the reference where it has to be."""
    case = draw(seed, **{"episodes": "rows" not in needs, **how})
    return change(case, behavior_logp=case.ref_logp.copy()) if "of_reference" in needs else case


def batch_of(case: Case, **changes: Any) -> Batch:
    given: dict[str, Any] = {
        "mask": case.mask,
        "reward": case.reward,
        "group": case.group,
        "response": case.response,
        "weight": case.weight,
        "staleness": [0.0] * len(case.mask),
        **{f: getattr(case, f) for f in DRAWN},
        "pairs": rows_of_pairs(case),
        "votes": case.votes or None,
        "role": case.role,
        "extra": {k: getattr(case, k) for k in EXTRA},
    }
    return Batch.of(**given | changes)


def column(values: Any, n: int) -> list[list[float]]:
    """[B,2] these numbers, or one for all, at the second place of each row."""
    return [[0.0, x] for x in np.broadcast_to(values, n).tolist()]


def of_one_token(reward: Sequence[float], group: Any = None, **fields: Any) -> Batch:
    """Responses of one token, in one group unless it is said; of log-probs a number each, or one for all."""
    n = len(reward)
    known = {k: column(v, n) if k in DRAWN and v is not None else v for k, v in fields.items()}
    return Batch.of(mask=[[0, 1]] * n, reward=reward, group=[0] * n if group is None else group, **known)


def at(logp: Any, name: str, batch: Batch, **options: Any) -> Evaluation:
    """An objective of responses of one token with these log-probs, or one for all."""
    return objectives.evaluate(name, column(logp, len(batch.mask)), batch, **options)


def rows_of_pairs(case: Case) -> list[tuple[int, int]] | None:
    """A row of each of the two responses: of an episode the last one."""
    row = {y: i for i, y in enumerate(case.response)}
    return [(row[a], row[b]) for a, b in case.pairs] or None


def evaluate(case: Case, name: str, options: dict[str, Any], **changes: Any) -> Evaluation:
    return objectives.evaluate(
        name, case.logp, batch_of(case, **changes), streams=streams_of(case), **options
    )


def streams_of(case: Case) -> dict[str, Any]:
    """What an objective may ask for besides the log-probs."""
    return {"value": case.value} | {k: getattr(case, k) for k in TOKEN_STREAMS if k != "logp"}


def expected(case: Case, name: str, options: dict[str, Any]) -> Result:
    """What the plain loops of `independent` say, a function of the objective's name."""
    entry = objectives.get(name)
    needs = entry.needs(entry.defaults() | options)
    result = independent.result(name, case, **entry.function_options(options))
    if options.get("baseline_shift") and not options.get("weight_baseline"):
        result = shifted(case, result, least(needs), options["baseline_shift"])
    if {"weight", "weight_baseline"} & options.keys():
        result = weighted(case, result, **chosen(options, WEIGHT, WEIGHT_BASELINE))
    if KL_TERM in entry.ingredients and options.get("beta"):
        used = {"ratio": "behavior", "average": "response"} | entry.defaults() | options
        share = shares(case.groups(least(needs)), used["average"])
        result = with_kl(case, result, share, used["ratio"], **chosen(used, KL_TERM))
    if "imitation" in options:
        of_imitation = chosen(options, Imitation())
        result = imitating(case, result, "pairs" in needs, least(needs), **of_imitation)
    return result


def chosen(options: dict[str, Any], *ingredients: Ingredient) -> dict[str, Any]:
    """The options of these ingredients."""
    return {key: value for key, value in options.items() if any(key in part.options for part in ingredients)}


def take(case: Case, rows: Any) -> Case:
    """The case with those rows, in that order, and with the pairs whose responses have some."""
    at = [int(i) for i in rows]
    judged = ("pairs", "votes")
    arrays = {f.name: getattr(case, f.name) for f in dataclasses.fields(case) if f.name not in judged}
    there = {case.response[i] for i in at}
    whole = [p for p, pair in enumerate(case.pairs) if there.issuperset(pair)]
    return Case(
        **{k: v[at] if isinstance(v, np.ndarray) else [v[i] for i in at] for k, v in arrays.items()},
        **{k: [getattr(case, k)[p] for p in whole] for k in judged},
    )


def change(case: Case, **changes: Any) -> Case:
    return dataclasses.replace(case, **changes)


COVERED: set[tuple[str, str, str]] = set()  # (family, option, value) of the variants so far
COVERING: set[tuple[str, str]] = set()  # variants of `make test`: an objective's first, and new choices


def covers(objective: str, variant: dict[str, Any]) -> bool:
    """Whether a variant has a value of an option that no earlier one of its file of objectives has."""
    family = objectives.get(objective).function.__module__
    choices = {(family, key, repr(value)) for key, value in variant.items()}
    is_new = not choices <= COVERED
    COVERED.update(choices)
    return is_new


for objective in objectives.names():
    for number, variant in enumerate(variants_of(objective)):
        found: set[Any] = set(objectives.get(objective).needed(variant))
        VARIANTS.append((objective, variant, found | ({"rows"} if in_one_row(objective, variant) else set())))
        if covers(objective, variant) or number == 0:
            COVERING.add((objective, repr(variant)))


def by_objective(cases: list[tuple[Any, ...]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with each of `cases`, which begin with an objective's name and its options.

    All of one objective are one or two tests to pytest, whose own work for thousands of them takes longer
    than theirs: the second one, whose options are those of cases before it, is nightly.
    """
    by_name: dict[tuple[str, bool], list[tuple[Any, ...]]] = {}
    for case in cases:
        by_name.setdefault((case[0], (case[0], repr(case[1])) in COVERING), []).append(case)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(objective: str, is_covering: bool, **others: Any) -> None:
            for case in by_name[objective, is_covering]:
                try:
                    test(*case, **others)
                except BaseException as error:
                    error.add_note(f"of {case}")
                    raise

        own = list(inspect.signature(run, follow_wrapped=False).parameters.values())[:2]
        others = list(inspect.signature(test).parameters.values())[len(cases[0]) :]
        run.__signature__ = inspect.Signature([*own, *others])  # type: ignore[attr-defined]
        params = [
            pytest.param(*key, id=key[0] if key[1] else f"{key[0]}-more", marks=[] if key[1] else [NIGHTLY])
            for key in by_name
        ]
        return pytest.mark.parametrize(("objective", "is_covering"), params)(run)

    return decorate
