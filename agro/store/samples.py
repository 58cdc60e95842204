"""The samples of a store: adding, finding, reading and scoring them, and judgments of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Unpack

from agro.errors import Refused
from agro.io.strictjson import dumps, loads
from agro.store import queries
from agro.store.database import PAGE_ENTRIES, Database
from agro.store.queries import Filter
from agro.store.records import Damage, LedgerSample, OtherPrompt, Pair
from agro.store.sample_rows import (
    PROMPT,
    REWARD,
    SAMPLE,
    Origin,
    SampleRow,
    decode_text,
    encode_text,
    from_rows,
    is_valid_sample,
    prompt_columns,
    replace_reward,
    state_of,
)
from agro.store.tables import Tables
from agro.types import Sample, Text

TOGETHER = "added together with it"


class _GroupPrompt(NamedTuple):
    """The prompt of a group, and its columns."""

    prompt: Text
    location: str  # for messages
    columns: tuple[Any, Any]


class AppendTransaction:
    """Samples that are added to a store together: what `add` takes is stored by `write`.

    `prompt_ids`: those that will be added; which of them the store has is asked once for all.
    """

    def __init__(self, database: Database, prompt_ids: Collection[str]) -> None:
        self._database = database
        # SQLite reads other text from JSON as another one.
        self._new = {prompt_id for prompt_id in prompt_ids if prompt_id.isascii() and prompt_id.isprintable()}
        stored, [(self._newest,)] = database.run_all(
            (queries.STORED_PROMPTS, [database.listed(self._new)]),
            ("SELECT coalesce(max(id), 0) FROM samples", []),
        )
        self._new -= {prompt_id for (prompt_id,) in stored}
        self._group_prompts: dict[str, _GroupPrompt] = {}
        self._rows: list[tuple[Any, ...]] = []

    def add(
        self,
        samples: Sequence[SampleRow],
        run: str | None = None,
        step: int | None = None,
        origins: Sequence[Origin] | None = None,
    ) -> list[int]:
        """The ids of these samples, which `write` will store; all or none of them.

        Raises `OtherPrompt` where a prompt_id names another prompt, in the store or among what is added.
        `origins`: in place of the samples' own. Prompts are decoded only where one is written otherwise than
        that of its group is.
        """
        ids = range(self._newest + 1, self._newest + 1 + len(samples))
        prompts: dict[str, _GroupPrompt] = {}
        rows: list[tuple[Any, ...]] = []
        for i, sample in zip(ids, samples, strict=True):
            prompt_id = sample.prompt_id
            group_prompt = prompts.get(prompt_id) or self._group_prompts.get(prompt_id)
            if group_prompt is None:
                group_prompt = self.check([(prompt_id, sample.prompt)])[prompt_id]
                prompts[prompt_id] = group_prompt
            elif group_prompt.columns != sample.values[PROMPT] and group_prompt.prompt != sample.prompt:
                raise OtherPrompt(prompt_id, group_prompt.prompt, group_prompt.location, sample.prompt)
            origin = None if origins is None else origins[len(rows)]
            rows.append(sample.placed(i, group_prompt.columns, run, step, origin))
        self._group_prompts.update(prompts)
        self._rows += rows
        self._newest += len(samples)
        return list(ids)

    def write(self) -> list[int]:
        """Store what was added, and return its ids."""
        self._database.insert("samples", SAMPLE, self._rows)
        ids = [row[0] for row in self._rows]
        self._rows = []
        return ids

    def check(self, prompts: Iterable[tuple[str, Text]]) -> dict[str, _GroupPrompt]:
        """The prompts of groups by their ids. Raises `OtherPrompt` as `add` does."""
        group_prompts: dict[str, _GroupPrompt] = {}
        for prompt_id, prompt in prompts:
            group_prompt = group_prompts.get(prompt_id) or self._group_prompts.get(prompt_id)
            if group_prompt is None:
                group_prompt = self._look_up(prompt_id, prompt)
            if group_prompt.prompt != prompt:
                raise OtherPrompt(prompt_id, group_prompt.prompt, group_prompt.location, prompt)
            group_prompts[prompt_id] = group_prompt
        return group_prompts

    def _look_up(self, prompt_id: str, prompt: Text) -> _GroupPrompt:
        """The prompt of a group in the store, where it isn't stored as this one is. Damaged ones don't
        count."""
        columns = prompt_columns(prompt, f"prompt {prompt_id}")
        if prompt_id in self._new:
            return _GroupPrompt(prompt, TOGETHER, columns)
        rows = self._database.run(queries.PROMPT_OF, [encode_text(prompt_id)])
        if rows and rows[0][1:] != columns:
            [row] = self._database.run(queries.BY_ID, [rows[0][0]])
            if is_valid_sample(row):
                [other] = from_rows([row])
                return _GroupPrompt(other.prompt, f"sample {other.id}, of {other.source}", columns)
        return _GroupPrompt(prompt, TOGETHER, columns)


class Experience:
    """Samples, and judgments of them.

    It isn't named for its samples because `Store.samples` is a method.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables, self._database = tables, tables.database

    def samples(
        self, *, ids: Iterable[int] | None = None, skip_damaged: bool = False, **chosen: Unpack[Filter]
    ) -> Iterator[Sample]:
        """The chosen samples in the order of their ids, those that are there when it begins; writing
        meanwhile is fine.

        Raises `Refused` for ids that aren't there, and for samples that aren't as they were written, which
        `skip_damaged` leaves out.
        """
        self._tables.check_once("structure")
        if ids is not None:
            ids = sorted(set(ids))
            self._tables.check_ids(ids)
        for page in self._tables.sample_pages(*queries.build_condition(**chosen), ids):
            valid = [row for row in page if is_valid_sample(row)]
            if len(valid) < len(page) and not skip_damaged:
                raise self._tables.refusal(Damage(samples=self._tables.damaged("samples")))
            yield from from_rows(valid)

    def pairs(self, ids: Iterable[int] | None = None) -> Iterator[Pair]:
        """Judgments in the order in which they came; with `ids` those that join two of these samples.

        Raises `Refused` for one of them that isn't as it was written.
        """
        if ids is None:
            return self._each_pair()
        chosen = "(SELECT value FROM json_each(?1))"
        clause, args = f"winner IN {chosen} AND loser IN {chosen}", [self._database.listed(ids)]
        return iter([Pair(*row) for row in self._tables.entries("pairs", clause, args)])

    def find_in_ledger(self, ledger: str, numbers: Sequence[int]) -> list[int]:
        """Ids of the samples that are stored under these numbers of a ledger, by number."""
        return [sample.id for sample in self.in_ledger(ledger, numbers)]

    def append(
        self,
        samples: Iterable[Sample | SampleRow],
        *,
        run: str | None = None,
        step: int | None = None,
        origins: Sequence[Origin] | None = None,
    ) -> list[int]:
        """Add samples, all or none, and return their ids. Raises `OtherPrompt` as `check_prompts` does.

        `origins`: of each sample. One whose origin is stored isn't added again: its id is that of the stored
        sample, so that an append can be repeated.
        """
        # Before the lock is taken.
        rows = [s if isinstance(s, SampleRow) else SampleRow.of(s) for s in samples]
        with self._database.transaction():
            append = AppendTransaction(self._database, {row.prompt_id for row in rows})
            stored, keys = dict[Any, int](), origins or range(len(rows))
            if origins is not None:
                stored |= self._ids_of(origins)
            new: dict[Any, SampleRow] = {}
            for key, row in zip(keys, rows, strict=True):
                if key not in stored:
                    new.setdefault(key, row)
            append.add(list(new.values()), run, step, origins and list(new))
            stored |= zip(new, append.write())
            return [stored[key] for key in keys]

    def begin_append(self, prompt_ids: Collection[str]) -> AppendTransaction:
        """Begin to add samples that are written together. Inside of a transaction."""
        return AppendTransaction(self._database, prompt_ids)

    def _ids_of(self, origins: Iterable[Origin]) -> dict[Origin, int]:
        """The ids of the samples that are stored with these origins."""
        records: dict[str, set[int]] = {}
        for origin in origins:
            records.setdefault(origin.file, set()).add(origin.record)
        chosen = "file = ? AND record IN (SELECT value FROM json_each(?))"
        stored: dict[Origin, int] = {}
        for file, numbers in records.items():
            args = [file, self._database.listed(numbers)]
            rows = self._database.run(f"SELECT record, part, id FROM samples WHERE {chosen}", args)
            stored |= {Origin(file, record, decode_text(part)): i for record, part, i in rows}
        return stored

    def check_prompts(self, prompts: Iterable[tuple[str, Text]]) -> None:
        """Raise `OtherPrompt` unless a prompt_id names one prompt, in the store and among these.

        `prompts`: (prompt_id, prompt). Redone and damaged samples don't count.
        """
        prompts = list(prompts)
        AppendTransaction(self._database, {prompt_id for prompt_id, _ in prompts}).check(prompts)

    def find(
        self, *, source: str | None = None, prompt_id: str | None = None, meta: tuple[str, str] | None = None
    ) -> list[int]:
        """Ids of all samples, redone ones included, that fit what is given.

        `meta`: a key, dotted where it is inside of another, and its value as text. All rows of an episode are
        found where one is.
        """
        terms, args = [queries.PRESENT], list[Any]()
        for column, value in (("source", source), ("prompt_id", prompt_id)):
            if value is not None:
                terms.append(f"{column} = ?")
                args.append(encode_text(value))
        fits = " AND ".join(terms)
        if meta is not None:
            key, text = meta
            ids = self._with_meta(fits, args, key, lambda x: text == (x if type(x) is str else json.dumps(x)))
            fits, args = "id IN (SELECT value FROM json_each(?))", [self._database.listed(ids)]
        found = self._database.run(
            f"WITH fit AS (SELECT id, prompt_id, episode FROM samples WHERE {fits}) "
            "SELECT id FROM fit UNION SELECT s.id FROM samples s JOIN fit "
            "ON s.prompt_id = fit.prompt_id AND s.episode = fit.episode ORDER BY 1",
            args,
        )
        return [i for (i,) in found]

    def find_below(self, key: str, limit: float) -> list[int]:
        """Ids of all samples, redone ones included, whose `meta` has a float below `limit` at a key."""
        return self._with_meta(queries.PRESENT, [], key, lambda x: isinstance(x, float) and x < limit)

    def _with_meta(self, where: str, args: Sequence[Any], key: str, fits: Callable[[Any], bool]) -> list[int]:
        sql = f"SELECT id, meta FROM samples WHERE {where} AND id > ? ORDER BY id"
        rows = chain.from_iterable(self._database.pages(sql, args, rows=PAGE_ENTRIES))
        return [i for i, text in rows if any(map(fits, _values(text, key)))]

    def in_ledger(self, ledger: str, numbers: Sequence[int]) -> list[LedgerSample]:
        """The samples that are stored under these numbers of a ledger, by number."""
        rows = self._database.run(
            "SELECT record, id, version, reward IS NOT NULL, action FROM samples "
            "WHERE file = ? AND record IN (SELECT value FROM json_each(?)) ORDER BY record, id",
            [encode_text(ledger), self._database.listed(numbers)],
        )
        return [
            LedgerSample(number, i, version, bool(scored), int.from_bytes(action or b"", "big").bit_count())
            for number, i, version, scored, action in rows
        ]

    def set_aside(self, ledger: str, numbers: Sequence[int]) -> None:
        """Mark the samples under these numbers of a ledger as redone, and let others take their places."""
        ids = self.find_in_ledger(ledger, numbers)
        stored = chain.from_iterable(self._tables.sample_pages(ids=sorted(ids)))
        aside = [SampleRow(row).set_aside() for row in stored if is_valid_sample(row)]
        with self._database.transaction():
            columns = ("file", "record", "part", "redone", "checksum")
            rows = [(None, None, None, 1, row.checksum, row.id) for row in aside]
            self._database.update("samples", columns, rows)
            self._tables.note_changes(ids)

    def rewards(
        self, run: str, prompt_ids: Iterable[str], *, without: Collection[int]
    ) -> dict[str, list[tuple[int, float]]]:
        """(version, reward) of the scored responses of `run` to each prompt, those of these ids left out.

        Of an episode the first row's. Rewards of tokens don't count.
        """
        rewards: dict[str, list[tuple[int, float]]] = {}
        for prompt_id in prompt_ids:
            rows = self._database.run(queries.REWARDS, [encode_text(prompt_id), encode_text(run)])
            rewards[prompt_id] = [(version, reward) for i, version, reward in rows if i not in without]
        return rewards

    def next_number(self, seed: int) -> int:
        """The number after the last response (`meta["index"]`) that was sampled with this seed; from 0.

        Seed and number determine a response's noise, so a sampler that continues from here repeats none.
        """
        [(number,)] = self._database.run(queries.NEXT_NUMBER, [seed])
        return int(number)

    def set_rewards(
        self, scores: Iterable[tuple[int, float | None, Mapping[str, Any]]], *, once: bool = False
    ) -> None:
        """Set rewards: (id, reward, entries for `meta`).

        None with a "reward_error" among the entries is a failure; None without one makes the sample
        unscored again. The error and the parts of an earlier reward are dropped. With `once` a sample that
        has a reward, or whose reward failed, keeps it.
        """
        scores, rows = list(scores), []
        ids = [i for i, _, _ in scores]
        columns = ", ".join(("id", "prompt_id", *REWARD, "checksum"))
        sql = f"SELECT {columns} FROM samples WHERE id IN (SELECT value FROM json_each(?))"
        with self._database.transaction():
            found = self._database.run(sql, [self._database.listed(ids)])
            stored = {i: columns for i, _, *columns in found}
            if len(stored) < len(set(ids)):
                self._tables.check_ids(ids)
            for i, reward, entries in scores:
                *previous, total = stored[i]
                if once and previous[0] != queries.UNSCORED:
                    continue
                try:
                    meta = dict(loads(decode_text(previous[-1])))
                except (TypeError, ValueError):
                    raise self._tables.refusal(Damage(samples=[i])) from None
                for earlier in ("reward_error", "reward_parts", "reward_details", "token_rewards"):
                    meta.pop(earlier, None)
                if reward is not None and not math.isfinite(reward):
                    raise Refused(
                        f"sample {i}: reward: expected a finite number, or None where unknown, got {reward}"
                    )
                meta |= entries
                text = encode_text(dumps(meta, f"sample {i}: meta"))
                current = [state_of(reward, meta), None if reward is None else float(reward), text]
                stored[i] = [*current, replace_reward(total, i, previous, current)]
                rows.append((*stored[i], i))
            self._database.update("samples", (*REWARD, "checksum"), rows)
            self._tables.note_groups(dict.fromkeys(prompt_id for _, prompt_id, *_ in found))

    def add_pairs(self, pairs: Iterable[Pair]) -> None:
        """Add judgments. Raises `Refused` for ids that aren't there."""
        pairs = list(pairs)
        with self._database.transaction():
            self._tables.check_ids([i for p in pairs for i in (p.winner, p.loser)])
            rows = []
            for p in pairs:
                votes = [None if v is None else v + 0.0 for v in (p.votes_winner, p.votes_loser)]
                rows.append((p.winner, p.loser, *votes))  # floats, as REAL stores them
            self._tables.put("pairs", rows)
            self._tables.note_changes(p.winner for p in pairs)

    def _each_pair(self) -> Iterator[Pair]:
        [(newest,)] = self._database.run("SELECT coalesce(max(rowid), 0) FROM pairs")
        for start in range(0, newest, PAGE_ENTRIES):
            page = [start, start + PAGE_ENTRIES]
            yield from (Pair(*row) for row in self._tables.entries("pairs", "rowid > ? AND rowid <= ?", page))


def _values(text: Any, key: str) -> list[Any]:
    """What the JSON text of `meta` has at a key, which may be dotted; a damaged one has nothing."""
    try:
        meta = loads(decode_text(text))
    except (TypeError, ValueError):
        return []
    nested: Any = meta
    for part in key.split("."):
        nested = nested.get(part) if isinstance(nested, dict) else None
    return [each for each in (meta.get(key), nested) if each is not None]
