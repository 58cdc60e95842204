"""Prompt files: records with `prompt` and whatever the reward reads, or of a format of prompts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from agro.errors import Refused
from agro.io.column_paths import check_columns, renamed
from agro.io.json_values import messages_in
from agro.io.jsonlines import RECORD_ERRORS, Line, reason_of
from agro.io.record_files import read_records
from agro.rollout.prompt_formats import PROMPT_FORMATS
from agro.types import Prompt

SHOWN = 3  # problems that a message names


class Prompts(NamedTuple):
    """The prompts of some files, and why others of them are left out."""

    prompts: list[Prompt]
    repeated: list[str]  # FILE:LINE and where it was before, of prompts that are there twice


def load_prompts(
    paths: str | Path | Sequence[str | Path], columns: Mapping[str, str] | None = None
) -> list[Prompt]:
    """`read_prompts`, which raises `Refused` also for prompts that are there twice."""
    prompts, repeated = read_prompts(paths, columns)
    if repeated:
        raise Refused(f"{_several(repeated, 'prompts are there twice')}. What to do: keep one of each")
    return prompts


def read_prompts(
    paths: str | Path | Sequence[str | Path], columns: Mapping[str, str] | None = None
) -> Prompts:
    """The prompts of files of JSON Lines, a JSON list, CSV, Excel or Parquet, of folders of `datasets` and
    of data sets on the hub (hub:OWNER/NAME:SPLIT). Of those that are there twice the first.

    `prompt_id` (or `id`) names the group, else a hash of the prompt does. `columns`: by field its column, a
    name or a JMESPath expression. Raises `Refused` with FILE:LINE for lines that aren't such an object, and
    for an id that names two prompts.
    """
    paths = [paths] if isinstance(paths, str | Path) else paths
    check_columns(columns or {})
    located: dict[str, tuple[Prompt, str]] = {}  # by id, with FILE:LINE
    problems: list[str] = []
    repeated: list[str] = []
    for line in chain.from_iterable(map(read_records, paths)):
        try:
            prompt = _read_prompt(line, columns or {})
            if prompt.id not in located:
                located[prompt.id] = prompt, line.where
                continue
            earlier, location = located[prompt.id]
            if earlier.text != prompt.text:
                raise Refused(
                    f"prompt_id: {prompt.id} is that of {location} too, which is another prompt; give ids "
                    "that are unique, or none"
                )
            repeated.append(f"{line.where}: prompt_id: {prompt.id} is that of {location} too")
        except RECORD_ERRORS as error:
            problems.append(f"{line.where}: {reason_of(error)}")
    if problems:
        raise Refused(_several(problems, "lines are refused"))
    if not located:
        raise Refused(f"{', '.join(map(str, paths))}: empty: expected at least one prompt, got none")
    return Prompts([prompt for prompt, _ in located.values()], repeated)


def places(
    paths: Sequence[str | Path], columns: Mapping[str, str] | None, ids: Collection[str]
) -> dict[str, str]:
    """FILE:LINE of the prompts with these ids, in files that `read_prompts` has read."""
    found: dict[str, str] = {}
    for line in chain.from_iterable(map(read_records, paths)):
        prompt = _read_prompt(line, columns or {})
        if prompt.id in ids:
            found.setdefault(prompt.id, line.where)
    return found


def _several(problems: Sequence[str], summary: str) -> str:
    """The first problems in words, and how many there are."""
    if len(problems) == 1:
        return problems[0]
    examples = "\n".join(f"  {problem}" for problem in problems[:SHOWN])
    return f"{len(problems)} {summary}, such as\n{examples}\n"


def _read_prompt(line: Line, columns: Mapping[str, str]) -> Prompt:
    if line.error:
        raise Refused(line.error)
    if columns:
        return _prompt(renamed(line.value, columns))
    return _prompt(_record(line.value))


def _record(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row as agro has prompts, where it is of a format of prompts."""
    for format in PROMPT_FORMATS.values():
        if format.fits(row):
            return format.read(row)
    return row


def _prompt(record: Mapping[str, Any]) -> Prompt:
    if "prompt" not in record:
        raise Refused(
            f'expected an object with "prompt", got {dict(record)!r:.80}; name the column with '
            'data.columns.prompt = "COLUMN"'
        )
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
    return Prompt(messages_in(record["prompt"]), "" if name is None else str(name), columns)
