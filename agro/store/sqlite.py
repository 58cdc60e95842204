"""The store: every sample that was ever seen, in one SQLite file that processes share."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from agro.errors import AgroWarning, Refused
from agro.store import queries
from agro.store.database import BUSY_TIMEOUT
from agro.store.exchange import write_samples
from agro.store.ledger import Ledger
from agro.store.records import Counts, Damage, Group, Known, Pair
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
from agro.strictjson import dumps, loads
from agro.types import Sample


class Samples(Ledger):
    """Samples in the order in which they came. Opened with `open`, one connection a process and thread.

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
