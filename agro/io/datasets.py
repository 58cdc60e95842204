"""Files of Arrow: data sets of the package `datasets` and on the Hugging Face hub, and Parquet.

A folder has state.json, which names its files of Arrow streams, as datasets/arrow_dataset.py writes it
(`_data_files`); one with dataset_dict.json has a folder a split.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.io.json_values import read_object
from agro.io.jsonlines import Line
from agro.io.strictjson import loads

JSON = ("meta", "sampling", "messages", "tools", "exact")  # columns of JSON, in files that agro wrote
MARK = {b"agro": b"interchange"}  # in the metadata of their schema
ROWS = 1024  # a row group
_HUB = re.compile(r"hub:(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[^:]+))??(:(?P<split>[^:]+))?")
Row = dict[str, Any]


def on_hub(path: Path) -> bool:
    return str(path).startswith("hub:")


def read(path: Path) -> Iterator[Line]:
    """The records of a folder or of a data set on the hub. Raises `Refused` where it can't be read."""
    rows = _of_hub(path) if on_hub(path) else _of_folder(path)
    for number, (row, error) in enumerate(rows, 1):
        values = {name: value for name, value in row.items() if value is not None}
        yield Line(f"{path}:{number}", number, values, error)


def _of_folder(path: Path) -> Iterator[tuple[Row, str | None]]:
    import pyarrow as pa

    if (path / "dataset_dict.json").is_file():
        splits = read_object(path / "dataset_dict.json").get("splits", [])
        places = " or ".join(str(path / split) for split in splits)
        raise Refused(f"{path}: a folder of several splits; name one: {places}")
    if not (path / "state.json").is_file():
        raise Refused(
            f"{path}: expected a file, or a folder with state.json (of datasets' save_to_disk); of a folder "
            f"of logs give the files, such as {path}/*.jsonl"
        )
    for item in read_object(path / "state.json").get("_data_files", []):
        file = path / item["filename"]
        with _readable(file), pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as batches:
            for batch in batches:
                for start in range(0, len(batch), ROWS):
                    yield from rows(batch.slice(start, ROWS))


def _of_hub(path: Path) -> Iterator[tuple[Row, str | None]]:
    name, config, split = _parts(path)
    load_dataset = _package(path).load_dataset
    try:
        data = load_dataset(name, config, split=split, streaming=True, revision=_sha(name))
        if split is None and len(data) > 1:
            raise Refused(
                f"{path}: there are the splits {', '.join(data)}; name one, {path}:{next(iter(data))}"
            )
        for row in data if split is not None else next(iter(data.values())):
            yield dict(row), None
    except Refused:
        raise
    except Exception as error:  # noqa: BLE001  # of the network or of any of its libraries
        raise Refused(f"{path}: can't be read from the hub: {error}") from None


def revision(path: Path) -> str:
    """What tells the content of a data set on the hub from others: name and commit."""
    name, config, split = _parts(path)
    _package(path)
    return f"hub:{name}@{_sha(name)}:{config}:{split}"


def _parts(path: Path) -> tuple[str, str | None, str | None]:
    """Name, configuration and split."""
    match = _HUB.fullmatch(str(path))
    if match is None:
        raise Refused(f"{path}: expected hub:OWNER/NAME, hub:OWNER/NAME:SPLIT or hub:OWNER/NAME:CONFIG:SPLIT")
    return match["name"], match["config"], match["split"]


def _package(path: Path) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError:
        raise Refused(
            f"{path}: reading from the hub needs the package datasets: pip install 'datasets>=4.0'"
        ) from None


@cache
def _sha(name: str) -> str:
    import huggingface_hub

    try:
        return str(huggingface_hub.HfApi().dataset_info(name).sha)
    except Exception as error:  # noqa: BLE001  # of the network or of any of its libraries
        raise Refused(f"hub:{name}: can't be found on the hub: {error}") from None


def batches(path: Path) -> Iterator[tuple[Any, bool]]:
    """The rows of a Parquet file as batches of Arrow, and whether it is ours; see `lines`.

    Raises `Refused` for a file that can't be read.
    """
    from pyarrow import parquet

    with _readable(path), parquet.ParquetFile(path, page_checksum_verification=True) as file:
        names = file.schema_arrow.names
        if len(set(names)) < len(names):
            raise Refused(f"{path}: expected different columns, got {', '.join(names)}")
        is_ours = (file.schema_arrow.metadata or {}).items() >= MARK.items()
        for batch in file.iter_batches(ROWS):
            yield batch, is_ours


def lines(path: str, batch: Any, is_ours: bool, first: int) -> Iterator[Line]:
    """The rows of a batch as records, from the number `first`. Raises `Refused` as `batches` does."""
    with _readable(path):
        for number, (row, error) in enumerate(rows(batch), first):
            yield Line(f"{path}:{number}", number, _record(row, is_ours), error)


@contextmanager
def _readable(path: str | Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except OSError as error:
        raise Refused(f"{path}: can't be read: {error.strerror or error}") from None
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise Refused(f"{path}: can't be read as Parquet or Arrow: {error}") from None


def rows(batch: Any) -> Iterator[tuple[Row, str | None]]:
    """The rows of a batch as `_values` has them, or why Python can't hold one, such as text not in UTF-8."""
    try:
        columns = map(_values, batch.columns)
        values = [dict(zip(batch.schema.names, row)) for row in zip(*columns)] or [{}] * len(batch)
    except (ValueError, OverflowError) as error:
        if len(batch) == 1:
            yield {}, f"can't be read: {error}"
            return
        middle = len(batch) // 2
        yield from rows(batch.slice(0, middle))
        yield from rows(batch.slice(middle))
    else:
        yield from ((row, None) for row in values)


def _values(array: Any) -> list[Any]:
    """The values of an array as JSON has them; bytes stay bytes.

    Dates and times are text in ISO 8601, to the digit that the file has; so is a duration (PT1.5S). A decimal
    number is a number where that is the same, else text. A map is an object where its keys are texts.
    """
    import pyarrow as pa
    from pyarrow import types

    kind = array.type
    if _is_json(kind):
        return list(array.to_pylist())  # the fastest way
    if isinstance(kind, pa.BaseExtensionType):
        return _values(array.storage)
    if types.is_dictionary(kind):
        return _values(array.dictionary_decode())
    if types.is_timestamp(kind) or types.is_date(kind) or types.is_time(kind):
        texts = array.cast(pa.string()).to_pylist()
        return [x if x is None else x.replace(" ", "T") for x in texts]
    if types.is_duration(kind):
        digits = {"s": 0, "ms": 3, "us": 6, "ns": 9}[kind.unit]
        counts = array.cast(pa.int64()).to_pylist()
        return [x if x is None else f"PT{Decimal(x).scaleb(-digits).normalize():f}S" for x in counts]
    if types.is_decimal(kind):
        return [x if x is None else _number(x) for x in array.to_pylist()]
    if types.is_struct(kind):
        fields = zip(*map(_values, array.flatten()))
        objects = [dict(zip(kind.names, row)) for row in fields] or [{}] * len(array)
        return [x if known else None for x, known in zip(objects, array.is_valid().to_pylist())]
    if types.is_map(kind):  # its keys are those of all rows that it is a slice of
        pairs = [list(pair) for pair in zip(_values(array.keys), _values(array.items))]
        places, known = pairwise(array.offsets.to_pylist()), array.is_valid().to_pylist()
        as_map: Any = dict if types.is_string(kind.key_type) else list
        return [as_map(pairs[a:b]) if is_known else None for (a, b), is_known in zip(places, known)]
    if types.is_fixed_size_list(kind):
        return _values(array.cast(pa.list_(kind.value_field)))
    if types.is_list(kind) or types.is_large_list(kind):
        values = iter(_values(array.flatten()))
        return [None if n is None else list(islice(values, n)) for n in array.value_lengths().to_pylist()]
    return list(array.to_pylist())


def _is_json(kind: Any) -> bool:
    """Whether values of a type are JSON as Python has them."""
    from pyarrow import types

    if kind.num_fields:
        return not types.is_map(kind) and all(_is_json(kind.field(i).type) for i in range(kind.num_fields))
    tests = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
    return any(test(kind) for test in tests)


def _number(value: Decimal) -> float | int | str:
    if value == value.to_integral_value():
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else str(value)


def _record(row: Row, is_ours: bool) -> Row:
    """A row of Parquet as the record that was written."""
    if is_ours:
        record = {name: value for name, value in row.items() if value is not None}
    else:
        record = {name: _known(value) for name, value in row.items()}
    for name in JSON:
        if isinstance(record.get(name), str):
            try:
                record[name] = loads(record[name])
            except ValueError:
                continue  # text of another program; the record's own checks name what is wrong with it
    if is_ours and isinstance(record.get("exact"), dict):
        record |= record.pop("exact")
    if "response" in record:
        for name, ours in (("messages", "prompt"), ("versions", "version")):
            if name in record and record.get(ours) is None:
                record[ours] = record.pop(name)
    return record


def _known(value: Any) -> Any:
    """The value without the nulls of its objects: in Parquet all objects of a column have the same keys."""
    if isinstance(value, list):
        return [_known(item) for item in value] if value and isinstance(value[0], dict | list) else value
    if isinstance(value, dict):
        return {key: _known(item) for key, item in value.items() if item is not None}
    return value
