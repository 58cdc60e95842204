"""An engine behind HTTP: an OpenAI-compatible server, such as vLLM's or SGLang's, used with token ids.

Requests go to URL/v1/completions with `prompt` a list of token ids, `return_token_ids` and `logprobs`. The
server should report the log-probs of the distribution that it samples from (vLLM: --logprobs-mode
processed_logprobs). New weights are loaded by POST URL/collective_rpc {"method": "reload_weights"} and
URL/reset_prefix_cache, which vLLM serves with VLLM_SERVER_DEV_MODE=1.

A reply is used only where it is what was requested: one response, with at most the requested number of
tokens, all in the vocabulary, none after the end, each with a log-prob. Any other reply is refused.

Deviation from the embedded engine: the noise is the server's, so a run can't be repeated bit for bit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from threading import Thread
from typing import Annotated, Any, ClassVar, TypeVar

import httpx
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agro import config
from agro.config import SamplerConfig
from agro.errors import Refused
from agro.io.strictjson import loads
from agro.models.encoding import Encoder
from agro.rollout.engines.protocol import Capability, Continuation, Request
from agro.types import ROUNDING

FIRST_PAUSE = 0.25  # seconds before a failed request is sent again; doubled each time
BUSY = (408, 425, 429)  # statuses that ask for the same request later
CHECKED = 0.2  # seconds after which an interruption is noticed
SEED_BITS = 31  # servers take a 32-bit signed integer
_SEE_LOG = "What to do: see the server's log, then continue with --resume"
T = TypeVar("T")


class _Failed(Exception):
    """A request that may succeed when it is sent again."""


class _Reply(BaseModel):
    """Only JSON's own types: 97.0, true and "97" are no integers. Fields that aren't read may be anything."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class LogProbs(_Reply):
    token_logprobs: list[float | None]  # None: unknown


class Choice(_Reply):
    finish_reason: str
    token_ids: list[int]
    logprobs: LogProbs

    @model_validator(mode="before")
    @classmethod
    def _was_completed(cls, choice: Any) -> Any:
        """A server that pauses or restarts aborts responses, whatever they say: they are sampled again."""
        if isinstance(choice, dict) and choice.get("finish_reason") == "abort":
            raise _Failed('finish_reason "abort": the server gave the response up')
        return choice


class Completion(_Reply):
    choices: Annotated[list[Choice], Field(min_length=1, max_length=1)]


class Server:
    """Requests `sampler.batch` responses at once. A request that fails is counted and sent again."""

    can: ClassVar[frozenset[Capability]] = frozenset()

    def __init__(self, settings: config.EngineConfig, encoder: Encoder, version: int = -1) -> None:
        """`encoder`: of the policy that the server serves. Raises `Refused` where no URL is given."""
        if settings.url is None:
            raise Refused(
                'engine.kind = "server" needs engine.url, such as http://127.0.0.1:8000; it isn\'t set'
            )
        self.settings, self.encoder, self.version = settings, encoder, version
        self.url = settings.url.rstrip("/").removesuffix("/v1")
        self.failures = 0  # requests that failed, each of which was sent again
        self.proposed = self.accepted = 0  # unknown: a draft model is the server's own matter
        self.check: Callable[[], None] = lambda: None
        # `_post` limits the time of a complete request. A timeout of httpx's begins again with each byte.
        self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def decode(self, waiting: deque[Request], sampler: SamplerConfig, seed: int) -> Iterator[Continuation]:
        """See `agro.rollout.engines.Engine`.

        Raises `Refused` where a request fails `engine.retries` times more, and
        for a reply that isn't what was requested, once the other requests under way are served."""
        running: set[Future[Continuation]] = set()
        refused: BaseException | None = None
        try:
            while running or (waiting and refused is None):
                while waiting and len(running) < sampler.batch and refused is None:
                    running.add(self._submit(self._complete(waiting.popleft(), sampler, seed)))
                self.check()
                done, running = wait(running, timeout=CHECKED, return_when=FIRST_COMPLETED)
                for future in done:
                    refused = refused or future.exception()
                    if future.exception() is None:
                        yield future.result()
        finally:
            for future in running:
                future.cancel()
        if refused is not None:
            raise refused

    def load(self, weights: Path, version: int) -> None:
        """Let the server load the weights of a folder that it can access, and clear its prefix cache."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.resolve())}}
        self._submit(self._send("/collective_rpc", reload)).result()
        self._submit(self._send("/reset_prefix_cache", {})).result()
        self.version = version

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._submit(self._client.aclose()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _complete(self, request: Request, sampler: SamplerConfig, seed: int) -> Continuation:
        body = {
            "model": self.settings.model,
            "prompt": request.ids,
            "max_tokens": request.room,
            "temperature": sampler.temperature,
            "top_p": sampler.top_p,
            "top_k": sampler.top_k or -1,
            "min_p": sampler.min_p,
            "stop": list(sampler.stop) or None,
            "include_stop_str_in_output": True,
            "stop_token_ids": list(self.encoder.eos_ids),
            "seed": (seed + 1_000_003 * request.number + request.position) % 2**SEED_BITS,
            "logprobs": 0,
            "return_token_ids": True,
        }
        version = self.version

        def read(content: Any) -> Continuation:
            choice = self._choice(content, request, sampler.stop)
            logprobs = [np.nan if x is None else min(x, 0.0) for x in choice.logprobs.token_logprobs]
            return Continuation(request, np.array(choice.token_ids), np.array(logprobs, np.float64), version)

        return await self._send("/v1/completions", body, read)

    def _choice(self, content: Any, request: Request, stops: Sequence[str]) -> Choice:
        """The response in a reply. Raises `Refused` where it isn't what was requested."""
        try:
            choice = Completion.model_validate(content).choices[0]
            problem = wrong_value(choice, request, self.encoder.vocab_size)
            problem = problem or wrong_end(choice, request, self.encoder, stops)
        except ValidationError as error:
            details = error.errors()[0]
            field = ".".join(map(str, details["loc"])) or "reply"
            message = details["msg"][0].lower() + details["msg"][1:]
            problem = (
                f"{field}: {message}, got {details['input']!r:.80}. What to do: use a server that supports "
                "return_token_ids (vLLM 0.10 or newer)"
            )
        if problem:
            raise Refused(f"{self.url}/v1/completions: response {request.number}: {problem}")
        return choice

    async def _send(
        self, path: str, body: dict[str, Any], read: Callable[[Any], T] = lambda content: content
    ) -> T:
        """What `read` makes of the reply. A request that fails is sent again, `engine.retries` times."""
        pause = FIRST_PAUSE
        for attempt in range(self.settings.retries + 1):
            if attempt:
                await asyncio.sleep(pause)
                pause *= 2
            try:
                return read(await self._post(path, body))
            except _Failed as error:
                self.failures += 1
                problem = error
        raise Refused(
            f"engine.url: {self.url}{path} failed {self.settings.retries + 1} times, at last with {problem}. "
            "What to do: check that the server runs, raise engine.retries or engine.timeout; then continue "
            "with --resume"
        )

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON of one reply; None where it is empty."""
        try:
            async with asyncio.timeout(self.settings.timeout):
                response = await self._client.post(f"{self.url}{path}", json=body)
        except TimeoutError:
            raise _Failed(f"no complete reply in engine.timeout = {self.settings.timeout:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _Failed(f"{type(error).__name__}: {error}") from error
        if response.status_code != 200:
            status = f"status {response.status_code}: {response.text[:500]}"
            if response.status_code >= 500 or response.status_code in BUSY:
                raise _Failed(status)
            raise Refused(f"engine.url: {self.url}{path} refused: {status}")
        try:
            return loads(response.content) if response.content else None
        except ValueError as error:
            raise Refused(
                f"engine.url: {self.url}{path}: expected JSON, got {response.text[:200]!r} ({error})"
            ) from None


def wrong_value(choice: Choice, request: Request, vocabulary: int) -> str:
    """What is wrong with a number of tokens, an id or a log-prob; "" where nothing is.

    The log-prob of an almost certain token may exceed 0 by rounding, up to `agro.types.ROUNDING`.
    """
    ids, logprobs = choice.token_ids, choice.logprobs.token_logprobs
    if not 1 <= len(ids) <= request.room:
        return f"token_ids: expected 1 to {request.room} tokens (max_tokens), got {len(ids)}. {_SEE_LOG}"
    if len(logprobs) != len(ids):
        return (
            f"logprobs.token_logprobs: expected one for each of {len(ids)} tokens, got {len(logprobs)}. "
            f"{_SEE_LOG}"
        )
    for index, token in enumerate(ids):
        if not 0 <= token < vocabulary:
            return (
                f"token_ids.{index}: expected an id of the policy's vocabulary, 0 to {vocabulary - 1}, got "
                f"{token!s:.40}. What to do: let the server serve the run's model"
            )
    for index, logprob in enumerate(logprobs):
        if logprob is not None and logprob > ROUNDING:
            return (
                f"logprobs.token_logprobs.{index}: expected a log-prob, at most 0, got {logprob:g}. "
                f"{_SEE_LOG}"
            )
    return ""


def wrong_end(choice: Choice, request: Request, encoder: Encoder, stops: Sequence[str]) -> str:
    """What is wrong with where a response ends: "" where it ends at the first end token or stop text, or was
    truncated before."""
    if choice.finish_reason not in ("stop", "length"):
        got = f"{choice.finish_reason!r:.80}"
        return f'finish_reason: expected "stop" or "length", got {got}. {_SEE_LOG}'
    *body, end = choice.token_ids
    ends = [position for position, token in enumerate(body) if token in encoder.eos_ids]
    if ends:
        return (
            f"token_ids: expected nothing after the end token {body[ends[0]]} at {ends[0]}, got "
            f"{len(body) - ends[0]} more. What to do: start the server without ignore_eos"
        )
    if _has_stop(encoder, body, request, stops):
        return (
            f"token_ids: expected nothing after a text of sampler.stop ({list(stops)!r:.80}), got more. What "
            "to do: start the server without speculative decoding, or remove sampler.stop"
        )
    is_complete = end in encoder.eos_ids or _has_stop(encoder, choice.token_ids, request, stops)
    if choice.finish_reason == "stop" and not is_complete:
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
