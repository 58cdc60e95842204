"""Lists for a terminal: a name and what it is, the first 40 lines, and how to see the rest."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence

FIRST = 40  # lines


def width() -> int:
    return max(40, min(100, shutil.get_terminal_size((80, 24)).columns))


def paragraph(text: str, indent: int = 0, hanging: int = 0) -> list[str]:
    """Text in lines, all but the first with `hanging` more spaces before them."""
    lead = " " * indent
    return textwrap.wrap(
        text,
        width(),
        initial_indent=lead,
        subsequent_indent=lead + " " * hanging,
        break_on_hyphens=False,
    )


def block(name: str, *texts: str) -> list[str]:
    """A name, and below it indented what it is."""
    return [name, *(line for text in texts if text for line in paragraph(text, 4))]


def names(title: str, listed: Iterable[str]) -> list[str]:
    """A title, and names side by side."""
    return [title, *paragraph("  ".join(name.replace(" ", "\u00a0") for name in listed), 2)]


def show(lines: Sequence[str], command: str, whole: bool) -> None:
    """Print lines; of more than `FIRST` the first ones, with the command that prints all, unless `whole`."""
    shown = lines if whole or len(lines) <= FIRST else lines[: FIRST - 1]
    for line in shown:
        print(line)
    if len(shown) < len(lines):
        print(f"… {len(lines) - len(shown)} more lines: {command} --all")
