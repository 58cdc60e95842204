"""Untrusted text for terminals and spreadsheets: escape control characters, redact secrets, quote
formulas."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO, cast

from agro.errors import visible as visible
from agro.io.numbers import count
from agro.types import Text
from agro.types.conversation import without_tools

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "'", "＝", "＋", "－", "＠")
_DRAWN = re.compile(r"(\x1b\[[0-9;?]*[A-HJKfhlm]|\r)")
_AGAIN = re.compile(r"\A(\r)")


class Output:
    """A stream that passes each text through `visible`.

    With `is_drawn`, this program's own sequences for the cursor and colors are kept. A \\r at the start of a
    text is kept too: libraries show progress with it.
    """

    def __init__(self, stream: TextIO, is_drawn: bool = False) -> None:
        self.stream, self.is_drawn = stream, is_drawn

    def write(self, text: str) -> int:
        pieces = (_DRAWN if self.is_drawn else _AGAIN).split(text)
        self.stream.write("".join(p if i % 2 else visible(p) for i, p in enumerate(pieces)))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def shown_safely() -> Iterator[None]:
    """Send what is printed inside through `Output`; after an error it stays, for the traceback."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        stream if isinstance(stream, Output) else cast(TextIO, Output(stream)) for stream in streams
    )
    yield
    sys.stdout, sys.stderr = streams


def drawn(stream: TextIO) -> TextIO:
    """The stream for this program's own drawing; untrusted text in it must be `visible` already."""
    return cast(TextIO, Output(stream.stream, is_drawn=True)) if isinstance(stream, Output) else stream


def csv_cell(text: str) -> str:
    """`text`, with a quote before it if a spreadsheet would read a formula, or if it begins with a quote."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def text_of_cell(cell: str) -> str:
    """Undo `csv_cell`."""
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(_FORMULA) else cell


def cut(text: str, limit: int) -> str:
    """The first `limit` characters, made visible, and the number of further ones; 0 shows all."""
    if not limit or len(text) <= limit:
        return visible(text)
    return f"{visible(text[:limit])} … {count(len(text) - limit)} more characters"


def first_of(names: Sequence[object], n: int = 3) -> str:
    """The first `n` names, for a message."""
    return ", ".join(map(str, names[:n])) + (", …" if len(names) > n else "")


def plain(text: Text) -> str:
    """A prompt as one text: messages in order, each after its role, and the names of declared tools."""
    messages, tools = without_tools(text)
    if isinstance(messages, str):
        return messages
    names = [f"tools: {', '.join(tool['function']['name'] for tool in tools)}"] * bool(tools)
    return "\n".join([*names, *(f"{m['role']}: {m['content']}" for m in messages)])
