"""How servers are asked, and how they answer: vLLM's two ways to sample from token ids, and SGLang's.

`served` is the name under which a server has the policy: of its model, or of an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Generic, Protocol, TypeVar

from pydantic import BaseModel, Field, RootModel, StrictFloat, StrictInt, model_validator

from agro import config
from agro.config import SamplerConfig
from agro.rollout.engines.connection import Failed
from agro.rollout.engines.protocol import Request
from agro.rollout.engines.replies import Reply, Span, Strict

C = TypeVar("C", bound=BaseModel)
SEED_BITS = 31  # servers take a 32-bit signed integer
ABORTED = 'finish_reason "abort": the server gave the response up'


class Dialect(Protocol):
    """Requests for responses and for log-probs of given tokens.

    `read` and `scores` raise pydantic's `ValidationError` for a reply that says something else.
    """

    path: str  # of requests for responses
    scoring_path: str
    advice: str  # where a reply lacks something

    def sampling(
        self, request: Request, sampler: SamplerConfig, seed: int, served: str | None
    ) -> dict[str, Any]:
        """The body of a request for one response."""
        ...

    def read(self, content: Any) -> Reply: ...

    def scoring(self, ids: Sequence[int], served: str | None) -> dict[str, Any]:
        """The body of a request for the log-probs of these tokens, at temperature 1."""
        ...

    def scores(self, content: Any, ids: Sequence[int]) -> list[float]:
        """Of each token but the first."""
        ...


def dialect_of(settings: config.EngineConfig, eos_ids: Sequence[int]) -> Dialect:
    if settings.dialect == "sglang":
        return SGLang(eos_ids)
    return Generate(eos_ids) if settings.api == "generate" else Completions(eos_ids)


def noise(request: Request, seed: int) -> int:
    """The seed of a request."""
    return (seed + 1_000_003 * request.number + request.position) % (1 << SEED_BITS)


class _Unaborted(Strict):
    """A server that pauses or restarts aborts responses, whatever they say: they are sampled again."""

    @model_validator(mode="before")
    @classmethod
    def _was_completed(cls, choice: Any) -> Any:
        if isinstance(choice, dict) and choice.get("finish_reason") == "abort":
            raise Failed(ABORTED)
        return choice


class Choices(Strict, Generic[C]):
    """A reply with the one response that was asked for."""

    choices: Annotated[list[C], Field(min_length=1, max_length=1)]


class TokenLogProbs(Strict):
    token_logprobs: list[float | None]


class CompletionChoice(_Unaborted):
    finish_reason: str
    token_ids: list[int]
    logprobs: TokenLogProbs


class LogProb(Strict):
    logprob: float


class ScoredChoice(Strict):
    prompt_logprobs: list[dict[str, LogProb] | None]


class Completions:
    """vLLM's /v1/completions with a prompt of token ids."""

    path = scoring_path = "/v1/completions"
    advice = "use a server that supports return_token_ids (vLLM 0.10 or newer)"

    def __init__(self, eos_ids: Sequence[int]) -> None:
        self.eos_ids = list(eos_ids)

    def sampling(
        self, request: Request, sampler: SamplerConfig, seed: int, served: str | None
    ) -> dict[str, Any]:
        settings = self._settings(request, sampler, seed)
        return {"model": served, "prompt": request.ids, "return_token_ids": True, **settings}

    def _settings(self, request: Request, sampler: SamplerConfig, seed: int) -> dict[str, Any]:
        return {
            "max_tokens": request.room,
            "temperature": sampler.temperature,
            "top_p": sampler.top_p,
            "top_k": sampler.top_k or -1,
            "min_p": sampler.min_p,
            "stop": list(sampler.stop) or None,
            "include_stop_str_in_output": True,
            "stop_token_ids": self.eos_ids,
            "seed": noise(request, seed),
            "logprobs": 0,
        }

    def read(self, content: Any) -> Reply:
        choice = Choices[CompletionChoice].model_validate(content).choices[0]
        return Reply(choice.token_ids, choice.logprobs.token_logprobs, choice.finish_reason)

    def scoring(self, ids: Sequence[int], served: str | None) -> dict[str, Any]:
        body = {"model": served, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0}
        return {**body, "prompt_logprobs": 0}

    def scores(self, content: Any, ids: Sequence[int]) -> list[float]:
        scored = Choices[ScoredChoice].model_validate(content).choices[0].prompt_logprobs
        return [_of_token(entry, token) for entry, token in zip(scored[1:], ids[1:], strict=True)]


def _of_token(entry: Mapping[str, LogProb] | None, token: int) -> float:
    if entry is None or str(token) not in entry:
        raise ValueError(f"prompt_logprobs: expected the log-prob of token {token}, got {entry!r:.80}")
    return entry[str(token)].logprob


class GeneratedLogProbs(Strict):
    content: list[LogProb]


class GeneratedChoice(_Unaborted):
    finish_reason: str
    token_ids: list[int]
    logprobs: GeneratedLogProbs
    weight_versions: list[Span] | None = None


class Generate(Completions):
    """vLLM's /inference/v1/generate, which says with which weights each token was sampled."""

    path = "/inference/v1/generate"
    advice = "start vLLM 0.32 or newer with --enable-scale-out, or set engine.api = completions"

    def sampling(
        self, request: Request, sampler: SamplerConfig, seed: int, served: str | None
    ) -> dict[str, Any]:
        settings = self._settings(request, sampler, seed)
        return {"model": served, "token_ids": request.ids, "sampling_params": settings}

    def read(self, content: Any) -> Reply:
        choice = Choices[GeneratedChoice].model_validate(content).choices[0]
        logprobs: list[float | None] = [entry.logprob for entry in choice.logprobs.content]
        return Reply(choice.token_ids, logprobs, choice.finish_reason, choice.weight_versions)


class SGLangEntry(RootModel[tuple[StrictFloat | None, StrictInt, Any]]):
    """Log-prob, token id, text."""


class SGLangFinish(Strict):
    type: str


class SGLangMeta(Strict):
    finish_reason: SGLangFinish
    output_token_logprobs: list[SGLangEntry]


class SGLangReply(Strict):
    output_ids: list[int]
    meta_info: SGLangMeta


class SGLangScoredMeta(Strict):
    input_token_logprobs: list[SGLangEntry]


class SGLangScored(Strict):
    meta_info: SGLangScoredMeta


class SGLang:
    """SGLang's /generate, as of its documentation for 0.5: it wasn't tried with a server."""

    path = scoring_path = "/generate"
    advice = "use SGLang 0.5, or vLLM (engine.dialect = vllm)"

    def __init__(self, eos_ids: Sequence[int]) -> None:
        self.eos_ids = list(eos_ids)

    def sampling(
        self, request: Request, sampler: SamplerConfig, seed: int, served: str | None
    ) -> dict[str, Any]:
        settings = {
            "max_new_tokens": request.room,
            "temperature": sampler.temperature,
            "top_p": sampler.top_p,
            "top_k": sampler.top_k or -1,
            "min_p": sampler.min_p,
            "stop": list(sampler.stop) or None,
            "no_stop_trim": True,
            "stop_token_ids": self.eos_ids,
            "sampling_seed": noise(request, seed),
        }
        return self._body(request.ids, settings, -1, served)

    def _body(
        self, ids: Sequence[int], settings: Mapping[str, Any], start: int, served: str | None
    ) -> dict[str, Any]:
        body = {"input_ids": list(ids), "sampling_params": settings, "return_logprob": True}
        adapter = {} if served is None else {"lora_path": served}
        return {**body, "logprob_start_len": start, **adapter}

    def read(self, content: Any) -> Reply:
        reply = SGLangReply.model_validate(content)
        finish = reply.meta_info.finish_reason.type
        if finish == "abort":
            raise Failed(ABORTED)
        return Reply(reply.output_ids, [e.root[0] for e in reply.meta_info.output_token_logprobs], finish)

    def scoring(self, ids: Sequence[int], served: str | None) -> dict[str, Any]:
        return self._body(ids, {"max_new_tokens": 1, "temperature": 1.0}, 0, served)

    def scores(self, content: Any, ids: Sequence[int]) -> list[float]:
        entries = SGLangScored.model_validate(content).meta_info.input_token_logprobs
        found = [entry.root[:2] for entry in entries]
        if [token for _, token in found] != list(ids) or any(logp is None for logp, _ in found[1:]):
            raise ValueError(f"input_token_logprobs: expected one for each of {len(ids)} tokens, got others")
        return [logp for logp, _ in found[1:] if logp is not None]
