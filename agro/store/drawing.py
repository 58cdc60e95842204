"""Draws from the store, the only source of training data: groups by a rule (`draw_rules.py`), and samples
made for a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from operator import itemgetter
from typing import Any, NamedTuple

from agro.errors import Refused
from agro.store.candidates import WAITS, Candidates, drawable, eligible, pick_groups
from agro.store.database import Database, Row, Statement, repeated
from agro.store.draw_rules import At, Candidate, DrawRule, Selection, pick_pairs, pick_responses
from agro.store.sample_rows import FAILED, UNSCORED, count_actions, decode_text
from agro.store.samples import ASKED, NUMBER, Experience, Pair, build_condition, chosen
from agro.store.split import Split
from agro.types import Sample

POLL_SECONDS = 0.2  # interval between queries of a store that others write to
# The groups of some samples, and a run's uses of them so far.
USES_OF = """
SELECT DISTINCT s.prompt_id, coalesce(u.uses, 0), u.last FROM samples s
LEFT JOIN group_uses u ON u.run = ? AND u.prompt_id = s.prompt_id
WHERE s.id IN (SELECT value FROM json_each(?))
"""
# The groups of samples, by response number, not in the order of finishing.
GROUPS_OF = f"""
SELECT id, prompt_id FROM samples WHERE id IN (SELECT value FROM json_each(?))
ORDER BY {NUMBER}, id
"""
# The samples of groups, oldest first; within a step by response number, since responses are stored in the
# order of finishing.
OF_GROUPS = f"""
SELECT prompt_id, id, episode, {{fits}} FROM samples WHERE prompt_id IN ({{groups}}) AND redone = 0
ORDER BY step, CASE WHEN step IS NOT NULL THEN {NUMBER} END, id
"""


class Draw(NamedTuple):
    """One row that a run drew to train on."""

    step: int
    sample: int
    reward: float | None
    role: str
    source: str
    is_own: bool  # sampled by this run
    staleness: int | None  # optimizer steps from sampling to drawing; None: another run's, or unknown
    length: int | None  # actions; None where the store has no tokens


class RunUse(NamedTuple):
    """A run that drew some samples, and at which steps."""

    run: str
    samples: int
    first: int
    last: int

    def __str__(self) -> str:
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        return f"{self.run} ({self.samples} samples, {steps})"


class DamagedSample(NamedTuple):
    """A drawn row that isn't as it was written."""

    id: int
    prompt_id: str
    episode: str | None = None


@dataclass(frozen=True)
class DrawnGroups:
    """What a step trains on, as drawn from the store."""

    samples: list[Sample]
    pairs: list[Pair] = field(default_factory=list)  # judgments of these samples, if the rule has pairs
    damaged: list[DamagedSample] = field(default_factory=list)  # samples that aren't as they were written


def wait_for_groups(
    draws: Draws,
    rule: DrawRule,
    at: At,
    skip: Collection[str] = (),
    check: Callable[[], None] = lambda: None,
    redraw: bool = False,
) -> list[str]:
    """Call `draws.pick` once there are enough groups or `rule.wait` seconds have passed.

    `check` is called while it waits; what it raises ends the wait.
    """
    deadline = time.monotonic() + rule.wait
    while not rule.fewer and time.monotonic() < deadline:
        picked = draws.pick(replace(rule, fewer=True), at, skip, redraw=redraw)
        if len(picked) >= rule.groups:
            return picked
        check()
        time.sleep(POLL_SECONDS)
    return draws.pick(rule, at, skip, redraw=redraw)


class Draws:
    """What runs drew, and what they may draw."""

    def __init__(self, database: Database, split: Split) -> None:
        self._db, self._split = database, split
        self._orders: dict[str, Candidates] = {}  # by rule, run and split

    @repeated
    def pick(self, rule: DrawRule, at: At, skip: Collection[str] = (), *, redraw: bool = False) -> list[str]:
        """Pick the groups that `draw` takes by `rule`, as prompt_ids; with `rule.fewer` as many as there are.

        Raises `Refused` if there are too few now, and reports what the store has; `wait_for_groups` waits
        until there are enough.

        Args:
            skip: groups that another rule picked.
            redraw: return the groups of the recorded draw if the step has one.
        """
        groups = self._ordered(rule, at)
        if redraw and groups.is_drawn:
            ids = self._recorded(self._db.run(*self._drawn_query(at)))
            rows = self._db.run(GROUPS_OF, [self._db.listed(ids)])
            return list(dict.fromkeys(decode_text(prompt_id) for _, prompt_id in rows))
        picked = pick_groups(groups, rule, at, skip)
        if len(picked) >= rule.groups or rule.fewer:
            return picked
        waited = f"waited {rule.wait:g} s: " if rule.wait else ""
        raise self._too_few(rule, len(picked), at, waited)

    @repeated
    def count(self, rule: DrawRule, at: At) -> int:
        """The number of groups that `pick` chooses from, without reading them."""
        return self._ordered(rule, at).count

    def require(self, rule: DrawRule, at: At) -> None:
        """Raise `Refused`, as `pick` does, if there are fewer groups than `rule` draws."""
        counts = [len(self.candidates(kind, at.run, at.version)) for kind in rule.kinds]
        if sum(counts) < rule.groups or not counts[0]:
            raise self._too_few(rule, counts[0], at)

    def _too_few(self, rule: DrawRule, got: int, at: At, waited: str = "") -> Refused:
        clause, args = build_condition(**chosen(rule.data))
        fits, more = eligible(rule, at.run, at.version)
        sql = f"""
            SELECT count(*), count(DISTINCT prompt_id), count(CASE WHEN {clause} THEN 1 END),
              count(CASE WHEN {clause} AND state = {UNSCORED} THEN 1 END),
              count(CASE WHEN {clause} AND state = {FAILED} THEN 1 END),
              count(CASE WHEN {fits} THEN 1 END) FROM samples WHERE redone = 0
            """
        [row] = self._db.run(sql, [*args, *args, *args, *more])
        rows, groups, requested, unscored, failed, fit = row
        needed, ways = f"{rule.min_group} or more", ["add pairs" if rule.pairs else "add samples"]
        scores = stale = spread = ""
        if rule.pairs:
            needed = "a pair of"
        elif rule.data.hold_out and rule.data.hold_out_most is None:
            ways.insert(0, f"lower data.hold_out ({rule.data.hold_out:g})")
        if rule.scored_only:
            scores = f", {unscored:.0f} of them not scored and {failed:.0f} with a failed reward"
            ways.append("score them")
        if rule.data.spread:
            spread = " of different rewards (data.spread)"
            ways.insert(0, "set data.spread = false")
        if rule.data.max_age is not None:
            stale = f" (at most {rule.data.max_age} steps old; those of other runs are of unknown staleness)"
        return Refused(
            f"{waited}{self._db.path}: expected {rule.groups} groups with {needed} eligible responses "
            f"to draw from, got {got}{spread}. The store has {rows:.0f} samples in {groups:.0f} groups; "
            f"{requested:.0f} are of the requested roles, sources and rewards{scores}; {fit:.0f} are "
            f"eligible{stale}. What to do: request fewer groups, {', '.join(ways)}, or widen the choice"
        )

    def candidates(self, rule: DrawRule, run: str, version: int) -> list[Candidate]:
        """The groups that `pick` chooses from, by a query of all samples."""
        self._db.check_once("structure", "group_uses")
        waits = bool(self._db.run(WAITS, [run]))
        rows = self._db.run(*drawable(rule, run, eligible(rule, run, version, waits=waits)))
        candidates = [Candidate(decode_text(prompt_id), uses, newest) for prompt_id, uses, newest in rows]
        is_held_out = self._split.held_out(rule.data)
        return [c for c in candidates if not is_held_out(c.prompt_id)]

    def _ordered(self, rule: DrawRule, at: At) -> Candidates:
        """The same groups in an order that persists between draws, up to date."""
        self._db.check_once("structure", "group_uses")
        split = self._split.name_of(rule.data)
        key = repr((at.run, at.seed, split, replace(rule, groups=1, fewer=False, wait=0.0)))
        if key not in self._orders:
            self._orders[key] = Candidates(self._db, rule, at, self._split.held_out(rule.data), split)
        candidates = self._orders[key]
        candidates.update(at)
        return candidates

    @repeated
    def draw_picked(
        self, picks: Sequence[Selection], at: At, made: Sequence[int] = (), joining: DrawRule | None = None
    ) -> DrawnGroups:
        """Do `Store.draw` with groups that several rules picked, each of a different prompt."""
        rules = [picked.rule for picked in picks]
        with self._db.transaction():
            self._db.check_once("structure", "group_uses")
            queries = [self._eligible_queries(picked, at) for picked in picks]
            made_query = [(GROUPS_OF, [self._db.listed(made)])] if made else []
            recorded, *results = self._db.run_all(self._drawn_query(at), *made_query, *chain(*queries))
            fresh = {i: decode_text(prompt_id) for i, prompt_id in (results.pop(0) if made else [])}
            ids = self._recorded(recorded)
            is_new = not ids
            if is_new:
                remaining = iter(results)
                for picked, parts in zip(picks, queries, strict=True):
                    ids += self._choose(picked, at, made, chain(*islice(remaining, len(parts))))
                ids += fresh
                if joining is not None:
                    prompts = list(dict.fromkeys(fresh.values()))
                    alone = Selection(replace(joining, pairs=False), prompts)  # judged together with them
                    ids += self._choose(alone, at, made)
                ids = list(dict.fromkeys(ids))
            counted = USES_OF, [at.run, self._db.listed(ids)]
            rows, uses_of = self._db.run_all(self._db.samples_query(ids), counted)
            prompt_ids = {i: decode_text(prompt_id) for i, prompt_id, *_ in rows}
            if not is_new:
                wanted = {*fresh.values(), *(group for picked in picks for group in picked.groups)}
                foreign = [i for i, prompt_id in prompt_ids.items() if prompt_id not in wanted]
                foreign += set(made) - set(ids)
                if foreign:
                    raise Refused(
                        f"{self._db.path}: run {at.run} has drawn other samples at step {at.step}: the "
                        f"two draws differ in sample {foreign[0]}. What to do: draw at a later step, or take "
                        "the run back before this one (`ledger.rewind`)"
                    )
            valid = self._db.valid_samples(rows, at.run)
            pairs = self._judged(rules if joining is None else [*rules, joining], ids)
            if is_new:
                self._record(at.run, at.step, ids, uses_of)
        pairs.sort(key=lambda pair: (pair.winner, pair.loser))
        damaged = [
            DamagedSample(i, prompt_ids[i], decode_text(episode))
            for i, _, episode, *_ in sorted(rows, key=itemgetter(0))
            if i not in valid
        ]
        return DrawnGroups([valid[i] for i in ids if i in valid], pairs, damaged)

    def look(self, picked: Selection, at: At) -> list[Sample]:
        """The samples that `draw_picked` draws from these groups, without damaged ones and without
        recording."""
        ids = self._choose(picked, at)
        valid = self._db.valid_samples(self._db.run(*self._db.samples_query(ids)))
        return [valid[i] for i in ids if i in valid]

    def _eligible_queries(self, picked: Selection, at: At) -> list[Statement]:
        """Queries for the rows of the picked groups, and whether each may be drawn."""
        fits, args = eligible(picked.rule, at.run, at.version, waits=True)
        statements: list[Statement] = []
        for start in range(0, len(picked.groups), ASKED):
            names = picked.groups[start : start + ASKED]
            sql = OF_GROUPS.format(fits=fits, groups=", ".join("?" * len(names)))
            statements.append((sql, [*args, *names]))
        return statements

    def _choose(
        self, picked: Selection, at: At, made: Collection[int] = (), rows: Iterable[Row] | None = None
    ) -> list[int]:
        """Choose the samples to draw from the picked groups, as ids.

        `made`: samples not to draw, since they were made for this step; `rows`: of `_eligible_queries`.
        """
        if rows is None:
            rows = chain(*self._db.run_all(*self._eligible_queries(picked, at)))
        # By group and response (its episode or id), the ids of the eligible samples, oldest first.
        groups: dict[str, dict[str | int, list[int]]] = {prompt_id: {} for prompt_id in picked.groups}
        excluded, broken = frozenset(made), set[tuple[str, str | int]]()
        for prompt_id, i, episode, ok in rows:
            group, key = decode_text(prompt_id), i if episode is None else decode_text(episode)
            groups[group].setdefault(key, []).append(i)
            if not ok or i in excluded:
                broken.add((group, key))
        for group, key in broken:
            del groups[group][key]
        rule = picked.rule
        every = [i for responses in groups.values() for ids in responses.values() for i in ids]
        judged = self._judged([rule], every)
        chosen: list[int] = []
        for group, by_response in groups.items():
            responses = list(by_response.values())
            if rule.pairs:
                positions = pick_pairs(_positions(judged, responses), rule, at, group)
            else:
                positions = pick_responses(len(responses), rule, at, group)
            for position in positions:
                chosen += responses[position]
        return chosen

    def _judged(self, rules: Sequence[DrawRule], ids: Sequence[int]) -> list[Pair]:
        """The judgments of these samples that any of the rules draws."""
        if not any(rule.pairs for rule in rules):
            return []
        ties = any(rule.ties for rule in rules)
        return [pair for pair in Experience(self._db).pairs(ids) if ties or not pair.is_tie]

    @repeated
    def record(self, run: str, step: int, ids: Iterable[int]) -> None:
        """Record that `run` trains on these samples at `step`, which never decreases; `draw` does so itself.

        Raises `Refused` if the counts of earlier draws, which a draw depends on, are damaged.
        """
        ids = list(ids)
        with self._db.transaction():
            self._db.check_ids(ids)
            self._db.check_once("structure", "group_uses")
            self._record(run, step, ids, self._db.run(USES_OF, [run, self._db.listed(ids)]))

    def _record(self, run: str, step: int, ids: Sequence[int], uses_of: Iterable[Row]) -> None:
        """`uses_of`: the rows of `USES_OF`."""
        self._db.put("draws", [(run, step, i) for i in ids])
        counts = [(run, group, uses + (latest != step), step) for group, uses, latest in uses_of]
        self._db.put("group_uses", counts)
        self._db.note_groups(group for _, group, _, _ in counts)

    def _drawn_query(self, at: At) -> Statement:
        return self._db.entries_query("draws", "run = ? AND step = ?", [at.run, at.step])

    def _recorded(self, rows: Sequence[Row]) -> list[int]:
        """The ids of a step's recorded draw, in order, from the rows of `_drawn_query`."""
        return list(dict.fromkeys(i for _, _, i in self._db.checked("draws", rows)))

    def drawn(self, run: str, versions: Mapping[int, int | None] | None = None) -> list[Draw]:
        """Every row that `run` drew, in the order of its steps; a row drawn twice appears twice.

        `versions`: the learner's version at each step's draw; without it, staleness is unknown.
        """
        draws = []
        for step, i, reward, role, source, is_own, version, action in self._db.run(
            "SELECT d.step, d.sample, s.reward, s.role, s.source, s.run IS d.run, "
            "CASE WHEN s.run IS d.run AND s.version >= 0 THEN s.version END, s.action "
            "FROM draws d JOIN samples s ON s.id = d.sample WHERE d.run = ? ORDER BY d.rowid",
            [run],
        ):
            learner = (versions or {}).get(step)
            is_known = learner is not None and version is not None
            staleness = learner - version if is_known else None
            length = count_actions(action)
            draws.append(Draw(step, i, reward, role, decode_text(source), bool(is_own), staleness, length))
        return draws

    def trained(self, ids: Sequence[int]) -> list[RunUse]:
        """The runs that drew any of these samples."""
        rows = self._db.run(
            "SELECT run, count(DISTINCT sample), min(step), max(step) FROM draws "
            "WHERE sample IN (SELECT value FROM json_each(?)) GROUP BY run ORDER BY run",
            [self._db.listed(ids)],
        )
        return [RunUse(decode_text(run), *counts) for run, *counts in rows]


def _positions(pairs: Iterable[Pair], responses: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """The pairs of a group, as positions of the winner's and the loser's response."""
    position = {i: number for number, ids in enumerate(responses) for i in ids}
    positions = []
    for pair in pairs:
        winner, loser = position.get(pair.winner), position.get(pair.loser)
        if winner is not None and loser is not None and winner != loser:  # not two rows of one episode
            positions.append((winner, loser))
    return positions


def recount_uses(database: Database, run: str) -> None:
    """Recount the uses of each group by `run`: the steps that drew from it, and the last of them."""
    with database.transaction():
        old: dict[Any, int] = dict(
            database.run("DELETE FROM group_uses WHERE run = ? RETURNING prompt_id, uses", [run])
        )
        counts = database.run(
            "SELECT prompt_id, count(DISTINCT draws.step), max(draws.step) FROM draws JOIN samples "
            "ON samples.id = sample WHERE draws.run = ? AND prompt_id <> '' GROUP BY prompt_id",
            [run],
        )
        database.put("group_uses", [(run, *uses) for uses in counts])
        new = {group: uses for group, uses, _ in counts}
        changed = [group for group in old | new if old.get(group) != new.get(group)]
        database.note_groups(changed)
