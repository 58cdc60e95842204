"""Worker processes that call a Python function with a time limit; `agro/io/worker.py` runs in them."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from agro.errors import Refused
from agro.io.worker import __file__ as WORKER

START_SECONDS = 120.0  # for a worker to start and import the function
END_SECONDS = 10.0  # for a worker to kill what the function has started
Rows = list[int]
Outcome = tuple[Any, str | None]  # (value, None) or (None, error)
How = Literal["rows", "each", "value", "tokens"]  # of the calls of `agro.io.worker`


@dataclass(eq=False)
class _Worker:
    """A process with its pending input and output. `rows`: those of its current call.

    `deadline`: of the call, or of the start, on the monotonic clock.
    """

    process: subprocess.Popen[bytes]
    deadline: float
    ready: bool = False
    rows: Rows = field(default_factory=list)
    since: float = 0.0
    request: int = 0
    outbox: memoryview = field(default_factory=lambda: memoryview(b""))
    inbox: bytearray = field(default_factory=bytearray)


class Caller:
    """What is known of a function that is called: its parameters, and the largest value that it declares."""

    parameters: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()  # those without a default
    any_parameter = False
    maximum: float | None = None

    def learn(self, described: Mapping[str, Any]) -> None:
        """`described`: as of `agro.io.worker.describe`."""
        self.parameters, self.any_parameter = frozenset(described["parameters"]), described["any"]
        self.required, self.maximum = frozenset(described["required"]), described["maximum"]

    def accepts(self, parameter: str) -> bool:
        """Whether the function has a parameter of this name."""
        return self.any_parameter or parameter in self.parameters


class Pool(Caller):
    """`workers` processes, each with the function `name` (module:function or file.py:function).

    `timeout`: seconds per response. Raises `Refused`, which names `setting`, where the function can't be
    imported.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        *,
        timeout: float,
        workers: int = 1,
        setting: str = "reward.name",
    ) -> None:
        self.timeout, self._setting = timeout, setting
        path = [os.getcwd(), *sys.path]  # as for `python -m`
        self._first = {"function": name, "path": [p or os.getcwd() for p in path], "options": dict(options)}
        self._workers: list[_Worker] = []
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._finalizer = weakref.finalize(self, _end, self._processes)  # also at the end of the interpreter
        self._selector = selectors.DefaultSelector()
        self._requests = 0
        self._single = (0, 0.0)  # finished calls for one response, and their seconds
        try:
            for _ in range(workers):
                self._start()
            while not all(w.ready for w in self._workers):
                self._wait()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._finalizer()
        self._workers.clear()
        self._selector.close()

    def call(
        self, columns: Mapping[str, Sequence[Any]], n: int, *, at_once: int | None = None, how: How = "rows"
    ) -> list[Outcome]:
        """Call the function on `n` rows and return one outcome per row.

        Each worker gets its share of the rows in one call. Rows without a valid number, and all rows of a
        call that failed, are called again one by one, so that an invalid row affects no other. Raises
        `Refused` for a function that returns one value for several rows.

        Args:
            columns: the arguments, `n` values each.
            n: rows.
            at_once: rows per call, in place of a worker's share.
            how: "each": the function takes one value per argument and is called for every row; "value":
                the same with one row, and it may return any JSON; "tokens": a list of numbers a row.
        """
        if not self._finalizer.alive:
            raise RuntimeError("this reward is closed")
        results: list[Outcome | None] = [None] * n
        share = at_once or max(1, -(-n // len(self._workers)))
        waiting: deque[Rows] = deque(list(range(i, min(i + share, n))) for i in range(0, n, share))
        try:
            while waiting or any(w.rows for w in self._workers):
                self._dispatch(waiting, columns, how)
                for rows, outcomes in self._wait():
                    for row, outcome in zip(rows, outcomes):
                        results[row] = outcome
                        if outcome[0] is None and outcome[1] != "returned None" and len(rows) > 1:
                            waiting.append([row])
        except BaseException:  # an interrupt too: the next call must not read the replies of this one
            for worker in [w for w in self._workers if w.rows]:
                self._remove(worker)
                self._start()
            raise
        assert None not in results
        return cast(list[Outcome], results)

    def _dispatch(self, waiting: deque[Rows], columns: Mapping[str, Sequence[Any]], how: How) -> None:
        """Give the next rows to idle workers."""
        for worker in [w for w in self._workers if w.ready and not w.rows]:
            if worker.process.poll() is not None:
                self._replace(worker)  # it died since its last call
            elif waiting:
                self._send(worker, waiting.popleft(), columns, how)

    def _limit(self, n: int) -> float:
        """Seconds for a call on n rows: about those of one row that hangs, unless rows are slow."""
        calls, seconds = self._single
        expected = 2 * n * seconds / calls if calls else 0.0
        return min(n * self.timeout, max(self.timeout, expected))

    def _start(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-P", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C goes to the parent only, and the group can be killed
        )
        self._processes.add(process)
        assert process.stdin
        assert process.stdout
        worker = _Worker(process, deadline=time.monotonic() + START_SECONDS)
        os.set_blocking(process.stdin.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, worker)
        self._workers.append(worker)
        self._queue(worker, {**self._first, "limit": START_SECONDS})

    def _send(self, worker: _Worker, rows: Rows, columns: Mapping[str, Sequence[Any]], how: How) -> None:
        limit, self._requests = self._limit(len(rows)), self._requests + 1
        arguments = {name: [values[i] for i in rows] for name, values in columns.items()}
        worker.rows, worker.request, worker.since = rows, self._requests, time.monotonic()
        worker.deadline = worker.since + limit
        request = {"id": worker.request, "arguments": arguments, "n": len(rows), "how": how, "limit": limit}
        self._queue(worker, request)

    def _queue(self, worker: _Worker, message: Mapping[str, Any]) -> None:
        assert worker.process.stdin
        worker.outbox = memoryview(json.dumps(message).encode() + b"\n")
        self._selector.register(worker.process.stdin, selectors.EVENT_WRITE, worker)

    def _wait(self) -> list[tuple[Rows, list[Outcome]]]:
        """Wait for an event and return the calls that ended."""
        busy = [w for w in self._workers if w.rows or not w.ready]
        soonest = min(w.deadline for w in busy)
        finished = []
        for key, _ in self._selector.select(max(0.0, soonest - time.monotonic())):
            worker: _Worker = key.data
            if worker not in self._workers:
                continue  # removed meanwhile
            if key.fileobj is worker.process.stdin:
                self._write(worker)
            else:
                finished += self._read(worker)
        busy = [w for w in self._workers if w.rows or not w.ready]
        for worker in [w for w in busy if time.monotonic() >= w.deadline]:
            if not worker.ready:
                function = self._first["function"]
                raise Refused(f"{self._setting}: importing {function} took more than {START_SECONDS:g} s")
            finished.append(self._fail(worker, f"timed out after {worker.deadline - worker.since:g} s"))
        return finished

    def _write(self, worker: _Worker) -> None:
        assert worker.process.stdin
        try:
            worker.outbox = worker.outbox[os.write(worker.process.stdin.fileno(), worker.outbox) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it died, which reading will show
            worker.outbox = memoryview(b"")
        if not worker.outbox:
            self._selector.unregister(worker.process.stdin)

    def _read(self, worker: _Worker) -> list[tuple[Rows, list[Outcome]]]:
        assert worker.process.stdout
        data = os.read(worker.process.stdout.fileno(), 1 << 20)
        worker.inbox += data
        if data and not worker.inbox.endswith(b"\n"):
            return []
        try:
            message = json.loads(worker.inbox)
            worker.inbox.clear()
        except ValueError:
            message = None
        if not isinstance(message, dict):
            message = {}
        if not worker.ready:
            self._on_ready(worker, message)
            return []
        if not worker.rows:
            self._replace(worker)
            return []
        if message.get("id") != worker.request:
            error = "its process wrote to the pipe of the replies" if data else _death(worker.process)
            return [self._fail(worker, error)]
        if "refused" in message:
            raise Refused(f"{self._setting}: {self._first['function']} {message['refused']}")
        rows, worker.rows = worker.rows, []
        if "error" in message:
            return [(rows, [(None, message["error"])] * len(rows))]
        if len(rows) == 1:
            self._single = (self._single[0] + 1, self._single[1] + time.monotonic() - worker.since)
        return [(rows, [(value, error) for value, error in message["scores"]])]

    def _on_ready(self, worker: _Worker, message: dict[str, Any]) -> None:
        if "parameters" not in message:
            problem = message.get("refused") or f"{_death(worker.process)} while importing"
            raise Refused(f"{self._setting}: {problem}")
        self.learn(message)
        worker.ready = True

    def _fail(self, worker: _Worker, error: str) -> tuple[Rows, list[Outcome]]:
        self._replace(worker)
        return worker.rows, [(None, error)] * len(worker.rows)

    def _replace(self, worker: _Worker) -> None:
        self._remove(worker)
        self._start()

    def _remove(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        for pipe in (worker.process.stdin, worker.process.stdout):
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)  # type: ignore[arg-type]
        self._processes.discard(worker.process)
        _end({worker.process})


def _death(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        return "its process closed the pipe of the replies"
    if code >= 0:
        return f"its process ended with status {code}"
    signals = {number.value: number.name for number in signal.Signals}
    name = signals.get(-code) or signal.strsignal(-code)  # a real-time signal has no name
    return f"its process was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _end(processes: set[subprocess.Popen[bytes]]) -> None:
    """End each process with what the function has started (`worker.supervise`; else its group), and wait."""
    for process in processes:
        if sys.platform == "linux":
            process.terminate()
        else:
            _kill(process)
    for process in processes:
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.wait()
    processes.clear()


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it is gone, or (macOS) a zombie
        process.kill()
