"""Convert records of files to rows of the store; each process of an import does this for blocks of a file.

A reader accesses neither the store nor the blocks that other processes read. What it needs to know about
earlier blocks of the file is its `ReaderState`. Reader processes guess it, and a block is read again if the
blocks before it left another state. One process writes the results, in the order of the blocks.
"""

from __future__ import annotations

import gc
import pickle
import warnings
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from hashlib import blake2b
from itertools import chain, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from agro.errors import AgroWarning, Refused
from agro.io.json_values import entry, is_unknown
from agro.io.jsonlines import RECORD_ERRORS, Line, reason_of
from agro.io.processes import begin_worker
from agro.io.record_files import Block, on_hub
from agro.logs.exchanges import settle
from agro.logs.format_table import Recognizer, get
from agro.logs.interchange import RECORD, from_record
from agro.logs.mapping import OPTIONAL, Part, expand, unmapped
from agro.logs.privacy import Privacy
from agro.logs.protocol import Context, Format, Item, Judgment, Row, SkipRecord, Tokenizer
from agro.logs.records import summed
from agro.logs.values import as_reward, number_in
from agro.store.ledger import Place
from agro.store.sample_rows import Origin, SampleRow
from agro.types import Prompt, Sample

_UNSEEN = ("tools", "functions", "reasoning")  # what no model reads in `meta`: it stood beside a text


class Options(TypedDict, total=False):
    """How `import_files` reads records."""

    mapping: Mapping[str, str] | None  # see `agro.logs.mapping`
    prompts: str | Path | None  # a file of prompts, joined by `prompt_id` or `id`; its columns go into `meta`
    format: str | None  # a name in `agro.logs.format_table.FORMATS`, needed if several fit a record
    rewards: Mapping[str, float] | None  # weights of the columns whose sum is the reward
    reward_map: Mapping[str, float | None] | None  # rewards of words, see `agro.logs.values`
    lower_is_better: bool  # negate rewards, and swap winner and loser of each pair
    choose: Mapping[str, str] | None  # which of several filters, scorers, … of a format to use
    join: str | Path | None  # the second file of a format that is split over two
    limit: int | None  # largest number of records from each file
    tokenizer: Tokenizer | None  # for tokens without a mask, see `from_record`
    replace: bool  # import the files again, and replace what was imported from them
    strict: bool  # import nothing if any record is refused
    license: str | None  # the files' license, for people
    workers: int  # number of reader processes; with 1, the default, this process reads and writes
    drop: Sequence[str]  # fields of the record that aren't stored, see `agro.logs.privacy`
    redact: bool  # whether keys and e-mail addresses are redacted
    redact_patterns: Sequence[str]  # further regular expressions to redact
    center_by: str | None  # the field by whose values rewards are centered, see `agro.logs.importing`
    refused_file: str  # lists the refused records if there are many; by default next to the store


class Refusal(NamedTuple):
    where: str  # FILE:LINE
    reason: str


@dataclass
class Counts:
    """What readers count over the records they read."""

    left_out: Counter[str] = field(default_factory=Counter)  # records by their format's rule
    without_value: Counter[str] = field(default_factory=Counter)  # records by FIELD=COLUMN of --map
    with_value: Counter[str] = field(default_factory=Counter)  # also blocks with a word of --reward-map
    columns_left: dict[str, None] = field(default_factory=dict)  # columns that the mapping doesn't name
    dropped: Counter[str] = field(default_factory=Counter)  # records that had the field
    redacted: Counter[str] = field(default_factory=Counter)  # matches by kind
    unknown_ends: Counter[str] = field(default_factory=Counter)  # samples by the end that is reported
    cut: int = 0  # samples whose record says that they were cut
    unseen: Counter[str] = field(default_factory=Counter)  # samples by what a model may not read of them
    tokens_dropped: int = 0  # samples that lost their tokens because their text was changed
    kinds: dict[str, None] = field(default_factory=dict)  # names of the records' formats

    def count(self, other: Counts) -> None:
        """Add the counts of further records."""
        for each in fields(Counts):
            value, more = getattr(self, each.name), getattr(other, each.name)
            if isinstance(value, int):
                setattr(self, each.name, value + more)
            else:
                value.update(more)


@dataclass
class Repeat:
    """The identity of a response that other records may repeat, and the rule by which they do."""

    key: str
    rule: str
    once: bool  # whether records of one file with the same key are the same response
    number: int = 0  # otherwise the record's rank among those with this key in the file

    @property
    def identity(self) -> str:
        return self.key if self.once else _hash(f"{self.key} {self.number}")


class Entry(NamedTuple):
    """The samples of one record, and the judgments between them."""

    location: str  # FILE:LINE
    record: Place  # the file's hash, and the number of the record in the file
    samples: tuple[SampleRow, ...]
    scored: int  # samples with a reward
    judgments: tuple[Judgment, ...] = ()
    same: Repeat | None = None

    @property
    def origins(self) -> list[Origin]:
        return [sample.origin for sample in self.samples if sample.origin is not None]


def _hash(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class LogFile(NamedTuple):
    """A file to read. `format`: the name of its format, if it isn't a file of plain records."""

    path: str
    digest: str
    format: str | None


class ReaderState(NamedTuple):
    """What the records read so far tell about the next ones of the file."""

    notes: Mapping[str, Any]  # see `Context`
    formats: Mapping[tuple[str, ...], str | None]  # see `Recognizer.formats`


@dataclass
class BlockResult(Counts):
    """The result of reading records: entries, and counts for the report."""

    entries: list[Entry] = field(default_factory=list)
    refused: list[tuple[int, Refusal]] = field(default_factory=list)  # each with its record's number

    def refuse(self, line: Line, reason: str) -> None:
        self.refused.append((line.number, Refusal(line.where, reason)))


class Reader:
    """Reads records into sample rows. `prompts`: by id, for records without one; `joined`: see `Context`."""

    def __init__(
        self, options: Options, prompts: Mapping[str, Prompt], joined: Mapping[str, Row] | None = None
    ) -> None:
        self._options, self._prompts, self._joined = options, prompts, joined or {}
        self._mapping = dict(options.get("mapping") or {})
        self._recognizer = Recognizer(options.get("format"), mapped=bool(self._mapping))
        self._new_privacy()  # refuses invalid options early

    def _new_privacy(self) -> Privacy:
        drop, patterns = self._options.get("drop") or (), self._options.get("redact_patterns") or ()
        return Privacy(drop, self._options.get("redact", False), patterns)

    def read(self, file: LogFile, state: ReaderState, block: Block) -> tuple[BlockResult, ReaderState]:
        """Read the next records of a file. `state`: what reading the records before them left."""
        result = self._result = BlockResult()
        self._file = file
        self._recognizer.formats, self._privacy = dict(state.formats), self._new_privacy()
        self._context = Context(
            Path(file.path),
            self._options.get("rewards") or {},
            self._options.get("choose") or {},
            self._joined,
            tokenizer=self._options.get("tokenizer"),
            word_rewards=self._options.get("reward_map") or {},
            notes=dict(state.notes),
        )
        self._text_context = replace(self._context, is_text=True)  # shares the notes
        self._source = file.path if on_hub(Path(file.path)) else f"file:{Path(file.path).name}"
        for line in block.lines():
            try:
                if line.error:
                    raise Refused(line.error)
                result.columns_left.update(dict.fromkeys(unmapped(line.value, self._mapping)))
                parts = expand(line.value, self._mapping) if self._mapping else (Part(line.value),)
            except RECORD_ERRORS as error:
                result.refuse(line, reason_of(error))
                continue
            for part in parts:
                self._read_part(part, line)
        result.dropped, result.redacted = self._privacy.dropped, self._privacy.redacted
        result.tokens_dropped = self._privacy.tokens
        result.with_value["--reward-map"] += "--reward-map" in self._context.notes
        return result, ReaderState(self._context.notes, self._recognizer.formats)

    def _read_part(self, part: Part, line: Line) -> None:
        result = self._result
        try:
            if part.problem:
                raise Refused(part.problem)
            for name in OPTIONAL:
                if name in self._mapping:
                    is_without, mapped = is_unknown(part.record.get(name)), f"{name}={self._mapping[name]}"
                    (result.without_value if is_without else result.with_value)[mapped] += 1
            format = self._format(part)
            items = self._items(format, part, line)
            same = None  # the identity of the record's response, see `Format.identity`
            if format.identity is not None:
                key = _hash(f"{format.name} {format.identity(part.record)}")
                same = Repeat(key, format.repeats or format.title, format.once)
            record_id, names, new = (self._file.digest, line.number), list[str](), list[Entry]()
            for item in items:
                rows, scored = list[SampleRow](), 0
                for record, name in zip(item.records, map(part.column, item.names), strict=True):
                    sample = self._sample(record, line)
                    rows.append(SampleRow.of(sample, Origin(*record_id, name)))
                    scored += sample.reward is not None
                    if name in names:  # the origins would be equal
                        raise Refused(f"{name}: expected one response of this name in a record, got another")
                    names.append(name)
                new.append(Entry(line.where, record_id, tuple(rows), scored, item.judgments, same))
            result.entries += new
        except SkipRecord as rule:
            result.left_out[str(rule)] += 1
        except RECORD_ERRORS as error:
            column = part.columns.get("response") or part.columns.get("chosen")
            reason = reason_of(error)
            result.refuse(line, f"{column}: {reason}" if column else reason)

    def _format(self, part: Part) -> Format:
        if self._file.format is not None:
            return get(self._file.format)
        format = self._recognizer.recognize(part.record)
        if format is None:
            raise Refused(
                f"expected a format of `agro formats`, got the columns {', '.join(part.record) or '(none)'}; "
                "name that of the responses with --map response=COLUMN, or the format with --format"
            )
        if format.kind == "prompts":
            raise Refused(
                f"these are prompts ({format.title}) and no responses: set data.prompts to this file, or "
                "sample responses to them (agro sample). Where a column has responses, name it: --map "
                f"response=COLUMN, of {', '.join(part.record)}"
            )
        return format

    def _items(self, format: Format, part: Part, line: Line) -> list[Item]:
        context = self._text_context if line.is_text else self._context
        for name in context.choose:
            choices = format.chooses.split(", ")
            if name not in choices:
                expected = ", ".join(f"--choose {choice}=NAME" for choice in choices if choice) or "none"
                raise Refused(f"--choose {name}: no such choice for {format.title}; expected {expected}")
        items = format.read(part.record, context)
        if context.rewards and not format.weighs:
            items = summed(items, {**line.value, **part.record}, context)
        if self._options.get("lower_is_better"):
            # The record names the worse response; votes for it count for the other one.
            swapped = [[j._replace(winner=j.loser, loser=j.winner) for j in i.judgments] for i in items]
            items = [item._replace(judgments=tuple(js)) for item, js in zip(items, swapped, strict=True)]
        self._result.kinds[format.name] = None
        return items

    def _sample(self, record: dict[str, Any], line: Line) -> Sample:
        options, context = self._options, self._context
        if record.get("prompt") is None:
            record = self._with_prompt(record)
        reward = record.get("reward")
        if isinstance(reward, str) or context.word_rewards or not context.rewards:
            if self._mapping:  # foreign columns may have numbers as text, in JSON too
                reward = number_in(reward)
            record = {**record, "reward": as_reward(reward, context, "reward")}
        if options.get("lower_is_better"):
            if not is_unknown(record.get("token_reward")):
                raise Refused(
                    "--lower-is-better: expected one reward per response, got token_reward, one per token"
                )
            reward = record.get("reward")
            if isinstance(reward, bool | int | float) and not is_unknown(reward):
                record = {**record, "reward": 0.0 - reward}
        record = self._privacy.apply(record)
        if not line.is_json and not line.is_text:
            record = self._without_bytes(record)
        sample = from_record(
            record,
            source=self._source,
            tokenizer=options.get("tokenizer"),
            is_json=line.is_json,
        )
        if (reported := settle(sample.meta)) is not None:
            self._result.unknown_ends[f"{reported!r:.40}"] += 1
        self._result.cut += sample.end == "cut"
        self._result.unseen.update(f"meta.{name}" for name in _UNSEEN if sample.meta.get(name))
        prompt = sample.prompt if isinstance(sample.prompt, list) else ()
        turns = chain(prompt, sample.meta.get("continuation", ()))
        if any("name" in turn and turn["role"] != "tool" for turn in turns):
            self._result.unseen["the names of speakers"] += 1
        return sample

    def _with_prompt(self, record: dict[str, Any]) -> dict[str, Any]:
        """Add the prompt that has the record's id, and that prompt's columns to `meta`."""
        key = record.get("prompt_id", record.get("id"))
        if key is None or not self._prompts:
            raise Refused(
                "prompt: missing; name its column with --map prompt=COLUMN, or join it with --prompts FILE"
            )
        prompt = self._prompts.get(str(key))
        if prompt is None:
            raise Refused(f"prompt_id: the file of prompts has no {key!r}")
        fields = {name: value for name, value in record.items() if name != "id"}
        meta = entry(fields.get("meta"), "meta")
        columns = {name: value for name, value in prompt.columns.items() if fields.get(name) is None}
        return fields | {"prompt": prompt.text, "prompt_id": prompt.id, "meta": {**columns, **meta}}

    def _without_bytes(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record without bytes, such as an image's, in columns that no field uses."""
        for name, value in record.items():
            if isinstance(value, bytes) and name in RECORD:
                raise Refused(f"{name}: expected {RECORD[name].expected}, got {len(value)} bytes")
        columns = list[str]()
        extras = {name: value for name, value in record.items() if name not in RECORD or name == "meta"}
        plain: dict[str, Any] = _plain(extras, "", columns)
        for column in dict.fromkeys(column.removeprefix("meta.") for column in columns):
            if self._mapping:
                raise Refused(f"{column}: expected a value of JSON, got bytes; leave it out of --map")
            self._privacy.dropped[f"{column} (bytes)"] += 1
        return {name: value for name, value in record.items() if name in RECORD} | plain


def _plain(value: Any, name: str, columns: list[str]) -> Any:
    """A value without the bytes in its objects and lists; adds their names to `columns`."""
    if isinstance(value, bytes):
        columns.append(name)
    if isinstance(value, dict):
        parts = {key: _plain(item, f"{name}.{key}".lstrip("."), columns) for key, item in value.items()}
        return {key: part for key, part in parts.items() if not isinstance(value[key], bytes)}
    if isinstance(value, list):
        parts_of_list = [_plain(item, name, columns) for item in value]
        return [part for part in parts_of_list if not isinstance(part, bytes)]
    return value


WAITING = 2  # blocks per process that are submitted and not yet written, at most
Reply = tuple[BlockResult, ReaderState]


def read_in_order(
    reader: Reader,
    blocks: Iterable[tuple[LogFile, Block]],
    options: Options,
    prompts: Mapping[str, Prompt],
    count: int,
) -> Generator[tuple[LogFile, Block, BlockResult], None, None]:
    """Yield the result of each block in order; it is the same with any number of processes, see `_agrees`.

    `count`: number of reader processes; with 0 this one reads everything, with `reader`. An error of `blocks`
    is raised after the results of the blocks before it. Close the generator to end the processes.
    """
    pool: ProcessPoolExecutor | None = None
    ahead = max(1, WAITING * count)
    state, previous = ReaderState({}, {}), None
    pending: deque[tuple[LogFile, Block, ReaderState, Future[Reply] | None] | Exception] = deque()
    with ExitStack() as stack:
        if count:
            pool = ProcessPoolExecutor(count, get_context("spawn"), begin_worker, (_setup(options, prompts),))
            stack.callback(pool.shutdown, cancel_futures=True)
        for item in chain(_until_error(blocks), repeat(None, ahead)):
            if isinstance(item, tuple):
                file, block = item
                guess, future = state._replace(notes=state.notes if file is previous else {}), None
                if pool is not None:
                    with suppress(BrokenProcessPool):
                        future = pool.submit(_read_block, file, guess, block)
                pending.append((file, block, guess, future))
            elif item is not None:
                pending.append(item)
            if not pending or (item is not None and len(pending) < ahead):
                continue
            oldest = pending.popleft()
            if isinstance(oldest, Exception):
                raise oldest
            file, block, guess, future = oldest
            current = state._replace(notes=state.notes if file is previous else {})
            reply = _reply(future)
            if reply is None or not _agrees(current, guess, reply[1]):
                reply = reader.read(file, current, block)
            result, end = reply
            previous, state = file, ReaderState(end.notes, {**current.formats, **end.formats})
            yield file, block, result


def _setup(options: Options, prompts: Mapping[str, Prompt]) -> bytes:
    try:
        return pickle.dumps(partial(_begin, options, prompts))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise Refused(
            "workers: expected options that can be sent to other processes, got a tokenizer that can't "
            f"be: {error}; import with workers = 1"
        ) from None


def _until_error(
    blocks: Iterable[tuple[LogFile, Block]],
) -> Iterator[tuple[LogFile, Block] | Exception]:
    try:
        yield from blocks
    except Exception as error:  # noqa: BLE001 raised after the blocks before it
        yield error


def _reply(future: Future[Reply] | None) -> Reply | None:
    """The result of another process; None if there is none or it failed, so that this one reads the block."""
    try:
        return None if future is None else future.result()
    except BrokenProcessPool:
        problem = "a process of this import ended (killed, or see what it printed); this one reads the rest"
        warnings.warn(problem, AgroWarning, stacklevel=3)
    except Exception:  # noqa: BLE001 see above
        pass
    return None


def _agrees(current: ReaderState, guess: ReaderState, end: ReaderState) -> bool:
    """Whether a block that was read from `guess`, and left `end`, would be read the same from `current`."""
    formats = end.formats.items()
    return guess.notes == current.notes and all(current.formats.get(k, f) == f for k, f in formats)


_reader: Reader  # set in reader processes


def _begin(options: Options, prompts: Mapping[str, Prompt]) -> None:
    global _reader
    _reader = Reader(options, prompts)
    gc.disable()


def _read_block(file: LogFile, state: ReaderState, block: Block) -> Reply:
    gc.collect(0)
    return _reader.read(file, state, block)
