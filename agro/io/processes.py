"""Processes on this host that end when this one does, however it ends."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from agro.io.plugins import defer

DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


class LocalProcess:
    """A child process, in a session of its own: Ctrl-C on the terminal reaches the supervisor alone."""

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        log: Path | None,
        host: str,
        *,
        death_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        """`log`: the file to append its output to; None: this process's output. `death_signal`: the signal
        that it gets when this process dies (Linux)."""
        self.host = host
        with contextlib.nullcontext(None) if log is None else log.open("ab") as output:
            self._process = subprocess.Popen(
                argv,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=partial(_die_with_parent, death_signal) if sys.platform == "linux" else None,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)
        self._process.wait()

    def _send(self, number: signal.Signals) -> None:
        """Signal the process alone; it ends its own children."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_port(host: str) -> int:
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def begin_worker(begin: bytes) -> None:
    """Initialize a process of a pool: it ends with its parent, which alone handles interrupts.

    Its output goes to standard error, and torch is imported on first use. `begin`: a pickled function without
    arguments, which is then called.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)
    defer("torch")
    pickle.loads(begin)()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _die_with_parent(number: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, number, 0, 0, 0)
