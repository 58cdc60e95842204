"""Random batches for the tests of objectives, and every variant of every objective with what it may read."""

from __future__ import annotations

import dataclasses
from typing import Any

import independent
import numpy as np
from independent import Case

from agro import Batch, objectives
from agro.objectives import Evaluation

FIELDS = ("ref_logp", "behavior_logp", "old_logp")
TOKEN_STREAMS = ("logp", "kl", "prefix_value")
PER_TOKEN = (*TOKEN_STREAMS, *FIELDS, "token_reward")

# (objective, options, what the contract's table lets it read; "rows": that each response is one row)
VARIANTS: list[tuple[str, dict[str, Any], set[str]]] = [
    ("agro", {"beta": 0.3}, {"reward", "groups", "ref_logp"}),
    ("agro", {"beta": 0.3, "scale": "loss"}, {"reward", "groups", "ref_logp"}),
    ("agro", {"beta": 0.3, "average": "token"}, {"reward", "groups", "ref_logp"}),
    ("agro", {"beta": 0.3, "average": "token", "scale": "loss"}, {"reward", "groups", "ref_logp"}),
    ("agro", {"beta": 0.0, "average": "token"}, {"reward", "groups"}),
    ("agro", {"beta": 0.0}, {"reward", "groups"}),
    ("agro", {"beta": 0, "scale": "loss"}, {"reward", "groups"}),
    ("agro", {"beta": 0.3, "weight": "reference"}, {"reward", "groups", "ref_logp"}),
    ("agro", {"beta": 0.3, "weight": "reference", "scale": "loss"}, {"reward", "groups", "ref_logp"}),
    ("agro", {"beta": 0.3, "weight": "reference", "average": "token"}, {"reward", "groups", "ref_logp"}),
    ("agro", {"beta": 0.0, "weight": "reference"}, {"reward", "groups", "ref_logp"}),
    ("agro_onpolicy", {"beta": 0.3}, {"reward", "groups", "ref_logp", "fresh"}),
    ("agro_onpolicy", {"beta": 0.3, "baseline": True}, {"reward", "triples", "ref_logp", "fresh"}),
    ("agro_onpolicy", {"beta": 0.3, "likelihood_ratio": 0.4}, {"reward", "groups", "ref_logp", "fresh"}),
    (
        "agro_onpolicy",
        {"beta": 0.3, "likelihood_ratio": "adaptive"},
        {"reward", "groups", "ref_logp", "fresh"},
    ),
    (
        "agro_onpolicy",
        {"beta": 0.3, "likelihood_ratio": "adaptive", "baseline": True},
        {"reward", "triples", "ref_logp", "fresh"},
    ),
    ("agro_onpolicy", {"beta": 0.0, "likelihood_ratio": "adaptive"}, {"reward", "groups", "fresh"}),
    (
        "agro_onpolicy",
        {"beta": 0.3, "squared": "triangular"},
        {"reward", "groups", "ref_logp", "fresh", "rows"},
    ),
    (
        "agro_onpolicy",
        {"beta": 0.3, "squared": "local", "baseline": True, "likelihood_ratio": 0.4},
        {"reward", "triples", "ref_logp", "fresh", "kl", "rows"},
    ),
    ("agro", {"beta": 0.3, "regulariser": "triangular"}, {"reward", "groups", "ref_logp", "fresh", "rows"}),
    (
        "agro",
        {"beta": 0.3, "regulariser": "local", "scale": "loss"},
        {"reward", "groups", "ref_logp", "fresh", "kl", "rows"},
    ),
    ("agro_onpolicy", {"beta": 0.0}, {"reward", "groups", "fresh"}),
    ("squared_consistency", {"beta": 0.3}, {"reward", "groups", "ref_logp"}),
    ("squared_consistency", {"beta": 0.3, "scale": "trajectory"}, {"reward", "groups", "ref_logp"}),
    ("squared_consistency", {"beta": 0.3, "scale": "pairs"}, {"reward", "groups", "ref_logp"}),
    ("squared_consistency", {"beta": 0.3, "anchor": "behavior"}, {"reward", "groups", "behavior_logp"}),
    (
        "squared_consistency",
        {"beta": 0.3, "anchor": "behavior", "baseline": "soft", "value_beta": 0.7, "scale": "square"},
        {"reward", "groups", "behavior_logp"},
    ),
    (
        "squared_consistency",
        {"beta": 0.3, "baseline": "stored", "scale": "square"},
        {"reward", "ref_logp", "stored_value"},
    ),
    (
        "squared_consistency",
        {"beta": 0.3, "anchor": "behavior", "baseline": "stored", "scale": "trajectory"},
        {"reward", "behavior_logp", "stored_value"},
    ),
    ("dro", {"beta": 0.3}, {"reward", "ref_logp", "value"}),
    ("dro", {"beta": 0.3, "scale": "loss"}, {"reward", "ref_logp", "value"}),
    ("dro", {"beta": 0.0}, {"reward", "value"}),
    ("prefix_consistency", {"beta": 0.3}, {"reward", "ref_logp", "prefix_value", "rows"}),
    ("prefix_consistency", {"beta": 0.3, "scale": "loss"}, {"reward", "ref_logp", "prefix_value", "rows"}),
    ("prefix_consistency", {"beta": 0.0}, {"reward", "prefix_value", "rows"}),
    ("rloo", {}, {"reward", "groups"}),
    ("rloo", {"beta": 0.3}, {"reward", "groups", "ref_logp"}),
    ("reinforce", {}, {"reward"}),
    ("reinforce", {"baseline": "mean"}, {"reward", "groups"}),
    ("reinforce", {"baseline": 0.7}, {"reward"}),
    ("kl_pg", {"beta": 0.3}, {"reward", "groups", "kl"}),
    ("grpo", {}, {"reward", "groups", "behavior_logp"}),
    ("grpo", {"ratio": "old"}, {"reward", "groups", "old_logp"}),
    ("grpo", {"clip": (0.1, 0.4), "std": False}, {"reward", "groups", "behavior_logp"}),
    ("grpo", {"beta": 0.3}, {"reward", "groups", "behavior_logp", "ref_logp"}),
    ("grpo", {"ratio": "old", "beta": 0.3, "std": False}, {"reward", "groups", "old_logp", "ref_logp"}),
    ("pair_consistency", {"beta": 0.3}, {"pairs", "ref_logp"}),
    ("pair_consistency", {"beta": 0.3, "gap": 1.7, "votes": "mean"}, {"pairs", "votes", "ref_logp"}),
    ("pair_consistency", {"beta": 0.3, "gap": "reward"}, {"pairs", "reward", "ref_logp"}),
    ("dpo", {"beta": 0.3}, {"pairs", "ref_logp"}),
    ("dpo", {"beta": 0.3, "label_smoothing": 0.1}, {"pairs", "ref_logp"}),
    ("dpo", {"beta": 0.3, "label_smoothing": 0.1, "votes": "mean"}, {"pairs", "votes", "ref_logp"}),
    ("sft", {}, set()),
]
NAMED = [
    f"{name}-{'-'.join(f'{k}={v}' for k, v in options.items())}".rstrip("-") for name, options, _ in VARIANTS
]


def least(needs: set[str]) -> int:
    """Responses that a group must have."""
    return 3 if "triples" in needs else 2 if needs & {"groups", "pairs"} else 1


def draw(
    seed: int,
    *,
    groups: int = 4,
    sizes: tuple[int, int] = (3, 5),
    length: int = 7,
    rewards: str = "normal",
    spread: float = 0.3,
    far: float = 1.0,
    episodes: bool = True,
    weights: bool = True,
    junk: bool = True,
) -> Case:
    """A batch with ragged groups and lengths, rows of a group scattered, holes in the mask, some responses of a group judged.

    `spread`: standard deviation of the log-ratios; `far`: factor on the log-probs; `episodes`: some responses have up to
    three rows; `junk`: NaN, infinities and huge numbers where the mask isn't set.
    """
    rng = np.random.default_rng(seed)
    rows: list[tuple[Any, Any, float, float]] = []
    for g in range(groups):
        name = [f"prompt {g}", g, ("prompt", g), frozenset({g}), None, g + 0.5][g % 6 if g < 6 else 0]
        weight = float(rng.choice([0.25, 1.0, 3.0])) if weights else 1.0
        equal = float(rng.normal())
        for i in range(int(rng.integers(sizes[0], sizes[1] + 1))):
            reward = {"normal": rng.normal(), "binary": rng.integers(2), "equal": equal}[rewards]
            pieces = int(rng.integers(1, 4)) if episodes and rng.random() < 0.3 else 1
            rows += [(name, (g, i), float(reward), weight)] * pieces
    rows = [rows[i] for i in rng.permutation(len(rows))]
    B, T = len(rows), length
    mask = rng.random((B, T)) < 0.6
    mask[np.arange(T) >= rng.integers(2, T + 1, size=(B, 1))] = False
    mask[:, 0] = False
    mask[~mask.any(1), 1] = True
    logp = -far * np.exp(rng.normal(size=(B, T)))
    streams = (
        [logp]
        + [np.minimum(logp + spread * rng.normal(size=(B, T)), 0.0) for _ in FIELDS]
        + [np.exp(rng.normal(size=(B, T)))]
    )
    if junk:
        for x in streams:
            x[~mask] = rng.choice([np.nan, np.inf, -np.inf, 1e300, 0.0, 5.0], size=int((~mask).sum()))
    logp, ref, behavior, old, kl = streams
    group, response, reward, weight = zip(*rows)
    more = np.random.default_rng([seed, 1])
    prefix_value = np.where(mask, more.normal(size=(B, T)), np.nan if junk else 0.0)
    token_reward = np.where(more.random((B, T)) < 0.5, more.normal(size=(B, T)), np.nan)
    known = {g: float(more.normal()) for g in dict.fromkeys(group)}
    pairs, votes = judgements(group, response, np.random.default_rng([seed, 2]))
    return Case(
        logp,
        mask,
        list(reward),
        list(group),
        list(response),
        list(weight),
        ref,
        behavior,
        old,
        kl,
        prefix_value,
        token_reward,
        list(more.normal(size=B)),
        [known[g] for g in group],
        pairs,
        votes,
    )


def judgements(
    group: Any, response: Any, rng: np.random.Generator
) -> tuple[list[Any], list[tuple[float, float]]]:
    """One to three judged pairs of each group that has two responses, and their votes."""
    pairs: list[Any] = []
    for g in dict.fromkeys(group):
        members = list(dict.fromkeys(y for y, h in zip(response, group) if h == g))
        every = [(a, b) for a in members for b in members if a != b]
        pairs += [every[i] for i in rng.integers(len(every), size=rng.integers(1, 4))] if every else []
    return pairs, [(float(a), float(b)) for a, b in rng.integers(6, size=(len(pairs), 2))]


def draw_for(needs: set[str], seed: int, **how: Any) -> Case:
    """`draw`, without episodes where a response has to be one row."""
    return draw(seed, **{"episodes": "rows" not in needs, **how})


def batch_of(case: Case, **changes: Any) -> Batch:
    given: dict[str, Any] = {
        "mask": case.mask,
        "reward": case.reward,
        "group": case.group,
        "response": case.response,
        "weight": case.weight,
        "age": [0.0] * len(case.mask),
        **{f: getattr(case, f) for f in FIELDS},
        "pairs": rows_of_pairs(case),
        "votes": case.votes or None,
        "extra": {"token_reward": case.token_reward, "stored_value": case.stored_value},
    }
    return Batch.of(**given | changes)


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
    return {"kl": case.kl, "prefix_value": case.prefix_value, "value": case.value}


def expected(case: Case, name: str, options: dict[str, Any]) -> independent.Result:
    return getattr(independent, name)(case, **options)


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
