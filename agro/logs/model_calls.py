"""What traces of model calls have in common: a prompt, one response or several, scores by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, is_unknown, objects, unpacked
from agro.logs.fields import digest, exchange, number, total
from agro.logs.protocol import Context, Item
from agro.types import end_in
from agro.types.conversation import normalized_message

Message = dict[str, Any]


def turn(value: Any, name: str) -> Message:
    """A message as OpenAI's interface has it, its content as text; other known keys are kept."""
    message = {"content": "", **{key: x for key, x in entry(value, name).items() if x is not None}}
    return normalized_message(message, name)[-1]


def blocks(content: Any, name: str) -> list[dict[str, Any]]:
    """The parts of a message's content; a text is one part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else objects(content, name)


def responses(
    prompt: str | list[Message],
    replies: Sequence[str | Message | list[Message]],
    name: str,
    common: Mapping[str, Any],
) -> list[Item]:
    """An item a response of the call: text, a message, or turns. `common`: further fields of the record,
    `meta` among them."""
    if not replies:
        raise Refused(f"{name}: expected a response, got none")
    items = []
    for i, reply in enumerate(replies):
        asked, answer, finish = prompt, reply, None
        if isinstance(reply, Completion):
            answer, finish = str(reply), reply.finish
        elif not isinstance(reply, str):
            turns = [reply] if isinstance(reply, dict) else reply
            finish = turns[-1].get("finish_reason")
            answer = [{key: x for key, x in turn.items() if key != "finish_reason"} for turn in turns]
            if isinstance(prompt, str):
                asked = [{"role": "user", "content": prompt}]
        record = exchange(asked, answer, ("prompt", f"{name}[{i}]"))
        meta = record.get("meta", {}) | common.get("meta", {}) | ({"finish": finish} if finish else {})
        items.append(Item.of({**record, **common, "meta": meta}, f"{name}[{i}]"))
    return items


def scored(scores: Mapping[str, Sequence[Any]], context: Context) -> float | None:
    """The reward of scores by name: the only one, or those that --reward names. None where there is none.

    Raises `Refused` for several without --reward, for several different values of one without
    --choose scores=mean or scores=last, and for a named one that is text.
    """
    values = {name: _value(name, each, context) for name, each in scores.items()}
    if context.rewards:
        for name in context.rewards:
            if isinstance(values.get(name), str):
                raise Refused(
                    f"--reward {name}: its values are text, such as {values[name]!r:.80}, and no numbers"
                )
        values = {name: values.get(name) for name in context.rewards}
    numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
    return total(numbers, list(numbers), context.rewards)


def _value(name: str, values: Sequence[Any], context: Context) -> Any:
    """The value of one score: a number, a text that is a category, or None."""
    texts = [value for value in values if isinstance(value, str)]
    if texts:
        return texts[-1]
    numbers = [x for x in (number(value, name) for value in values) if x is not None]
    method = context.choose.get("scores")
    if method not in (None, "mean", "last"):
        raise Refused(f"--choose scores={method}: expected mean, or last")
    if len(set(numbers)) > 1 and method is None:
        raise Refused(
            f"{name}: expected one value of this score, got {numbers}; say --choose scores=mean, or "
            "scores=last"
        )
    if method == "mean" and numbers:
        return sum(numbers) / len(numbers)
    return numbers[-1] if numbers else None


def identified(row: Mapping[str, Any], *ids: Any) -> str:
    """What the records of one call share in every export: its ids; the record's content where it has none."""
    return digest(*ids) if all(id is not None for id in ids) else digest(dict(row))


def joined_key(*ids: Any) -> str:
    """The key in --join of a record: its id, or that of what is scored and the name of the score."""
    return str(ids[0]) if len(ids) == 1 else json.dumps(list(map(str, ids)))


def joined_scores(
    context: Context, noun: str, *ids: Any, columns: Sequence[str] = ("value",)
) -> dict[str, list[Any]]:
    """The scores of --join that --reward names, each of the first of `ids` that has one.

    `noun`: what the scores are, for messages. `columns`: of the value, by preference. Raises `Refused` where
    --reward names none.
    """
    if context.joined and not context.rewards:
        raise Refused(f"reward: say which of the joined {noun} it is, --reward NAME")
    scores = {}
    for name in context.rewards:
        keys = [joined_key(id, name) for id in ids]
        rows = [context.joined[key] for key in keys if key in context.joined]
        if rows:
            scores[name] = [next((rows[0][column] for column in columns if column in rows[0]), None)]
    return scores


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes with dots in their names as objects; those with numbers as lists."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *path, key = name.split(".")
        node = tree
        for part in path:
            inner = node.get(part)
            if not isinstance(inner, dict):
                inner = node[part] = {}
            node = inner
        node[key] = _nested(value)
    return {name: _listed(value) for name, value in tree.items()}


def _nested(value: Any) -> Any:
    if isinstance(value, list):
        return [_nested(item) for item in value]
    return unflatten(value) if isinstance(value, dict) else value


def _listed(value: Any) -> Any:
    """An object whose names are numbers as a list, in their order."""
    if not isinstance(value, dict):
        return value
    inner = {name: _listed(item) for name, item in value.items()}
    if inner and all(name.isdigit() for name in inner):
        return [inner[name] for name in sorted(inner, key=int)]
    return inner


_REASONS = (
    *("finish", "finish_reason", "finishReason", "finish_reasons", "finish_details", "native_finish_reason"),
    *("stop_reason", "stopReason", "stop_type", "done_reason", "completion_reason", "completionReason"),
    *("gen_ai.response.finish_reasons", "llm.finish_reason"),
)
_RESPONSES = frozenset(("output", "incomplete_details"))  # beside which a status is of OpenAI's Responses
_FLAGS = ("truncated", "is_truncated", "isTruncated", "was_truncated")
_TRUE = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
_INNER = ("response_metadata", "generation_info", "message", "completion")
NAMES = frozenset((*_REASONS, *_FLAGS, *_INNER, "incomplete_details"))
FINISH = {"finished": "stop", "cut": "length"}  # what `meta["finish"]` has; nothing where it is unknown


class Completion(str):
    """The text of a completion, with what was said of its end."""

    finish: Any = None

    @classmethod
    def of(cls, text: str, finish: Any) -> Completion:
        completion = cls(text)
        completion.finish = finish
        return completion


def reported(value: Any) -> Any:
    """What an object says of the end of its response, such as a choice, a message or a run; None: nothing.

    Of several that differ, that it was cut counts.
    """
    if not isinstance(value, Mapping):
        return None
    found = [unpacked(value[name]) for name in _REASONS if not is_unknown(value.get(name))]
    for name in _FLAGS:
        flag = value.get(name)
        flag = _TRUE.get(flag.strip().casefold(), flag) if isinstance(flag, str) else flag
        if not is_unknown(flag):
            found.append({True: "truncated", False: "complete"}.get(flag, flag) if flag in (0, 1) else flag)
    details = value.get("incomplete_details")
    if isinstance(details, Mapping):
        found.append(details.get("reason") or "incomplete")
    if value.get("status") in ("incomplete", "completed") and not _RESPONSES.isdisjoint(value):
        found.append(value["status"])
    found += [inner for name in _INNER if (inner := reported(unpacked(value.get(name)))) is not None]
    order = ("cut", "finished", None, "unknown")
    return min(found, key=lambda each: order.index(end_in(each)), default=None)


def settle(meta: dict[str, Any]) -> Any:
    """Make `meta["finish"]` "stop" (finished), "length" (cut) or nothing (unknown), of what `meta` says.

    Another word that stood there becomes `finish_reason`. Returns what is said and isn't known, else None.
    """
    if NAMES.isdisjoint(meta):
        return None
    said = reported(meta)
    end = end_in(said)
    finish, prior = FINISH.get(end or ""), meta.pop("finish", None)
    if finish is not None:
        meta["finish"] = finish
    if prior not in (None, finish):
        meta.setdefault("finish_reason", prior)
    return said if end is None else None
