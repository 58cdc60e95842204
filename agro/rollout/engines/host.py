"""One of the servers of an engine: whether it is used, how new weights reach it, and how it is asked.

A push may answer 200 to every request and leave a tied output layer as it was (.8 nats off), load half of a
checkpoint (1.2), add an adapter to another model (6.3), or nothing at all. So after each push a server's
log-probs of fixed tokens are compared with the learner's: by rounding, those in float32 differ by 1e-6.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
from pydantic import BaseModel, Field, RootModel, StrictFloat, StrictInt, ValidationError, model_validator
from safetensors import safe_open

from agro import config
from agro.config import SamplerConfig
from agro.errors import Refused
from agro.io.files import digest
from agro.models.encoding import Encoder
from agro.models.published import ROUNDING, Probe
from agro.rollout.engines.connection import (
    Away,
    Broken,
    Connection,
    Failed,
    Lost,
    Missing,
    Reply,
    Span,
    Strict,
    problem_of,
    wrong_field,
)
from agro.rollout.engines.protocol import Continuation, Request

PUSHES = 3  # an update that failed makes vLLM fail the next one too; the one after it works
Scores = list[list[float]]  # of the sequences of a probe, for each token but the first
LIKELY = {
    "reload": (
        "a tied output layer that the server left as it was, half of a checkpoint, or another model. What to "
        "do: start the server again with the run's model, or use engine.push = transfer"
    ),
    "transfer": (
        "a backend that doesn't load all weights, or another model. What to do: start the server again with "
        "the run's model and the backend of examples/vllm_weights"
    ),
    "adapter": (
        "an adapter on another model than it is trained on, one of the same name, or weights that were "
        "pushed to the model itself. What to do: start the server again with the run's policy.model"
    ),
}


class Host:
    """A server. `problem` says why it isn't used; "" where it is."""

    def __init__(
        self, url: str, settings: config.EngineConfig, encoder: Encoder, key: str | None = None
    ) -> None:
        self.settings, self.encoder = settings, encoder
        self.connection = Connection(url, settings, key)
        self.dialect = dialect_of(settings, encoder.eos_ids)
        self.served = settings.model if settings.dialect == "vllm" else None
        self.busy = 0  # requests under way
        self.problem = ""
        self.is_away = False  # that is the problem
        self.error: float | None = None  # of the last probe, nats a token
        self._scores: Scores | None = None
        self._probe: Probe | None = None  # of the weights that were pushed
        self._proofs = 0
        self._proving = asyncio.Lock()
        self._push: Push | None = None

    @property
    def url(self) -> str:
        return self.connection.url

    async def sample(self, request: Request, sampler: SamplerConfig, seed: int, version: int) -> Continuation:
        """One response. `version`: of the weights that were pushed.

        Raises `Lost` where the server fails, and `Refused` for a reply that isn't what was requested.
        """
        body = self.dialect.sampling(request, sampler, seed, self.served)
        # Whose version is that of its name, whatever the server says of its model.
        has_adapter = isinstance(self._push, Adapter)
        self.busy += 1
        try:
            reply = await self.connection.post(self.dialect.path, body, self.dialect.read, self._prove)
            problem = problem_of(reply, request, self.encoder, sampler.stop)
        except ValidationError as error:
            problem = wrong_field(error.errors()[0], self.dialect.advice)
        except Missing as error:  # it had what was pushed
            raise Away(str(error)) from error
        finally:
            self.busy -= 1
        if problem:
            raise Refused(f"{self.url}{self.dialect.path}: response {request.number}: {problem}")
        logp = [np.nan if x is None else min(x, 0.0) for x in reply.logprobs]
        if sampler.temperature == 0:  # a point mass, as the embedded engine says; servers report the model's
            logp = [0.0] * len(logp)
        versions = None if has_adapter else reply.versions()
        ids = np.array(reply.token_ids)
        return Continuation(
            request, ids, np.array(logp, np.float64), version if versions is None else versions
        )

    async def renew(self, weights: Path, version: int, probe: Probe) -> None:
        """Push new weights, and use the server only if it passes the probe."""
        if self.problem and not await self.connection.is_alive():
            return
        kind = push_of(self.settings, weights)
        if not isinstance(self._push, kind):
            self._push = kind()
        advice = f". What to do: start the server with {kind.needs}"
        try:
            self.served = await self._push_repeatedly(self._push, weights, version) or self.served
            advice = ". What to do: set engine.model to the server's name of the run's model"
            scores = await score(self.connection, self.dialect, probe.ids, self.served)
            self.problem, self.is_away, self._probe = self._unfit(scores, probe), False, probe
        except (Lost, Refused) as error:
            self.drop(error, advice)

    def drop(self, error: Exception, advice: str = "") -> None:
        """Don't use the server until a push. `advice`: for one that lacks a route or a model."""
        self.problem = f"{error}{advice}" if isinstance(error, Missing) else str(error)
        self.is_away = isinstance(error, Away)

    async def _prove(self) -> None:
        """After a broken connection: a server that was started again hasn't the weights that were pushed.

        Raises `Broken` while it doesn't answer, and `Away` where it has others: it gets them with the next
        push. Of requests that failed together the first one asks.
        """
        proofs = self._proofs
        async with self._proving:
            if self._probe is None or proofs != self._proofs:
                return
            if not await self.connection.is_alive():
                raise Broken("it doesn't answer since")
            try:
                scores = await score(self.connection, self.dialect, self._probe.ids, self.served)
            except (Missing, Refused) as error:
                raise Away(str(error)) from error
            if self._unfit(scores, self._probe):
                raise Away(f"{self.url} broke a connection and has other weights since: it was started again")
            self._proofs += 1

    def _unfit(self, scores: Scores, probe: Probe) -> str:
        """Why the server isn't used, since its scores are further from the learner's than rounding explains;
        "" where it is."""
        gaps, before = np.abs(np.concatenate(scores) - np.concatenate(probe.logp)), self._scores
        mean = float(gaps.mean())
        allowed = probe.allowed if self.settings.push_error is None else self.settings.push_error
        self.error, self._scores = mean, scores
        if not allowed or mean <= allowed:
            return ""
        likely = LIKELY["adapter" if isinstance(self._push, Adapter) else self.settings.push or "reload"]
        if mean <= ROUNDING[True]:
            likely = (
                "another type of numbers. What to do: start vLLM with --dtype as policy.dtype (by default it "
                f"serves float32 in half precision), or set engine.push_error = {ROUNDING[True]:g}"
            )
        if scores == before:
            likely = (
                "nothing arrived, since its log-probs are those of before the push. What to do: see the "
                "server's log; whether it can read the folder RUN/weights"
            )
        return (
            f"after the push its log-probs of {gaps.size} fixed tokens are {mean:.3g} nats a token "
            f"off those of the trainer (at most {gaps.max():.3g}), above engine.push_error = {allowed:g}. "
            f"Likely: {likely}"
        )

    async def _push_repeatedly(self, push: Push, weights: Path, version: int) -> str | None:
        """The name that the server then has the weights under; None: that of its model."""
        for attempt in range(PUSHES - 1):
            try:
                return await push.push(self.connection, weights, version)
            except Missing:
                raise
            except Lost:
                await self.connection.pause(attempt)
        return await push.push(self.connection, weights, version)


async def score(
    server: Connection, dialect: Dialect, sequences: Sequence[list[int]], served: str | None
) -> Scores:
    """The server's log-probs of token ids. Raises `Lost`, and `Refused` for an answer without them."""
    try:
        return [
            await server.post(
                dialect.scoring_path, dialect.scoring(ids, served), partial(dialect.scores, ids=ids)
            )
            for ids in sequences
        ]
    except Refused:
        raise
    except ValidationError as error:
        problem = wrong_field(error.errors()[0], dialect.advice)
    except ValueError as error:
        problem = str(error)
    raise Refused(f"{server.url}{dialect.scoring_path}: log-probs of given tokens: {problem}")


ADAPTER = "adapter_config.json"  # the file by which the folder of an adapter is known
KEPT = 2  # adapters on a server: responses to an earlier one may still be under way for another process


def push_of(settings: config.EngineConfig, weights: Path) -> type[Push]:
    """The way of a folder of published weights."""
    is_adapter = (weights / ADAPTER).exists()
    if settings.dialect == "sglang":
        return SGLangAdapter if is_adapter else SGLangReload
    if is_adapter:
        return Adapter
    return Transfer if settings.push == "transfer" else Reload


class Reload:
    """vLLM's workers read the folder again (VLLM_SERVER_DEV_MODE=1).

    They load what they find, be it half of a model.
    """

    needs = "VLLM_SERVER_DEV_MODE=1"

    async def push(self, server: Connection, weights: Path, version: int) -> str | None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.resolve())}}
        await server.command("/collective_rpc", body, retries=0)
        await server.command("/reset_prefix_cache", {})
        if server.settings.api == "generate":  # whose replies name the version
            await server.command("/update_weight_version", {"new_version": str(version)})
        return None


class Transfer:
    """vLLM's protocol for new weights, with a backend that reads files: examples/vllm_weights.

    Requests are frozen meanwhile, and continue with the new weights. After /finish_weight_update failed, the
    server still waits for it: the next push fails in all three requests, which ends that, and the one after
    it works. So all three are always sent.
    """

    needs = "VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config (see examples/vllm_weights)"

    async def push(self, server: Connection, weights: Path, version: int) -> str | None:
        files = {str(file.resolve()): digest(file) for file in sorted(weights.glob("*.safetensors"))}
        names = [name for file in files for name in names_in(file)]
        await server.command("/init_weight_transfer_engine", {"init_info": {"names": names}}, retries=0)
        await server.command("/pause?mode=keep", {})
        try:
            failed = [
                await _failure(server, "/start_weight_update", {}),
                await _failure(server, "/update_weights", {"update_info": {"files": files}}),
                await _failure(server, "/finish_weight_update", {"weight_version": str(version)}),
            ]
            await server.command("/reset_prefix_cache", {})
        finally:
            await server.command("/resume", {})
        for failure in failed:
            if failure is not None:
                raise failure
        return None


async def _failure(server: Connection, path: str, body: Mapping[str, Any]) -> Lost | None:
    try:
        await server.command(path, body, retries=0)
    except Lost as error:
        return error
    return None


class Adapter:
    """An adapter of peft's format under a name of its own, which requests then ask for.

    The name contains the adapter's hash: a server that has the name has the adapter.
    """

    needs = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora, or set engine.push = reload"
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

    def __init__(self) -> None:
        self.loaded: list[str] = []

    async def push(self, server: Connection, weights: Path, version: int) -> str | None:
        name = f"agro@{version}-{digest(weights / 'adapter_model.safetensors')[:12]}"
        models = await server.get("/v1/models")
        try:
            there = {str(model["id"]) for model in models["data"]}
        except (KeyError, TypeError):
            raise Refused(f"/v1/models: expected a list of models in data, got {models!r:.80}") from None
        if name not in there:
            await server.command(self.load, {"lora_name": name, "lora_path": str(weights.resolve())})
        if name not in self.loaded:
            self.loaded.append(name)
        for earlier in self.loaded[:-KEPT]:
            self.loaded.remove(earlier)
            if earlier in there:
                await server.command(self.unload, {"lora_name": earlier})
        return name


class SGLangReload:
    """SGLang's workers read the folder again. Tried with a stand-in alone."""

    needs = "SGLang 0.5 or newer"

    async def push(self, server: Connection, weights: Path, version: int) -> str | None:
        body = {"model_path": str(weights.resolve()), "weight_version": str(version)}
        await server.command("/update_weights_from_disk", body, retries=0)
        await server.command("/flush_cache", {})
        return None


class SGLangAdapter(Adapter):
    """SGLang's adapters (--enable-lora). Tried with a stand-in alone."""

    needs = "--enable-lora"
    load, unload = "/load_lora_adapter", "/unload_lora_adapter"


Push = Reload | Transfer | Adapter | SGLangReload
"""Brings weights to one server. `needs`: how a server is started for it.

`push` returns the name that the server has them under; None: that of its model. It raises `Lost` where a
request fails, and `Refused` for one that the server refuses. Then the server may have any mixture of weights.
"""


def names_in(file: str) -> list[str]:
    with safe_open(file, framework="numpy") as tensors:
        return list(tensors.keys())


C = TypeVar("C", bound=BaseModel)
SEED_BITS = 31  # servers take a 32-bit signed integer
ABORTED = 'finish_reason "abort": the server gave the response up'


def dialect_of(settings: config.EngineConfig, eos_ids: Sequence[int]) -> Dialect:
    if settings.dialect == "sglang":
        return SGLang(eos_ids)
    return Generate(eos_ids) if settings.api == "generate" else Completions(eos_ids)


def noise(request: Request, seed: int) -> int:
    """The seed of a request."""
    return (seed + 1_000_003 * request.number + request.position) % (1 << SEED_BITS)


def _common(sampler: SamplerConfig, eos_ids: list[int]) -> dict[str, Any]:
    """Settings of the same name in all dialects."""
    return {
        "temperature": sampler.temperature,
        "top_p": sampler.top_p,
        "top_k": sampler.top_k or -1,
        "min_p": sampler.min_p,
        "stop": list(sampler.stop) or None,
        "stop_token_ids": eos_ids,
    }


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
        own = {"max_tokens": request.room, "include_stop_str_in_output": True, "logprobs": 0}
        return {**own, **_common(sampler, self.eos_ids), "seed": noise(request, seed)}

    def read(self, content: Any) -> Reply:
        choice = Choices[CompletionChoice].model_validate(content).choices[0]
        return Reply(choice.token_ids, choice.logprobs.token_logprobs, choice.finish_reason)

    def scoring(self, ids: Sequence[int], served: str | None) -> dict[str, Any]:
        body = {"model": served, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0}
        return {**body, "prompt_logprobs": 0}

    def scores(self, content: Any, ids: Sequence[int]) -> list[float]:
        scored = Choices[ScoredChoice].model_validate(content).choices[0].prompt_logprobs
        found = []
        for token, entry in zip(ids[1:], scored[1:], strict=True):
            if entry is None or str(token) not in entry:
                raise ValueError(
                    f"prompt_logprobs: expected the log-prob of token {token}, got {entry!r:.80}"
                )
            found.append(entry[str(token)].logprob)
        return found


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
        own = {"max_new_tokens": request.room, "no_stop_trim": True, "sampling_seed": noise(request, seed)}
        return self._body(request.ids, {**own, **_common(sampler, self.eos_ids)}, -1, served)

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


Dialect = Completions | SGLang
"""Requests for responses at `path`, and for log-probs of given tokens, at temperature 1, at `scoring_path`.

`scores` has one for each token but the first. It and `read` raise pydantic's `ValidationError` for a reply
that says something else. `advice`: what to do where a reply lacks something.
"""
