"""The store: every sample that was ever seen, in one SQLite file that processes share."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from agro.errors import AgroWarning, Refused
from agro.store import queries
from agro.store.database import BUSY_TIMEOUT
from agro.store.exchange import write_samples
from agro.store.ledger import Ledger
from agro.store.records import Counts, Damage, Damaged, Drawn, Group, Known, Pair
from agro.store.rows import (
    INSERT,
    LEDGERS,
    REWARD,
    STATES,
    Origin,
    State,
    from_row,
    is_whole,
    of_text,
    reward_checksum,
    state_of,
    to_row,
    to_text,
)
from agro.store.select import Candidate, DrawRule, pick_groups, pick_pairs, pick_responses
from agro.strictjson import dumps, loads
from agro.types import UNKNOWN_VERSION, Sample

POLL_SECONDS = 0.2  # between two looks at a store that others write to


class Store(Ledger):
    """Samples in the order in which they came. Opened with `Store.open`, one connection a process and thread.

    A method that writes does so in one transaction, on the disk when it returns; `transaction()` joins several.
    A sample is never deleted: what a resumed run makes anew is marked `redone` and left out unless asked for.
    A sample that isn't as it was written is never given out: reading it is refused, or told to `on_damaged`.
    """

    @classmethod
    def open(
        cls, path: str | Path, *, read_only: bool = False, create: bool = True, timeout: float = BUSY_TIMEOUT
    ) -> Self:
        """Open a store, or make one. `timeout`: seconds to wait for another writer.

        Raises `Refused` for what isn't a store, has a newer schema, can't be written to, or is missing.
        """
        return cls(path, read_only=read_only, create=create, timeout=timeout)

    def append(
        self,
        samples: Iterable[Sample],
        *,
        run: str | None = None,
        step: int | None = None,
        origins: Sequence[Origin] | None = None,
    ) -> list[int]:
        """Add samples, all or none, and return their ids. `origins`: where imported ones come from, each new."""
        samples = list(samples)  # whatever makes them doesn't hold the lock
        known: Sequence[Origin | None] = origins or [None] * len(samples)
        with self.transaction():
            [(last,)] = self._run("SELECT ifnull(max(id), 0) FROM samples")
            rows = [
                to_row(i, s, run, step, o)
                for i, (s, o) in enumerate(zip(samples, known, strict=True), last + 1)
            ]
            self._run_many(INSERT, rows)
        return [row[0] for row in rows]

    def samples(
        self,
        *,
        ids: Iterable[int] | None = None,
        prompt_id: str | None = None,
        roles: Collection[str] | None = None,
        sources: Collection[str] | None = None,
        scored: bool | None = None,
        state: State | None = None,
        run: str | None = None,
        redone: bool = False,
        on_damaged: Callable[[int], None] | None = None,
    ) -> Iterator[Sample]:
        """Samples in the order of their ids, those that are there when it begins; writing meanwhile is fine.

        `scored=False`: unscored and failed; `state` tells these apart. Raises `Refused` for ids that aren't there, and
        for samples that aren't as they were written, unless `on_damaged` takes their ids.
        """
        clause, args = queries.where(
            prompt_id=prompt_id,
            roles=roles,
            sources=sources,
            scored=scored,
            state=state,
            run=run,
            redone=redone,
        )
        if ids is None:
            self._check_structure()
        else:
            ids = sorted(set(ids))
            self._check_ids(ids)
            clause += " AND id IN (SELECT value FROM json_each(?))"
            args.append(json.dumps(ids))
        for row in self._blocks(clause, args):
            if not self.has_checksums or is_whole(row):
                yield from_row(row)
            elif on_damaged is None:
                raise self._refusal(Damage(samples=self.damaged("samples")))
            else:
                on_damaged(row[0])

    def groups(
        self,
        *,
        roles: Collection[str] | None = None,
        sources: Collection[str] | None = None,
        run: str | None = None,
        redone: bool = False,
    ) -> list[Group]:
        """The groups in the order in which they began."""
        clause, args = queries.where(roles=roles, sources=sources, run=run, redone=redone)
        rows = self._run(queries.GROUPS.format(where=clause), args)
        return [Group(of_text(row[0]), *row[1:]) for row in rows]

    def origins(self, file: str, first: int, last: int) -> set[Origin]:
        """The origins among records `first` to `last` of a file that the store holds."""
        sql = "SELECT file, record, part FROM samples WHERE file = ? AND record BETWEEN ? AND ?"
        return {
            Origin(file, record, of_text(part)) for file, record, part in self._run(sql, [file, first, last])
        }

    def counts(self) -> Counts:
        self._check_structure()
        [(samples, groups, tokens, behavior)] = self._run(
            "SELECT count(*), count(DISTINCT prompt_id), total(knows_tokens), total(knows_behavior) "
            "FROM samples WHERE NOT redone"
        )
        by = {
            column: dict(
                self._run(f"SELECT {column}, count(*) FROM samples WHERE NOT redone GROUP BY {column}")
            )
            for column in ("state", "source", "role")
        }
        [(pairs,)] = self._run("SELECT count(*) FROM pairs")
        return Counts(
            samples=samples,
            groups=groups,
            with_tokens=int(tokens),
            with_behavior=int(behavior),
            pairs=pairs,
            sources={of_text(k): n for k, n in by["source"].items()},
            roles=by["role"],
            **{name: by["state"].get(i, 0) for i, name in enumerate(STATES)},
        )

    def known(
        self,
        *,
        roles: Collection[str] | None = None,
        sources: Collection[str] | None = None,
        run: str | None = None,
    ) -> list[Known]:
        """What is known of each sample, without reading it."""
        clause, args = queries.where(roles=roles, sources=sources, run=run)
        found = self._run(
            f"SELECT id, prompt_id, state = {queries.SCORED}, knows_behavior FROM samples WHERE {clause} ORDER BY id",
            args,
        )
        return [
            Known(i, of_text(prompt_id), bool(scored), bool(knows)) for i, prompt_id, scored, knows in found
        ]

    def set_rewards(self, scores: Iterable[tuple[int, float | None, Mapping[str, Any]]]) -> None:
        """Put in or renew rewards: (id, reward, entries for `meta`).

        None with a "reward_error" among the entries is a failure; None without one makes the sample unscored again.
        The error and the parts of an earlier scoring are forgotten.
        """
        scores = list(scores)
        ids = [i for i, _, _ in scores]
        rows = []
        with self.transaction():
            self._check_ids(ids)
            held = self._run(
                f"SELECT id, {', '.join(REWARD)}, checksum FROM samples WHERE id IN (SELECT value FROM json_each(?))",
                [json.dumps(ids)],
            )
            known = {i: rest for i, *rest in held}
            for i, reward, entries in scores:
                if reward is not None and not math.isfinite(reward):
                    raise Refused(
                        f"sample {i}: reward: expected a finite number, or None where unknown, got {reward}"
                    )
                *before, checksum = known[i]
                earlier = self._meta(i, before[-1])
                meta = {k: v for k, v in earlier.items() if k not in ("reward_error", "reward_parts")} | dict(
                    entries
                )
                text = to_text(dumps(meta, f"sample {i}: meta"))
                after = [state_of(reward, meta), None if reward is None else float(reward), text]
                checksum ^= reward_checksum(i, *before) ^ reward_checksum(i, *after)
                known[i] = [*after, checksum]
                rows.append((*after, checksum, i))
            self._run_many(
                "UPDATE samples SET state = ?, reward = ?, meta = ?, checksum = ? WHERE id = ?", rows
            )

    def add_pairs(self, pairs: Iterable[Pair]) -> None:
        """Add judgements. Raises `Refused` for ids that aren't there."""
        pairs = list(pairs)
        with self.transaction():
            self._check_ids([i for p in pairs for i in (p.winner, p.loser)])
            for p in pairs:
                votes = (
                    None if v is None else v + 0.0 for v in (p.votes_winner, p.votes_loser)
                )  # as REAL keeps them
                self._enter("pairs", p.winner, p.loser, *votes)

    def pairs(self, ids: Iterable[int] | None = None) -> Iterator[Pair]:
        """Judgements in the order in which they came; with `ids` those that join two of these samples.

        Raises `Refused` for one of them that isn't as it was written.
        """
        clause, args = "TRUE", list[str]()
        if ids is not None:
            some = "(SELECT value FROM json_each(?1))"
            clause, args = f"winner IN {some} AND loser IN {some}", [json.dumps(list(ids))]
        columns = ", ".join(LEDGERS["pairs"])
        rows = self._run(f"SELECT rowid, {columns}, checksum FROM pairs WHERE {clause} ORDER BY rowid", args)
        if damaged := [row[0] for row in rows if not self._is_whole(row[1:])]:
            raise self._refusal(Damage(pairs=damaged))
        for _, *judged, _ in rows:
            yield Pair(*judged)

    def pick(self, rule: DrawRule, *, run: str, step: int, seed: int, version: int) -> list[str]:
        """The prompt_ids of the groups that `draw` takes by `rule`; with `rule.fewer` as many as there are.

        `version`: optimizer steps of the learner's weights, which staleness counts from. With `rule.wait` it looks
        again until there are enough. Raises `Refused` where there are fewer, with what the store has.
        """
        deadline = time.monotonic() + rule.wait
        while True:
            candidates = self.candidates(rule, run=run, version=version)
            if len(candidates) >= rule.groups or rule.fewer:
                return pick_groups(candidates, rule, seed=seed, step=step)
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_SECONDS)
        waited = f"waited {rule.wait:g} s: " if rule.wait else ""
        raise Refused(waited + self._too_few(rule, len(candidates), run, version))

    def candidates(self, rule: DrawRule, *, run: str, version: int) -> list[Candidate]:
        """The groups that `pick` chooses from."""
        fits, args = queries.eligible(rule, run, version)
        if rule.pairs:
            rows = self._run(queries.JUDGED.format(eligible=fits), [*args, to_text(run)])
        else:
            rows = self._run(queries.DRAWABLE.format(eligible=fits), [*args, rule.min_group, to_text(run)])
        return [Candidate(of_text(prompt_id), uses) for prompt_id, uses in rows]

    def draw(
        self,
        rule: DrawRule | None = None,
        *,
        run: str,
        step: int,
        seed: int = 0,
        version: int,
        picked: Sequence[str] | None = None,
        made: Sequence[int] = (),
    ) -> Drawn:
        """All that `run` trains on at `step`, and a note of it: groups by `rule`, and the samples `made` for this step.

        Groups come one after the other, then what was made, by number of the response. `picked`: what `pick` chose
        before, where the draw isn't to choose itself. `version`: optimizer steps of the learner's weights. A sample of
        another run has version -1: its staleness is unknown. Raises `Refused` as `pick` does. Samples that
        aren't as they were written are in `Drawn.damaged` alone.
        """
        if picked is None:
            picked = [] if rule is None else self.pick(rule, run=run, step=step, seed=seed, version=version)
        with self.transaction():
            chosen: dict[int, Damaged] = {}  # what is reported of a sample that turns out to be damaged
            if rule is not None and picked:
                chosen = self._choose(rule, picked, frozenset(made), run=run, step=step, seed=seed, version=version)
            chosen |= self._made(made)
            ids = list(chosen)
            self.record_draws(run, step, ids)
            damaged: list[Damaged] = []
            valid = {s.id: s for s in self.samples(ids=ids, redone=True, on_damaged=lambda i: damaged.append(chosen[i]))}
            foreign = self._foreign(ids, run)
            pairs = list(self.pairs(ids)) if rule is not None and rule.pairs else []
        samples = []
        for i in ids:
            if i in valid:
                samples.append(valid[i].replace(version=UNKNOWN_VERSION) if i in foreign else valid[i])
        return Drawn(samples, pairs, damaged)

    def _choose(
        self, rule: DrawRule, picked: Sequence[str], made: frozenset[int], *, run: str, step: int, seed: int, version: int
    ) -> dict[int, Damaged]:
        """The samples to draw of the picked groups."""
        fits, args = queries.eligible(rule, run, version)
        groups = {prompt_id: self._eligible(prompt_id, fits, args, made) for prompt_id in picked}
        judged: list[Pair] = []
        if rule.pairs:
            judged = list(self.pairs(i for group in groups.values() for ids in group.values() for i in ids))
        chosen: dict[int, Damaged] = {}
        for prompt_id, group in groups.items():
            if rule.pairs:
                at = {i: k for k, ids in enumerate(group.values()) for i in ids}
                both = [(at[p.winner], at[p.loser]) for p in judged if p.winner in at and p.loser in at]
                different = [p for p in both if p[0] != p[1]]
                places = pick_pairs(different, rule, seed=seed, step=step, prompt_id=prompt_id)
            else:
                places = pick_responses(len(group), rule, seed=seed, step=step, prompt_id=prompt_id)
            responses = list(group.items())
            for key, ids in (responses[k] for k in places):
                chosen |= {i: Damaged(i, prompt_id, None if isinstance(key, int) else key) for i in ids}
        return chosen

    def _made(self, made: Sequence[int]) -> dict[int, Damaged]:
        """The samples made for a step, by number of the response: the order in which they finished doesn't matter."""
        sql = f"SELECT id, prompt_id, episode FROM samples WHERE id IN (SELECT value FROM json_each(?)) {queries.BY_NUMBER}"
        rows = self._run(sql, [json.dumps(list(made))])
        return {i: Damaged(i, of_text(prompt_id), None if e is None else of_text(e)) for i, prompt_id, e in rows}

    def _foreign(self, ids: Sequence[int], run: str) -> set[int]:
        """Those of the samples that another run made, or nobody knows who."""
        sql = "SELECT id FROM samples WHERE run IS NOT ? AND id IN (SELECT value FROM json_each(?))"
        return {i for (i,) in self._run(sql, [to_text(run), json.dumps(list(ids))])}

    def _eligible(
        self, prompt_id: str, fits: str, args: Sequence[Any], made: frozenset[int]
    ) -> dict[str | int, list[int]]:
        """The samples of each eligible response of a group, by episode or, outside of one, by id; oldest first."""
        responses: dict[str | int, list[int]] = {}
        broken: set[str | int] = set()
        sql = f"SELECT id, episode, {fits} FROM samples WHERE prompt_id = ? AND NOT redone {queries.BY_NUMBER}"
        for i, episode, ok in self._run(sql, [*args, to_text(prompt_id)]):
            key = i if episode is None else of_text(episode)
            responses.setdefault(key, []).append(i)
            if not ok or i in made:
                broken.add(key)
        return {key: ids for key, ids in responses.items() if key not in broken}

    def export(self, path: str | Path) -> int:
        """Write the samples to a .jsonl, .jsonl.gz or .parquet file, and return how many; judgements stay behind."""
        [(pairs,)] = self._run("SELECT count(*) FROM pairs")
        if pairs:
            warnings.warn(
                f"{path}: the store's {pairs} pairs aren't part of an export", AgroWarning, stacklevel=2
            )
        return write_samples(path, self.samples())

    def _meta(self, i: int, text: Any) -> dict[str, Any]:
        try:
            return dict(loads(of_text(text)))
        except (TypeError, ValueError):
            raise self._refusal(Damage(samples=[i])) from None

    def _too_few(self, rule: DrawRule, found: int, run: str, version: int) -> str:
        clause, args = queries.where(roles=rule.roles, sources=rule.sources)
        fits, more = queries.eligible(rule, run, version)
        [(rows, groups, chosen, unscored, failed, fit)] = self._run(
            f"""
            SELECT count(*), count(DISTINCT prompt_id), total({clause}), total({clause} AND state = {queries.UNSCORED}),
              total({clause} AND state = {queries.FAILED}), total({fits}) FROM samples WHERE NOT redone
            """,
            [*args, *args, *args, *more],
        )
        wanted = "a pair of" if rule.pairs else f"{rule.min_group} or more"
        scores = (
            f", {unscored:.0f} of them not scored and {failed:.0f} with a failed reward"
            if rule.scored_only
            else ""
        )
        add = f"add {'pairs' if rule.pairs else 'samples'}{', score them' if rule.scored_only else ''}"
        return (
            f"{self.path}: expected {rule.groups} groups with {wanted} eligible responses to draw from, "
            f"got {found}. The store has {rows} samples in {groups} groups; {chosen:.0f} are of the roles and sources "
            f"asked for{scores}; {fit:.0f} are eligible"
            + (f" (at most {rule.max_age} steps old)" if rule.max_age is not None else "")
            + f". Ask for fewer groups, {add}, or widen the choice"
        )
