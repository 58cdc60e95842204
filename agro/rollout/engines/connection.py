"""A connection to one server: requests with a deadline and a key, sent again where that may help.

A reply is used only where it is what was requested: one response, with at most the requested number of
tokens, all in the vocabulary, none after the end, each with a log-prob. Any other reply is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from agro import config
from agro.config import from_environment
from agro.errors import Refused, without_secrets
from agro.io.strictjson import loads
from agro.models.encoding import Encoder
from agro.rollout.engines.protocol import Request
from agro.types import ROUNDING

FIRST_PAUSE = 0.25  # seconds before a failed request is sent again; doubled each time
BUSY = (408, 425, 429)  # statuses that ask for the same request later
GONE = 404  # a server that was started again has lost its adapters
HEALTH_SECONDS = 5.0  # in which a server says that it runs
T = TypeVar("T")


class Failed(Exception):
    """A request that may succeed when it is sent again."""


class Broken(Failed):
    """A connection that ended without a reply. Another process may answer at its URL then."""


class Lost(Exception):
    """A server that doesn't serve: why."""


class Away(Lost):
    """A server that can't be reached, or was started again and has none of the weights that were pushed."""


class Missing(Lost):
    """A server without the route, or without the model or adapter that is asked for."""


class Connection:
    """A client of one server. `failures` counts the requests that failed."""

    def __init__(self, url: str, settings: config.EngineConfig, key: str | None = None) -> None:
        """`key`: of a server that has another one than `engine.api_key`."""
        self.url, self.settings = url, settings
        self.failures = 0
        key = key or from_environment(settings.api_key, "engine.api_key")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        # `_reply` limits the time of a complete request. A timeout of httpx's begins again with each byte.
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(timeout=None, limits=limits, headers=headers)

    async def command(self, path: str, body: Mapping[str, Any], *, retries: int | None = None) -> None:
        """A request whose reply says no more than that it is done."""
        await self._repeatedly(path, body, lambda content: None, retries)

    async def pause(self, attempt: int) -> None:
        """Before a failed request is sent again for the `attempt`th time, from 0."""
        await asyncio.sleep(FIRST_PAUSE * 2**attempt)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any],
        read: Callable[[Any], T],
        prove: Callable[[], Awaitable[None]] | None = None,
    ) -> T:
        """What `read` makes of the reply's JSON, which is None where it is empty.

        A request that fails is sent again, `engine.retries` times; after a broken connection `prove` is
        awaited first. Raises `Lost` where it fails then too, and `Refused` for a request that the server
        refuses, and for a reply that isn't JSON.
        """
        return await self._repeatedly(
            path, body, lambda content: read(self._json(path, content)), None, prove
        )

    async def get(self, path: str) -> Any:
        """The JSON of a page."""
        return await self._repeatedly(path, None, lambda content: self._json(path, content), None)

    async def _repeatedly(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        read: Callable[[bytes], T],
        retries: int | None,
        prove: Callable[[], Awaitable[None]] | None = None,
    ) -> T:
        tries = 1 + (self.settings.retries if retries is None else retries)
        problem = Failed()
        for attempt in range(tries):
            if attempt:
                await self.pause(attempt - 1)
            try:
                if prove is not None and isinstance(problem, Broken):
                    await prove()
                return read(await self._reply(path, body))
            except Failed as error:
                self.failures += 1
                problem = error
        lost = Away if isinstance(problem, Broken) else Lost
        raise lost(f"{self.url}{path} failed {tries} times, at last with {problem}")

    async def is_alive(self) -> bool:
        """Whether the server says that it runs."""
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                response = await self._client.get(f"{self.url}/health")
        except (TimeoutError, httpx.HTTPError, httpx.InvalidURL):
            return False
        return response.status_code == httpx.codes.OK

    async def close(self) -> None:
        await self._client.aclose()

    async def _reply(self, path: str, body: Mapping[str, Any] | None) -> bytes:
        method = "GET" if body is None else "POST"
        try:
            async with asyncio.timeout(self.settings.timeout):
                response = await self._client.request(method, f"{self.url}{path}", json=body)
        except TimeoutError:
            raise Failed(f"no complete reply in engine.timeout = {self.settings.timeout:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Broken(f"{type(error).__name__}: {error}") from error
        if response.status_code == httpx.codes.OK:
            return response.content
        status = f"status {response.status_code}: {without_secrets(response.text)[:500]}"
        if response.status_code >= 500 or response.status_code in BUSY:
            raise Failed(status)
        if response.status_code == GONE:
            raise Missing(f"{self.url}{path} isn't there: {status}")
        raise Refused(f"engine.url: {self.url}{path} refused: {status}")

    def _json(self, path: str, content: bytes) -> Any:
        try:
            return loads(content) if content else None
        except ValueError as error:
            text = content.decode("utf-8", "replace")
            raise Refused(
                f"engine.url: {self.url}{path}: expected JSON, got {text[:200]!r} ({error})"
            ) from None


SEE_LOG = "What to do: see the server's log, then continue with --resume"


class Strict(BaseModel):
    """Only JSON's own types: 97.0, true and "97" are no integers. Fields that aren't read may be anything."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Span(Strict):
    """The version that tokens `start` to `end` - 1 of a response were sampled with."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Reply:
    """One response, whatever a server calls its parts."""

    token_ids: list[int]
    logprobs: list[float | None]  # None: unknown
    finish_reason: str
    spans: Sequence[Span] | None = None  # None: the server doesn't say

    def versions(self) -> NDArray[np.int32] | None:
        """[T] the version of each token, -1 where the server names none of ours; None without spans."""
        if self.spans is None:
            return None
        named = [(int(s.version) if s.version.isdecimal() else -1, s.end - s.start) for s in self.spans]
        return np.repeat([version for version, _ in named], [count for _, count in named]).astype(np.int32)


def problem_of(reply: Reply, request: Request, encoder: Encoder, stops: Sequence[str]) -> str:
    """What is wrong with a reply, such as a number of tokens, an id or a log-prob; "" where nothing is.

    The log-prob of an almost certain token may exceed 0 by rounding, up to `agro.types.ROUNDING`.
    """
    ids, logprobs, last = reply.token_ids, reply.logprobs, encoder.vocab_size - 1
    if not 1 <= len(ids) <= request.room:
        return f"token_ids: expected 1 to {request.room} tokens (max_tokens), got {len(ids)}. {SEE_LOG}"
    if len(logprobs) != len(ids):
        return (
            f"logprobs.token_logprobs: expected one for each of {len(ids)} tokens, got {len(logprobs)}. "
            f"{SEE_LOG}"
        )
    for index, token in enumerate(ids):
        if not 0 <= token <= last:
            return (
                f"token_ids.{index}: expected an id of the policy's vocabulary, 0 to {last}, got "
                f"{token!s:.40}. What to do: let the server serve the run's model"
            )
    for index, logprob in enumerate(logprobs):
        if logprob is not None and logprob > ROUNDING:
            return (
                f"logprobs.token_logprobs.{index}: expected a log-prob, at most 0, got {logprob:g}. {SEE_LOG}"
            )
    return _wrong_place(reply, request, encoder, stops)


def _wrong_place(reply: Reply, request: Request, encoder: Encoder, stops: Sequence[str]) -> str:
    """What is wrong with the versions of tokens, whose spans follow each other, or with the end: at the first
    end token or stop text, unless the response was truncated before."""
    ids = reply.token_ids
    if reply.spans is not None:
        ends, starts = [0, *(s.end for s in reply.spans)], [*(s.start for s in reply.spans), len(ids)]
        if ends != starts or any(span.start >= span.end for span in reply.spans):
            got = [(span.start, span.end) for span in reply.spans]
            return (
                f"weight_versions: expected spans one after the other over {len(ids)} tokens, got "
                f"{got!s:.80}. {SEE_LOG}"
            )
    if reply.finish_reason not in ("stop", "length"):
        got_reason = f"{reply.finish_reason!r:.80}"
        return f'finish_reason: expected "stop" or "length", got {got_reason}. {SEE_LOG}'
    *body, end = ids
    early = [position for position, token in enumerate(body) if token in encoder.eos_ids]
    if early:
        return (
            f"token_ids: expected nothing after the end token {body[early[0]]} at {early[0]}, got "
            f"{len(body) - early[0]} more. What to do: start the server without ignore_eos"
        )
    if _has_stop(encoder, body, request, stops):
        return (
            f"token_ids: expected nothing after a text of sampler.stop ({list(stops)!r:.80}), got more. What "
            "to do: start the server without speculative decoding, or remove sampler.stop"
        )
    is_complete = end in encoder.eos_ids or _has_stop(encoder, ids, request, stops)
    if reply.finish_reason == "stop" and not is_complete:
        return (
            f"token_ids: expected an end token ({', '.join(map(str, encoder.eos_ids))}) or a stop text last, "
            f'since finish_reason is "stop", got {end}. What to do: give the server the end tokens of the '
            "policy (generation_config.json)"
        )
    return ""


def _has_stop(encoder: Encoder, ids: Sequence[int], request: Request, stops: Sequence[str]) -> bool:
    if not stops:
        return False
    text = encoder.decode(ids, request.ids)
    return any(stop in text for stop in stops)


def wrong_field(details: Any, advice: str) -> str:
    """The first of pydantic's errors in words: which field, what was expected, what came."""
    field = ".".join(map(str, details["loc"])) or "reply"
    message = details["msg"][0].lower() + details["msg"][1:]
    return f"{field}: {message}, got {details['input']!r:.80}. What to do: {advice}"
