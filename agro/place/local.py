"""Processes of this host."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from agro.place.placement import PlacedProcess

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
        stdin: int = subprocess.DEVNULL,
        death_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        """`log`: the file that its output is appended to; None: this process's own. `death_signal`: sent to
        it when this process dies (Linux)."""
        self.host = host
        with contextlib.nullcontext(None) if log is None else log.open("ab") as output:
            self._process = subprocess.Popen(
                argv,
                env=dict(environment),
                stdin=stdin,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=partial(_die_with_parent, death_signal) if sys.platform == "linux" else None,
            )

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        """The process alone: it ends what it has started itself."""
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class LocalLauncher:
    """Starts processes beside this one. The trainer writes to the terminal, the others into files."""

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        """`environment`: variables that the processes have besides this one's."""
        self.logs, self.environment = logs, environment
        self.host = socket.gethostname()

    def start(self, process: PlacedProcess, *, again: bool) -> LocalProcess:
        log = None if process.role == "trainer" else log_file(self.logs, process)
        variables = {**os.environ, **self.environment}
        return LocalProcess(process.argv(sys.executable, again), variables, log, self.host)


def log_file(logs: Path, process: PlacedProcess) -> Path:
    logs.mkdir(parents=True, exist_ok=True)
    return logs / f"{process.name}.log"


def free_port(host: str) -> int:
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def _die_with_parent(number: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, number, 0, 0, 0)
