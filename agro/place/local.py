"""The processes of a run on this host."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from agro.io.processes import LocalProcess
from agro.place.placement import PlacedProcess


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
