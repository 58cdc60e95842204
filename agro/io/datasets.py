"""Data sets of the package `datasets`: folders of save_to_disk, and data sets on the Hugging Face hub.

A folder has state.json, which names its files of Arrow streams, as datasets/arrow_dataset.py writes it
(`_data_files`); one with dataset_dict.json has a folder a split.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.io import parquet
from agro.io.jsonlines import Line
from agro.io.parquet import ROWS
from agro.io.strictjson import loads

_HUB = re.compile(r"hub:(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[^:]+))??(:(?P<split>[^:]+))?")


def on_hub(path: Path) -> bool:
    return str(path).startswith("hub:")


def read(path: Path) -> Iterator[Line]:
    """The records of a folder or of a data set on the hub. Raises `Refused` where it can't be read."""
    rows = _on_hub(path) if on_hub(path) else _folder(path)
    for number, (row, error) in enumerate(rows, 1):
        values = {name: value for name, value in row.items() if value is not None}
        yield Line(f"{path}:{number}", number, values, error)


def _folder(path: Path) -> Iterator[tuple[dict[str, Any], str | None]]:
    if (path / "dataset_dict.json").is_file():
        splits = _json(path / "dataset_dict.json").get("splits", [])
        places = " or ".join(str(path / split) for split in splits)
        raise Refused(f"{path}: a folder of several splits; name one: {places}")
    if not (path / "state.json").is_file():
        raise Refused(
            f"{path}: expected a file, or a folder with state.json (of datasets' save_to_disk); of a folder "
            f"of logs give the files, such as {path}/*.jsonl"
        )
    for item in _json(path / "state.json").get("_data_files", []):
        yield from _arrow(path / item["filename"])


def _json(path: Path) -> dict[str, Any]:
    try:
        value = loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: can't be read: {error}") from None
    if isinstance(value, dict):
        return value
    raise Refused(f"{path}: expected an object, got {value!r:.80}")


def _arrow(path: Path) -> Iterator[tuple[dict[str, Any], str | None]]:
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as batches:
            for batch in batches:
                for start in range(0, len(batch), ROWS):
                    yield from parquet.rows(batch.slice(start, ROWS))
    except OSError as error:
        raise Refused(f"{path}: can't be read: {error.strerror or error}") from None
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise Refused(f"{path}: can't be read as Arrow: {error}") from None


def _on_hub(path: Path) -> Iterator[tuple[dict[str, Any], str | None]]:
    name, config, split = _parts(path)
    load_dataset = _package(path).load_dataset
    try:
        data = load_dataset(name, config, split=split, streaming=True, revision=_sha(name))
        for row in data if split is not None else _only(path, data):
            yield dict(row), None
    except Refused:
        raise
    except Exception as error:  # noqa: BLE001  # of the network or of any of its libraries
        raise Refused(f"{path}: can't be read from the hub: {error}") from None


def _package(path: Path) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError:
        raise Refused(
            f"{path}: reading from the hub needs the package datasets: pip install 'datasets>=4.0'"
        ) from None


def _only(path: Path, splits: dict[str, Any]) -> Any:
    if len(splits) > 1:
        raise Refused(
            f"{path}: there are the splits {', '.join(splits)}; name one, {path}:{next(iter(splits))}"
        )
    return next(iter(splits.values()))


def _parts(path: Path) -> tuple[str, str | None, str | None]:
    """Name, configuration and split."""
    match = _HUB.fullmatch(str(path))
    if match is None:
        raise Refused(f"{path}: expected hub:OWNER/NAME, hub:OWNER/NAME:SPLIT or hub:OWNER/NAME:CONFIG:SPLIT")
    return match["name"], match["config"], match["split"]


def revision(path: Path) -> str:
    """What tells the content of a data set on the hub from others: name and commit."""
    name, config, split = _parts(path)
    _package(path)
    return f"hub:{name}@{_sha(name)}:{config}:{split}"


@cache
def _sha(name: str) -> str:
    import huggingface_hub

    try:
        return str(huggingface_hub.HfApi().dataset_info(name).sha)
    except Exception as error:  # noqa: BLE001  # of the network or of any of its libraries
        raise Refused(f"hub:{name}: can't be found on the hub: {error}") from None
