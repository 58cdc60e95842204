"""What an example of a format is. Each is written by hand, as the program that has the format writes it.

`examples/FORMAT.json` lists those of a format, with the names of `Example` here; a format that is new needs
no more than such a file, and a writer in `writers.py` where its files aren't JSON Lines. Beside `examples` it
may have `cases`, of one thing that a record can say, which docs/formats.md doesn't count, and `parts`: what
several records have in common stands there once.

    {"like": NAME, "text": "B", "turns.0.role": "user", "without": ["id"]}

is the part NAME of the file's `parts` (within a part, one of those above it) with other values of these
columns and at these paths, and without some. A number in place of NAME is that row of the file's first
example, counted from 0. A part that is a list goes into the list around it. `{"as text": …}` is JSON in a
text, `{"as otlp": …}` an object as OpenTelemetry's list of attributes. `"tokenizer": "characters"` in
`options` is `Characters`.

`wrong` and `missing` are `corrupt`: by column, or path, a wrong value, or that it is gone, and what the
refusal says.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from writers import WRITERS, Rows, json_lines

FOLDER = Path(__file__).parent / "examples"
MISSING = object()


@dataclass(frozen=True)
class Example:
    """A file or folder of a format, and what the store has of it after its import."""

    format: str
    number: int  # in its file, cases after examples
    rows: Rows  # the records of the file, JSON Lines unless `write` is given
    samples: Rows | None = None
    """Fields of the samples, in order, or `meta.NAME`; others aren't compared. None: not looked at."""
    file: str = "log.jsonl"
    pairs: Sequence[Sequence[float | None]] = ()
    """Positions of the samples, the better one first; and the votes of each, if they are compared."""
    groups: int = 0  # 0: not looked at
    options: Mapping[str, Any] = field(default_factory=dict)  # of import_files
    others: Mapping[str, Rows] = field(default_factory=dict)  # files beside it
    corrupt: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """By column or path in the first record: a wrong value, or `MISSING`, and what the refusal says."""
    refused: Sequence[str] = ()  # what is said of the records of `rows` that aren't taken, in order
    left_out: Mapping[str, int] = field(default_factory=dict)  # how many by rule
    reported: Sequence[str] = ()  # what the report says besides
    error: str = ""  # what is said where nothing is taken, of all formats that aren't read too
    write: Callable[[Path, Rows], None] | None = None  # of a file that isn't JSON Lines
    same: Sequence[Mapping[str, Any]] = ()  # changes of the first record, which is another one's repetition
    different: Sequence[Mapping[str, Any]] = ()  # changes with which it is another one
    about: str = ""  # what it is an example of
    is_case: bool = False

    @property
    def name(self) -> str:
        return f"{self.format}-{self.number}"

    def make(self, folder: Path, rows: Rows | None = None) -> Path:
        """Write the files, with other rows where they are given. Returns what is imported."""
        for name, content in self.others.items():
            json_lines(folder / name, content)
        path = folder / self.file
        path.parent.mkdir(parents=True, exist_ok=True)
        (self.write or json_lines)(path, self.rows if rows is None else rows)
        return path


class Characters:
    """A tokenizer of which a token is a character."""

    fingerprint = "characters"

    def prompt(self, text: Any) -> list[int]:
        return self.ids(text)

    def ids(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def changed(record: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The record with this value, or without one where it is `MISSING`, in a column or at a path."""
    record = copy.deepcopy(dict(record))
    inside: Any = record
    if key not in record and key.partition(".")[0] in record:
        *path, key = key.split(".")
        for name in path:
            inside = inside[int(name) if isinstance(inside, list) else name]
    if value is MISSING:
        del inside[key]
    else:
        inside[int(key) if isinstance(inside, list) else key] = value
    return record


def otlp_attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _otlp_value(value)} for name, value in values.items()]


def _otlp_value(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {"arrayValue": {"values": [_otlp_value(item) for item in value]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": otlp_attributes(value)}}
    names = {bool: "boolValue", int: "intValue", float: "doubleValue", str: "stringValue"}
    return {names[type(value)]: str(value) if type(value) is int else value}  # an integer is a text


def _complete(value: Any, parts: Mapping[str | int, Any]) -> Any:
    """What is written in a file, with the parts that it is like."""
    if isinstance(value, list):
        items = list[Any]()
        for item in value:
            complete = _complete(item, parts)
            items += complete if isinstance(item, dict) and isinstance(complete, list) else [complete]
        return items
    if not isinstance(value, dict):
        return value
    if set(value) == {"as text"}:
        return json.dumps(_complete(value["as text"], parts))
    if set(value) == {"as otlp"}:
        return otlp_attributes(_complete(value["as otlp"], parts))
    complete = {name: _complete(inner, parts) for name, inner in value.items()}
    if "like" not in complete:
        return complete
    record = copy.deepcopy(parts[complete.pop("like")])
    for column in complete.pop("without", ()):
        del record[column]
    for key, inner in complete.items():
        record = changed(record, key, inner)
    return record


def _content(name: str) -> dict[str, Any]:
    content = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    if isinstance(content, list):
        return {"examples": content}
    assert content.keys() <= {"parts", "examples", "cases"}, (name, *content)
    return content


def parts_of(name: str) -> dict[str | int, Any]:
    """The parts of `examples/NAME.json`."""
    parts = dict[str | int, Any]()
    for part, value in _content(name).get("parts", {}).items():
        parts[part] = _complete(value, parts)
    return parts


def examples_of(name: str) -> list[Example]:
    """Those of `examples/NAME.json`, and its cases."""
    try:
        return _examples(name)
    except Exception as error:
        error.add_note(f"in {FOLDER / name}.json")
        raise


def _examples(name: str) -> list[Example]:
    content, parts, examples = _content(name), parts_of(name), list[Example]()
    cases = [values | {"is_case": True} for values in content.get("cases", ())]
    for values in [*content.get("examples", ()), *cases]:
        rows = list[Mapping[str, Any]]()
        for row in values.pop("rows"):
            rows.append(_complete(row, parts))
            if not examples:
                parts[len(rows) - 1] = rows[-1]
        values = _complete(values, parts)
        wrong = {key: tuple(case) for key, case in values.pop("wrong", {}).items()}
        missing = {column: (MISSING, said) for column, said in values.pop("missing", {}).items()}
        assert not missing.keys() & wrong.keys(), (name, *missing)
        values |= {"rows": rows, "corrupt": missing | wrong}
        if "write" in values:
            values["write"] = WRITERS[values["write"]]
        if values.get("options", {}).get("tokenizer") == "characters":
            values["options"]["tokenizer"] = Characters()
        examples.append(Example(name, len(examples), **values))
    return examples


def rows_of(name: str) -> Rows:
    """The records of the first example of `examples/NAME.json`."""
    return examples_of(name)[0].rows
