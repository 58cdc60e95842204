"""Requests and answers of OpenAI's Chat Completions and Responses, and of Anthropic's Messages.

Shapes as of openai-python 3.57 and anthropic 2.14, whose clients `tests/door` uses. A field that would change
the answer but that agro lacks is refused, never ignored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agro.door.batch import Token
from agro.errors import Refused
from agro.logs.exchanges import prompt as messages_of
from agro.types import Messages
from agro.types.conversation import declarations, normalized, with_tools

Event = dict[str, Any]
Model = TypeVar("Model", bound=BaseModel)
IGNORED = (  # fields that don't affect the answer
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("parallel_tool_calls", "include", "truncation", "prompt_cache_retention", "cache_control"),
)
CONVERSATION = ("messages", "input", "system", "instructions")  # fields that hold the conversation
NEUTRAL: dict[str, tuple[Any, ...]] = {  # values without an effect
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
    """An error reply: the HTTP status, and the services' error type."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param
        self.kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")


KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class Options(BaseModel):
    """The request fields that control sampling."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = Field(max_length=500)
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    stop: list[Annotated[str, Field(min_length=1)]] = Field([], max_length=16)
    seed: int | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool = False


def validated(kind: type[Model], fields: dict[str, Any]) -> Model:
    """Validate fields. Raises `Problem` for the first invalid or unsupported one."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        issue = error.errors()[0]
        name = ".".join(map(str, issue["loc"]))
        reason = "agro doesn't have this field" if issue["type"] == "extra_forbidden" else issue["msg"]
        param = str(issue["loc"][0])
        raise Problem(400, f"{name}: {reason}, got {issue['input']!r:.80}", param) from None


def messages_in(body: dict[str, Any]) -> Messages:
    """Read a request's messages, of any interface. Raises `Refused` if they can't be read."""
    messages = messages_of(body, "request")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return normalized(messages, "messages")


@dataclass(frozen=True)
class Outcome:
    """One answer, as the client receives it."""

    id: str  # of the call
    content: str
    reasoning: str
    calls: list[dict[str, Any]]  # with ids
    finish: str  # "stop" or "length"
    tokens: Sequence[Token]
    stop: str | None = None  # the stop text that ended it

    @property
    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        return message | ({"tool_calls": self.calls} if self.calls else {})


class Chat:
    """POST /v1/chat/completions: the normalized request, and the shapes of its answers."""

    prefix = "chatcmpl-"
    names: ClassVar[dict[str, str]] = {"max_completion_tokens": "max_tokens"}  # aliases of fields
    decode: Callable[[list[int]], str]  # of the tokenizer

    def __init__(self, body: dict[str, Any]) -> None:
        """Raises `Problem` for an invalid field."""
        body = dict(body)
        self._take_specific(body)
        self.id, self.created, self.prompt_tokens = "", int(time.time()), 0
        self.outcomes: dict[int, Outcome] = {}  # by finished choice
        conversation = {name: body.pop(name) for name in CONVERSATION if name in body}
        choice, tools = body.pop("tool_choice", None), body.pop("tools", None) or []
        fields = {
            self.names.get(name, name): value
            for name, value in body.items()
            if not (value is None or name in IGNORED or value in NEUTRAL.get(name, ()))
        }
        if isinstance(fields.get("stop"), str):
            fields["stop"] = [fields["stop"]]
        self.options = options = validated(Options, fields)
        if options.n > 1 and type(self) is not Chat:
            raise Problem(400, f"n: this interface has one answer per request, got {options.n}", "n")
        if options.top_logprobs is not None and type(self) is not Chat:
            raise Problem(400, "top_logprobs: only chat completions return them", "top_logprobs")
        try:
            self.tools = declarations(tools)
        except Refused as error:
            raise Problem(400, str(error), "tools") from None
        schemas = [tool["function"]["parameters"] for tool in self.tools]
        right = all(isinstance(x, dict) and isinstance(x.get("properties", {}), dict) for x in schemas)
        if (tools and not self.tools) or not right:
            expected = "declarations of functions with their names and a JSON schema of their parameters"
            raise Problem(400, f"tools: expected {expected}", "tools")
        kind = choice.get("type", "") if isinstance(choice, dict) else choice
        # Name of the tool that must be called; "": any.
        self.forced = None if kind in (None, "auto", "none") else _forced(kind, choice, self.tools)
        if kind == "none":
            self.tools = []
        try:
            self.messages = with_tools(messages_in(conversation), self.tools)
        except Refused as error:
            raise Problem(400, str(error), "messages") from None

    def _take_specific(self, body: dict[str, Any]) -> None:
        """Remove the fields that only this interface has."""
        options = body.pop("stream_options", None) or {}
        if not isinstance(options, dict):
            raise Problem(400, f"stream_options: expected an object, got {options!r:.80}", "stream_options")
        self._shows_usage = options.get("include_usage", False)
        if body.pop("logprobs", None) and body.get("top_logprobs") is None:
            body["top_logprobs"] = 0

    def whole(self) -> Event:
        choices = []
        for index, outcome in sorted(self.outcomes.items()):
            message: Event = {"role": "assistant", "content": outcome.content, "refusal": None}
            if outcome.reasoning:
                message["reasoning_content"] = outcome.reasoning
            if outcome.calls:
                message["content"] = outcome.content or None
                message["tool_calls"] = [_with_text(call) for call in outcome.calls]
            choices.append(
                {
                    "index": index,
                    "id": outcome.id,  # for feedback: each choice is a separate answer
                    "message": message,
                    "logprobs": self._logprobs(outcome.tokens),
                    "finish_reason": "tool_calls" if outcome.calls else outcome.finish,
                }
            )
        return {**self._head("chat.completion"), "choices": choices, "usage": self.usage()}

    def usage(self) -> Event:
        written = sum(len(outcome.tokens) for outcome in self.outcomes.values())
        names = {"prompt_tokens": self.prompt_tokens, "completion_tokens": written}
        return {**names, "total_tokens": self.prompt_tokens + written}

    def begin(self) -> Iterator[Event]:
        for index in range(self.options.n):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, kind: str, text: str, tokens: Sequence[Token]) -> Iterator[Event]:
        """`kind`: content or reasoning_content."""
        yield self._chunk(index, {kind: text}, self._logprobs(tokens))

    def end(self, index: int, outcome: Outcome) -> Iterator[Event]:
        for position, call in enumerate(outcome.calls):
            yield self._chunk(index, {"tool_calls": [{"index": position, **_with_text(call)}]})
        yield self._chunk(index, {}, finish="tool_calls" if outcome.calls else outcome.finish)

    def close(self) -> Iterator[Event]:
        if self._shows_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self.usage()}
        yield {}

    def framed(self, event: Event) -> str:
        """Format a server-sent event."""
        name = f"event: {event['type']}\n" if "type" in event else ""
        return f"{name}data: {json.dumps(event) if event else '[DONE]'}\n\n"

    @staticmethod
    def error(problem: Problem) -> Event:
        fields = {"message": str(problem), "type": problem.kind, "param": problem.param, "code": None}
        return {"error": fields}

    def _head(self, kind: str) -> Event:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.options.model}

    def _chunk(self, index: int, delta: Event, logprobs: Any = None, finish: str | None = None) -> Event:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _logprobs(self, tokens: Sequence[Token]) -> Event | None:
        if self.options.top_logprobs is None:
            return None
        content = []
        for token in tokens:
            [chosen, *top] = [
                {"token": text, "logprob": logp, "bytes": list(text.encode())}
                for text, logp in (
                    (self.decode([id]), logp) for id, logp in ((token.id, token.model_logp), *token.top)
                )
            ]
            content.append({**chosen, "top_logprobs": top})
        return {"content": content, "refusal": None}


class Anthropic(Chat):
    """Anthropic's POST /v1/messages."""

    prefix = "msg_"
    names: ClassVar[dict[str, str]] = {"stop_sequences": "stop"}

    def _take_specific(self, body: dict[str, Any]) -> None:
        if body.get("max_tokens") is None:
            raise Problem(400, "max_tokens: field required", "max_tokens")
        self._open: str | None = None  # the block under way
        self._blocks = 0

    def whole(self) -> Event:
        outcome, content = self.outcomes[0], list[Event]()
        if outcome.reasoning:
            content.append(_block("thinking", outcome.reasoning))
        if outcome.content or not outcome.calls:
            content.append(_block("text", outcome.content))
        content += [_tool_use(call) for call in outcome.calls]
        return self._message(content, len(outcome.tokens)) | _ending(outcome)

    def begin(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self._message([], 0)}

    def delta(self, index: int, kind: str, text: str, tokens: Sequence[Token]) -> Iterator[Event]:
        name = "text" if kind == "content" else "thinking"
        yield from self._enter(name, _block(name, ""))
        delta = {"type": f"{name}_delta", name: text}
        yield {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def end(self, index: int, outcome: Outcome) -> Iterator[Event]:
        for call in outcome.calls:
            yield from self._enter(call["id"], {**_tool_use(call), "input": {}})
            text = json.dumps(call["function"]["arguments"])
            delta = {"type": "input_json_delta", "partial_json": text}
            yield {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._blocks - 1}
        usage = {"output_tokens": len(outcome.tokens)}
        yield {"type": "message_delta", "delta": _ending(outcome), "usage": usage}

    def close(self) -> Iterator[Event]:
        yield {"type": "message_stop"}

    @staticmethod
    def error(problem: Problem) -> Event:
        return {"type": "error", "error": {"type": problem.kind, "message": str(problem)}}

    def _enter(self, name: str, block: Event) -> Iterator[Event]:
        if self._open != name:
            if self._open is not None:
                yield {"type": "content_block_stop", "index": self._blocks - 1}
            self._open = name
            yield {"type": "content_block_start", "index": self._blocks, "content_block": block}
            self._blocks += 1

    def _message(self, content: list[Event], tokens: int) -> Event:
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": tokens}
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.options.model}
        return {**head, "content": content, "stop_reason": None, "stop_sequence": None, "usage": usage}


class Responses(Chat):
    """OpenAI's POST /v1/responses."""

    prefix = "resp_"
    names: ClassVar[dict[str, str]] = {"max_output_tokens": "max_tokens"}

    def _take_specific(self, body: dict[str, Any]) -> None:
        if body.get("previous_response_id") or body.get("conversation"):
            raise Problem(400, "previous_response_id: agro stores no conversations; send all items as input")
        self._events, self._has_text = 0, False

    def whole(self) -> Event:
        is_cut = self.outcomes[0].finish == "length"
        return {
            **self._head("response"),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output(self.outcomes[0]),
            "usage": self.usage(),
        }

    def usage(self) -> Event:
        counts = super().usage()
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

    def delta(self, index: int, kind: str, text: str, tokens: Sequence[Token]) -> Iterator[Event]:
        if kind == "content":
            yield from self._begin_text()
            yield self._part("response.output_text.delta", delta=text, logprobs=[])

    def end(self, index: int, outcome: Outcome) -> Iterator[Event]:
        for position, item in enumerate(self._output(outcome)):
            if item["type"] == "message":
                yield from self._begin_text()
                [part] = item["content"]
                yield self._part("response.output_text.done", text=part["text"], logprobs=[])
                yield self._part("response.content_part.done", part=part)
            else:
                started = {**item, "arguments": "", "status": "in_progress"}
                yield self._event("response.output_item.added", output_index=position, item=started)
                head, text = {"item_id": item["id"], "output_index": position}, item["arguments"]
                yield self._event("response.function_call_arguments.delta", **head, delta=text)
                head["name"] = item["name"]
                yield self._event("response.function_call_arguments.done", **head, arguments=text)
            yield self._event("response.output_item.done", output_index=position, item=item)

    def close(self) -> Iterator[Event]:
        response = self.whole()
        yield self._event(f"response.{response['status']}", response=response)

    def _begin_text(self) -> Iterator[Event]:
        if not self._has_text:
            self._has_text = True
            item = {**self._text_item(""), "status": "in_progress", "content": []}
            yield self._event("response.output_item.added", output_index=0, item=item)
            part = {"type": "output_text", "text": "", "annotations": []}
            yield self._part("response.content_part.added", part=part)

    def _part(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=f"msg_{self.id}", output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **fields}

    def _head(self, kind: str) -> Event:
        settings = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "error": None}
        head = {"id": self.id, "object": kind, "created_at": self.created, "model": self.options.model}
        return head | settings

    def _output(self, outcome: Outcome) -> list[Event]:
        has_text = self._has_text or outcome.content or not outcome.calls
        output = [self._text_item(outcome.content)] if has_text else []
        for call in outcome.calls:
            text = json.dumps(call["function"]["arguments"])
            item = {"id": f"fc_{call['id']}", "type": "function_call", "call_id": call["id"]}
            item |= {"name": call["function"]["name"], "arguments": text, "status": "completed"}
            output.append(item)
        return output

    def _text_item(self, text: str) -> Event:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        item = {"id": f"msg_{self.id}", "type": "message", "role": "assistant"}
        return {**item, "status": "completed", "content": content}


INTERFACES: dict[str, type[Chat]] = {"chat/completions": Chat, "messages": Anthropic, "responses": Responses}


def _forced(kind: Any, choice: Any, tools: list[dict[str, Any]]) -> str:
    """Return the tool that `tool_choice` requires. Raises `Problem` for an undeclared tool."""
    named = choice if isinstance(choice, dict) else {}
    function = named.get("function")
    name = named.get("name", function.get("name") if isinstance(function, dict) else None)
    if tools and kind in ("required", "any"):
        return ""
    if name in [tool["function"]["name"] for tool in tools]:
        return str(name)
    expected = "a declared tool" if tools else "tools with it"
    raise Problem(400, f"tool_choice: expected {expected}, got {choice!r:.80}", "tool_choice")


def _ending(outcome: Outcome) -> Event:
    """Return the end of an Anthropic message."""
    reason = "max_tokens" if outcome.finish == "length" else "end_turn"
    if outcome.stop is not None:
        reason = "stop_sequence"
    return {"stop_reason": "tool_use" if outcome.calls else reason, "stop_sequence": outcome.stop}


def _block(name: str, text: str) -> Event:
    block = {"type": name, name: text}
    return block if name == "text" else {**block, "signature": ""}


def _with_text(call: dict[str, Any]) -> Event:
    """Convert a call's arguments to text."""
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": text}}


def _tool_use(call: dict[str, Any]) -> Event:
    function = call["function"]
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]}
