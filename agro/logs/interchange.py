"""The interchange record, a sample as one JSON object without loss, and the preference record.

Arrays are lists, NaN is null. `mask` marks the tokens to learn from. `action` marks those that the policy
chose, if they differ. `kept` concatenates the kept sets of all tokens, and `kept_count` has the number of ids
of each token. Other keys are in `meta`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agro.errors import Refused
from agro.io.json_values import is_unknown
from agro.io.strictjson import dumps
from agro.logs.protocol import Tokenizer
from agro.types import ROLES, UNKNOWN_VERSION, Role, Sample, check_turns
from agro.types.conversation import declarations, normalized, with_tools


class WrongValue(Exception):
    """A value that its field can't have. Its argument is the index of the wrong item in a list."""


class Field(NamedTuple):
    """A field's type. `convert` turns a value that `fits` into a sample's, or raises `WrongValue`."""

    expected: str
    fits: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value


NEEDED = ("prompt", "response", "chosen", "rejected")  # required in the records that have these fields


def typed_fields(record: Mapping[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    """The record's values of these fields; null is unknown.

    Raises `Refused` with the field, what was expected and what came.
    """
    values: dict[str, Any] = {}
    for name, value in record.items():
        field = fields.get(name)
        if field is None or value is None:
            continue
        try:
            if not field.fits(value):
                raise WrongValue
            values[name] = field.convert(value)
        except WrongValue as wrong:
            got = f"{value!r:.80}"
            if wrong.args:
                got = f"{value[wrong.args[0]]!r:.80} at index {wrong.args[0]}"
            raise Refused(f"{name}: expected {field.expected}, got {got}") from None
    for name in NEEDED:
        if name in fields and name not in values:
            got = "null" if name in record else "no such field"
            raise Refused(f"{name}: expected {fields[name].expected}, got {got}")
    return values


def _is(*kinds: type) -> Callable[[Any], bool]:
    """A test for values of these types; true and false aren't integers."""
    return lambda value: isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, float | int) and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _messages(value: Any) -> Any:
    for i, message in enumerate(value if isinstance(value, list) else ()):
        if not isinstance(message, dict):
            raise WrongValue(i)
    return value


def _version(value: Any) -> int | NDArray[np.int32]:
    if isinstance(value, list):
        return _array(value, np.int32, {int})
    if not UNKNOWN_VERSION <= value < 2**63:
        raise WrongValue
    return int(value)


def _flags(value: Any) -> NDArray[np.bool_]:
    try:
        flags = bytes(value)
    except (TypeError, ValueError):
        flags = b""
    if flags.count(0) + flags.count(1) < len(value):
        raise WrongValue(
            next(i for i, x in enumerate(value) if type(x) not in (bool, int) or x not in (0, 1))
        )
    return np.frombuffer(flags, np.bool_)


def _array(value: Any, dtype: type[np.generic], types: set[type]) -> NDArray[Any]:
    """An array of values of these types, read-only so that a sample needs no copy."""
    if not types.issuperset(map(type, value)):
        raise WrongValue(next(i for i, x in enumerate(value) if type(x) not in types))
    try:
        with np.errstate(over="ignore"):
            array = np.array(value, dtype)
    except OverflowError:  # an integer too large for the type, or for a float
        largest = 2**31 if dtype is np.int32 else sys.float_info.max
        raise WrongValue(
            next(i for i, x in enumerate(value) if x is not None and abs(x) >= largest)
        ) from None
    if dtype is np.float32 and np.count_nonzero(np.isinf(array)):
        raise WrongValue(int(np.isinf(array).argmax()))
    array.flags.writeable = False
    return array


_LIST, _ANY = _is(list), lambda value: True
_IDS = Field(  # `Sample` refuses ids below 0
    "a list of token ids: integers from 0 to 2³¹ - 1", _LIST, lambda value: _array(value, np.int32, {int})
)
_FLAGS = Field("a list of true and false, or of 1 and 0", _LIST, _flags)
_NUMBERS = Field(
    "a list of numbers, null where one is unknown",
    _LIST,
    lambda value: _array(value, np.float32, {float, int, type(None)}),
)
_TEXT, _OBJECT, _NAME = Field("text", _is(str)), Field("an object", _is(dict)), _is(str, int)
_VOTES = Field(
    "a number of 0 or more", lambda value: type(value) is not bool and _is_finite(value) and value >= 0, float
)

# A record of one response.
RECORD = {
    "prompt": Field("text, or a list of messages with 'role' and 'content'", _is(str, list), _messages),
    "response": _TEXT,
    "reward": Field("a finite number, true or false, or null where it is unknown", _is_finite, float),
    "prompt_id": Field("text or an integer", _NAME, str),
    "episode": Field("text or an integer", _NAME, str),
    "answer": Field("any value", _ANY),
    "tools": Field("a list of declarations of tools", _ANY),
    "tokens": _IDS,
    "mask": _FLAGS,
    "action": _FLAGS,
    "tokenizer": _TEXT,
    "behavior_logp": _NUMBERS,
    "sampling": _OBJECT,
    "kept": _IDS,
    "kept_count": _IDS._replace(expected="a list of integers of 0 or more"),
    "context_tokens": _IDS,
    "token_reward": _NUMBERS,
    "model": Field("text", _ANY),  # checked if it becomes the source
    "version": Field(
        "an integer (optimizer steps; -1: unknown), or a list of one per token", _is(int, list), _version
    ),
    "role": Field("one of policy, log, expert", lambda value: value in ROLES),
    "source": _TEXT,
    "meta": _OBJECT,
}
FIELDS = tuple(RECORD)

# Further fields of a record of two responses, the chosen one better.
PREFERENCE = {
    "chosen": _TEXT,
    "rejected": _TEXT,
    "votes_chosen": _VOTES,
    "votes_rejected": _VOTES,
}


def from_record(
    record: Mapping[str, Any],
    *,
    role: Role = "log",
    source: str = "",
    tokenizer: Tokenizer | None = None,
    is_json: bool = False,
) -> Sample:
    """The sample of a record; null is unknown. `role` and `source` are the defaults of these fields.

    `is_json`: whether the record was read from JSON, so that the store can hold all of its values.

    Tokens without a mask are those of the response alone; `tokenizer`, which made them, adds those of the
    prompt before them. Raises `Refused` with the field.
    """
    if not is_json and is_unknown(record.get("reward")):
        record = {**record, "reward": None}
    fields = typed_fields(record, RECORD)
    model, answer = fields.pop("model", None), fields.pop("answer", None)
    fields["meta"] = _meta(fields.get("meta", {}), record, answer, model if "source" in fields else None)
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
    if "source" not in fields:
        if not isinstance(model, str | None):
            raise Refused(f"model: expected text, got {model!r:.80}")
        fields["source"] = source if model is None else model
    mask = fields.pop("mask", None)
    if "action" in fields:
        fields["learn"] = mask
    else:
        fields["action"] = mask
    return Sample.of({"role": role, **fields})


def _meta(meta: dict[str, Any], record: Mapping[str, Any], answer: Any, model: Any) -> dict[str, Any]:
    """The record's `meta`, with all values that have no field in a sample."""
    extras = {name: value for name, value in record.items() if name not in RECORD}
    extras |= {} if answer is None else {"answer": answer}
    extras |= {} if model is None else {"model": model}
    for name, value in extras.items():
        if name in meta and meta[name] != value:
            raise Refused(
                f"{name}: the record has {value!r:.80}, and its meta {meta[name]!r:.80}; keep one of them"
            )
    return meta | extras


def _normalize(fields: dict[str, Any]) -> None:
    """Normalize the messages of prompt and response, and add the declarations of tools to the prompt.

    Tools without declarations, such as mere names, and those of a text prompt stay in `meta`.
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
    """Put the prompt's tokens before those of a record, and unknown values before its values per token."""
    if tokenizer is None:
        raise Refused(
            "tokens: without a mask they are the response's alone; name the model whose tokenizer made them "
            "(--tokenizer MODEL), which adds the prompt's before them, or give the prompt's too, and a mask"
        )
    tokens = fields["tokens"].tolist()
    text = tokenizer.decode(tokens)
    if "".join(text.split()) != "".join(fields["response"].split()):  # tokenizers add and remove spaces
        raise Refused(
            f"tokens: expected those of the response {fields['response']!r:.80}, got those of {text!r:.80}; "
            "give the tokenizer that made them, or drop the column"
        )
    prompt_ids = tokenizer.prompt(fields["prompt"])
    changes: dict[str, Any] = {
        "tokens": np.array(prompt_ids + tokens, np.int32),
        "mask": np.arange(len(prompt_ids) + len(tokens)) >= len(prompt_ids),
        "tokenizer": tokenizer.fingerprint,
    }
    unknowns = {"behavior_logp": np.nan, "token_reward": np.nan, "version": UNKNOWN_VERSION, "kept_count": 0}
    for name, unknown in unknowns.items():
        column = fields.get(name)
        if isinstance(column, np.ndarray):
            if len(column) != len(tokens):
                raise Refused(
                    f"{name}: expected one value for each of the response's {len(tokens)} tokens, "
                    f"got {len(column)}"
                )
            changes[name] = np.concatenate([np.full(len(prompt_ids), unknown, column.dtype), column])
    return changes
