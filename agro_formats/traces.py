"""Logs of model calls as declarations, of one call a record or of a trace with its spans: `traces.toml`.

Scores are an object by name, or a list of objects with name, value, whether it is unknown, and, of a trace's,
the span that they judge.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, objects, unpacked
from agro.io.jsonlines import Line
from agro.io.strictjson import loads
from agro.logs.declared import evaluated as at
from agro.logs.fields import grouped, number, settings, unlisted
from agro.logs.model_calls import joined_scores
from agro.logs.protocol import Context, Item, Row, SkipRecord
from agro_formats import spans
from agro_formats.spans import Scores, TraceSpan

Declaration = Mapping[str, Any]
SPANS = "spans"  # the column of a record that is made of several lines
SAMPLING = ("temperature", "top_p", "top_k", "seed")  # of a call that isn't in a trace


def opened(row: Row, how: Declaration) -> Row:
    """The row with what is written as JSON in texts, in the columns that say so."""
    names, inside = how.get("unpack", ()), how.get("json")
    row = {key: unpacked(value) if key in names else value for key, value in row.items()}
    if inside in row:
        row[inside] = {key: _loaded(value) for key, value in entry(row[inside], inside).items()}
    return row


def _loaded(value: Any) -> Any:
    try:
        return loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def read(how: Declaration, row: Row, context: Context) -> list[Item]:
    """The responses of a record."""
    one = how["span"]
    record = opened(row, how)
    listed = at(record, how["spans"]) if "spans" in how else row.get(SPANS, [record])
    rows = [opened(each, one) for each in objects(listed or [], "spans")]
    rows.sort(key=lambda span: [_rank(at(span, key)) for key in how.get("order", ())])
    root = at(record, how.get("root", ""))
    rows = rows if root is None else [root, *rows]
    example = next((span for span in rows if at(span, how.get("unit", ""))), None)
    first = example or next((span for span in rows if at(span, one.get("parent", "")) is None), rows[0])
    parsed = [_span(span, f"spans[{i}]", one, context) for i, span in enumerate(rows)]
    if root is not None:
        parsed = [parsed[0], *(replace(s, parent=s.parent or parsed[0].id) for s in parsed[1:])]
    scores: Scores = {}
    if example is not None:
        inner = [span.id for span in parsed if span.parent == at(example, one["id"])]
        parsed = [replace(span, is_judge=span.id in inner[1:]) for span in parsed]
        parsed = [replace(s, parent=None) if s.id == at(example, one["id"]) else s for s in parsed]
        for name, value in _numbers("", entry(at(example, how["unit_scores"]), "scores")):
            _add(scores, name, value)
    own = {span.id: span.scores for span in parsed}
    for name, value, judged in _scores(record, how, how.get("scores", "scores")):
        _add(own.get(judged, scores) if judged else scores, name, value)
    if "joined" in how:
        scores |= joined_scores(
            context, how["joined"]["noun"], row.get("id"), columns=how["joined"]["columns"]
        )
    about = at(record, how["about"]) if "about" in how else first
    answer = at(record if "about" in how else first, how.get("answer", ""))
    return spans.read(parsed, scores, context, spans.described(about, how["drop"]), answer)


def _rank(value: Any) -> tuple[bool, Any]:
    """What values are sorted by: numbers first."""
    return not isinstance(value, int | float), value if isinstance(value, int | float) else str(value)


def _span(row: Row, name: str, how: Declaration, context: Context) -> TraceSpan:
    is_alone = "id" not in how
    for condition, reason in how.get("skip", {}).items():
        if at(row, condition):
            raise SkipRecord(reason)
    for condition, reason in how.get("refuse", {}).items():
        if found := at(row, condition):
            raise Refused(f"{'' if is_alone else f'{name}.'}{reason}: {found!r:.80}")
    request: dict[str, Any] = {}
    for expression in how["settings"]:
        given = at(row, expression)
        request |= given if isinstance(given, dict) else {}
    is_judge = bool(at(row, how.get("is_judge", "")))
    scores: Scores = {}
    for title, value, _ in () if is_judge or is_alone else _scores(row, how, f"{name}.scores"):
        _add(scores, title, value)
    return TraceSpan(
        id=name if is_alone else at(row, how["id"]),
        parent=at(row, how.get("parent", "")),
        input=_text(row, "input", how, context),
        output=_text(row, "output", how, context),
        is_call=bool(at(row, how.get("is_call", ""))),
        is_judge=is_judge,
        error=at(row, how.get("error", "")) or None,
        model=at(row, how["model"]),
        sampling=settings(request, *([SAMPLING] if is_alone else [])),
        tools=at(row, how.get("tools", "")),
        scores=scores,
        names=(how["input"], how["output"]) if is_alone else None,
    )


def _text(row: Row, key: str, how: Declaration, context: Context) -> Any:
    """What was asked or answered, which may be JSON in a text. Raises `Refused` where that is cut off."""
    value = at(row, how[key])
    if not isinstance(value, str) or not how.get("is_whole"):
        return value
    found = unpacked(value)
    if isinstance(found, str) and found.lstrip()[:2] in ('{"', "[{"):
        raise Refused(f"{key}: expected JSON, got {value!r:.80}; it may be cut off: export it anew")
    return _loaded(value) if context.is_text and value[:1] == value[-1:] == '"' else found


def _scores(row: Row, how: Declaration, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Name, value, and span that is judged, of the scores of a record or a span."""
    found, inner = at(row, how.get("scores", "")) or [], how.get("value")
    if isinstance(found, dict) and inner:
        parts = {key: entry(value, f"{name}.{key}") for key, value in found.items()}
        found = {key: number(part.get(inner), f"{name}.{key}.{inner}") for key, part in parts.items()}
    if isinstance(found, dict):
        found = [{"name": key, "value": value} for key, value in found.items()]
    for score in objects(found, name):
        title, value = str(score.get("name")), score.get("value")
        for prefix in how.get("prefixes", ()):
            title = title.removeprefix(prefix)
        if isinstance(value, dict) and how.get("are_flat"):
            yield from ((part, each, None) for part, each in _numbers(title, value))
            continue
        if isinstance(value, dict) or (isinstance(value, list) and "are_plain" in how):
            where = how.get("are_plain", name)
            raise Refused(f"{where}: expected a number, a flag or text, got {value!r:.80}")
        if isinstance(value, str):
            value = how.get("words", {}).get(value.lower(), value)
        yield title, None if score.get("is_unknown") else value, score.get("span")


def _numbers(name: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The numbers and flags in an object, named by their path."""
    for key, value in values.items():
        path = f"{name}.{key}" if name else key
        if isinstance(value, dict):
            yield from _numbers(path, value)
        elif isinstance(value, bool | int | float):
            yield path, value


def _add(scores: Scores, name: str, value: Any) -> None:
    scores.setdefault(name, []).extend(value if isinstance(value, list) else [value])


def gather(how: Declaration, lines: Iterator[Line]) -> Iterator[Line]:
    """A record a trace; of an evaluation a record an example."""
    column = how["group"].get("list")
    rows = unlisted(lines, lambda row: row.get(column)) if column else lines
    for line in grouped(rows, lambda row: str(row.get(how["group"]["by"])), SPANS):
        examples = [] if line.error or "unit" not in how else _examples(how, line.value[SPANS])
        yield from (line._replace(value={SPANS: example}) for example in examples)
        if not examples:
            yield line


def _examples(how: Declaration, rows: Sequence[Row]) -> list[list[Row]]:
    """The spans at `unit`, each with those below it."""
    parents = {at(row, how["span"]["id"]): at(row, how["span"]["parent"]) for row in rows}
    ids = list(parents)
    examples = {id: [row] for id, row in zip(ids, rows) if at(row, how["unit"])}
    for id, row in zip(ids, rows):
        ancestor, seen = parents[id], {id}
        while ancestor in parents and ancestor not in examples and ancestor not in seen:
            seen.add(ancestor)
            ancestor = parents[ancestor]
        if ancestor in examples and id not in examples:
            examples[ancestor].append(row)
    return list(examples.values())


DECLARED = {
    name: {"read": partial(read, how), **({"gather": partial(gather, how)} if "group" in how else {})}
    for name, how in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items()
}
