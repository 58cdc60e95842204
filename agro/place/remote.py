"""Processes of other hosts, each behind a program that runs a command there: ssh, or srun in a job of Slurm.

The token travels over the program's input, not in its command line, which other users of a host can read. The
input stays open: when it closes, because the program or this host died, the process there is ended. A host
has the same installation and files under the same paths, unless its line in the file of hosts says others.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Literal

from agro.errors import Refused
from agro.io.processes import LocalProcess
from agro.place.local import LocalLauncher, log_file
from agro.place.placement import PlacedProcess

# Variables that hosts get as they are.
PASSED = ("PYTHONPATH", "OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE", "TMPDIR")
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")
EXPECTED = 'expected "HOST [collectors=N] [python=PATH] [dir=PATH]"'


@dataclass(frozen=True)
class Host:
    """A line of the file of hosts."""

    name: str
    collectors: int = 1
    python: str = sys.executable
    folder: str = ""  # that commands run in; "": the same as here

    @classmethod
    def parse(cls, line: str, location: str) -> Host:
        name, *settings = line.split()
        values: dict[str, str] = {}
        for setting in settings:
            key, equals, value = setting.partition("=")
            if key not in ("collectors", "python", "dir") or not equals or not value or key in values:
                raise Refused(f"{location}: {setting!r}: {EXPECTED}")
            values[key] = value
        count = values.get("collectors", "1")
        if not (count.isascii() and count.isdigit() and int(count)) or name.startswith("-"):
            raise Refused(f"{location}: {line!r}: {EXPECTED}")
        return cls(name, int(count), values.get("python", sys.executable), values.get("dir", ""))


def read_hosts(path: Path) -> list[Host]:
    """The hosts of a file, a line each; what follows # is a comment. Raises `Refused` for other lines."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"--place ssh:{path}: can't be read: {error}; expected a file of hosts") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if text:
            hosts.append(Host.parse(text, f"{path}:{number}"))
    if not hosts:
        raise Refused(f"--place ssh:{path}: expected a host a line, got none; {EXPECTED}")
    return hosts


class RemoteProcess(LocalProcess):
    """The program that has a process on another host."""

    def __init__(self, argv: Sequence[str], log: Path, host: str, secret: str) -> None:
        super().__init__(argv, os.environ, log, host, stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        self._input = self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._input.write(f"{secret}\n".encode())
            self._input.flush()

    @property
    def pid(self) -> int | None:
        """That of the process there is unknown."""
        return None

    def stop(self) -> None:
        """Close the input, at whose end the process there is ended."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()

    def kill(self) -> None:
        self.stop()
        super().kill()


class RemoteLauncher:
    """Collectors on other hosts; the owner, the servers and the trainer on this one."""

    def __init__(
        self,
        hosts: Sequence[Host],
        logs: Path,
        environment: Mapping[str, str],
        program: Literal["ssh", "srun"] = "ssh",
    ) -> None:
        """`environment`: variables of the processes; of those on other hosts the token alone."""
        self.logs, self.environment, self.program = logs, environment, program
        self._here = LocalLauncher(logs, environment)
        self._turn = cycle([host for host in hosts for _ in range(host.collectors)])
        self._hosts: dict[str, Host] = {}

    def start(self, process: PlacedProcess, *, again: bool) -> LocalProcess:
        if process.role != "collector":
            return self._here.start(process, again=again)
        if process.name not in self._hosts:
            self._hosts[process.name] = next(self._turn)
        host = self._hosts[process.name]
        argv = [*self._prefix(host), remote_command(process, host, again=again)]
        return RemoteProcess(argv, log_file(self.logs, process), host.name, self.environment["AGRO_TOKEN"])

    def _prefix(self, host: Host) -> list[str]:
        if self.program == "ssh":
            return [*SSH, host.name]
        nodes = ("--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}")
        return ["srun", *nodes, "sh", "-c"]


def remote_command(process: PlacedProcess, host: Host, *, again: bool) -> str:
    """What the shell of a host runs: the process, and something that ends it when the input closes."""
    variables = [f"{name}={shlex.quote(os.environ[name])}" for name in PASSED if name in os.environ]
    command = shlex.join(process.argv(host.python, again))
    return "; ".join(
        [
            f"cd {shlex.quote(host.folder or os.getcwd())} || exit 2",
            "read -r AGRO_TOKEN",
            f"export {' '.join(['AGRO_TOKEN', *variables])}",
            "exec 3<&0",
            f"{command} </dev/null & child=$!",
            "{ cat <&3 >/dev/null; kill $child 2>/dev/null; } & watch=$!",
            "wait $child; code=$?",
            "kill $watch 2>/dev/null; exit $code",
        ]
    )
