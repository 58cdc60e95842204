"""Build interchange records from columns, messages and tokens; the readers of formats use these functions.

`exchange`, `split` and `reply` make the record of one response, `pair_after` those of a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import count, takewhile
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, is_unknown, messages_in, objects, omit, unpacked
from agro.io.jsonlines import Line
from agro.logs.protocol import Context, Item, Row, Votes
from agro.logs.values import as_reward, flags, list_of_length, number, number_in, numbers, total, wrong
from agro.types import check_turns
from agro.types.conversation import normalized, normalized_message

Record = dict[str, Any]


def split(messages: Any, prompt: Any = None, meta: Any = None, **fields: Any) -> Record:
    """An interchange record whose response is the end of a conversation.

    The prompt is `prompt`, with which the conversation begins, or everything up to the last user message.
    The turns after it are the response: `response` is the text of the last one. If there are several, or
    one with more than text (such as tool calls), `meta.continuation` has them all. `fields`: further fields.

    Raises `Refused` for conversations that don't end with the assistant.
    """
    messages = check_turns(messages, "messages")
    if prompt is not None:
        prompt = normalized(prompt, "prompt")
        if messages[: len(prompt)] != prompt:
            raise wrong("prompt", "the messages that the conversation begins with", prompt)
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
    aside = dict(entry(meta, "meta"))
    if len(turns) > 1 or turns[0].keys() != {"role", "content"}:
        aside["continuation"] = turns
    return {**fields, "prompt": messages[:begins], "response": turns[-1]["content"], "meta": aside}


def exchange(
    prompt: Any, response: Any, names: tuple[str, str], meta: Mapping[str, Any] | None = None, **fields: Any
) -> Record:
    """A record of a prompt and a response, each a text or messages.

    Either may be JSON text of messages, and the response may repeat the prompt's messages. `names`: how the
    file calls the two, for refusals; `fields`: further fields of the record.
    """
    prompt, response = messages_in(prompt), messages_in(response)
    if not isinstance(prompt, str | list):
        raise wrong(names[0], "text or a list of messages", prompt)
    if isinstance(prompt, list):
        prompt = normalized(prompt, names[0])
    if isinstance(response, str):
        return {**fields, "prompt": prompt, "response": response, "meta": dict(meta or {})}
    turns = normalized(objects(response, names[1], "text or a list of messages"), names[1])
    if isinstance(prompt, str):
        opening = until_reply(turns)
        if not opening and len(turns) == 1 and turns[0].keys() == {"role", "content"}:
            return {**fields, "prompt": prompt, "response": turns[0]["content"], "meta": dict(meta or {})}
        if opening and opening[-1].get("content") != prompt:
            raise Refused(
                f"{names[1]}: expected its messages to begin with those of {names[0]}, {prompt!r:.80}"
            )
        prompt = opening or [user(prompt)]
    if turns[: len(prompt)] == prompt:
        turns = turns[len(prompt) :]
    return split(prompt + turns, prompt, meta, **fields)


def until_reply(messages: Iterable[Any]) -> list[Any]:
    """The messages before the assistant's first one."""
    return list(takewhile(lambda message: message.get("role") != "assistant", messages))


def common_start(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    """The messages that both begin with."""
    return [one for one, _ in takewhile(lambda both: both[0] == both[1], zip(a, b))]


TURN = ("role", "content", "tool_calls", "reasoning_content", "tool_call_id", "name")
SAMPLER = ("temperature", "top_p", "top_k", "seed")
_SETTINGS = (*SAMPLER, "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def reply(
    prompt: Any, message: Mapping[str, Any], names: tuple[str, str], meta: Mapping[str, Any], **fields: Any
) -> Record:
    """A record whose response is an assistant message; the message's other keys go into `meta`. If the model
    refused in words, those are the response."""
    if message.get("role", "assistant") != "assistant":
        raise wrong(f"{names[1]}.role", "assistant", message["role"])
    turns = normalized_message({**message, "role": "assistant"}, names[1])
    turn = {name: value for name, value in turns[-1].items() if name in TURN}
    extras = {name: value for name, value in turns[-1].items() if name not in TURN and value != []}
    response: Any = [*turns[:-1], turn]
    if isinstance(prompt, str):
        if turn.keys() != {"role", "content"}:
            raise Refused("expected a prompt of messages before tool calls and reasoning, got text")
        response = turn["content"]
    aside: Record = {"message": extras} if extras else {}
    if message.get("content") is None and message.get("refusal"):
        aside["refusal"] = True
    return exchange(prompt, response, names, aside | dict(meta), **fields)


def with_thought(record: Record, thought: Any) -> Record:
    """The record with reasoning before its response; beside a prompt of text that is in `meta`."""
    turn = {**assistant(record["response"]), "reasoning_content": thought}
    more = {"reasoning": thought} if isinstance(record["prompt"], str) else {"continuation": [turn]}
    return {**record, "meta": {**record["meta"], **more}} if thought else record


def settings(request: Row, names: Sequence[str] = _SETTINGS) -> Record | None:
    """Those of these sampling settings that a request has; None if it has none."""
    named = {name: request[name] for name in names if request.get(name) is not None}
    return named or None


def system(content: str) -> Record:
    return {"role": "system", "content": content}


def user(content: str) -> Record:
    return {"role": "user", "content": content}


def assistant(content: str) -> Record:
    return {"role": "assistant", "content": content}


def call(name: Any, arguments: Any, id: Any = None) -> Record:
    """A tool call as it stands in a message."""
    message = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return message if id is None else {"id": id, **message}


SCORES = (  # columns with the scores of the chosen and the rejected response
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen-rating", "rejected-rating"),
    ("chosen_rating", "rejected_rating"),
)


def scored_pair(chosen: Record, rejected: Record, row: Row, votes: Votes = (None, None)) -> list[Item]:
    """A judged pair; its rewards are the row's scores, if there are any."""
    for record, column in zip((chosen, rejected), score_columns(row)):
        record["reward"] = number(row[column], column, is_text=True)
    return [Item.pair(chosen, rejected, votes)]


def score_columns(row: Row) -> tuple[str, ...]:
    """The columns with the scores of the chosen and the rejected response; empty if there are none."""
    return next((names for names in SCORES if row.keys() >= set(names)), ())


def pair_after(
    prompt: Any, sides: Mapping[str, Any], row: Row, dropped: Collection[str], name: str = "prompt"
) -> list[Item]:
    """A judged pair of responses to one prompt, with the row's scores.

    `sides`: the responses by column, the better one first; `name`: the column of the prompt; `dropped`: other
    columns to leave out of `meta`.
    """
    meta = omit(row, {*sides, *dropped, *score_columns(row)})
    chosen, rejected = (exchange(prompt, turns, (name, side), meta) for side, turns in sides.items())
    return scored_pair(chosen, rejected, row)


def fingerprinted(record: Record, context: Context) -> Record:
    """The record with the fingerprint of --tokenizer. Without one, training encodes the text again.

    Raises `Refused` if that tokenizer doesn't decode the response's tokens to its text.
    """
    if context.tokenizer is None:
        return record
    chosen = record.get("action") or record["mask"]
    positions = [i for i, is_chosen in enumerate(chosen) if is_chosen]
    span = slice(positions[0], positions[-1] + 1) if positions else slice(0)
    decoded = context.tokenizer.decode(record["tokens"][span])
    if "".join(record["response"].split()) not in "".join(decoded.split()):
        expected = f"those of the response {record['response']!r:.80}"
        raise Refused(
            f"tokens: expected {expected}, got those of {decoded!r:.80}; give the tokenizer that made them, "
            "or none"
        )
    return record | {"tokenizer": context.tokenizer.fingerprint}


def token_fields(prompt_ids: list[int], response_ids: list[int]) -> Record:
    """The tokens of a prompt and its response; the mask marks the response."""
    mask = [False] * len(prompt_ids) + [True] * len(response_ids)
    return {"tokens": [*prompt_ids, *response_ids], "mask": mask}


def sampled_fields(row: Row, ids: list[int], length: int, *, mask: str, logps: str) -> Record:
    """Tokens, mask and log-probs of a sequence that ends with a response of `length` tokens.

    The columns `mask` and `logps` have a value for each response token; without a mask all were sampled.
    """
    prompt_length = len(ids) - length
    sampled = [True] * length if row.get(mask) is None else flags(row[mask], mask, length)
    record: Record = {"tokens": ids, "mask": [False] * prompt_length + sampled}
    if row.get(logps) is not None:
        pairs = zip(numbers(row[logps], logps, length), sampled)
        record["behavior_logp"] = [None] * prompt_length + [x if chosen else None for x, chosen in pairs]
    return record


def summed(items: Sequence[Item], row: Row, context: Context) -> list[Item]:
    """The items with the weighted sum of the record's columns that --reward names as their reward."""
    if any(len(item.records) > 1 for item in items):
        raise Refused("--reward: the record is a pair whose responses are judged; leave --reward out")
    values = dict(row)
    for name in row.keys() & context.rewards.keys():
        values[name] = as_reward(number_in(row[name]), context, name)
    reward = total(values, list(row), context.rewards)
    return [item._replace(records=({**item.records[0], "reward": reward},)) for item in items]


def in_step(row: Row, lead: str, parallel: Iterable[str]) -> list[tuple[str, Row]]:
    """A row for each value of the list in the column `lead`, with its name, such as generations[0].

    `parallel`: columns with lists of the same length, or unknown ones. Lists may be written as JSON text.
    """
    lists = {name: unpacked(row.get(name)) for name in (lead, *parallel)}
    if not isinstance(lists[lead], list):
        raise wrong(lead, "a list", lists[lead])
    n = len(lists[lead])
    for name, values in lists.items():
        if is_unknown(values):
            lists[name] = [None] * n
        else:
            lists[name] = list_of_length(values, name, n, f"values, as {lead} has")
    return [(f"{lead}[{i}]", {**row, **{name: lists[name][i] for name in lists}}) for i in range(n)]


def unlisted(lines: Iterable[Line], rows_of: Callable[[dict[str, Any]], Any]) -> Iterator[Line]:
    """The rows that a line lists, as an API's answer does; a line without a list is yielded unchanged."""
    numbers = count(1)
    for line in lines:
        try:
            rows = None if line.error else rows_of(line.value)
        except Refused as error:
            yield line._replace(number=next(numbers), error=str(error))
            continue
        if not isinstance(rows, list):
            yield line._replace(number=next(numbers))
            continue
        for i, row in enumerate(rows, 1):
            location, number = f"{line.where}, row {i}", next(numbers)
            if isinstance(row, dict):
                yield line._replace(where=location, number=number, value=row, size=line.size // len(rows))
            else:
                yield Line(location, number, {}, f"expected an object, got {row!r:.80}")


def grouped(lines: Iterable[Line], key: Callable[[dict[str, Any]], Hashable], name: str) -> Iterator[Line]:
    """One record per key, whose `name` lists the rows with that key, in the order of their first lines.

    An unreadable line is yielded unchanged.
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
