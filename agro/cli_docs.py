"""The page of every command: `python -m agro.cli_docs > docs/command-line.md`."""

from __future__ import annotations

import re
from typing import Any

import typer

from agro.cli import COMMANDS, app

HEAD = """# Command line

<!-- Made by `python -m agro.cli_docs > docs/command-line.md`; change agro/cli/ instead. -->

`agro COMMAND --help` prints the same in the terminal. `agro --version` prints the version.

Exit codes: 0 done; 2 refused, with a message that says what was expected, what came, and what to do; 1 an
error of agro itself; 130 interrupted, with everything saved for `--resume`.

Where a command has `--json`, it prints one JSON document on stdout and nothing else.
"""


def page() -> str:
    group: Any = typer.main.get_command(app)
    parts = [HEAD, _contents()]
    parts += [_command(name, group.commands[name], example, guide) for name, _, example, guide in COMMANDS]
    return "\n".join(parts)


def _contents() -> str:
    return "\n".join(f"- [`agro {name}`](#agro-{name})" for name, *_ in COMMANDS) + "\n"


def _command(name: str, command: Any, example: str, guide: str) -> str:
    about = re.sub(r"\s*\n\s*", " ", command.help.split("\n\n")[0]).strip()
    rows = [_row(param) for param in command.params]
    table = ""
    if rows:
        table = "\n".join(["| argument or option | meaning |", "|---|---|", *rows]) + "\n"
    more = f"More: [{guide}]({guide})."
    return f"## agro {name}\n\n{about} {more}\n\n```sh\nagro {name} {example}\n```\n\n{table}"


def _row(param: Any) -> str:
    """One argument or option; in a table `|` is escaped."""
    name = ", ".join(f"`{opt}`" for opt in (*param.opts, *param.secondary_opts))
    if param.param_type_name == "argument":
        name = f"`{(param.metavar or param.name).upper()}`"
    meaning = param.help or ""
    if param.required:
        meaning = f"{meaning} Required.".strip()
    elif param.default not in (None, False, (), []) and not callable(param.default):
        meaning = f"{meaning} Default: `{param.default}`.".strip()
    if getattr(param, "multiple", False) and "repeated" not in meaning:
        meaning = f"{meaning} May be repeated."
    meaning = meaning.replace("|", "\\|")
    return f"| {name} | {meaning} |"


if __name__ == "__main__":
    print(page(), end="")
