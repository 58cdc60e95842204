"""The interchange record: a sample as one JSON object, bit by bit; preferences and conversations beside it.

Arrays are lists, NaN is null. `mask` marks the tokens to learn from; `action`, those that the policy chose,
is given as well where the two differ. `kept` has the kept sets of all tokens one after the other, and
`kept_count` says how many ids belong to each token. Other keys are in `meta`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agro.errors import Refused
from agro.strictjson import dumps
from agro.types import UNKNOWN_VERSION, Role, Sample, Text

Token = Annotated[int, Field(ge=0, lt=2**31)]
Flag = bool | Literal[0, 1]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Votes = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Version = Annotated[int, Field(ge=UNKNOWN_VERSION, lt=2**63)]
TokenVersion = Annotated[int, Field(ge=UNKNOWN_VERSION, lt=2**31)]


class Strict(BaseModel):
    """A field's docstring is what is expected of it; null, or a missing field, is unknown."""

    model_config = ConfigDict(strict=True, frozen=True, use_attribute_docstrings=True)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """The fields of a record. Raises `Refused` naming the field, what was expected and what came."""
        fields = cls.__pydantic_fields__
        known = {name: value for name, value in record.items() if value is not None and name in fields}
        try:
            return cls.model_validate(known)
        except ValidationError as error:
            places = [e["loc"] for e in error.errors(include_url=False, include_context=False)]
        name = str(places[0][0])
        index = next((i for place in places if place[0] == name for i in place if isinstance(i, int)), None)
        if name not in known:
            got = "null" if name in record else "no such field"
        elif index is None:
            got = f"{known[name]!r:.80}"
        else:
            got = f"{known[name][index]!r:.80} at index {index}"
        raise Refused(f"{name}: expected {fields[name].description}, got {got}")


class Record(Strict):
    """One response."""

    prompt: str | list[dict[str, Any]]
    """text, or a list of messages with 'role' and 'content'"""
    response: str
    """text"""
    reward: bool | Finite | None = None
    """a finite number, true or false, or null where it is unknown"""
    prompt_id: str | int | None = None
    """text or an integer"""
    episode: str | int | None = None
    """text or an integer"""
    answer: Any = None
    """any value"""
    tokens: list[Token] | None = None
    """a list of token ids: integers from 0 to 2³¹ - 1"""
    mask: list[Flag] | None = None
    """a list of true and false, or of 1 and 0"""
    action: list[Flag] | None = None
    """a list of true and false, or of 1 and 0"""
    tokenizer: str | None = None
    """text"""
    behavior_logp: list[float | None] | None = None
    """a list of numbers, null where one is unknown"""
    sampling: dict[str, Any] | None = None
    """an object"""
    kept: list[Token] | None = None
    """a list of token ids: integers from 0 to 2³¹ - 1"""
    kept_count: list[Token] | None = None
    """a list of integers of 0 or more"""
    context_tokens: list[Token] | None = None
    """a list of token ids: integers from 0 to 2³¹ - 1"""
    token_reward: list[float | None] | None = None
    """a list of numbers, null where one is unknown"""
    model: Any = None
    """text"""
    version: Version | list[TokenVersion] | None = None
    """an integer (optimizer steps; -1: unknown), or a list of one per token"""
    role: Role | None = None
    """one of policy, log, expert"""
    source: str | None = None
    """text"""
    meta: dict[str, Any] | None = None
    """an object"""


class Preference(Strict):
    """Two responses to a prompt, the chosen one better; the other fields are as of a record."""

    chosen: str
    """text"""
    rejected: str
    """text"""
    votes_chosen: Votes | None = None
    """a number of 0 or more"""
    votes_rejected: Votes | None = None
    """a number of 0 or more"""


class Conversation(Strict):
    """Messages, the last ones a response; see `agro.formats.conversation`."""

    messages: list[dict[str, Any]]
    """a list of messages with 'role' and 'content' (or 'tool_calls')"""
    prompt: list[dict[str, Any]] | None = None
    """the messages that the conversation begins with"""
    meta: dict[str, Any] | None = None
    """an object"""


FIELDS = tuple(Record.model_fields)


class Tokenizer(Protocol):
    """What made the tokens of a log's responses; `agro.encoding.Encoder` is one."""

    @property
    def fingerprint(self) -> str: ...

    def prompt(self, text: Text) -> list[int]: ...

    def ids(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def to_record(sample: Sample) -> dict[str, Any]:
    """What `from_record` gives an equal sample for. Unknown fields are dropped, `reward` excepted."""
    meta = dict(sample.meta)
    answer = meta.pop("answer") if meta.get("answer") is not None else None
    record = {
        "prompt": sample.prompt,
        "response": sample.response,
        "reward": sample.reward,
        "prompt_id": sample.prompt_id,
        "role": sample.role,
        "source": sample.source,
    }
    optional = {
        "episode": sample.episode,
        "answer": answer,
        "tokens": _list(sample.tokens),
        "mask": _list(sample.mask),
        "action": None if sample.learn is None else _list(sample.action),
        "tokenizer": sample.tokenizer,
        "behavior_logp": _list(sample.behavior_logp),
        "sampling": sample.sampling,
        "kept": _list(sample.kept),
        "kept_count": _list(sample.kept_count),
        "context_tokens": _list(sample.context_tokens),
        "token_reward": _list(sample.token_reward),
        "version": None if _is_unknown(sample.version) else _list(sample.version),
        "meta": meta or None,
    }
    return record | {name: value for name, value in optional.items() if value is not None}


def from_record(
    record: Mapping[str, Any],
    *,
    role: Role = "log",
    source: str = "",
    tokenizer: Tokenizer | None = None,
) -> Sample:
    """The sample of a record; null is unknown. `role` and `source` are those of records without.

    Tokens without a mask are those of the response alone: `tokenizer`, which made them, puts those of the
    prompt before them. Raises `Refused` naming the field.
    """
    fields = Record.of(record)
    if fields.tokens is not None and fields.mask is None and fields.action is None:
        fields = _after_prompt(fields, fields.tokens, tokenizer)
    elif fields.prompt == "" and fields.prompt_id is None:
        _check_prompt_is_empty(fields)
    meta = _meta(fields, record)
    for name, value in (("prompt", fields.prompt), ("sampling", fields.sampling), ("meta", meta)):
        if value and isinstance(value, list | dict):  # a table's may be none of JSON, and so of the store
            dumps(value, name)
    return Sample(
        prompt=fields.prompt,
        response=fields.response,
        reward=None if fields.reward is None else float(fields.reward),
        prompt_id="" if fields.prompt_id is None else str(fields.prompt_id),
        episode=None if fields.episode is None else str(fields.episode),
        tokens=_array(fields.tokens),
        action=_array(fields.mask if fields.action is None else fields.action, np.bool_),
        learn=None if fields.action is None else _array(fields.mask, np.bool_),
        tokenizer=fields.tokenizer,
        behavior_logp=_array(fields.behavior_logp, np.float32),
        sampling=fields.sampling,
        kept=_array(fields.kept),
        kept_count=_array(fields.kept_count),
        context_tokens=_array(fields.context_tokens),
        token_reward=_array(fields.token_reward, np.float32),
        version=UNKNOWN_VERSION if fields.version is None else _array(fields.version),
        role=fields.role or role,
        source=_source(fields, source),
        meta=meta,
    )


def _after_prompt(fields: Record, tokens: list[int], tokenizer: Tokenizer | None) -> Record:
    """The record with its tokens, and the values of each, after those of the prompt."""
    if tokenizer is None:
        raise Refused(
            "tokens: without a mask they are the response's alone; name the model whose tokenizer made them "
            "(--tokenizer MODEL), to put the prompt's before them, or give the prompt's as well, and a mask"
        )
    text = tokenizer.decode(tokens)
    if "".join(text.split()) != "".join(fields.response.split()):  # tokenizers add and remove spaces
        raise Refused(
            f"tokens: expected those of the response {fields.response!r:.80}, got those of {text!r:.80}; "
            "give the tokenizer that made them, or drop the column"
        )
    before = tokenizer.prompt(fields.prompt)
    values: dict[str, Any] = {}
    unknowns = {"behavior_logp": None, "token_reward": None, "version": UNKNOWN_VERSION, "kept_count": 0}
    for name, unknown in unknowns.items():
        given = getattr(fields, name)
        if isinstance(given, list):
            if len(given) != len(tokens):
                raise Refused(
                    f"{name}: expected one value for each of the response's {len(tokens)} tokens, "
                    f"got {len(given)}"
                )
            values[name] = [unknown] * len(before) + given
    mask = [False] * len(before) + [True] * len(tokens)
    changes = {"tokens": before + tokens, "mask": mask, "tokenizer": tokenizer.fingerprint}
    return fields.model_copy(update=changes | values)


def _check_prompt_is_empty(fields: Record) -> None:
    """Raise `Refused` for prompts that only the tokens have: without ids all of them would be one group."""
    actions = fields.action or fields.mask or []
    before = actions.index(True) if True in actions else 0
    if before > 1:
        raise Refused(
            f"prompt: expected the text of the {before} tokens before the response, got an empty text; "
            "decode them, or give the prompt_id"
        )


def _meta(fields: Record, record: Mapping[str, Any]) -> dict[str, Any]:
    """The record's `meta`, and all values without a field of a sample."""
    meta = dict(fields.meta or {})
    others = {name: value for name, value in record.items() if name not in FIELDS}
    if fields.answer is not None:
        others["answer"] = fields.answer
    if fields.model is not None and fields.source is not None:
        others["model"] = fields.model
    for name, value in others.items():
        if name in meta and meta[name] != value:
            raise Refused(
                f"{name}: the record has {value!r:.80}, and its meta {meta[name]!r:.80}; keep one of them"
            )
    return meta | others


def _source(fields: Record, default: str) -> str:
    if fields.source is not None:
        return fields.source
    if fields.model is None:
        return default
    if not isinstance(fields.model, str):
        raise Refused(f"model: expected text, got {fields.model!r:.80}")
    return fields.model


def _is_unknown(version: int | NDArray[np.int32]) -> bool:
    return isinstance(version, int) and version == UNKNOWN_VERSION


def _list(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype != np.float32:
        return value.tolist()
    return [None if x != x else x for x in value.tolist()]


def _array(value: Any, dtype: type[np.generic] = np.int32) -> Any:
    if not isinstance(value, list):
        return value
    array = np.array(value, dtype)
    array.flags.writeable = False  # so that a sample needs no copy
    return array
