"""Prompt files: records with `prompt` and whatever the reward reads, or of a format of prompts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agro.errors import Refused
from agro.io.jsonlines import Line
from agro.logs.fields import messages_in
from agro.logs.format_table import FORMATS
from agro.logs.mapping import check_columns, renamed
from agro.logs.protocol import RECORD_ERRORS, Context, reason_of
from agro.logs.record_files import read_records
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
    for line, context in _lines(paths):
        try:
            prompt = _read_prompt(line, context, columns or {})
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
        raise Refused(f"{', '.join(map(str, paths))}: expected at least one prompt, got none")
    return Prompts([prompt for prompt, _ in located.values()], repeated)


def places(
    paths: Sequence[str | Path], columns: Mapping[str, str] | None, ids: Collection[str]
) -> dict[str, str]:
    """FILE:LINE of the prompts with these ids, in files that `read_prompts` has read."""
    found: dict[str, str] = {}
    for line, context in _lines(paths):
        prompt = _read_prompt(line, context, columns or {})
        if prompt.id in ids:
            found.setdefault(prompt.id, line.where)
    return found


def _lines(paths: Sequence[str | Path]) -> Iterator[tuple[Line, Context]]:
    for path in paths:
        context = Context(Path(path))
        for line in read_records(path):
            yield line, context


def _several(problems: Sequence[str], summary: str) -> str:
    """The first problems in words, and how many there are."""
    if len(problems) == 1:
        return problems[0]
    examples = "\n".join(f"  {problem}" for problem in problems[:SHOWN])
    return f"{len(problems)} {summary}, such as\n{examples}\n"


def _read_prompt(line: Line, context: Context, columns: Mapping[str, str]) -> Prompt:
    if line.error:
        raise Refused(line.error)
    if columns:
        return _prompt(renamed(line.value, columns))
    return _prompt(_record(line.value, context))


def _record(row: Mapping[str, Any], context: Context) -> Mapping[str, Any]:
    """A row as agro has prompts, where it is of a format of prompts, or of one that is read as them."""
    for format in FORMATS.values():
        if format.kind == "prompts" and format.name != "prompt" and format.fits(row):
            return format.read(row, context)[0].records[0]
        if format.asks and format.fits(row):
            return _question(format.read(row, context)[0].records[0])
    return row


def _question(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a demonstration is an answer to: its prompt and columns, without the response."""
    named = {name: record[name] for name in ("prompt", "answer", "prompt_id") if name in record}
    return {**record.get("meta", {}), **named}


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
