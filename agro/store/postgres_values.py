"""How PostgreSQL has a store's values: columns as arrays, text without some characters, long ids by a digest.

PostgreSQL's text has neither NUL nor lone surrogates: `MARK` and four hexadecimal digits stand for one. Its
indexes take 2,700 bytes of a row: of an id with more than `LONG` bytes the beginning and a digest are stored
and compared, and the table `long_ids` has all of it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import chain, repeat
from typing import Any

from psycopg.adapt import AdaptersMap, Dumper
from psycopg.pq import Format
from psycopg.types.numeric import Int8BinaryDumper
from psycopg.types.string import StrBinaryDumper

from agro.errors import Refused
from agro.store.postgres_sql import TYPES
from agro.store.sample_rows import Wtf8, encode_text

MARK = "\uffff"
TEXT = 25  # the number of the type
NULL = b"\xff\xff\xff\xff"  # in place of the length of a value
LONG = 1000
IDS = ("prompt_id", "episode")  # the columns that may be long and are compared
# These may be long and aren't compared; other columns have no longer ones.
CONTENT = (
    *("text", "prompt", "messages", "response", "sampling", "meta"),
    *("options", "license", "files", "clusters"),
)
# Of those that no sample has any more.
DELETE_UNUSED_IDS = """
DELETE FROM long_ids WHERE digest NOT IN (
  SELECT right(prompt_id, 64) FROM samples UNION SELECT right(coalesce(episode, ''), 64) FROM samples
)
"""
_LONG = re.compile(f"{MARK}#([0-9a-f]{{64}})$")
_UNFIT = re.compile(f"[\0\ud800-\udfff{MARK}]")
_MARKED = re.compile(f"{MARK}([0-9a-f]{{4}})")


def encoded(text: str | bytes) -> bytes:
    """A text as PostgreSQL can have it."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogatepass")
    if not text.isprintable():
        text = _UNFIT.sub(lambda match: f"{MARK}{ord(match[0]):04x}", text)
    return text.encode()


def decoded(text: str) -> Any:
    """The text, as `encode_text` has it."""
    return encode_text(_MARKED.sub(lambda match: chr(int(match[1], 16)), text))


def shortened(text: str | bytes) -> bytes:
    """An id as indexes have it."""
    data = encoded(text)
    if len(data) <= LONG:
        return data
    start = data[: LONG // 2].decode(errors="ignore")
    return f"{start}{MARK}#{sha256(data).hexdigest()}".encode()


def checked(text: str | bytes) -> bytes:
    """A name. Raises `Refused` where it is too long."""
    data = encoded(text)
    if len(data) > LONG:
        raise Refused(
            f"{text[:40]!r}…: expected the name of a run or a source to have at most {LONG} bytes, got "
            f"{len(data)}. What to do: a shorter name, or a store in a file"
        )
    return data


def long_ids(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[tuple[str, str]]:
    """The rows of `long_ids` for samples: digests and ids."""
    texts = {row[columns.index(name)] or "" for name in IDS for row in rows}
    long = [text for text in texts if 4 * len(text) > LONG]  # a character has up to 4 bytes
    return [(digest, text) for text in long if (digest := digest_of(shortened(text).decode()))]


def digest_of(text: str) -> str | None:
    """By which `long_ids` has what is stored as this text; None where the text is all of it."""
    long = _LONG.search(text)
    return long and long[1]


def restored(
    rows: list[tuple[Any, ...]], columns: Sequence[int], find: Callable[[set[str]], Mapping[str, str]]
) -> list[tuple[Any, ...]]:
    """Rows with texts as they were. `columns`: those of text; `find`: long ids by their digests."""
    if not any(MARK in "".join([row[i] for row in rows if row[i]]) for i in columns):
        return rows
    ids = find({digest for row in rows for i in columns if row[i] and (digest := digest_of(row[i]))})

    def text(value: str) -> Any:
        return decoded(ids.get(digest_of(value) or "", value))

    return [tuple(text(v) if isinstance(v, str) and MARK in v else v for v in row) for row in rows]


class Column(bytes):
    """Values of one type, as an array of PostgreSQL in its binary form."""

    @classmethod
    def of(cls, kind: str, values: Sequence[Any], encode: Callable[[Any], bytes] = shortened) -> Column:
        """`encode`: of texts."""
        if not values:
            return cls(b"\0" * 8 + struct.pack(">I", _OIDS[kind]))
        head = struct.pack(">iiIii", 1, 1, _OIDS[kind], len(values), 1)
        if number := _NUMBERS.get(kind):
            try:
                if None not in values:
                    many = f">{f'i{number}' * len(values)}"
                    return cls(head + struct.pack(many, *chain(*zip(repeat(8), values))))
                pack = partial(struct.pack, f">i{number}", 8)
                return cls(head + b"".join(NULL if value is None else pack(value) for value in values))
            except struct.error as error:
                raise Refused(f"expected integers of 64 bits: {error}") from None
        cells: dict[Any, bytes] = {None: NULL}  # of the different values: many are in all rows
        for value in set(values) - {None}:
            cell = bytes(value) if kind == "BYTEA" else encode(value)
            cells[value] = len(cell).to_bytes(4, "big") + cell
        return cls(head + b"".join(map(cells.__getitem__, values)))

    @classmethod
    def each(cls, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[Column]:
        """The columns of rows, by their names."""
        columns = zip(names, zip(*rows), strict=True)
        return [cls.of(TYPES[name], values, _ENCODINGS.get(name, checked)) for name, values in columns]


class TextDumper(StrBinaryDumper):
    def dump(self, obj: Any) -> bytes:
        return shortened(obj)


class ColumnDumper(Dumper):
    format = Format.BINARY  # and of no type: the statement says which

    def dump(self, obj: Any) -> bytes:
        return bytes(obj)


def register(adapters: AdaptersMap) -> None:
    """Let a connection send values so."""
    adapters.register_dumper(int, Int8BinaryDumper)
    adapters.register_dumper(Column, ColumnDumper)
    for kind in (str, Wtf8):
        adapters.register_dumper(kind, TextDumper)


_OIDS = {"BIGINT": 20, "TEXT": TEXT, "DOUBLE PRECISION": 701, "BYTEA": 17}
_NUMBERS = {"BIGINT": "q", "DOUBLE PRECISION": "d"}  # of 8 bytes
_ENCODINGS = dict.fromkeys(IDS, shortened) | dict.fromkeys(CONTENT, encoded)
