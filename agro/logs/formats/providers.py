"""OpenAI and servers that answer alike (vLLM, SGLang, llama.cpp): chat completions, fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, objects, omit, text
from agro.logs.declared import pair_after
from agro.logs.fields import reply, settings, split, token_fields
from agro.logs.protocol import Context, Item, Row
from agro.rollout.prompts import openai_prompt
from agro.types.conversation import normalized

_EXCHANGE_COLUMNS = ("request", "messages", "input", "prompt", "response", "output", "completion")
_COMPLETION = ("id", "object", "created", "choices", "prompt_token_ids", "prompt_text", "model")


def read_completion(row: Row, context: Context) -> list[Item]:
    """A completion alone, or beside what was asked: {request, response}, {messages, response} and such."""
    body: Any = row
    if "choices" not in row:
        columns = [row.get(name) for name in ("response", "output", "completion")]
        body = next(filter(_is_completion, columns), None)
        if body is None:
            raise Refused("response: expected a chat completion (an object with choices), got none")
    request = _request(row, body)
    if request is None:
        raise Refused(
            "prompt: a chat completion doesn't hold what was asked; log it in a column beside it: request, "
            "messages or prompt"
        )
    return list(choices(body, openai_prompt(request), request, omit(row, (*_EXCHANGE_COLUMNS, *_COMPLETION))))


def _request(row: Row, body: Row) -> Row | None:
    if isinstance(row.get("request"), dict):
        request = entry(row["request"], "request")
        return entry(request.get("body"), "request.body") or request
    fields = {name: row[name] for name in ("messages", "input", "prompt") if row.get(name) is not None}
    if not fields and isinstance(body.get("prompt_text"), str):
        fields = {"prompt": body["prompt_text"]}
    return fields or None


def choices(body: Row, prompt: Any, request: Row, meta: dict[str, Any]) -> Iterator[Item]:
    """The responses of a completion: several choices are of one prompt."""
    replies = objects(body.get("choices"), "choices")
    meta = omit(body, (*_EXCHANGE_COLUMNS, *_COMPLETION)) | meta
    if not replies:
        raise Refused("choices: expected one or more, got none")
    for index, choice in enumerate(replies):
        location = f"choices[{index}]"
        message = choice.get("message")
        if message is None:  # of a completion of text
            message = {"content": text(choice.get("text"), f"{location}.text")}
        record = reply(prompt, entry(message, f"{location}.message"), ("messages", f"{location}.message"))
        record["sampling"] = settings(request)
        if body.get("model") is not None:
            record["model"] = text(body["model"], "model")
        # Log-probs are kept aside: they are of text pieces, or before temperature and top-p.
        aside = omit(choice, ("index", "message", "text", "finish_reason", "token_ids"))
        details = {"id": body.get("id"), "finish": choice.get("finish_reason"), **aside}
        record["meta"] |= meta | {name: value for name, value in details.items() if value is not None}
        yield Item.of(record | _tokens(body, choice, location), location)


def _tokens(body: Row, choice: Row, location: str) -> dict[str, Any]:
    """vLLM's ids of prompt and response, where it was asked for them."""
    prompt_ids, response_ids = body.get("prompt_token_ids"), choice.get("token_ids")
    if prompt_ids is None or response_ids is None:
        return {}
    for name, ids in (("prompt_token_ids", prompt_ids), (f"{location}.token_ids", response_ids)):
        if not isinstance(ids, list):
            raise Refused(f"{name}: expected a list of token ids, got {ids!r:.80}")
    return token_fields(prompt_ids, response_ids)


def _is_completion(value: Any) -> bool:
    return isinstance(value, dict) and "choices" in value


def fits_completion(row: Row) -> bool:
    if row.get("object") in ("chat.completion", "text_completion") and "choices" in row:
        return True
    return any(_is_completion(row.get(name)) for name in ("response", "output", "completion"))


def read_fine_tuning(row: Row, context: Context) -> list[Item]:
    """Without weights the last turns are the response. With them each message of weight 1 is one."""
    messages = objects(row["messages"], "messages")
    if any("loss" in message for message in messages):
        raise Refused("messages: some say with `loss` what is learned from; give --format swift-turns")
    meta = omit(row, ("messages",))
    turns = [{name: value for name, value in m.items() if name != "weight"} for m in messages]
    if not any("weight" in message for message in messages):
        record = split({"messages": turns, "meta": meta})
        return [Item.of(record | {"role": "expert"}, "messages")]
    items = []
    for index, message in enumerate(messages):
        weight = message.get("weight", 1)
        if weight not in (0, 1):
            raise Refused(f"messages[{index}].weight: expected 0 or 1, got {weight!r:.80}")
        if weight == 1 and message.get("role") == "assistant":
            record = reply(turns[:index], turns[index], ("messages", f"messages[{index}]"))
            record["meta"] |= meta
            items.append(Item.of(record | {"role": "expert"}, f"messages[{index}]"))
    if not items:
        raise Refused("messages: expected an assistant's message of weight 1, got none")
    return items


def read_preference(row: Row, context: Context) -> list[Item]:
    request = entry(row["input"], "input")
    prompt = objects(request.get("messages"), "input.messages")
    sides = {
        name: normalized(objects(row[name], name), name)
        for name in ("preferred_output", "non_preferred_output")
    }
    items = pair_after(prompt, sides, row, ("input",), "input.messages")
    for record in items[0].records:
        record["meta"] |= omit(request, ("messages",))
    return items
