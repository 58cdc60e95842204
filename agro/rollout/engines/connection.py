"""Requests to one server for responses and for log-probs of given tokens, and the checks of its replies. Also
a served reference: a teacher too large for this GPU scores the policy's own samples.

A reply is used only if it matches the request: one response, with at most the requested number of tokens, all
in the vocabulary, none after the end, each with a log-prob. Any other reply is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import (
    AliasPath,
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    StrictFloat,
    StrictInt,
    ValidationError,
    model_validator,
)
from torch import Tensor

from agro import config
from agro.config import RunConfig, SamplerConfig, from_environment
from agro.errors import Refused
from agro.io.connection import Connection, Failed, Lost
from agro.models.encoding import Encoder
from agro.models.policy import Policy
from agro.rollout.engines import Request
from agro.types import ROUNDING, KeptSets

SEED_BITS = 31  # servers take a 32-bit signed integer
Body = dict[str, Any]  # of a request
SEE_LOG = "see the server's log, then continue with --resume"


def connected(url: str, settings: config.EngineConfig, key: str | None = None) -> Connection:
    """Connect to a server; `key` replaces `engine.api_key`."""
    key = key or from_environment(settings.api_key, "engine.api_key")
    return Connection(url, settings.timeout, settings.retries, key, section="engine")


class _Content(BaseModel):
    """Only JSON's own types: 97.0, true and "97" aren't integers. Fields that aren't read may hold anything.

    A server that pauses or restarts aborts responses; whatever they contain, they are sampled again.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _was_completed(cls, content: Any) -> Any:
        match content:
            case {"choices": [{"finish_reason": "abort"}]} | {
                "meta_info": {"finish_reason": {"type": "abort"}}
            }:
                raise Failed('finish_reason "abort": the server aborted the response')
        return content


def _at(key: str, *path: str | int, default: Any = ...) -> Any:
    """A field at a path of a reply."""
    return Field(default, validation_alias=AliasPath(key, *path))


class Span(_Content):
    """The version that tokens `start` to `end` - 1 of a response were sampled with."""

    version: str
    start: int
    end: int


class Reply(NamedTuple):
    """One response, in the same form for all dialects."""

    token_ids: list[int]
    logprobs: list[float | None]  # None: unknown
    finish_reason: str
    spans: Sequence[Span] | None = None  # None: the server doesn't report them


def check_reply(reply: Reply, request: Request, encoder: Encoder, stops: Sequence[str]) -> None:
    """Raise `ValueError` for a reply that isn't one response to the request.

    A response ends at the first end token or stop text, unless it was truncated earlier. The spans of its
    versions are contiguous. The log-prob of an almost certain token may exceed 0 by rounding.
    """
    ids, logprobs, last_id = reply.token_ids, reply.logprobs, encoder.vocab_size - 1
    if not 1 <= len(ids) <= request.room:
        raise _wrong("token_ids", f"1 to {request.room} tokens (max_tokens)", len(ids))
    if len(logprobs) != len(ids):
        raise _wrong("logprobs.token_logprobs", f"one for each of {len(ids)} tokens", len(logprobs))
    for position, token in enumerate(ids):
        if not 0 <= token <= last_id:
            expected = f"an id of the policy's vocabulary, 0 to {last_id}"
            raise _wrong(
                f"token_ids.{position}", expected, f"{token!s:.40}", "let the server serve the run's model"
            )
    for position, logprob in enumerate(logprobs):
        if logprob is not None and logprob > ROUNDING:
            raise _wrong(f"logprobs.token_logprobs.{position}", "a log-prob, at most 0", f"{logprob:g}")
    if reply.spans is not None:
        bounds = [(span.start, span.end) for span in reply.spans]
        ends, starts = [0, *(end for _, end in bounds)], [*(start for start, _ in bounds), len(ids)]
        if ends != starts or any(start >= end for start, end in bounds):
            expected = f"contiguous spans over {len(ids)} tokens"
            raise _wrong("weight_versions", expected, f"{bounds!s:.80}")
    _check_end(reply, request, encoder, stops)


def _check_end(reply: Reply, request: Request, encoder: Encoder, stops: Sequence[str]) -> None:
    if reply.finish_reason not in ("stop", "length"):
        raise _wrong("finish_reason", '"stop" or "length"', f"{reply.finish_reason!r:.80}")

    def has_stop(tokens: Sequence[int]) -> bool:
        text = encoder.decode(tokens, request.ids) if stops else ""
        return any(stop in text for stop in stops)

    *body, end = reply.token_ids
    for position, token in enumerate(body):
        if token in encoder.eos_ids:
            expected = f"nothing after the end token {token} at {position}"
            way_out = "start the server without ignore_eos"
            raise _wrong("token_ids", expected, f"{len(body) - position} more", way_out)
    if has_stop(body):
        expected = f"nothing after a text of sampler.stop ({list(stops)!r:.80})"
        way_out = "start the server without speculative decoding, or remove sampler.stop"
        raise _wrong("token_ids", expected, "more", way_out)
    if reply.finish_reason == "stop" and end not in encoder.eos_ids and not has_stop(reply.token_ids):
        ends_with = f"an end token ({', '.join(map(str, encoder.eos_ids))}) or a stop text last"
        expected = f'{ends_with}, since finish_reason is "stop"'
        way_out = "give the server the end tokens of the policy (generation_config.json)"
        raise _wrong("token_ids", expected, end, way_out)


def _wrong(field: str, expected: str, got: object, way_out: str = SEE_LOG) -> ValueError:
    return ValueError(f"{field}: expected {expected}, got {got}. What to do: {way_out}")


def _reached(reply: Any, path: Iterable[str | int]) -> Any:
    """The part of a reply at a path, or the last part on the path that exists."""
    for key in path:
        try:
            reply = reply[key]
        except (KeyError, IndexError, TypeError):
            break
    return reply


@contextmanager
def refusing_replies(subject: str, advice: str) -> Iterator[None]:
    """Raise `Refused` for an invalid reply, with the field, the expected and the actual value. `advice`: what
    to do if a field is missing."""
    try:
        yield
    except Refused:
        raise
    except ValidationError as error:
        detail = error.errors()[0]
        field = ".".join(map(str, detail["loc"])) or "reply"
        message = detail["msg"][0].lower() + detail["msg"][1:]
        got = _reached(detail["input"], detail["loc"]) if detail["type"] == "missing" else detail["input"]
        problem = f"{field}: {message}, got {got!r:.80}. What to do: {advice}"
        raise Refused(f"{subject}: {problem}") from None
    except ValueError as error:
        raise Refused(f"{subject}: {error}") from None


def dialect_of(settings: config.EngineConfig, eos_ids: Sequence[int]) -> Dialect:
    if settings.dialect == "sglang":
        return SGLang(eos_ids)
    return Generate(eos_ids) if settings.api == "generate" else Completions(eos_ids)


def noise(request: Request, seed: int) -> int:
    """The seed of a request."""
    return (seed + 1_000_003 * request.number + request.position) % (1 << SEED_BITS)


def _common(sampler: SamplerConfig, eos_ids: list[int]) -> Body:
    """Settings of the same name in all dialects."""
    return {
        "temperature": sampler.temperature,
        "top_p": sampler.top_p,
        "top_k": sampler.top_k or -1,
        "min_p": sampler.min_p,
        "stop": list(sampler.stop) or None,
        "stop_token_ids": eos_ids,
    }


One = Annotated[list[Any], Field(min_length=1, max_length=1)]  # the one requested response


class LogProb(_Content):
    logprob: float


class _Completion(_Content):
    choices: One
    finish_reason: str = _at("choices", 0, "finish_reason")
    token_ids: list[int] = _at("choices", 0, "token_ids")
    logprobs: list[float | None] = _at("choices", 0, "logprobs", "token_logprobs")


class _Scored(_Content):
    choices: One
    entries: list[dict[str, LogProb] | None] = _at("choices", 0, "prompt_logprobs")


class Completions:
    """vLLM's /v1/completions with a prompt of token ids."""

    path = scoring_path = "/v1/completions"
    advice = "use a server that supports return_token_ids (vLLM 0.10 or newer)"

    def __init__(self, eos_ids: Sequence[int]) -> None:
        self.eos_ids = list(eos_ids)

    def sampling(self, request: Request, sampler: SamplerConfig, seed: int, served: str | None) -> Body:
        settings = self._settings(request, sampler, seed)
        return {"model": served, "prompt": request.ids, "return_token_ids": True, **settings}

    def _settings(self, request: Request, sampler: SamplerConfig, seed: int) -> Body:
        settings = {"max_tokens": request.room, "include_stop_str_in_output": True, "logprobs": 0}
        return {**settings, **_common(sampler, self.eos_ids), "seed": noise(request, seed)}

    def read(self, content: Any) -> Reply:
        reply = _Completion.model_validate(content)
        return Reply(reply.token_ids, reply.logprobs, reply.finish_reason)

    def scoring(self, ids: Sequence[int], served: str | None) -> Body:
        body = {"model": served, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0}
        return {**body, "prompt_logprobs": 0}

    def scores(self, content: Any, ids: Sequence[int]) -> list[float]:
        scores = []
        for token, entry in zip(ids[1:], _Scored.model_validate(content).entries[1:], strict=True):
            if entry is None or str(token) not in entry:
                raise ValueError(
                    f"prompt_logprobs: expected the log-prob of token {token}, got {entry!r:.80}"
                )
            scores.append(entry[str(token)].logprob)
        return scores


class _Generated(_Content):
    choices: One
    finish_reason: str = _at("choices", 0, "finish_reason")
    token_ids: list[int] = _at("choices", 0, "token_ids")
    logprobs: list[LogProb] = _at("choices", 0, "logprobs", "content")
    spans: list[Span] | None = _at("choices", 0, "weight_versions", default=None)


class Generate(Completions):
    """vLLM's /inference/v1/generate, which reports the weights' version of each token."""

    path = "/inference/v1/generate"
    advice = "start vLLM 0.32 or newer with --enable-scale-out, or set engine.api = completions"

    def sampling(self, request: Request, sampler: SamplerConfig, seed: int, served: str | None) -> Body:
        settings = self._settings(request, sampler, seed)
        return {"model": served, "token_ids": request.ids, "sampling_params": settings}

    def read(self, content: Any) -> Reply:
        reply = _Generated.model_validate(content)
        logprobs: list[float | None] = [entry.logprob for entry in reply.logprobs]
        return Reply(reply.token_ids, logprobs, reply.finish_reason, reply.spans)


Entry = Annotated[tuple[StrictFloat | None, StrictInt, Any], Strict(False)]  # log-prob, token id, text


class _SGLangReply(_Content):
    output_ids: list[int]
    finish_reason: str = _at("meta_info", "finish_reason", "type")
    entries: list[Entry] = _at("meta_info", "output_token_logprobs")


class _SGLangScored(_Content):
    entries: list[Entry] = _at("meta_info", "input_token_logprobs")


class SGLang:
    """SGLang's /generate as documented for 0.5; not tested with a real server."""

    path = scoring_path = "/generate"
    advice = "use SGLang 0.5, or vLLM (engine.dialect = vllm)"

    def __init__(self, eos_ids: Sequence[int]) -> None:
        self.eos_ids = list(eos_ids)

    def sampling(self, request: Request, sampler: SamplerConfig, seed: int, served: str | None) -> Body:
        settings = {"max_new_tokens": request.room, "no_stop_trim": True, **_common(sampler, self.eos_ids)}
        return self._body(request.ids, {**settings, "sampling_seed": noise(request, seed)}, -1, served)

    def _body(self, ids: Sequence[int], settings: Mapping[str, Any], start: int, served: str | None) -> Body:
        body = {"input_ids": list(ids), "sampling_params": settings, "return_logprob": True}
        adapter = {} if served is None else {"lora_path": served}
        return {**body, "logprob_start_len": start, **adapter}

    def read(self, content: Any) -> Reply:
        reply = _SGLangReply.model_validate(content)
        return Reply(reply.output_ids, [logp for logp, _, _ in reply.entries], reply.finish_reason)

    def scoring(self, ids: Sequence[int], served: str | None) -> Body:
        return self._body(ids, {"max_new_tokens": 1, "temperature": 1.0}, 0, served)

    def scores(self, content: Any, ids: Sequence[int]) -> list[float]:
        entries = _SGLangScored.model_validate(content).entries
        scores = [logp for logp, _, _ in entries[1:] if logp is not None]
        if [token for _, token, _ in entries] != list(ids) or len(scores) != len(ids) - 1:
            raise ValueError(f"input_token_logprobs: expected one for each of {len(ids)} tokens, got others")
        return scores


Dialect = Completions | SGLang
"""Requests responses at `path`, and log-probs of given tokens, at temperature 1, at `scoring_path`.

`scores` returns one for each token but the first. It and `read` raise pydantic's `ValidationError` for an
invalid reply. `advice`: what to do if a reply lacks a field.
"""

Scores = list[list[float]]  # per sequence, for each token but the first


async def score(
    server: Connection, dialect: Dialect, sequences: Sequence[list[int]], served: str | None
) -> Scores:
    """The server's log-probs of token ids. Raises `Lost`, and `Refused` for an answer without them."""
    path, scores = dialect.scoring_path, []
    with refusing_replies(f"{server.url}{path}: log-probs of given tokens", dialect.advice):
        for ids in sequences:
            read = partial(dialect.scores, ids=ids)
            scores.append(await server.request(path, dialect.scoring(ids, served), read))
    return scores


TEXT = (
    "The quick brown fox: 12 + 34 = 46?\n¿Qué? 你好\t</s> <|im_end|>"  # two tokenizers differ in its tokens
)
AT_ONCE = 32  # concurrent requests


class ServedReference(Policy):
    """Log-probs of the model at the URL `policy.reference_model`; no weights or logits are here."""

    def __init__(self, config: RunConfig, policy: Policy) -> None:
        """Raises `Refused` if the server doesn't answer, or has another tokenizer."""
        self.__dict__.update(policy.__dict__)
        self.value = self.masters = None
        self.url = str(config.policy.reference_model).rstrip("/").removesuffix("/v1")
        update = {"kind": "server", "dialect": "vllm", "api": "completions", "api_key": None}
        self.settings = config.engine.model_copy(update=update)  # without the engine's key
        self.dialect = dialect_of(self.settings, policy.eos_ids)
        self.served = asyncio.run(self._check())

    def streams(
        self,
        tokens: Tensor,
        lengths: Tensor,
        mask: Tensor,
        want: Collection[str] = ("logp",),
        reference: Policy | None = None,
        kept: KeptSets | None = None,
    ) -> dict[str, Tensor]:
        """See `Policy.streams`; only "logp". Raises `Refused` for other streams, and if the server fails."""
        if set(want) != {"logp"} or kept is not None:
            self.hidden(tokens, lengths)
        rows = [row[:n].tolist() for row, n in zip(tokens.cpu(), lengths.tolist(), strict=True)]
        logp = torch.full(tokens.shape, torch.nan)
        for i, values in enumerate(asyncio.run(self._score(rows))):
            logp[i, 1 : len(values) + 1] = torch.tensor(values)
        return {"logp": torch.where(mask.cpu(), logp, torch.nan).to(self.device)}

    def hidden(self, tokens: Tensor, lengths: Tensor, *, packs: bool = True) -> Tensor:
        raise Refused(
            f"policy.reference_model = {self.url}: a server gives log-probs of the sampled tokens alone. "
            'What to do: objective.over = "samples", sampling without truncation, or a model in this process'
        )

    async def _score(self, rows: Sequence[list[int]]) -> Scores:
        connection, slots = connected(self.url, self.settings), asyncio.Semaphore(AT_ONCE)

        async def one(row: list[int]) -> list[float]:
            async with slots:
                [logps] = await score(connection, self.dialect, [row], self.served)
            if max(logps, default=0.0) > ROUNDING:
                raise self._refused(f"expected log-probs, at most 0, got {max(logps):g}")
            return logps

        try:
            return list(await asyncio.gather(*map(one, rows)))
        except Lost as error:
            raise self._refused(error) from None
        finally:
            await connection.close()

    async def _check(self) -> str:
        """Check the server's tokenizer; returns the name of its model."""
        connection = connected(self.url, self.settings)
        try:
            name = await connection.request("/v1/models", read=lambda reply: str(reply["data"][0]["id"]))
            body = {"model": name, "prompt": TEXT, "add_special_tokens": False}
            theirs = await connection.request("/tokenize", body, lambda reply: reply["tokens"])
        except (Lost, LookupError, TypeError) as error:
            raise self._refused(error) from None
        finally:
            await connection.close()
        if theirs != self.tokenizer(TEXT, add_special_tokens=False)["input_ids"]:
            raise self._refused(f"expected the tokenizer of policy.model, got other tokens for {TEXT!r}")
        return str(name)

    def _refused(self, problem: object) -> Refused:
        return Refused(
            f"policy.reference_model = {self.url}: {problem}. What to do: start vLLM there with a model of "
            "the policy's tokenizer (vllm serve MODEL); then continue with --resume"
        )
