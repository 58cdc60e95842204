"""`agro` as a Typer program. A command's module is imported when the command is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from agro.cli.commands import COMMANDS, overview
from agro.cli.common import Command, guarded
from agro.io.version import __version__

ENTRIES = {entry.name: entry for entry in COMMANDS}


class Program(TyperGroup):
    """All commands, none of which is imported yet."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = dict.fromkeys(ENTRIES)  # names alone, for "did you mean"

    def list_commands(self, ctx: Any) -> list[str]:
        return list(ENTRIES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return command(cmd_name) if cmd_name in ENTRIES else None

    def get_help(self, ctx: Any) -> str:
        return overview().rstrip()


def command(name: str) -> Any:
    """The command of this name, imported."""
    entry = ENTRIES[name]
    module, _, function = entry.home.partition(":")
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    epilog = f"Example: agro {name} {entry.example}\n\nGuide: docs/{entry.page}"
    alone.command(name, cls=Command, help=entry.summary.replace("`", ""), epilog=epilog)(
        guarded(getattr(import_module(f"agro.cli.{module}"), function))
    )
    return typer.main.get_command(alone)


app = typer.Typer(cls=Program, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"agro-rl {__version__}")
        raise typer.Exit


@app.callback()
def _all(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="The version of agro-rl.")
    ] = False,
) -> None:
    pass
