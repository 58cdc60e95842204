"""Files of records: JSON Lines, JSON lists, CSV, Excel, Parquet, data sets of `datasets`, and SQLite.

They are read in blocks of consecutive records, which another process may decode.

A folder of `datasets` has state.json, which lists its files of Arrow streams (`_data_files`), as
datasets/arrow_dataset.py writes it; one with dataset_dict.json has one folder per split.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import io
import re
import sqlite3
import zipfile
import zlib
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from agro.errors import Refused
from agro.io.json_values import read_object
from agro.io.jsonlines import Line, content, lines
from agro.io.strictjson import loads

CHUNK = 5000  # records per block, which is imported in one transaction; fewer if they are large:
CHUNK_BYTES = 1 << 24
BLOCK = 1 << 16  # bytes of a list to read at once
NUMBER = re.compile(r" *[+-]?\d+([.,]\d+)? *")
SEPARATOR = re.compile(r'"?sep=(.)"?\s*')  # the first line of a table for Excel
DELIMITERS = (",", ";", "\t", "|")  # the most frequent one in a table's first line
ABOVE = 20  # maximum number of rows above a sheet's column names, such as a title
MAIN = 3  # the sheet that is read has this many times the cells of any other
# What reading Excel raises; XML errors are SyntaxErrors.
DAMAGED = (zipfile.BadZipFile, zlib.error, SyntaxError, KeyError, ValueError, EOFError)
_BOM = b"\xef\xbb\xbf"  # of UTF-8, at the start of a file
_BLANK = _BOM + b" \t\r\n"
_FOREIGN = (  # beginnings of files that aren't JSON, and why they are refused
    (
        (b"SQLite format 3",),
        "expected a log, got a store or another database of several tables; write its samples (agro export), "
        "or the table to take, to a file first",
    ),
    ((b"PK\x03\x04",), "expected a log, got a zip file; the name of an Excel file ends in .xlsx"),
    (
        (b"\xff\xfe", b"\xfe\xff"),
        "expected UTF-8, got UTF-16; rename a table to .csv, or convert it (iconv -f UTF-16 -t UTF-8)",
    ),
)
JSON_COLUMNS = ("meta", "sampling", "messages", "tools", "exact")  # JSON columns in files that agro wrote
OURS = {b"agro": b"interchange"}  # their schema's metadata
ROW_GROUP = 1024  # rows
_HUB = re.compile(r"hub:(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[^:]+))??(:(?P<split>[^:]+))?")
Row = dict[str, Any]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Block:
    """Consecutive records of a file.

    `lines` decodes them. Until then, JSON Lines stay bytes, and rows of Parquet stay Arrow's.
    """

    numbers: tuple[int, int]  # numbers of the first and the last record
    lines: Callable[[], Iterator[Line]]


def read_records(path: str | Path) -> Iterator[Line]:
    """The records of a file of JSON Lines, a list of JSON objects, CSV, Excel or Parquet, compressed or not.

    Its content tells the format; for tables and Excel, its name does. Their cells are text, or null if empty.
    Also reads a folder of `datasets`, and a data set on the Hugging Face hub, hub:OWNER/NAME:SPLIT.
    """
    for block in read_blocks(path, 1):
        yield from block.lines()


def read_blocks(path: str | Path, limit: int | None = None) -> Iterator[Block]:
    """The records of `read_records` in blocks of `limit` (default: `CHUNK`); Parquet has its own blocks."""
    path = Path(path)
    if on_hub(path) or path.is_dir():
        yield from record_blocks(_data_set(path), limit)
        return
    with content(path) as (file, is_parquet):
        if is_parquet:
            yield from _parquet_blocks(path)
        elif is_table(path):
            yield from record_blocks(_table(path, file), limit)
        elif path.name.endswith((".xlsx", ".xlsm")):
            yield from record_blocks(_sheet(path, file), limit)
        elif len(tables := columns(path)) == 1:
            rows = enumerate(sqlite_rows(path, f"SELECT * FROM {quoted(*tables)}"), 1)
            yield from record_blocks((Line(f"{path}:{i}", i, row) for i, row in rows), limit)
        elif _is_list(file):
            yield from record_blocks(_items(path, file), limit)
        else:
            start = 1
            for chunk in _chunks(_json_lines(path, file), len, limit):  # so that memory doesn't grow
                end = start + len(chunk) - 1
                yield Block((start, end), partial(lines, str(path), chunk, start))
                start = end + 1


def record_blocks(records: Iterable[Line], limit: int | None = None) -> Iterator[Block]:
    return map(record_block, _chunks(records, lambda line: line.size, limit))


def record_block(records: list[Line]) -> Block:
    """The block of decoded records."""
    numbers = (records[0].number, records[-1].number) if records else (1, 0)
    return Block(numbers, partial(iter, records))


def _chunks(items: Iterable[Item], size_of: Callable[[Item], int], limit: int | None) -> Iterator[list[Item]]:
    chunk: list[Item] = []
    size = 0
    for item in items:
        chunk.append(item)
        size += size_of(item)
        if len(chunk) == (limit or CHUNK) or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _json_lines(path: Path, file: BinaryIO) -> Iterable[bytes]:
    """The lines of JSON Lines. A document with one object over several lines is one line."""
    head = file.readline()
    for beginnings, problem in _FOREIGN:
        if head.startswith(beginnings):
            raise Refused(f"{path}: {problem}")
    while head and not head.strip(_BLANK):
        head = file.readline()
    begin = head.strip(_BLANK)
    if begin.startswith(b"<"):
        raise Refused(
            f"{path}: expected a log, got HTML or XML; save its table as CSV (pandas: read_html, to_csv)"
        )
    goes_on = begin == b"{" or (".json" in path.suffixes and not begin.endswith(b"}"))
    if begin.startswith(b"{") and goes_on:
        return [b" ".join((head + file.read()).splitlines())]
    return chain([head] if head else [], file)


def _is_list(file: BinaryIO) -> bool:
    """Whether the file is one list, maybe on a single line. Skips a byte-order mark before a list."""
    begin: bytes = file.peek(BLOCK)  # type: ignore[attr-defined]
    is_list = begin.lstrip(_BLANK).startswith(b"[")
    if is_list and begin.startswith(_BOM):
        file.read(len(_BOM))
    return is_list


def _items(path: Path, file: BinaryIO) -> Iterator[Line]:
    """The objects of a list, one by one: the list needn't fit into memory."""
    import ijson

    number = 0
    try:
        for number, value in enumerate(ijson.items(file, "item", use_float=True), 1):
            error = None if isinstance(value, dict) else f"expected a list of objects, got {value!r:.80}"
            yield Line(f"{path}:{number}", number, value if error is None else {}, error)
    except (ijson.JSONError, UnicodeDecodeError) as error:
        raise Refused(f"{path}: after {number} records: expected a list of JSON objects: {error}") from None


def is_table(path: Path) -> bool:
    """Whether a file is a table, by its name; for .txt, by a tab or a repeated ; or | in its first line."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    if not name.endswith(".txt") or not path.is_file():
        return name.endswith((".csv", ".tsv"))
    with content(path) as (file, _):
        head = file.readline(BLOCK).lstrip(b"\xef\xbb\xbf\xff\xfe\0 ")
    is_split = b"\t" in head or max(head.count(b";"), head.count(b"|")) > 1
    return is_split and not head.startswith((b"{", b"["))


def _table(path: Path, file: BinaryIO) -> Iterator[Line]:
    """The records of CSV or TSV: the first row has the column names, and shows the delimiter."""
    text = io.TextIOWrapper(file, encoding_of(path), newline="")
    number = 0
    try:
        head = text.readline()
        delimiter = "\t" if ".tsv" in path.suffixes else max(DELIMITERS, key=head.count)
        if named := SEPARATOR.fullmatch(head):
            delimiter, head = named[1], text.readline()
        is_plain = delimiter == "\t" and not _has_quoted_cells(path)
        rows = csv.reader(
            chain([head], text),
            delimiter=delimiter,
            quoting=csv.QUOTE_NONE if is_plain else csv.QUOTE_MINIMAL,
            strict=True,
        )
        names, records = _named(path, next(rows, []))
        for row in chain(records, rows):
            if not any(row):
                continue  # spreadsheets write such rows below the last record
            number, location = number + 1, f"{path}:{rows.line_num}"
            if len(row) == len(names):
                cells = {name: cell or None for name, cell in zip(names, row)}
                yield Line(location, number, cells, is_text=True)
            else:
                yield Line(location, number, {}, f"expected {len(names)} cells, got {len(row)}")
    except (csv.Error, UnicodeDecodeError) as error:
        raise Refused(f"{path}: after {number} records: can't be read as CSV: {error}") from None


def encoding_of(path: Path) -> str:
    """A table's encoding: by its first bytes, or UTF-8; Windows-1252 if it has bytes that UTF-8 can't have,
    and no valid UTF-8 beyond ASCII (with both, it is damaged)."""
    decoder = getincrementaldecoder("utf-8")("surrogateescape")
    has_letters, has_others = False, False
    with content(path) as (file, _):
        block = file.read(BLOCK)
        if block.startswith((b"\xff\xfe", b"\xfe\xff")):
            return "utf-16"
        while block:
            beyond = [c for c in set(decoder.decode(block.removeprefix(_BOM))) if not c.isascii()]
            escaped = sum("\udc80" <= c <= "\udcff" for c in beyond)
            has_others |= escaped > 0
            has_letters |= escaped < len(beyond)
            block = file.read(BLOCK)
    return "cp1252" if has_others and not has_letters else "utf-8-sig"


def _has_quoted_cells(path: Path) -> bool:
    """Whether the quotes of a table with tabs enclose its cells; otherwise they belong to the text."""
    with content(path) as (file, _):
        text = io.TextIOWrapper(file, encoding_of(path), newline="")
        try:
            for _ in csv.reader(text, delimiter="\t", strict=True):
                pass
        except csv.Error:
            return False
    return True


def _named(path: Path, header: list[str]) -> tuple[list[str], list[list[str]]]:
    """The column names, and the first row if it is a record, which has a number and a sentence; the names are
    then column_1, column_2, …"""
    if any(map(NUMBER.fullmatch, header)) and any(len(cell.split()) > 2 for cell in header):
        return [f"column_{i}" for i in range(1, len(header) + 1)], [header]
    if len(set(header)) < len(header):
        raise Refused(f"{path}: expected unique column names, got {', '.join(header)}")
    return header, []


class _Sheet(NamedTuple):
    """A nonempty sheet of Excel."""

    title: str
    size: int  # in cells
    names: list[str]  # of its columns
    rows: Iterator[list[str]]  # below the names
    above: int  # rows above them


def _sheet(path: Path, file: BinaryIO) -> Iterator[Line]:
    """The records of an Excel file's only nonempty sheet, as for CSV; of several tables, the one that is
    `MAIN` times as large as any other. A formula has its stored value."""
    try:
        import openpyxl
    except ImportError:
        raise Refused(
            f"{path}: Excel needs openpyxl: pip install 'openpyxl>=3.1'; or save the sheet as CSV"
        ) from None
    try:
        book = openpyxl.load_workbook(file, read_only=True, data_only=True)
    except DAMAGED as error:
        raise Refused(f"{path}: can't be read as Excel: {error}") from None
    tables = []
    for sheet in book.worksheets:
        rows = _rows(path, sheet)
        begin = list(islice(rows, ABOVE))
        filled = [sum(map(bool, row)) for row in begin]
        if any(filled):
            # The names are in the first row with at least two cells, or else with one.
            above = next((i for i, count in enumerate(filled) if count > 1), None)
            above = next(i for i, count in enumerate(filled) if count) if above is None else above
            size = (sheet.max_row or 0) * (sheet.max_column or 0)
            tables.append(_Sheet(sheet.title, size, begin[above], chain(begin[above + 1 :], rows), above))
    if len(tables) > 1:
        tables = [table for table in tables if any(table.names[1:])]  # others are notes
    tables.sort(key=lambda table: -table.size)
    if not tables or (len(tables) > 1 and tables[0].size < MAIN * tables[1].size):
        titles = ", ".join(table.title for table in tables) or "none"
        raise Refused(f"{path}: expected one sheet with a table, got {titles}; save the one to take as CSV")
    title, _, names, rows, above = tables[0]
    while not names[-1]:
        names.pop()
    names, records = _named(path, names)
    first_row = above + 2 - len(records)  # row of the first record, from 1
    for number, cells in enumerate(chain(records, rows), 1):
        location = f"{path}:{first_row + number - 1}"
        if any(cells[len(names) :]):
            yield Line(location, number, {}, f"expected {len(names)} cells, got more in sheet {title}")
        elif any(cells):
            yield Line(location, number, {n: cell or None for n, cell in zip(names, cells)}, is_text=True)


def _rows(path: Path, sheet: Any) -> Iterator[list[str]]:
    """The cells of a sheet as CSV has them. It is read and decompressed row by row."""
    try:
        for row in sheet.iter_rows(values_only=True):
            cells = ["" if cell is None else str(cell) for cell in row]
            yield [text.lower() if isinstance(cell, bool) else text for cell, text in zip(row, cells)]
    except DAMAGED as error:
        raise Refused(f"{path}: sheet {sheet.title}: can't be read as Excel: {error}") from None


def fingerprint(path: str | Path) -> str:
    """SHA-256 of the content, the same whether gzipped or not; for a folder, of its files and their names.

    Raises `Refused` if it can't be read.
    """
    path = Path(path)
    if on_hub(path):
        return hashlib.sha256(revision(path).encode()).hexdigest()
    digest = hashlib.sha256()
    is_folder = path.is_dir()
    for file_path in sorted(p for p in path.rglob("*") if not p.is_dir()) if is_folder else [path]:
        if is_folder:
            digest.update(f"{file_path.relative_to(path).as_posix()}\0".encode())
        with content(file_path) as (file, _):
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def columns(path: Path) -> dict[str, set[str]]:
    """The columns of each table in SQLite; empty for other files."""
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        if file.read(16) != b"SQLite format 3\x00":
            return {}
    names = [row["name"] for row in sqlite_rows(path, "SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {
        name: {r["name"] for r in sqlite_rows(path, f"PRAGMA table_info({quoted(name)})")} for name in names
    }


def has_several_tables(path: Path) -> bool:
    """Whether a file is a database of several tables, like a store; one with a single table has records.

    SQLite itself opens it, so it may be written meanwhile.
    """
    if not path.is_file():
        return False
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            tables = "SELECT count(*) FROM sqlite_master WHERE type = 'table'"
            return bool(database.execute(tables).fetchone()[0] > 1)
    except sqlite3.Error as error:
        return error.sqlite_errorcode != sqlite3.SQLITE_NOTADB


def quoted(name: str) -> str:
    """Quote the name of a table for a statement."""
    return '"' + name.replace('"', '""') + '"'


def sqlite_rows(path: Path, statement: str) -> Iterator[dict[str, Any]]:
    """The rows of a query. Only reads the file; raises `Refused` if it can't, or while it is being
    written."""
    log = path.with_name(path.name + "-wal")
    if log.exists() and log.stat().st_size:
        raise Refused(
            f"{path}: its newest rows are in {log.name}; stop the program that writes it, or move them with "
            f'sqlite3 {path.name} "PRAGMA wal_checkpoint(TRUNCATE)"'
        )
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            database.row_factory = sqlite3.Row
            for row in database.execute(statement):
                yield dict(row)
    except sqlite3.Error as error:
        raise Refused(f"{path}: can't be read as SQLite: {error}") from None


def on_hub(path: Path) -> bool:
    return str(path).startswith("hub:")


def _data_set(path: Path) -> Iterator[Line]:
    """The records of a folder or of a data set on the hub. Raises `Refused` if it can't be read."""
    rows = _hub_rows(path) if on_hub(path) else _folder_rows(path)
    for number, (row, error) in enumerate(rows, 1):
        values = {name: value for name, value in row.items() if value is not None}
        yield Line(f"{path}:{number}", number, values, error)


def _folder_rows(path: Path) -> Iterator[tuple[Row, str | None]]:
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
                for start in range(0, len(batch), ROW_GROUP):
                    yield from _arrow_rows(batch.slice(start, ROW_GROUP))


def _hub_rows(path: Path) -> Iterator[tuple[Row, str | None]]:
    name, config, split = _parts(path)
    load_dataset = _package(path).load_dataset
    try:
        data = load_dataset(name, config, split=split, streaming=True, revision=_sha(name))
        if split is None and len(data) > 1:
            raise Refused(f"{path}: it has the splits {', '.join(data)}; name one, {path}:{next(iter(data))}")
        for row in data if split is not None else next(iter(data.values())):
            yield dict(row), None
    except Refused:
        raise
    except Exception as error:  # noqa: BLE001  # of the network or of any of its libraries
        raise Refused(f"{path}: can't be read from the hub: {error}") from None


def revision(path: Path) -> str:
    """What identifies the content of a data set on the hub: name, commit, configuration and split."""
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


def _parquet_blocks(path: Path) -> Iterator[Block]:
    """The rows of a Parquet file, a block for each batch of Arrow."""
    from pyarrow import parquet

    with _readable(path), parquet.ParquetFile(path, page_checksum_verification=True) as file:
        names = file.schema_arrow.names
        if len(set(names)) < len(names):
            raise Refused(f"{path}: expected unique column names, got {', '.join(names)}")
        is_ours = (file.schema_arrow.metadata or {}).items() >= OURS.items()
        start = 1
        for batch in file.iter_batches(ROW_GROUP):
            end = start + len(batch) - 1
            yield Block((start, end), partial(_arrow_lines, str(path), batch, is_ours, start))
            start = end + 1


def _arrow_lines(path: str, batch: Any, is_ours: bool, start: int) -> Iterator[Line]:
    """The rows of a batch as records, from the number `start`."""
    with _readable(path):
        for number, (row, error) in enumerate(_arrow_rows(batch), start):
            yield Line(f"{path}:{number}", number, _record_of(row, is_ours), error)


@contextmanager
def _readable(path: str | Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except OSError as error:
        raise Refused(f"{path}: can't be read: {error.strerror or error}") from None
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise Refused(f"{path}: can't be read as Parquet or Arrow: {error}") from None


def _arrow_rows(batch: Any) -> Iterator[tuple[Row, str | None]]:
    """The rows of a batch as `_values` has them, or why Python can't hold one, such as invalid UTF-8."""
    try:
        columns = map(_values, batch.columns)
        values = [dict(zip(batch.schema.names, row)) for row in zip(*columns)] or [{}] * len(batch)
    except (ValueError, OverflowError, KeyError) as error:  # the last one for duplicate keys of a map
        if len(batch) == 1:
            yield {}, f"can't be read: {error}"
            return
        middle = len(batch) // 2
        yield from _arrow_rows(batch.slice(0, middle))
        yield from _arrow_rows(batch.slice(middle))
    else:
        yield from ((row, None) for row in values)


def _values(array: Any) -> list[Any]:
    """The values of an array as JSON has them; bytes stay bytes.

    Dates and times are text with the file's precision; a duration is a number of its units. A decimal is a
    number if that is exact, else text. A map is an object, whose keys are texts.
    """
    import pyarrow as pa

    kind = _plain_type(array.type)
    is_plain = "decimal" not in str(kind) and "list_view" not in str(kind)
    try:
        values = (array if kind == array.type else array.cast(kind)).to_pylist(maps_as_pydicts="strict")
    except pa.ArrowNotImplementedError:  # such as a map whose keys are objects, which becomes a list of pairs
        values, is_plain = array.to_pylist(), False
    return list(values) if is_plain else list(map(_plain_value, values))


def _plain_type(kind: Any) -> Any:
    """The type to which Arrow casts values of this type for JSON."""
    import pyarrow as pa
    from pyarrow import types

    if isinstance(kind, pa.BaseExtensionType):
        return _plain_type(kind.storage_type)
    if types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if types.is_temporal(kind):
        return pa.int64() if types.is_duration(kind) else pa.string()
    if types.is_struct(kind):
        return pa.struct([field.with_type(_plain_type(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(pa.string(), _plain_type(kind.item_type))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.large_list(_plain_type(kind.value_type))
    return kind


def _plain_value(value: Any) -> Any:
    """Convert a value that Arrow doesn't cast."""
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain_value(item) for key, item in value.items()}
    if isinstance(value, date | time | timedelta):
        return str(value)
    if not isinstance(value, Decimal):
        return value
    if value == value.to_integral_value():
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else str(value)


def _record_of(row: Row, is_ours: bool) -> Row:
    """Restore the record from a row of Parquet."""
    if is_ours:
        record = {name: value for name, value in row.items() if value is not None}
    else:
        record = {name: _drop_nulls(value) for name, value in row.items()}
    for name in JSON_COLUMNS:
        if isinstance(record.get(name), str):
            try:
                record[name] = loads(record[name])
            except ValueError:
                continue  # another program's text; the record's own checks name the problem
    if is_ours and isinstance(record.get("exact"), dict):
        record |= record.pop("exact")
    if "response" in record:
        for name, ours in (("messages", "prompt"), ("versions", "version")):
            if name in record and record.get(ours) is None:
                record[ours] = record.pop(name)
    return record


def _drop_nulls(value: Any) -> Any:
    """The value without nulls in its objects: in Parquet, all objects of a column have the same keys."""
    if isinstance(value, list):
        return [_drop_nulls(item) for item in value] if value and isinstance(value[0], dict | list) else value
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return value
