"""How a `Sample` is stored in SQLite: conversion to a row and back, bit by bit.

Arrays are little-endian blobs (int32, float32, and bits for bool, whose length is that of `tokens`). Kept
sets, which may be much larger than everything else, are compressed with zlib. Text is TEXT, or a BLOB of its
bytes if UTF-8 can't encode it (lone surrogates). Structured values are JSON text.

SQLite doesn't notice a byte that the disk changed, so each row has a checksum of its values.
"""

from __future__ import annotations

import marshal
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import itemgetter
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from agro.io.strictjson import dumps, loads, loads_own
from agro.types import UNKNOWN_VERSION, Sample, Text

# The format of the bytes under a checksum, the same in all versions of Python 3 (a test pins it); later
# formats depend on object identity.
MARSHAL = 2
State = Literal["unscored", "failed", "scored"]
STATES: tuple[State, ...] = get_args(State)
UNSCORED, FAILED, SCORED = range(len(STATES))


class Origin(NamedTuple):
    """Where an imported sample comes from; the store has each origin once."""

    file: str  # hash of the file's content
    record: int  # line, from 1
    part: str  # within the record: the column of the response, and its position there


def ledger_of(run: str) -> str:
    """The `Origin.file` under which the responses to a run's requests are stored once."""
    return f"run:{run}"


ARRAYS = {  # columns of arrays: the type of their values; "": bits
    "tokens": "<i4",
    "action": "",
    "learn": "",
    "behavior_logp": "<f4",
    "context_tokens": "<i4",
    "token_reward": "<f4",
    "versions": "<i4",
    "kept": "<i4",
    "kept_count": "<i4",
}
COMPRESSED = ("kept", "kept_count")
COLUMNS = (
    *("prompt_id", "episode", "state", "role", "source", "version", "run", "step"),
    *("knows_behavior", "knows_tokens", "knows_kept", "file", "record", "part", "reward", "prompt"),
    *("messages", "response", "tokenizer", "sampling", "meta", *ARRAYS),
)
SAMPLE = ("id", *COLUMNS, "redone", "checksum")  # all columns of samples
REWARD = ("state", "reward", "meta")  # what a later scoring changes
SELECT = f"SELECT {', '.join(SAMPLE)} FROM samples"
TEXTS = ("prompt_id", "episode", "source", "prompt", "messages", "response", "tokenizer", "sampling", "meta")
# Columns that equal the sample's field of that name.
SAME = (
    *("id", "prompt", "response", "reward", "prompt_id", "episode", "tokenizer", "version", "role", "source"),
)
_AT = {name: i for i, name in enumerate(SAMPLE)}
PROMPT = slice(_AT["prompt"], _AT["messages"] + 1)  # what `prompt_columns` returns
_fixed = itemgetter(_AT["id"], *(_AT[name] for name in COLUMNS if name not in REWARD))
_reward = itemgetter(_AT["id"], *(_AT[name] for name in REWARD))
_texts, _same = (itemgetter(*(_AT[name] for name in names)) for names in (TEXTS, SAME))
_RUN, _STEP, _FILE, _PART, _REDONE = (_AT[name] for name in ("run", "step", "file", "part", "redone"))


def insert_into(table: str, columns: Sequence[str], key: Sequence[str] = ()) -> str:
    """The INSERT statement, which replaces the row with the same `key` if there is one."""
    values = f"VALUES ({', '.join('?' * len(columns))})"
    return f"INSERT INTO {table} ({', '.join(columns)}) {values}{in_place(columns, key)}"


def in_place(columns: Sequence[str], key: Sequence[str]) -> str:
    if not key:
        return ""
    changed = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in key)
    return f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {changed}"


def checksum(values: Iterable[Any]) -> int:
    """The checksum of values as SQLite returns them: of their types and all of their bytes.

    An even number of 63 bits, since SQLite's integers are signed and the lowest bit is for `redone`.
    """
    digest = blake2b(marshal.dumps(tuple(values), MARSHAL), digest_size=8).digest()
    bits = int.from_bytes(digest, "little") >> 2
    return bits * 2


def replace_reward(total: int, i: int, previous: Sequence[Any], current: Sequence[Any]) -> int:
    """The checksum of sample `i`, so far `total`, after a change of its values of `REWARD`."""
    without = total ^ checksum((i, *previous))  # a second xor with the same number removes it
    return without ^ checksum((i, *current))


def sample_checksum(row: Sequence[Any]) -> int:
    """The checksum of a row of `SAMPLE` (up to `redone` or more): of constants xor rewards, plus `redone`.

    A change of the reward or of `redone` needs only the old checksum, and hides no damage.
    """
    even = checksum(_fixed(row)) ^ checksum(_reward(row))
    return even + int(row[_REDONE])


def is_valid(row: Sequence[Any]) -> bool:
    """Whether a row, its checksum last, is as it was written; for samples, see `is_valid_sample`."""
    return bool(checksum(row[:-1]) == row[-1])


def is_valid_sample(row: Sequence[Any]) -> bool:
    """Whether a row of `SAMPLE` is as it was written."""
    return len(row) == len(SAMPLE) and row[_REDONE] in (0, 1) and sample_checksum(row) == row[-1]


def state_of(reward: float | None, meta: dict[str, Any]) -> int:
    """Index into `STATES`: failed if the reward has an error instead of a value."""
    if reward is not None:
        return SCORED
    return UNSCORED if meta.get("reward_error") is None else FAILED


@dataclass(slots=True, eq=False)
class SampleRow:
    """A sample as its row of `SAMPLE`, which is written unchanged.

    It has the id 0 until it is in a store.
    """

    values: tuple[Any, ...]

    @classmethod
    def of(cls, sample: Sample, origin: Origin | None = None) -> Self:
        """Raises `Refused` if `meta` or the like can't be stored as JSON."""
        prefix = f"sample of prompt {sample.prompt_id}"
        if sample.tokens is None and sample.context_tokens is None:
            arrays: list[bytes | None] = [None] * len(ARRAYS)
        else:
            versions = sample.version if isinstance(sample.version, np.ndarray) else None
            fields = (
                *(sample.tokens, sample.action, sample.learn, sample.behavior_logp, sample.context_tokens),
                *(sample.token_reward, versions, sample.kept, sample.kept_count),
            )
            arrays = [None if array is None else _blob(name, array) for name, array in zip(ARRAYS, fields)]
        row = (
            0,
            encode_text(sample.prompt_id),
            encode_text(sample.episode),
            state_of(sample.reward, sample.meta),
            encode_text(sample.role),
            encode_text(sample.source),
            sample.oldest_version,
            None,  # run
            None,  # step
            int(sample.knows_behavior),
            int(sample.tokens is not None),
            int(sample.kept is not None),
            *((origin.file, origin.record, encode_text(origin.part)) if origin else (None,) * 3),
            sample.reward,
            *prompt_columns(sample.prompt, f"prompt {sample.prompt_id}"),
            encode_text(sample.response),
            encode_text(sample.tokenizer),
            None if sample.sampling is None else encode_text(dumps(sample.sampling, f"{prefix}: sampling")),
            encode_text(dumps(sample.meta, f"{prefix}: meta")) if sample.meta else "{}",
            *arrays,
            0,
        )
        return cls((*row, 0))  # `placed` computes the checksum

    @property
    def prompt_id(self) -> str:
        return str(decode_text(self.values[_AT["prompt_id"]]))

    @property
    def origin(self) -> Origin | None:
        file, record, part = self.values[_FILE : _PART + 1]
        return None if file is None else Origin(file, record, decode_text(part))

    def placed(
        self, i: int, prompt: tuple[Any, Any], run: str | None, step: int | None, origin: Origin | None
    ) -> tuple[Any, ...]:
        """The values of `SAMPLE` for a sample that a run makes at a step, with id `i` and `prompt_columns`
        `prompt`. Without an `origin`, it keeps its own."""
        row = [*self.values[:-1]]
        row[0], row[PROMPT] = i, prompt
        row[_RUN], row[_STEP], row[_REDONE] = encode_text(run), encode_text(step), 0
        if origin is not None:
            row[_FILE : _PART + 1] = map(encode_text, origin)
        return (*row, sample_checksum(row))


def set_aside(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """The row of a sample that is marked as redone and frees its place for another one."""
    values = list(row)
    values[_FILE : _PART + 1] = None, None, None
    values[_REDONE] = 1
    values[-1] = sample_checksum(values)
    return tuple(values)


def run_of(row: Sequence[Any]) -> str | None:
    """The run that made a sample, from its row of `SAMPLE`."""
    run: str | None = decode_text(row[_RUN])
    return run


def without_version(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """A sample's row with unknown staleness. Only for reading: it keeps the checksum of the stored one."""
    values = list(row)
    values[_AT["version"]], values[_AT["versions"]] = UNKNOWN_VERSION, None
    return tuple(values)


def prompt_columns(prompt: Text, prefix: str) -> tuple[Any, Any]:
    """The values of the columns `prompt` and `messages`, of which one is NULL."""
    if isinstance(prompt, str):
        return encode_text(prompt), None
    return None, encode_text(dumps(prompt, f"{prefix}: prompt"))


def prompt_of(columns: Sequence[Any]) -> Text:
    """The prompt that has these columns."""
    prompt, messages = map(decode_text, columns)
    text: Text = prompt if messages is None else loads(messages)
    return text


def from_rows(rows: Iterable[tuple[Any, ...]]) -> list[Sample]:
    """The samples of rows. Raises `Refused` for an invalid one: anybody can give a row its checksum."""
    return Sample.all_of(map(_fields, rows))


def _fields(row: tuple[Any, ...]) -> dict[str, Any]:
    types = set(map(type, _texts(row)))
    if bytes in types or Wtf8 in types:
        row = tuple(decode_text(x) if name in TEXTS else x for name, x in zip(SAMPLE, row))
    r, fields = dict(zip(SAMPLE, row)), dict(zip(SAME, _same(row)))
    if r["prompt"] is None:
        fields["prompt"] = loads_own(r["messages"])
    if r["sampling"] is not None:
        fields["sampling"] = loads_own(r["sampling"])
    if r["meta"] != "{}":
        fields["meta"] = loads_own(r["meta"])
    if r["context_tokens"] is not None:
        fields["context_tokens"] = np.frombuffer(r["context_tokens"], "<i4")
    if r["knows_tokens"]:  # a value per token, also the version if they differ
        T = len(r["tokens"]) // 4
        for name in ("tokens", "action", "behavior_logp", "kept", "kept_count", "token_reward"):
            fields[name] = _array(name, r[name], T)
        is_same = r["learn"] == r["action"]
        fields["learn"] = fields["action"] if is_same else _array("learn", r["learn"], T)
        if r["versions"] is not None:
            fields["version"] = _array("versions", r["versions"], T)
    return fields


class Wtf8(bytes):
    """The bytes of a text that UTF-8 can't encode: a blob in SQLite, escaped text in PostgreSQL."""


def encode_text(value: Any) -> Any:
    """The value that SQLite stores for a text or a NumPy integer; other values are unchanged."""
    if not isinstance(value, str):
        return int(value) if isinstance(value, np.integer) else value  # else SQLite stores its bytes
    try:
        if not value.isascii():
            value.encode()
    except UnicodeEncodeError:
        return Wtf8(value.encode("utf-8", "surrogatepass"))
    return str.__str__(value)  # for a subclass, such as NumPy's, marshal would write other bytes


def decode_text(value: Any) -> Any:
    return value.decode("utf-8", "surrogatepass") if isinstance(value, bytes) else value


def _blob(name: str, array: NDArray[Any]) -> bytes:
    """Encode an array for its column."""
    kind = ARRAYS[name]
    if not kind:
        return np.packbits(array).tobytes()
    blob = array.astype(kind, copy=False).tobytes()
    return zlib.compress(blob, 1) if name in COMPRESSED else blob


def count_actions(blob: bytes | None) -> int | None:
    """The number of sampled tokens, from the column `action`; None if the store has no tokens."""
    return None if blob is None else int.from_bytes(blob, "big").bit_count()


def _array(name: str, blob: bytes | None, T: int) -> NDArray[Any] | None:
    """Decode the array of a column; `T`: tokens of the sample."""
    if blob is None:
        return None
    if ARRAYS[name]:
        return np.frombuffer(zlib.decompress(blob) if name in COMPRESSED else blob, ARRAYS[name])
    bits = np.unpackbits(np.frombuffer(blob, np.uint8), count=T).view(np.bool_)
    bits.flags.writeable = False
    return bits
