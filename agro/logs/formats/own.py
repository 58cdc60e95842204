"""agro's own records: responses, preferences, and conversations."""

from __future__ import annotations

from typing import Any

from agro.errors import Refused
from agro.io.json_values import are_messages, entry, is_unknown, messages_in
from agro.logs.fields import exchange, parsed, rated_pair, scores, split
from agro.logs.interchange import PREFERENCE, typed_fields
from agro.logs.labels import number_in
from agro.logs.protocol import Context, Item, Row

_NO_TEXT = {  # fields that aren't text
    *("tokens", "mask", "action", "behavior_logp", "sampling", "context_tokens", "token_reward"),
    *("kept", "kept_count", "version", "meta", "messages", "votes_chosen", "votes_rejected"),
}


def read_response(row: Row, context: Context) -> list[Item]:
    record = _typed(row, context)
    return [Item.of(record if "tokens" in record else _with_response(record, record["response"]))]


def _with_response(record: dict[str, Any], response: Any, name: str = "response") -> dict[str, Any]:
    """The record with this response; the messages of both are read where they are JSON, or in objects."""
    turns, prompt = messages_in(response), record.get("prompt")
    if not are_messages(turns) and messages_in(prompt) is prompt:
        return {**record, "response": response}
    if prompt is not None:
        parts = exchange(prompt, turns, ("prompt", name))
    elif turns[0]["role"] != "assistant":
        parts = split({"messages": turns})
    else:  # the prompt is joined by its id
        parts = {"response": exchange("", turns, ("prompt", name))["response"]}
    meta = {**entry(record.get("meta"), "meta"), **parts.get("meta", {})}
    return {**record, **parts, **({"meta": meta} if meta else {})}


def _typed(row: Row, context: Context) -> dict[str, Any]:
    """The record with its numbers, lists and objects read, where they are written as text."""
    if not context.is_text:
        return dict(row)
    record = {
        name: parsed(value, name) if name in _NO_TEXT and isinstance(value, str) else value
        for name, value in row.items()
    }
    return record | ({"reward": number_in(row["reward"])} if "reward" in row else {})


def read_preference(row: Row, context: Context) -> list[Item]:
    row = _typed(row, context)
    responses = {name: row.get(name) for name in ("chosen", "rejected")}
    conversations = {name: "" for name, turns in responses.items() if isinstance(messages_in(turns), list)}
    pair = typed_fields({**row, **conversations}, PREFERENCE)
    if not is_unknown(row.get("reward")):
        raise Refused(
            f"reward: the record has two responses, and one reward, {row['reward']!r:.80}; expected "
            "score_chosen and score_rejected, or none (--map meta.reward=reward keeps it beside them)"
        )
    names = {*PREFERENCE, *scores(row), "reward"}
    common = {name: value for name, value in row.items() if name not in names}
    chosen, rejected = (_with_response(common, response, name) for name, response in responses.items())
    votes = pair.get("votes_chosen"), pair.get("votes_rejected")
    return rated_pair(chosen, rejected, row, votes)


def read_conversation(row: Row, context: Context) -> list[Item]:
    record = _typed(row, context)
    messages = record["messages"] = messages_in(record["messages"])
    if isinstance(messages, list) and any(isinstance(m, dict) and "loss" in m for m in messages):
        raise Refused("messages: some say with `loss` what is learned from; give --format swift-turns")
    return [Item.of(split(record), "messages")]


def read_prompt(row: Row, context: Context) -> list[Item]:
    return [Item.of(dict(row), "prompt")]
