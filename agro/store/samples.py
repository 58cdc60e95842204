"""The samples of a store: how they are filtered, added, found, read and scored, and judgments of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from os.path import commonprefix
from typing import Any, NamedTuple, TypedDict, Unpack

from agro.config import DataConfig
from agro.errors import Refused
from agro.io.strictjson import dumps, loads
from agro.store.database import PAGE_ENTRIES, Damage, Database, Statement, repeated
from agro.store.sample_rows import (
    PROMPT,
    REWARD,
    SAMPLE,
    SCORED,
    SELECT,
    STATES,
    UNSCORED,
    Origin,
    SampleRow,
    State,
    count_actions,
    decode_text,
    encode_text,
    from_rows,
    is_valid_sample,
    prompt_columns,
    prompt_of,
    replace_reward,
    set_aside,
    state_of,
)
from agro.types import Sample, Text

Clause = tuple[str, list[Any]]  # SQL, and its arguments
PRESENT = "prompt_id <> ''"  # not erased, see `agro.store.ledger`
NUMBER = "number_of(meta, 'index')"  # of a response among those sampled with one seed
WON = "coalesce(votes_winner <> votes_loser, TRUE)"  # not a tie, see `Pair.is_tie`

ASKED = 1000  # most groups in one query
# A sample of each of these groups, and its prompt. The index samples_draw has this order: one entry is read.
STORED_PROMPTS = """
SELECT prompt_id, id, prompt, messages FROM samples WHERE id IN (
  SELECT (SELECT id FROM samples WHERE prompt_id = column1 AND redone = 0 ORDER BY reward LIMIT 1)
  FROM (VALUES {ids}) AS asked
)
"""
# No other sample of the prompt and `origin` has a higher reward. Columns without a table are those of
# `other`.
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
    best_of_group: bool  # only those with the highest reward of their group, ties included


class Filter(SampleFilter, total=False):
    """Which samples; None, or a missing key, allows any."""

    prompt_id: str | None
    scored: bool | None  # false: unscored and failed, which `state` distinguishes
    state: State | None
    run: str | None
    redone: bool  # include those that were set aside, or that a resumed run generates again


def build_condition(**filters: Unpack[Filter]) -> Clause:
    """The SQL condition, never NULL, that a row of samples matches a `Filter`, and its arguments."""
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
    """The filter of stored samples that a configuration trains on, whatever the run and its step."""
    roles, sources = data.drawn_from
    return {
        "roles": roles,
        "sources": sources,
        "min_reward": data.min_reward,
        "best_of_group": data.best_of_group,
    }


@dataclass(frozen=True)
class Pair:
    """A judgment: ids of two samples, the better one first, and its votes if they were counted."""

    winner: int
    loser: int
    votes_winner: float | None = None
    votes_loser: float | None = None

    def __post_init__(self) -> None:
        if self.winner == self.loser:
            raise Refused(f"pair: expected two samples, got {self.winner} twice")
        for votes in (self.votes_winner, self.votes_loser):
            if votes is not None and not (math.isfinite(votes) and votes >= 0):
                raise Refused(
                    f"pair of {self.winner} and {self.loser}: expected votes of 0 or more, got {votes}"
                )

    @property
    def is_tie(self) -> bool:
        """Whether its votes are equal: neither of the two won."""
        return self.votes_winner is not None and self.votes_winner == self.votes_loser


class LedgerSample(NamedTuple):
    """What is known about a response to a request without decoding its sample."""

    number: int  # of the request
    id: int
    version: int  # the oldest of its tokens; -1: unknown
    has_reward: bool
    actions: int | None  # tokens that were sampled; None: unknown


class OtherPrompt(Refused):
    """A prompt_id that already names another prompt: a group has one, whoever adds samples."""

    def __init__(self, prompt_id: str, prompt: Text, location: str, got: Text) -> None:
        """`location`: that of the prompt that the id names; `got`: the other prompt."""
        texts = [p if isinstance(p, str) else json.dumps(p, ensure_ascii=False) for p in (prompt, got)]
        start = max(0, len(commonprefix(texts)) - 20)  # noqa: RUF071  texts, not paths
        expected, other = (("…" if start else "") + text[start : start + 80] for text in texts)
        super().__init__(
            f"prompt_id: expected {prompt_id} to name one prompt, {expected!r} ({location}), got {other!r}; "
            "give ids that are unique, or leave prompt_id out so that the prompt's hash is used"
        )


class _GroupPrompt(NamedTuple):
    """The prompt of a group, as its columns, and its location for messages."""

    columns: tuple[Any, Any]
    location: str = "added together with it"


class AppendTransaction:
    """Collects samples by `add` and stores them together by `write`, within the caller's transaction.

    `prompt_ids`: those that will be added, which are looked up together.
    """

    def __init__(self, database: Database, prompt_ids: Collection[str]) -> None:
        self._db = database
        names = list(prompt_ids)
        queries: list[Statement] = [("SELECT coalesce(max(id), 0) FROM samples", [])]
        for start in range(0, len(names), ASKED):
            part = names[start : start + ASKED]
            queries.append((STORED_PROMPTS.format(ids=", ".join(["(?)"] * len(part))), part))
        [(self._newest,)], *stored = database.run_all(*queries)
        self._stored = {decode_text(prompt_id): prompt for prompt_id, *prompt in chain(*stored)}
        self._prompts: dict[str, _GroupPrompt] = {}
        self._rows: list[tuple[Any, ...]] = []

    def add(
        self,
        samples: Sequence[SampleRow],
        run: str | None = None,
        step: int | None = None,
        origins: Sequence[Origin] | None = None,
    ) -> list[int]:
        """Add samples, all or none, for `write` to store, and return their ids.

        Raises `OtherPrompt` if a prompt_id names another prompt, in the store or among the added ones.
        `origins` replace the samples' own.
        """
        ids = list(range(self._newest + 1, self._newest + 1 + len(samples)))
        prompts = self._checked((sample.prompt_id, sample.values[PROMPT]) for sample in samples)
        for n, (i, sample) in enumerate(zip(ids, samples)):
            columns = prompts[sample.prompt_id].columns
            origin = None if origins is None else origins[n]
            self._rows.append(sample.placed(i, columns, run, step, origin))
        self._prompts |= prompts
        self._newest += len(samples)
        return ids

    def write(self) -> list[int]:
        """Store the added samples, and return their ids."""
        self._db.insert("samples", SAMPLE, self._rows)
        ids = [row[0] for row in self._rows]
        self._rows = []
        return ids

    def check(self, prompts: Iterable[tuple[str, Text]]) -> None:
        """Raise `OtherPrompt` as `add` of samples with these prompts does."""
        self._checked((i, prompt_columns(prompt, f"prompt {i}")) for i, prompt in prompts)

    def _checked(self, prompts: Iterable[tuple[str, tuple[Any, Any]]]) -> dict[str, _GroupPrompt]:
        """The prompts of groups by their ids: the store's if it has an undamaged one, or the first one. They
        are decoded only if two are encoded differently."""
        checked: dict[str, _GroupPrompt] = {}
        for prompt_id, columns in prompts:
            group = checked.get(prompt_id) or self._prompts.get(prompt_id)
            if group is None and prompt_id in self._stored:
                i, *stored = self._stored[prompt_id]
                if tuple(stored) != columns:
                    [row] = self._db.run(f"{SELECT} WHERE id = ?", [i])
                    if is_valid_sample(row):
                        [other] = from_rows([row])
                        source = f", of {other.source}" if other.source else ""
                        group = _GroupPrompt(row[PROMPT], f"sample {i}{source}")
            group = group or _GroupPrompt(columns)
            if group.columns != columns and prompt_of(group.columns) != prompt_of(columns):
                raise OtherPrompt(prompt_id, prompt_of(group.columns), group.location, prompt_of(columns))
            checked[prompt_id] = group
        return checked


class Experience:
    """The methods of a `Store` about samples, and judgments of them."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def samples(
        self, *, ids: Iterable[int] | None = None, skip_damaged: bool = False, **chosen: Unpack[Filter]
    ) -> Iterator[Sample]:
        """Yield the chosen samples that exist at the start, by id; writing meanwhile is fine.

        Raises `Refused` for missing ids, and for damaged samples unless `skip_damaged` drops them.
        """
        self._db.check_once("structure")
        if ids is not None:
            ids = sorted(set(ids))
            self._db.check_ids(ids)
        for page in self._db.sample_pages(*build_condition(**chosen), ids):
            valid = [row for row in page if is_valid_sample(row)]
            if len(valid) < len(page) and not skip_damaged:
                raise self._db.refusal(Damage(samples=self._db.damaged("samples")))
            yield from from_rows(valid)

    @repeated
    def append(
        self,
        samples: Iterable[Sample | SampleRow],
        *,
        run: str | None = None,
        step: int | None = None,
        origins: Sequence[Origin] | None = None,
    ) -> list[int]:
        """Add samples, all or none, and return their ids. Raises `OtherPrompt` as `check_prompts` does.

        `origins`: one per sample. A sample whose origin is stored isn't added again; the stored sample's id
        is returned, so that an append can be repeated.
        """
        # Encode before taking the lock.
        rows = [s if isinstance(s, SampleRow) else SampleRow.of(s) for s in samples]
        with self._db.transaction():
            append = AppendTransaction(self._db, {row.prompt_id for row in rows})
            if origins is None:
                append.add(rows, run, step)
                return append.write()
            ids = self._ids_of(origins)
            new: dict[Origin, SampleRow] = {}
            for origin, row in zip(origins, rows, strict=True):
                if origin not in ids:
                    new.setdefault(origin, row)
            append.add(list(new.values()), run, step, list(new))
            ids |= zip(new, append.write())
            return [ids[origin] for origin in origins]

    def _ids_of(self, origins: Iterable[Origin]) -> dict[Origin, int]:
        """The ids of the stored samples with these origins."""
        records: dict[str, set[int]] = {}
        for origin in origins:
            records.setdefault(origin.file, set()).add(origin.record)
        sql = (
            "SELECT record, part, id FROM samples "
            "WHERE file = ? AND record IN (SELECT value FROM json_each(?))"
        )
        ids: dict[Origin, int] = {}
        for file, numbers in records.items():
            rows = self._db.run(sql, [file, self._db.listed(numbers)])
            ids |= {Origin(file, record, decode_text(part)): i for record, part, i in rows}
        return ids

    def check_prompts(self, prompts: Iterable[tuple[str, Text]]) -> None:
        """Raise `OtherPrompt` unless a prompt_id names one prompt, in the store and among these.

        `prompts`: (prompt_id, prompt). Redone and damaged samples are ignored.
        """
        prompts = list(prompts)
        AppendTransaction(self._db, {prompt_id for prompt_id, _ in prompts}).check(prompts)

    def find(
        self, *, source: str | None = None, prompt_id: str | None = None, meta: tuple[str, str] | None = None
    ) -> list[int]:
        """Find the ids of all matching samples, redone ones included.

        `meta`: a key, dotted if nested, and its value as text. All rows of an episode match if one does.
        """
        criteria = {"source": source, "prompt_id": prompt_id}
        args = [value for value in criteria.values() if value is not None]
        equal = [f"{column} = ?" for column, value in criteria.items() if value is not None]
        term = " AND ".join([PRESENT, *equal])
        if meta is not None:
            key, text = meta
            ids = self._with_meta(term, args, key, lambda x: text == (x if type(x) is str else json.dumps(x)))
            term, args = "id IN (SELECT value FROM json_each(?))", [self._db.listed(ids)]
        rows = self._db.run(
            f"WITH fit AS (SELECT id, prompt_id, episode FROM samples WHERE {term}) "
            "SELECT id FROM fit UNION SELECT s.id FROM samples s JOIN fit "
            "ON s.prompt_id = fit.prompt_id AND s.episode = fit.episode ORDER BY 1",
            args,
        )
        return [i for (i,) in rows]

    def find_below(self, key: str, limit: float) -> list[int]:
        """Find the ids of all samples, redone ones included, with a float below `limit` at a `meta` key."""
        return self._with_meta(PRESENT, [], key, lambda x: isinstance(x, float) and x < limit)

    def find_listed(self, ledger: str, key: str, value: str) -> list[int]:
        """Find the ids of the samples in ledgers that begin so whose list at a `meta` key has this value."""
        args = [ledger, ledger[:-1] + chr(ord(ledger[-1]) + 1)]  # a range of the index
        return self._with_meta("file >= ? AND file < ?", args, key, lambda x: type(x) is list and value in x)

    def _with_meta(self, term: str, args: Sequence[Any], key: str, fits: Callable[[Any], bool]) -> list[int]:
        """Ids of the samples whose `meta` has a value that fits at a key, which may be dotted."""
        ids = []
        sql = f"SELECT id, meta FROM samples WHERE {term} AND id > ? ORDER BY id"
        for i, text in chain.from_iterable(self._db.pages(sql, args, rows=PAGE_ENTRIES)):
            try:
                meta = nested = loads(decode_text(text))
            except (TypeError, ValueError):
                continue  # a damaged one matches nothing
            for part in key.split("."):
                nested = nested.get(part) if isinstance(nested, dict) else None
            direct = meta.get(key) if isinstance(meta, dict) else None
            if any(value is not None and fits(value) for value in (direct, nested)):
                ids.append(i)
        return ids

    def in_ledger(self, ledger: str, numbers: Sequence[int]) -> list[LedgerSample]:
        """The samples that are stored under these numbers of a ledger, by number."""
        rows = self._db.run(
            "SELECT record, id, version, reward IS NOT NULL, action FROM samples "
            "WHERE file = ? AND record IN (SELECT value FROM json_each(?)) ORDER BY record, id",
            [ledger, self._db.listed(numbers)],
        )
        return [
            LedgerSample(number, i, version, bool(scored), count_actions(action))
            for number, i, version, scored, action in rows
        ]

    def find_in_ledger(self, ledger: str, numbers: Sequence[int]) -> list[int]:
        """The ids of `in_ledger`."""
        return [sample.id for sample in self.in_ledger(ledger, numbers)]

    @repeated
    def set_aside(self, ledger: str, numbers: Sequence[int]) -> None:
        """Mark the samples under these numbers of a ledger as redone, and free their places for others."""
        ids = self.find_in_ledger(ledger, numbers)
        stored = chain.from_iterable(self._db.sample_pages(ids=sorted(ids)))
        aside = [set_aside(row) for row in stored if is_valid_sample(row)]
        with self._db.transaction():
            columns = ("file", "record", "part", "redone", "checksum")
            self._db.update("samples", columns, [(None, None, None, 1, r[-1], r[0]) for r in aside])
            self._db.note_changes(ids)

    def rewards(
        self, run: str, prompt_ids: Iterable[str], *, without: Collection[int]
    ) -> dict[str, list[tuple[int, float]]]:
        """(version, reward) of the scored responses of `run` to each prompt, except the ids in `without`.

        An episode counts once, by its first row. Per-token rewards are ignored.
        """
        sql = f"""
            SELECT id, version, reward FROM samples WHERE id IN (
              SELECT min(id) FROM samples
              WHERE prompt_id = ? AND redone = 0 AND state = {SCORED} AND run = ? AND version >= 0
              GROUP BY episode, CASE WHEN episode IS NULL THEN id END
            ) ORDER BY id
            """
        rewards: dict[str, list[tuple[int, float]]] = {}
        for prompt_id in prompt_ids:
            rows = self._db.run(sql, [prompt_id, run])
            rewards[prompt_id] = [(version, reward) for i, version, reward in rows if i not in without]
        return rewards

    def next_number(self, seed: int) -> int:
        """The number (`meta["index"]`, from 0) after that of the last response sampled with this seed.

        Seed and number determine a response's noise, so a sampler that continues from here repeats none.
        """
        [(number,)] = self._db.run(
            f"SELECT coalesce(max({NUMBER}) + 1, 0) FROM samples "
            "WHERE sampling IS NOT NULL AND number_of(sampling, 'seed') = ?",
            [seed],
        )
        return int(number)

    @repeated
    def set_rewards(
        self, scores: Iterable[tuple[int, float | None, Mapping[str, Any]]], *, once: bool = False
    ) -> None:
        """Set rewards: (id, reward, entries for `meta`).

        None with a "reward_error" among the entries is a failure; None without one makes the sample unscored
        again. The error and the parts of an earlier reward are dropped. With `once`, a sample that has a
        reward, or a failed one, keeps it.
        """
        scores, rows = list(scores), []
        ids = [i for i, _, _ in scores]
        columns = ", ".join(("id", "prompt_id", *REWARD, "checksum"))
        sql = f"SELECT {columns} FROM samples WHERE id IN (SELECT value FROM json_each(?))"
        with self._db.transaction():
            selected = self._db.run(sql, [self._db.listed(ids)])
            stored = {i: columns for i, _, *columns in selected}
            if len(stored) < len(set(ids)):
                self._db.check_ids(ids)
            for i, reward, entries in scores:
                *previous, checksum = stored[i]
                if once and previous[0] != UNSCORED:
                    continue
                if reward is not None and not math.isfinite(reward):
                    raise Refused(
                        f"sample {i}: reward: expected a finite number, or None where unknown, got {reward}"
                    )
                try:
                    meta = dict(loads(decode_text(previous[-1])))
                except (TypeError, ValueError):
                    raise self._db.refusal(Damage(samples=[i])) from None
                for earlier in ("reward_error", "reward_parts", "reward_details", "place_rewards", "meaning"):
                    meta.pop(earlier, None)
                meta |= entries
                text = encode_text(dumps(meta, f"sample {i}: meta"))
                current = [state_of(reward, meta), None if reward is None else float(reward), text]
                stored[i] = [*current, replace_reward(checksum, i, previous, current)]
                rows.append((*stored[i], i))
            self._db.update("samples", (*REWARD, "checksum"), rows)
            self._db.note_groups(dict.fromkeys(prompt_id for _, prompt_id, *_ in selected))

    @repeated
    def add_pairs(self, pairs: Iterable[Pair]) -> None:
        """Add judgments. Raises `Refused` for missing ids."""
        pairs = list(pairs)
        with self._db.transaction():
            self._db.check_ids([i for p in pairs for i in (p.winner, p.loser)])
            rows = []
            for p in pairs:
                votes = [None if v is None else v + 0.0 for v in (p.votes_winner, p.votes_loser)]
                rows.append((p.winner, p.loser, *votes))  # floats, as REAL stores them
            self._db.put("pairs", rows)
            self._db.note_changes(p.winner for p in pairs)

    def pairs(self, ids: Iterable[int] | None = None) -> Iterator[Pair]:
        """Yield judgments in the order of adding; with `ids`, only those between two of these samples.

        Raises `Refused` for a damaged one.
        """
        if ids is None:
            return self._each_pair()
        chosen = "(SELECT value FROM json_each(?1))"
        clause, args = f"winner IN {chosen} AND loser IN {chosen}", [self._db.listed(ids)]
        return iter([Pair(*row) for row in self._db.entries("pairs", clause, args)])

    def _each_pair(self) -> Iterator[Pair]:
        [(newest,)] = self._db.run("SELECT coalesce(max(rowid), 0) FROM pairs")
        for start in range(0, newest, PAGE_ENTRIES):
            page = [start, start + PAGE_ENTRIES]
            rows = self._db.entries("pairs", "rowid > ? AND rowid <= ?", page)
            yield from (Pair(*row) for row in rows)
