"""All formats (agro's, those of installed packages, and the user's own), and the recognition of records.

A format is a Python object or a TOML table. A user's file (`--format FILE.toml`, or the `Path` of a package's
entry point) declares once what `--map` would say at each import, and which records to leave out or refuse.
Everything except `map` is optional::

    title = "Helicone: logged requests"
    kind = "samples"
    columns = ["request_body", "response_body"]      # by which a package's format is recognized

    [map]                                            # FIELD = COLUMN or JMESPath, as in --map
    prompt = "request_body.messages"
    response = "response_body.choices[0].message.content"
    reward = "scores.helpfulness"

    [skip]                                           # records that are left out, and why
    "request_path != '/v1/chat/completions'" = "requests other than chat completions"

    [refuse]                                         # records that are refused, and why
    "response_status != `200`" = "the request failed"

A file without `map` has one table per format of a package: the fields of `Format`, with functions as
`module:NAME` of the package, or as JMESPath expressions: `fits`, a condition on a record; `ids`, whose values
identify a response (see `identified`), or `ignored`, the columns that don't; `joined_by`, the parts of an id;
`list`, the rows of a line. Expressions may call `has(x, 'a b|c')` (x is an object with a, and with b or c)
and `begins(x, 'text')`. A record has all `columns` ("a|b": a or b), none of `without`, and with `only` no
others. A format without `read` holds prompts, which runs read, or can't be imported: `unreadable` says why.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agro.errors import Refused
from agro.io import plugins
from agro.io.json_values import syntax_problem, value_at
from agro.io.jsonlines import Line
from agro.io.peers import did_you_mean
from agro.io.record_files import Block, on_hub, read_blocks, read_records, record_blocks
from agro.logs.exchanges import joined_key
from agro.logs.mapping import CellInterpreter, check_expressions, check_map, evaluated, expand
from agro.logs.protocol import Carried, Context, Format, Item, Kind, Row, SkipRecord
from agro.logs.records import unlisted
from agro.logs.values import digest, identified, number_in
from agro.rollout.prompts import PROMPT_FORMATS

FUNCTIONS = ("read", "fits", "opens", "records", "gather", "identity", "scored")
REFERENCE = re.compile(r"\w+:[\w.]+")


def _package_format(package: str, name: str, values: dict[str, Any]) -> Format:
    """The format that a table of a package's file declares."""
    reason = values.pop("unreadable", "")

    def refuse(row: Row, context: Context) -> NoReturn:
        raise Refused(reason)

    functions: dict[str, Any] = {"read": refuse}
    if name in PROMPT_FORMATS:
        functions["fits"] = PROMPT_FORMATS[name].fits
    for key in FUNCTIONS:
        if REFERENCE.fullmatch(values.get(key, "")):
            module, attribute = values.pop(key).split(":")
            functions[key] = attrgetter(attribute)(import_module(f"{package}.{module}"))
    columns = [names.split("|") for names in values.pop("columns", ())]
    without, only, fits = (values.pop(key, None) for key in ("without", "only", "fits"))
    judge = functions.get("fits")
    functions["fits"] = lambda row: (
        all(not row.keys().isdisjoint(names) for names in columns)
        and row.keys().isdisjoint(without or ())
        and (only is None or row.keys() <= set(only))
        and (fits is None or bool(evaluated(row, fits)))
        and (judge is None or judge(row))
    )
    if ids := values.pop("ids", None):
        functions["identity"] = lambda row: identified(row, *(evaluated(row, each) for each in ids))
    if ignored := values.pop("ignored", None):
        functions["identity"] = lambda row: digest({k: x for k, x in row.items() if k not in ignored})
    if parts := values.pop("joined_by", None):
        functions["joined_by"] = lambda row: joined_key(*(evaluated(row, each) for each in parts))
    if rows := values.pop("list", None):
        functions["gather"] = lambda lines: unlisted(lines, lambda row: evaluated(row, rows))
    tuples: dict[str, Any] = {key: tuple(values.pop(key, ())) for key in ("carries", "over")}
    return Format(name, written_by=values.pop("by"), **tuples, **values, **functions)


class Declaration(BaseModel):
    """A format as a user's TOML file declares it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str | None = None
    kind: Kind = "samples"
    by: str = "this file"
    columns: tuple[str, ...] = ()
    carries: tuple[Carried, ...] = ()
    over: tuple[str, ...] = ()
    map: dict[str, str] = Field(min_length=1)
    skip: dict[str, str] = {}
    refuse: dict[str, str] = {}

    def fits(self, row: Row) -> bool:
        return bool(self.columns) and row.keys() >= set(self.columns)

    def read(self, row: Row, context: Context) -> list[Item]:
        for condition, reason in self.skip.items():
            if value_at(row, condition, CellInterpreter)[1]:
                raise SkipRecord(reason)
        for condition, reason in self.refuse.items():
            if value_at(row, condition, CellInterpreter)[1]:
                raise Refused(f"{reason} ({condition})")
        items: list[Item] = []
        for part in expand(row, self.map):
            if part.problem:
                raise Refused(part.problem)
            record = part.record | {k: number_in(v) for k, v in part.record.items() if k == "reward"}
            format = _one([f for f in map(get, OWN) if f.fits(record)], "the record")
            if format is None or format.kind == "prompts":
                got = ", ".join(record) or "nothing"
                raise Refused(f"[map]: expected response, messages, or chosen and rejected, got {got}")
            part_items = format.read(record, context)
            items += [item._replace(names=tuple(map(part.column, item.names))) for item in part_items]
        return items


def _declared_formats(file: Path, name: str, package: str = "") -> Iterator[Format]:
    """The format that a user's TOML file declares, or those that a package's file does.

    Raises `Refused` for a file that breaks the rules at the top of this module.
    """
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        if package and all(isinstance(values, dict) for values in table.values()) and "map" not in table:
            yield from (_package_format(package, key, values) for key, values in table.items())
            return
        declared = Declaration.model_validate(table)
    except OSError as error:
        raise Refused(f"--format {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Refused(f"--format {file}: expected TOML: {error}") from None
    except ValidationError as error:
        detail = error.errors()[0]
        key = ".".join(map(str, detail["loc"]))
        raise Refused(
            f"--format {file}: {key}: {detail['msg']}; expected {', '.join(Declaration.model_fields)}, of "
            f"which kind is one of {', '.join(get_args(Kind))}"
        ) from None
    check_map(declared.map, f"--format {file}: [map]: ")
    check_expressions(declared.map, f"--format {file}: [map]: ")
    for condition in (*declared.skip, *declared.refuse):
        if problem := syntax_problem(condition):
            raise Refused(f"--format {file}: {condition}: expected a JMESPath expression: {problem}")
    yield Format(
        name,
        declared.title or file.stem,
        declared.kind,
        declared.by,
        declared.fits,
        declared.read,
        declared.carries,
        declared.over,
    )


def _installed() -> Iterator[Format]:
    """The formats of entry points. Each is a `Format`, the `Path` of a TOML file, or a tuple of these."""
    for name, module in plugins.installed("formats").items():
        part = plugins.load("formats", name, f"format {name} of an installed package")
        for one in [part] if isinstance(part, Format | Path) else part if isinstance(part, tuple) else [None]:
            if isinstance(one, Path):
                yield from _declared_formats(one, one.stem, module.partition(":")[0])
            elif isinstance(one, Format):
                yield one
            else:
                raise Refused(
                    f"format {name} of an installed package: expected a Format, the Path of a TOML file, or "
                    f"a tuple of these, got {part!r:.80}. What to do: mend that package, or uninstall it"
                )


def _indexed(formats: Iterable[Format]) -> dict[str, Format]:
    table: dict[str, Format] = {}
    for format in formats:
        if table.setdefault(format.name, format) is not format:
            raise Refused(
                f"two formats are called {format.name}: {table[format.name].title}, and {format.title}, of "
                "an installed package. What to do: uninstall that, or give its format another name"
            )
    return table


def _one(candidates: Sequence[Format], subject: str) -> Format | None:
    less = {name for format in candidates for name in format.over}
    remaining = [format for format in candidates if format.name not in less]
    if len(remaining) > 1:
        names = " and ".join(format.name for format in remaining)
        raise Refused(f"{subject} may be of the formats {names}; say which with --format {remaining[0].name}")
    return remaining[0] if remaining else None


OWN = ("interchange", "preference", "conversation", "prompt")  # the formats with agro's own column names
_TABLE = Path(__file__).with_name("formats.toml")
FORMATS = _indexed((*_declared_formats(_TABLE, "agro", "agro.logs"), *_installed()))


def get(name: str) -> Format:
    """The format of this name, or at FILE.toml, FILE.py:NAME or module:NAME.

    Raises `Refused` for an unknown name.
    """
    if name in FORMATS:
        return FORMATS[name]
    if name.endswith(".toml"):
        return next(_declared_formats(Path(name), name))
    if plugins.is_reference(name):
        part = plugins.load("formats", name, "--format")
        if isinstance(part, Format):
            return replace(part, name=name)  # by which other processes find it
        raise Refused(f"--format {name}: expected a Format (agro.logs.protocol), got {part!r:.80}")
    hint = did_you_mean(name, FORMATS) or f"the formats are {', '.join(FORMATS)}."
    raise Refused(f"--format {name}: unknown; {hint} One of your own is FILE.toml or FILE.py:NAME")


def format_at(path: Path) -> Format | None:
    """The format of a file or folder that isn't a file of plain records; None for one that is."""
    return _one([f for f in FORMATS.values() if f.opens(path)], str(path))


def lines_of(path: Path, format: Format | None) -> Iterator[Line]:
    if format is not None and format.records is not None:
        return format.records(path)
    lines = read_records(path)
    return lines if format is None or format.gather is None else format.gather(lines)


def blocks_of(path: Path, format: Format | None) -> Iterator[Block]:
    """The records of `lines_of` in blocks, which other processes can parse."""
    if format is None or (format.records is None and format.gather is None):
        return read_blocks(path)
    return record_blocks(lines_of(path, format))


def joined(path: Path) -> dict[str, Row]:
    """The records of the second file of a format that is split over two, by their id.

    Raises `Refused` for a record of no such format, and for a repeated id.
    """
    records: dict[str, Row] = {}
    for line in read_records(path):
        ids = [f.joined_by(line.value) for f in FORMATS.values() if f.joined_by and f.fits(line.value)]
        if line.error or not ids:
            raise Refused(f"{line.where}: {line.error or 'expected a record that others are joined with'}")
        if ids[0] in records:
            raise Refused(f"{line.where}: the id {ids[0]} is repeated; keep one of the records")
        records[ids[0]] = line.value
    return records


class Recognizer:
    """Recognizes the format of each record. Records with the same keys have the same format.

    `named`: the format of all records. `mapped`: their columns already have agro's names.
    """

    def __init__(self, named: str | None, *, mapped: bool = False) -> None:
        self._named = get(named) if named is not None else None
        self._among = tuple(map(get, OWN) if mapped else FORMATS.values())
        self.formats: dict[tuple[str, ...], str | None] = {}  # the format's name by a record's keys

    def recognize_file(self, path: Path) -> Format | None:
        """The format of a file without plain records, or whose records span several lines; else None."""
        if format := format_at(path):
            return format
        if not (path.is_file() or on_hub(path) or (path / "state.json").is_file()):
            return None
        if self._named is not None:
            return self._named if self._named.gather else None
        line = next(read_records(path), None)
        if line is None or line.error:
            return None
        return _one([f for f in self._among if f.gather and f.fits(line.value)], str(path))

    def recognize_first(self, path: Path) -> Format | None:
        """The format of a file by its path or its first record; None if neither decides."""
        format = format_at(path)
        line = next(read_records(path), None) if format is None else None
        return format if line is None or line.error else self.recognize(line.value)

    def recognize(self, row: Row) -> Format | None:
        if self._named is not None:
            return self._named
        keys = tuple(row)
        if keys not in self.formats:
            format = _one([f for f in self._among if f.fits(row)], "the record")
            self.formats[keys] = None if format is None else format.name
        name = self.formats[keys]
        return None if name is None else get(name)
