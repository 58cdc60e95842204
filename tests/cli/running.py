"""Commands as a user's scripts run them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from agro.cli import app


def agro(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args], prog_name="agro")


def done(*args: object) -> Result:
    result = agro(*args)
    assert result.exit_code == 0, result.output
    return result


def report_of(*args: object) -> Any:
    """The one JSON document that a command prints with --json."""
    return json.loads(done(*args, "--json").stdout)


def refused(*args: object) -> str:
    result = agro(*args)
    assert result.exit_code == 2, result.output
    return result.stderr


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
