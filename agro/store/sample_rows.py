"""How a `Sample` is stored in SQLite: the schema, and a row from a sample and back, bit by bit.

Arrays are little-endian blobs (int32, float32, and bits for bool, whose length is that of `tokens`). Kept
sets, which may be much larger than all else, are compressed with zlib. Text is TEXT, or a BLOB of its bytes
where UTF-8 can't encode it (lone surrogates). Structured values are JSON text.

SQLite doesn't notice a byte that the disk changed. So each row has a checksum of its values.
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

# The format of the bytes under a checksum, the same in all versions of Python 3 (a test pins it); later ones
# depend on which objects are the same.
MARSHAL = 2
State = Literal["unscored", "failed", "scored"]
STATES: tuple[State, ...] = get_args(State)


class Origin(NamedTuple):
    """Where an imported sample comes from; each is in the store once."""

    file: str  # hash of the file's content
    record: int  # line, from 1
    part: str  # of the record: the column of the response, and its place in it


def ledger_of(run: str) -> str:
    """The name under which the responses of a run's requests are stored once."""
    return f"run:{run}"


COLUMNS = (
    *("prompt_id", "episode", "state", "role", "source", "version", "run", "step"),
    *("knows_behavior", "knows_tokens", "knows_kept", "file", "record", "part", "reward", "prompt"),
    *("messages", "response", "tokenizer", "sampling", "meta", "tokens", "action", "learn", "behavior_logp"),
    *("context_tokens", "token_reward", "versions", "kept", "kept_count"),
)
SAMPLE = ("id", *COLUMNS, "redone", "checksum")  # all columns of samples
REWARD = ("state", "reward", "meta")  # what a later scoring changes
SELECT = f"SELECT {', '.join(SAMPLE)} FROM samples"


def insert_into(table: str, columns: Sequence[str], key: Sequence[str] = ()) -> str:
    """In place of the row with the same `key`, where there is one."""
    values = f"VALUES ({', '.join('?' * len(columns))})"
    return f"INSERT INTO {table} ({', '.join(columns)}) {values}{in_place(columns, key)}"


def in_place(columns: Sequence[str], key: Sequence[str]) -> str:
    if not key:
        return ""
    changed = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in key)
    return f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {changed}"


_AT = {name: i for i, name in enumerate(SAMPLE)}
_fixed = itemgetter(_AT["id"], *(_AT[name] for name in COLUMNS if name not in REWARD))
_reward = itemgetter(_AT["id"], *(_AT[name] for name in REWARD))
_REDONE, _PROMPT_ID = _AT["redone"], _AT["prompt_id"]
PROMPT = slice(_AT["prompt"], _AT["messages"] + 1)  # what `prompt_columns` returns
_RUN, _STEP, _FILE, _RECORD, _PART = (_AT[name] for name in ("run", "step", "file", "record", "part"))
_NO_ARRAYS = (None,) * 9  # of `_array_columns`
_TEXTS = ("prompt_id", "episode", "source", "prompt", "messages", "response", "tokenizer", "sampling", "meta")
# Columns that are the sample's field of that name.
_SAME = (
    *("id", "prompt", "response", "reward", "prompt_id", "episode", "tokenizer", "version", "role", "source"),
)
_texts, _same = itemgetter(*(_AT[name] for name in _TEXTS)), itemgetter(*(_AT[name] for name in _SAME))


def checksum(values: Iterable[Any]) -> int:
    """Of values as SQLite returns them: their types and all of their bytes.

    An even number of 63 bits, since SQLite's integers have a sign, and the lowest bit is that of `redone`.
    """
    digest = blake2b(marshal.dumps(tuple(values), MARSHAL), digest_size=8).digest()
    bits = int.from_bytes(digest, "little") >> 2
    return bits * 2


def replace_reward(total: int, i: int, previous: Sequence[Any], current: Sequence[Any]) -> int:
    """The checksum of sample `i`, until now `total`, after a change of its values of `REWARD`."""
    without = total ^ checksum((i, *previous))  # xor with the same number again takes it out
    return without ^ checksum((i, *current))


def sample_checksum(row: Sequence[Any]) -> int:
    """Of a row of `SAMPLE` up to `redone` or more: of what never changes, xor of the reward, plus `redone`.

    So a change of the reward or of `redone` updates the checksum from the old one alone, and hides no damage.
    """
    even = checksum(_fixed(row)) ^ checksum(_reward(row))
    return even + int(row[_REDONE])


def is_valid(row: Sequence[Any]) -> bool:
    """Whether a row, its checksum last, is as it was written; of samples see `is_valid_sample`."""
    return bool(checksum(row[:-1]) == row[-1])


def is_valid_sample(row: Sequence[Any]) -> bool:
    """Whether a row of `SAMPLE` is as it was written."""
    return len(row) == len(SAMPLE) and row[_AT["redone"]] in (0, 1) and sample_checksum(row) == row[-1]


def state_of(reward: float | None, meta: dict[str, Any]) -> int:
    """Index into `STATES`: failed where there is an error of the reward instead of a reward."""
    if reward is not None:
        return STATES.index("scored")
    return STATES.index("unscored" if meta.get("reward_error") is None else "failed")


@dataclass(slots=True, eq=False)
class SampleRow:
    """A sample as its row of `SAMPLE`, which is written as it is.

    One that isn't in a store yet has the id 0.
    """

    values: tuple[Any, ...]

    @classmethod
    def of(cls, sample: Sample, origin: Origin | None = None) -> Self:
        """Raises `Refused` where `meta` or the like can't be stored as JSON."""
        prefix = f"sample of prompt {sample.prompt_id}"
        is_text = sample.tokens is None and sample.context_tokens is None
        row = (
            0,
            encode_text(sample.prompt_id),
            encode_text(sample.episode),
            state_of(sample.reward, sample.meta),
            sample.role,
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
            *(_NO_ARRAYS if is_text else _array_columns(sample)),
            0,
        )
        return cls((*row, 0))  # `placed` makes the checksum

    @property
    def id(self) -> int:
        return int(self.values[_AT["id"]])

    @property
    def checksum(self) -> int:
        return int(self.values[-1])

    @property
    def prompt_id(self) -> str:
        prompt_id = self.values[_PROMPT_ID]
        return prompt_id if isinstance(prompt_id, str) else str(decode_text(prompt_id))

    @property
    def origin(self) -> Origin | None:
        file, record, part = (self.values[_AT[name]] for name in Origin._fields)
        return None if file is None else Origin(file, record, decode_text(part))

    @property
    def prompt(self) -> Text:
        messages = self.values[_AT["messages"]]
        text: Text = decode_text(self.values[_AT["prompt"]])
        return text if messages is None else loads(decode_text(messages))

    def set_aside(self) -> SampleRow:
        """The same sample, redone: its place is for another one."""
        values = list(self.values)
        values[_FILE] = values[_RECORD] = values[_PART] = None
        values[_REDONE] = 1
        values[-1] = sample_checksum(values)
        return SampleRow(tuple(values))

    def placed(
        self, i: int, prompt: tuple[Any, Any], run: str | None, step: int | None, origin: Origin | None
    ) -> tuple[Any, ...]:
        """The values of `SAMPLE` of a sample that a run makes at a step; `i` its id, `prompt` its
        `prompt_columns`. Without an `origin` it keeps its own."""
        row = [*self.values[:-1]]
        row[0], row[PROMPT] = i, prompt
        row[_RUN], row[_STEP], row[_REDONE] = encode_text(run), step, 0
        if origin is not None:
            row[_FILE], row[_RECORD], row[_PART] = origin.file, origin.record, encode_text(origin.part)
        return (*row, sample_checksum(row))


def run_of(row: Sequence[Any]) -> str | None:
    """The run that made a sample, by its row of `SAMPLE`."""
    run: str | None = decode_text(row[_RUN])
    return run


def without_version(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """The row of a sample, of unknown staleness. To be read: its checksum is still that of the stored one."""
    values = list(row)
    values[_AT["version"]], values[_AT["versions"]] = UNKNOWN_VERSION, None
    return tuple(values)


def _array_columns(sample: Sample) -> tuple[bytes | None, ...]:
    versions = sample.version if isinstance(sample.version, np.ndarray) else None
    return (
        *(_blob(sample.tokens, "<i4"), _bits(sample.action), _bits(sample.learn)),
        *(_blob(sample.behavior_logp, "<f4"), _blob(sample.context_tokens, "<i4")),
        *(_blob(sample.token_reward, "<f4"), _blob(versions, "<i4")),
        *(_packed(sample.kept), _packed(sample.kept_count)),
    )


def prompt_columns(prompt: Text, prefix: str) -> tuple[Any, Any]:
    """The values of the columns `prompt` and `messages`, of which one is NULL."""
    if isinstance(prompt, str):
        return encode_text(prompt), None
    return None, encode_text(dumps(prompt, f"{prefix}: prompt"))


def from_rows(rows: Iterable[tuple[Any, ...]]) -> list[Sample]:
    """The samples of rows. Raises `Refused` where one is none: anybody can give a row its checksum."""
    return Sample.all_of(map(_fields, rows))


def _fields(row: tuple[Any, ...]) -> dict[str, Any]:
    types = set(map(type, _texts(row)))
    if bytes in types or Wtf8 in types:
        row = tuple(decode_text(x) if name in _TEXTS else x for name, x in zip(SAMPLE, row))
    r, fields = dict(zip(SAMPLE, row)), dict(zip(_SAME, _same(row)))
    if r["prompt"] is None:
        fields["prompt"] = loads_own(r["messages"])
    if r["sampling"] is not None:
        fields["sampling"] = loads_own(r["sampling"])
    if r["meta"] != "{}":
        fields["meta"] = loads_own(r["meta"])
    if r["context_tokens"] is not None:
        fields["context_tokens"] = np.frombuffer(r["context_tokens"], "<i4")
    if r["knows_tokens"]:  # a value for each token, also the version where they differ
        T = len(r["tokens"]) // 4
        action = _unbits(r["action"], T)
        fields |= {
            "tokens": _unblob(r["tokens"], "<i4"),
            "action": action,
            "learn": action if r["learn"] == r["action"] else _unbits(r["learn"], T),
            "behavior_logp": _unblob(r["behavior_logp"], "<f4"),
            "kept": _unpacked(r["kept"]),
            "kept_count": _unpacked(r["kept_count"]),
            "token_reward": _unblob(r["token_reward"], "<f4"),
            "version": r["version"] if r["versions"] is None else _unblob(r["versions"], "<i4"),
        }
    return fields


class Wtf8(bytes):
    """The bytes of a text that UTF-8 can't encode: SQLite has them as a blob, PostgreSQL escaped."""


def encode_text(text: Any) -> Any:
    """The value that SQLite stores for a text, None included."""
    try:
        if text is not None and not text.isascii():
            text.encode()
    except UnicodeEncodeError:
        return Wtf8(text.encode("utf-8", "surrogatepass"))
    return text


def decode_text(value: Any) -> Any:
    return value.decode("utf-8", "surrogatepass") if isinstance(value, bytes) else value


def _blob(array: NDArray[Any] | None, dtype: str) -> bytes | None:
    return None if array is None else array.astype(dtype, copy=False).tobytes()


def _unblob(blob: bytes | None, dtype: str) -> NDArray[Any] | None:
    return None if blob is None else np.frombuffer(blob, dtype)


def _packed(array: NDArray[np.int32] | None) -> bytes | None:
    return None if array is None else zlib.compress(array.astype("<i4", copy=False).tobytes(), 1)


def _unpacked(blob: bytes | None) -> NDArray[np.int32] | None:
    return None if blob is None else np.frombuffer(zlib.decompress(blob), "<i4")


def _bits(array: NDArray[np.bool_] | None) -> bytes | None:
    return None if array is None else np.packbits(array).tobytes()


def _unbits(blob: bytes | None, count: int | None) -> NDArray[np.bool_] | None:
    if blob is None:
        return None
    bits = np.unpackbits(np.frombuffer(blob, np.uint8), count=count).view(np.bool_)
    bits.flags.writeable = False
    return bits
