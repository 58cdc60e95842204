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
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal, cast

from agro.errors import Refused
from agro.io.worker import __file__ as WORKER

START_SECONDS = 120.0  # for a worker to start and import the function
END_SECONDS = 10.0  # for a worker to kill what the function has started
Outcome = tuple[Any, str | None]  # (value, None) or (None, error)
Mode = Literal["rows", "each", "value", "lists"]  # keys of `agro.io.worker.CALLS`


class Caller:
    """Calls a function, and holds its parameters and the largest value that it declares."""

    parameters: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()  # those without a default
    any_parameter = False
    maximum: float | None = None
    workers = 1  # calls at a time

    def learn(self, described: Mapping[str, Any]) -> None:
        """`described`: a result of `agro.io.worker.describe`."""
        self.parameters, self.any_parameter = frozenset(described["parameters"]), described["any"]
        self.required, self.maximum = frozenset(described["required"]), described["maximum"]

    def accepts(self, parameter: str) -> bool:
        """Whether the function has a parameter of this name."""
        return self.any_parameter or parameter in self.parameters

    def call(
        self, columns: Mapping[str, Sequence[Any]], n: int, *, at_once: int | None = None, mode: Mode = "rows"
    ) -> list[Outcome]:
        """Call the function on `n` rows and return one outcome per row.

        Each worker gets its share of the rows in one call. Rows without a valid number, and all rows of a
        call that failed, are called again one by one, so that an invalid row affects no other. Raises
        `Refused` for a function that returns one value for several rows.

        Args:
            columns: the arguments, `n` values each.
            n: number of rows.
            at_once: rows per call, instead of a worker's share.
            mode: "each": the function takes one value per argument and is called for every row; "value":
                the same with one row, and it may return any JSON; "lists": it returns a list of numbers per
                row.
        """
        results: list[Outcome | None] = [None] * n
        running: dict[Future[list[Outcome]], list[int]] = {}
        finished: SimpleQueue[Future[list[Outcome]]] = SimpleQueue()

        def begin(rows: list[int]) -> None:
            arguments = {name: [values[i] for i in rows] for name, values in columns.items()}
            future = self._begin(arguments, len(rows), mode)
            running[future] = rows
            future.add_done_callback(finished.put)

        share = at_once or max(1, -(-n // self.workers))
        try:
            for start in range(0, n, share):
                begin(list(range(start, min(start + share, n))))
            while running:
                future = finished.get()
                rows = running.pop(future)
                for row, outcome in zip(rows, future.result()):
                    results[row] = outcome
                    if outcome[0] is None and outcome[1] != "returned None" and len(rows) > 1:
                        begin([row])
        except BaseException:  # also an interrupt: end the calls under way
            for future in running:
                future.cancel()
            self._interrupt()
            wait(running)
            raise
        assert None not in results
        return cast(list[Outcome], results)

    def _begin(self, arguments: Mapping[str, Sequence[Any]], n: int, mode: Mode) -> Future[list[Outcome]]:
        """Start one call on `n` rows."""
        raise NotImplementedError

    def _interrupt(self) -> None:
        """End the calls under way."""


class Pool(Caller):
    """`workers` processes, each with the function `name` (module:function or file.py:function).

    `timeout`: seconds per response. Raises `Refused`, which names `setting`, if the function can't be
    imported. Each process has a thread that sends it requests and waits for the replies.
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
        self._setup = {"function": name, "path": [p or os.getcwd() for p in path], "options": dict(options)}
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._busy: set[subprocess.Popen[bytes]] = set()  # those that are starting or answering
        self._finalizer = weakref.finalize(self, _end, self._processes)  # also when the interpreter exits
        self._idle: SimpleQueue[subprocess.Popen[bytes] | None] = SimpleQueue()  # None: start one
        self._threads = ThreadPoolExecutor(workers)
        self.workers, self._closed = workers, False
        self._single = (0, 0.0)  # finished calls for one response, and their seconds
        try:
            for process in self._threads.map(lambda _: self._start(), range(workers)):
                self._busy.discard(process)
                self._idle.put(process)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._closed = True
        self._interrupt()
        self._threads.shutdown()
        self._finalizer()

    def _begin(self, arguments: Mapping[str, Sequence[Any]], n: int, mode: Mode) -> Future[list[Outcome]]:
        if self._closed:
            raise RuntimeError("this reward is closed")
        return self._threads.submit(self._ask, arguments, n, mode)

    def _ask(self, arguments: Mapping[str, Sequence[Any]], n: int, mode: Mode) -> list[Outcome]:
        """Make one call on `n` rows, in a thread. A worker that fails is replaced at its next call."""
        process, healthy = self._idle.get(), None
        try:
            if process is not None and _has_output(process):  # it died since its last call, or wrote unasked
                self._discard(process)
                process = None
            process = process or self._start()
            self._busy.add(process)
            # About the time limit of one row that hangs, unless rows are slow.
            calls, seconds = self._single
            expected = 2 * n * seconds / calls if calls else 0.0
            limit = min(n * self.timeout, max(self.timeout, expected))
            began = time.monotonic()
            request = {"id": id(arguments), "arguments": arguments, "n": n, "how": mode, "limit": limit}
            try:
                message = _exchange(process, request, limit)
                error = "its process wrote to the pipe for replies"
            except TimeoutError:
                message, error = {}, f"timed out after {limit:g} s"
            except EOFError:
                message, error = {}, _death(process)
            if message.get("id") != request["id"]:
                return [(None, error)] * n
            healthy = process
            if "refused" in message:
                raise Refused(f"{self._setting}: {self._setup['function']} {message['refused']}")
            if "error" in message:
                return [(None, message["error"])] * n
            if n == 1:
                self._single = (calls + 1, seconds + time.monotonic() - began)
            return [(value, error) for value, error in message["scores"]]
        finally:
            if healthy is not None:
                self._busy.discard(healthy)
            elif process is not None:
                self._discard(process)
            self._idle.put(healthy)

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a worker, which imports the function."""
        process = subprocess.Popen(
            [sys.executable, "-P", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # no reader or writer holds a lock that closing waits for
            start_new_session=True,  # Ctrl-C reaches only the parent, and the group can be killed
        )
        self._processes.add(process)
        self._busy.add(process)
        if self._closed:
            _ask_to_end(process)
        function = self._setup["function"]
        try:
            message = _exchange(process, {**self._setup, "limit": START_SECONDS}, START_SECONDS)
            problem = str(message.get("refused", "its process wrote to the pipe for replies"))
        except TimeoutError:
            message, problem = {}, f"importing {function} took more than {START_SECONDS:g} s"
        except EOFError:
            message, problem = {}, f"{_death(process)} while importing"
        if "parameters" not in message:
            self._discard(process)
            raise Refused(f"{self._setting}: {problem}")
        self.learn(message)
        return process

    def _discard(self, process: subprocess.Popen[bytes]) -> None:
        self._processes.discard(process)
        self._busy.discard(process)
        _end({process})

    def _interrupt(self) -> None:
        """End the processes of the calls under way. Their threads notice; if a pipe were closed here, they
        would wait on."""
        for process in list(self._busy):
            _ask_to_end(process)


def _exchange(process: subprocess.Popen[bytes], message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Send a message, a line of JSON, and return the reply, another such line; {} if it isn't valid.

    Raises `TimeoutError`, after ending the process, and `EOFError` if the process ends first.
    """
    assert process.stdin
    assert process.stdout
    requests, replies, inbox = process.stdin, process.stdout, bytearray()
    line = json.dumps(message).encode() + b"\n"

    def ask() -> None:
        outbox = memoryview(line)
        with suppress(ValueError):  # the pipes were closed after the time limit
            with suppress(BrokenPipeError):  # it died, as reading will show
                while outbox:
                    outbox = outbox[requests.write(outbox) :]
            while not inbox.endswith(b"\n") and (data := replies.read(1 << 20)):
                inbox.extend(data)

    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    if asking.is_alive():
        _ask_to_end(process)
        asking.join(END_SECONDS)  # it may wait on if another process holds the pipes
        raise TimeoutError
    if not inbox.endswith(b"\n"):
        raise EOFError
    try:
        reply = json.loads(inbox)
    except ValueError:
        return {}
    return reply if isinstance(reply, dict) else {}


def _has_output(process: subprocess.Popen[bytes]) -> bool:
    """Whether an idle process has output: its end of file, or something that isn't a reply."""
    with selectors.DefaultSelector() as selector:
        selector.register(cast(Any, process.stdout), selectors.EVENT_READ)
        return bool(selector.select(0))


def _death(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        return "its process closed the pipe for replies"
    if code >= 0:
        return f"its process ended with status {code}"
    signals = {number.value: number.name for number in signal.Signals}
    name = signals.get(-code) or signal.strsignal(-code)  # a real-time signal has no name
    return f"its process was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _end(processes: set[subprocess.Popen[bytes]]) -> None:
    """End each process and what its function started (`worker.supervise`, else its group), and wait."""
    for process in processes:
        _ask_to_end(process)
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


def _ask_to_end(process: subprocess.Popen[bytes]) -> None:
    if sys.platform == "linux":
        process.terminate()
    else:
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it is gone, or (macOS) a zombie
        process.kill()
