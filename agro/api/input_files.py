"""Objects written into the run folder, so that its configuration names all that the run reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.io.files import complete_folder, write
from agro.io.strictjson import dumps
from agro.models.pretrained import without_bars
from agro.types import Prompt

EXPECTED = "a path, a list, a datasets.Dataset or a pandas DataFrame"


def is_path(value: Any) -> bool:
    return isinstance(value, str | Path)


def rows_of(data: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The rows of a list, a `datasets.Dataset` or a DataFrame, each with its place for messages.

    What is missing in a DataFrame becomes None.
    """
    rows: Iterable[Any]
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        rows = ({key: _known(value) for key, value in row.items()} for row in data.to_dict("records"))
    elif isinstance(getattr(data, "column_names", None), dict):
        raise Refused(f"{name}: expected one split of the data set, got {', '.join(data.column_names)}")
    elif isinstance(data, list | tuple) or hasattr(data, "column_names"):
        rows = data
    else:
        raise Refused(f"{name}: expected {EXPECTED}, got {type(data).__name__}")
    for number, row in enumerate(rows):
        yield f"{name}: row {number}", row


def _known(value: Any) -> Any:
    """None for what pandas has in place of missing values (NaN, NaT and NA)."""
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    return None if isinstance(value, float) and value != value else value


def prompt_record(row: Any, location: str) -> dict[str, Any]:
    """A prompt of a list: text, messages, a record, or a `Prompt`."""
    if isinstance(row, Prompt):
        return {"prompt": row.text, "prompt_id": row.id, **row.columns}
    if isinstance(row, str | list):
        return {"prompt": row}
    return _record(row, location)


def log_record(row: Any, location: str) -> dict[str, Any]:
    """A record of a log; NaN is unknown."""
    return {key: _known(value) for key, value in _record(row, location).items()}


def _record(row: Any, location: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise Refused(f"{location}: expected a dictionary, got {row!r:.80}")
    return dict(row)


def write_rows(data: Any, path: Path, name: str, record: Callable[[Any, str], dict[str, Any]]) -> str:
    """Write rows as JSON Lines, and return the path. Raises `Refused` for a value that JSON doesn't have."""
    lines = [dumps(_plain(record(row, location)), location) for location, row in rows_of(data, name)]
    if not lines:
        raise Refused(f"{name}: expected at least one row, got none")
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, "".join(f"{line}\n" for line in lines))
    return str(path)


def _plain(value: Any) -> Any:
    """Arrays and scalars of NumPy and torch as lists and numbers, tuples as lists, times as ISO 8601."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def model_folder(model: Any, tokenizer: Any, folder: Path) -> str:
    """The folder or hub name of a model; a model object is written to `folder`, with its tokenizer."""
    if isinstance(model, tuple):
        if len(model) != 2 or tokenizer is not None:
            raise Refused("model: expected (model, tokenizer) and no tokenizer besides, or a model alone")
        model, tokenizer = model
    if is_path(model):
        if tokenizer is not None:
            raise Refused(f"tokenizer: {model} has its own; leave it out, or load the model and give both")
        return str(model)
    if hasattr(model, "peft_config"):
        raise Refused(
            "model: expected a model without an adapter. What to do: give model.merge_and_unload(), or the "
            "model that it belongs to with peft=LoraConfig(…)"
        )
    if not (hasattr(model, "save_pretrained") and hasattr(model, "generate")):
        raise Refused(
            "model: expected a folder, a hub name, or a causal language model of transformers with its "
            f"tokenizer, got {type(model).__name__}"
        )
    if not hasattr(tokenizer, "save_pretrained"):
        raise Refused(f"tokenizer: expected the tokenizer of the model object, got {tokenizer!r:.80}")
    with complete_folder(folder) as unfinished, without_bars():
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
    return str(folder)
