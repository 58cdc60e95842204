"""Prompt files: records with `prompt` and whatever the reward reads, or of a format of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.formats.protocol import Context
from agro.formats.records import read_records
from agro.formats.table import FORMATS
from agro.types import Prompt


def load_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of a file of JSON Lines, a JSON list, CSV or Parquet.

    `prompt_id` (or `id`) names the group, else a hash of the prompt does.

    Raises `Refused` with FILE:LINE for a line that isn't such an object, and for prompts that are there
    twice.
    """
    path = Path(path)
    prompts: list[Prompt] = []
    places: dict[str, int] = {}
    context = Context(path)
    for line in read_records(path):
        try:
            if line.error:
                raise Refused(line.error)
            prompt = _prompt(_record(line.value, context))
            if prompt.id in places:
                raise Refused(
                    f"prompt_id: {prompt.id} is that of line {places[prompt.id]} too; keep one of the two"
                )
        except Refused as error:
            raise Refused(f"{line.where}: {error}") from None
        places[prompt.id] = line.number
        prompts.append(prompt)
    if not prompts:
        raise Refused(f"{path}: expected at least one prompt, got none")
    return prompts


def _record(row: Mapping[str, Any], context: Context) -> Mapping[str, Any]:
    """A row as agro has prompts, where it is of a format that is of prompts alone."""
    for format in FORMATS.values():
        if format.kind == "prompts" and format.name != "prompt" and format.fits(row):
            return format.read(row, context)[0].records[0]
    return row


def _prompt(record: Mapping[str, Any]) -> Prompt:
    if "prompt" not in record:
        raise Refused(f'expected an object with "prompt", got {dict(record)!r:.80}')
    columns = {
        name: value.isoformat() if hasattr(value, "isoformat") else value  # times of Parquet and Arrow
        for name, value in record.items()
        if name not in ("prompt", "prompt_id", "id")
    }
    name = record.get("prompt_id")
    if name is None:
        name = record.get("id")
    if not isinstance(name, str | int | None) or isinstance(name, bool):
        raise Refused(f"prompt_id: expected text or an integer, got {name!r:.80}")
    return Prompt(record["prompt"], "" if name is None else str(name), columns)
