"""Any value in any field of a record of any format: that record is refused or taken, the others are taken."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from example import Example
from test_formats import EVERY, EXAMPLES, load

from agro.errors import Refused
from agro.io.jsonlines import Line
from agro.io.record_files import record_blocks
from agro.logs import importing
from agro.logs.format_table import FORMATS
from agro.store import Store

DEEP: Any = "x"
for _ in range(3000):
    DEEP = [DEEP]
NUMBERS = (0, -1, 10**400, 1e308, float("nan"), True)
VALUES = (None, *NUMBERS, "", "\ud800", "[", [], [None], [[]], {}, {"a": None}, DEEP)
EACH = 60  # changed records of an example


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value inside of a record."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def with_value(row: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    row = copy.deepcopy(row)
    inside: Any = row
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return row


def any_values(example: Example) -> list[dict[str, Any]]:
    """Records of an example, each with another value in one place."""
    rows = [dict(row) for row in example.rows]
    cases = [(i, path, value) for i, row in enumerate(rows) for path in places(row) for value in VALUES]
    some = random.Random(example.format).sample(cases, min(EACH, len(cases)))
    return [with_value(rows[i], path, value) for i, path, value in some]


@EVERY
def test_any_value_in_a_record_does_not_end_an_import(
    example: Example, store: Store, tmp_path: Path, monkeypatch
) -> None:
    """All of the file's other records are looked at. The records come without a file: JSON has no NaN."""
    path = example.make(tmp_path / "log")
    rows = [*any_values(example), *example.rows]
    lines = [Line(f"{path}:{n}", n, dict(row)) for n, row in enumerate(rows, 1)]
    seen = []
    monkeypatch.setattr(importing, "blocks_of", lambda path, format: record_blocks(map(noted, lines)))
    monkeypatch.setattr(importing, "format_at", lambda path: FORMATS[example.format])

    def noted(line: Line) -> Line:
        seen.append(line.number)
        return line

    assert taken_or_named(store, example, path)
    assert len(seen) == len(lines)


@EVERY
def test_any_value_in_a_file_of_its_own_format(example: Example, store: Store, tmp_path: Path) -> None:
    """Written as the format's program does, as far as that can write the value."""
    if example.write is None:
        pytest.skip("JSON Lines, as above")
    for n, row in enumerate(any_values(example)[:15]):
        path = written(example, tmp_path / f"log{n}", row)
        assert taken_or_named(store, example, path)


def taken_or_named(store: Store, example: Example, path: Path) -> bool:
    """Whether records of a file are in the store, or were before, or else the refusal names the file."""
    try:
        report = load(store, example, path)
    except Refused as error:
        return str(path) in str(error)
    return report.samples + report.duplicates + report.repeated.total() > 0


def written(example: Example, folder: Path, row: dict[str, Any]) -> Path:
    """The example's file with this record before the others; as it is, where it can't be written."""
    with suppress(Exception):
        return example.make(folder, [row, *example.rows])
    return example.make(folder.with_name(f"{folder.name}-as-it-is"))


@pytest.mark.parametrize("bad", [{"key": "k", "value": {"intValue": "x"}}, {"key": "k", "value": 3}, 5])
def test_one_bad_span_among_others(bad: Any, store: Store, tmp_path: Path) -> None:
    example = next(e for e in EXAMPLES if e.format == "otlp" and "resourceSpans" in e.rows[0])
    taken = load(store, example, example.make(tmp_path / "good")).samples
    row = copy.deepcopy(dict(example.rows[0]))
    span = {"spanId": "0bad", "name": "chat", "attributes": [bad]}
    row["resourceSpans"][0]["scopeSpans"][0]["spans"].insert(0, span)
    with Store.open(tmp_path / "other.db") as other:
        report = load(other, example, example.make(tmp_path / "log", [row, *example.rows[1:]]))
    assert report.samples == taken
    assert [refusal.where.endswith("span 0bad") for refusal in report.refused] == [True]
