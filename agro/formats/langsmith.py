"""LangSmith: runs, and their feedback.

Fields as in langsmith-sdk bc8dd67 (python/langsmith/schemas.py:307-420); messages as LangChain writes them
(langchain-core 1.8.2: langchain_core/tracers/core.py, load/serializable.py:228).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agro.errors import Refused
from agro.formats.fields import entry, number, objects, rest, text
from agro.formats.model_calls import Message, identified, responses, scored, turn
from agro.formats.nested import call, listed, unpacked
from agro.formats.protocol import Context, Format, Item, LeftOut, Row

_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool"}
_TAKEN = ("inputs", "outputs", "feedback_stats", "extra")
_SAMPLING = ("temperature", "top_p", "top_k", "seed")
_REASONING = ("reasoning", "thinking")


def _read(row: Row, context: Context) -> list[Item]:
    """Runs of other types (chains, tools) repeat what the model's runs have."""
    if row["run_type"] != "llm":
        raise LeftOut("runs that aren't of a model's call")
    prompt = _prompt(entry(unpacked(row["inputs"]), "inputs"))
    if row.get("error") and not row.get("outputs"):
        raise Refused(f"error: the run has no response: {row['error']!r:.80}")
    replies = _replies(entry(unpacked(row["outputs"]), "outputs"))
    extra = entry(unpacked(row.get("extra")), "extra")
    asked = entry(extra.get("invocation_params"), "extra.invocation_params")
    known = entry(extra.get("metadata"), "extra.metadata")
    scores = _scores(row, context)
    common = {
        "reward": scored(scores, context),
        "model": known.get("ls_model_name") or asked.get("model") or asked.get("model_name"),
        "sampling": {name: asked[name] for name in _SAMPLING if asked.get(name) is not None} or None,
        "meta": rest(row, _TAKEN)
        | rest({"extra": extra or None}, ())
        | ({"scores": scores} if scores else {}),
    }
    return responses(prompt, replies, "outputs", common)


def _scores(row: Row, context: Context) -> dict[str, list[Any]]:
    """Averages of the run's feedback by key, and the feedback of --join's rows."""
    stats = entry(unpacked(row.get("feedback_stats")), "feedback_stats")
    found = {}
    for key, one in stats.items():
        where = f"feedback_stats.{key}"
        found[key] = [number(entry(one, where).get("avg"), f"{where}.avg")]
    if context.joined and not context.rewards:
        raise Refused("reward: say which of the joined feedback it is, --reward KEY")
    for key in context.rewards if context.joined else ():
        joined = context.joined.get(json.dumps([str(row.get("id")), key]))
        if joined is not None:
            found[key] = [joined.get("score", joined.get("value"))]
    return found


def _prompt(inputs: Mapping[str, Any]) -> str | list[Message]:
    if "messages" in inputs:
        messages = unpacked(inputs["messages"])
        if isinstance(messages, list) and messages and isinstance(messages[0], list):
            messages = _only(messages, "inputs.messages")
        return [
            _message(m, f"inputs.messages[{i}]") for i, m in enumerate(objects(messages, "inputs.messages"))
        ]
    prompts = inputs.get("prompts", inputs.get("prompt"))
    if isinstance(prompts, list):
        prompts = _only(prompts, "inputs.prompts")
    return text(prompts, "inputs.messages or inputs.prompt")


def _only(items: list[Any], name: str) -> Any:
    if len(items) != 1:
        raise Refused(f"{name}: expected those of one call, got {len(items)}")
    return items[0]


def _replies(outputs: Mapping[str, Any]) -> list[str | Message]:
    """`choices` as OpenAI answers, `generations` as LangChain does, or a message."""
    if "choices" in outputs:
        choices = objects(outputs["choices"], "outputs.choices")
        return [
            _message(c.get("message"), "outputs.choices.message") | {"finish_reason": c.get("finish_reason")}
            for c in choices
        ]
    if "generations" in outputs:
        lists = outputs["generations"]
        if isinstance(lists, list) and lists and isinstance(lists[0], list):
            lists = _only(lists, "outputs.generations")
        return [_generation(g) for g in objects(lists, "outputs.generations")]
    if "message" in outputs or "role" in outputs:
        return [_message(outputs.get("message", outputs), "outputs.message")]
    raise Refused(
        f"outputs: expected choices, generations or a message, got {', '.join(outputs) or 'an empty object'}"
    )


def _generation(value: Mapping[str, Any]) -> str | Message:
    info = entry(value.get("generation_info"), "outputs.generations.generation_info")
    if value.get("message") is None:
        return text(value.get("text"), "outputs.generations.text")
    return _message(value["message"], "outputs.generations.message") | {
        "finish_reason": info.get("finish_reason")
    }


def _message(value: Any, name: str) -> Message:
    """A message of OpenAI's form, or as LangChain writes one: a constructor with its class and arguments."""
    message = entry(value, name)
    if "role" in message:
        return turn(message, name)
    fields, kind = message, message.get("type")
    if isinstance(message.get("kwargs"), dict):
        fields = message["kwargs"]
        kind = fields.get("type") or _class(message)
    elif isinstance(message.get("data"), dict):
        fields = message["data"]
    role = fields.get("role") or _ROLES.get(str(kind).lower())
    if role is None:
        raise Refused(
            f"{name}: expected a message with role, or LangChain's of a known class, got {value!r:.80}"
        )
    return _langchain(fields, role, name)


def _class(message: Mapping[str, Any]) -> str:
    """The type that the last part of the id names: AIMessageChunk is ai."""
    path = message.get("id")
    name = str(path[-1]) if isinstance(path, list) and path else ""
    return name.removesuffix("Chunk").removesuffix("Message").lower()


def _langchain(fields: Mapping[str, Any], role: str, name: str) -> Message:
    calls = listed(fields.get("tool_calls") or None, f"{name}.tool_calls")
    made: Message = {"role": role, "content": fields.get("content")}
    if isinstance(made["content"], list):
        made |= _content(made["content"], name)
    if calls:
        made["tool_calls"] = [call(c.get("name"), c.get("args"), c.get("id")) for c in calls]
    if fields.get("tool_call_id") is not None:
        made["tool_call_id"] = fields["tool_call_id"]
    return turn(made, name)


def _content(parts: list[Any], name: str) -> Message:
    """Text and reasoning of parts; a tool's use stands among the calls as well."""
    texts = [{"type": "text", "text": part} if isinstance(part, str) else entry(part, name) for part in parts]
    thoughts = [p for p in texts if p.get("type") in _REASONING]
    content = [p for p in texts if p.get("type") not in (*_REASONING, "tool_use", "tool_call")]
    made: Message = {"content": content}
    reasoning = "".join(str(p.get(str(p["type"])) or "") for p in thoughts)
    return made | ({"reasoning_content": reasoning} if reasoning else {})


def _feedback(row: Row, context: Context) -> list[Item]:
    raise Refused("this is feedback without texts; import the runs, with --join and this file")


FORMATS = (
    Format(
        "langsmith",
        "LangSmith: runs of models",
        "samples",
        "langsmith-sdk bc8dd67; langchain-core 1.8.2",
        lambda row: row.keys() >= {"run_type", "inputs", "outputs"},
        _read,
        carries=("reward",),
        joins="the runs' feedback, one row each",
        identity=lambda row: identified(row, row.get("id")),
        once=True,
        repeats="LangSmith's exports",
        weighs=True,
        chooses="scores",
    ),
    Format(
        "langsmith-feedback",
        "LangSmith: feedback of runs",
        "nothing",
        "langsmith-sdk bc8dd67",
        lambda row: row.keys() >= {"run_id", "key", "score"},
        _feedback,
        joined_by=lambda row: json.dumps([str(row["run_id"]), str(row["key"])]),
    ),
)
