"""Prompt files: records with `prompt` and the columns that the reward reads, or records of a prompt format.

Prompt formats are data sets of trainers, problem sets and batch requests. Each reader of `PROMPT_FORMATS`
returns a record with `prompt`, and raises `Refused` for a record that violates its format. `formats.toml`
lists the programs and versions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from agro.errors import Refused
from agro.io.json_values import check_columns, entry, is_unknown, messages_in, objects, omit, renamed, text
from agro.io.jsonlines import RECORD_ERRORS, Line, reason_of
from agro.io.record_files import read_records
from agro.types import Prompt
from agro.types.conversation import declarations, normalized, with_tools

SHOWN = 3  # problems that a message names
Paths = str | Path | Sequence[str | Path]
Columns = Mapping[str, str] | None  # the column of each field: a name or a JMESPath expression


class Prompts(NamedTuple):
    """The prompts of some files, and the duplicates that are left out."""

    prompts: list[Prompt]
    repeated: list[str]  # a message for each duplicate, with FILE:LINE of both


def load_prompts(paths: Paths, columns: Columns = None) -> list[Prompt]:
    """Read prompts as `read_prompts` does, but raise `Refused` for duplicates too."""
    prompts, repeated = read_prompts(paths, columns)
    if repeated:
        raise Refused(f"{_several(repeated, 'prompts occur twice')}. What to do: keep one of each")
    return prompts


def read_prompts(paths: Paths, columns: Columns = None) -> Prompts:
    """Read the prompts of JSON Lines, a JSON list, CSV, Excel or Parquet, of folders of `datasets` and of
    data sets on the hub (hub:OWNER/NAME:SPLIT), and only the first of duplicates.

    `prompt_id` (or `id`) names the group, else a hash of the prompt does. Raises `Refused` with FILE:LINE for
    lines that aren't prompts, and for an id that names two prompts.
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
                    f"prompt_id: {prompt.id} is also the id of another prompt, at {location}; give unique "
                    "ids, or none"
                )
            repeated.append(f"{line.where}: prompt_id: {prompt.id} is also at {location}")
        except RECORD_ERRORS as error:
            problems.append(f"{line.where}: {reason_of(error)}")
    if problems:
        raise Refused(_several(problems, "lines are refused"))
    if not located:
        raise Refused(f"{', '.join(map(str, paths))}: empty: expected at least one prompt, got none")
    return Prompts([prompt for prompt, _ in located.values()], repeated)


def places(paths: Sequence[str | Path], columns: Columns, ids: Collection[str]) -> dict[str, str]:
    """FILE:LINE of the prompts with these ids, in files that `read_prompts` has read."""
    locations: dict[str, str] = {}
    for line in chain.from_iterable(map(read_records, paths)):
        prompt = _read_prompt(line, columns or {})
        if prompt.id in ids:
            locations.setdefault(prompt.id, line.where)
    return locations


def _several(problems: Sequence[str], summary: str) -> str:
    """The only problem, or the number of problems and the first of them."""
    if len(problems) == 1:
        return problems[0]
    examples = "\n".join(f"  {problem}" for problem in problems[:SHOWN])
    return f"{len(problems)} {summary}, such as\n{examples}\n"


def _read_prompt(line: Line, columns: Mapping[str, str]) -> Prompt:
    if line.error:
        raise Refused(line.error)
    record: Mapping[str, Any] = line.value
    if columns:
        record = renamed(record, columns)
    else:
        format = next((each for each in PROMPT_FORMATS.values() if each.fits(record)), None)
        record = record if format is None else format.read(record)
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


Row = Mapping[str, Any]
OPENRLHF = {"label", "datasource", "images", "id"}  # its optional columns


def _verl_prompt(row: Row) -> dict[str, Any]:
    reward_model, extra = row.get("reward_model") or {}, row.get("extra_info") or {}
    record = {
        "prompt": row["prompt"],
        "answer": reward_model.get("ground_truth"),
        **omit(row, ("prompt", "reward_model", "extra_info")),
    }
    if extra.get("index") is not None:
        record["prompt_id"] = f"{row['data_source']}:{extra.get('split', '')}:{extra['index']}"
    return record


def math_problem(row: Row) -> dict[str, Any]:
    r"""MATH: a row without an answer has it in its solution's last \boxed{…}."""
    solution, answer = text(row["solution"], "solution"), row.get("answer")
    if is_unknown(answer):
        answer = _last_box(solution)
        if answer is None:
            raise Refused(
                f"solution: expected its answer in \\boxed{{…}}, or a column answer; got {solution[-80:]!r}"
            )
    meta = omit(row, ("problem", "solution", "answer"))
    return {**meta, "prompt": text(row["problem"], "problem"), "answer": text(answer, "answer")}


def _last_box(text: str) -> str | None:
    r"""The content of the last \boxed{…}, of nested ones the outermost."""
    opened, content = list[re.Match[str]](), None
    for brace in re.finditer(r"\\boxed\s*\{|(?<!\\)[{}]", text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened and (opening := opened.pop())[0] != "{":
            content = text[opening.end() : brace.start()]
    return content


def ends_with_assistant(row: Row) -> bool:
    """Whether `input` is a conversation that ends with the assistant."""
    messages = row.get("input")
    message = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(message, dict) and message.get("role") == "assistant"


def openai_prompt(request: Row) -> Any:
    """The messages of a request, after its instructions and the tools that it declares, or its text."""
    tools, instructions = request.get("tools") or request.get("functions"), request.get("instructions")
    first = [{"role": "system", "content": instructions}] if instructions else []
    for name in ("messages", "input", "prompt"):
        value = request.get(name)
        if isinstance(value, str) and (first or declarations(tools)):
            value = [{"role": "user", "content": value}]
        if isinstance(value, list) and value and all(isinstance(x, dict) and "role" in x for x in value):
            return with_tools(normalized([*first, *value], name), tools)
        if value is not None:
            return value
    raise Refused(f"request: expected messages, input or prompt, got {', '.join(request) or 'nothing'}")


def anthropic_prompt(params: Row) -> list[dict[str, Any]]:
    """The messages of a request, after the tools that it declares. The system message is a separate field."""
    messages = objects(params.get("messages"), "params.messages")
    if params.get("system") is not None:
        messages = [{"role": "system", "content": params["system"]}, *messages]
    return with_tools(normalized(messages, "params.messages"), params.get("tools"))


class PromptFormat(NamedTuple):
    fits: Callable[[Row], bool]  # whether a record is of this format, by its keys
    read: Callable[[Row], dict[str, Any]]


PROMPT_FORMATS = {  # by name, in the order in which they are tried
    "verl-prompts": PromptFormat(
        lambda row: row.keys() >= {"data_source", "prompt", "reward_model"}, _verl_prompt
    ),
    "math": PromptFormat(lambda row: row.keys() >= {"problem", "solution"}, math_problem),
    "openrlhf-prompts": PromptFormat(
        lambda row: row.keys() - OPENRLHF == {"input"} and not ends_with_assistant(row),
        lambda row: {"prompt": row["input"], **omit({**row, "answer": row.get("label")}, ("input", "label"))},
    ),
    "openai-batch-input": PromptFormat(
        lambda row: row.keys() >= {"custom_id", "body"} and "response" not in row,
        lambda row: {"prompt": openai_prompt(entry(row["body"], "body")), "custom_id": row["custom_id"]},
    ),
    "anthropic-batch-requests": PromptFormat(
        lambda row: row.keys() >= {"custom_id", "params"},
        lambda row: {
            "prompt": anthropic_prompt(entry(row["params"], "params")),
            "custom_id": row["custom_id"],
        },
    ),
    "human-eval-problems": PromptFormat(
        lambda row: row.keys() >= {"task_id", "prompt", "entry_point"} and "completion" not in row,
        lambda row: {**row, "prompt_id": row["task_id"]},
    ),
}
