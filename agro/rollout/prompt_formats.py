"""Prompts as other programs have them: data sets of trainers and of problems, and requests of batches.

Each reader returns a record with `prompt`, and raises `Refused` for one that isn't as its format says. The
programs and versions stand in `formats.toml`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from agro.errors import Refused
from agro.io.json_values import entry, is_unknown, objects, omit, text
from agro.types.conversation import normalized, with_tools

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
    r"""MATH: the answer is the content of the solution's last \boxed{…}, where the row has none."""
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
    r"""The content of the last \boxed{…}, the outermost of those one in the other."""
    opened, content = list[re.Match[str]](), None
    for brace in re.finditer(r"\\boxed\s*\{|(?<!\\)[{}]", text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened and (opening := opened.pop())[0] != "{":
            content = text[opening.end() : brace.start()]
    return content


def _openrlhf_prompt(row: Row) -> dict[str, Any]:
    record: dict[str, Any] = {"prompt": row["input"], **omit(row, ("input", "label"))}
    if row.get("label") is not None:
        record["answer"] = row["label"]
    return record


def ends_with_assistant(row: Row) -> bool:
    """Whether `input` is a conversation that ends with the assistant."""
    messages = row.get("input")
    message = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(message, dict) and message.get("role") == "assistant"


def _openai_batch_prompt(row: Row) -> dict[str, Any]:
    return {"prompt": openai_prompt(entry(row["body"], "body")), "custom_id": row["custom_id"]}


def openai_prompt(request: Row) -> Any:
    """The messages of a request, after the tools that it declares, or its text."""
    for name in ("messages", "input", "prompt"):
        value = request.get(name)
        if isinstance(value, list) and value and all(isinstance(x, dict) and "role" in x for x in value):
            return with_tools(normalized(value, name), request.get("tools") or request.get("functions"))
        if value is not None:
            return value
    raise Refused(f"request: expected messages, input or prompt, got {', '.join(request) or 'nothing'}")


def _anthropic_batch_prompt(row: Row) -> dict[str, Any]:
    return {"prompt": anthropic_prompt(entry(row["params"], "params")), "custom_id": row["custom_id"]}


def anthropic_prompt(params: Row) -> list[dict[str, Any]]:
    """The messages of a request, after the tools that it declares. The system's is a field of its own."""
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
        lambda row: row.keys() - OPENRLHF == {"input"} and not ends_with_assistant(row), _openrlhf_prompt
    ),
    "openai-batch-input": PromptFormat(
        lambda row: row.keys() >= {"custom_id", "body"} and "response" not in row, _openai_batch_prompt
    ),
    "anthropic-batch-requests": PromptFormat(
        lambda row: row.keys() >= {"custom_id", "params"}, _anthropic_batch_prompt
    ),
    "human-eval-problems": PromptFormat(
        lambda row: row.keys() >= {"task_id", "prompt", "entry_point"} and "completion" not in row,
        lambda row: {**row, "prompt_id": row["task_id"]},
    ),
}
