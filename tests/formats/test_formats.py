"""Every format by its examples: what the store has after an import, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import examples_agents
import examples_annotations
import examples_evaluations
import examples_inspect
import examples_observability
import examples_providers
import examples_sessions
import examples_stores
import examples_traces
import examples_verifiers
import pyarrow as pa
import pytest
from example import FOLDER, MISSING, Example, examples_of, json_lines
from pyarrow import parquet

from agro.errors import Refused
from agro.logs.format_table import FORMATS, Recognizer
from agro.logs.importing import ImportReport, import_files
from agro.rollout.prompts import PROMPT_FORMATS
from agro.store import Store

FAMILIES = (
    examples_annotations,
    examples_agents,
    examples_sessions,
    examples_traces,
    examples_observability,
    examples_verifiers,
    examples_stores,
    examples_providers,
    examples_evaluations,
    examples_inspect,
)
EXAMPLES = [example for path in sorted(FOLDER.glob("*.json")) for example in examples_of(path.stem)]
EXAMPLES += [example for family in FAMILIES for example in family.EXAMPLES]
NAMES = [f"{example.format}-{i}" for i, example in enumerate(EXAMPLES)]
EVERY = pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
CORRUPT = [(e, key) for e in EXAMPLES for key in e.corrupt]


def load(store: Store, example: Example, path: Path) -> ImportReport:
    how = dict(example.options)
    if "join" in how:
        how["join"] = path.parent / how["join"]
    return import_files(store, [path], **how)


def shown(sample: Any, like: Any) -> dict[str, Any]:
    found = {name: getattr(sample, name) for name in like}
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in found.items()}


def test_every_format_has_an_example() -> None:
    readable = {name for name, format in FORMATS.items() if format.kind not in ("prompts", "nothing")}
    assert readable == {example.format for example in EXAMPLES}


@EVERY
def test_no_other_format_fits_an_example(example: Example) -> None:
    """The first record says what a file is, unless its path does."""
    if FORMATS[example.format].records is not None or "format" in example.options:
        pytest.skip("it is recognized by its path, or named")
    format = Recognizer(None).recognize(example.rows[0])
    assert format is not None
    assert format.name == example.format


@EVERY
def test_the_store_has_what_the_example_holds(example: Example, store: Store, tmp_path: Path) -> None:
    report = load(store, example, example.make(tmp_path / "log"))
    assert example.format in report.recognized
    assert len(report.refused) == len(example.refused)
    for refusal, said in zip(report.refused, example.refused):
        assert re.search(said, refusal.reason)
    samples = list(store.samples())
    assert len(samples) == len(example.samples)
    for sample, expected in zip(samples, example.samples):
        assert shown(sample, expected) == dict(expected)
    place = {sample.id: i for i, sample in enumerate(samples)}
    assert [(place[p.winner], place[p.loser]) for p in store.pairs()] == list(example.pairs)
    if example.groups:
        assert len(store.groups()) == example.groups


@EVERY
def test_the_order_of_columns_says_nothing(example: Example, store: Store, tmp_path: Path) -> None:
    if not example.permutes:
        pytest.skip("its records have no columns of their own")
    turned = [dict(reversed(row.items())) for row in example.rows]
    load(store, example, example.make(tmp_path / "log", turned))
    for sample, expected in zip(store.samples(), example.samples, strict=True):
        assert shown(sample, expected) == dict(expected)


@pytest.mark.parametrize(("example", "key"), CORRUPT, ids=[f"{e.format}-{k}" for e, k in CORRUPT])
def test_a_wrong_value_is_refused_by_name(example: Example, key: str, store: Store, tmp_path: Path) -> None:
    value, said = example.corrupt[key]
    wrong = {**example.rows[0], key: value}
    if value is MISSING:
        del wrong[key]
    path = example.make(tmp_path / "log", [wrong, *example.rows[1:]])
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


WRONG_SHAPES = (  # format of the first example, the path to a value, a wrong one, and what is said
    ("sharegpt", ("conversations", 0, "from"), [], "conversations.0..from: expected one of human"),
    ("atif", ("steps", 0, "source"), {}, "steps.0..source: expected one of system"),
    ("verifiers-traces", ("traces", 0, "nodes", 1, "message", "role"), None, "an object with a role"),
    ("verifiers-traces", ("traces", 0, "calls", 0, "node"), ["0"], "calls.0..node: expected an integer"),
    ("lm-eval", ("metrics", 0), {}, "metrics.0.: expected text"),
)


@pytest.mark.parametrize(("name", "path", "value", "said"), WRONG_SHAPES)
def test_a_wrong_value_deep_in_a_record_is_refused(name, path, value, said, store, tmp_path: Path) -> None:
    example = next(e for e in EXAMPLES if e.format == name and _has(e.rows[0], path))
    first = copy.deepcopy(dict(example.rows[0]))
    inside: Any = first
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    try:
        reasons = [r.reason for r in load(store, example, example.make(tmp_path, [first])).refused]
    except Refused as error:
        reasons = [str(error)]
    assert re.search(said, "\n".join(reasons))


def _has(value: Any, path: tuple[Any, ...]) -> bool:
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError):
            return False
    return True


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
