"""Batches of requests: OpenAI's, and Anthropic's message batches."""

from __future__ import annotations

from agro.errors import Refused
from agro.io.json_values import entry, omit, text
from agro.logs.fields import joined_record, reply, settings
from agro.logs.formats.providers import choices
from agro.logs.protocol import Context, Item, Row
from agro.rollout.prompts import anthropic_prompt, openai_prompt


def read_openai(row: Row, context: Context) -> list[Item]:
    """The order of results is arbitrary: the request with the same `custom_id` is in the input file."""
    name = text(row["custom_id"], "custom_id")
    # The body of a successful response.
    response = entry(row["response"], "response")
    error, code = row.get("error"), response.get("status_code")
    if error is not None or code != 200:
        cause = error if error is not None else entry(response.get("body"), "response.body").get("error")
        raise Refused(f"response.status_code: expected 200, got {code}: the request failed: {cause!r:.200}")
    body = entry(response.get("body"), "response.body")
    request = entry(_joined_request(name, "the batch's input file", context)["body"], "body")
    meta = omit(row, ("custom_id", "response", "error")) | {"custom_id": name}
    return list(choices(body, openai_prompt(request), request, meta))


def _joined_request(name: str, file: str, context: Context) -> Row:
    """The request of a result, which is in `file`. Raises `Refused` where it is missing or used already."""
    request = joined_record(context, "custom_id", name, file, "request")
    if name in context.notes:
        raise Refused(f"custom_id: {name!r} is there twice in this file; keep one of the results")
    context.notes[name] = True
    return request


def read_anthropic(row: Row, context: Context) -> list[Item]:
    """The order is arbitrary: the request with the same `custom_id` is in the file of requests."""
    name, result = text(row["custom_id"], "custom_id"), entry(row["result"], "result")
    if result.get("type") != "succeeded":
        cause = entry(result.get("error"), "result.error")
        cause = cause.get("error", cause)
        raise Refused(f"result.type: expected succeeded, got {result.get('type')!r:.80} {cause or ''!r:.200}")
    params = entry(_joined_request(name, "the file of requests", context)["params"], "params")
    message = entry(result.get("message"), "result.message")
    answer = {"role": "assistant", "content": message.get("content")}
    record = reply(anthropic_prompt(params), answer, ("params.messages", "result.message"))
    record["sampling"] = settings(params)
    if message.get("model") is not None:
        record["model"] = text(message["model"], "result.message.model")
    details = omit(message, ("type", "role", "model", "content"))
    record["meta"] |= details | {"custom_id": name}
    return [Item.of(record, "result")]
