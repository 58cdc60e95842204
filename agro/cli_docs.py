"""The page of every command: `python -m agro.cli_docs > docs/command-line.md`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agro.cli.commands import COMMANDS, Entry
from agro.cli.program import command

HEAD = """# Command line

<!-- Made by `python -m agro.cli_docs > docs/command-line.md`; change agro/cli/ instead. -->

`agro COMMAND --help` prints the same in the terminal. `agro --version` prints the version.

Exit codes: 0 done; 2 refused, with a message that says what was expected, what came, and what to do; 1 an
error of agro itself; 130 interrupted, with everything saved for `--resume`.

Where a command has `--json`, it prints one JSON document on stdout and nothing else.
"""


def page() -> str:
    return "\n".join([HEAD, _contents(), *map(_command, COMMANDS)])


def _contents() -> str:
    return "\n".join(f"- [`agro {entry.name}`](#agro-{entry.name})" for entry in COMMANDS) + "\n"


def _command(entry: Entry) -> str:
    rows = [_row(param) for param in command(entry.name).params]
    table = ""
    if rows:
        table = "\n".join(["| argument or option | meaning |", "|---|---|", *rows]) + "\n"
    more = f"More: [{_title(entry.page)}]({entry.page})."
    example = f"```sh\nagro {entry.name} {entry.example}\n```"
    return f"## agro {entry.name}\n\n{entry.about} {more}\n\n{example}\n\n{table}"


def _title(page: str) -> str:
    """The first heading of a page of the documentation, which lies beside the package in a checkout."""
    path = Path(__file__).parents[1] / "docs" / page
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


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
