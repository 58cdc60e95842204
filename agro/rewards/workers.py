"""Worker processes that call one Python function, each bounded in time; see `worker` for what runs in them."""

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
from pathlib import Path
from typing import Any, cast

from agro.errors import Refused

START_SECONDS = 120.0  # for a worker to start and import the function
Rows = list[int]
Outcome = tuple[float | None, str | None]  # (value, None) or (None, why not)


@dataclass(eq=False)
class _Worker:
    """A process and what is on the way to it and from it."""

    process: subprocess.Popen[bytes]
    deadline: float  # of what it is doing, on the monotonic clock
    ready: bool = False
    rows: Rows = field(default_factory=list)  # what it works on; empty: nothing
    since: float = 0.0
    request: int = 0
    outbox: memoryview = field(default_factory=lambda: memoryview(b""))
    inbox: bytearray = field(default_factory=bytearray)


class Pool:
    """`workers` processes, each with the function called `name` (module:function or file.py:function).

    Starts them at once; raises `Refused` where the function can't be imported. `timeout` is in seconds a response.
    """

    def __init__(self, name: str, options: Mapping[str, Any], *, timeout: float, workers: int = 1) -> None:
        self.timeout = timeout
        path = [os.getcwd(), *sys.path]  # as `python -m` has it
        self._first = {"function": name, "path": [p or os.getcwd() for p in path], "options": dict(options)}
        self._workers: list[_Worker] = []
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._finalizer = weakref.finalize(self, _end, self._processes)  # also where the interpreter ends
        self._selector = selectors.DefaultSelector()
        self._requests = 0
        self._alone = (0, 0.0)  # calls for one response that came to an end, and their seconds
        self.parameters: frozenset[str] = frozenset()
        self.any_parameter = False
        try:
            for _ in range(workers):
                self._start()
            while not all(w.ready for w in self._workers):
                self._turn()
        except BaseException:
            self.close()
            raise

    def accepts(self, parameter: str) -> bool:
        """Whether the function can be given an argument of this name."""
        return self.any_parameter or parameter in self.parameters

    def close(self) -> None:
        self._finalizer()
        self._workers.clear()
        self._selector.close()

    def call(
        self, columns: Mapping[str, Sequence[Any]], n: int, *, at_once: int | None = None, each: bool = False
    ) -> list[Outcome]:
        """The function on `n` rows: `columns` are its arguments, `n` values each. Row i of the result is of row i.

        Each worker gets its share of the rows in one call, or `at_once` rows. Rows without a usable number, and all
        rows of a call that failed, get a call of their own, so that one bad row spoils no other. `each`: the
        function takes one value an argument and is called for every row; what it awaits, it awaits for all at once.
        """
        if not self._finalizer.alive:
            raise RuntimeError("this reward is closed")
        results: list[Outcome | None] = [None] * n
        share = at_once or max(1, -(-n // len(self._workers)))
        waiting: deque[Rows] = deque(list(range(i, min(i + share, n))) for i in range(0, n, share))
        try:
            while waiting or any(w.rows for w in self._workers):
                for worker in [w for w in self._workers if w.ready and not w.rows]:
                    if worker.process.poll() is not None:
                        self._replace(worker)  # died since its last call, which isn't the next call's fault
                    elif waiting:
                        self._send(worker, waiting.popleft(), columns, each)
                for rows, outcomes in self._turn():
                    for row, outcome in zip(rows, outcomes):
                        results[row] = outcome
                        if outcome[0] is None and outcome[1] != "returned None" and len(rows) > 1:
                            waiting.append([row])
        except BaseException:  # an interrupt too: an answer that is still to come must not meet the next call
            for worker in [w for w in self._workers if w.rows]:
                self._remove(worker)
                self._start()
            raise
        assert None not in results
        return cast(list[Outcome], results)

    def _limit(self, n: int) -> float:
        """Seconds for a call on n rows. A hung batch costs little more than one hung row, unless rows are slow."""
        calls, seconds = self._alone
        return min(n * self.timeout, max(self.timeout, 2 * n * seconds / calls if calls else 0))

    def _start(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C goes to the parent alone, and the group can be killed as one
        )
        self._processes.add(process)
        assert process.stdin
        assert process.stdout
        worker = _Worker(process, deadline=time.monotonic() + START_SECONDS)
        os.set_blocking(process.stdin.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, worker)
        self._workers.append(worker)
        self._post(worker, {**self._first, "limit": START_SECONDS})

    def _send(self, worker: _Worker, rows: Rows, columns: Mapping[str, Sequence[Any]], each: bool) -> None:
        limit, self._requests = self._limit(len(rows)), self._requests + 1
        arguments = {name: [values[i] for i in rows] for name, values in columns.items()}
        worker.rows, worker.request, worker.since = rows, self._requests, time.monotonic()
        worker.deadline = worker.since + limit
        request = {"id": worker.request, "arguments": arguments, "n": len(rows), "each": each, "limit": limit}
        self._post(worker, request)

    def _post(self, worker: _Worker, message: Mapping[str, Any]) -> None:
        assert worker.process.stdin
        worker.outbox = memoryview(json.dumps(message).encode() + b"\n")
        self._selector.register(worker.process.stdin, selectors.EVENT_WRITE, worker)

    def _turn(self) -> list[tuple[Rows, list[Outcome]]]:
        """Wait until something happens; the calls that came to an end."""
        busy = [w for w in self._workers if w.rows or not w.ready]
        soonest = min(w.deadline for w in busy)
        ended = []
        for key, _ in self._selector.select(max(0.0, soonest - time.monotonic())):
            worker: _Worker = key.data
            if worker not in self._workers:
                continue  # removed a moment ago, in this turn
            if key.fileobj is worker.process.stdin:
                self._write(worker)
            else:
                ended += self._read(worker)
        for worker in [
            w for w in self._workers if (w.rows or not w.ready) and time.monotonic() >= w.deadline
        ]:
            if not worker.ready:
                raise Refused(
                    f"reward.name: importing {self._first['function']} took more than {START_SECONDS:g} s"
                )
            ended.append(self._fail(worker, f"timed out after {worker.deadline - worker.since:g} s"))
        return ended

    def _write(self, worker: _Worker) -> None:
        assert worker.process.stdin
        try:
            worker.outbox = worker.outbox[os.write(worker.process.stdin.fileno(), worker.outbox) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it died; reading will say so
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
            self._greet(worker, message)
            return []
        if not worker.rows:
            self._replace(worker)
            return []
        if message.get("id") != worker.request:
            return [
                self._fail(worker, "its process wrote over agro's pipe" if data else _death(worker.process))
            ]
        rows, worker.rows = worker.rows, []
        if "error" in message:
            return [(rows, [(None, message["error"])] * len(rows))]
        if len(rows) == 1:
            self._alone = (self._alone[0] + 1, self._alone[1] + time.monotonic() - worker.since)
        return [(rows, [(value, error) for value, error in message["scores"]])]

    def _greet(self, worker: _Worker, message: dict[str, Any]) -> None:
        if "parameters" not in message:
            raise Refused(
                f"reward.name: {message.get('refused') or _death(worker.process) + ' while importing'}"
            )
        self.parameters, self.any_parameter = frozenset(message["parameters"]), message["any"]
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
        code = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return "its process closed agro's pipe"
    if code >= 0:
        return f"its process ended with status {code}"
    name = signal.Signals(-code).name
    return f"its process was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _end(processes: set[subprocess.Popen[bytes]]) -> None:
    """Kill each process with its group, which holds whatever the function started, and wait for it."""
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # it is gone, or (macOS) a zombie
            process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()
        process.wait()
    processes.clear()
