"""Commands as a user's scripts run them."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

from typer.testing import CliRunner, Result

from agro.cli import app


def agro(*args: object, **variables: str) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args], prog_name="agro", env=variables)


def done(*args: object, **variables: str) -> Result:
    result = agro(*args, **variables)
    assert result.exit_code == 0, result.output
    return result


def report_of(*args: object) -> Any:
    """The one JSON document that a command prints with --json."""
    return json.loads(done(*args, "--json").stdout)


def refused(*args: object) -> str:
    result = agro(*args)
    assert result.exit_code == 2, result.output
    return result.stderr


def on_terminal(*args: object, replies: Sequence[tuple[str, str]] = (), **variables: str) -> tuple[str, int]:
    """What agro prints on a terminal of its own (pty), where each question, the end of what is on it, is
    answered; and its exit code."""
    main, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "agro", *map(str, args)],
        **dict.fromkeys(("stdin", "stdout", "stderr"), other),
        env={**os.environ, "COLUMNS": "200", "TERM": "dumb", **variables},
    )
    os.close(other)
    said, waiting = "", list(replies)
    with os.fdopen(main, "rb+", buffering=0) as terminal:
        while part := _read(terminal):
            said += part.decode(errors="replace")  # a part may end within a character
            if waiting and said.endswith(waiting[0][0]):
                terminal.write(f"{waiting.pop(0)[1]}\n".encode())
    if waiting:
        process.kill()
    assert not waiting, said
    return said, process.wait(timeout=60)


def _read(terminal: BinaryIO) -> bytes:
    """Nothing where the process has ended, or says nothing for five minutes."""
    if not select.select([terminal], [], [], 300)[0]:
        return b""
    try:
        return terminal.read(4096)
    except OSError:
        return b""
