"""One of the servers of an engine: whether it is used, how new weights reach it, and how it is asked.

A push may answer 200 to every request and leave a tied output layer as it was (.8 nats off), load half of a
checkpoint (1.2), add an adapter to another model (6.3), or nothing at all. So after each push a server's
log-probs of fixed tokens are compared with the learner's: by rounding, those in float32 differ by 1e-6.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from safetensors import safe_open

from agro import config
from agro.config import SamplerConfig
from agro.errors import Refused
from agro.io.files import digest
from agro.models.adapters import is_adapter
from agro.models.encoding import Encoder
from agro.models.published import ROUNDING, Probe
from agro.rollout.engines import Continuation, Request
from agro.rollout.engines.connection import (
    Away,
    Broken,
    Connection,
    Dialect,
    Lost,
    Missing,
    check_reply,
    dialect_of,
    refusing_replies,
)

PUSHES = 3  # an update that failed makes vLLM fail the next one too; the one after it works
KEPT = 2  # adapters on a server: responses to an earlier one may still be under way for another process
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
NEEDS = {  # how a server is started so that weights can be pushed to it, by dialect and way
    ("vllm", "reload"): "VLLM_SERVER_DEV_MODE=1",
    ("vllm", "transfer"): "VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config (see examples/vllm_weights)",
    ("vllm", "adapter"): "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora, or set engine.push = reload",
    ("sglang", "reload"): "SGLang 0.5 or newer",
    ("sglang", "adapter"): "--enable-lora",
}


class Host:
    """A server. `problem` says why it isn't used; "" where it is."""

    def __init__(
        self, url: str, settings: config.EngineConfig, encoder: Encoder, key: str | None = None
    ) -> None:
        self.url, self.settings, self.encoder = url, settings, encoder
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
        self._way = "reload"  # in which weights are pushed, or "transfer", "adapter"
        self._adapters: list[str] = []  # names of those that were loaded, the newest last

    async def sample(self, request: Request, sampler: SamplerConfig, seed: int, version: int) -> Continuation:
        """One response. `version`: of the weights that were pushed.

        Raises `Lost` where the server fails, and `Refused` for a reply that isn't what was requested.
        """
        path, body = self.dialect.path, self.dialect.sampling(request, sampler, seed, self.served)
        # Whose version is that of its name, whatever the server says of its model.
        has_adapter = self._way == "adapter"
        self.busy += 1
        try:
            with refusing_replies(f"{self.url}{path}: response {request.number}", self.dialect.advice):
                reply = await self.connection.request(path, body, self.dialect.read, prove=self._prove)
                check_reply(reply, request, self.encoder, sampler.stop)
        except Missing as error:  # it had what was pushed
            raise Away(str(error)) from error
        finally:
            self.busy -= 1
        logp = np.minimum(np.array(reply.logprobs, np.float64), 0.0)  # None is NaN there
        if sampler.temperature == 0:  # a point mass, as the embedded engine says; servers report the model's
            logp = np.zeros_like(logp)
        if has_adapter or reply.spans is None:
            return Continuation(request, np.array(reply.token_ids), logp, version)
        versions = [int(s.version) if s.version.isdecimal() else -1 for s in reply.spans]  # -1: none of ours
        of_tokens = np.repeat(versions, [s.end - s.start for s in reply.spans]).astype(np.int32)
        return Continuation(request, np.array(reply.token_ids), logp, of_tokens)

    async def renew(self, weights: Path, version: int, probe: Probe) -> None:
        """Push new weights, and use the server only if it passes the probe."""
        if self.problem and not await self.connection.is_alive():
            return
        dialect = self.settings.dialect
        way = "transfer" if self.settings.push == "transfer" and dialect == "vllm" else "reload"
        self._way = "adapter" if is_adapter(str(weights)) else way
        advice = f". What to do: start the server with {NEEDS[dialect, self._way]}"
        try:
            self.served = await self._push(weights, version) or self.served
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
        likely = LIKELY[self._way]
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

    async def _push(self, weights: Path, version: int) -> str | None:
        """Bring weights to the server. Returns the name that it has them under; None: that of its model.

        Raises `Lost` where a request fails, and `Refused` for one that the server refuses. Then the server
        may have any mixture of weights.
        """
        ways = {"reload": self._reload, "transfer": self._transfer, "adapter": self._load_adapter}
        for attempt in range(PUSHES - 1):
            try:
                return await ways[self._way](weights, version)
            except Missing:
                raise
            except Lost:
                await self.connection.pause(attempt)
        return await ways[self._way](weights, version)

    async def _reload(self, weights: Path, version: int) -> None:
        """The server's workers read the folder again. They load what they find, be it half of a model."""
        request, folder = self.connection.request, str(weights.resolve())
        if self.settings.dialect == "sglang":  # tried with a stand-in alone
            body = {"model_path": folder, "weight_version": str(version)}
            await request("/update_weights_from_disk", body, retries=0)
            await request("/flush_cache", {})
            return
        reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await request("/collective_rpc", reload, retries=0)
        await request("/reset_prefix_cache", {})
        if self.settings.api == "generate":  # whose replies name the version
            await request("/update_weight_version", {"new_version": str(version)})

    async def _transfer(self, weights: Path, version: int) -> None:
        """vLLM's protocol for new weights, with a backend that reads files: examples/vllm_weights.

        Requests are frozen meanwhile, and continue with the new weights. After /finish_weight_update failed,
        the server still waits for it: the next push fails in all three requests, which ends that, and the one
        after it works. So all three are always sent.
        """
        request = self.connection.request
        files = {str(file.resolve()): digest(file) for file in sorted(weights.glob("*.safetensors"))}
        names = [name for file in files for name in names_in(file)]
        await request("/init_weight_transfer_engine", {"init_info": {"names": names}}, retries=0)
        await request("/pause?mode=keep", {})
        failure: Lost | None = None
        try:
            for path, body in (
                ("/start_weight_update", {}),
                ("/update_weights", {"update_info": {"files": files}}),
                ("/finish_weight_update", {"weight_version": str(version)}),
            ):
                try:
                    await request(path, body, retries=0)
                except Lost as error:
                    failure = failure or error
            await request("/reset_prefix_cache", {})
        finally:
            await request("/resume", {})
        if failure is not None:
            raise failure

    async def _load_adapter(self, weights: Path, version: int) -> str:
        """An adapter of peft's format under a name of its own, which requests then ask for.

        The name contains the adapter's hash: a server that has the name has the adapter.
        """
        request, start = self.connection.request, "" if self.settings.dialect == "sglang" else "/v1"
        name = f"agro@{version}-{digest(weights / 'adapter_model.safetensors')[:12]}"
        models = await request("/v1/models", read=lambda reply: reply)
        try:
            there = {str(model["id"]) for model in models["data"]}
        except (KeyError, TypeError):
            raise Refused(f"/v1/models: expected a list of models in data, got {models!r:.80}") from None
        if name not in there:
            body = {"lora_name": name, "lora_path": str(weights.resolve())}
            await request(f"{start}/load_lora_adapter", body)
        if name not in self._adapters:
            self._adapters.append(name)
        for earlier in self._adapters[:-KEPT]:
            self._adapters.remove(earlier)
            if earlier in there:
                await request(f"{start}/unload_lora_adapter", {"lora_name": earlier})
        return name


def names_in(file: str) -> list[str]:
    with safe_open(file, framework="numpy") as tensors:
        return list(tensors.keys())


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
