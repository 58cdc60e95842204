"""Processes that begin with the libraries loaded: forks of a server that imported them once.

Python takes four seconds to import torch and transformers. Where a test is about something else than how a
program starts, it takes a fork. The interface is what these tests use of `subprocess`. A run draws no page.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

# Also what a command imports when it needs it: of a tiny run that takes nine tenths of the time.
PRELOADED = [
    *("agro.cli.program", "agro.cli.runs", "agro.api.reporting_trainer", "agro.train.trainer", "agro.store"),
    *(
        "agro.place.collector",
        "agro.place.placement",
        "agro.rollout.engines.hf",
        "agro.rollout.engines.fused",
    ),
    *("agro.pages.run.page", "transformers.models.llama.modeling_llama", "torch.distributed.fsdp"),
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


class Process:
    """`command`: `sys.executable`, then `-m MODULE` or a script, then arguments.

    Its stdout and stderr are appended to files.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: Path,
        stderr: Path,
    ) -> None:
        assert command[0] == sys.executable, command
        environment = dict(os.environ if env is None else env)
        arguments = (list(command[1:]), cwd or Path.cwd(), environment, stdout, stderr)
        self._process = _context.Process(target=_become, args=arguments)
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            raise AssertionError(f"it still ran after {timeout} seconds, and was killed")
        return code

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


def run(
    command: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    check: bool = False,
    capture_output: bool = True,
    text: bool = True,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`."""
    assert text
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        code = Process(command, cwd=cwd, env=env, stdout=files[0], stderr=files[1]).wait(timeout)
        said = [file.read_text() for file in files]
    if check and code:
        raise subprocess.CalledProcessError(code, command, *said)
    return subprocess.CompletedProcess(command, code, *(said if capture_output else ()))


def _become(command: list[str], cwd: Path, environment: dict[str, str], stdout: Path, stderr: Path) -> None:
    """Go on as a Python that was started with these arguments."""
    from agro.api import reporting_trainer

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in ((1, stdout), (2, stderr)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    # The server's own could be of another kind: a terminal can't be sought in.
    # As a program's stdout into a pipe or a file, it is written at a flush: who waits for a line needs one.
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    reporting_trainer.report = lambda folder: folder  # its figures take longer than a tiny run
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path.insert(0, str(Path(command[0]).parent))
            runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a process of `multiprocessing` ends without them
