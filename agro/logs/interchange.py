"""The interchange record: a sample as one JSON object, bit by bit; preferences and conversations beside it.

Arrays are lists, NaN is null. `mask` marks the tokens to learn from; `action`, those that the policy chose,
is given as well where the two differ. `kept` has the kept sets of all tokens one after the other, and
`kept_count` says how many ids belong to each token. Other keys are in `meta`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from agro.errors import Refused
from agro.io.json_values import is_unknown
from agro.io.record_files import read_records
from agro.io.strictjson import dumps
from agro.logs import values
from agro.logs.values import Field, Fields, typed_fields
from agro.types import UNKNOWN_VERSION, Role, Sample, Text, check_turns
from agro.types.conversation import declarations, normalized, with_tools

_IDS = Field("a list of token ids: integers from 0 to 2³¹ - 1", values.ids)
_FLAGS = Field("a list of true and false, or of 1 and 0", values.flags)
_NUMBERS = Field("a list of numbers, null where one is unknown", values.numbers)
_TEXT = Field("text", values.text)
_NAME = Field("text or an integer", values.name)
_OBJECT = Field("an object", values.an_object)
_VOTES = Field("a number of 0 or more", values.votes)

# One response.
RECORD = Fields(
    {
        "prompt": Field(
            "text, or a list of messages with 'role' and 'content'", values.prompt, is_needed=True
        ),
        "response": Field("text", values.text, is_needed=True),
        "reward": Field("a finite number, true or false, or null where it is unknown", values.reward),
        "prompt_id": _NAME,
        "episode": _NAME,
        "answer": Field("any value", values.anything),
        "tools": Field("a list of declarations of tools", values.anything),
        "tokens": _IDS,
        "mask": _FLAGS,
        "action": _FLAGS,
        "tokenizer": _TEXT,
        "behavior_logp": _NUMBERS,
        "sampling": _OBJECT,
        "kept": _IDS,
        "kept_count": Field("a list of integers of 0 or more", values.ids),
        "context_tokens": _IDS,
        "token_reward": _NUMBERS,
        "model": Field("text", values.anything),
        "version": Field(
            "an integer (optimizer steps; -1: unknown), or a list of one per token", values.version
        ),
        "role": Field("one of policy, log, expert", values.role),
        "source": _TEXT,
        "meta": _OBJECT,
    }
)
FIELDS = tuple(RECORD)

# Two responses to a prompt, the chosen one better; the other fields are as of a record.
PREFERENCE = Fields(
    {
        "chosen": Field("text", values.text, is_needed=True),
        "rejected": Field("text", values.text, is_needed=True),
        "votes_chosen": _VOTES,
        "votes_rejected": _VOTES,
    }
)


class Tokenizer(Protocol):
    """What made the tokens of a log's responses; `agro.models.encoding.Encoder` is one."""

    @property
    def fingerprint(self) -> str: ...

    def prompt(self, text: Text) -> list[int]: ...

    def ids(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def from_record(
    record: Mapping[str, Any],
    *,
    role: Role = "log",
    source: str = "",
    tokenizer: Tokenizer | None = None,
    is_json: bool = False,
) -> Sample:
    """The sample of a record; null is unknown. `role` and `source` are those of records without.

    `is_json`: whether the record was read of JSON, so that the store can hold all that is in it.

    Tokens without a mask are those of the response alone: `tokenizer`, which made them, puts those of the
    prompt before them. Raises `Refused` naming the field.
    """
    if not is_json and is_unknown(record.get("reward")):
        record = {**record, "reward": None}
    fields = typed_fields(record, RECORD)
    fields["meta"] = _meta(fields, record)
    _normalize(fields)
    if "tokens" in fields and "mask" not in fields and "action" not in fields:
        fields |= _after_prompt(fields, tokenizer)
    elif fields["prompt"] == "" and "prompt_id" not in fields:
        actions = fields.get("action", fields.get("mask"))
        prompt_length = 0 if actions is None or not actions.any() else int(actions.argmax())
        if prompt_length > 1:
            raise Refused(
                f"prompt: expected the text of the {prompt_length} tokens before the response, got an empty "
                "text; decode them, or give the prompt_id"
            )
    if not is_json:
        for name in ("prompt", "sampling", "meta"):
            if fields.get(name) and not isinstance(fields[name], str):
                dumps(fields[name], name)
    model = fields.pop("model", None)
    fields.pop("answer", None)
    if "source" not in fields and not isinstance(model, str | None):
        raise Refused(f"model: expected text, got {model!r:.80}")
    fields.setdefault("source", source if model is None else model)
    mask = fields.pop("mask", None)
    if "action" in fields:
        fields["learn"] = mask
    else:
        fields["action"] = mask
    return Sample.of({"role": role, **fields})


def _normalize(fields: dict[str, Any]) -> None:
    """Bring the messages of prompt and response into one form, with the declarations of tools.

    What declares none, such as their names alone, and the tools of a text stay in `meta`.
    """
    meta = fields["meta"]
    for name in ("functions", "tools"):
        tools = fields.pop(name, None) or meta.get(name)
        if isinstance(fields["prompt"], list) and declarations(tools):
            meta.pop(name, None)
            fields["prompt"] = with_tools(normalized(fields["prompt"], "prompt"), tools)
        elif tools is not None:
            meta[name] = tools
    if isinstance(fields["prompt"], list):
        fields["prompt"] = normalized(fields["prompt"], "prompt")
    if "continuation" in meta:
        meta["continuation"] = check_turns(meta["continuation"], "meta.continuation")


def _after_prompt(fields: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The tokens of a record, and the values of each, after those of the prompt."""
    if tokenizer is None:
        raise Refused(
            "tokens: without a mask they are the response's alone; name the model whose tokenizer made them "
            "(--tokenizer MODEL), to put the prompt's before them, or give the prompt's as well, and a mask"
        )
    tokens = fields["tokens"].tolist()
    text = tokenizer.decode(tokens)
    if "".join(text.split()) != "".join(fields["response"].split()):  # tokenizers add and remove spaces
        raise Refused(
            f"tokens: expected those of the response {fields['response']!r:.80}, got those of {text!r:.80}; "
            "give the tokenizer that made them, or drop the column"
        )
    prompt_tokens = tokenizer.prompt(fields["prompt"])
    changes: dict[str, Any] = {}
    unknowns = {"behavior_logp": np.nan, "token_reward": np.nan, "version": UNKNOWN_VERSION, "kept_count": 0}
    for name, unknown in unknowns.items():
        column = fields.get(name)
        if isinstance(column, np.ndarray):
            if len(column) != len(tokens):
                raise Refused(
                    f"{name}: expected one value for each of the response's {len(tokens)} tokens, "
                    f"got {len(column)}"
                )
            changes[name] = np.concatenate([np.full(len(prompt_tokens), unknown, column.dtype), column])
    mask = np.arange(len(prompt_tokens) + len(tokens)) >= len(prompt_tokens)
    sequence = {
        "tokens": np.array(prompt_tokens + tokens, np.int32),
        "mask": mask,
        "tokenizer": tokenizer.fingerprint,
    }
    return changes | sequence


def _meta(fields: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """The record's `meta`, and all values without a field of a sample."""
    meta: dict[str, Any] = fields.get("meta", {})
    extras = {name: value for name, value in record.items() if name not in RECORD}
    if "answer" in fields:
        extras["answer"] = fields["answer"]
    if "model" in fields and "source" in fields:
        extras["model"] = fields["model"]
    if not meta:
        return extras
    for name, value in extras.items():
        if name in meta and meta[name] != value:
            raise Refused(
                f"{name}: the record has {value!r:.80}, and its meta {meta[name]!r:.80}; keep one of them"
            )
    return meta | extras


def read_samples(path: str | Path) -> Iterator[Sample]:
    """The samples of an exported file. Raises `Refused` with FILE:LINE at the first line that isn't one."""
    for line in read_records(path):
        try:
            if line.error:
                raise Refused(line.error)
            yield from_record(line.value)
        except Refused as error:
            raise Refused(f"{line.where}: {error}") from None
