"""All formats, and which of them a record is of: agro's, those of installed packages, and the user's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from agro.errors import Refused
from agro.io import plugins
from agro.io.jsonlines import Line
from agro.io.peers import nearest
from agro.io.record_files import Block, read_blocks, read_records, record_blocks
from agro.logs.declared import format_of, formats_of
from agro.logs.protocol import Context, Format, Item, Row


def _installed() -> Iterator[Format]:
    """The formats of entry points: each is a `Format`, the `Path` of a TOML file, or several of these."""
    for name in plugins.installed("formats"):
        part = plugins.load("formats", name, f"format {name} of an installed package")
        for one in [part] if isinstance(part, Format | Path) else part if isinstance(part, tuple) else [None]:
            if isinstance(one, Path):
                one = format_of(one, one.stem, _read_own)
            if not isinstance(one, Format):
                raise Refused(
                    f"format {name} of an installed package: expected a Format, the Path of a TOML file, or "
                    f"a tuple of these, got {part!r:.80}. What to do: mend that package, or uninstall it"
                )
            yield one


def _by_name(formats: Iterable[Format]) -> dict[str, Format]:
    table: dict[str, Format] = {}
    for format in formats:
        if table.setdefault(format.name, format) is not format:
            raise Refused(
                f"two formats are called {format.name}: {table[format.name].title}, and {format.title}, of "
                "an installed package. What to do: uninstall that, or give its format another name"
            )
    return table


def _read_own(row: Row, context: Context) -> list[Item]:
    """The responses of a record of agro's own columns."""
    format = _one([f for f in map(get, OWN) if f.fits(row)], "the record")
    if format is None or format.kind == "prompts":
        raise Refused(
            f"[map]: expected response, messages, or chosen and rejected, got {', '.join(row) or 'nothing'}"
        )
    return format.read(row, context)


def _one(candidates: Sequence[Format], subject: str) -> Format | None:
    less = {name for format in candidates for name in format.over}
    remaining = [format for format in candidates if format.name not in less]
    if len(remaining) > 1:
        names = " and ".join(format.name for format in remaining)
        raise Refused(f"{subject} may be of the formats {names}; say which with --format {remaining[0].name}")
    return remaining[0] if remaining else None


OWN = ("interchange", "preference", "conversation", "prompt")  # of agro's own columns
FORMATS = _by_name((*formats_of("agro.logs.formats"), *_installed()))


def get(name: str) -> Format:
    """The format of that name, which may also be FILE.toml, FILE.py:NAME or module:NAME.

    Raises `Refused` for another one.
    """
    if name in FORMATS:
        return FORMATS[name]
    if name.endswith(".toml"):
        return format_of(Path(name), name, _read_own)
    if plugins.is_reference(name):
        part = plugins.load("formats", name, "--format")
        if isinstance(part, Format):
            return replace(part, name=name)  # by which other processes find it
        raise Refused(f"--format {name}: expected a Format (agro.logs.protocol), got {part!r:.80}")
    near = nearest(name, FORMATS)
    hint = f"did you mean {near}?" if near else f"the formats are {', '.join(FORMATS)}"
    raise Refused(f"--format {name}: unknown; {hint}. One of your own is FILE.toml or FILE.py:NAME")


def format_at(path: Path) -> Format | None:
    """The format of a file or folder that holds no plain records; None for one that does."""
    return _one([f for f in FORMATS.values() if f.opens(path)], str(path))


def lines_of(path: Path, format: Format | None) -> Iterator[Line]:
    if format is not None and format.records is not None:
        return format.records(path)
    lines = read_records(path)
    return lines if format is None or format.gather is None else format.gather(lines)


def blocks_of(path: Path, format: Format | None) -> Iterator[Block]:
    """The records of `lines_of` in blocks, from which other processes can make them."""
    if format is None or (format.records is None and format.gather is None):
        return read_blocks(path)
    return record_blocks(lines_of(path, format))


def joined(path: Path) -> dict[str, Row]:
    """The records of the second file of a format that is split over two, by their id.

    Raises `Refused` for a record of no such format, and for an id that is there twice.
    """
    records: dict[str, Row] = {}
    for line in read_records(path):
        ids = [f.joined_by(line.value) for f in FORMATS.values() if f.joined_by and f.fits(line.value)]
        if line.error or not ids:
            raise Refused(f"{line.where}: {line.error or 'expected a record that others are joined with'}")
        if ids[0] in records:
            raise Refused(f"{line.where}: the id {ids[0]} is there twice; keep one of the records")
        records[ids[0]] = line.value
    return records


class Recognizer:
    """The format of one record after another. Those with the same keys are of the same one.

    `named`: the format that all are of. `mapped`: their columns have agro's names already.
    """

    def __init__(self, named: str | None, *, mapped: bool = False) -> None:
        self._named = get(named) if named is not None else None
        self._among = tuple(map(get, OWN) if mapped else FORMATS.values())
        self.known: dict[tuple[str, ...], str | None] = {}  # the format's name, by the keys of a record

    def recognize_file(self, path: Path) -> Format | None:
        """The format of a file whose records stand on several lines; None of others."""
        if not path.is_file():
            return None
        if self._named is not None:
            return self._named if self._named.gather else None
        line = next(read_records(path), None)
        if line is None or line.error:
            return None
        return _one([f for f in self._among if f.gather and f.fits(line.value)], str(path))

    def recognize(self, row: Row) -> Format | None:
        if self._named is not None:
            return self._named
        keys = tuple(row)
        if keys not in self.known:
            format = _one([f for f in self._among if f.fits(row)], "the record")
            self.known[keys] = None if format is None else format.name
        name = self.known[keys]
        return None if name is None else get(name)
