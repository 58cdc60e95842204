"""How calls to the owner of a store and its answers travel: MessagePack, and the records of a store by name.

Samples travel as their rows (`SampleRow`), encoded and decoded by the client. Nothing is pickled: what
arrives can only be one of these values.
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Set, ValuesView
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, get_args

import msgpack
import numpy as np
from pydantic import TypeAdapter, ValidationError

from agro.config import DataConfig
from agro.errors import Refused
from agro.store.draw_rules import At, DrawRule, Selection
from agro.store.paging import Page
from agro.store.records import (
    Commit,
    Counts,
    Damage,
    DamagedSample,
    Draw,
    DrawnGroups,
    Group,
    Pair,
    Rewind,
    RunUse,
    SampleSummary,
)
from agro.store.sample_rows import Origin, SampleRow, from_row
from agro.store.survey import Scale, SurveyRow
from agro.types import Sample

TUPLE, SET, RECORD, ARRAY, SAMPLE, DATA = range(6)  # MessagePack's codes of what it doesn't have itself
LIMIT = 2**31 - 1  # bytes of a message
RECORDS: dict[str, type] = {
    record.__name__: record
    for record in (
        *(At, Commit, Counts, Damage, DamagedSample, Draw, DrawRule, DrawnGroups, Group, Origin, Page, Pair),
        *(Rewind, RunUse, SampleSummary, Scale, Selection, SurveyRow),
    )
}
DTYPES = ("<f4", "<f8", "<i4", "<i8")
Side = Literal["client", "owner"]
assert get_args(Side) == ("client", "owner")


def pack(value: Any) -> bytes:
    """Raises `Refused` for a value that can't travel."""
    packed: bytes = msgpack.packb(value, default=_pack, strict_types=True, unicode_errors="surrogatepass")
    return packed


def unpack(content: bytes, side: Side) -> Any:
    """The value; at the owner samples stay rows, and records are checked. Raises `Refused` for other
    bytes."""
    read = _read_at_owner if side == "owner" else _read_at_client
    try:
        return msgpack.unpackb(
            content,
            ext_hook=read,
            strict_map_key=False,
            unicode_errors="surrogatepass",
            max_buffer_size=LIMIT,
        )
    except Refused:
        raise
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise Refused(f"a message between a store and its owner can't be read: {error!s:.200}") from None


def _pack(value: Any) -> Any:
    """What MessagePack has no type for."""
    name = type(value).__name__
    if isinstance(value, Sample):
        return msgpack.ExtType(SAMPLE, pack(list(SampleRow.of(value).values)))
    if isinstance(value, SampleRow):
        return msgpack.ExtType(SAMPLE, pack(list(value.values)))
    if RECORDS.get(name) is type(value):
        return msgpack.ExtType(RECORD, pack([name, *_values(value)]))
    if isinstance(value, DataConfig):
        return msgpack.ExtType(DATA, value.model_dump_json().encode())
    if isinstance(value, np.ndarray):
        dtype = value.dtype.newbyteorder("<").str
        return msgpack.ExtType(ARRAY, pack([dtype, list(value.shape), value.tobytes()]))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple):
        return msgpack.ExtType(TUPLE, pack(list(value)))
    if isinstance(value, Set) and not isinstance(value, KeysView):
        return msgpack.ExtType(SET, pack(sorted(value)))
    if isinstance(value, Iterator | KeysView | ValuesView):
        return list(value)
    raise Refused(f"a {name} can't be sent to the owner of a store")


def _values(record: Any) -> list[Any]:
    if is_dataclass(record):
        return [getattr(record, field.name) for field in fields(record)]
    return list(record)


def _read_at_client(code: int, content: bytes) -> Any:
    value = _read(code, content, "client")
    if code == SAMPLE:
        return from_row(tuple(value))
    return RECORDS[value[0]](*value[1:]) if code == RECORD else value


def _read_at_owner(code: int, content: bytes) -> Any:
    value = _read(code, content, "owner")
    if code == SAMPLE:
        return SampleRow(value)
    return _checked(value[0], value[1:]) if code == RECORD else value


def _read(code: int, content: bytes, side: Side) -> Any:
    if code == DATA:
        return DataConfig.model_validate_json(content)
    value = unpack(content, side)
    if code == TUPLE:
        return tuple(value)
    if code == SET:
        return frozenset(value)
    if code == ARRAY:
        dtype, shape, data = value
        if dtype not in DTYPES:
            raise Refused(f"an array of {dtype!s:.20} isn't one of a store")
        return np.frombuffer(data, dtype).reshape(shape)
    if code not in (RECORD, SAMPLE):
        raise Refused(f"a message between a store and its owner has the unknown type {code}")
    return value


def _checked(name: str, values: list[Any]) -> Any:
    """A record whose fields have its types."""
    record = RECORDS[name](*values)
    try:
        return _adapter(name).validate_python(record)
    except ValidationError as error:
        details = error.errors()[0]
        where = ".".join(map(str, (name, *details["loc"])))
        raise Refused(f"{where}: {details['msg']}, got {details['input']!r:.80}") from None


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(RECORDS[name])
