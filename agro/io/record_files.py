"""Files of records: JSON Lines, JSON lists, CSV, Excel, Parquet, data sets of `datasets`, and SQLite."""

from __future__ import annotations

import csv
import hashlib
import io
import re
import sqlite3
import zipfile
import zlib
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from agro.errors import Refused
from agro.io import datasets
from agro.io.jsonlines import Line, content, lines, reader

NUMBER = re.compile(r" *[+-]?\d+([.,]\d+)? *")
SEPARATOR = re.compile(r'"?sep=(.)"?\s*')  # the first line of a table for Excel
ABOVE = 20  # rows at most from a sheet's first to the names of its columns, such as a title
MAIN = 3  # times as many cells as any other has the one sheet that is read
BLOCK = 1 << 16  # bytes that are read at once of a list
# What reading Excel raises; that of XML is a SyntaxError.
DAMAGED = (zipfile.BadZipFile, zlib.error, SyntaxError, KeyError, ValueError, EOFError)


def read_records(path: str | Path) -> Iterator[Line]:
    """The records of a file of JSON Lines, a list of JSON objects, CSV, Excel or Parquet, compressed or not.

    Its content tells which, and of tables and Excel its name. Their cells are text, null where empty.
    Also those of a folder of `datasets`, and of a data set on the Hugging Face hub, hub:OWNER/NAME:SPLIT.
    """
    path = Path(path)
    if datasets.on_hub(path) or path.is_dir():
        yield from datasets.read(path)
        return
    with content(path) as (file, is_parquet):
        if is_parquet:
            for block in arrow_blocks(str(path), datasets.batches(path)):
                yield from block.lines()
        elif is_table(path):
            yield from _table(path, file)
        elif is_sheet(path):
            yield from _sheet(path, file)
        elif len(tables := columns(path)) == 1:
            rows = sqlite_rows(path, f"SELECT * FROM {quoted(*tables)}")
            yield from (Line(f"{path}:{number}", number, row) for number, row in enumerate(rows, 1))
        else:
            is_list, parts = _json(path, file)
            yield from _items(path, parts) if is_list else lines(path, parts)


def read_blocks(path: str | Path) -> Iterator[Block]:
    """The records of `read_records` in blocks, from which other processes can make them."""
    path = Path(path)
    is_rows = datasets.on_hub(path) or path.is_dir() or is_table(path) or is_sheet(path)
    if is_rows or len(columns(path)) == 1:
        yield from record_blocks(read_records(path))
        return
    with content(path) as (file, is_parquet):
        if is_parquet:
            yield from arrow_blocks(str(path), datasets.batches(path))
            return
        is_list, parts = _json(path, file)
        yield from record_blocks(_items(path, parts)) if is_list else json_blocks(str(path), parts)


def _json(path: Path, file: BinaryIO) -> tuple[bool, Iterable[bytes]]:
    """Whether a file is one list of objects, and its content: parts of it, or the lines of JSON Lines.

    A document that is one object over several lines is one line.
    """
    head = file.readline(BLOCK)
    if head.startswith(b"SQLite format 3"):
        raise Refused(
            f"{path}: expected a log, got a store or another database of several tables; write its samples "
            "(agro export), or the table to take, to a file first"
        )
    if head.startswith(b"PK\x03\x04"):
        raise Refused(f"{path}: expected a log, got a zip file; a table of Excel has a name in .xlsx")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise Refused(
            f"{path}: expected UTF-8, got UTF-16; call it {path.stem}.csv where it is a table, or convert it "
            "(iconv -f UTF-16 -t UTF-8)"
        )
    while head and not head.strip(b"\xef\xbb\xbf \t\r\n"):
        head = file.readline(BLOCK)
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        raise Refused(
            f"{path}: expected a log, got HTML or XML; save its table as CSV (pandas: read_html, to_csv)"
        )
    if head.removeprefix(b"\xef\xbb\xbf").strip().startswith(b"["):  # maybe all of it in one line
        return True, chain([head], iter(partial(file.read, BLOCK), b""))
    if not head.endswith(b"\n"):
        head += file.readline()
    begins = head.removeprefix(b"\xef\xbb\xbf").strip()
    continues = begins == b"{" or (".json" in path.suffixes and not begins.endswith(b"}"))
    if begins.startswith(b"{") and continues:
        return False, [b" ".join(b"".join(chain([head], file)).splitlines())]
    return False, chain([head] if head else [], file)


def _items(path: Path, parts: Iterable[bytes]) -> Iterator[Line]:
    """The objects of a list, one after the other: the list needn't fit into memory."""
    import ijson

    number = 0
    try:
        for number, value in enumerate(ijson.items(reader(iter(parts)), "item", use_float=True), 1):
            error = None if isinstance(value, dict) else f"expected a list of objects, got {value!r:.80}"
            yield Line(f"{path}:{number}", number, value if error is None else {}, error)
    except (ijson.JSONError, UnicodeDecodeError) as error:
        raise Refused(f"{path}: after {number} records: expected a list of JSON objects: {error}") from None


def _table(path: Path, file: BinaryIO) -> Iterator[Line]:
    """CSV, or TSV: the first row has the names of the columns, and tells what is between them."""
    text = io.TextIOWrapper(file, encoding_of(path), newline="")
    number = 0
    try:
        head = text.readline()
        delimiter = "\t" if ".tsv" in path.suffixes else max(DELIMITERS, key=head.count)
        if said := SEPARATOR.fullmatch(head):
            delimiter, head = said[1], text.readline()
        is_plain = delimiter == "\t" and not _has_quoted_cells(path)
        rows = csv.reader(
            chain([head], text),
            delimiter=delimiter,
            quoting=csv.QUOTE_NONE if is_plain else csv.QUOTE_MINIMAL,
            strict=True,
        )
        names, first = _named(path, next(rows, []))
        for row in chain(first, rows):
            if not any(row):
                continue  # as a spreadsheet writes below its last record
            number, location = number + 1, f"{path}:{rows.line_num}"
            if len(row) == len(names):
                cells = {name: cell or None for name, cell in zip(names, row)}
                yield Line(location, number, cells, is_text=True)
            else:
                yield Line(location, number, {}, f"expected {len(names)} cells, got {len(row)}")
    except (csv.Error, UnicodeDecodeError) as error:
        raise Refused(f"{path}: after {number} records: can't be read as CSV: {error}") from None


def _has_quoted_cells(path: Path) -> bool:
    """Whether the quotes of a table with tabs are around its cells; else they belong to what is said."""
    with content(path) as (file, _):
        text = io.TextIOWrapper(file, encoding_of(path), newline="")
        try:
            for _ in csv.reader(text, delimiter="\t", strict=True):
                pass
        except csv.Error:
            return False
    return True


def _sheet(path: Path, file: BinaryIO) -> Iterator[Line]:
    """The one sheet of an Excel file that has cells, as CSV has it; of several tables the one that is `MAIN`
    times as large as any other. Of a formula it is the value that was stored with it."""
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
    sheets = [(sheet.title, _rows(path, sheet)) for sheet in book.worksheets]
    heads = [(title, *_head(rows)) for title, rows in sheets]
    filled = [head for head in heads if any(head[2])]
    tables = [head for head in filled if len(filled) == 1 or any(head[2][1:])]
    lengths = {sheet.title: (sheet.max_row or 0) * (sheet.max_column or 0) for sheet in book.worksheets}
    tables.sort(key=lambda table: -lengths[table[0]])
    sizes = [lengths[table[0]] for table in tables]
    if not sizes or (len(sizes) > 1 and sizes[0] < MAIN * sizes[1]):
        titles = ", ".join(table[0] for table in tables) or "none"
        raise Refused(f"{path}: expected one sheet with a table, got {titles}; save the one to take as CSV")
    title, rows, names, above = tables[0]
    while names and not names[-1]:
        names.pop()
    names, first = _named(path, names)
    for number, row in enumerate(chain(first, rows), 1):
        cells = [_text_of(cell) for cell in row]
        location = f"{path}:{above + number + 1 - len(first)}"
        if any(cells[len(names) :]):
            yield Line(location, number, {}, f"expected {len(names)} cells, got more in sheet {title}")
        elif any(cells):
            yield Line(location, number, dict(zip(names, cells)), is_text=True)


def _head(rows: Iterator[tuple[Any, ...]]) -> tuple[Iterator[tuple[Any, ...]], list[str], int]:
    """The rows below the names of the columns, these, and how many rows are above them: the first row with
    two or more cells, or else with one."""
    begun = list(islice(rows, ABOVE))
    begin = [[_text_of(cell) or "" for cell in row] for row in begun]
    filled = [sum(map(bool, row)) for row in begin]
    above = next((i for i, n in enumerate(filled) if n > 1), next((i for i, n in enumerate(filled) if n), 0))
    return chain(begun[above + 1 :], rows), begin[above] if begin else [], above


def _rows(path: Path, sheet: Any) -> Iterator[tuple[Any, ...]]:
    """The values of a sheet, which is read and unpacked row by row."""
    try:
        yield from sheet.iter_rows(values_only=True)
    except DAMAGED as error:
        raise Refused(f"{path}: sheet {sheet.title}: can't be read as Excel: {error}") from None


def _text_of(cell: Any) -> str | None:
    """A cell of Excel as CSV has it; None where it is empty."""
    if isinstance(cell, bool):
        return str(cell).lower()
    return None if cell is None else str(cell) or None


def _named(path: Path, first: list[str]) -> tuple[list[str], list[list[str]]]:
    """The names of the columns, and the first row where it is a record: it has a number and a sentence. Then
    they are column_1, column_2, …"""
    if any(map(NUMBER.fullmatch, first)) and any(len(cell.split()) > 2 for cell in first):
        return [f"column_{i}" for i in range(1, len(first) + 1)], [first]
    if len(set(first)) < len(first):
        raise Refused(f"{path}: expected different columns, got {', '.join(first)}")
    return first, []


DELIMITERS = (",", ";", "\t", "|")  # of the first line the most frequent one


def encoding_of(path: Path) -> str:
    """Of a table: by its first bytes, or UTF-8. Windows-1252, where it has bytes that UTF-8 can't have and
    none that it has for letters beyond ASCII: else it is damaged."""
    with content(path) as (file, _):
        decoder = getincrementaldecoder("utf-8")("surrogateescape")
        block, has_letters, has_others = file.read(BLOCK), False, False
        if block.startswith((b"\xff\xfe", b"\xfe\xff")):
            return "utf-16"
        while block:
            text = decoder.decode(block.removeprefix(b"\xef\xbb\xbf"))
            beyond = [] if text.isascii() else [c for c in set(text) if not c.isascii()]
            escaped = sum("\udc80" <= c <= "\udcff" for c in beyond)
            has_others |= escaped > 0
            has_letters |= escaped < len(beyond)
            block = file.read(BLOCK)
    return "cp1252" if has_others and not has_letters else "utf-8-sig"


def is_sheet(path: Path) -> bool:
    return path.name.endswith((".xlsx", ".xlsm"))


def is_table(path: Path) -> bool:
    """By its name; of .txt by tabs, or two of another delimiter, in its first line."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    if not name.endswith(".txt") or not path.is_file():
        return name.endswith((".csv", ".tsv"))
    with content(path) as (file, _):
        head = file.readline(BLOCK).lstrip(b"\xef\xbb\xbf\xff\xfe\0 ")
    is_split = b"\t" in head or max(head.count(b";"), head.count(b"|")) > 1
    return is_split and not head.startswith((b"{", b"["))


def fingerprint(path: str | Path) -> str:
    """SHA-256 of the content, the same whether gzipped or not; of a folder that of its files and their names.

    Raises `Refused` where it can't be read.
    """
    path = Path(path)
    if datasets.on_hub(path):
        return hashlib.sha256(datasets.revision(path).encode()).hexdigest()
    digest = hashlib.sha256()
    for file_path in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if path.is_dir() and file_path.is_dir():
            continue
        if path.is_dir():
            digest.update(f"{file_path.relative_to(path).as_posix()}\0".encode())
        with content(file_path) as (file, _):
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def columns(path: Path) -> dict[str, set[str]]:
    """The columns of each table; none for a file that isn't SQLite."""
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
    """Whether a file is a database of several tables, as stores are; one of one table is a file of records.

    SQLite itself opens it, also while it is written.
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
    """The name of a table within a statement."""
    return '"' + name.replace('"', '""') + '"'


def sqlite_rows(path: Path, statement: str) -> Iterator[dict[str, Any]]:
    """The rows of a query. The file is only read; raises `Refused` where it can't be, or is being written."""
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


# Blocks are consecutive records, as one process reads them and another one may convert them. JSON Lines stay
# bytes, and rows of Parquet stay Arrow's, until `lines` makes records of them. All else is read as records.
CHUNK = 5000  # records of a block, which are taken in one transaction; fewer where they are large:
CHUNK_BYTES = 1 << 24
Item = TypeVar("Item")


@dataclass(frozen=True)
class JsonBlock:
    """Lines of a file of JSON Lines."""

    path: str
    numbers: tuple[int, int]
    data: bytes

    def lines(self) -> Iterator[Line]:
        return lines(self.path, io.BytesIO(self.data), self.numbers[0])


@dataclass(frozen=True)
class RecordBlock:
    """Records that are read already."""

    records: list[Line]

    @property
    def numbers(self) -> tuple[int, int]:
        return self.records[0].number, self.records[-1].number

    def lines(self) -> Iterator[Line]:
        return iter(self.records)


@dataclass(frozen=True)
class ArrowBlock:
    """Rows of a Parquet file. `is_ours`: whether agro wrote it."""

    path: str
    numbers: tuple[int, int]
    batch: Any  # pyarrow.RecordBatch
    is_ours: bool

    def lines(self) -> Iterator[Line]:
        records = datasets.records(self.path, self.batch, self.is_ours)
        for number, (value, error) in enumerate(records, self.numbers[0]):
            yield Line(f"{self.path}:{number}", number, value, error)


Block = JsonBlock | RecordBlock | ArrowBlock  # with the `numbers` of its first and of its last record


def json_blocks(path: str, lines: Iterable[bytes]) -> Iterator[JsonBlock]:
    """The lines of a file in blocks of `CHUNK`, or of `CHUNK_BYTES`, so that memory doesn't grow with it."""
    first = 1
    for block in _chunks(lines, len):
        last = first + len(block) - 1
        yield JsonBlock(path, (first, last), b"".join(block))
        first = last + 1


def record_blocks(records: Iterable[Line]) -> Iterator[RecordBlock]:
    return map(RecordBlock, _chunks(records, lambda line: line.size))


def arrow_blocks(path: str, batches: Iterable[tuple[Any, bool]]) -> Iterator[ArrowBlock]:
    first = 1
    for batch, is_ours in batches:
        last = first + len(batch) - 1
        yield ArrowBlock(path, (first, last), batch, is_ours)
        first = last + 1


def _chunks(items: Iterable[Item], size_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    chunk: list[Item] = []
    size = 0
    for item in items:
        chunk.append(item)
        size += size_of(item)
        if len(chunk) == CHUNK or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
