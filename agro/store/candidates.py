"""The groups that a run may draw, in order: tables of the store, which the next process finds as they are.

An order is made once, from all samples. Then each draw looks only at the groups that changed since the draw
before: those with new samples, with samples that were scored, judged or marked, those that the run drew
itself, and those whose samples became too stale. So a draw costs the same in a store of any size, also the
first one of a run that is resumed. The tables never differ from what a query of all samples finds
(`drawable`), whatever the order of the changes. `pick_groups` chooses those of a step among them, by hashes
alone.
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

KEPT = 8  # orders of a store; one more takes the places of those that nobody used lately
LATELY = 600.0  # seconds
LOOKS = 128  # in one query
CHANGES = 100_000  # of groups, that orders can still read
PER_INTERVAL = 32  # groups of an interval of places, on average 32 to 64
SLOTS = 160  # that more groups have places in one interval is next to impossible
NEGLIGIBLE = 1e-16  # a weight below this share of the largest is 0
TRIALS = 64  # for each group that is drawn by its staleness
COLUMNS = ("prompt_id", "uses", "newest", "place")
BY = {
    "least_used": "uses, place",
    "uniform": "place",
    "closest": "place",
    "newest": "newest DESC, uses, place",
    "age_weighted": "newest, place",
}
# Whether a run has samples that wait to be fresh ones.
WAITS = "SELECT 1 FROM requests WHERE run = ? AND step IS NULL LIMIT 1"
WAITING = "file = ? AND record IN (SELECT number FROM requests WHERE run = ? AND step IS NULL)"
LOOK = f"""
SELECT (SELECT coalesce(max(id), 0) FROM samples), (SELECT coalesce(max(number), 0) FROM changes),
  (SELECT coalesce(min(number), 1) FROM changes), EXISTS ({WAITS}),
  EXISTS (SELECT 1 FROM draws WHERE run = ? AND step = ?)
"""
# Those with new samples, or whose use changed, and those whose staleness came to be known, or too large; the
# other way round where the run went back.
AGED = "SELECT prompt_id FROM samples WHERE run = ? AND version > ? AND version <= ?"
# With an end: PostgreSQL expects few rows then, and takes an index, also before it has counted any.
TOUCHED = """
SELECT prompt_id FROM samples WHERE id > ? AND id <= ?
UNION SELECT prompt_id FROM changes WHERE number > ? AND number <= ?
"""
NO_LIMIT = 2**62  # steps that draw from a group
ANY_VERSION = 2**40  # above every `data.max_age`: the query of an order is the same at any version

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


def eligible(rule: DrawRule, run: str, version: int, *, waits: bool = False) -> Clause:
    """The condition that `run`, at `version`, may draw a row, and its arguments. With `waits` there may be
    samples that wait to be fresh ones, which it may not draw."""
    data = rule.data
    clause, args = build_condition(**chosen(data), scored=True if rule.scored_only else None)
    if data.max_age is not None or data.order == "age_weighted":
        oldest = 0 if data.max_age is None else max(0, version - data.max_age)
        clause += " AND version BETWEEN ? AND ? AND run = ?"  # other runs' versions count other steps
        args += [oldest, version, run]
    if waits:  # only then: an index has all other columns
        clause += f" AND NOT coalesce({WAITING}, FALSE)"
        args += [ledger_of(run), run]
    return f"({clause})", args


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


class Seen(NamedTuple):
    """Up to where the changes of a store were looked at. `number`: of the order."""

    number: int
    sample: int
    change: int
    version: int


class Candidates:
    """The groups that one run may draw by one rule."""

    def __init__(
        self, database: Database, rule: DrawRule, at: At, is_held_out: Callable[[str], bool], split: str
    ) -> None:
        """`is_held_out`: of prompt ids; `split`: its name, see `agro.store.split.Split`."""
        self._db, self._rule, self._run, self._seed = database, rule, at.run, at.seed
        self._is_held_out = is_held_out
        query = drawable(rule, at.run, eligible(rule, at.run, ANY_VERSION))
        identity = repr((query, rule.data.order, at.run, at.seed, split))
        self._name = blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        self._number = 0
        self._versions: Counter[int] | None = None
        self.is_drawn = self._waits = False  # of what `update` was told last

    @property
    def versions(self) -> Counter[int]:
        """How many groups have their newest samples of each version; -1: of unknown staleness."""
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
        if self._db.locks_first:  # a look waits for nobody that writes
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
            else:  # there is none, or it can't be told which groups changed
                drop_orders(self._db, [self._number] if self._number else [])
                self._make(fits)
            if newest.change - oldest >= CHANGES:
                self._db.run("DELETE FROM changes WHERE number <= ?", [newest.change - CHANGES])
            self._db.run(
                "UPDATE orders SET sample = ?, change = ?, version = ?, used = ? WHERE number = ?",
                [*newest[1:], time.time(), self._number],
            )

    def first(self, n: int) -> list[str]:
        """The first groups in the order of the rule."""
        return self._chosen(f"ORDER BY {BY[self._rule.data.order]}, prompt_id LIMIT ?", n)

    def of_version(self, version: int) -> list[str]:
        """The groups whose newest samples have this version, by place."""
        return self._chosen("WHERE newest = ? ORDER BY place, prompt_id", version)

    def _chosen(self, clause: str, value: int) -> list[str]:
        rows = self._db.run(f"SELECT prompt_id FROM {self._table} {clause}", [value])
        return [decode_text(prompt_id) for (prompt_id,) in rows]

    def between(self, slots: Sequence[tuple[int, int, int]]) -> list[str | None]:
        """For each (low, high, n): group `n` (from 0) of those whose place is at least `low` and at most
        `high`, by place."""
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
        """What the order has seen, what there is to be seen, and the oldest change that is still listed.

        Sets the number of the order: 0 where it isn't there. The version counts only where a draw depends
        on it.
        """
        [(sample, change, oldest, waits, drawn)], orders = self._db.run_all(
            (LOOK, [self._run, self._run, at.step]),
            ("SELECT number, sample, change, version FROM orders WHERE name = ?", [self._name]),
        )
        self._waits, self.is_drawn = bool(waits), bool(drawn)
        seen = Seen(*orders[0]) if orders else Seen(0, 0, 0, 0)
        self._number = seen.number
        is_aged = self._rule.data.max_age is not None or self._rule.data.order == "age_weighted"
        return seen, Seen(self._number, sample, change, at.version if is_aged else 0), oldest

    def _make(self, fits: Clause) -> None:
        run = self._db.run
        others = run("SELECT number, used FROM orders ORDER BY used DESC LIMIT 1000 OFFSET ?", [KEPT - 1])
        unused = [number for number, used in others if used < time.time() - LATELY]
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
        """Look again at the groups that changed."""
        low, high = sorted((seen.version, newest.version))
        touched, args = TOUCHED, list[Any]([seen.sample, newest.sample, seen.change, newest.change])
        for age in (0, (self._rule.data.max_age or 0) + 1) if low < high else ():
            touched += f" UNION {AGED}"
            args += [self._run, low - age, high - age]
        within = WITHIN.format(groups=touched)
        kept, found = self._db.run_all(
            (f"SELECT {', '.join(COLUMNS)} FROM {self._table} WHERE {within}", args),
            drawable(self._rule, self._run, fits, within=(touched, args)),
        )
        before, after = ({row[0]: row for row in rows} for rows in (kept, self._placed(found)))
        counts = Counter(newest for _, _, newest, _ in after.values())
        counts.subtract(newest for _, _, newest, _ in before.values())
        if before.keys() - after.keys():
            self._db.run(f"DELETE FROM {self._table} WHERE {within}", args)
            before = {}
        changed = [row for group, row in after.items() if before.get(group) != row]
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
        """Those of these groups that aren't held out, as rows of `COLUMNS`."""
        rows = []
        for prompt_id, uses, newest in groups:
            name = decode_text(prompt_id)
            if not self._is_held_out(name):
                place = place_of(Candidate(name, uses), self._rule, self._seed)
                rows.append((prompt_id, uses, newest, place))
        return rows


def pick_groups(groups: Candidates, rule: DrawRule, at: At, taken: Collection[str] = ()) -> list[str]:
    """The prompt_ids of up to `rule.groups` groups by `data.order`, without those in `taken`.

    With `data.draws_candidates` `data.candidates` times as many, of which `pick_likely` chooses.
    """
    order, n = rule.data.order, rule.groups * (rule.data.candidates if rule.data.draws_candidates else 1)
    if order in ("least_used", "newest"):
        return [group for group in groups.first(n + len(taken)) if group not in taken][:n]
    if order == "age_weighted":
        return _by_age(groups, n, rule.data.age_decay, at, taken)
    return _uniform(groups, n, at, taken)


def _uniform(groups: Candidates, n: int, at: At, taken: Collection[str]) -> list[str]:
    """`n` groups, each set of so many with the same probability.

    Places are hashes, so intervals of 1/2^m of them have few groups each: one of the intervals and one of
    `SLOTS` numbers are drawn, until the interval has a group of that number. This takes about
    SLOTS / PER_INTERVAL looks for a group, however many there are.
    """
    if groups.count <= 4 * (n + len(taken)) or groups.count < SLOTS:
        free = [group for group in groups.first(groups.count) if group not in taken]
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
            if group is not None and group not in taken:
                picked[group] = None
        trial += looks
    return list(picked)[:n]


def _by_age(groups: Candidates, n: int, decay: float, at: At, taken: Collection[str]) -> list[str]:
    """`n` groups one after the other, each with a probability in proportion to (1 − decay)^staleness.

    Where the likely ones are few the newest of the others fill up.
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
        members = groups.of_version(version)
        group = members[noise(at.seed, at.step, "trial", trial) % len(members)]
        if group not in taken:
            picked[group] = None
        if len(picked) == n:
            return list(picked)
    for version in sorted(groups.versions, reverse=True):
        remaining = [group for group in groups.of_version(version) if group not in taken]
        picked |= dict.fromkeys(remaining)
        if len(picked) >= n:
            break
    return list(picked)[:n]


def drop_orders(database: Database, numbers: Collection[int] | None = None) -> None:
    """Remove orders; all of a store where none are named."""
    if numbers is None:
        numbers = [number for (number,) in database.run("SELECT number FROM orders")]
    for number in numbers:
        database.run(f"DROP TABLE order_{number}")
        database.run("DELETE FROM order_versions WHERE number = ?", [number])
        database.run("DELETE FROM orders WHERE number = ?", [number])
