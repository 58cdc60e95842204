"""The command line.

Exit codes: 0 done, 2 refused, 1 an error of agro, 130 interrupted, with everything saved for --resume.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, Any

from agro.cli.commands import COMMANDS as COMMANDS
from agro.cli.commands import overview
from agro.io.version import __version__

if TYPE_CHECKING:
    from agro.cli.program import app as app


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'agro.cli' has no attribute {name!r}")
    from agro.cli import program

    return program.app


def main() -> None:
    arguments = sys.argv[1:]  # answered without Typer, whose import takes longer than Python's start
    if arguments == ["--help"]:
        print(overview(), end="")
        return
    if arguments == ["--version"]:
        print(f"agro-rl {__version__}")
        return
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # for the user's module:NAME, as with `python -m agro`
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print lone surrogates in a user's text escaped
            stream.reconfigure(errors="backslashreplace")
    from agro.cli import program
    from agro.io.plugins import defer

    defer("torch")
    program.app(prog_name="agro")
