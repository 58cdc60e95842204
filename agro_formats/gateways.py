"""Read calls that providers and gateways log: batches of OpenAI and Anthropic, and OpenAI's fine-tuning
files; LiteLLM's callbacks and spend logs, which have texts only if the proxy stores them; and TensorZero's
inferences (answers of its API, or rows of its tables) with their feedback."""

from __future__ import annotations

from typing import Any

from agro.errors import Refused
from agro.io.json_values import entry, objects, omit, text, unpacked
from agro.logs import exchanges
from agro.logs.exchanges import Message, blocks, choices, is_completion
from agro.logs.protocol import Context, Item, Row, SkipRecord
from agro.logs.records import pair_after, reply, settings, split, system
from agro.logs.values import wrong
from agro.rollout.prompts import anthropic_prompt, openai_prompt
from agro.types.conversation import normalized, normalized_message
from agro_formats.traces import described, joined_scores, responses, scored


def read_fine_tuning(row: Row, context: Context) -> list[Item]:
    """Read a conversation. Without weights its last turns are the response; otherwise each message of weight
    1 is one."""
    messages = objects(row["messages"], "messages")
    if any("loss" in message for message in messages):
        raise Refused("messages: some have `loss`, which selects what is learned; give --format swift-turns")
    meta = omit(row, ("messages",))
    turns = [{name: value for name, value in m.items() if name != "weight"} for m in messages]
    if not any("weight" in message for message in messages):
        return [Item.of(split(turns, meta=meta, role="expert"), "messages")]
    items = []
    for index, message in enumerate(messages):
        weight, name = message.get("weight", 1), f"messages[{index}]"
        if weight not in (0, 1):
            raise wrong(f"{name}.weight", "0 or 1", weight)
        if weight == 1 and message.get("role") == "assistant":
            record = reply(turns[:index], turns[index], ("messages", name), meta, role="expert")
            items.append(Item.of(record, name))
    if not items:
        raise Refused("messages: expected an assistant's message of weight 1, got none")
    return items


def read_preference(row: Row, context: Context) -> list[Item]:
    request = entry(row["input"], "input")
    names = ("preferred_output", "non_preferred_output")
    sides = {name: normalized(objects(row[name], name), name) for name in names}
    items = pair_after(
        objects(request.get("messages"), "input.messages"), sides, row, ("input",), "input.messages"
    )
    for record in items[0].records:
        record["meta"] |= omit(request, ("messages",))
    return items


def read_openai(row: Row, context: Context) -> list[Item]:
    """Read a result. Results are in any order; the request with the same `custom_id` is in the input file."""
    name = text(row["custom_id"], "custom_id")
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
    """The request of a result, which is in `file`. Raises `Refused` if it is missing or already used."""
    request = context.joined_record("custom_id", name, file, "request")
    if name in context.notes:
        raise Refused(f"custom_id: {name!r} is there twice in this file; keep one of the results")
    context.notes[name] = True
    return request


def read_anthropic(row: Row, context: Context) -> list[Item]:
    """Read a result. Results are in any order; the request with the same `custom_id` is in another file."""
    name, result = text(row["custom_id"], "custom_id"), entry(row["result"], "result")
    if result.get("type") != "succeeded":
        cause = entry(result.get("error"), "result.error")
        cause = cause.get("error", cause)
        raise Refused(f"result.type: expected succeeded, got {result.get('type')!r:.80} {cause or ''!r:.200}")
    params = entry(_joined_request(name, "the file of requests", context)["params"], "params")
    message = entry(result.get("message"), "result.message")
    answer = {"role": "assistant", "content": message.get("content")}
    meta = omit(message, ("type", "role", "model", "content")) | {"custom_id": name}
    record = reply(anthropic_prompt(params), answer, ("params.messages", "result.message"), meta)
    return [Item.of(record | {"sampling": settings(params), "model": message.get("model")}, "result")]


_CALLS = {"completion", "text_completion", "responses", "anthropic_messages", "generate_content"}
_REDACTED = "redacted-by-litellm"
_LITELLM_COLUMNS = (
    *("messages", "response", "model", "model_parameters", "proxy_server_request", "model_map_information"),
    *("hidden_params", "standard_built_in_tools_params", "error_information", "cost_breakdown", "metadata"),
)


def read_litellm(row: Row, context: Context) -> list[Item]:
    kind = str(row["call_type"])
    if kind.removeprefix("a") not in _CALLS and kind not in _CALLS:
        raise SkipRecord("calls that aren't of a language model")
    metadata = entry(unpacked(row.get("metadata")), "metadata")
    if "failure" in (row.get("status"), metadata.get("status")):
        error = unpacked(row.get("error_information") or metadata.get("error_information"))
        cause = row.get("error_str") or entry(error, "error_information").get("error_message")
        raise Refused(f"status: the call failed: {cause!r:.200}")
    request = unpacked(row.get("proxy_server_request")) or {}
    request = request if isinstance(request, dict) else {}
    logged = unpacked(row.get("messages")) or request
    body = unpacked(row.get("response"))
    if not logged or not body:
        raise Refused(
            "messages, response: expected texts, got none: LiteLLM's proxy stores them only with "
            "`store_prompts_in_spend_logs: true`"
        )
    if _REDACTED in str(logged) or _REDACTED in str(body):
        raise Refused("messages, response: expected texts, got those that LiteLLM redacted")
    prompt = exchanges.prompt(logged, "messages")
    request |= entry(unpacked(row.get("model_parameters")), "model_parameters")
    details = {name: value for name, value in metadata.items() if value not in (None, [], {})}
    meta = described(row, _LITELLM_COLUMNS) | ({"metadata": details} if details else {})
    common = {"model": row.get("model"), "tools": request.get("tools") or request.get("functions")}
    if is_completion(body):
        items = choices(body, prompt, request, meta)
        return [item._replace(records=(common | item.records[0],)) for item in items]
    common |= {"sampling": settings(request), "meta": meta}
    return responses(prompt, exchanges.replies(body, "response"), "response", common)


_TENSORZERO_TOOLS = ("additional_tools", "dynamic_tools", "tools_available")
_TENSORZERO_COLUMNS = ("input", "output", "dispreferred_outputs", "inference_params", "extra_body")


def read_tensorzero(row: Row, context: Context) -> list[Item]:
    if row.get("output") is None:
        raise Refused("output: expected the model's, got none; export with output_source inference")
    request, prompt = entry(unpacked(row["input"]), "input"), list[Message]()
    if request.get("system") is not None:
        prompt.append(system(_rendered(request["system"], "input.system")))
    for i, message in enumerate(objects(request.get("messages"), "input.messages")):
        location = f"input.messages[{i}]"
        parts = [_part(block, location) for block in blocks(message.get("content"), location)]
        if parts:
            prompt += normalized_message({"role": message.get("role"), "content": parts}, location)
    params = entry(unpacked(row.get("inference_params")), "inference_params")
    columns = {**row, **entry(unpacked(row.get("tool_params") or None), "tool_params")}
    tools = next((columns[name] for name in _TENSORZERO_TOOLS if columns.get(name)), None)
    scores = joined_scores(context, "metrics", row.get("inference_id", row.get("id")), row.get("episode_id"))
    common = {
        "reward": scored(scores, context),
        "model": row.get("variant_name"),
        "sampling": settings(entry(params.get("chat_completion"), "inference_params.chat_completion")),
        "meta": described(row, _TENSORZERO_COLUMNS) | ({"scores": scores} if scores else {}),
        "tools": tools,
    }
    (item,) = responses(prompt, [_reply(unpacked(row["output"]), "output")], "output", common)
    worse = [_reply(value, "dispreferred_outputs") for value in row.get("dispreferred_outputs") or []]
    rejected = responses(prompt, worse, "dispreferred_outputs", common) if worse else []
    return [Item.pair(item.records[0], other.records[0]) for other in rejected] or [item]


def _rendered(value: Any, name: str) -> str:
    """A text. Raises `Refused` for a template's arguments, since the model saw it rendered."""
    if isinstance(value, str):
        return value
    raise Refused(
        f"{name}: expected text, got the arguments of a template, {value!r:.80}; what the model saw is in "
        "the table ModelInference"
    )


def _part(block: Row, name: str) -> Row:
    """Convert a TensorZero block to a message part in the form of OpenAI's or Anthropic's API."""
    match block.get("type"):
        case "text" | "raw_text":
            return {"type": "text", "text": _rendered(block.get("text", block.get("value")), name)}
        case "template":
            _rendered(block.get("arguments", {}), name)
            return {"type": "text", "text": ""}
        case "thought":
            return {"type": "thinking", "thinking": block.get("text") or ""}
        case "tool_call":
            tool = block.get("raw_name", block.get("name"))
            arguments = block.get("raw_arguments", block.get("arguments"))
            return {"type": "tool_use", "id": block.get("id"), "name": tool, "input": arguments}
        case "tool_result":
            result = text(block.get("result"), f"{name}.result")
            return {"type": "tool_result", "tool_use_id": block.get("id"), "content": result}
    raise wrong(name, "text, a thought, or a tool's call or result", block.get("type"))


def _reply(value: Any, name: str) -> Message:
    """The reply of a chat function in blocks, or the generated text of a JSON function."""
    if isinstance(value, dict):
        return {"content": text(value.get("raw"), f"{name}.raw")}
    parts = [_part(block, name) for block in objects(value, name)]
    return normalized_message({"role": "assistant", "content": parts}, name)[-1]
