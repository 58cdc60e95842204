"""Damaged files: each is read, or refused with its name. Nothing else is raised."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from making import random_samples, write_lines
from pyarrow import parquet
from writing import read_samples

from agro.errors import Refused
from agro.logs.importing import import_files
from agro.rollout.prompts import load_prompts
from agro.store import Store, write_samples

FLIPS = 40


def damaged(content: bytes, times: int) -> Iterator[bytes]:
    """The content with a few flipped bits; every tenth time cut off as well."""
    rng = random.Random(0)
    for i in range(times):
        changed = bytearray(content)
        for _ in range(rng.choice([1, 1, 5])):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        yield bytes(changed[: rng.randrange(len(changed))] if i % 10 == 9 else changed)


def refusals(path: Path, use: Callable[[], object], times: int = FLIPS) -> list[str]:
    """What is said where `use` refuses `path` with flipped bits."""
    said = []
    for content in damaged(path.read_bytes(), times):
        path.write_bytes(content)
        try:
            use()
        except Refused as error:
            said.append(str(error))
    assert all(str(path) in text for text in said)
    return said


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".parquet"])
def test_an_export_with_flipped_bits(into: Store, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"x{ending}"
    write_samples(path, random_samples(3, 20))

    def use() -> None:
        import_files(into, [path])
        list(read_samples(path))

    assert len(refusals(path, use)) > FLIPS // 2


def test_a_table_of_another_program_with_flipped_bits(into: Store, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    rows = [{"prompt": f"é {i}", "response": "a", "reward": [0.5, i]} for i in range(20)]
    parquet.write_table(pa.Table.from_pylist(rows), path)
    assert refusals(path, lambda: import_files(into, [path], mapping={"meta.r": "reward"}))


def test_csv_with_flipped_bits(into: Store, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.csv", "prompt,response", "Q,A")
    assert len(refusals(path, lambda: import_files(into, [path]))) > FLIPS // 2


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_prompts_with_flipped_bits(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    rows = [{"prompt": f"é {i}", "id": i, "x": {"y": [1, 2.5]}} for i in range(20)]
    path = write_lines(tmp_path / "p", *(json.dumps(row, ensure_ascii=False) for row in rows))
    path.write_bytes(pack(path.read_bytes()))
    assert refusals(path, lambda: load_prompts(path))


@pytest.mark.parametrize("depth", [800, 990, 5000, 200_000])
@pytest.mark.parametrize("value", ["[", '{"a":'])
def test_deeply_nested_values(into: Store, tmp_path: Path, depth: int, value: str) -> None:
    """800 levels are read in a column that may have any value, which the tokens of a log may not."""
    closing = {"[": "]", '{"a":': "}"}[value]
    deep = f"{value * depth}1{closing * depth}"
    path = tmp_path / "x.jsonl"
    readers: tuple[Callable[[Path], object], ...] = (load_prompts, lambda path: import_files(into, [path]))
    for text, readable in (
        (f'{{"prompt": {deep}, "response": ""}}', ()),
        (f'{{"prompt": [{{"role": "user", "content": {deep}}}], "response": ""}}', ()),
        (f'{{"prompt": "", "response": "", "x": {deep}}}', readers),
        (f'{{"prompt": "", "response": "", "tokens": {deep}}}', readers[:1]),
    ):
        path.write_text(text)
        for read in readers:
            if depth == 800 and read in readable:
                assert read(path)
            else:
                with pytest.raises(Refused, match=re.escape(str(path))):
                    read(path)


def test_values_that_python_does_not_have_are_refused_by_the_row(into: Store, tmp_path: Path) -> None:
    """A date after the year 9999, and nanoseconds; the other rows are taken."""
    path = tmp_path / "x.parquet"
    rest = {"prompt": ["Q", "Q", "Q"], "response": ["a", "b", "c"]}
    for values in (pa.array([None, 10**8, None], pa.date32()), pa.array([None, 1, None], pa.timestamp("ns"))):
        parquet.write_table(pa.table({**rest, "reward": values}), path)
        report = import_files(into, [path])
        assert (report.samples, [r.where for r in report.refused]) == (2, [f"{path}:2"])


def test_columns_of_the_same_name(into: Store, tmp_path: Path) -> None:
    table = pa.table([["Q"], ["A"], [1.0], [0.0]], names=["prompt", "response", "reward", "reward"])
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(Refused, match="expected unique column names"):
        import_files(into, [tmp_path / "x.parquet"])
