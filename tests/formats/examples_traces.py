"""Traces of model calls."""

from __future__ import annotations

import json
from typing import Any

from example import MISSING, Example, comma_separated

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A color?"}]
PAIRS = {"role": "user", "parts": [{"type": "text", "content": "A color?"}]}


def value(given: Any) -> dict[str, Any]:
    """A value of OTLP: integers are text."""
    if isinstance(given, bool):
        return {"boolValue": given}
    if isinstance(given, int):
        return {"intValue": str(given)}
    if isinstance(given, float):
        return {"doubleValue": given}
    if isinstance(given, list):
        return {"arrayValue": {"values": [value(item) for item in given]}}
    if isinstance(given, dict):
        return {"kvlistValue": {"values": attributes(given)}}
    return {"stringValue": given}


def attributes(given: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": value(item)} for name, item in given.items()]


def span(name: str, given: dict[str, Any], *events: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "traceId": "5b8e",
        "spanId": name,
        "name": "chat m",
        "attributes": attributes(given),
        "events": [{"name": event, "attributes": attributes(inner)} for event, inner in events],
    }


def spans(*given: dict[str, Any]) -> dict[str, Any]:
    return {
        "resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {"name": "s"}, "spans": list(given)}]}]
    }


def logs(*given: dict[str, Any]) -> dict[str, Any]:
    return {"resourceLogs": [{"resource": {}, "scopeLogs": [{"logRecords": list(given)}]}]}


def judged(name: str, score: Any, response: str | None = None) -> tuple[str, dict[str, Any]]:
    inner = {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": score}
    return "gen_ai.evaluation.result", inner | ({"gen_ai.response.id": response} if response else {})


CALL: dict[str, Any] = {
    "gen_ai.operation.name": "chat",
    "gen_ai.request.model": "m",
    "gen_ai.response.model": "m-1",
    "gen_ai.response.id": "r1",
    "gen_ai.request.temperature": 0.5,
    "gen_ai.request.top_k": 40,
    "gen_ai.usage.output_tokens": 2,
}
TEXT: dict[str, Any] = {  # as text, which most programs write
    **CALL,
    "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be brief."}]),
    "gen_ai.input.messages": json.dumps([PAIRS]),
    "gen_ai.output.messages": json.dumps(
        [{"role": "assistant", "parts": [{"type": "text", "content": "Blue."}], "finish_reason": "length"}]
    ),
}
TOOLS: dict[str, Any] = {  # as values within values
    **CALL,
    "gen_ai.response.id": "r2",
    "gen_ai.input.messages": [
        PAIRS,
        {
            "role": "assistant",
            "parts": [{"type": "tool_call", "id": "c", "name": "look", "arguments": {"n": 1}}],
        },
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": "blue"}]},
    ],
    "gen_ai.output.messages": [
        {
            "role": "assistant",
            "parts": [{"type": "reasoning", "content": "It is."}, {"type": "text", "content": "Blue."}],
            "finish_reason": "stop",
        }
    ],
}
OLD = {
    "gen_ai.operation.name": "chat",
    "gen_ai.prompt.0.role": "system",
    "gen_ai.prompt.0.content": "Be brief.",
    "gen_ai.prompt.1.role": "user",
    "gen_ai.prompt.1.content": "A color?",
    "gen_ai.completion.0.role": "assistant",
    "gen_ai.completion.0.content": "Blue.",
    "gen_ai.completion.0.finish_reason": "stop",
}
INFERENCE = {
    "openinference.span.kind": "LLM",
    "llm.model_name": "m",
    "llm.invocation_parameters": '{"temperature": 0.5}',
    "llm.input_messages.0.message.role": "system",
    "llm.input_messages.0.message.content": "Be brief.",
    "llm.input_messages.1.message.role": "user",
    "llm.input_messages.1.message.contents.0.message_content.type": "text",
    "llm.input_messages.1.message.contents.0.message_content.text": "A color?",
    "llm.output_messages.0.message.role": "assistant",
    "llm.output_messages.0.message.content": "Blue.",
    "annotations.0.annotation.name": "liked",
    "annotations.0.annotation.score": 1.0,
}
PHOENIX: dict[str, Any] = {
    "context.span_id": "a",
    "attributes.openinference.span.kind": "LLM",
    "attributes.llm.model_name": "m",
    "attributes.llm.input_messages": [
        {"message.role": "system", "message.content": "Be brief."},
        {"message": {"role": "user", "content": "A color?"}},
    ],
    "attributes.llm.output_messages": [
        {
            "message.role": "assistant",
            "message.tool_calls": [
                {"tool_call.id": "c", "tool_call.function.name": "look", "tool_call.function.arguments": "{}"}
            ],
        }
    ],
}
FUSE: dict[str, Any] = {
    "id": "o1",
    "traceId": "t1",
    "type": "GENERATION",
    "name": "answer",
    "input": ASKED,
    "output": {"role": "assistant", "content": "Blue."},
    "model": "m",
    "modelParameters": {"temperature": 0.5, "max_tokens": 9},
    "scores": {"liked": [1]},
    "userId": "u",
}
TABLE: dict[str, Any] = {
    "id": "o1",
    "trace_id": "t1",
    "type": "GENERATION",
    "input": json.dumps({"messages": ASKED}),
    "output": "Blue.",
    "provided_model_name": "m",
}
LANG: dict[str, Any] = {
    "id": "u1",
    "trace_id": "u0",
    "dotted_order": "20260101T000000u1",
    "run_type": "llm",
    "inputs": {"messages": ASKED},
    "outputs": {"choices": [{"message": {"role": "assistant", "content": "Blue."}, "finish_reason": "stop"}]},
    "extra": {"metadata": {"ls_model_name": "m"}, "invocation_params": {"temperature": 0.5}},
    "feedback_stats": {"liked": {"n": 2, "avg": 0.5}},
    "error": None,
}


def constructor(kind: str, **kwargs: Any) -> dict[str, Any]:
    return {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", kind], "kwargs": kwargs}


CHAIN: dict[str, Any] = {
    **LANG,
    "inputs": {
        "messages": [
            [
                constructor("SystemMessage", content="Be brief."),
                constructor("HumanMessage", content="A color?"),
            ]
        ]
    },
    "outputs": {
        "generations": [
            [
                {
                    "text": "",
                    "generation_info": {"finish_reason": "tool_calls"},
                    "message": constructor(
                        "AIMessageChunk",
                        content=[{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Wait."}],
                        tool_calls=[{"name": "look", "args": {"n": 1}, "id": "c", "type": "tool_call"}],
                        type="ai",
                    ),
                }
            ]
        ]
    },
}
BLUE = {"prompt": ASKED, "response": "Blue.", "source": "m"}
LOOKED = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": {"n": 1}}}]

EXAMPLES = (
    Example(  # a span of an agent, and one of a tool, are passed over
        "otlp",
        [
            spans(span("a", TEXT), span("b", {**TEXT, "gen_ai.operation.name": "invoke_agent"})),
            spans(
                span("c", TOOLS, judged("liked", 0.25)), span("d", {"gen_ai.operation.name": "execute_tool"})
            ),
            logs(
                {
                    "spanId": "x",
                    "eventName": "gen_ai.evaluation.result",
                    "attributes": attributes(judged("liked", 1.0, "r1")[1]),
                }
            ),
        ],
        [
            {
                "prompt": ASKED,
                "response": "Blue.",
                "reward": 1.0,
                "source": "m-1",
                "sampling": {"temperature": 0.5, "top_k": 40},
                "meta": {
                    **CALL,
                    "trace_id": "5b8e",
                    "span_id": "a",
                    "span": "chat m",
                    "scores": {"liked": [1.0]},
                    "finish": "length",
                },
            },
            {
                "prompt": [
                    ASKED[1],
                    {"role": "assistant", "content": "", "tool_calls": LOOKED},
                    {"role": "tool", "content": "blue", "tool_call_id": "c"},
                ],
                "response": "Blue.",
                "reward": 0.25,
            },
        ],
        file="traces.jsonl",
        corrupt={
            "resourceSpans": (
                spans(span("a", CALL))["resourceSpans"],
                "span a|gen_ai.output.messages: missing; the program doesn't record the content",
            )
        },
    ),
    Example(
        "otlp",
        [spans(span("a", OLD), span("b", INFERENCE))],
        [
            {"prompt": ASKED, "response": "Blue.", "reward": None},
            {
                "prompt": ASKED,
                "response": "Blue.",
                "reward": 1.0,
                "source": "m",
                "sampling": {"temperature": 0.5},
            },
        ],
        file="traces.json",
        groups=1,
        corrupt={
            "resourceSpans": (
                [
                    {
                        "scopeSpans": [
                            {
                                "spans": [
                                    {"attributes": [{"key": "gen_ai.prompt.0.role", "value": {"text": "a"}}]}
                                ]
                            }
                        ]
                    }
                ],
                "expected a value such as stringValue, got text",
            )
        },
    ),
    Example(  # content in an event: of the span, and in a log record that belongs to one
        "otlp",
        [
            spans(span("a", CALL, ("gen_ai.client.inference.operation.details", TEXT)), span("b", CALL)),
            logs(
                {
                    "spanId": "b",
                    "attributes": attributes(
                        {**TEXT, "event.name": "gen_ai.client.inference.operation.details"}
                    ),
                }
            ),
        ],
        [{"prompt": ASKED, "response": "Blue."}, {"prompt": ASKED, "response": "Blue."}],
    ),
    Example(
        "openinference",
        [{"name": "llm", "context": {"span_id": "a"}, "attributes": INFERENCE}],
        [{**BLUE, "reward": 1.0, "sampling": {"temperature": 0.5}}],
        corrupt={
            "attributes": (
                {name: x for name, x in INFERENCE.items() if "output" not in name},
                "llm.output_messages: expected a list of objects, got None",
            )
        },
    ),
    Example(
        "openinference",
        [PHOENIX],
        [
            {
                "prompt": ASKED,
                "response": "",
                "source": "m",
                "reward": None,
            }
        ],
        corrupt={
            "attributes.llm.input_messages": ("A color?", "llm.input_messages: expected a list of objects"),
            "attributes.llm.output_messages": ([], "output: expected a response, got none"),
        },
    ),
    Example(
        "langfuse",
        [
            FUSE,
            {**FUSE, "id": "o2", "type": "SPAN"},
            {**FUSE, "id": "o3", "output": "Red.", "scores": {"liked": [0]}},
            {**FUSE, "id": "o4", "output": "?", "scores": {"mood": ["good"]}},
        ],
        [
            {
                **BLUE,
                "reward": 1.0,
                "sampling": {"temperature": 0.5},
                "meta": {
                    **{
                        name: FUSE[name]
                        for name in ("id", "traceId", "type", "name", "modelParameters", "userId")
                    },
                    "scores": {"liked": [1]},
                },
            },
            {"response": "Red.", "reward": 0.0},
            {"response": "?", "reward": None},
        ],
        groups=1,
        corrupt={
            "input": ('[{"role": "user", "cont', "input: expected JSON, got .*it may be cut off"),
            "output": (None, "output: expected text, a message, choices or generations, got nothing"),
            "scores": ({"liked": [1, 0]}, "liked: expected one value of this score, got .1.0, 0.0."),
        },
    ),
    Example(  # text in CSV, also of messages
        "langfuse",
        [{**FUSE, "output": "Blue."}],
        [{**BLUE, "reward": 1.0, "sampling": {"temperature": 0.5}}],
        file="export.csv",
        write=comma_separated,
    ),
    Example(  # rows of the table of observations, with those of scores
        "langfuse",
        [TABLE, {**TABLE, "id": "o2", "output": "Red."}],
        [{**BLUE, "reward": 1.0}, {"response": "Red.", "reward": None}],
        options={"join": "scores.jsonl", "rewards": {"liked": 1.0}},
        others={
            "scores.jsonl": [
                {"observation_id": "o1", "name": "liked", "value": 1, "data_type": "NUMERIC"},
                {"observation_id": "o1", "name": "short", "value": 0, "data_type": "BOOLEAN"},
            ]
        },
        corrupt={"input": (MISSING, "expected a format of")},
    ),
    Example(
        "langsmith",
        [
            LANG,
            {**LANG, "id": "u2", "run_type": "chain"},
            {**LANG, "id": "u3", "outputs": None, "error": "Timeout()"},
        ],
        [{**BLUE, "reward": 0.5, "sampling": {"temperature": 0.5}}],
        refused=["error: the run has no response: 'Timeout"],
        corrupt={
            "inputs": ({}, "inputs: expected text or messages, got an object of nothing"),
            "outputs": (
                {"answer": 1},
                "outputs: expected text, a message, choices or generations, got answer",
            ),
            "feedback_stats": ({"liked": {"avg": "1"}}, "feedback_stats.liked.avg: expected a finite number"),
        },
    ),
    Example(  # LangChain's messages; JSON as text, as in Parquet; feedback in a file of its own
        "langsmith",
        [
            {
                **CHAIN,
                **{name: json.dumps(CHAIN[name]) for name in ("inputs", "outputs", "extra")},
                "feedback_stats": None,
            }
        ],
        [
            {
                "prompt": ASKED,
                "response": "Wait.",
                "reward": 1.0,
            }
        ],
        options={"join": "feedback.jsonl", "rewards": {"liked": 1.0}},
        others={"feedback.jsonl": [{"run_id": "u1", "key": "liked", "score": 1, "comment": "Good."}]},
        corrupt={
            "inputs": (
                '{"messages": [{"type": "remark", "content": "?"}]}',
                "inputs.messages.0.: expected a message",
            )
        },
    ),
    Example(
        "langsmith",
        [{**LANG, "inputs": {"prompts": ["A color?"]}, "outputs": {"generations": [[{"text": "Blue."}]]}}],
        [{"prompt": "A color?", "response": "Blue."}],
    ),
)
