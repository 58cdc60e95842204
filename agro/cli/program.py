"""`agro` as a Typer program, which imports a command's module on demand."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from importlib import import_module
from textwrap import dedent
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

from agro.cli.commands import COMMANDS, overview
from agro.cli.common import SHARED, Command, guarded
from agro.io.version import __version__

ENTRIES = {entry.name: entry for entry in COMMANDS}


class Program(TyperGroup):
    """The group of all commands, which are imported on demand."""

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
    """Import the command of this name."""
    entry = ENTRIES[name]
    module, _, function = entry.home.partition(":")
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    epilog = f"Example: agro {name} {entry.example}\n\nGuide: docs/{entry.page}"
    declared = with_options(guarded(getattr(import_module(f"agro.cli.{module}"), function)))
    alone.command(name, cls=Command, help=entry.summary.replace("`", ""), epilog=epilog)(declared)
    return typer.main.get_command(alone)


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Turn a parameter without a Typer annotation into an option: the one in `SHARED`, else one of its name.
    The docstring's Args become the help."""
    parameters = []
    hints = get_type_hints(function, include_extras=True)
    helps = _helps(function.__doc__ or "")
    for name, parameter in inspect.signature(function).parameters.items():
        kind, *annotations = get_args(hints[name]) if get_origin(hints[name]) is Annotated else [hints[name]]
        default = SHARED.get(name) or typer.Option(f"--{name.replace('_', '-')}")
        info = copy(annotations[0] if annotations else default)
        if kind is not typer.Context:
            info.help = helps.get(name) or info.help  # python -OO has no Args
            kind = Annotated[kind, info]
        parameters.append(parameter.replace(annotation=kind))
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


def _helps(docstring: str) -> dict[str, str]:
    """Parse a docstring's Args to help texts."""
    helps: dict[str, str] = {}
    for line in dedent(inspect.cleandoc(docstring).partition("Args:\n")[2]).splitlines():
        if line.startswith(" "):  # a continuation line
            helps[next(reversed(helps))] += f" {line.strip()}"
        elif line:
            name, _, text = line.strip().partition(": ")
            helps[name] = text
    return helps


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
