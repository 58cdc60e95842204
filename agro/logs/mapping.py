"""Map foreign columns to fields of the interchange record: `--map FIELD=COLUMN`.

COLUMN is the name of a column or a JMESPath expression (`output.text`, `choices[0].message.content`). A `*`
in it stands for every item of a list, or for every key of an object: the same key in all fields, and it names
the source. A list of responses gives one record per response, with the matching items of the other lists.
`Columns` does the same for the columns of a known format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import jmespath
from jmespath.exceptions import JMESPathError
from jmespath.functions import Functions, signature
from jmespath.visitor import TreeInterpreter

from agro.errors import Refused
from agro.io.json_values import (
    are_messages,
    compiled,
    entry,
    is_unknown,
    omit,
    problem_of,
    text,
    unpacked,
    value_at,
)
from agro.io.peers import did_you_mean
from agro.logs.interchange import FIELDS, PREFERENCE
from agro.logs.protocol import Context, Item, Row
from agro.logs.records import Record, exchange
from agro.logs.values import integer, list_of_length, number, total

OPTIONAL = ("reward", "votes_chosen", "votes_rejected")  # unknown in a record without the column
MAPPABLE = (*FIELDS, *PREFERENCE, "messages")
_COMMON = ("answer", "meta", "sampling", "tools")  # a list in these belongs to every response


def parse_map(items: Iterable[str]) -> dict[str, str]:
    """Parse `FIELD=COLUMN` texts. Raises `Refused` for other texts and unknown fields."""
    mapping: dict[str, str] = {}
    for item in items:
        name, equals, column = (part.strip() for part in item.partition("="))
        if not (name and equals and column):
            raise Refused(f"--map {item}: expected FIELD=COLUMN, such as prompt=question")
        if name in mapping:
            raise Refused(
                f"--map {item}: {name} is mapped to {mapping[name]} already; a field has one column"
            )
        mapping[name] = column
    check_map(mapping)
    return mapping


def check_map(mapping: Mapping[str, str], prefix: str = "--map ") -> None:
    """Raise `Refused` for a field that the record doesn't have. `prefix`: the beginning of the message."""
    for name, column in mapping.items():
        if name not in MAPPABLE and not (name.startswith("meta.") and name != "meta."):
            hint = did_you_mean(name, MAPPABLE) or f"the fields are {', '.join(MAPPABLE)}"
            raise Refused(
                f"{prefix}{name}={column}: the record has no field {name}; {hint} (meta.{name} keeps the "
                "column under its own name)"
            )


def check_expressions(mapping: Mapping[str, str], prefix: str, names: Collection[str] = ()) -> None:
    """Raise `Refused` for a column that is neither one of `names` nor a JMESPath expression."""
    for name, column in mapping.items():
        problems = filter(None, (problem_of(part) for part in _parse(column) if part))
        if column not in names and (problem := next(problems, "")):
            raise Refused(
                f"{prefix}{name}={column}: expected a column or a JMESPath expression: {problem}. A column "
                f"of that name is written in quotes, {json.dumps(column, ensure_ascii=False)}"
            )


class Part(NamedTuple):
    """One record of a row. `columns`: the row's columns by field, for fields that have another name there."""

    record: dict[str, Any]
    columns: Mapping[str, str] = MappingProxyType({})
    problem: str = ""  # why this record is refused

    def column(self, name: str) -> str:
        return self.columns.get(name, name)


def unmapped(row: Mapping[str, Any], mapping: Mapping[str, str]) -> list[str]:
    """The columns of a row that a mapping doesn't use; none without a mapping."""
    if not mapping:
        return []
    used = heads(mapping.values()) | set(mapping.values())
    for column in mapping.values():
        if _parse(column)[0] == "":  # a wildcard for columns
            used |= {key for key in _matches(row, column) if isinstance(key, str)}
    return [name for name in row if name not in used and name not in MAPPABLE]


class _Match(NamedTuple):
    column: str  # where the value is, without a wildcard
    value: Any


_Matches = dict[str | int | None, _Match]  # by the key or index that the wildcard matched; None without one


def expand(row: Mapping[str, Any], mapping: Mapping[str, str]) -> list[Part]:
    """The records of one row. A list item that lacks a field is refused alone.

    Raises `Refused` for missing columns, and for lists of different lengths. A field without a mapping is
    read from the column of its name; other columns are read only if there is no mapping at all.
    """
    if not mapping:
        return [Part(dict(row))]
    fields = {name: _values(row, name, column) for name, column in mapping.items()}
    used = {*mapping, *heads(mapping.values())}
    common = {name: row[name] for name in MAPPABLE if name in row and name not in used}
    has_several = any(len(fields.get(name, ())) > 1 for name in ("response", "chosen", "messages"))
    several = next((name for name, matches in fields.items() if len(matches) > 1), "")
    if several and not has_several:
        column = mapping[several]
        raise Refused(
            f"{several}: one response has {len(fields[several])} values of {column}; "
            f"avg({column.replace('[*]', '[]')}) is the mean of numbers"
        )
    keys = dict.fromkeys(key for matches in fields.values() for key in matches if key is not None)
    parts = []
    for key in keys or (None,):
        record, columns = dict(common), dict[str, str]()
        for name, matches in fields.items():
            match = matches.get(key) or matches.get(None)
            if match is None and name not in OPTIONAL:
                absent = mapping[name].replace("*", str(key), 1)
                parts.append(Part({}, problem=f"{name}: no column {absent}, which other fields have"))
                break
            columns[name], record[name] = match or _Match(mapping[name], None)
        else:
            if isinstance(key, str) and "source" not in mapping:
                record["source"] = key
            parts += _in_step(Part(record, columns))
    if len(parts) == 1 and parts[0].problem:
        raise Refused(parts[0].problem)
    return parts


def _values(row: Mapping[str, Any], name: str, column: str) -> _Matches:
    """The values of a field. Raises `Refused` if there are none, except for one of `OPTIONAL` without a
    wildcard, which is unknown then."""
    is_optional = name in OPTIONAL
    is_logic = compiled(_parse(column)[0]).parsed["type"] in _LOGIC
    try:
        matches = _matches(row, column, KleeneInterpreter if is_optional else CellInterpreter)
    except Refused as error:
        raise Refused(f"{name}: {error}") from None
    if not is_optional and is_logic and not any(match.value for match in matches.values()):
        matches = {}
    if matches or (is_optional and _parse(column)[1] is None):
        return matches
    used = heads([column])
    if is_logic and used <= row.keys():
        empty = " and ".join(name for name in used if is_unknown(row[name]))
        cause = f", where {empty} is empty" if empty else ""
        raise Refused(f"{name}: {column} gives nothing here{cause}")
    problem = problem_of(column)
    hint = f"as a JMESPath expression: {problem}" if problem else "an item of a list is LIST[0]"
    raise Refused(f"{name}: no column {column}; there are {', '.join(row) or 'none'} ({hint})")


def _in_step(part: Part) -> list[Part]:
    """One record per response, if the record has a list of them."""
    lead = "chosen" if "chosen" in part.record else "response"
    values, parts = part.record.get(lead), [part]
    if isinstance(values, list) and not _is_messages(lead, values):
        lists = {
            name: value
            for name, value in part.record.items()
            if isinstance(value, list)
            and name.partition(".")[0] not in _COMMON
            and not _is_messages(name, value)
        }
        n = len(values)
        for name, value in lists.items():
            list_of_length(value, part.column(name), n, f"values, as {part.column(lead)} has")
        if not n:
            raise Refused(f"{part.column(lead)}: expected at least one response, got an empty list")
        parts = []
        for i in range(n):
            record = part.record | {name: value[i] for name, value in lists.items()}
            columns = {**part.columns, **{name: f"{part.column(name)}[{i}]" for name in lists}}
            parts.append(part._replace(record=record, columns=columns))
    for each in parts:  # move the fields meta.NAME into `meta`
        named = {name: each.record.pop(name) for name in tuple(each.record) if name.startswith("meta.")}
        if named:
            meta = entry(each.record.get("meta"), "meta")
            each.record["meta"] = meta | {name.removeprefix("meta."): x for name, x in named.items()}
    return parts


def _is_messages(name: str, value: list[Any]) -> bool:
    """Whether a list is one conversation, rather than several prompts or one-turn responses."""
    if name == "prompt":
        return all(isinstance(x, dict) for x in value)
    return are_messages(value) and any(turn["role"] != "assistant" for turn in value)


# The first wildcard of an expression, outside quotes, with the dots around it.
_STAR = re.compile(r"""^((?:[^"'`*]|"[^"]*"|'[^']*'|`[^`]*`)*?)(?:(?:^|\.)\*(?=\.|$)|\[\*\])""")


@cache
def _parse(column: str) -> tuple[str, str | None]:
    """The expressions before and after a column's first wildcard; without one the expression and None."""
    star = _STAR.match(column)
    return (column, None) if star is None else (star[1], column[star.end() :].removeprefix("."))


def _matches(
    row: Mapping[str, Any], column: str, interpreter: type[TreeInterpreter] = TreeInterpreter
) -> _Matches:
    """The values at a column; empty for a missing one."""
    if column in row:
        return {None: _Match(column, row[column])}
    prefix, suffix = _parse(column)
    exists, value = value_at(row, prefix, interpreter)
    if not exists:
        return {}
    if suffix is None:
        return {None: _Match(column, value)}
    items: Iterable[tuple[str | int, Any]] = ()
    value = unpacked(value) if issubclass(interpreter, CellInterpreter) else value
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    matches: _Matches = {}
    for key, item in items:
        exists, inner = _inside(item, suffix, interpreter)
        if exists:
            path = ".".join(step for step in (prefix, str(key), suffix) if step)
            matches[key] = _Match(path, inner)
    return matches


def _inside(value: Any, expression: str, interpreter: type[TreeInterpreter]) -> tuple[bool, Any]:
    """Like `value_at`, but keeps the unknown items of a list, which JMESPath leaves out."""
    star = _STAR.match(expression)
    if star is None or not star[0].endswith("[*]"):
        return value_at(value, expression, interpreter)
    exists, items = value_at(value, star[1], interpreter)
    if not exists or not isinstance(items, list):
        return False, None
    step = expression[star.end() :].removeprefix(".")
    return True, [_inside(item, step, interpreter)[1] for item in items]


def heads(expressions: Iterable[str]) -> set[str]:
    """The columns of a record at which the paths of expressions begin."""
    return {name for expression in expressions for name in _heads(expression)}


@cache
def _heads(expression: str) -> frozenset[str]:
    columns, trees = set[str](), [compiled(_parse(expression)[0]).parsed]
    while trees:
        tree = trees.pop()
        children = [child for child in tree.get("children") or () if isinstance(child, dict)]
        if tree["type"] == "field":
            columns.add(str(tree["value"]))
        else:  # a path starts with its first child
            trees += children if tree["type"] in _SEVERAL else children[:1]
    return frozenset(columns)


@dataclass(frozen=True)
class Columns:
    """The columns of a format whose rows have one response each."""

    prompt: str
    response: str | tuple[str, ...]  # one column, or several of which the first that a record has is read
    model: str = ""
    answer: str = ""
    role: str = ""
    reward: str = ""  # a number
    rewards: str = ""  # numbers by name; --reward selects among several
    judge: Callable[[Row, Context], float | None] | None = None  # computes the reward from other columns
    meta: Mapping[str, str] = field(default_factory=dict)  # paths by their names in `meta`
    integers: tuple[str, ...] = ()  # columns of integers, for `meta`
    dropped: Collection[str] = ()  # columns to leave out of `meta`
    compose: Callable[[Row], Any] | None = None  # makes the prompt from several columns
    messages: bool = False  # whether prompt and response may be messages, as `exchange` reads them

    def fits(self, row: Row) -> bool:
        paths = (self.prompt, self._response(row))
        return all(path in row or value_at(row, path)[0] for path in paths)

    def read(self, row: Row, context: Context) -> list[Item]:
        return [Item.of(self.record(row, context), self._response(row))]

    def record(self, row: Row, context: Context) -> Record:
        name = self._response(row)
        prompt, response = at(row, self.prompt), at(row, name)
        if self.compose is not None:
            record = exchange(self.compose(row), text(response, name), (self.prompt, name))
        elif self.messages:
            record = exchange(prompt, response, (self.prompt, name))
        else:
            record = {"prompt": text(prompt, self.prompt), "response": text(response, name), "meta": {}}
        for key, path in (("model", self.model), ("answer", self.answer)):
            if path:
                record[key] = at(row, path)
        if self.role:
            record["role"] = self.role
        rewards = entry(at(row, self.rewards), self.rewards)
        if self.judge is not None:
            record["reward"] = self.judge(row, context)
        elif self.rewards:
            record["reward"] = total(rewards, list(rewards), context.rewards)
        elif self.reward:
            if self.reward not in row:
                expected = "a number, or null where it is unknown"
                raise Refused(f"{self.reward}: expected {expected}, got no such column")
            record["reward"] = number(row[self.reward], self.reward)
        paths = (self.prompt, name, self.model, self.answer, self.reward, self.rewards, *self.meta.values())
        named = {key: at(row, path) for key, path in self.meta.items()}
        record["meta"] |= omit(row, heads(paths) | set(self.dropped)) | omit(named, ())
        record["meta"] |= {column: integer(at(row, column), column) for column in self.integers}
        if len(rewards) > 1:
            record["meta"]["rewards"] = rewards
        return record

    def _response(self, row: Row) -> str:
        if isinstance(self.response, str):
            return self.response
        return next((name for name in self.response if name in row), self.response[0])


def at(row: Row, path: str) -> Any:
    """The value at a path; None for a missing one."""
    if path in row:
        return row[path]
    return value_at(row, path)[1] if path else None


# Nodes whose children all start at the same value.
_SEVERAL = (
    *("comparator", "not_expression", "and_expression", "or_expression", "function_expression"),
    *("multi_select_list", "multi_select_dict"),
)
_CONDITIONS = ("comparator", "not_expression")
_LOGIC = ("and_expression", "or_expression", *_CONDITIONS)
_TEXT_FUNCTIONS = ("contains", "starts_with", "ends_with")
_TAKE_NULL = ("not_null", "type", "to_array", "to_string", "to_number")


class CellInterpreter(TreeInterpreter):  # type: ignore[misc]  # jmespath has no types
    """JMESPath that descends into JSON text, since tables have objects as text in their cells."""

    def visit_field(self, node: Any, value: Any) -> Any:
        return super().visit_field(node, unpacked(value))

    def visit_index(self, node: Any, value: Any) -> Any:
        return super().visit_index(node, unpacked(value))

    def visit_flatten(self, node: Any, value: Any) -> Any:
        inner = unpacked(self.visit(node["children"][0], value))
        return super().visit_flatten(
            {"children": [{"type": "literal", "value": inner, "children": []}]}, value
        )


class KleeneInterpreter(CellInterpreter):
    """JMESPath in Kleene's three-valued logic, for rewards: null is unknown, which isn't false.

    A comparison with null is null, except with the literal `null`. So is !null, and `&&` and `||` are null
    unless the other operand decides. For columns, `A || B` is B if A is null; with a literal Y,
    `CONDITION && X || Y` is null if the condition is. A function of null is null. Comparing a number with
    text raises `Refused`.
    """

    def visit_comparator(self, node: Any, value: Any) -> Any:
        lhs, rhs = (self.visit(child, value) for child in node["children"])
        is_equality = node["value"] in ("eq", "ne")
        if is_equality and any(map(_is_literal_null, node["children"])):
            return self.COMPARATOR_FUNC[node["value"]](lhs, rhs)
        if lhs is None or rhs is None:
            return None
        numbers = [type(x) in (int, float) for x in (lhs, rhs)]
        texts = [isinstance(x, str) for x in (lhs, rhs)]
        if not all(numbers) and (not is_equality or (any(numbers) and any(texts))):
            raise Refused(
                f"expected two numbers to compare, got {lhs!r:.80} and {rhs!r:.80}; to_number(COLUMN) "
                "reads one that is written as text"
            )
        return self.COMPARATOR_FUNC[node["value"]](lhs, rhs)

    def visit_not_expression(self, node: Any, value: Any) -> Any:
        operand = self.visit(node["children"][0], value)
        return None if operand is None else super().visit_not_expression(node, value)

    def visit_and_expression(self, node: Any, value: Any) -> Any:
        lhs = self.visit(node["children"][0], value)
        if lhs is not None and self._is_false(lhs):
            return lhs
        rhs = self.visit(node["children"][1], value)
        decides = lhs is not None or (rhs is not None and self._is_false(rhs))
        return rhs if decides else None

    def visit_or_expression(self, node: Any, value: Any) -> Any:
        operand, alternative = node["children"]
        lhs = self.visit(operand, value)
        if self._is_true(lhs):
            return lhs
        rhs = self.visit(alternative, value)
        is_open = lhs is None and _is_condition(operand)
        decides = alternative["type"] != "literal" and not self._is_false(rhs)
        return None if is_open and not decides else rhs

    def visit_function_expression(self, node: Any, value: Any) -> Any:
        if node["value"] not in _TAKE_NULL:
            for child in node["children"]:
                if not _is_literal_null(child) and self.visit(child, value) is None:
                    return None
        return super().visit_function_expression(node, value)


def _is_literal_null(node: Mapping[str, Any]) -> bool:
    """Whether a node is `null`, also without backticks, which JMESPath takes for a column."""
    return node["type"] in ("literal", "field") and node["value"] in (None, "null")


def _is_condition(node: Mapping[str, Any]) -> bool:
    if node["type"] in ("and_expression", "or_expression"):
        return any(map(_is_condition, node["children"]))
    return node["type"] in _CONDITIONS or (
        node["type"] == "function_expression" and node["value"] in _TEXT_FUNCTIONS
    )


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
    """The value of a declaration's expression; None for an empty one."""
    try:
        return _compile(expression).search(row, OPTIONS) if expression else None
    except JMESPathError as error:
        raise Refused(f"{expression}: {error}") from None
