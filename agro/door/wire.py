"""Requests and answers of OpenAI's chat completions and Responses, and of Anthropic's messages.

Shapes as of openai-python 3.57 and anthropic 2.14, with whose clients `tests/door` speaks. A field that would
change the answer and that agro doesn't have is refused, never ignored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agro.door.batch import Token
from agro.errors import Refused
from agro.logs.exchanges import prompt as messages_of
from agro.types import Messages
from agro.types.conversation import declarations, normalized, without_tools

Event = dict[str, Any]
IGNORED = (  # fields without an effect on what one model answers
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("parallel_tool_calls", "include", "truncation", "prompt_cache_retention", "cache_control"),
)
NEUTRAL: dict[str, tuple[Any, ...]] = {  # values that ask for nothing
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}}, {}),
    "modalities": (["text"],),
    "thinking": ({"type": "disabled"},),
    "background": (False,),
    "reasoning": ({},),
}


class Problem(Exception):
    """A request that isn't answered as asked: the status of HTTP, and what the services call it."""

    def __init__(self, status: int, message: str, *, kind: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param
        self.kind = kind or KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")


KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class Options(BaseModel):
    """The fields of a request that decide how an answer is sampled."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = Field(max_length=500)
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    stop: list[str] = Field([], max_length=16)
    seed: int | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool = False


@dataclass(frozen=True)
class Ask:
    """A request in one form."""

    options: Options
    messages: Messages  # with the declarations of the tools
    tools: list[dict[str, Any]]
    forced: str | None = None  # the tool that has to be called; "" any
    reports_usage: bool = True  # in a stream


@dataclass(frozen=True)
class Outcome:
    """One answer, as clients get it."""

    id: str  # of the call
    content: str
    reasoning: str
    calls: list[dict[str, Any]]  # with ids
    finish: str  # "stop" or "length"
    tokens: Sequence[Token]
    stop: str | None = None  # the stop text that ended it
    texts: Sequence[tuple[str, list[tuple[str, float]]]] = ()  # of tokens, and of the likeliest ones

    @property
    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        return message | ({"tool_calls": self.calls} if self.calls else {})


class Chat:
    """POST /v1/chat/completions."""

    prefix = "chatcmpl-"
    names: ClassVar[dict[str, str]] = {"max_completion_tokens": "max_tokens"}  # fields by another name

    def __init__(self, body: dict[str, Any], id: str = "") -> None:
        self.ask = self._read(dict(body))
        self.id, self.created = self.prefix + id, int(time.time())
        self.prompt_tokens = 0

    def _read(self, body: dict[str, Any]) -> Ask:
        """Raises `Problem` for a field that isn't as expected."""
        shows_usage = (body.pop("stream_options", None) or {}).get("include_usage", False)
        logprobs = body.pop("logprobs", None)
        if logprobs and body.get("top_logprobs") is None:
            body["top_logprobs"] = 0
        return self._of(body, reports_usage=shows_usage)

    def _of(self, body: dict[str, Any], *, reports_usage: bool) -> Ask:
        asked = {
            k: body.pop(k) for k in ("messages", "input", "system", "instructions", "tools") if k in body
        }
        choice = body.pop("tool_choice", None)
        options = self._options(body)
        tools = declarations(asked.get("tools") or [])
        if asked.get("tools") and not tools:
            raise Problem(400, "tools: expected declarations of functions with their names", param="tools")
        forced = _forced(choice, tools)
        if choice == "none" or (isinstance(choice, dict) and choice.get("type") == "none"):
            asked.pop("tools", None)
            tools = []
        try:
            messages = messages_of(asked, "request")
            if isinstance(messages, list) and messages:
                messages = normalized(messages, "messages")
        except Refused as error:
            raise Problem(400, str(error), param="messages") from None
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not messages or not without_tools(messages)[0]:
            raise Problem(400, "messages: expected at least one", param="messages")
        return Ask(options, messages, tools, forced, reports_usage)

    def _options(self, body: dict[str, Any]) -> Options:
        """Raises `Problem` for a field that isn't as expected, or that agro doesn't have."""
        given = {
            self.names.get(name, name): value
            for name, value in body.items()
            if not (value is None or name in IGNORED or value in NEUTRAL.get(name, ()))
        }
        if isinstance(given.get("stop"), str):
            given["stop"] = [given["stop"]]
        try:
            options = Options.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            what = "agro doesn't have this field" if first["type"] == "extra_forbidden" else first["msg"]
            raise Problem(400, f"{name}: {what}, got {first['input']!r:.80}", param=name) from None
        if options.n > 1 and type(self) is not Chat:
            raise Problem(400, f"n: this interface has one answer a request, got {options.n}", param="n")
        if not all(options.stop):
            raise Problem(400, "stop: expected texts that aren't empty", param="stop")
        return options

    def whole(self, outcomes: Sequence[Outcome]) -> Event:
        choices = [
            {
                "index": i,
                "id": outcome.id,  # for feedback: each choice is an answer of its own
                "message": self._message(outcome),
                "logprobs": self._logprobs(outcome.tokens, outcome.texts),
                "finish_reason": self._finish(outcome),
            }
            for i, outcome in enumerate(outcomes)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": self.usage(outcomes)}

    def usage(self, outcomes: Sequence[Outcome]) -> Event:
        written = sum(len(outcome.tokens) for outcome in outcomes)
        names = {"prompt_tokens": self.prompt_tokens, "completion_tokens": written}
        return {**names, "total_tokens": self.prompt_tokens + written}

    def begin(self) -> Iterator[Event]:
        for index in range(self.ask.options.n):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, kind: str, text: str, tokens: Sequence[Token], texts: Any) -> Iterator[Event]:
        """`kind`: content or reasoning_content."""
        yield self._chunk(index, {kind: text}, self._logprobs(tokens, texts))

    def end(self, index: int, outcome: Outcome) -> Iterator[Event]:
        for place, call in enumerate(outcome.calls):
            yield self._chunk(index, {"tool_calls": [{"index": place, **_with_text(call)}]})
        yield self._chunk(index, {}, finish=self._finish(outcome))

    def close(self, outcomes: Sequence[Outcome]) -> Iterator[Event]:
        if self.ask.reports_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self.usage(outcomes)}
        yield {}

    def framed(self, event: Event) -> str:
        """As server-sent event."""
        return f"data: {json.dumps(event) if event else '[DONE]'}\n\n"

    @staticmethod
    def error(problem: Problem) -> Event:
        fields = {"message": str(problem), "type": problem.kind, "param": problem.param, "code": None}
        return {"error": fields}

    def _head(self, kind: str) -> Event:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.ask.options.model}

    def _chunk(self, index: int, delta: Event, logprobs: Any = None, finish: str | None = None) -> Event:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _message(self, outcome: Outcome) -> Event:
        message: Event = {"role": "assistant", "content": outcome.content, "refusal": None}
        if outcome.reasoning:
            message["reasoning_content"] = outcome.reasoning
        if outcome.calls:
            message["content"] = outcome.content or None
            message["tool_calls"] = [_with_text(call) for call in outcome.calls]
        return message

    def _finish(self, outcome: Outcome) -> str:
        return "tool_calls" if outcome.calls else outcome.finish

    def _logprobs(self, tokens: Sequence[Token], texts: Any) -> Event | None:
        if self.ask.options.top_logprobs is None:
            return None
        content = []
        for token, (text, top) in zip(tokens, texts, strict=True):
            likeliest = [_token_text(other, logp) for other, logp in top]
            content.append({**_token_text(text, token.model_logp), "top_logprobs": likeliest})
        return {"content": content, "refusal": None}


class Anthropic(Chat):
    """POST /v1/messages of Anthropic's."""

    prefix = "msg_"
    names: ClassVar[dict[str, str]] = {"stop_sequences": "stop"}

    def _read(self, body: dict[str, Any]) -> Ask:
        if body.get("max_tokens") is None:
            raise Problem(400, "max_tokens: field required", param="max_tokens")
        self._open: str | None = None  # the kind of the block that is being streamed
        self._blocks = 0
        return self._of(body, reports_usage=True)

    def whole(self, outcomes: Sequence[Outcome]) -> Event:
        [outcome] = outcomes
        content: list[Event] = []
        if outcome.reasoning:
            content.append({"type": "thinking", "thinking": outcome.reasoning, "signature": ""})
        if outcome.content or not outcome.calls:
            content.append({"type": "text", "text": outcome.content})
        content += [_tool_use(call) for call in outcome.calls]
        return self._message_of(content, self._stop_reason(outcome), outcome.stop, len(outcome.tokens))

    def begin(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self._message_of([], None, None, 0)}

    def delta(self, index: int, kind: str, text: str, tokens: Sequence[Token], texts: Any) -> Iterator[Event]:
        of_text = kind == "content"
        block = (
            {"type": "text", "text": ""} if of_text else {"type": "thinking", "thinking": "", "signature": ""}
        )
        yield from self._enter(kind, block)
        delta = (
            {"type": "text_delta", "text": text} if of_text else {"type": "thinking_delta", "thinking": text}
        )
        yield {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def end(self, index: int, outcome: Outcome) -> Iterator[Event]:
        for call in outcome.calls:
            yield from self._enter(call["id"], {**_tool_use(call), "input": {}})
            text = json.dumps(call["function"]["arguments"])
            delta = {"type": "input_json_delta", "partial_json": text}
            yield {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._blocks - 1}
        ending = {"stop_reason": self._stop_reason(outcome), "stop_sequence": outcome.stop}
        yield {"type": "message_delta", "delta": ending, "usage": {"output_tokens": len(outcome.tokens)}}

    def close(self, outcomes: Sequence[Outcome]) -> Iterator[Event]:
        yield {"type": "message_stop"}

    def framed(self, event: Event) -> str:
        return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"

    @staticmethod
    def error(problem: Problem) -> Event:
        return {"type": "error", "error": {"type": problem.kind, "message": str(problem)}}

    def _enter(self, kind: str, block: Event) -> Iterator[Event]:
        if self._open != kind:
            if self._open is not None:
                yield {"type": "content_block_stop", "index": self._blocks - 1}
            self._open = kind
            yield {"type": "content_block_start", "index": self._blocks, "content_block": block}
            self._blocks += 1

    def _stop_reason(self, outcome: Outcome) -> str:
        if outcome.calls:
            return "tool_use"
        if outcome.stop is not None:
            return "stop_sequence"
        return "max_tokens" if outcome.finish == "length" else "end_turn"

    def _message_of(self, content: list[Event], reason: str | None, stop: str | None, tokens: int) -> Event:
        ending = {"stop_reason": reason, "stop_sequence": stop}
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": tokens}
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.ask.options.model}
        return {**head, "content": content, **ending, "usage": usage}


class Responses(Chat):
    """POST /v1/responses of OpenAI's."""

    prefix = "resp_"
    names: ClassVar[dict[str, str]] = {"max_output_tokens": "max_tokens"}

    def _read(self, body: dict[str, Any]) -> Ask:
        if body.get("previous_response_id") or body.get("conversation"):
            raise Problem(400, "previous_response_id: agro keeps no conversations; send all items as input")
        self._number, self._text = 0, ""
        return self._of(body, reports_usage=True)

    def whole(self, outcomes: Sequence[Outcome]) -> Event:
        [outcome] = outcomes
        output = (
            [self._text_item(outcome.content, "completed")] if outcome.content or not outcome.calls else []
        )
        output += [self._call_item(call) for call in outcome.calls]
        is_cut = outcome.finish == "length"
        return {
            **self._head("response"),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": output,
            "usage": self.usage(outcomes),
        }

    def usage(self, outcomes: Sequence[Outcome]) -> Event:
        counts = super().usage(outcomes)
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }

    def begin(self) -> Iterator[Event]:
        response = {**self._head("response"), "status": "in_progress", "output": [], "usage": None}
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def delta(self, index: int, kind: str, text: str, tokens: Sequence[Token], texts: Any) -> Iterator[Event]:
        if kind == "content":
            yield from self._begin_text()
            self._text += text
            yield self._part("response.output_text.delta", delta=text, logprobs=[])

    def end(self, index: int, outcome: Outcome) -> Iterator[Event]:
        if not outcome.calls:
            yield from self._begin_text()
        if self._text is not None and self._number > 2:
            yield self._part("response.output_text.done", text=self._text, logprobs=[])
            part = {"type": "output_text", "text": self._text, "annotations": []}
            yield self._part("response.content_part.done", part=part)
            item = self._text_item(self._text, "completed")
            yield self._event("response.output_item.done", output_index=0, item=item)
        first = int(self._number > 2)
        for place, call in enumerate(outcome.calls, first):
            item, text = self._call_item(call), json.dumps(call["function"]["arguments"])
            head = {"item_id": item["id"], "output_index": place}
            begun = {**item, "arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=place, item=begun)
            yield self._event("response.function_call_arguments.delta", **head, delta=text)
            name = call["function"]["name"]
            yield self._event("response.function_call_arguments.done", **head, arguments=text, name=name)
            yield self._event("response.output_item.done", output_index=place, item=item)

    def close(self, outcomes: Sequence[Outcome]) -> Iterator[Event]:
        whole = self.whole(outcomes)
        yield self._event(f"response.{whole['status']}", response=whole)

    def framed(self, event: Event) -> str:
        return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"

    def _begin_text(self) -> Iterator[Event]:
        if self._number == 2:  # after the two events of the response itself
            item = {**self._text_item("", "in_progress"), "content": []}
            yield self._event("response.output_item.added", output_index=0, item=item)
            part = {"type": "output_text", "text": "", "annotations": []}
            yield self._part("response.content_part.added", part=part)

    def _part(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=f"msg_{self.id}", output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _head(self, kind: str) -> Event:
        settings = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "error": None}
        head = {"id": self.id, "object": kind, "created_at": self.created, "model": self.ask.options.model}
        return head | settings

    def _text_item(self, text: str, status: str) -> Event:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        item = {"id": f"msg_{self.id}", "type": "message", "role": "assistant"}
        return {**item, "status": status, "content": content}

    def _call_item(self, call: dict[str, Any]) -> Event:
        text = json.dumps(call["function"]["arguments"])
        item = {"id": f"fc_{call['id']}", "type": "function_call", "call_id": call["id"]}
        return {**item, "name": call["function"]["name"], "arguments": text, "status": "completed"}


def _forced(choice: Any, tools: list[dict[str, Any]]) -> str | None:
    """The tool that `tool_choice` demands, "" for any. Raises `Problem` for one that isn't declared."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind in (None, "auto", "none"):
        return None
    if not tools:
        raise Problem(
            400, f"tool_choice: expected tools with it, got {choice!r:.80} alone", param="tool_choice"
        )
    if kind in ("required", "any"):
        return ""
    name = (
        choice.get("name", (choice.get("function") or {}).get("name")) if isinstance(choice, dict) else None
    )
    if name not in [tool["function"]["name"] for tool in tools]:
        raise Problem(400, f"tool_choice: expected a declared tool, got {choice!r:.80}", param="tool_choice")
    return str(name)


def _with_text(call: dict[str, Any]) -> Event:
    """A call with its arguments as text."""
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": text}}


def _tool_use(call: dict[str, Any]) -> Event:
    function = call["function"]
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]}


def _token_text(text: str, logp: float | None) -> Event:
    return {"token": text, "logprob": logp, "bytes": list(text.encode())}
