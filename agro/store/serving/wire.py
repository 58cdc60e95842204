"""How calls to the owner of a store and its answers travel: MessagePack, and the records of a store by name.

Samples travel as their rows (`SampleRow`), encoded and decoded by the client. The rows, which are most of a
message, follow what names them, so that they aren't copied into each value that they are in. Nothing is
pickled: what arrives can only be one of these values.

`METHODS` are those of a store's parts that the owner has for others, by what a lost answer means. All else,
such as importing and forgetting, needs the file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, Set, ValuesView
from dataclasses import fields
from functools import cache, partial
from typing import Any, Literal

import msgpack
import numpy as np
from pydantic import TypeAdapter, ValidationError

from agro.config import DataConfig
from agro.errors import Refused
from agro.store import records
from agro.store.draw_rules import At, Candidate, DrawRule, Selection
from agro.store.imports import Provenance
from agro.store.paging import Page
from agro.store.sample_rows import Origin, SampleRow, from_rows
from agro.store.survey import Scale, SurveyRow
from agro.types import Sample

PROTOCOL = 5  # of the calls and answers; another one isn't understood
# MessagePack's codes of what it doesn't have itself
TUPLE, SET, RECORD, ARRAY, SAMPLE, DATA, INTEGER = CODES = range(7)
RECORDS: dict[str, type] = {
    record.__name__: record
    for record in (
        *(At, Candidate, DrawRule, Origin, Page, Provenance, Scale, Selection, SurveyRow),
        *(records.Commit, records.Counts, records.Damage, records.DamagedSample, records.Draw),
        *(records.DrawnGroups, records.Group, records.LedgerSample, records.Pair, records.Rewind),
        *(records.RunUse, records.SampleSummary),
    )
}
FIELDS: dict[str, tuple[str, ...]] = {
    name: getattr(record, "_fields", ()) or tuple(field.name for field in fields(record))
    for name, record in RECORDS.items()
}
DTYPES = ("<f4", "<f8", "<i4", "<i8")
DEPTH = 16  # of values inside of each other; a call has 6
LISTED = (Iterator, KeysView, ValuesView, ItemsView, Sequence)
Side = Literal["client", "owner"]
LENGTH = 4  # bytes of a length
_rows = msgpack.Packer()  # a row has nothing but what MessagePack has: one for all saves most of the time


def pack(value: Any) -> bytes:
    """Raises `Refused` for a value that can't travel."""
    rows: list[bytes] = []
    packed = _packed(value, rows)
    return b"".join([len(packed).to_bytes(LENGTH, "little"), packed, *rows])


def unpack(content: bytes, side: Side) -> Any:
    """The value; at the owner samples stay rows, and records are checked. Raises `Refused` for other
    bytes, and for values that are nested in each other too deeply."""
    end = LENGTH + int.from_bytes(content[:LENGTH], "little")
    try:
        message = _Message(side, content[end:])
        value = message.read(content[LENGTH:end], 0)
    except Refused:
        raise
    except (ValueError, TypeError, LookupError, RecursionError, msgpack.UnpackException) as error:
        problem = f"{type(error).__name__}: {error!s:.200}"
        raise Refused(f"a message between a store and its owner can't be read: {problem}") from None
    if message.samples:
        raise Refused("a message between a store and its owner has more rows than it names")
    return value


def _packed(value: Any, rows: list[bytes]) -> bytes:
    packed: bytes = msgpack.packb(
        value, default=partial(_pack, rows), strict_types=True, unicode_errors="surrogatepass"
    )
    return packed


def _pack(rows: list[bytes], value: Any) -> Any:
    """What MessagePack has no type for."""
    name = type(value).__name__
    if isinstance(value, Sample):
        value = SampleRow.of(value)
    if isinstance(value, SampleRow):
        rows.append(_rows.pack(value.values))
        return msgpack.ExtType(SAMPLE, b"")
    if RECORDS.get(name) is type(value):
        values = [getattr(value, field) for field in FIELDS[name]]
        return msgpack.ExtType(RECORD, _packed([name, *values], rows))
    if isinstance(value, DataConfig):
        return msgpack.ExtType(DATA, value.model_dump_json().encode())
    if isinstance(value, np.ndarray):
        dtype = value.dtype.newbyteorder("<").str
        return msgpack.ExtType(ARRAY, _packed([dtype, list(value.shape), value.tobytes()], rows))
    return _pack_plain(rows, value)


def _pack_plain(rows: list[bytes], value: Any) -> Any:
    """A collection, or a number, as MessagePack has it."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, int):  # of more than 64 bits
        return msgpack.ExtType(INTEGER, str(int(value)).encode())
    if type(value) is tuple:  # no record: it would arrive without its fields' names
        return msgpack.ExtType(TUPLE, _packed(list(value), rows))
    if isinstance(value, LISTED) and not isinstance(value, tuple):
        return list(value)
    if isinstance(value, Set):
        return msgpack.ExtType(SET, _packed(sorted(value), rows))
    if isinstance(value, Mapping):
        return dict(value)
    raise Refused(f"a {type(value).__name__} can't be sent to the owner of a store")


class _Message:
    """A message that is being read. `samples`: those that it hasn't named yet, in their order."""

    def __init__(self, side: Side, content: bytes) -> None:
        self.side = side
        unpacker = msgpack.Unpacker(max_buffer_size=len(content))
        unpacker.feed(content)
        rows = list(map(tuple, unpacker))
        if unpacker.tell() < len(content):
            raise ValueError("its last row is cut off")
        self.samples: deque[Any] = deque(
            map(SampleRow.received, rows) if side == "owner" else from_rows(rows)
        )

    def read(self, content: bytes, depth: int) -> Any:
        """A value in so many others."""
        if depth > DEPTH:
            raise Refused(f"a message between a store and its owner has more than {DEPTH} nested values")
        inner = partial(self._read, depth=depth + 1)
        return msgpack.unpackb(content, ext_hook=inner, strict_map_key=False, unicode_errors="surrogatepass")

    def _read(self, code: int, content: bytes, *, depth: int) -> Any:
        """A value that MessagePack has no type for."""
        if code not in CODES:
            raise Refused(f"a message between a store and its owner has the unknown type {code}")
        if code == DATA:
            return DataConfig.model_validate_json(content)
        if code == INTEGER:
            return int(content)
        if code == SAMPLE:
            return self.samples.popleft()
        value = self.read(content, depth)
        if code == RECORD:
            return _checked(*value) if self.side == "owner" else RECORDS[value[0]](*value[1:])
        return _read_collection(code, value)


def _read_collection(code: int, value: Any) -> Any:
    if code == TUPLE:
        return tuple(value)
    if code == SET:
        return frozenset(value)
    assert code == ARRAY, code
    dtype, shape, data = value
    if dtype not in DTYPES:
        raise Refused(f"an array of {dtype!s:.20} isn't one of a store")
    return np.frombuffer(data, dtype).reshape(shape)


def _checked(name: str, *values: Any) -> Any:
    """A record whose fields have its types."""
    try:
        return _adapter(name).validate_python(dict(zip(FIELDS[name], values, strict=True)))
    except ValidationError as error:
        details = error.errors()[0]
        where = ".".join(map(str, (name, *details["loc"])))
        raise Refused(f"{where}: {details['msg']}, got {details['input']!r:.80}") from None


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(RECORDS[name])


def named(**parts: str) -> frozenset[str]:
    return frozenset(f"{part}.{name}" for part, names in parts.items() for name in names.split())


# These may simply be repeated.
READS = named(
    experience="samples_page last_id check_ids check_prompts find in_ledger rewards next_number "
    "pairs_page pairs_between",
    survey="group_rows_page prompts_page groups groups_page summaries_page counts scales meetings",
    draws="candidates require recorded_groups look drawn uses trained",
    requests="collectors ready backlog",
    ledger="commits committed knows fingerprint last_reference_logp reference_logp",
    imports="provenance",
    tables="check damage damaged",
    leases="alive",
)
# These too: they bring an order of groups up to date, which can be made again.
ORDERS = named(draws="pick count")
# These too: what they write is their answer. A step has one draw, a run its clusters, a name one lease.
REPEATABLE = named(
    draws="draw_picked",
    clusters="keep",
    leases="renew release",
)
# The answers of these are kept in the transaction that writes, and given again.
ONCE = named(
    experience="append set_rewards add_pairs",
    draws="record",
    requests="claim finish take reopen",
    ledger="commit rewind keep_reference_logp",
)
WRITES = REPEATABLE | ONCE
METHODS = READS | ORDERS | WRITES
