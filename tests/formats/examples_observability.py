"""Logs of evaluations, and traces with scores, of programs that observe models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from example import MISSING, Example, document

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A color?"}]
LOOK = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"n": 1}}}
CALLED: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [LOOK]}
SEEN = {"role": "tool", "tool_call_id": "c", "content": "blue"}
SAID = {"role": "assistant", "content": "Blue."}


def completion(message: Mapping[str, Any], finish: str = "stop") -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1742855151,
        "model": "m-1",
        "choices": [{"index": 0, "finish_reason": finish, "message": {**message, "refusal": None}}],
    }


FIRST = completion(CALLED, "tool_calls")  # of a model that looks first
SECOND = completion(SAID)
LOOKED = {  # what two calls of a trace are together
    "prompt": ASKED,
    "response": "Blue.",
    "continuation": [{**CALLED, "content": ""}, SEEN, SAID],
}


def event(number: int, sample: str, kind: str, data: dict[str, Any]) -> dict[str, Any]:
    return {
        "run_id": "2304",
        "event_id": number,
        "sample_id": sample,
        "type": kind,
        "data": data,
        "created_by": "",
        "created_at": "2023-04-17 22:10:13.127375+00:00",
    }


RESULT: dict[str, Any] = {
    "id": "r1",
    "promptId": "p",
    "promptIdx": 0,
    "testIdx": 0,
    "testCase": {"vars": {"what": "color"}, "assert": [{"type": "equals", "value": "Blue."}]},
    "provider": {"id": "openai:m", "label": ""},
    "prompt": {"raw": json.dumps(ASKED), "label": "ask"},
    "vars": {"what": "color"},
    "response": {"output": "Blue.", "tokenUsage": {"total": 9}, "cached": False},
    "success": True,
    "score": 0.75,
    "failureReason": 0,
    "namedScores": {"short": 1},
    "gradingResult": {
        "pass": True,
        "score": 0.75,
        "reason": "All assertions passed",
        "componentResults": [{}],
    },
    "latencyMs": 5,
    "cost": 0,
}
UNGRADED = {"pass": True, "score": 1, "reason": "No assertions", "tokensUsed": {"total": 0}}
LOGGED: dict[
    str, Any
] = {  # litellm, tests/logging_callback_tests/gcs_pub_sub_body/standard_logging_payload.json
    "id": "chatcmpl-1",
    "trace_id": "t1",
    "call_type": "acompletion",
    "stream": True,
    "status": "success",
    "custom_llm_provider": "openai",
    "startTime": "2025-01-24 09:20:46.847371",
    "endTime": "2025-01-24 09:20:46.851954",
    "model": "m",
    "metadata": {"user_api_key_hash": None, "applied_guardrails": [], "team": "a"},
    "request_tags": [],
    "messages": ASKED,
    "response": SECOND,
    "model_parameters": {"temperature": 0.5, "max_tokens": 9},
    "hidden_params": {"model_id": None},
    "error_str": None,
}
SPENT: dict[str, Any] = {  # spend_logs_payload.json beside it, with the texts stored
    "request_id": "chatcmpl-2",
    "call_type": "acompletion",
    "startTime": "2025-01-24 09:20:46.847371",
    "endTime": "2025-01-24 09:20:46.851954",
    "model": "m",
    "metadata": json.dumps({"status": "success", "user_api_key": None}),
    "spend": 0.0002,
    "messages": "{}",
    "response": json.dumps(SECOND),
    "proxy_server_request": json.dumps({"model": "m", "messages": ASKED, "temperature": 0.5}),
    "status": "success",
}
INFERENCE: dict[str, Any] = {
    "type": "chat",
    "function_name": "ask",
    "variant_name": "gpt",
    "inference_id": "i1",
    "episode_id": "e1",
    "input": {
        "system": "Be brief.",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "A color?"}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_call", "id": "c", "name": "look", "arguments": '{"n": 1}'}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "id": "c", "name": "look", "result": "blue"}],
            },
        ],
    },
    "output": [{"type": "thought", "text": "It is."}, {"type": "text", "text": "Blue."}],
    "dispreferred_outputs": [],
    "inference_params": {"chat_completion": {"temperature": 0.5, "max_tokens": 9}},
    "tags": {"user": "u"},
    "timestamp": "2026-01-01T00:00:00Z",
}
OBSERVED = {  # a row of ChatInference: JSON in text
    "id": "i2",
    "function_name": "ask",
    "variant_name": "gpt",
    "episode_id": "e2",
    "input": json.dumps({"messages": [{"role": "user", "content": "A color?"}]}),
    "output": json.dumps([{"type": "text", "text": "Blue."}]),
    "inference_params": "{}",
}


def measured(target: str, name: str, value: Any) -> dict[str, Any]:
    return {"id": "f", "target_id": target, "metric_name": name, "value": value, "tags": {}}


def mlflow_span(
    id: str, parent: str | None, kind: str, asked: Any, answered: Any, **others: Any
) -> dict[str, Any]:
    attributes = {"mlflow.spanInputs": asked, "mlflow.spanOutputs": answered, "mlflow.spanType": kind}
    return {
        "trace_id": "t",
        "span_id": id,
        "parent_span_id": parent,
        "name": kind.lower(),
        "start_time_unix_nano": int(id, 36),
        "status": {"code": "STATUS_CODE_OK", "message": ""},
        "attributes": {name: json.dumps(x) for name, x in (attributes | others).items()},
        "events": [],
    }


def assessed(name: str, value: Any, **others: Any) -> dict[str, Any]:
    source = {"source_type": "HUMAN", "source_id": "u"}
    return {
        "assessment_name": name,
        "trace_id": "tr-1",
        "source": source,
        "feedback": {"value": value},
        **others,
    }


NEXT = {"messages": [*ASKED, CALLED, SEEN], "model": "m", "temperature": 0.5}
BEGIN = {"messages": ASKED, "model": "m", "temperature": 0.5}
MLFLOW: dict[str, Any] = {
    "info": {
        "trace_id": "tr-1",
        "state": "OK",
        "request_time": "2026-01-01T00:00:00Z",
        "trace_metadata": {"mlflow.source.name": "app.py"},
        "tags": {},
        "assessments": [
            assessed("correct", "yes"),
            assessed("correct", "no", valid=False),
            {
                "assessment_name": "expected_response",
                "expectation": {"value": "blue"},
                "trace_id": "tr-1",
            },
        ],
    },
    "data": {
        "spans": [
            mlflow_span("a", None, "AGENT", {"question": "A color?"}, "Blue."),
            mlflow_span("b", "a", "CHAT_MODEL", BEGIN, FIRST),
            mlflow_span("c", "a", "TOOL", {"n": 1}, "blue"),
            mlflow_span("d", "a", "CHAT_MODEL", NEXT, SECOND, **{"mlflow.llm.model": "m-1"}),
            mlflow_span("e", "d", "LLM", NEXT, SECOND),  # of the provider's client, within the call
        ]
    },
}
WEAVE: dict[str, Any] = {
    "id": "c2",
    "project_id": "e/p",
    "op_name": "weave:///e/p/op/openai.chat.completions.create:Xy1",
    "trace_id": "t1",
    "parent_id": "c1",
    "started_at": "2026-01-01T00:00:01Z",
    "attributes": {"weave": {"kind": "llm"}},
    "inputs": {"self": {"client": "openai"}, **BEGIN},
    "output": SECOND,
    "exception": None,
    "summary": {
        "usage": {"m": {"requests": 1}},
        "weave": {
            "status": "success",
            "feedback": [
                {"feedback_type": "wandb.reaction.1", "payload": {"emoji": "👍", "alias": ":thumbs_up:"}},
                {"feedback_type": "wandb.note.1", "payload": {"note": "Fine."}},
            ],
        },
    },
}
OUTER = {
    **WEAVE,
    "id": "c1",
    "parent_id": None,
    "op_name": "weave:///e/p/op/answer:Xy0",
    "started_at": "2026-01-01T00:00:00Z",
    "attributes": {},
    "inputs": {"question": "A color?"},
    "output": "Blue.",
    "summary": {},
}


def example_call(id: str, parent: str, name: str, asked: Any, answered: Any, at: int) -> dict[str, Any]:
    return {
        **OUTER,
        "id": id,
        "trace_id": "t2",
        "parent_id": parent,
        "op_name": f"weave:///e/p/op/{name}:v0",
        "started_at": f"2026-01-01T00:00:0{at}Z",
        "inputs": asked,
        "output": answered,
    }


SCORED = {"output": "Blue.", "scores": {"match": {"correct": True, "why": "same"}}, "model_latency": 1.0}
EVALUATION = [
    {**example_call("v0", "", "Evaluation.evaluate", {}, {"match": 1.0}, 0), "parent_id": None},
    example_call("v1", "v0", "Evaluation.predict_and_score", {"example": {}}, SCORED, 1),
    example_call("v2", "v1", "Model.predict", {"question": "A color?"}, "Blue.", 2),
    example_call("v3", "v2", "openai.chat.completions.create", BEGIN, SECOND, 3),
    example_call("v4", "v1", "match.score", {"output": "Blue."}, {"correct": True}, 4),
    example_call(
        "v5", "v4", "openai.chat.completions.create", BEGIN, completion({**SAID, "content": "Y"}), 5
    ),
]


def braintrust(
    id: str, parents: list[str], kind: str, asked: Any, answered: Any, **others: Any
) -> dict[str, Any]:
    return {
        "id": f"row-{id}",
        "_xact_id": "1000",
        "created": "2026-01-01T00:00:00.000Z",
        "experiment_id": "x",
        "span_id": id,
        "root_span_id": "a",
        "span_parents": parents or None,
        "span_attributes": {"name": kind, "type": kind},
        "input": asked,
        "output": answered,
        "expected": None,
        "scores": None,
        "metadata": {},
        "metrics": {"start": 1.0},
        "error": None,
        **others,
    }


BRAIN = braintrust("a", [], "eval", {"q": "A color?"}, "Blue.", expected="blue", scores={"Exact": 0.5})
THOUGHT = braintrust(
    "b", ["a"], "llm", ASKED, [FIRST["choices"][0]], metadata={"model": "m", "temperature": 0.5}
)
ANSWERED = braintrust(
    "c",
    ["a"],
    "llm",
    [*ASKED, CALLED, SEEN],
    [SECOND["choices"][0]],
    metadata={"model": "m", "temperature": 0.5},
    metrics={"start": 2.0},
)
GRADED = braintrust("d", ["a"], "score", {}, 0.5, scores={"Exact": 0.5}, metrics={"start": 3.0})
GRADER = braintrust("e", ["d"], "llm", ASKED, [completion({**SAID, "content": "B"})["choices"][0]])


def opik_span(id: str, asked: Any, answered: Any, **others: Any) -> dict[str, Any]:
    return {
        "id": id,
        "trace_id": "t1",
        "parent_span_id": None,
        "type": "llm",
        "start_time": f"2026-01-01T00:00:00.{id}",
        "input": asked,
        "output": answered,
        "model": "m",
        "feedback_scores": None,
        "error_info": None,
        **others,
    }


OPIK: dict[str, Any] = {
    "trace": {
        "id": "t1",
        "project_id": "p",
        "start_time": "2026-01-01T00:00:00",
        "input": {"question": "A color?"},
        "output": {"answer": "Blue."},
        "tags": [],
        "feedback_scores": [{"name": "liked", "value": 1.0, "source": "ui", "reason": None}],
    },
    "spans": [
        opik_span("1", {"messages": ASKED, "temperature": 0.5}, FIRST),
        opik_span("2", {}, {}, type="tool"),
        opik_span("3", {"messages": [*ASKED, CALLED, SEEN]}, None, error_info={"exception_type": "Timeout"}),
        opik_span("4", {"messages": [*ASKED, CALLED, SEEN]}, SECOND),
    ],
    "downloaded_at": "2026-01-02T00:00:00",
    "project_name": "p",
}
TRACE = {**OPIK["trace"], "id": "t2", "input": {"messages": ASKED}, "output": {"choices": SECOND["choices"]}}
SETTINGS = {"temperature": 0.5}

EXAMPLES = (
    Example(
        "promptfoo",
        [
            {
                "evalId": "e",
                "results": {
                    "version": 3,
                    "timestamp": "2026-01-01T00:00:00Z",
                    "results": [
                        RESULT,
                        {**RESULT, "id": "r2", "testIdx": 1, "gradingResult": UNGRADED, "score": 1},
                        {
                            **RESULT,
                            "id": "r3",
                            "response": {"error": "429"},
                            "error": "429",
                            "failureReason": 2,
                        },
                        {
                            **RESULT,
                            "id": "r4",
                            "prompt": {"raw": "[1, 2]: a color?"},
                            "response": {"output": [LOOK]},
                            "error": "Expected output to equal",
                            "failureReason": 1,
                            "score": 0,
                            "success": False,
                        },
                    ],
                    "prompts": [],
                    "stats": {"successes": 2, "failures": 1, "errors": 1},
                },
                "config": {},
            }
        ],
        [
            {
                "prompt": ASKED,
                "response": "Blue.",
                "reward": 0.75,
                "source": "openai:m",
                "meta": {
                    **{name: RESULT[name] for name in ("id", "promptId", "promptIdx", "testIdx", "testCase")},
                    **{name: RESULT[name] for name in ("vars", "failureReason", "gradingResult", "cost")},
                    "scores": {"short": 1.0, "success": 1.0, "score": 0.75},
                },
            },
            {"response": "Blue.", "reward": None},
            {"prompt": [{"role": "user", "content": "[1, 2]: a color?"}], "response": "", "reward": 0.0},
        ],
        file="results.json",
        write=document,
        refused=["error: the provider gave no response: '429'"],
        corrupt={
            "results": (
                {"results": [{**RESULT, "response": {"output": {"color": "blue"}}}]},
                "response.output: expected text, got {'color'",
            )
        },
    ),
    Example(
        "promptfoo",
        [RESULT],
        [{"prompt": ASKED, "response": "Blue.", "reward": 1.0}],
        file="results.jsonl",
        options={"rewards": {"short": 1.0}},
        corrupt={
            "prompt": ({"label": "ask"}, "prompt.raw: expected text, got None"),
            "namedScores": ({"short": "1"}, "short: expected a finite number"),
            "response": (MISSING, "response.output: expected text, got None"),
        },
    ),
    Example(
        "litellm",
        [
            LOGGED,
            {
                **LOGGED,
                "id": "x2",
                "call_type": "aembedding",
                "messages": "A color?",
                "response": {"data": []},
            },
            {**LOGGED, "id": "x3", "status": "failure", "error_str": "Timeout", "response": None},
            SPENT,
            {**SPENT, "request_id": "x5", "response": "{}", "proxy_server_request": "{}"},
            {
                **{name: value for name, value in SPENT.items() if name != "status"},
                "request_id": "x6",
                "metadata": json.dumps({"status": "failure", "error_information": {"error_message": "429"}}),
            },
        ],
        [
            {
                "prompt": ASKED,
                "response": "Blue.",
                "reward": None,
                "source": "m-1",
                "sampling": SETTINGS,
                "meta": {
                    **{name: LOGGED[name] for name in ("trace_id", "call_type", "stream", "status")},
                    **{name: LOGGED[name] for name in ("custom_llm_provider", "startTime", "endTime")},
                    "id": "chatcmpl-1",
                    "metadata": {"team": "a"},
                    "finish": "stop",
                },
            },
            {"prompt": ASKED, "response": "Blue.", "sampling": SETTINGS},
        ],
        groups=1,
        refused=[
            "status: the call failed: 'Timeout'",
            "expected texts, got none: .*store_prompts_in_spend_logs",
            "the call failed: '429'",
        ],
        corrupt={
            "messages": ([{"content": "A color?"}], r"messages\[0\]: expected a message with role"),
            "response": ({**SECOND, "choices": []}, "choices: expected one or more, got none"),
        },
    ),
    Example(
        "tensorzero",
        [INFERENCE, OBSERVED, {**INFERENCE, "inference_id": "i3", "output": None}],
        [
            {
                "prompt": [*ASKED, {**CALLED, "content": ""}, SEEN],
                "response": "Blue.",
                "reward": 1.0,
                "source": "gpt",
                "sampling": SETTINGS,
                "meta": {
                    **{name: INFERENCE[name] for name in ("type", "function_name", "variant_name", "tags")},
                    **{name: INFERENCE[name] for name in ("inference_id", "episode_id", "timestamp")},
                    "scores": {"liked": [True]},
                    "continuation": [
                        {"role": "assistant", "content": "Blue.", "reasoning_content": "It is."},
                    ],
                },
            },
            {"prompt": ASKED[1:], "response": "Blue.", "reward": 0.0},
        ],
        options={"join": "feedback.jsonl", "rewards": {"liked": 1.0}},
        others={
            "feedback.jsonl": [
                measured("i1", "liked", True),
                measured("e2", "liked", False),
                measured("i1", "cost", 0.25),
            ]
        },
        refused=["output: expected the model's, got none"],
        corrupt={
            "input": (
                {"messages": [{"role": "user", "content": [{"type": "template", "arguments": {"a": 1}}]}]},
                r"input.messages\[0\]: expected text, got the arguments of a template",
            ),
            "output": (
                [{"type": "file"}],
                "output: expected text, a thought, or a tool's call or result, got",
            ),
        },
    ),
    Example(  # demonstrations as output, and the model's own as dispreferred; the gateway's answer
        "tensorzero",
        [
            {
                "inferences": [
                    {
                        **INFERENCE,
                        "input": {"messages": [{"role": "user", "content": "A color?"}]},
                        "output": [{"type": "text", "text": "Blue."}],
                        "dispreferred_outputs": [[{"type": "text", "text": "Red."}]],
                    }
                ]
            }
        ],
        [{"prompt": ASKED[1:], "response": "Blue."}, {"prompt": ASKED[1:], "response": "Red."}],
        pairs=[(0, 1)],
        groups=1,
    ),
    Example(  # two calls that continue each other; the client's own span within, and the agent's around
        "mlflow",
        [MLFLOW],
        [
            {
                "prompt": ASKED,
                "response": "Blue.",
                "reward": 1.0,
                "source": "m-1",
                "sampling": SETTINGS,
                "meta": {
                    "trace_id": "tr-1",
                    "state": "OK",
                    "request_time": "2026-01-01T00:00:00Z",
                    "trace_metadata": {"mlflow.source.name": "app.py"},
                    "scores": {"correct": [1.0]},
                    "continuation": LOOKED["continuation"],
                    "finish": "stop",
                    "answer": "blue",
                },
            }
        ],
        file="trace.json",
        write=document,
        corrupt={
            "data": (
                {"spans": [mlflow_span("b", None, "LLM", {"messages": 1}, SECOND)]},
                r"spans\[0\].input.messages: expected text, got 1",
            )
        },
    ),
    Example(  # a row of search_traces, without a model's span; and one that failed
        "mlflow",
        [
            {
                "trace_id": "tr-2",
                "request": "A color?",
                "response": "Blue.",
                "state": "OK",
                "tags": {},
                "spans": [mlflow_span("a", None, "CHAIN", "A color?", "Blue.")],
                "assessments": [assessed("liked", 0.25), assessed("tone", "kind")],
            },
            {
                "trace_id": "tr-3",
                "request": "A color?",
                "response": None,
                "tags": {},
                "spans": [
                    {
                        **mlflow_span("a", None, "LLM", BEGIN, None),
                        "status": {"code": "STATUS_CODE_ERROR", "message": "Timeout"},
                    }
                ],
                "assessments": [],
            },
        ],
        [{"prompt": "A color?", "response": "Blue.", "reward": 0.25}],
        refused=["error: the trace has no response: 'Timeout'"],
        corrupt={
            "assessments": (
                [assessed("liked", {"a": 1})],
                "assessments.feedback.value: expected a number, a flag or text, got",
            )
        },
    ),
    Example(
        "weave",
        [OUTER, WEAVE],
        [
            {
                "prompt": ASKED,
                "response": "Blue.",
                "reward": 1.0,
                "source": "m-1",
                "sampling": SETTINGS,
                "meta": {
                    **{
                        name: OUTER[name]
                        for name in ("id", "project_id", "op_name", "trace_id", "started_at")
                    },
                    "scores": {"reaction": [1.0]},
                    "finish": "stop",
                },
            }
        ],
        corrupt={
            "inputs": (
                {"messages": "weave:///e/p/object/m:1"},
                "inputs.messages: expected its value, got a ref",
            )
        },
    ),
    Example(  # an evaluation: the judge's calls are left out
        "weave",
        EVALUATION,
        [{"prompt": ASKED, "response": "Blue.", "reward": 1.0}],
    ),
    Example(
        "braintrust",
        [GRADER, ANSWERED, BRAIN, THOUGHT, GRADED],
        [
            {
                "prompt": ASKED,
                "response": "Blue.",
                "reward": 0.5,
                "source": "m",
                "sampling": SETTINGS,
                "meta": {
                    **{name: BRAIN[name] for name in ("id", "_xact_id", "created", "experiment_id")},
                    "span_id": "a",
                    "root_span_id": "a",
                    "scores": {"Exact": [0.5]},
                    "continuation": LOOKED["continuation"],
                    "finish": "stop",
                    "answer": "blue",
                },
            }
        ],
    ),
    Example(  # rows of an experiment alone, as its table is exported
        "braintrust",
        [
            {**BRAIN, "input": "A color?"},
            {
                **BRAIN,
                "root_span_id": "z",
                "span_id": "z",
                "input": "A color?",
                "error": "Timeout",
                "output": None,
            },
        ],
        [{"prompt": "A color?", "response": "Blue.", "reward": 0.5}],
        refused=["error: the trace has no response: 'Timeout'"],
        corrupt={
            "input": ({"q": "A color?"}, r"spans\[0\].input: expected text or messages, got an object of q"),
        },
    ),
    Example(
        "opik",
        [OPIK],
        [
            {
                "prompt": ASKED,
                "response": "Blue.",
                "reward": 1.0,
                "source": "m",
                "meta": {
                    "id": "t1",
                    "project_id": "p",
                    "start_time": "2026-01-01T00:00:00",
                    "failed_calls": 1,
                    "scores": {"liked": [1.0]},
                    "continuation": LOOKED["continuation"],
                    "finish": "stop",
                },
            }
        ],
        file="trace_t1.json",
        write=document,
        corrupt={
            "spans": (
                [opik_span("1", {"messages": ASKED}, {"answer": 1})],
                r"spans\[1\].output: expected text, a message, choices or generations, got answer",
            )
        },
    ),
    Example("opik", [TRACE], [{"prompt": ASKED, "response": "Blue.", "reward": 1.0}]),
)
