"""All formats, and which of them a record is of: agro's, those of installed packages, and the user's own.

A format is a Python object, or a table of TOML. A file of the user's own (`--format FILE.toml`, or the `Path`
that a package's entry point is) says what `--map`, and the rules for leaving out and refusing records, would
say at each import. All but `map` may be left out::

    title = "Helicone: logged requests"
    kind = "samples"
    columns = ["request_body", "response_body"]      # by which those of a package are recognized

    [map]                                            # FIELD = COLUMN or JMESPath, as in --map
    prompt = "request_body.messages"
    response = "response_body.choices[0].message.content"
    reward = "scores.helpfulness"

    [skip]                                           # records that are left out, and why
    "request_path != '/v1/chat/completions'" = "requests that aren't of a chat"

    [refuse]                                         # records that are refused, and why
    "response_status != `200`" = "the request failed"

A file without `map` has a table for each format of a package: the fields of `Format`, whose functions are
`module:NAME` of the package. Instead of a function there may be JMESPath expressions, with
`has(x, 'a b|c')`, whether x is an object with a, and with b or c, and `begins(x, 'text')`: `fits` of a
record; `ids`, whose values tell a response (see `identified`), or `ignored`, the columns that don't;
`joined_by`, the parts of an id; `list`, the rows that a line lists. A record has all `columns`, of "a|b" one,
none of `without`, and with `only` no others. A format without `read` has prompts, which runs read, or can't
be imported, and `unreadable` says why.
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


def _of_package(package: str, name: str, values: dict[str, Any]) -> Format:
    """The format of a table of a package's file."""
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
    """What a user's TOML file says of a format."""

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
        found: list[Item] = []
        for part in expand(row, self.map):
            if part.problem:
                raise Refused(part.problem)
            record = part.record | {k: number_in(v) for k, v in part.record.items() if k == "reward"}
            format = _one([f for f in map(get, OWN) if f.fits(record)], "the record")
            if format is None or format.kind == "prompts":
                got = ", ".join(record) or "nothing"
                raise Refused(f"[map]: expected response, messages, or chosen and rejected, got {got}")
            items = format.read(record, context)
            found += [item._replace(names=tuple(map(part.column, item.names))) for item in items]
        return found


def _of_file(file: Path, name: str, package: str = "") -> Iterator[Format]:
    """The format that a TOML file declares, or those of a package.

    Raises `Refused` for a file that isn't as this module says.
    """
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        if package and all(isinstance(values, dict) for values in table.values()) and "map" not in table:
            yield from (_of_package(package, key, values) for key, values in table.items())
            return
        declared = Declaration.model_validate(table)
    except OSError as error:
        raise Refused(f"--format {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Refused(f"--format {file}: expected TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Refused(
            f"--format {file}: {where}: {first['msg']}; expected {', '.join(Declaration.model_fields)}, of "
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
    """The formats of entry points: each is a `Format`, the `Path` of a TOML file, or several of these."""
    for name, module in plugins.installed("formats").items():
        part = plugins.load("formats", name, f"format {name} of an installed package")
        for one in [part] if isinstance(part, Format | Path) else part if isinstance(part, tuple) else [None]:
            if isinstance(one, Path):
                yield from _of_file(one, one.stem, module.partition(":")[0])
            elif isinstance(one, Format):
                yield one
            else:
                raise Refused(
                    f"format {name} of an installed package: expected a Format, the Path of a TOML file, or "
                    f"a tuple of these, got {part!r:.80}. What to do: mend that package, or uninstall it"
                )


def _by_name(formats: Iterable[Format]) -> dict[str, Format]:
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


OWN = ("interchange", "preference", "conversation", "prompt")  # of agro's own columns
_TABLE = Path(__file__).with_name("formats.toml")
FORMATS = _by_name((*_of_file(_TABLE, "agro", "agro.logs"), *_installed()))


def get(name: str) -> Format:
    """The format of that name, which may also be FILE.toml, FILE.py:NAME or module:NAME.

    Raises `Refused` for another one.
    """
    if name in FORMATS:
        return FORMATS[name]
    if name.endswith(".toml"):
        return next(_of_file(Path(name), name))
    if plugins.is_reference(name):
        part = plugins.load("formats", name, "--format")
        if isinstance(part, Format):
            return replace(part, name=name)  # by which other processes find it
        raise Refused(f"--format {name}: expected a Format (agro.logs.protocol), got {part!r:.80}")
    hint = did_you_mean(name, FORMATS) or f"the formats are {', '.join(FORMATS)}."
    raise Refused(f"--format {name}: unknown; {hint} One of your own is FILE.toml or FILE.py:NAME")


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
        """The format of what holds no plain records, or has them on several lines; None of others."""
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
        """The format of a file by its place or its first record; None where neither says it."""
        format = format_at(path)
        line = next(read_records(path), None) if format is None else None
        return format if line is None or line.error else self.recognize(line.value)

    def recognize(self, row: Row) -> Format | None:
        if self._named is not None:
            return self._named
        keys = tuple(row)
        if keys not in self.known:
            format = _one([f for f in self._among if f.fits(row)], "the record")
            self.known[keys] = None if format is None else format.name
        name = self.known[keys]
        return None if name is None else get(name)
