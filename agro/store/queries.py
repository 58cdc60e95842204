"""Conditions and queries of the store, apart from where they are run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypedDict, Unpack

from agro.config import DataConfig
from agro.store.draw_rules import DrawRule
from agro.store.sample_rows import STATES, State

UNSCORED, FAILED, SCORED = range(len(STATES))
Clause = tuple[str, list[Any]]  # SQL, and its arguments
PRESENT = "prompt_id <> ''"  # not erased, see `agro.store.imports`
NO_LIMIT = 2**62  # steps that draw from a group

# No other sample of the prompt and `origin` has a higher reward. Names without a table are of the other one.
NONE_BETTER = """
NOT EXISTS (
  SELECT 1 FROM samples AS other
  WHERE other.prompt_id = samples.prompt_id AND redone = 0 AND reward > samples.reward{origin}
)
"""


class SampleFilter(TypedDict, total=False):
    """Which samples to train on; None, or a missing key, allows any."""

    roles: Collection[str] | None
    sources: Collection[str] | None
    min_reward: float | None  # of the response; excludes unknown ones
    best_of_group: bool  # only those of the highest reward of their group, ties included


class Filter(SampleFilter, total=False):
    """Which samples; None, or a missing key, allows any. Redone samples are dropped unless `redone`."""

    prompt_id: str | None
    scored: bool | None  # false: unscored and failed, which `state` distinguishes
    state: State | None
    run: str | None
    redone: bool


def build_condition(**filters: Unpack[Filter]) -> Clause:
    """The condition, never NULL, that a row of samples fits a `Filter`, and its arguments."""
    terms, args = [PRESENT if filters.get("redone") else "redone = 0"], list[Any]()
    for column, value in (("prompt_id", filters.get("prompt_id")), ("run", filters.get("run"))):
        if value is not None:
            terms.append(f"{column} IS ?")
            args.append(value)
    origin, origin_args = "", list[Any]()
    for column, values in (("role", filters.get("roles")), ("source", filters.get("sources"))):
        if values is not None:
            origin += f" AND {column} IN ({', '.join('?' * len(values))})" if values else " AND FALSE"
            origin_args += values
    terms[-1] += origin
    args += origin_args
    if filters.get("best_of_group"):
        terms += ["reward IS NOT NULL", NONE_BETTER.format(origin=origin)]
        args += origin_args
    min_reward, scored, state = filters.get("min_reward"), filters.get("scored"), filters.get("state")
    if min_reward is not None:
        terms.append("coalesce(reward >= ?, FALSE)")
        args.append(min_reward)
    if scored is not None:
        terms.append(f"state {'=' if scored else '<>'} {SCORED}")
    if state is not None:
        terms.append("state = ?")
        args.append(STATES.index(state))
    return " AND ".join(terms), args


def chosen(data: DataConfig) -> SampleFilter:
    """Which stored samples a configuration trains on, whatever the run and its step."""
    roles, sources = data.drawn_from
    return {
        "roles": roles,
        "sources": sources,
        "min_reward": data.min_reward,
        "best_of_group": data.best_of_group,
    }


def eligible(rule: DrawRule, run: str, version: int) -> Clause:
    """The condition that `run`, at `version`, may draw a row, and its arguments."""
    data = rule.data
    clause, args = build_condition(**chosen(data), scored=True if rule.scored_only else None)
    if data.max_age is not None or data.order == "age_weighted":
        oldest = 0 if data.max_age is None else max(0, version - data.max_age)
        clause += " AND version BETWEEN ? AND ? AND run = ?"  # other runs' versions count other steps
        args += [oldest, version, run]
    return f"({clause})", args


# Groups by the number of their eligible responses: rows outside episodes, and episodes without an
# ineligible row. With the steps of a run that drew from them, and the newest version of its own samples.
DRAWABLE = """
SELECT g.prompt_id, coalesce(u.uses, 0) AS used, g.newest FROM (
  SELECT prompt_id,
    count(CASE WHEN episode IS NULL AND ok THEN 1 END) + count(DISTINCT episode)
    - count(DISTINCT CASE WHEN NOT ok THEN episode END) AS n,
    coalesce(max(CASE WHEN ok AND run = ? THEN version END), -1) AS newest,
    coalesce(max(CASE WHEN ok THEN reward END) > min(CASE WHEN ok THEN reward END), FALSE) AS spread
  FROM (
    SELECT prompt_id, episode, reward, version, run, {eligible} AS ok FROM samples WHERE redone = 0{within}
  ) AS rows
  GROUP BY prompt_id
) g LEFT JOIN group_uses u ON u.run = ? AND u.prompt_id = g.prompt_id
WHERE n >= ? AND coalesce(u.uses, 0) < ?{spread}
"""

# A condition that holds for few rows.
WITHIN = "prompt_id IN (SELECT prompt_id FROM ({groups}) AS touched)"
WON = "coalesce(votes_winner <> votes_loser, TRUE)"  # not a tie, see `Pair.is_tie`

# Groups with a judgment of two eligible responses. CROSS JOIN fixes the order: else a group of n costs n²
# lookups.
JUDGED = """
WITH fit AS (
  SELECT id, prompt_id, episode, version, run, {eligible} AS ok FROM samples WHERE redone = 0{within}
),
broken AS (SELECT DISTINCT prompt_id, episode FROM fit WHERE episode IS NOT NULL AND NOT ok),
valid AS (
  SELECT id, prompt_id, version, run,
    CASE WHEN episode IS NULL THEN '#' || id ELSE 'e' || episode END AS response FROM fit
  WHERE ok AND (episode IS NULL OR (prompt_id, episode) NOT IN (SELECT prompt_id, episode FROM broken))
)
SELECT g.prompt_id, coalesce(u.uses, 0) AS used, g.newest FROM (
  SELECT w.prompt_id, coalesce(max(CASE WHEN w.run = ? THEN w.version END), -1) AS newest
  FROM valid w CROSS JOIN pairs ON winner = w.id CROSS JOIN valid l ON l.id = loser
  WHERE w.prompt_id = l.prompt_id AND w.response <> l.response{won} GROUP BY w.prompt_id
) g LEFT JOIN group_uses u ON u.run = ? AND u.prompt_id = g.prompt_id WHERE coalesce(u.uses, 0) < ?
"""


def drawable(rule: DrawRule, run: str, eligible: Clause, *, within: Clause | None = None) -> Clause:
    """The query of the groups that `run` may draw, (prompt_id, uses, newest), and its arguments.

    Args:
        eligible: the condition that it may draw a row, and its arguments.
        within: a query of the only prompt_ids to look at, and its arguments.
    """
    condition, args = eligible
    only = ""
    if within is not None:
        only, args = f" AND {WITHIN.format(groups=within[0])}", [*args, *within[1]]
    max_uses = NO_LIMIT if rule.data.max_uses is None else rule.data.max_uses
    if rule.pairs:
        won = "" if rule.ties else f" AND {WON}"
        return JUDGED.format(eligible=condition, within=only, won=won), [*args, run, run, max_uses]
    spread = (" AND NOT spread" if rule.equal else " AND spread") if rule.data.spread else ""
    sql = DRAWABLE.format(eligible=condition, within=only, spread=spread)
    return sql, [run, *args, run, rule.min_group, max_uses]


NUMBER = "number_of(meta, 'index')"  # of a response among those that were sampled with one seed
