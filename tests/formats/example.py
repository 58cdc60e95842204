"""What an example of a format is. Each is written by hand, as the program that has the format writes it.

Those of the formats whose records are columns are in `examples/FORMAT.json`, a list of `Example` by its names
here. A row `{"like": N, …}` is row N of the file's first example with these columns in place of its own, and
without those in `without`. `wrong` and `missing` are `corrupt`: a column's wrong value, or that it is gone,
and what the refusal says.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from pyarrow import parquet

Rows = Sequence[Mapping[str, Any]]
FOLDER = Path(__file__).parent / "examples"


@dataclass(frozen=True)
class Example:
    """A file or folder of a format, and what the store has of it after its import."""

    format: str
    rows: Rows  # the records of the file, JSON Lines unless `write` is given
    samples: Rows  # fields of the samples, in order; others aren't compared
    file: str = "log.jsonl"
    pairs: Sequence[tuple[int, int]] = ()  # positions among `samples`, the better one first
    groups: int = 0  # 0: as many as there are different prompts in `samples`
    options: Mapping[str, Any] = field(default_factory=dict)  # of import_files
    others: Mapping[str, Rows] = field(default_factory=dict)  # files beside it
    corrupt: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """By field of the first record: a wrong value (`MISSING` removes it), and what the refusal says."""
    refused: Sequence[str] = ()  # what is said of the records of `rows` that aren't taken, in order
    write: Callable[[Path, Rows], None] | None = None  # of a file that isn't JSON Lines
    permutes: bool = True  # whether the order of a record's keys may change
    about: str = ""  # what it is an example of

    def make(self, folder: Path, rows: Rows | None = None) -> Path:
        """Write the files, with other rows where they are given. Returns what is imported."""
        for name, content in self.others.items():
            json_lines(folder / name, content)
        path = folder / self.file
        path.parent.mkdir(parents=True, exist_ok=True)
        (self.write or json_lines)(path, self.rows if rows is None else rows)
        return path


MISSING = object()


def json_lines(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def comma_separated(path: Path, rows: Rows) -> None:
    """A CSV file; objects and lists are written as JSON."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        for row in rows:
            table.writerow({k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in row.items()})


def parquet_table(path: Path, rows: Rows) -> None:
    parquet.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)


def slime_dump(path: Path, rows: Rows) -> None:
    torch.save({"rollout_id": 4, "samples": [dict(row) for row in rows]}, path)


def json_list(path: Path, rows: Rows) -> None:
    path.write_text(json.dumps(list(rows)), encoding="utf-8")


def document(path: Path, rows: Rows) -> None:
    """One JSON document, indented over lines, as agents write it."""
    path.write_text(json.dumps(rows[0], indent=2), encoding="utf-8")


def evalplus(path: Path, rows: Rows) -> None:
    by_task: dict[str, list[Any]] = {}
    for row in rows:
        by_task.setdefault(row["task_id"], []).append(row)
    path.write_text(json.dumps({"date": "2026-08-01", "hash": "h", "eval": by_task}))


WRITERS = {
    "csv": comma_separated,
    "document": document,
    "evalplus": evalplus,
    "list": json_list,
    "parquet": parquet_table,
    "slime": slime_dump,
}


def examples_of(name: str) -> list[Example]:
    """Those of `examples/NAME.json`."""
    examples = list[Example]()
    for values in json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")):
        rows = list[Mapping[str, Any]]()
        for row in values["rows"]:
            base = dict((examples[0].rows if examples else rows)[row.pop("like")]) if "like" in row else {}
            for column in row.pop("without", ()):
                del base[column]
            rows.append(base | row)
        wrong = {column: (value, said) for column, (value, said) in values.pop("wrong", {}).items()}
        missing = {column: (MISSING, said) for column, said in values.pop("missing", {}).items()}
        values |= {
            "rows": rows,
            "corrupt": missing | wrong,
            "pairs": list(map(tuple, values.get("pairs", ()))),
        }
        if "write" in values:
            values["write"] = WRITERS[values["write"]]
        examples.append(Example(name, **values))
    return examples


def rows_of(name: str) -> Rows:
    """The records of the first example of `examples/NAME.json`."""
    return examples_of(name)[0].rows
