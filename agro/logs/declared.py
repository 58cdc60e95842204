"""Formats as declarations: a TOML table beside the functions that read them, or a TOML file alone.

`Columns` says for such a function where in a record the fields of its response are. A place is a path as in
`--map`: the name of a column, or a JMESPath expression.

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
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn, get_args

import jmespath
from jmespath.exceptions import JMESPathError
from jmespath.functions import Functions, signature
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agro.errors import Refused
from agro.io.json_values import entry, omit, syntax_problem, text, value_at
from agro.logs.exchanges import identified, joined_key
from agro.logs.fields import digest, exchange, integer, number, rated_pair, scores, split, total, unlisted
from agro.logs.labels import number_in
from agro.logs.mapping import CellInterpreter, check_map, expand, heads
from agro.logs.protocol import Carried, Context, Format, Item, Kind, Row, SkipRecord
from agro.rollout.prompts import PROMPT_FORMATS

FUNCTIONS = ("read", "fits", "opens", "records", "gather", "identity", "scored")
REFERENCE = re.compile(r"\w+:[\w.]+")


def formats_of(package: str) -> tuple[Format, ...]:
    """The formats of a package's `formats.toml`, in its order: the fields of `Format`, whose functions are
    `module:NAME` of the package, or those of `DECLARED` of a module, by the format's name.

    Instead of a function there may be JMESPath expressions, with `has(x, 'a b|c')`, whether x is an object
    with a, and with b or c, and `begins(x, 'text')`: `fits` of a record; `ids`, whose values tell a response
    (see `identified`), or `ignored`, the columns that don't; `joined_by`, the parts of an id; `list`, the
    rows that a line lists. A record has all `columns`, of "a|b" one, none of `without`, and with `only` no
    others. A format without `read` can't be imported, and `unreadable` says why.
    """
    folder, declared = Path(str(import_module(package).__file__)).parent, dict[str, dict[str, Any]]()
    for module in pkgutil.iter_modules([str(folder)]):
        declared |= getattr(import_module(f"{package}.{module.name}"), "DECLARED", {})
    table = tomllib.loads((folder / "formats.toml").read_text(encoding="utf-8"))
    return tuple(_format(package, name, table[name], declared.get(name, {})) for name in table)


def _format(
    package: str, name: str, values: dict[str, Any], declared: Mapping[str, Callable[..., Any]]
) -> Format:
    reason, prompts = values.pop("unreadable", ""), PROMPT_FORMATS.get(name)

    def refuse(row: Row, context: Context) -> NoReturn:
        raise Refused(reason)

    functions: dict[str, Any] = {"read": refuse, **declared}
    if prompts is not None:
        functions["fits"], reads = prompts
        functions["read"] = lambda row, context: [Item.of(reads(row), "prompt")]
    for key, value in list(values.items()):
        if key in FUNCTIONS and isinstance(value, str) and REFERENCE.fullmatch(value):
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


class _Functions(Functions):  # type: ignore[misc]
    @signature({"types": []}, {"types": ["string"]})  # type: ignore[untyped-decorator]
    def _func_has(self, value: Any, names: str) -> bool:
        choices = (set(name.split("|")) for name in names.split())
        return isinstance(value, dict) and not any(value.keys().isdisjoint(choice) for choice in choices)

    @signature({"types": []}, {"types": ["string"]})  # type: ignore[untyped-decorator]
    def _func_begins(self, value: Any, prefix: str) -> bool:
        return isinstance(value, str) and value.startswith(prefix)


OPTIONS = jmespath.Options(custom_functions=_Functions())
_compile = cache(jmespath.compile)


def evaluated(row: Any, expression: str) -> Any:
    """The value at an expression of a declaration; None without one."""
    try:
        return _compile(expression).search(row, OPTIONS) if expression else None
    except JMESPathError as error:
        raise Refused(f"{expression}: {error}") from None


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
            items = read(record, context)
            found += [item._replace(names=tuple(map(part.column, item.names))) for item in items]
        return found


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


Parser = Callable[[Any, str], Any]  # of the value at a path, whose name is for messages


@dataclass(frozen=True)
class Columns:
    """One response."""

    prompt: str
    response: str | tuple[str, ...]  # of several the first that a record has
    model: str = ""
    answer: str = ""
    role: str = ""
    reward: str = ""  # a number
    rewards: str = ""  # numbers by name; --reward says which of several count
    judge: Callable[[Row, Context], float | None] | None = None  # the reward, of other columns
    meta: Mapping[str, str] = field(default_factory=dict)  # by names in `meta`
    integers: tuple[str, ...] = ()  # columns of `meta`
    dropped: Collection[str] = ()  # columns that aren't for `meta`
    parse: Parser = text  # what is at `prompt`
    compose: Callable[[Row], Any] | None = None  # the prompt, where several columns make it
    messages: bool = False  # whether prompt and response may be messages, as `exchange` reads them

    def fits(self, row: Row) -> bool:
        paths = (self.prompt, self._response(row))
        return all(path in row or value_at(row, path)[0] for path in paths)

    def read(self, row: Row, context: Context) -> list[Item]:
        return [Item.of(self.record(row, context), self._response(row))]

    def record(self, row: Row, context: Context) -> dict[str, Any]:
        name = self._response(row)
        names, response = (self.prompt, name), at(row, name)
        prompt = at(row, self.prompt) if self.compose is None else self.compose(row)
        if self.compose is not None:
            record = _after(prompt, response, names)
        elif self.messages:
            record = exchange(prompt, response, names)
        else:
            record = {"prompt": self.parse(prompt, self.prompt), "response": text(response, name)}
        record |= {
            key: at(row, path) for key, path in (("model", self.model), ("answer", self.answer)) if path
        }
        if self.role:
            record["role"] = self.role
        rewards = entry(at(row, self.rewards), self.rewards)
        if self.judge is not None:
            record["reward"] = self.judge(row, context)
        elif self.rewards:
            record["reward"] = total(rewards, list(rewards), context.rewards)
        elif self.reward:
            if self.reward not in row and not value_at(row, self.reward)[0]:
                raise Refused(
                    f"{self.reward}: expected a number, or null where it is unknown, got no such column"
                )
            record["reward"] = number(at(row, self.reward), self.reward)
        meta = record.get("meta", {}) | omit(row, self._columns | heads([name])) | named(row, self.meta)
        meta |= {column: integer(at(row, column), column) for column in self.integers}
        return record | {"meta": meta | ({"rewards": rewards} if len(rewards) > 1 else {})}

    def _response(self, row: Row) -> str:
        if isinstance(self.response, str):
            return self.response
        return next((name for name in self.response if name in row), self.response[0])

    @cached_property
    def _columns(self) -> set[str]:
        """The columns that aren't for `meta`, beside the response."""
        paths = (self.prompt, self.model, self.answer, self.reward, self.rewards)
        return heads((*paths, *self.meta.values())) | set(self.dropped)


def last_turns(
    messages: list[dict[str, Any]], name: str, meta: Mapping[str, Any], **fields: Any
) -> list[Item]:
    """One response called `name`: the last turns of a conversation."""
    record = split({"messages": messages})
    record["meta"] |= meta
    return [Item.of(record | fields, name)]


def pair_after(
    prompt: Any, sides: Mapping[str, Any], row: Row, dropped: Collection[str], name: str = "prompt"
) -> list[Item]:
    """A better and a worse response, by their columns, to a prompt called `name`, with the scores of the row.

    `dropped`: columns that aren't for `meta`, beside these.
    """
    chosen, rejected = (_after(prompt, response, (name, side)) for side, response in sides.items())
    return preference(chosen, rejected, row, (*sides, *dropped))


def preference(
    chosen: dict[str, Any], rejected: dict[str, Any], row: Row, columns: Collection[str]
) -> list[Item]:
    """The pair of two records, with the scores of the row, and in `meta` what isn't in `columns`."""
    meta = omit(row, {*columns, *scores(row)})
    for record in (chosen, rejected):
        record["meta"] = record.get("meta", {}) | meta
    return rated_pair(chosen, rejected, row)


def at(row: Row, path: str) -> Any:
    """The value at a path; None where there is none."""
    if path in row:
        return row[path]
    return value_at(row, path)[1] if path else None


def _after(prompt: Any, response: Any, names: tuple[str, str]) -> dict[str, Any]:
    """A composed prompt and the response: after text there is text."""
    if isinstance(prompt, str):
        response = text(response, names[1])
    return exchange(prompt, response, names)


def named(row: Row, paths: Mapping[str, str], side: str = "") -> dict[str, Any]:
    """The values at these paths, by their names; without unknown ones."""
    return omit({name: at(row, path.replace("{}", side)) for name, path in paths.items()}, ())
