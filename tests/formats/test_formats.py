"""Every format by its examples: what the store has after an import, and what is refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from example import FOLDER, Example, changed, examples_of
from pyarrow import parquet
from writers import json_lines

from agro.errors import Refused
from agro.logs.format_table import FORMATS, Recognizer
from agro.logs.importing import ImportReport, import_files
from agro.rollout.prompts import PROMPT_FORMATS
from agro.store import Store

ALL = [example for path in sorted(FOLDER.glob("*.json")) for example in examples_of(path.stem)]
EXAMPLES = [example for example in ALL if not example.error]
REFUSED = [example for example in ALL if example.error]


def each(examples: list[Example]) -> Any:
    return pytest.mark.parametrize("example", examples, ids=[example.name for example in examples])


EVERY = each([example for example in EXAMPLES if not example.is_case])
CORRUPT = [(e, key) for e in EXAMPLES for key in e.corrupt]


def load(store: Store, example: Example, path: Path) -> ImportReport:
    how = dict(example.options)
    if "join" in how:
        how["join"] = path.parent / how["join"]
    return import_files(store, [path], **how)


def shown(sample: Any, like: Any) -> dict[str, Any]:
    """The fields of a sample that an example names, as JSON has them."""
    found = dict[str, Any]()
    for name in like:
        field, _, inside = name.partition(".")
        value = getattr(sample, field)
        if hasattr(value, "tolist"):
            value = [None if x != x else round(x, 6) for x in value.tolist()]
        found[name] = value.get(inside) if inside else value
    return found


def test_every_format_has_an_example() -> None:
    readable = {name for name, format in FORMATS.items() if format.kind not in ("prompts", "nothing")}
    assert readable == {example.format for example in EXAMPLES}
    assert all(example.samples is not None for example in EXAMPLES if not example.is_case)
    unread = {name for name, format in FORMATS.items() if format.kind == "nothing"}
    in_files = {example.format for example in REFUSED} - readable
    # test_trainers_logs.py makes a pickle; it can't stand in a JSON file.
    assert unread == in_files | {"pickle"}


@each(ALL)
def test_no_other_format_fits_an_example(example: Example) -> None:
    """The first record says what a file is, unless its path does."""
    if FORMATS[example.format].records is not None or "format" in example.options:
        pytest.skip("it is recognized by its path, or named")
    format = Recognizer(None).recognize(example.rows[0])
    assert format is not None
    assert format.name == example.format


@each(EXAMPLES)
def test_the_store_has_what_the_example_holds(example: Example, store: Store, tmp_path: Path) -> None:
    report = load(store, example, example.make(tmp_path / "log"))
    assert example.format in report.recognized
    assert len(report.refused) == len(example.refused)
    for refusal, said in zip(report.refused, example.refused):
        assert re.search(said, refusal.reason)
    assert report.left_out == example.left_out
    left_out = [f"left out: {count} records: {rule}" for rule, count in example.left_out.items()]
    assert all(each in str(report) for each in (*left_out, *example.reported))
    samples = list(store.samples())
    if example.samples is not None:
        assert [shown(*both) for both in zip(samples, example.samples, strict=True)] == example.samples
    place = {sample.id: i for i, sample in enumerate(samples)}
    for pair, expected in zip(store.pairs(), example.pairs, strict=True):
        found = [place[pair.winner], place[pair.loser], pair.votes_winner, pair.votes_loser]
        assert found[: len(expected)] == expected
    if example.groups:
        assert len(store.groups()) == example.groups


@EVERY
def test_the_order_of_columns_says_nothing(example: Example, store: Store, tmp_path: Path) -> None:
    turned = [dict(reversed(row.items())) for row in example.rows]
    load(store, example, example.make(tmp_path / "log", turned))
    samples = [shown(*both) for both in zip(store.samples(), example.samples, strict=True)]
    assert samples == example.samples


@each(REFUSED)
def test_what_is_refused(example: Example, store: Store, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=example.error):
        load(store, example, example.make(tmp_path / "log"))


@pytest.mark.parametrize(("example", "key"), CORRUPT, ids=[f"{e.name}-{k}" for e, k in CORRUPT])
def test_a_wrong_value_is_refused_by_name(example: Example, key: str, store: Store, tmp_path: Path) -> None:
    value, said = example.corrupt[key]
    rows = [changed(example.rows[0], key, value), *example.rows[1:]]
    path = example.make(tmp_path / "log", rows)
    try:
        reasons = [refusal.reason for refusal in load(store, example, path).refused]
    except Refused as error:  # of the complete file, or where no record is left
        reasons = [str(error)]
    assert re.search(said, "\n".join(reasons))


@EVERY
def test_a_second_import_adds_nothing(example: Example, store: Store, tmp_path: Path) -> None:
    path = example.make(tmp_path / "log")
    taken = load(store, example, path).samples
    again = load(store, example, path)
    assert (again.samples, again.duplicates) == (0, taken)


@each([example for example in ALL if example.same or example.different])
def test_which_records_are_the_same(example: Example) -> None:
    """In another export, or in another file of the program."""
    identity, first = FORMATS[example.format].identity, dict(example.rows[0])
    assert identity is not None
    for changes, is_same in [*((x, True) for x in example.same), *((x, False) for x in example.different)]:
        other = first
        for key, value in changes.items():
            other = changed(other, key, value)
        assert (identity(first) == identity(other)) is is_same, changes


def test_a_record_of_another_shape_does_not_end_an_import(store, tmp_path: Path, monkeypatch) -> None:
    """A reader that meets a value that it doesn't check, here any of record 2."""
    format = FORMATS["alpaca"]

    def read(row: Any, context: Any) -> Any:
        return row["nowhere"] if row["output"] == "5" else format.read(row, context)

    monkeypatch.setitem(FORMATS, "alpaca", dataclasses.replace(format, read=read))
    path = tmp_path / "log.jsonl"
    json_lines(path, [{"instruction": "2+2", "input": "", "output": str(i)} for i in (4, 5, 6)])
    report = import_files(store, [path], format="alpaca")
    assert report.samples == 2
    assert [r.where for r in report.refused] == [f"{path}:2"]
    assert "another shape: KeyError: 'nowhere'" in report.refused[0].reason


def test_messages_of_other_programs_parquet(store, tmp_path: Path) -> None:
    """Their objects have the same keys: null where there is none."""
    said = [{"role": "user", "content": "2+2?", "name": "me"}, {"role": "assistant", "content": "4"}]
    parquet.write_table(pa.Table.from_pylist([{"messages": said, "reward": 1.0}]), tmp_path / "log.parquet")
    import_files(store, [tmp_path / "log.parquet"])
    [sample] = store.samples()
    assert (sample.prompt, sample.response, sample.reward) == (said[:1], "4", 1.0)
    assert sample.meta == {}


def test_runs_read_every_format_of_prompts() -> None:
    """MATH has demonstrations, whose problems are prompts; `prompt` is what runs read anyway."""
    prompts = {name for name, format in FORMATS.items() if format.kind == "prompts" or name == "math"}
    assert prompts == {"prompt", *PROMPT_FORMATS}
