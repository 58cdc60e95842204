"""Formats as declarations: where in a record the fields of its responses are.

A place is a path as in `--map`: the name of a column, or a JMESPath expression.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from agro.errors import Refused
from agro.io.column_paths import value_at
from agro.io.json_values import entry, omit, text
from agro.logs.fields import exchange, integer, number, rewarded, scores, split, total
from agro.logs.mapping import heads
from agro.logs.protocol import Context, Item, Row

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
        record = self._exchange(row, name)
        for key, path in (("model", self.model), ("answer", self.answer)):
            if path:
                record[key] = at(row, path)
        if self.role:
            record["role"] = self.role
        if self.judge is not None:
            record["reward"] = self.judge(row, context)
        elif self.reward:
            if self.reward not in row and not value_at(row, self.reward)[0]:
                raise Refused(
                    f"{self.reward}: expected a number, or null where it is unknown, got no such column"
                )
            record["reward"] = number(at(row, self.reward), self.reward)
        rewards = entry(at(row, self.rewards), self.rewards)
        if self.rewards:
            record["reward"] = total(rewards, list(rewards), context.rewards)
        meta = record.get("meta", {}) | omit(row, self._columns | heads([name])) | named(row, self.meta)
        meta |= {column: integer(at(row, column), column) for column in self.integers}
        if len(rewards) > 1:
            meta["rewards"] = rewards
        return record | {"meta": meta}

    def _exchange(self, row: Row, name: str) -> dict[str, Any]:
        response = at(row, name)
        if self.compose is not None:
            return _after(self.compose(row), response, (self.prompt, name))
        prompt = at(row, self.prompt)
        if self.messages:
            return exchange(prompt, response, (self.prompt, name))
        return {"prompt": self.parse(prompt, self.prompt), "response": text(response, name)}

    def _response(self, row: Row) -> str:
        if isinstance(self.response, str):
            return self.response
        return next((name for name in self.response if name in row), self.response[0])

    @cached_property
    def _columns(self) -> set[str]:
        """The columns that aren't for `meta`, beside the response."""
        paths = (self.prompt, self.model, self.answer, self.reward, self.rewards)
        return heads((*paths, *self.meta.values())) | set(self.dropped)


@dataclass(frozen=True)
class Conversation:
    """One response: the last turns of a conversation."""

    name: str  # of the response, and the column in messages
    compose: Callable[[Row], Any]  # the messages of a record
    role: str = ""
    judge: Callable[[Row, Context], float | None] | None = None  # the reward, of other columns
    dropped: Collection[str] = ()  # columns that aren't for `meta`

    def read(self, row: Row, context: Context) -> list[Item]:
        record = split({"messages": self.compose(row)})
        record["meta"] |= omit(row, self.dropped)
        if self.role:
            record["role"] = self.role
        if self.judge is not None:
            record["reward"] = self.judge(row, context)
        return [Item.of(record, self.name)]


@dataclass(frozen=True)
class Preference:
    """A better and a worse response to a prompt of several columns, with scores where there are any."""

    prompt: str  # its name, for messages
    compose: Callable[[Row], Any]  # the prompt of a record: text or messages
    parse: Parser  # what is at a side: text or messages
    dropped: Collection[str] = ()  # columns that aren't for `meta`
    sides: tuple[tuple[str, str], ...] = (("chosen", "rejected"),)  # the first two that a record has
    details: Callable[[Row], dict[str, Any]] | None = None  # for `meta`, of what is inside a dropped column

    def columns(self, row: Row) -> tuple[str, str] | None:
        """Those of the two responses; None where there are none."""
        return next((names for names in self.sides if row.keys() >= set(names)), None)

    def read(self, row: Row, context: Context) -> list[Item]:
        names = self.columns(row) or self.sides[0]
        prompt = self.compose(row)
        chosen, rejected = (
            _after(prompt, self.parse(at(row, name), name), (self.prompt, name)) for name in names
        )
        details = {} if self.details is None else self.details(row)
        items = preference(chosen, rejected, row, (*names, *self.dropped))
        for record in items[0].records:
            record["meta"] |= details
        return items


def preference(
    chosen: dict[str, Any], rejected: dict[str, Any], row: Row, columns: Collection[str]
) -> list[Item]:
    """The pair of two records, with the scores of the row, and in `meta` what isn't in `columns`."""
    meta = omit(row, {*columns, *scores(row)})
    for record in (chosen, rejected):
        record["meta"] = record.get("meta", {}) | meta
    rewarded(chosen, rejected, row)
    return [Item.pair(chosen, rejected)]


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
