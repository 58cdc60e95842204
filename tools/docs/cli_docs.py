"""The page of every command: `python tools/docs/cli_docs.py > docs/command-line.md`, from a checkout."""

from __future__ import annotations

import textwrap
from functools import cache
from pathlib import Path
from typing import Any

from agro.cli.commands import COMMANDS, CommandEntry
from agro.cli.program import command
from agro.errors import Refused

DOCS = Path(__file__).parents[2] / "docs"
RECORDING = DOCS / "recordings/commands.txt"
LINES = 16  # the most shown lines of an output; a longer output shows its beginning and its last LAST lines
LAST = 4
WIDTH = 110  # longer lines are wrapped

HEAD = """# Command line

<!-- Made by `python tools/docs/cli_docs.py > docs/command-line.md`; change agro/cli/ instead. -->

`agro COMMAND --help` prints the same in the terminal. `agro --version` prints the version.

Exit codes: 0 done; 2 refused, with a message that says what was expected, what came, and what to do; 1 an
error of agro itself; 130 interrupted, with everything saved for `--resume`.

With `--json`, a command prints one JSON document on stdout and nothing else.

The first example makes the folder `first`; the other examples ran in it. Below each example is its output,
with … for omitted lines. [recordings/commands.txt](recordings/commands.txt) shows more of the output, and the
commands that ran in between: more runs, a log, a damaged store.
"""


def page() -> str:
    return "\n".join([HEAD, _contents(), *map(_command, COMMANDS)])


def _contents() -> str:
    return "\n".join(f"- [`agro {entry.name}`](#agro-{entry.name})" for entry in COMMANDS) + "\n"


def _command(entry: CommandEntry) -> str:
    rows = [_row(param) for param in command(entry.name).params]
    table = ""
    if rows:
        table = "\n".join(["| argument or option | meaning |", "|---|---|", *rows]) + "\n"
    more = f"More: [{_title(entry.page)}]({entry.page})."
    example = f"```sh\nagro {entry.name} {entry.example}\n```"
    output = f"```text\n{_output(entry)}\n```"
    return f"## agro {entry.name}\n\n{entry.summary} {more}\n\n{example}\n\n{output}\n\n{table}"


def _output(entry: CommandEntry) -> str:
    """What the example printed when it was recorded, shortened."""
    example = f"agro {entry.name} {entry.example}"
    if example not in _recorded():
        raise Refused(
            f"{RECORDING}: expected the example of agro {entry.name}, `{example}`, which isn't recorded; "
            "run python docs/recordings/make.py commands"
        )
    lines: list[str] = []
    for line in _recorded()[example].splitlines():
        lines += textwrap.wrap(line, WIDTH) if len(line) > WIDTH else [line]
    if len(lines) <= LINES:
        return "\n".join(lines)
    last = lines[-LAST:]
    if "│" in last[-1]:  # rows of a table, without its head
        last = []
    return "\n".join([*lines[: LINES - 1 - len(last)], "…", *last])


@cache
def _recorded() -> dict[str, str]:
    """The commands of the recording with their output."""
    outputs = {}
    for part in RECORDING.read_text(encoding="utf-8").split("\n$ ")[1:]:
        example, _, output = part.partition("\n")
        outputs[example] = output.rpartition("[")[0]  # without the times
    return outputs


def _title(page: str) -> str:
    """The first heading of a documentation page."""
    return (DOCS / page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


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
