"""Formats as declarations: a TOML table beside the functions that read them, or a TOML file alone.

A file of the user's own (`--format FILE.toml`) says what `--map`, and the rules for leaving out and refusing
records, would say at each import; a package's is found by an entry point, whose part is the `Path` of the
file. All but `map` may be left out::

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
"""

from __future__ import annotations

import pkgutil
import tomllib
from collections.abc import Callable
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agro.errors import Refused
from agro.io.column_paths import syntax_problem, value_at
from agro.logs.labels import number_in
from agro.logs.mapping import CellInterpreter, check_map, expand
from agro.logs.protocol import Carried, Context, Format, Item, Kind, Row, SkipRecord
from agro.rollout.prompts import PROMPT_FORMATS


class Declarations:
    """The formats of a TOML table. The modules of its package declare how each is read."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._declared: dict[str, Format] = {}

    @cached_property
    def _table(self) -> dict[str, Any]:
        return tomllib.loads(self._file.read_text(encoding="utf-8"))

    def declare(
        self,
        name: str,
        read: Callable[[Row, Context], list[Item]] | None = None,
        fits: Callable[[Row], bool] | None = None,
        **functions: Callable[..., Any],
    ) -> Format:
        """The format of this name. Without `fits` a record is of it that has all `columns` of the table;
        without `read` it can't be imported, and the table says why (`unreadable`)."""
        values = {**self._table[name], **functions}
        reason = values.pop("unreadable", "")
        read = read or partial(_refuse, reason)
        columns = frozenset(values.pop("columns", ()))
        values |= {key: tuple(values.get(key, ())) for key in ("carries", "over")}
        title, kind, by = (values.pop(key) for key in ("title", "kind", "by"))
        fits = fits or (lambda row: row.keys() >= columns)
        self._declared[name] = Format(name, title, kind, by, fits, read, **values)
        return self._declared[name]

    def declare_prompts(self, name: str, **functions: Callable[..., Any]) -> Format:
        """The format of prompts of this name, which runs read as well."""
        fits, read = PROMPT_FORMATS[name]
        return self.declare(name, lambda row, context: [Item.of(read(row), "prompt")], fits, **functions)

    def of_package(self, package: str) -> tuple[Format, ...]:
        """All formats, in the order of the table, once every module of the package has declared its own."""
        for module in pkgutil.iter_modules([str(self._file.parent)]):
            import_module(f"{package}.{module.name}")
        return tuple(self._declared.get(name) or self.declare(name) for name in self._table)


def _refuse(reason: str, row: Row, context: Context) -> NoReturn:
    raise Refused(reason)


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

    def items(self, row: Row, context: Context, read: Callable[[Row, Context], list[Item]]) -> list[Item]:
        """The responses of a record. `read`: reads a record of agro's own columns."""
        for condition, reason in self.skip.items():
            if _holds(row, condition):
                raise SkipRecord(reason)
        for condition, reason in self.refuse.items():
            if _holds(row, condition):
                raise Refused(f"{reason} ({condition})")
        found: list[Item] = []
        for part in expand(row, self.map):
            if part.problem:
                raise Refused(part.problem)
            record = part.record | {k: number_in(v) for k, v in part.record.items() if k == "reward"}
            items = read(record, context)
            found += [item._replace(names=tuple(map(part.column, item.names))) for item in items]
        return found


def _holds(row: Row, condition: str) -> bool:
    _, value = value_at(row, condition, CellInterpreter)
    return bool(value)


def format_of(file: Path, name: str, read: Callable[[Row, Context], list[Item]]) -> Format:
    """The format that a TOML file declares. `read`: reads a record of agro's own columns.

    Raises `Refused` for a file that isn't as this module says.
    """
    try:
        said = Declaration.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
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
    check_map(said.map)
    for condition in (*said.skip, *said.refuse):
        if problem := syntax_problem(condition):
            raise Refused(f"--format {file}: {condition}: expected a JMESPath expression: {problem}")
    columns = frozenset(said.columns)
    return Format(
        name,
        said.title or file.stem,
        said.kind,
        said.by,
        lambda row: bool(columns) and row.keys() >= columns,
        lambda row, context: said.items(row, context, read),
        said.carries,
        said.over,
    )
