"""The table of commands: each one's function, summary, example and page of the guide.

This module imports nothing of agro, so that `agro --help` loads no command's module.
"""

import re
import textwrap
from pathlib import Path
from typing import NamedTuple


class CommandEntry(NamedTuple):
    name: str
    home: str  # module:function in agro.cli
    page: str  # in docs/
    summary: str
    example: str  # arguments of an example call


TEXT = (Path(__file__).parent / "commands.txt").read_text(encoding="utf-8")


def _entries(text: str) -> list[CommandEntry]:
    entries = []
    for block in re.split(r"\n(?! )", text.strip()):
        head, summary, *example = map(str.strip, block.splitlines())
        name, home, page = head.split()
        entries.append(CommandEntry(name, home, page, summary, " ".join(example)))
    return entries


GROUPS = {group: _entries(text) for group, text in re.findall(r"^\[(.+)\]\n([^\[]+)", TEXT, re.MULTILINE)}
COMMANDS = [entry for group in GROUPS.values() for entry in group]

USAGE = """Usage: agro COMMAND [OPTIONS] [ARGUMENTS]

  Reinforcement learning for language models from any generation: fresh,
  replayed, logged or taught.
"""
OPTIONS = """Options:
  --version             The version of agro-rl.
  --install-completion  Install completion for the current shell.
  --show-completion     Print the completion, to copy it or change it.
  --help                Print this text; agro COMMAND --help prints a command's
                        options, an example and its page of the guide.
"""
WIDTH = 80
INDENT = 14  # the longest name, two spaces on either side


def overview() -> str:
    """Return the text that `agro --help` prints."""
    parts = [USAGE]
    for title, entries in GROUPS.items():
        lines = [f"{title}:"]
        for entry in entries:
            name, summary = f"  {entry.name}".ljust(INDENT), entry.summary.replace("`", "")
            lines += textwrap.wrap(
                summary,
                WIDTH,
                initial_indent=name,
                subsequent_indent=" " * INDENT,
                break_on_hyphens=False,
            )
        parts.append("\n".join(lines) + "\n")
    return "\n".join([*parts, OPTIONS])
