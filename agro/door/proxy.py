"""`agro proxy`: store the traffic of a server with OpenAI's or Anthropic's interface.

Requests and answers pass unchanged. A sample has texts, and token ids with log-probs if the server returned
them (vLLM: `return_token_ids` and `logprobs`, which `--tokens` adds to requests).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import AsyncIterator
from copy import deepcopy
from functools import partial
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from agro.door.app import object_in
from agro.door.sessions import Call, Keeping, Memory, Recorder, check_name, digests_of, meta_of, put_row
from agro.door.wire import INTERFACES, Problem, messages_in
from agro.errors import Refused, remember_secret, without_secrets
from agro.io.strictjson import loads
from agro.logs import exchanges
from agro.logs.exchanges import FINISH
from agro.rollout.rollout import EpisodeRow
from agro.types import ROUNDING, Messages, Sample, end_in
from agro.types.conversation import normalized

PASSED = ("content-type", "accept", "anthropic-version", "anthropic-beta")  # request headers
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_sequences")
TEXTS = (  # fields that arrive in parts, in any interface
    *("content", "reasoning_content", "reasoning", "name", "arguments"),
    *("text", "thinking", "partial_json"),
)
ENDS = ("message_stop", "response.completed", "response.incomplete")  # types of the last event
REPLY_BYTES = 64 << 20
UNREADABLE = (Refused, ValueError, LookupError, TypeError, AttributeError)  # a reply of another shape


class Proxy:
    """Forwards requests to the server at a URL, with that server's key."""

    def __init__(self, url: str, key: str | None, keeping: Keeping, seconds: float, *, tokens: bool) -> None:
        """`tokens`: request ids and log-probs even if the client doesn't."""
        address = httpx.URL(url)
        if address.scheme not in ("http", "https") or not address.host:
            raise Refused(f"--to {url}: expected the URL of a server, such as http://127.0.0.1:8000/v1")
        remember_secret(key)
        self.url, self._key, self._tokens = url.rstrip("/").removesuffix("/v1") + "/v1", key, tokens
        self.memory = Memory()
        self.recorder = Recorder(keeping, self.memory, f"proxy:{address.host}")
        self.feedback, self.close = self.recorder.feedback, self.recorder.close
        self.unstored = 0  # number of unreadable answers
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(seconds, connect=10))

    def measures(self) -> dict[str, float]:
        return {**self.recorder.measures(), "unstored_total": self.unstored}

    async def names(self) -> list[str]:
        reply = await self._send("GET", "models", b"", {})
        try:
            return [str(model["id"]) for model in loads(await _content(reply))["data"]]
        except UNREADABLE:
            raise Problem(502, f"the server's models can't be read (status {reply.status_code})") from None

    async def ask(self, request: Request, path: str, body: bytes, session: str | None) -> Response:
        query = object_in(body)
        await self.recorder.open_session(session)
        if self._tokens and path == "chat/completions":
            body = json.dumps({"logprobs": True, "return_token_ids": True, **query}).encode()
        headers = {name: request.headers[name] for name in PASSED if name in request.headers}
        reply = await self._send("POST", path, body, headers)
        kind = reply.headers.get("content-type", "application/json")
        if reply.status_code == httpx.codes.OK and kind.startswith("text/event-stream"):
            stream = self._stream(reply, path, query, session)
            return StreamingResponse(stream, media_type="text/event-stream")
        content = await _content(reply)
        if reply.status_code == httpx.codes.OK:
            await self._keep(query, content, session)
        return Response(content, reply.status_code, media_type=kind)

    async def _send(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> httpx.Response:
        """Return the server's reply with its body unread. Raises `Problem` if there is none."""
        if self._key is not None:
            key = {"x-api-key": self._key} if path == "messages" else {"authorization": f"Bearer {self._key}"}
            headers = {**headers, **key}
        request = self._client.build_request(method, f"{self.url}/{path}", content=body, headers=headers)
        try:
            return await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise _unreachable(error) from None

    async def _stream(
        self, reply: httpx.Response, path: str, query: dict[str, Any], session: str | None
    ) -> AsyncIterator[bytes]:
        """Yield the server's events unchanged, the last one once the answer is stored."""
        merged: dict[str, Any] | Exception = {}
        is_kept = False
        try:
            async for block in _blocks(reply):
                if isinstance(merged, dict):
                    try:
                        is_end = merge_block(merged, block)
                    except UNREADABLE as error:  # forward it anyway
                        is_end, merged = False, error
                    if is_end and not is_kept:
                        is_kept = True
                        await self._keep(query, merged, session)
                yield block
            if not is_kept:
                self._miss(merged if isinstance(merged, Exception) else "the server's stream had no end")
        except (httpx.HTTPError, Problem) as error:
            problem = error if isinstance(error, Problem) else _unreachable(error)
            yield f"event: error\ndata: {json.dumps(INTERFACES[path].error(problem))}\n\n".encode()
        finally:
            await reply.aclose()

    def _miss(self, reason: Exception | str) -> None:
        """Count an unreadable answer, which the client still gets, and report the first one."""
        if not self.unstored:
            print(without_secrets(f"agro: an answer isn't stored: {reason!s:.300}"), file=sys.stderr)
        self.unstored += 1

    async def _keep(self, query: dict[str, Any], reply: Any, session: str | None) -> None:
        """Store an answer. `reply`: JSON, or a stream merged by `merge_block`."""
        rows = list[tuple[Call, Sample]]()
        try:
            reply = loads(reply) if isinstance(reply, bytes) else whole_of(reply)
            messages = messages_in(query)
            sampling = {name: query[name] for name in SAMPLING if query.get(name) is not None} or None
            fields = {"sampling": sampling, "source": f"proxy:{reply.get('model') or query.get('model')}"}
            for choice, answer in enumerate(exchanges.replies(reply, "reply")):
                call = self._answered(reply, choice, answer, messages, session)
                rows.append((call, _sample(call, answer.get("finish_reason"), **fields)))
        except UNREADABLE as error:
            self._miss(error)
        for call, sample in rows:
            work = partial(put_row, call=call, sample=sample, privacy=self.recorder.privacy)
            await self.recorder.keep(work)

    def _answered(
        self, reply: dict[str, Any], choice: int, answer: Any, messages: Messages, session: str | None
    ) -> Call:
        """Return the call of one answer, in the row that it extends or in a new one."""
        digests, context = digests_of(messages), reply.get("prompt_token_ids") or []
        extended = self.memory.earlier(session, digests, messages)
        episode = self.memory.episode(session) if extended is None else extended.episode
        row, ids, logp = EpisodeRow(list(context)), list[int](), list[float]()
        if context:
            tokens = reply["choices"][choice]
            ids = tokens.get("token_ids") or []
            logp = [entry["logprob"] for entry in (tokens.get("logprobs") or {}).get("content") or []]
            if not all(type(token) is int and 0 <= token < 2**31 for token in [*context, *ids]):
                raise Refused("token_ids: expected token ids from the server, got something else")
            if not all(type(x) in (int, float) and -math.inf < x <= ROUNDING for x in logp):
                raise Refused("logprobs: expected numbers of at most 0 from the server, got something else")
            logp = [min(x, 0.0) for x in logp]
        prior_tokens = [] if extended is None else extended.row.tokens
        if extended is not None and (context[: len(prior_tokens)] != prior_tokens if ids else prior_tokens):
            extended = None
        elif extended is not None and ids:
            row = deepcopy(extended.row)
            row.observe(context[len(prior_tokens) :])
        name = _name(reply.get("id"), choice)
        call = Call(episode, 0, row, "", messages, messages, messages, digests, name=name)
        call = self.memory.place(call, extended)
        if ids:
            call.row.act(ids, logp if len(logp) == len(ids) else None, -1)
        answer = {name: value for name, value in answer.items() if name != "finish_reason"}
        [message] = normalized([{"role": "assistant", **answer}], "reply")
        call.last_turn = message["content"]
        self.memory.remember(call, message)
        return call


def _name(id: Any, choice: int) -> str:
    """Return the server's id as a name, with `.CHOICE` from the second on; "" if feedback can't use it."""
    text = "" if id is None else str(id)
    for interface in INTERFACES.values():
        text = text.removeprefix(interface.prefix)
    try:
        return check_name(text) + (f".{choice}" if choice else "")
    except Refused:
        return ""


def _sample(call: Call, end: Any, **fields: Any) -> Sample:
    """Build the sample of an answered call. `end`: the server's finish reason."""
    row = call.row
    meta = {"finish": FINISH.get(end_in(end) or ""), **meta_of(call, call.last_turn)}
    fields["prompt"] = call.episode.prompt
    if row.tokens:
        fields |= {"tokens": row.tokens, "action": row.action, "behavior_logp": row.logp}
        fields["context_tokens"] = row.tokens[: row.context] if call.number else None
    elif call.number:  # its context is recorded nowhere else
        fields["prompt"] = call.opened
    meta = {name: value for name, value in meta.items() if value is not None}
    return Sample(response=call.last_turn, meta=meta, **fields)


async def _content(reply: httpx.Response) -> bytes:
    """Read a complete reply. Raises `Problem` if it breaks off or is too large."""
    try:
        return b"".join([part async for part in _bounded(reply)])
    except httpx.HTTPError as error:
        raise _unreachable(error) from None
    finally:
        await reply.aclose()


async def _bounded(reply: httpx.Response) -> AsyncIterator[bytes]:
    size = 0
    async for part in reply.aiter_bytes():
        size += len(part)
        if size > REPLY_BYTES:
            raise Problem(502, f"expected at most {REPLY_BYTES} bytes from the server behind the proxy")
        yield part


async def _blocks(reply: httpx.Response) -> AsyncIterator[bytes]:
    """Yield a stream's events. Lines end with LF or CRLF only: texts may contain other line separators."""
    buffer = b""
    async for part in _bounded(reply):
        *blocks, buffer = (buffer + part).replace(b"\r\n", b"\n").split(b"\n\n")
        for block in blocks:
            yield block + b"\n\n"
    if buffer.strip():
        yield buffer + b"\n\n"


def merge_block(merged: dict[str, Any], block: bytes) -> bool:
    """Merge the event of a block, and return whether it is the last one."""
    lines = block.decode().split("\n")
    data = "\n".join(line.removeprefix("data:").strip() for line in lines if line.startswith("data:"))
    if data in ("", "[DONE]"):
        return bool(data)
    event = loads(data)
    merge_event(merged, event)
    return event.get("type") in ENDS


def merge_event(merged: dict[str, Any], event: dict[str, Any]) -> None:
    """Merge an event of a stream; `whole_of` turns the result into a reply."""
    kind = event.get("type", "")
    if kind in ("response.completed", "response.incomplete"):
        merged.update(event["response"])
    elif kind == "message_start":
        merged.update(event["message"])
    elif kind == "content_block_start":
        merged["content"].append(event["content_block"])
    elif kind == "content_block_delta":
        merge(merged["content"][event["index"]], {**event["delta"], "type": None})
    elif kind == "message_delta":
        merged.update(event["delta"])
    elif not kind:
        if event.get("prompt_token_ids"):
            merged.pop("prompt_token_ids", None)  # the server repeats them
        merge(merged, event)


def merge(merged: dict[str, Any], part: dict[str, Any]) -> None:
    """Merge a part: append texts and lists, merge list items by their index, and replace other values."""
    for name, value in part.items():
        previous = merged.get(name)
        if name in TEXTS and isinstance(previous, str) and isinstance(value, str):
            merged[name] = previous + value
        elif isinstance(value, list):
            items = merged[name] = previous or []
            for item in value:
                if not isinstance(item, dict) or "index" not in item:
                    items.append(item)
                    continue
                same = next((each for each in items if each["index"] == item["index"]), None)
                if same is None:
                    items.append(same := {})
                merge(same, item)
        elif isinstance(value, dict):
            merged[name] = previous or {}
            merge(merged[name], value)
        elif value is not None:
            merged[name] = value


def whole_of(merged: dict[str, Any]) -> dict[str, Any]:
    """Turn a merged stream into the reply that a request without a stream gets."""
    for choice in merged.get("choices", []):
        choice["message"] = {"role": "assistant", "content": "", **choice.pop("delta", {})}
    merged.get("choices", []).sort(key=lambda choice: choice["index"])
    for block in merged.get("content", []):
        if "partial_json" in block:
            block["input"] = json.loads(block.pop("partial_json") or "{}")
    return merged


def _unreachable(error: httpx.HTTPError) -> Problem:
    status = 504 if isinstance(error, httpx.TimeoutException) else 502
    return Problem(status, f"the server behind the proxy doesn't answer: {type(error).__name__}")
