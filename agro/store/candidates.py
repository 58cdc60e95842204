"""The groups that a run may draw, in order, as tables of the store, which later processes use as they are.

An order is made once, from all samples. Each draw then reads only the groups that changed since the previous
one: those with new samples, with samples that were scored, judged or marked, those that the run drew itself,
and those whose samples became too stale. So a draw costs the same in a store of any size, and so does the
first one of a resumed run. The tables always equal the result of a query of all samples (`drawable`),
whatever the order of the changes. `pick_groups` picks a step's groups from them, by hashes alone.
"""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b
from itertools import accumulate, chain
from typing import Any, NamedTuple

from agro.store.database import Database, Row
from agro.store.draw_rules import PLACE_BITS, At, Candidate, DrawRule, noise, place_of
from agro.store.sample_rows import decode_text, ledger_of
from agro.store.samples import WON, Clause, build_condition, chosen

KEPT = 8  # orders of a store; a new one beyond them replaces those unused for LATELY
LATELY = 600.0  # seconds
LOOKS = 128  # in one query
CHANGES = 100_000  # of groups that are retained for orders to read
PER_INTERVAL = 32  # groups in an interval of places: on average 32 to 64
SLOTS = 160  # more groups in one interval are next to impossible
NEGLIGIBLE = 1e-16  # a weight below this share of the largest is 0
TRIALS = 64  # per group that is drawn by its staleness
COLUMNS = ("prompt_id", "uses", "newest", "place")
BY = {
    "least_used": "uses, place",
    "uniform": "place",
    "closest": "place",
    "newest": "newest DESC, uses, place",
    "age_weighted": "newest, place",
}
# Whether a run has samples that wait for a step to use them as fresh ones.
WAITS = "SELECT 1 FROM requests WHERE run = ? AND step IS NULL LIMIT 1"
WAITING = "file = ? AND record IN (SELECT number FROM requests WHERE run = ? AND step IS NULL)"
LOOK = f"""
SELECT (SELECT coalesce(max(id), 0) FROM samples), (SELECT coalesce(max(number), 0) FROM changes),
  (SELECT coalesce(min(number), 1) FROM changes), EXISTS ({WAITS}),
  EXISTS (SELECT 1 FROM draws WHERE run = ? AND step = ?)
"""
# Groups whose staleness became known, or too large, between two versions; the reverse if the run went back.
AGED = "SELECT prompt_id FROM samples WHERE run = ? AND version > ? AND version <= ?"
# Groups with new samples, or changed. The upper bounds make PostgreSQL expect few rows and use an index, even
# without statistics.
TOUCHED = """
SELECT prompt_id FROM samples WHERE id > ? AND id <= ?
UNION SELECT prompt_id FROM changes WHERE number > ? AND number <= ?
"""
NO_LIMIT = 2**62  # steps that draw from a group
ANY_VERSION = 2**40  # above every `data.max_age`: an order's query is the same at any version

# Groups by the number of their eligible responses: rows outside episodes, and episodes without an ineligible
# row. Also the number of a run's steps that drew from them, and the newest version of its own samples.
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

# A condition that few rows satisfy.
WITHIN = "prompt_id IN (SELECT prompt_id FROM ({groups}) AS touched)"

# Groups with a judgment of two eligible responses. CROSS JOIN fixes the join order; otherwise a group of n
# costs n² lookups.
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


def eligible(rule: DrawRule, run: str, version: int, *, waits: bool = False) -> Clause:
    """The SQL condition that `run`, at `version`, may draw a row, and its arguments. With `waits`, it
    excludes samples that wait for a step to use them as fresh ones."""
    data = rule.data
    clause, args = build_condition(**chosen(data), scored=True if rule.scored_only else None)
    if data.max_age is not None or data.order == "age_weighted":
        oldest = 0 if data.max_age is None else max(0, version - data.max_age)
        clause += " AND version BETWEEN ? AND ? AND run = ?"  # other runs' versions count other steps
        args += [oldest, version, run]
    if waits:  # only if needed: an index has all other columns
        clause += f" AND NOT coalesce({WAITING}, FALSE)"
        args += [ledger_of(run), run]
    return f"({clause})", args


def drawable(rule: DrawRule, run: str, eligible: Clause, *, within: Clause | None = None) -> Clause:
    """The query for the groups that `run` may draw, (prompt_id, uses, newest), and its arguments.

    Args:
        eligible: the SQL condition that it may draw a row, and its arguments.
        within: a query for the only prompt_ids to consider, and its arguments.
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


class Seen(NamedTuple):
    """How far an order has read the changes of a store. `number`: the order's."""

    number: int
    sample: int
    change: int
    version: int


class Candidates:
    """The groups that one run may draw by one rule."""

    def __init__(
        self, database: Database, rule: DrawRule, at: At, is_held_out: Callable[[str], bool], split: str
    ) -> None:
        """`is_held_out`: the test of a prompt id; `split`: its name, see `agro.store.split.Split`."""
        self._db, self._rule, self._run, self._seed = database, rule, at.run, at.seed
        self._is_held_out = is_held_out
        query = drawable(rule, at.run, eligible(rule, at.run, ANY_VERSION))
        identity = repr((query, rule.data.order, at.run, at.seed, split))
        self._name = blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        self._number = 0
        self._versions: Counter[int] | None = None
        self.is_drawn = self._waits = False  # as of the last `update`

    @property
    def versions(self) -> Counter[int]:
        """The number of groups by the version of their newest sample; -1: unknown staleness."""
        if self._versions is None:
            sql = "SELECT newest, groups FROM order_versions WHERE number = ?"
            self._versions = Counter(dict(self._db.run(sql, [self._number])))
        return self._versions

    @property
    def count(self) -> int:
        return self.versions.total()

    def update(self, at: At) -> None:
        """Bring the order up to date."""
        self._versions = None
        if self._db.locks_first:  # reading doesn't wait for writers
            seen, newest, _ = self._look(at)
            if self._number and seen == newest:
                return
        with self._db.transaction(durable=False):
            seen, newest, oldest = self._look(at)
            if self._number and seen == newest:
                return
            fits = eligible(self._rule, at.run, at.version, waits=self._waits)
            is_listed = oldest - 1 <= seen.change <= newest.change
            if self._number and seen.sample <= newest.sample and is_listed:
                self._renew(seen, newest, fits)
            else:  # there is no order, or it is unknown which groups changed
                drop_orders(self._db, [self._number] if self._number else [])
                self._make(fits)
            if newest.change - oldest >= CHANGES:
                self._db.run("DELETE FROM changes WHERE number <= ?", [newest.change - CHANGES])
            self._db.run(
                "UPDATE orders SET sample = ?, change = ?, version = ?, used = ? WHERE number = ?",
                [*newest[1:], time.time(), self._number],
            )

    def head(self, n: int) -> list[str]:
        """The first `n` groups in the order of the rule."""
        return self._chosen(f"ORDER BY {BY[self._rule.data.order]}, prompt_id LIMIT ?", n)

    def with_version(self, version: int) -> list[str]:
        """The groups whose newest samples have this version, by place."""
        return self._chosen("WHERE newest = ? ORDER BY place, prompt_id", version)

    def _chosen(self, clause: str, value: int) -> list[str]:
        rows = self._db.run(f"SELECT prompt_id FROM {self._table} {clause}", [value])
        return [decode_text(prompt_id) for (prompt_id,) in rows]

    def between(self, slots: Sequence[tuple[int, int, int]]) -> list[str | None]:
        """For each (low, high, n): group `n` (from 0) by place, among the places from `low` to `high`."""
        group = (
            f"(SELECT prompt_id FROM {self._table} WHERE place BETWEEN ? AND ? "
            "ORDER BY place, prompt_id LIMIT 1 OFFSET ?)"
        )
        groups: list[str | None] = []
        for start in range(0, len(slots), LOOKS):
            part = slots[start : start + LOOKS]
            [row] = self._db.run(f"SELECT {', '.join([group] * len(part))}", list(chain(*part)))
            groups += map(decode_text, row)
        return groups

    @property
    def _table(self) -> str:
        return f"order_{self._number}"

    def _look(self, at: At) -> tuple[Seen, Seen, int]:
        """What the order has seen, what the store has now, and the oldest change that is still listed.

        Sets the number of the order, 0 if it doesn't exist. The version counts only if a draw depends on it.
        """
        [(sample, change, oldest, waits, is_drawn)], orders = self._db.run_all(
            (LOOK, [self._run, self._run, at.step]),
            ("SELECT number, sample, change, version FROM orders WHERE name = ?", [self._name]),
        )
        self._waits, self.is_drawn = bool(waits), bool(is_drawn)
        seen = Seen(*orders[0]) if orders else Seen(0, 0, 0, 0)
        self._number = seen.number
        is_aged = self._rule.data.max_age is not None or self._rule.data.order == "age_weighted"
        return seen, Seen(self._number, sample, change, at.version if is_aged else 0), oldest

    def _make(self, fits: Clause) -> None:
        run = self._db.run
        beyond = run("SELECT number, used FROM orders ORDER BY used DESC LIMIT 1000 OFFSET ?", [KEPT - 1])
        unused = [number for number, used in beyond if used < time.time() - LATELY]
        drop_orders(self._db, unused)
        [(self._number,)] = run(
            "INSERT INTO orders (name, used, sample, change, version) VALUES (?, ?, 0, 0, 0) "
            "RETURNING number",
            [self._name, time.time()],
        )
        run(
            f"CREATE TABLE {self._table} "
            "(prompt_id TEXT PRIMARY KEY, uses INTEGER, newest INTEGER, place INTEGER) WITHOUT ROWID"
        )
        groups = run(*drawable(self._rule, self._run, fits))
        self._db.insert(self._table, COLUMNS, self._placed(groups))
        run(f"CREATE INDEX {self._table}_by ON {self._table} ({BY[self._rule.data.order]})")
        self._db.analyze(self._table)
        counts = f"SELECT CAST(? AS BIGINT), newest, count(*) FROM {self._table} GROUP BY newest"
        run(f"INSERT INTO order_versions {counts}", [self._number])

    def _renew(self, seen: Seen, newest: Seen, fits: Clause) -> None:
        """Update the groups that changed."""
        low, high = sorted((seen.version, newest.version))
        touched, args = TOUCHED, list[Any]([seen.sample, newest.sample, seen.change, newest.change])
        for age in (0, (self._rule.data.max_age or 0) + 1) if low < high else ():
            touched += f" UNION {AGED}"
            args += [self._run, low - age, high - age]
        within = WITHIN.format(groups=touched)
        listed, current = self._db.run_all(
            (f"SELECT {', '.join(COLUMNS)} FROM {self._table} WHERE {within}", args),
            drawable(self._rule, self._run, fits, within=(touched, args)),
        )
        old, new = ({row[0]: row for row in rows} for rows in (listed, self._placed(current)))
        counts = Counter(newest for _, _, newest, _ in new.values())
        counts.subtract(newest for _, _, newest, _ in old.values())
        if old.keys() - new.keys():
            self._db.run(f"DELETE FROM {self._table} WHERE {within}", args)
            old = {}
        changed = [row for group, row in new.items() if old.get(group) != row]
        self._db.insert(self._table, COLUMNS, changed, key=COLUMNS[:1])
        for version, count in counts.items():
            if count:
                self._db.run(
                    "INSERT INTO order_versions (number, newest, groups) VALUES (?, ?, ?) ON CONFLICT "
                    "(number, newest) DO UPDATE SET groups = order_versions.groups + excluded.groups",
                    [self._number, version, count],
                )
        if min(counts.values(), default=0) < 0:
            self._db.run("DELETE FROM order_versions WHERE number = ? AND groups = 0", [self._number])

    def _placed(self, groups: Sequence[Row]) -> list[Row]:
        """The groups that aren't held out, as rows of `COLUMNS`."""
        rows = []
        for prompt_id, uses, newest in groups:
            name = decode_text(prompt_id)
            if not self._is_held_out(name):
                key = place_of(Candidate(name, uses), self._rule, self._seed)
                rows.append((prompt_id, uses, newest, key))
        return rows


def pick_groups(groups: Candidates, rule: DrawRule, at: At, skip: Collection[str] = ()) -> list[str]:
    """Pick up to `rule.groups` groups by `data.order`, as prompt_ids, except those in `skip`.

    With `data.draws_candidates`, picks `data.candidates` times as many, from which `pick_likely` chooses.
    """
    order, n = rule.data.order, rule.groups * (rule.data.candidates if rule.data.draws_candidates else 1)
    if order in ("least_used", "newest"):
        return [group for group in groups.head(n + len(skip)) if group not in skip][:n]
    if order == "age_weighted":
        return _by_age(groups, n, rule.data.age_decay, at, skip)
    return _uniform(groups, n, at, skip)


def _uniform(groups: Candidates, n: int, at: At, skip: Collection[str]) -> list[str]:
    """Sample `n` groups uniformly without replacement.

    Places are hashes, so each of 2^m equal intervals has few groups. An interval and one of `SLOTS` numbers
    are drawn until the interval has a group of that number, which takes about SLOTS / PER_INTERVAL lookups
    per group, however many groups there are.
    """
    if groups.count <= 4 * (n + len(skip)) or groups.count < SLOTS:
        free = [group for group in groups.head(groups.count) if group not in skip]
        return sorted(free, key=lambda group: (noise(at.seed, at.step, group), group))[:n]
    intervals = 2 ** ((groups.count // PER_INTERVAL).bit_length() - 1)
    width = 2**PLACE_BITS // intervals
    looks = n * SLOTS // PER_INTERVAL  # in one query
    picked: dict[str, None] = {}
    trial = 0
    while len(picked) < n:
        slots = []
        for number in range(trial, trial + looks):
            interval, slot = divmod(noise(at.seed, at.step, "trial", number), SLOTS)
            start = interval % intervals * width
            slots.append((start, start + width - 1, slot))
        for group in groups.between(slots):
            if group is not None and group not in skip:
                picked[group] = None
        trial += looks
    return list(picked)[:n]


def _by_age(groups: Candidates, n: int, decay: float, at: At, skip: Collection[str]) -> list[str]:
    """Sample `n` groups one after the other, each with a probability proportional to (1 − decay)^staleness.

    If too few are likely, the newest of the others fill up.
    """
    newest = max((version for version, count in groups.versions.items() if count > 0), default=0)
    span = math.ceil(math.log(NEGLIGIBLE) / math.log(1 - decay))
    versions = [v for v in range(newest, newest - span, -1) if groups.versions.get(v, 0) > 0]
    weights = [groups.versions[v] * (1 - decay) ** (newest - v) for v in versions]
    below = list(accumulate(weights))
    picked: dict[str, None] = {}
    for trial in range(TRIALS * n if below else 0):
        share = noise(at.seed, at.step, "version", trial) / 2**64
        version = versions[min(bisect(below, share * below[-1]), len(versions) - 1)]
        members = groups.with_version(version)
        group = members[noise(at.seed, at.step, "trial", trial) % len(members)]
        if group not in skip:
            picked[group] = None
        if len(picked) == n:
            return list(picked)
    for version in sorted(groups.versions, reverse=True):
        remaining = [group for group in groups.with_version(version) if group not in skip]
        picked |= dict.fromkeys(remaining)
        if len(picked) >= n:
            break
    return list(picked)[:n]


def drop_orders(database: Database, numbers: Collection[int] | None = None) -> None:
    """Delete these orders; by default, all of a store."""
    if numbers is None:
        numbers = [number for (number,) in database.run("SELECT number FROM orders")]
    for number in numbers:
        database.run(f"DROP TABLE order_{number}")
        database.run("DELETE FROM order_versions WHERE number = ?", [number])
        database.run("DELETE FROM orders WHERE number = ?", [number])
