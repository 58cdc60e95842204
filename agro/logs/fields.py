"""What readers of formats have in common: values that are checked and converted, and records made of them.

Rewards may be unknown, and messages and objects may be written as JSON in a text. A conversation becomes a
prompt and a response, a reply to messages one with the settings that it was sampled with.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import count, takewhile
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, is_unknown, messages_in, objects, text, unpacked
from agro.io.jsonlines import Line
from agro.io.strictjson import loads
from agro.logs.labels import as_reward, number_in
from agro.logs.protocol import Context, Item, Row, Votes
from agro.types import check_turns
from agro.types.conversation import normalized, normalized_message, text_of


def split(record: dict[str, Any]) -> dict[str, Any]:
    """An interchange record of a conversation's last assistant turns.

    The prompt is `prompt`, messages that the conversation begins with, or all up to the last message of a
    user. What follows is the response: `response` is the text of its last turn, and where it is more than
    one plain turn (tools are called, users answer), `meta.continuation` has all of them.

    Raises `Refused` for conversations that don't end with the assistant.
    """
    messages, prompt = check_turns(record["messages"], "messages"), record.get("prompt")
    if prompt is not None:
        prompt = normalized(prompt, "prompt")
        if messages[: len(prompt)] != prompt:
            raise Refused(
                f"prompt: expected the messages that the conversation begins with, got {prompt!r:.80}"
            )
        begins = len(prompt)
    else:
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if not users:
            raise Refused(
                "messages: expected a message of a user, after which the response begins; give `prompt` as "
                "well"
            )
        begins = users[-1] + 1
    turns = messages[begins:]
    if not turns:
        raise Refused(f"messages after the prompt's {begins}: expected those of an assistant, got none")
    meta = entry(record.get("meta"), "meta")
    if len(turns) > 1 or turns[0].keys() != {"role", "content"}:
        meta = {**meta, "continuation": turns}
    remaining = {name: value for name, value in record.items() if name != "messages"}
    return {**remaining, "prompt": messages[:begins], "response": turns[-1]["content"], "meta": meta}


def until_reply(messages: Iterable[Any]) -> list[Any]:
    """The messages before the first one of the assistant."""
    return list(takewhile(lambda message: message.get("role") != "assistant", messages))


def common_start(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """The messages that both begin with."""
    return [one for one, _ in takewhile(lambda both: both[0] == both[1], zip(first, second))]


def number(value: Any, name: str) -> float | None:
    """A number or true and false; None for null and NaN, which are unknown. Raises `Refused` for others."""
    if is_unknown(value):
        return None
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise Refused(f"{name}: expected a finite number, or null where it is unknown, got {value!r:.80}")


def parsed(value: str, name: str) -> Any:
    """What is written as JSON in a text, or as `unpacked` reads it."""
    inner = unpacked(value)
    if not isinstance(inner, str):
        return inner
    try:
        return loads(value)
    except ValueError:
        raise Refused(f"{name}: expected a number, true, false, or JSON, got {value!r:.80}") from None


def integer(value: Any, name: str) -> int:
    """An integer, also one written as text, as some programs do."""
    if isinstance(value, str) and value.strip().lstrip("-").isdigit():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise Refused(f"{name}: expected an integer, got {value!r:.80}")


def exchange(prompt: Any, response: Any, names: tuple[str, str]) -> dict[str, Any]:
    """`prompt`, `response` and what belongs to them, of two texts, or of messages and the turns after them.

    Both may hold messages as JSON, and the response may begin with those of the prompt. `names` are those of
    both in the file, for messages.
    """
    prompt, response = messages_in(prompt), messages_in(response)
    if not isinstance(prompt, str | list):
        raise Refused(f"{names[0]}: expected text or a list of messages, got {prompt!r:.80}")
    if isinstance(prompt, list):
        prompt = normalized(prompt, names[0])
    if isinstance(response, str):
        return {"prompt": prompt, "response": response}
    turns = normalized(objects(response, names[1], "text or a list of messages"), names[1])
    if isinstance(prompt, str):
        opening = until_reply(turns)
        if not opening and len(turns) == 1 and turns[0].keys() == {"role", "content"}:
            return {"prompt": prompt, "response": text(turns[0]["content"], names[1])}
        if opening and opening[-1].get("content") != prompt:
            raise Refused(
                f"{names[1]}: expected its messages to begin with those of {names[0]}, {prompt!r:.80}"
            )
        prompt = opening or [{"role": "user", "content": prompt}]
    if turns[: len(prompt)] == prompt:
        turns = turns[len(prompt) :]
    return split({"messages": prompt + turns, "prompt": prompt})


def total(
    row: Row, columns: Collection[str], weights: Mapping[str, float], *, partial: bool = False
) -> float | None:
    """The reward of a record with these columns of rewards: the only one, or the weighted sum of the named.

    It is unknown where a part is; with `partial`, for trainers that sum the known parts, where all are.
    Raises `Refused` where there are several and none is named, since they may be parts of one sum, or another
    scale of the same.
    """
    if not weights and len(columns) > 1:
        raise Refused(
            f"reward: there are several columns of rewards ({', '.join(columns)}), and no weights in the "
            f"file; say --reward {next(iter(columns))}, or several with weights, --reward NAME=WEIGHT"
        )
    weights = weights or dict.fromkeys(columns, 1.0)
    for name in weights:
        if name not in row:
            raise Refused(f"--reward {name}: no such column; there are {', '.join(columns) or 'none'}")
    parts = {name: number(row[name], name) for name in weights}
    terms = [weights[name] * part for name, part in parts.items() if part is not None]
    if len(terms) < len(parts) and not partial:
        return None
    return sum(terms) if terms else None


def summed(items: Sequence[Item], row: Row, context: Context) -> list[Item]:
    """The items with a reward that --reward sums of the record's columns."""
    if any(len(item.records) > 1 for item in items):
        raise Refused("--reward: the record is a pair, and its responses are judged; leave --reward out")
    values = dict(row)
    for name in row.keys() & context.rewards.keys():
        values[name] = as_reward(number_in(row[name]), context, name)
    reward = total(values, list(row), context.rewards)
    return [item._replace(records=({**item.records[0], "reward": reward},)) for item in items]


def one_of(value: Any, names_of: Mapping[str, str], name: str) -> str:
    """What a text stands for, such as a role for the name that another program gives it."""
    if isinstance(value, str) and value in names_of:
        return names_of[value]
    raise Refused(f"{name}: expected one of {', '.join(names_of)}, got {value!r:.80}")


def a_list(value: Any, name: str) -> list[Any]:
    """A list; an empty one where there is none."""
    if value is None:
        return []
    if isinstance(value, list):
        return value
    raise Refused(f"{name}: expected a list, got {value!r:.80}")


def integers(value: Any, name: str) -> list[int]:
    """A list of integers, such as token ids."""
    if isinstance(value, list) and all(isinstance(x, int) and not isinstance(x, bool) for x in value):
        return value
    raise Refused(f"{name}: expected a list of integers, got {value!r:.80}")


def numbers(value: Any, name: str, length: int) -> list[float | None]:
    """A list of that many numbers, null and NaN where one is unknown."""
    if not isinstance(value, list) or len(value) != length:
        got = f"{len(value)} values" if isinstance(value, list) else f"{value!r:.80}"
        raise Refused(f"{name}: expected {length} numbers, one a token, got {got}")
    return [number(x, f"{name}[{i}]") for i, x in enumerate(value)]


def flags(value: Any, name: str, length: int) -> list[bool]:
    """A list of that many flags, as true and false or as 1 and 0."""
    values = numbers(value, name, length)
    bad = next((x for x in values if x not in (0.0, 1.0)), 1.0)
    if bad != 1.0:
        raise Refused(f"{name}: expected true and false, or 1 and 0, got {bad!r}")
    return [x == 1.0 for x in values]


def fingerprinted(record: dict[str, Any], context: Context) -> dict[str, Any]:
    """The record with what made its tokens, where --tokenizer names it. Otherwise the text is encoded anew.

    Raises `Refused` where the tokens of the response aren't its text with that tokenizer.
    """
    if context.tokenizer is None:
        return record
    chosen = record.get("action") or record["mask"]
    positions = [i for i, is_chosen in enumerate(chosen) if is_chosen]
    span = slice(positions[0], positions[-1] + 1) if positions else slice(0)
    decoded = context.tokenizer.decode(record["tokens"][span])
    if "".join(record["response"].split()) not in "".join(decoded.split()):
        raise Refused(
            f"tokens: expected those of the response {record['response']!r:.80}, got those of {decoded!r:.80}"
            "; give the tokenizer that made them, or none"
        )
    return record | {"tokenizer": context.tokenizer.fingerprint}


def token_fields(prompt_ids: list[int], response_ids: list[int]) -> dict[str, Any]:
    """The tokens of a prompt and of the response to it, which the mask marks."""
    mask = [False] * len(prompt_ids) + [True] * len(response_ids)
    return {"tokens": [*prompt_ids, *response_ids], "mask": mask}


def sampled_fields(row: Row, ids: list[int], length: int, *, mask: str, logps: str) -> dict[str, Any]:
    """Tokens, mask and log-probs of a sequence that ends with a response of `length` tokens.

    The columns `mask` and `logps` have a value for each of these; without a mask all were sampled.
    """
    prompt_length = len(ids) - length
    sampled = [True] * length if row.get(mask) is None else flags(row[mask], mask, length)
    record: dict[str, Any] = {"tokens": ids, "mask": [False] * prompt_length + sampled}
    if row.get(logps) is not None:
        pairs = zip(numbers(row[logps], logps, length), sampled)
        record["behavior_logp"] = [None] * prompt_length + [x if chosen else None for x, chosen in pairs]
    return record


def joined_record(context: Context, column: str, key: str, file: str, noun: str) -> Row:
    """The record of --join that a row names in `column`. Raises `Refused` where there is none."""
    if not context.joined:
        raise Refused(f"{column}: the prompts are in {file}; name it with --join FILE")
    if key not in context.joined:
        raise Refused(f"{column}: the file of --join has no {noun} {key!r}")
    return context.joined[key]


def digest(*values: Any) -> str:
    """A short text that equal values share."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


_TURN = ("role", "content", "tool_calls", "reasoning_content", "tool_call_id", "name")
_SAMPLER = ("temperature", "top_p", "top_k", "min_p", "seed")
_SETTINGS = (*_SAMPLER, "presence_penalty", "frequency_penalty", "repetition_penalty")


def reply(prompt: Any, message: Mapping[str, Any], names: tuple[str, str]) -> dict[str, Any]:
    """`prompt`, `response` and `meta` of a message of the assistant. A refusal in words is a response."""
    if message.get("role", "assistant") != "assistant":
        raise Refused(f"{names[1]}.role: expected assistant, got {message['role']!r:.80}")
    turns = normalized_message({**message, "role": "assistant"}, names[1])
    turn = {name: value for name, value in turns[-1].items() if name in _TURN}
    extras = {name: value for name, value in turns[-1].items() if name not in _TURN and value != []}
    response: Any = [*turns[:-1], turn]
    if isinstance(prompt, str):
        if turn.keys() != {"role", "content"}:
            raise Refused("expected a prompt of messages before tool calls and reasoning, got text")
        response = turn["content"]
    record = exchange(prompt, response, names)
    meta = record.get("meta", {}) | ({"message": extras} if extras else {})
    if message.get("content") is None and message.get("refusal"):
        meta |= {"refusal": True}
    return record | {"meta": meta}


def settings(request: Row, names: Sequence[str] = _SETTINGS) -> dict[str, Any] | None:
    """The settings of sampling that a request has, of these; None where it has none."""
    named = {name: request[name] for name in names if request.get(name) is not None}
    return named or None


def listed(value: Any, name: str) -> list[dict[str, Any]]:
    """A list of objects, an empty one where there is none."""
    return [] if value is None else objects(value, name)


def rating(value: Any, name: str) -> float | None:
    """A number, also one written as text; None for "N/A", which is unknown."""
    if not isinstance(value, str):
        return number(value, name)
    if value.strip().upper() in ("", "N/A"):
        return None
    try:
        return number(float(value), name)
    except ValueError:
        raise Refused(f"{name}: expected a number or 'N/A', got {value!r:.80}") from None


SCORES = (  # of a chosen and a rejected response
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen-rating", "rejected-rating"),
    ("chosen_rating", "rejected_rating"),
)


def scores(row: Row) -> dict[str, float | None]:
    """The scores of the chosen and of the rejected response by their columns; none where there are none."""
    names = next((names for names in SCORES if row.keys() >= set(names)), ())
    return {name: rating(row[name], name) for name in names}


def rated_pair(
    chosen: dict[str, Any], rejected: dict[str, Any], row: Row, votes: Votes = (None, None)
) -> list[Item]:
    """A judged pair, whose rewards are the scores of the row, where it has them."""
    for record, score in zip((chosen, rejected), scores(row).values()):
        record["reward"] = score
    return [Item.pair(chosen, rejected, votes)]


def plain(content: Any, name: str) -> str:
    """The text of a message's content: text, or parts of text. Raises `Refused` for images and others."""
    return "" if content is None else text_of(content, name)


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def call(name: Any, arguments: Any, id: Any = None) -> dict[str, Any]:
    """A tool's call as messages have it."""
    message = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return message if id is None else {"id": id, **message}


def unlisted(lines: Iterable[Line], rows_of: Callable[[dict[str, Any]], Any]) -> Iterator[Line]:
    """The rows that a line lists, such as an interface's answer; of a line without a list the line itself."""
    numbers = count(1)
    for line in lines:
        rows = None if line.error else rows_of(line.value)
        if not isinstance(rows, list):
            yield line._replace(number=next(numbers))
            continue
        for i, row in enumerate(rows, 1):
            where, number = f"{line.where}, row {i}", next(numbers)
            if isinstance(row, dict):
                yield line._replace(where=where, number=number, value=row, size=line.size // len(rows))
            else:
                yield Line(where, number, {}, f"expected an object, got {row!r:.80}")


def grouped(lines: Iterable[Line], key: Callable[[dict[str, Any]], Hashable], name: str) -> Iterator[Line]:
    """A record for each key, with the rows that have it in `name`, in the order of their first lines.

    A line that can't be read is passed on.
    """
    groups: dict[Hashable, list[Line]] = {}
    for line in lines:
        if line.error:
            yield line
        else:
            groups.setdefault(key(line.value), []).append(line)
    for members in groups.values():
        rows, size = [line.value for line in members], sum(line.size for line in members)
        yield members[0]._replace(value={name: rows}, size=size)
