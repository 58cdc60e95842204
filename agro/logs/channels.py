"""Messages between a process and one that it started, over pipes."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread

from agro.io import deferred


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
            "import agro.logs.channels as c; c.serve()"
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
