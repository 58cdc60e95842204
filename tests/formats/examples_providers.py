"""Files of providers of models: batches, completions, fine-tuning."""

from __future__ import annotations

from typing import Any

from example import MISSING, Example

ASK = [{"role": "user", "content": "What is 2+2?"}]
META = {"id": "chatcmpl-1", "finish": "stop", "usage": {"total_tokens": 9}}
SYSTEM = [{"role": "system", "content": "Be brief."}]


def choice(content: Any, index: int = 0, **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
    return {"index": index, "message": message | more, "finish_reason": "stop", "logprobs": None}


def completion(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "gpt-x"}
    return {**head, "choices": list(choices), "usage": {"total_tokens": 9}, **more}


def batch(name: str, body: Any, code: int = 200, error: Any = None) -> dict[str, Any]:
    response = {"status_code": code, "request_id": "r", "body": body}
    return {"id": f"batch_req_{name}", "custom_id": name, "response": response, "error": error}


def request(name: str, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": name,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", **body},
    }


REQUESTS = [
    request("a", messages=ASK, n=2, temperature=0.7),
    request("b", messages=SYSTEM + ASK),
    request("c", messages=ASK),
]
CALL = {"id": "t", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
LOGPROBS = {"content": [{"token": "4", "logprob": -0.1, "bytes": [52], "top_logprobs": []}], "refusal": None}


def message(content: Any, stop: str = "end_turn") -> dict[str, Any]:
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-x"}
    return {
        **head,
        "content": content,
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": {"output_tokens": 3},
    }


def result(name: str, content: Any, stop: str = "end_turn") -> dict[str, Any]:
    return {"custom_id": name, "result": {"type": "succeeded", "message": message(content, stop)}}


TOOL_USE = {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 2}}
PARAMS: list[dict[str, Any]] = [
    {
        "custom_id": "a",
        "params": {"model": "m", "max_tokens": 9, "system": "Be brief.", "messages": ASK, "temperature": 1.0},
    },
    {
        "custom_id": "b",
        "params": {
            "model": "m",
            "max_tokens": 9,
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "What is 2+2?"}]},
                {"role": "assistant", "content": [TOOL_USE]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "4"}]},
            ],
        },
    },
]
ANTHROPIC_CALL = {"id": "t", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}

BATCHES = (
    Example(
        "openai-batch",
        [  # in another order than the requests; one of two choices is a refusal in words
            batch("b", completion(choice("Four."), model="gpt-y")),
            batch("a", completion(choice("4"), choice(None, 1, refusal="I can't."))),
            batch("c", {"error": {"message": "overloaded"}}, 500),
        ],
        [
            {
                "prompt": SYSTEM + ASK,
                "response": "Four.",
                "reward": None,
                "source": "gpt-y",
                "meta": {**META, "custom_id": "b"},
            },
            {"prompt": ASK, "response": "4", "sampling": {"temperature": 0.7}, "source": "gpt-x"},
            {
                "prompt": ASK,
                "response": "I can't.",
                "meta": {**META, "refusal": True, "custom_id": "a"},
            },
        ],
        others={"input.jsonl": REQUESTS},
        options={"join": "input.jsonl"},
        refused=["expected 200, got 500: the request failed: .*overloaded"],
        corrupt={
            "custom_id": ("z", "custom_id: the file of --join has no request 'z'"),
            "response": (None, "response.status_code: expected 200, got None"),
            "error": ({"code": "expired", "message": "late"}, "the request failed: .*expired"),
        },
    ),
    Example(
        "openai-batch",
        [batch("b", completion(choice("4"))), batch("b", completion(choice("5")))],
        [{"response": "4"}],
        others={"input.jsonl": REQUESTS},
        options={"join": "input.jsonl"},
        refused=["custom_id: 'b' is there twice"],
        corrupt={"response": ({"status_code": 200, "body": {}}, "choices: expected a list of objects")},
    ),
    Example(
        "anthropic-batch",
        [
            result(
                "b",
                [
                    {"type": "thinking", "thinking": "Two and two.", "signature": "s"},
                    {"type": "text", "text": "4"},
                ],
            ),
            result(
                "a",
                [{"type": "text", "text": "Let me "}, {"type": "text", "text": "see"}, TOOL_USE],
                "max_tokens",
            ),
            {
                "custom_id": "c",
                "result": {"type": "errored", "error": {"type": "error", "error": {"type": "overloaded"}}},
            },
            {"custom_id": "d", "result": {"type": "expired"}},
        ],
        [
            {
                "prompt": [
                    *SYSTEM,
                    *ASK,
                    {"role": "assistant", "content": "", "tool_calls": [ANTHROPIC_CALL]},
                    {"role": "tool", "tool_call_id": "t", "content": "4"},
                ],
                "response": "4",
                "reward": None,
                "source": "claude-x",
                "meta": {
                    "continuation": [
                        {"role": "assistant", "content": "4", "reasoning_content": "Two and two."}
                    ],
                    "id": "msg_1",
                    "stop_reason": "end_turn",
                    "usage": {"output_tokens": 3},
                    "custom_id": "b",
                    "finish": "stop",
                },
            },
            {"prompt": SYSTEM + ASK, "response": "Let me see", "sampling": {"temperature": 1.0}},
        ],
        others={"requests.jsonl": PARAMS},
        options={"join": "requests.jsonl"},
        refused=["result.type: expected succeeded, got 'errored' .*overloaded", "got 'expired'"],
        corrupt={
            "custom_id": ("z", "custom_id: the file of --join has no request 'z'"),
            "result": (
                {"type": "succeeded", "message": message([{"type": "image"}])},
                "expected text, got a part of type image",
            ),
        },
    ),
)
EXAMPLES = (
    *BATCHES,
    Example(
        "chat-completion",
        [
            {"request": {"messages": ASK, "top_p": 0.9}, "response": completion(choice("4"))},
            {
                "messages": ASK,
                "response": completion(choice(None, tool_calls=[CALL]), model=None),
                "user": "u1",
            },
            {"messages": ASK, "output": completion(choice("5", reasoning_content="Hm."))},
            completion(choice("4")),
        ],
        [
            {
                "prompt": ASK,
                "response": "4",
                "sampling": {"top_p": 0.9},
                "source": "gpt-x",
                "meta": META,
            },
            {
                "response": "",
                "source": "file:log.jsonl",
                "meta": {
                    "continuation": [{"role": "assistant", "content": "", "tool_calls": [ANTHROPIC_CALL]}],
                    **META,
                    "user": "u1",
                },
            },
            {"response": "5"},
        ],
        groups=1,
        refused=["prompt: a chat completion doesn't hold what was asked"],
        corrupt={
            "request": ({}, "request: expected messages, input or prompt"),
            "response": (
                completion(choice(None)),
                "expected content, a refusal or tool_calls",
            ),
        },
    ),
    Example(
        "chat-completion",
        [  # vLLM with return_token_ids: ids of prompt and response; log-probs stay aside
            completion(
                {**choice("4"), "token_ids": [9, 2], "logprobs": LOGPROBS, "stop_reason": None},
                messages=ASK,
                prompt_token_ids=[5, 6, 7],
            )
        ],
        [
            {
                "prompt": ASK,
                "response": "4",
                "tokens": [5, 6, 7, 9, 2],
                "action": [False, False, False, True, True],
                "behavior_logp": None,
                "meta": {**META, "logprobs": LOGPROBS},
            }
        ],
        corrupt={
            "messages": (MISSING, "prompt: a chat completion doesn't hold what was asked"),
            "prompt_token_ids": ("5", "prompt_token_ids: expected a list of token ids"),
            "choices": ([], "choices: expected one or more, got none"),
            "model": (7, "model: expected text, got 7"),
        },
    ),
)
