"""The owner of a store: the thread that has the file, and answers the calls of all processes that share it.

Calls that wait are answered together: their writes are parts of one transaction, which is on the disk once
for all of them. A write is made once, however often its call arrives, since the answer of each client's last
write is kept in the transaction that writes.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

from agro.errors import Refused
from agro.store.sample_rows import SampleRow
from agro.store.serving.wire import METHODS, ONCE, ORDERS, PROTOCOL, WRITES, pack, unpack
from agro.store.store import Store

TOGETHER = 64  # calls that one transaction has at most
KEPT_SECONDS = 7 * 86400.0  # of the last answer to a client that says nothing any more
ANSWERS = (
    "CREATE TABLE IF NOT EXISTS answers "
    "(client TEXT PRIMARY KEY, number INTEGER NOT NULL, answered REAL NOT NULL, answer BLOB NOT NULL)"
)


class Call(NamedTuple):
    """A request of a client, which numbers its calls and sends one after the other."""

    client: str
    number: int
    method: str
    args: list[Any]
    kwargs: dict[str, Any]

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Raises `Refused` for what isn't a call."""
        content = unpack(body, "owner")
        types = [str, int, str, list, dict]
        if not isinstance(content, list) or [type(value) for value in content] != types:
            raise Refused("expected a call: a client, its number, a method, arguments, and named ones")
        return cls(*content)


class Answer(NamedTuple):
    """What a client gets: a packed value, or the name and the text of an error."""

    status: int  # of HTTP
    body: bytes

    @classmethod
    def refusal(cls, error: Refused, status: int = 400) -> Self:
        return cls(status, pack([type(error).__name__, str(error)]))


@dataclass
class Counts:
    """What an owner did since it began."""

    calls: Counter[str] = field(default_factory=Counter)  # by method
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    refused: int = 0
    repeated: int = 0  # writes that were answered from what is kept
    transactions: int = 0


class Owner:
    """The file of a store and the thread that it belongs to."""

    def __init__(self, path: Path) -> None:
        """Open the store, or make it. Raises `Refused` as `Store.open` does."""
        self.counts = Counts()
        self._waiting: deque[tuple[Call, Future[Answer]]] = deque()
        self._thread = ThreadPoolExecutor(1, "owner")  # SQLite's connection belongs to one thread
        try:
            self._thread.submit(self._open, path).result()
        except BaseException:
            self._thread.shutdown()
            raise

    def submit(self, call: Call) -> Future[Answer]:
        """Have a call answered after those that wait already."""
        future: Future[Answer] = Future()
        self._waiting.append((call, future))
        self._thread.submit(self._answer_waiting)
        return future

    def close(self) -> None:
        """Answer what waits, and close the store."""
        self._thread.submit(self._store.close).result()
        self._thread.shutdown()

    def _open(self, path: Path) -> None:
        self._store = Store.open(path)
        self._database = self._store.tables.database
        self._store.tables.read_samples = lambda rows: list(map(SampleRow, rows))
        with self._database.transaction():
            self._database.run(ANSWERS)
            self._database.run("DELETE FROM answers WHERE answered < ?", [time.time() - KEPT_SECONDS])

    def _answer_waiting(self) -> None:
        """Answer the calls that wait. The next turns find that nothing is left."""
        waiting = [self._waiting.popleft() for _ in range(min(len(self._waiting), TOGETHER))]
        if not waiting:
            return
        try:
            answers = self._answer_all([call for call, _ in waiting])
        except BaseException as error:  # noqa: BLE001 (whoever waits must hear of it)
            failure = Answer.refusal(Refused(f"the owner of the store failed: {error!r:.300}"), 500)
            answers = [failure] * len(waiting)
        for (_, future), answer in zip(waiting, answers, strict=True):
            future.set_result(answer)

    def _answer_all(self, calls: Sequence[Call]) -> list[Answer]:
        methods = {call.method for call in calls}
        if methods.isdisjoint(WRITES | ORDERS):
            return [self._answer(call) for call in calls]
        self.counts.transactions += 1
        try:
            with self._database.transaction(durable=not methods.isdisjoint(WRITES)):
                return [self._answer(call) for call in calls]
        except Refused as error:  # nothing of them was stored: the disk is full, or another process writes
            return [Answer.refusal(error)] * len(calls)

    def _answer(self, call: Call) -> Answer:
        started = time.perf_counter()
        try:
            if call.method == "protocol":
                return Answer(200, pack(PROTOCOL))
            if call.method not in METHODS:
                raise Refused(f"expected a method of the owner of a store, got {call.method!r:.80}")
            if call.method not in WRITES | ORDERS:
                return Answer(200, self._result(call))
            with self._database.savepoint():
                return Answer(200, self._once(call) if call.method in ONCE else self._result(call))
        except Refused as error:
            if not self._database.in_transaction and call.method in WRITES | ORDERS:
                raise  # SQLite gave up the complete transaction
            self.counts.refused += 1
            return Answer.refusal(error)
        finally:
            self.counts.calls[call.method] += 1
            self.counts.seconds[call.method] += time.perf_counter() - started

    def _once(self, call: Call) -> bytes:
        """The answer of a write, which is made only where it wasn't before."""
        kept = self._database.run("SELECT number, answer FROM answers WHERE client = ?", [call.client])
        number, answer = kept[0] if kept else (-1, b"")
        if number == call.number:
            self.counts.repeated += 1
            return bytes(answer)
        if number > call.number:
            raise Refused(f"call {call.number} arrived after the client's call {number} was answered")
        result = self._result(call)
        row = [call.client, call.number, time.time(), result]
        self._database.run("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", row)
        return result

    def _result(self, call: Call) -> bytes:
        part_name, name = call.method.split(".")
        part = getattr(self._store, part_name)
        try:
            _signature(getattr(type(part), name)).bind(part, *call.args, **call.kwargs)
            return pack(getattr(part, name)(*call.args, **call.kwargs))
        except Refused:
            raise
        except Exception as error:  # of the arguments, whatever they are: other calls go on
            raise Refused(f"{call.method}: {type(error).__name__}: {error!s:.300}") from error


@cache
def _signature(method: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(method)
