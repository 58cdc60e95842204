"""An import by several processes: blocks of files are read by some, and written in their order by one.

What a process is sent and replies is bytes of this program on this machine: blocks as pickle, what came of
them as marshal, which is three times as fast for rows.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import marshal
import os
import pickle
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, Self

from agro.errors import AgroWarning, Refused
from agro.io import deferred
from agro.io.blocks import Block
from agro.logs.import_report import Options, Refusal
from agro.logs.protocol import Judgment
from agro.logs.reading import Entry, Found, LogFile, Reader, Repeat, State
from agro.store.sample_rows import SampleRow
from agro.types import Prompt

WAITING = 2  # blocks that each process has at most, read or not


class _Asked(NamedTuple):
    """A block that a process reads."""

    file: LogFile
    block: Block
    state: State  # that it is read with
    child: Child | None  # None: it is read here


class Readers:
    """Reads blocks in order, in this process until others have started, and then in these.

    What they find is the same whoever reads: see `_agrees`.
    """

    def __init__(self, reader: Reader, options: Options, prompts: Mapping[str, Prompt], count: int) -> None:
        """`count`: of other processes; 0 where this one reads all."""
        self._reader = reader
        self._state, self._file = State(), LogFile("", "", None)
        self._starting: list[Child] = []
        self._ready: deque[Child] = deque()
        self.has_words = False  # whether a reward was a word of --reward-map
        setup = _setup(options, prompts) if count else b""
        for _ in range(count):
            child = Child(__name__)
            child.channel.send(setup)
            self._starting.append(child)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in [*self._starting, *self._ready]:
            child.end()

    def read(self, blocks: Iterable[tuple[LogFile, Block]]) -> Iterator[tuple[LogFile, Block, Found]]:
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
            asked.append(self._ask(file, block))
            while asked and (asked[0].child is None or len(asked) >= WAITING * len(self._ready)):
                yield self._answer(asked.popleft())
        while asked:
            yield self._answer(asked.popleft())
        if error is not None:
            raise error

    def _ask(self, file: LogFile, block: Block) -> _Asked:
        """Let the next process read a block."""
        for child in [child for child in self._starting if child.channel.has_message()]:
            self._starting.remove(child)
            self._ready.append(child)
            self._receive(child)
        state = self._state_for(file)
        if not self._ready:
            return _Asked(file, block, state, None)
        child = self._ready[0]
        self._ready.rotate(-1)
        child.channel.send(pickle.dumps((file, state, block)))
        return _Asked(file, block, state, child)

    def _answer(self, asked: _Asked) -> tuple[LogFile, Block, Found]:
        current = self._state_for(asked.file)
        reply = self._receive(asked.child) if asked.child is not None else b""
        found, state = _unpack(reply, asked.file) if reply else (None, current)
        if found is None or not _agrees(current, asked.state, state):
            self._reader.begin(asked.file, current)
            found, state = self._reader.read(asked.block), self._reader.state
        self._file, self._state = asked.file, State(state.notes, current.known | state.known)
        self.has_words |= "words" in state.notes
        return asked.file, asked.block, found

    def _state_for(self, file: LogFile) -> State:
        """What the blocks that were read tell about the next one of a file."""
        return State(self._state.notes if file is self._file else {}, self._state.known)

    def _receive(self, child: Child) -> bytes:
        """The next reply; an empty one where the process couldn't read a block, and where it has ended."""
        try:
            return child.channel.receive()
        except EOFError:
            if child in self._ready:
                self._ready.remove(child)
                child.end()
                warnings.warn(
                    f"a process of this import ended (exit status {child.process.returncode}); the others "
                    "read what it was reading",
                    AgroWarning,
                    stacklevel=2,
                )
            return b""


def _setup(options: Options, prompts: Mapping[str, Prompt]) -> bytes:
    try:
        return pickle.dumps((options, prompts))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise Refused(
            f"workers: expected options that can be sent to other processes, got a tokenizer that can't be: "
            f"{error}; import with one"
        ) from None


def _agrees(current: State, given: State, left: State) -> bool:
    """Whether a block that was read with the state `given` would be read the same with `current`."""
    formats = left.known.items()
    return given.notes == current.notes and all(current.known.get(k, f) == f for k, f in formats)


def main(channel: Channel) -> None:
    """Read the blocks that are sent, until there are no more. See `agro.logs.channels.Child`."""
    options, prompts = pickle.loads(channel.receive())
    reader = Reader(options, prompts)
    gc.disable()
    channel.send(b"ready")
    while True:
        file, state, block = pickle.loads(channel.receive())
        try:
            reader.begin(file, state)
            reply = _packed(reader.read(block), reader.state)
        except Exception:  # noqa: BLE001 the process that asked reads it, and meets the same error
            reply = b""
        channel.send(reply)
        del block, reply
        gc.collect(0)


_COUNTS = tuple(f.name for f in fields(Found) if f.name not in ("entries", "refused"))


def _packed(found: Found, state: State) -> bytes:
    repeats: dict[int, Repeat] = {id(e.same): e.same for e in found.entries if e.same is not None}
    index = {key: i for i, key in enumerate(repeats)}
    entries = [
        (
            entry.location,
            entry.record[1],
            [sample.values for sample in entry.samples],
            entry.scored,
            list(map(tuple, entry.judgments)),
            index[id(entry.same)] if entry.same is not None else None,
        )
        for entry in found.entries
    ]
    refused = [(number, refusal.where, refusal.reason) for number, refusal in found.refused]
    found.dropped = dict(found.dropped)
    counts = [getattr(found, name) for name in _COUNTS]
    repeated = [tuple(asdict(repeat).values()) for repeat in repeats.values()]
    return marshal.dumps((entries, refused, counts, repeated, state.notes, state.known))


def _unpack(reply: bytes, file: LogFile) -> tuple[Found, State]:
    packed, refused, counts, repeated, notes, known = marshal.loads(reply)
    repeats = [Repeat(*values) for values in repeated]
    entries = []
    for location, number, rows, scored, judgments, i in packed:
        samples = tuple(map(SampleRow, rows))
        judged: tuple[Any, ...] = tuple(Judgment(*judgment) for judgment in judgments) if judgments else ()
        same = None if i is None else repeats[i]
        entries.append(Entry(location, (file.digest, number), samples, scored, judged, same))
    found = Found(entries, [(number, Refusal(where, reason)) for number, where, reason in refused])
    for name, value in zip(_COUNTS, counts, strict=True):
        setattr(found, name, value)
    return found, State(notes, known)


class Channel:
    """What is sent waits in a thread, so that neither process waits for the other one to read.

    `receive` raises `EOFError` where the other process has ended.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self._inbox, self._outbox = Connection(reading, writable=False), Connection(writing, readable=False)
        self._waiting: SimpleQueue[bytes] = SimpleQueue()
        Thread(target=self._send_all, daemon=True).start()

    def send(self, message: bytes) -> None:
        self._waiting.put(message)

    def receive(self) -> bytes:
        try:
            return self._inbox.recv_bytes()
        except OSError as error:
            raise EOFError(str(error)) from None

    def has_message(self) -> bool:
        """Whether `receive` would not wait; also where the other process has ended."""
        return self._inbox.poll()

    def _send_all(self) -> None:
        with contextlib.suppress(OSError):  # the other process has ended, as `receive` will find
            while True:
                self._outbox.send_bytes(self._waiting.get())


class Child:
    """A process that runs `main(channel)` of a module, with the paths of this one.

    It is in a session of its own, so that an interrupt reaches only this process, and ends when its input
    does. What it prints goes to the standard error.
    """

    def __init__(self, module: str) -> None:
        code = (
            "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
            "import agro.logs.sharing as s; s.serve()"
        )
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, path, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.channel = Channel(os.dup(self.process.stdout.fileno()), os.dup(self.process.stdin.fileno()))
        self.process.stdin.close()
        self.process.stdout.close()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def serve() -> None:
    """Run `main(channel)` of the module that the command line names, in a process that `Child` started."""
    deferred.install("torch")
    channel = Channel(os.dup(0), os.dup(1))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    with contextlib.suppress(EOFError):  # the process that started this one has ended, or needs no more
        importlib.import_module(sys.argv[2]).main(channel)
    os._exit(0)
