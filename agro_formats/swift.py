"""ms-swift: logged completions, and its data sets."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from agro.errors import Refused
from agro.io.json_values import objects, omit, text
from agro.logs.declared import Columns
from agro.logs.fields import assistant, integer, split, total, user
from agro.logs.protocol import Context, Item, Row

_STEP = ("step", "gen_step")  # gen_step: of the Megatron trainer
_NO_REWARD = (*_STEP, "advantages", "entropy", "advantage")
COMPLETION = Columns("prompt", "completion", messages=True)


def is_columns(row: Row) -> bool:
    named = [row[name] for name in ("prompt", "completion", *_STEP) if name in row]
    return len(named) >= 3 and all(isinstance(value, list) for value in named)


def read_completions(row: Row, context: Context) -> list[Item]:
    """A line has a list a column, all of one length: one value a response."""
    n = len(row["completion"])
    for name, values in row.items():
        if not isinstance(values, list) or len(values) != n:
            got = f"{len(values)} values" if isinstance(values, list) else f"{values!r:.80}"
            raise Refused(f"{name}: expected {n} values, as completion has, got {got}")
    rewards = [
        name
        for name, values in row.items()
        if name not in _NO_REWARD
        and all(isinstance(x, int | float | None) and not isinstance(x, bool) for x in values)
    ]
    step = next(name for name in _STEP if name in row)
    items = []
    for i in range(n):
        one = {name: values[i] for name, values in row.items()}
        record = COMPLETION.record(one, context)
        record["reward"] = total(one, rewards, context.rewards, partial=True)
        record["meta"][step] = integer(one[step], step)
        items.append(Item.of(record, f"completion[{i}]"))
    return items


def read_pair(row: Row, context: Context) -> list[Item]:
    """The last turn of the assistant against another one, or against another end of the conversation."""
    messages = _without_loss(objects(row["messages"], "messages"))
    chosen = split({"messages": messages})
    if "rejected_messages" in row:
        rejected = _without_loss(objects(row["rejected_messages"], "rejected_messages"))
    elif isinstance(row["rejected_response"], list):
        rejected = chosen["prompt"] + _without_loss(objects(row["rejected_response"], "rejected_response"))
    else:
        rejected = [*messages[:-1], assistant(text(row["rejected_response"], "rejected_response"))]
    worse = split({"messages": rejected})
    if chosen["prompt"] != worse["prompt"]:
        raise Refused("messages: expected the rejected ones to have the same messages before the response")
    for record in (chosen, worse):
        record["meta"] |= omit(row, ("messages", "rejected_response", "rejected_messages"))
    return [Item.pair(chosen, worse)]


def _without_loss(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages without what says which of them are learned from."""
    return [{k: v for k, v in message.items() if k not in ("loss", "loss_scale")} for message in messages]


def read_turns(row: Row, context: Context) -> list[Item]:
    """A conversation of which some turns are learned from. Those with `loss` false are given: the turns
    between two of them are a response of their own. One with a `label` (of KTO) is judged."""
    messages = objects(row["messages"], "messages")
    label = row.get("label")
    common: dict[str, Any] = {"role": "expert"} if label is None else {"reward": label}
    scales = [message.get("loss_scale") for message in messages]
    conversation, meta = _without_loss(messages), omit(row, ("messages", "label"))
    if any(scale is not None for scale in scales):
        meta["loss_scale"] = scales
    items = []
    for start, end in _learned(messages):
        if not isinstance(label, bool | None):
            raise Refused(f"label: expected true or false, got {label!r:.80}")
        record: dict[str, Any] = {"messages": conversation[: end + 1]}
        if start:
            record["prompt"] = conversation[:start]
        record = split(record)
        record["meta"] |= meta
        items.append(Item.of(record | common, f"messages[{end}]"))
    return items


def _learned(messages: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The first and last message of each run of turns to learn from; (0, the last) where none has `loss`."""
    losses = {i: message["loss"] for i, message in enumerate(messages) if "loss" in message}
    for i, loss in losses.items():
        if not isinstance(loss, bool):
            raise Refused(f"messages[{i}].loss: expected true or false, got {loss!r:.80}")
    if all(losses.values()):
        return [(0, len(messages) - 1)]
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    groups = groupby(turns, key=lambda i: losses.get(i, True))
    runs = [list(run) for is_learned, run in groups if is_learned]
    if not runs:
        raise Refused("messages: expected a turn of the assistant to learn from, got loss false in all")
    return [(run[0], run[-1]) for run in runs]


def read_query(row: Row, context: Context) -> list[Item]:
    """`query` and `response` with the turns before in `history`, or `conversation` of pairs of turns."""
    if "conversation" in row:
        name, turns = "conversation", objects(row["conversation"], "conversation")
        pairs = [(turn.get("human"), turn.get("assistant")) for turn in turns]
    else:
        name, history = "query, response", row.get("history") or []
        if not isinstance(history, list) or not all(isinstance(p, list) and len(p) == 2 for p in history):
            raise Refused(f"history: expected a list of pairs of texts, got {history!r:.80}")
        pairs = [*((h[0], h[1]) for h in history), (row["query"], row["response"])]
    messages = [{"role": "system", "content": text(row["system"], "system")}] if row.get("system") else []
    for question, answer in pairs:
        messages += [user(text(question, name)), assistant(text(answer, name))]
    if not pairs:
        raise Refused("conversation: expected at least one pair of turns, got none")
    names = ("conversation", "history", "query", "response", "system", "rejected_response")
    chosen = {"prompt": messages[:-1], "response": messages[-1]["content"], "meta": omit(row, names)}
    if row.get("rejected_response") is None:
        return [Item.of(chosen | {"role": "expert"})]
    worse = chosen | {"response": text(row["rejected_response"], "rejected_response")}
    return [Item.pair(chosen, worse)]


def fits_turns(row: Row) -> bool:
    messages = row.get("messages")
    if not isinstance(messages, list) or "response" in row:
        return False
    return "label" in row or any(
        isinstance(m, dict) and not m.keys().isdisjoint({"loss", "loss_scale"}) for m in messages
    )
