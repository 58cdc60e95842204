"""Records of files as rows of the store: what each process of an import does with a block of a file.

A reader knows neither the store nor the blocks that others read. What it must know of earlier blocks of a
file is its `State`: one that was read with another state than the blocks before it left is read again.

With several processes blocks of files are read by some, and written in their order by one. What a process
is sent and replies is pickled: both are this program, on this machine.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Self

from agro.errors import AgroWarning, Refused
from agro.io.datasets import on_hub
from agro.io.json_values import is_unknown
from agro.io.jsonlines import RECORD_ERRORS, Line, reason_of
from agro.io.record_files import Block
from agro.logs.fields import summed
from agro.logs.format_table import Recognizer, get
from agro.logs.import_report import Counts, Options, Refusal, add
from agro.logs.interchange import RECORD, from_record
from agro.logs.labels import as_reward, number_in
from agro.logs.mapping import Part, expand, unmapped
from agro.logs.model_calls import settle
from agro.logs.privacy import Privacy
from agro.logs.protocol import Context, Format, Item, Judgment, Row, SkipRecord
from agro.store.imports import Place
from agro.store.sample_rows import Origin, SampleRow
from agro.types import Prompt, Sample


@dataclass
class Repeat:
    """What tells a response that other records may repeat, and the rule by which they do."""

    key: str
    rule: str
    once: bool  # whether records of one file with the same key are the same response
    number: int = 0  # of those in the file so far, where they aren't

    @property
    def identity(self) -> str:
        return self.key if self.once else _hash(f"{self.key} {self.number}")


class Entry(NamedTuple):
    """Samples of one record, and which of them are better than which."""

    location: str  # FILE:LINE
    record: Place  # the file, by its hash, and the number of the record in it
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
    """A file that is read. `format`: the name of its format, where it holds no plain records."""

    path: str
    digest: str
    format: str | None


@dataclass
class State:
    """What reading some records of a file told about the next ones."""

    notes: dict[str, Any] = field(default_factory=dict)  # see `Context`
    known: dict[tuple[str, ...], str | None] = field(default_factory=dict)  # see `Recognizer`


@dataclass
class BlockResult(Counts):
    """What came of records: entries, and counts for the report."""

    entries: list[Entry] = field(default_factory=list)
    refused: list[tuple[int, Refusal]] = field(default_factory=list)  # with the number of the record
    parts: int = 0
    kinds: set[str] = field(default_factory=set)

    def refuse(self, line: Line, reason: str) -> None:
        self.refused.append((line.number, Refusal(line.where, reason)))


class Reader:
    """Records as rows of samples. `prompts`: of records without, by their id; `joined`: see `Context`."""

    def __init__(
        self, options: Options, prompts: Mapping[str, Prompt], joined: Mapping[str, Row] | None = None
    ) -> None:
        self._options, self._prompts, self._joined = options, prompts, joined or {}
        self._mapping = dict(options.get("mapping") or {})
        self._recognizer = Recognizer(options.get("format"), mapped=bool(self._mapping))
        self._privacy = Privacy(
            options.get("drop") or (), options.get("redact", False), options.get("redact_patterns") or ()
        )
        self._found = BlockResult()
        self._file: LogFile | None = None
        self._file_format: Format | None = None
        self._context = self._text_context = Context(Path())
        self._source = ""

    @property
    def state(self) -> State:
        return State(self._context.notes, self._recognizer.known)

    def begin(self, file: LogFile, state: State) -> None:
        """Begin with records of a file, of which those before them left this state."""
        self._file = file
        self._file_format = None if file.format is None else get(file.format)
        self._context = Context(
            Path(file.path),
            self._options.get("rewards") or {},
            self._options.get("choose") or {},
            self._joined,
            tokenizer=self._options.get("tokenizer"),
            word_rewards=self._options.get("reward_map") or {},
            notes=dict(state.notes),
        )
        self._recognizer.known = dict(state.known)
        self._text_context = replace(self._context, is_text=True)
        name = Path(file.path)
        default = file.path if on_hub(name) else f"file:{name.name}"
        source = self._options.get("source")
        self._source = default if source is None else source

    def read(self, block: Block) -> BlockResult:
        """The entries of the next records of the file, and which of them are refused."""
        self._found = found = BlockResult()
        for line in block.lines():
            try:
                if line.error:
                    raise Refused(line.error)
                for name in unmapped(line.value, self._mapping):
                    if name not in found.columns_left:
                        found.columns_left.append(name)
                parts = expand(line.value, self._mapping) if self._mapping else (Part(line.value),)
            except RECORD_ERRORS as error:
                found.refuse(line, reason_of(error))
                continue
            for part in parts:
                self._read_part(part, line, found)
        found.dropped, found.redacted, found.tokens_dropped = self._privacy.take_counts()
        return found

    def _read_part(self, part: Part, line: Line, found: BlockResult) -> None:
        found.parts += 1
        for name in part.missing:
            add(found.without_column, {name: 1})
        try:
            if part.problem:
                raise Refused(part.problem)
            format = self._format(part)
            items = self._items(format, part, line)
            same = None  # what tells the response of a record, see `Format.identity`
            if format.identity is not None:
                key = _hash(f"{format.name} {format.identity(part.record)}")
                same = Repeat(key, format.repeats or format.title, format.once)
            digest, new = self._file.digest if self._file else "", list[Entry]()
            for item in items:
                rows, scored = list[SampleRow](), 0
                for record, name in zip(item.records, item.names, strict=True):
                    sample = self._sample(record, line)
                    rows.append(SampleRow.of(sample, Origin(digest, line.number, part.column(name))))
                    scored += sample.reward is not None
                place = digest, line.number
                new.append(Entry(line.where, place, tuple(rows), scored, item.judgments, same))
            names = [origin.part for entry in new for origin in entry.origins]
            if len(set(names)) < len(names):  # they couldn't be told apart later
                twice = next(name for name in names if names.count(name) > 1)
                raise Refused(
                    f"{twice}: expected one response of this name in a record, got {names.count(twice)}"
                )
            found.entries += new
        except SkipRecord as rule:
            add(found.left_out, {str(rule): 1})
        except RECORD_ERRORS as error:
            column = part.columns.get("response") or part.columns.get("chosen")
            reason = reason_of(error)
            found.refuse(line, f"{column}: {reason}" if column else reason)

    def _format(self, part: Part) -> Format:
        format = self._file_format or self._recognizer.recognize(part.record)
        if format is None:
            raise Refused(
                f"expected a format of `agro formats`, got the columns {', '.join(part.record) or '(none)'}; "
                "name the one of the responses with --map response=COLUMN, or the format with --format"
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
            # The one that was named is the worse one; a vote for it is one for the other.
            swapped = [[j._replace(winner=j.loser, loser=j.winner) for j in i.judgments] for i in items]
            items = [item._replace(judgments=tuple(js)) for item, js in zip(items, swapped, strict=True)]
        self._found.kinds.add(format.name)
        return items

    def _sample(self, record: dict[str, Any], line: Line) -> Sample:
        if record.get("prompt") is None:
            record = _join(record, self._prompts)
        reward = record.get("reward")
        if isinstance(reward, str) or self._context.word_rewards or not self._context.rewards:
            if self._mapping:  # others' columns may have numbers as text, in JSON too
                reward = number_in(reward)
            record = {**record, "reward": as_reward(reward, self._context, "reward")}
        if self._options.get("lower_is_better"):
            if not is_unknown(record.get("token_reward")):
                raise Refused(
                    "--lower-is-better: expected one reward a response, got token_reward, one of each token"
                )
            reward = record.get("reward")
            if isinstance(reward, bool | int | float) and not is_unknown(reward):
                record = {**record, "reward": 0.0 - reward}
        record = self._privacy.apply(record)
        if not line.is_json and not line.is_text:
            record = self._without_bytes(record)
        sample = from_record(
            record,
            role=self._options.get("role", "log"),
            source=self._source,
            tokenizer=self._options.get("tokenizer"),
            is_json=line.is_json,
        )
        if (said := settle(sample.meta)) is not None:
            add(self._found.unknown_ends, {f"{said!r:.40}": 1})
        self._found.cut += sample.end == "cut"
        return sample

    def _without_bytes(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record without bytes, such as those of an image, in columns that nothing asks for."""
        kept: dict[str, Any] = {}
        for name, value in record.items():
            if name in RECORD and name != "meta":
                if isinstance(value, bytes):
                    raise Refused(f"{name}: expected {RECORD[name].expected}, got {len(value)} bytes")
                kept[name] = value
                continue
            columns = list[str]()
            plain = _plain(value, name.removeprefix("meta"), columns)
            for column in dict.fromkeys(columns):
                if self._mapping:
                    raise Refused(f"{column}: expected a value of JSON, got bytes; leave it out of --map")
                self._privacy.dropped[f"{column} (bytes)"] += 1
            if not isinstance(value, bytes):
                kept[name] = plain
        return kept


def _plain(value: Any, name: str, columns: list[str]) -> Any:
    """A value without the bytes in its objects and lists, whose names are added to `columns`."""
    if isinstance(value, bytes):
        columns.append(name)
    if isinstance(value, dict):
        parts = {key: _plain(item, f"{name}.{key}".lstrip("."), columns) for key, item in value.items()}
        return {key: part for key, part in parts.items() if not isinstance(value[key], bytes)}
    if isinstance(value, list):
        return [_plain(item, name, columns) for item in value if not isinstance(item, bytes)]
    return value


def _join(record: dict[str, Any], prompts: Mapping[str, Prompt]) -> dict[str, Any]:
    """A record without a prompt, with its own and that one's columns."""
    key = record.get("prompt_id", record.get("id"))
    if key is None or not prompts:
        raise Refused(
            "prompt: missing; name its column with --map prompt=COLUMN, or join it with --prompts FILE"
        )
    prompt = prompts.get(str(key))
    if prompt is None:
        raise Refused(f"prompt_id: the file of prompts has no {key!r}")
    fields = {name: value for name, value in record.items() if name != "id"}
    meta = fields.get("meta") or {}
    if not isinstance(meta, dict):
        raise Refused(f"meta: expected an object, got {meta!r:.80}")
    columns = {name: value for name, value in prompt.columns.items() if fields.get(name) is None}
    return fields | {"prompt": prompt.text, "prompt_id": prompt.id, "meta": {**columns, **meta}}


WAITING = 2  # blocks that each process has at most, read or not
Reply = tuple[BlockResult, State] | None  # of a process; None where it couldn't read a block, or has ended


class _Asked(NamedTuple):
    """A block that is read with a state, by this process where there is no `reply`."""

    file: LogFile
    block: Block
    state: State
    reply: Future[Reply] | None


class Readers:
    """Reads blocks in order, in other processes where there are any.

    What they find is the same whoever reads: see `_agrees`.
    """

    def __init__(self, reader: Reader, options: Options, prompts: Mapping[str, Prompt], count: int) -> None:
        """`count`: of other processes; 0 where this one reads all."""
        self._reader, self._count = reader, count
        self._state, self._file = State(), LogFile("", "", None)
        self._idle: SimpleQueue[Child] = SimpleQueue()
        self.has_words = False  # whether a reward was a word of --reward-map
        try:
            setup = pickle.dumps((options, prompts)) if count else b""
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise Refused(
                "workers: expected options that can be sent to other processes, got a tokenizer that can't "
                f"be: {error}; import with one"
            ) from None
        self._children = [Child(setup) for _ in range(count)]
        for child in self._children:
            self._idle.put(child)
        self._threads = ThreadPoolExecutor(max(1, count))  # each waits for a process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.end()
        self._threads.shutdown(cancel_futures=True)

    def read(self, blocks: Iterable[tuple[LogFile, Block]]) -> Iterator[tuple[LogFile, Block, BlockResult]]:
        """What came of each block. Where `blocks` raises an error, that follows what came of those before."""
        asked: deque[_Asked] = deque()
        error: Exception | None = None
        blocks = iter(blocks)
        while error is None:
            try:
                file, block = next(blocks)
            except StopIteration:
                break
            except Exception as raised:  # noqa: BLE001 raised again below
                error = raised
                break
            state = self._state_for(file)
            reply = self._threads.submit(self._ask, file, state, block) if self._count else None
            asked.append(_Asked(file, block, state, reply))
            if len(asked) >= max(1, WAITING * self._count):
                yield self._answer(asked.popleft())
        while asked:
            yield self._answer(asked.popleft())
        if error is not None:
            raise error

    def _ask(self, *question: Any) -> Reply:
        child = self._idle.get()
        reply = child.read(*question)
        if not child.has_ended or all(each.has_ended for each in self._children):
            self._idle.put(child)
        return reply

    def _answer(self, asked: _Asked) -> tuple[LogFile, Block, BlockResult]:
        current = self._state_for(asked.file)
        reply = None if asked.reply is None else asked.reply.result()
        for child in self._children:
            if child.has_ended and not child.is_told:
                child.is_told = True
                warnings.warn(
                    f"a process of this import ended (exit status {child.process.wait()}); the others "
                    "read what it was reading",
                    AgroWarning,
                    stacklevel=2,
                )
        if reply is None or not _agrees(current, asked.state, reply[1]):
            self._reader.begin(asked.file, current)
            reply = self._reader.read(asked.block), self._reader.state
        found, state = reply
        self._file, self._state = asked.file, State(state.notes, current.known | state.known)
        self.has_words |= "words" in state.notes
        return asked.file, asked.block, found

    def _state_for(self, file: LogFile) -> State:
        """What the blocks that were read tell about the next one of a file."""
        return State(self._state.notes if file is self._file else {}, self._state.known)


def _agrees(current: State, given: State, left: State) -> bool:
    """Whether a block that was read with the state `given` would be read the same with `current`."""
    formats = left.known.items()
    return given.notes == current.notes and all(current.known.get(k, f) == f for k, f in formats)


class Child:
    """A process that runs `main`, with the paths of this one, and answers one question after the other.

    It is in a session of its own, so that an interrupt reaches only this process, and ends when its input
    does. What it prints goes to the standard error.
    """

    def __init__(self, setup: bytes) -> None:
        code = (
            "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from agro.io import deferred; "
            "deferred.install('torch'); from agro.logs.reading import main; main()"
        )
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.setup, self.has_ended, self.is_told = setup, False, False

    def read(self, *question: Any) -> Reply:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(self.setup + pickle.dumps(question))
            self.process.stdin.flush()
            self.setup = b""  # which was sent
            reply: Reply = pickle.load(self.process.stdout)
        except (OSError, ValueError, EOFError, pickle.UnpicklingError):
            self.has_ended = True
            return None
        return reply

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def main() -> None:
    """Read the blocks that are sent, until there are no more, in a process that `Child` started."""
    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    gc.disable()
    with contextlib.suppress(EOFError, OSError):  # the process that started this one needs no more, or ended
        reader = Reader(*pickle.load(inbox))
        while True:
            file, state, block = pickle.load(inbox)
            reply: Reply = None
            with contextlib.suppress(Exception):  # the process that asked reads it, and meets the same error
                reader.begin(file, state)
                reply = reader.read(block), reader.state
            pickle.dump(reply, outbox)
            outbox.flush()
            del block, reply
            gc.collect(0)
    os._exit(0)
