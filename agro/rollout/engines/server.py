"""The HTTP engine: one or more OpenAI-compatible servers of the policy, which exchange token ids.

A server should report the log-probs of the distribution that it samples from (vLLM: --logprobs-mode
processed_logprobs). After each push of new weights a probe checks which weights the server has. A server that
dies or fails its probe isn't used until it passes one; if none is left, the run stops.

A server may answer 200 to every request of a push, and yet leave a tied output layer unchanged (.8 nats off),
load half of a checkpoint (1.2), add an adapter to another model (6.3), or load nothing. So the probe compares
its log-probs of fixed tokens with the learner's: rounding makes those in float32 differ by 1e-6.

With `engine.sleep` a server on the trainer's GPU sleeps whenever nothing is sampled. Each time it wakes it
gets new weights and is probed, since vLLM may wake without its adapter (vLLM issue 53888).

Deviation from the embedded engine: the noise is the server's, so a run can't be repeated bit for bit.

`engine.kind = "vllm"` starts a vLLM server with the run, and ends it with the run.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar, TypeVar

import httpx
import numpy as np
import torch
from safetensors import safe_open

from agro import config
from agro.config import SamplerConfig, from_environment
from agro.errors import Refused, remember_secret
from agro.io.connection import Away, Broken, Lost, Missing
from agro.io.files import digest
from agro.io.processes import LocalProcess, free_port
from agro.models.adapters import is_adapter
from agro.models.encoding import Encoder
from agro.models.footprint import host_memory
from agro.models.policy import Policy
from agro.models.published import Probe
from agro.rollout.engines import ENGINES, Capability, Continuation, NoServer, Request
from agro.rollout.engines.connection import (
    Scores,
    check_reply,
    connected,
    dialect_of,
    refusing_replies,
    score,
)

PUSHES = 3  # of the same weights, before a server is dropped
KEPT = 2  # adapters on a server: another process may still be sampling with an earlier one
NEEDS = {  # how to start a server that accepts weights, by dialect and kind of push
    ("vllm", "reload"): "VLLM_SERVER_DEV_MODE=1",
    ("vllm", "transfer"): "VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config (see examples/vllm_weights)",
    ("vllm", "adapter"): "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora, or set engine.push = reload",
    ("sglang", "reload"): "SGLang 0.5 or newer",
    ("sglang", "adapter"): "--enable-lora",
}


class Host:
    """A server. `problem` says why it isn't used; "" if it is."""

    def __init__(
        self, url: str, settings: config.EngineConfig, encoder: Encoder, key: str | None = None
    ) -> None:
        self.url, self.settings, self.encoder = url, settings, encoder
        self.connection = connected(url, settings, key)
        self.dialect = dialect_of(settings, encoder.eos_ids)
        self.served = settings.model if settings.dialect == "vllm" else None
        self.busy = 0  # requests under way
        self.problem = self.reported = ""
        self.is_away = False  # whether it is unreachable or was restarted
        self.error: float | None = None  # of the last probe, nats per token
        self._probe: Probe | None = None  # of the weights that were pushed
        self._proofs = 0
        self._proving = asyncio.Lock()
        self._way = "reload"  # how weights are pushed, or "transfer", "adapter"
        self._adapters: list[str] = []  # names of loaded adapters, the newest last

    async def sample(self, request: Request, sampler: SamplerConfig, seed: int, version: int) -> Continuation:
        """Sample one response. `version`: of the pushed weights.

        Raises `Lost` if the server fails, and `Refused` for a reply that doesn't match the request.
        """
        path, body = self.dialect.path, self.dialect.sampling(request, sampler, seed, self.served)
        # Its name determines the version, whatever the server reports for its model.
        has_adapter = self._way == "adapter"
        self.busy += 1
        try:
            with refusing_replies(f"{self.url}{path}: response {request.number}", self.dialect.advice):
                reply = await self.connection.request(path, body, self.dialect.read, prove=self._prove)
                check_reply(reply, request, self.encoder, sampler.stop)
        except Missing as error:  # it has lost the adapter or model that it had
            raise Away(str(error)) from error
        finally:
            self.busy -= 1
        logp = np.minimum(np.array(reply.logprobs, np.float64), 0.0)  # None becomes NaN
        if sampler.temperature == 0:  # a point mass, as in the embedded engine; servers report the model's
            logp = np.zeros_like(logp)
        if has_adapter or reply.spans is None:
            return Continuation(request, np.array(reply.token_ids), logp, version)
        versions = [int(s.version) if s.version.isdecimal() else -1 for s in reply.spans]  # -1: not the run's
        per_token = np.repeat(versions, [s.end - s.start for s in reply.spans]).astype(np.int32)
        return Continuation(request, np.array(reply.token_ids), logp, per_token)

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
        """Don't use the server until the next push. `advice`: for one that lacks a route or a model."""
        self.problem = f"{error}{advice}" if isinstance(error, Missing) else str(error)
        self.is_away = isinstance(error, Away)

    async def _prove(self) -> None:
        """Check the weights after a broken connection, since a restarted server lacks the pushed ones.

        Raises `Broken` while it doesn't answer, and `Away` if it has other weights, until the next push. Of
        requests that failed together only the first one checks.
        """
        proofs = self._proofs
        async with self._proving:
            if self._probe is None or proofs != self._proofs:
                return
            if not await self.connection.is_alive():
                raise Broken("it hasn't answered since")
            try:
                scores = await score(self.connection, self.dialect, self._probe.ids, self.served)
            except (Missing, Refused) as error:
                raise Away(str(error)) from error
            if self._unfit(scores, self._probe):
                raise Away(f"{self.url} broke a connection and now has other weights: it was restarted")
            self._proofs += 1

    def _unfit(self, scores: Scores, probe: Probe) -> str:
        """Why the server isn't used: its scores differ from the learner's by more than rounding; "" if they
        don't."""
        gaps = np.abs(np.concatenate(scores) - np.concatenate(probe.logp))
        allowed = probe.allowed if self.settings.push_error is None else self.settings.push_error
        self.error = float(gaps.mean())
        if not allowed or self.error <= allowed:
            return ""
        return (
            f"after the push its log-probs of {gaps.size} fixed tokens are {self.error:.3g} nats per token "
            f"off those of the trainer (at most {gaps.max():.3g}), above engine.push_error = {allowed:g}. "
            "What to do: start the server again with the run's policy.model, --dtype as policy.dtype and "
            "--logprobs-mode processed_logprobs, or set engine.push = transfer; if it serves half "
            "precision, set engine.push_error = 0.05"
        )

    async def _push(self, weights: Path, version: int) -> str | None:
        """Push weights to the server. Returns the name under which it serves them; None: that of its model.

        Raises `Lost` if a request fails, and `Refused` if the server refuses one. The server may then have
        any mixture of weights.
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
        """Make the server's workers read the folder. They load whatever it has, even half of a model."""
        request, folder = self.connection.request, str(weights.resolve())
        if self.settings.dialect == "sglang":  # tested only with a stand-in
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
        """Use vLLM's protocol for new weights, with a backend that reads files: examples/vllm_weights.

        Requests are frozen meanwhile, and continue with the new weights. A server may still be in an update
        whose sender was killed. Then /start_weight_update fails, but the other two requests end that update,
        and the next push works. So all three are always sent.
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
        """Load an adapter in peft's format under a unique name, which requests then use.

        The name contains the adapter's hash: a server that has the name has the adapter.
        """
        request, start = self.connection.request, "" if self.settings.dialect == "sglang" else "/v1"
        name = f"agro@{version}-{digest(weights / 'adapter_model.safetensors')[:12]}"
        models = await request("/v1/models", read=lambda reply: reply)
        try:
            loaded = {str(model["id"]) for model in models["data"]}
        except (KeyError, TypeError):
            raise Refused(f"/v1/models: expected a list of models in data, got {models!r:.80}") from None
        if name not in loaded:
            body = {"lora_name": name, "lora_path": str(weights.resolve())}
            await request(f"{start}/load_lora_adapter", body)
        if name not in self._adapters:
            self._adapters.append(name)
        for earlier in self._adapters[:-KEPT]:
            self._adapters.remove(earlier)
            if earlier in loaded:
                await request(f"{start}/unload_lora_adapter", {"lora_name": earlier})
        return name


def names_in(file: str) -> list[str]:
    with safe_open(file, framework="numpy") as tensors:
        return list(tensors.keys())


CHECKED = 0.2  # seconds between checks for an interruption
T = TypeVar("T")


def sleep_level(settings: config.EngineConfig, policy: Policy) -> int:
    """0: never. 1: the server's weights move to host memory, if they fit into half of what is free. 2: they
    are dropped, always so if each push has all weights."""
    if not settings.sleep:
        return 0
    if policy.adapter is None or settings.push not in (None, "adapter"):
        return 2
    return 1 if 2 * sum(p.nbytes for p in policy.model.parameters()) <= host_memory() else 2


def free_cached() -> None:
    """Release the GPU memory that torch has cached, for a server on the same GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class Server:
    """Requests `sampler.batch` responses at once, each from the least busy server.

    A failed request is counted and sent again.
    """

    can: ClassVar[frozenset[Capability]] = ENGINES["server"]

    def __init__(
        self,
        settings: config.EngineConfig,
        encoder: Encoder,
        version: int = -1,
        say: Callable[[str], None] = lambda text: None,
        key: str | None = None,
        level: int = 0,
    ) -> None:
        """`encoder`: the policy's; `key`: instead of `engine.api_key`; `level`: see `sleep_level`. Raises
        `Refused` if no URL is given."""
        self.version, self.say, self.level = version, say, level
        self._weights: Path | None = None  # for servers that wake
        self._decoding = 0  # calls of `decode` under way
        self.hosts = [Host(url, settings, encoder, key) for url in settings.servers]
        self.check: Callable[[], None] = lambda: None
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @property
    def used(self) -> list[Host]:
        return [host for host in self.hosts if not host.problem]

    @property
    def measured(self) -> Mapping[str, Any]:
        errors = [host.error for host in self.used if host.error is not None]
        return {
            "requests_failed": sum(host.connection.failures for host in self.hosts),
            "push_error": max(errors, default=None),
            "servers": len(self.used),
            "servers_dropped": {host.url: host.problem for host in self.hosts if host.problem},
        }

    def decode(self, waiting: deque[Request], sampler: SamplerConfig, seed: int) -> Iterator[Continuation]:
        """See `agro.rollout.engines.Engine`.

        Raises `Refused` if a request fails at every server, each time after `engine.retries` more attempts,
        or if a reply doesn't match its request, once the other requests under way are served.
        """
        if not self._decoding:
            for host in self.hosts:
                host.connection.failures = 0
            if self.level:
                self._wake()
        self._decoding += 1
        try:
            yield from self._decode(waiting, sampler, seed)
        finally:
            self._decoding -= 1
        if self.level and not self._decoding:
            self.sleep()

    def _decode(self, waiting: deque[Request], sampler: SamplerConfig, seed: int) -> Iterator[Continuation]:
        running: set[Future[Continuation]] = set()
        refused: BaseException | None = None
        try:
            while running or (waiting and refused is None):
                while waiting and len(running) < sampler.batch and refused is None:
                    running.add(self._submit(self._complete(waiting.popleft(), sampler, seed)))
                self.check()
                done, running = wait(running, timeout=CHECKED, return_when=FIRST_COMPLETED)
                self._say_changes()
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
        """Push the weights of a published folder, which each server can access, and probe each server; with
        `engine.sleep` that happens when it wakes.

        Raises `Refused` if no server has them then.
        """
        self._weights = weights
        if self.level and not self._decoding:
            self.version = version
        else:
            self._push(weights, version)

    def _push(self, weights: Path, version: int) -> None:
        probe = Probe.read(weights)
        for pushed in [self._submit(host.renew(weights, version, probe)) for host in self.hosts]:
            pushed.result()
        self._say_changes()
        if not self.used:
            raise self._nothing_left()
        self.version = version

    def sleep(self) -> None:
        """Free the GPU's memory for the trainer. Raises `Refused` for a server that can't sleep."""
        self._command(f"/sleep?level={self.level}")

    def _wake(self) -> None:
        """Wake the servers, and push the newest weights, even if they had them."""
        free_cached()
        if self.level == 2 and self._weights is not None and is_adapter(str(self._weights)):
            self._command("/wake_up?tags=weights")
            self._command("/collective_rpc", method="reload_weights")  # of the base model
            self._command("/wake_up?tags=kv_cache")
        else:
            self._command("/wake_up")
        if self._weights is not None:
            self._push(self._weights, self.version)

    def _command(self, path: str, **body: str) -> None:
        try:
            for host in self.hosts:
                self._submit(host.connection.request(path, body)).result()
        except Lost as error:
            raise Refused(
                f"engine.sleep: {error}. What to do: start the server with VLLM_SERVER_DEV_MODE=1 and "
                "--enable-sleep-mode, on a GPU; or set engine.sleep = false"
            ) from None

    def close(self) -> None:
        if self._loop.is_closed():
            return
        for host in self.hosts:
            self._submit(host.connection.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _complete(self, request: Request, sampler: SamplerConfig, seed: int) -> Continuation:
        version = self.version
        while self.used:
            host = min(self.used, key=lambda host: host.busy)
            try:
                return await host.sample(request, sampler, seed, version)
            except Lost as error:
                host.drop(error)
        raise self._nothing_left()

    def _say_changes(self) -> None:
        """Name the servers that were dropped, and those that came back."""
        for host in self.hosts:
            if host.problem == host.reported:
                continue
            host.reported = host.problem
            state = f"isn't used: {host.problem}" if host.problem else "is used again: it passed its probe"
            self.say(f"server {host.url} {state}")

    def _nothing_left(self) -> Refused:
        problems = "".join(f"\n- {host.url}: {host.problem}" for host in self.hosts)
        kind = Refused
        if all(host.is_away for host in self.hosts):
            self.version, kind = -1, NoServer  # no weights until a push
        return kind(
            f"engine.urls: no server is left:{problems}\nWhat else to do: check that the servers run, "
            "raise engine.retries or engine.timeout if they need longer; then continue with --resume"
        )


HOST, MODEL = "127.0.0.1", "policy"
START_SECONDS, END_SECONDS = 900.0, 30.0
SHARE = 0.4  # of the GPU's memory, if the trainer's needs weren't estimated
RANKS = (8, 16, 32, 64, 128, 256, 512)  # the maximum ranks of adapters that vLLM accepts
VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}  # to accept new weights


class VLLM(Server):
    """A `Server` with a process of its own, on the trainer's GPU.

    It samples only for this process, with its own key. vLLM's routes for new weights check no key: they are
    open to every user of this host, so each push is probed.
    """

    can: ClassVar[frozenset[Capability]] = ENGINES["vllm"]

    def __init__(self, settings: config.EngineConfig, policy: Policy, say: Callable[[str], None]) -> None:
        """Raises `Refused` if the command doesn't exist, or ends before it serves."""
        self._folder = tempfile.TemporaryDirectory(prefix="agro-vllm-")
        folder, port = Path(self._folder.name), free_port(HOST)
        command = [*command_of(settings, policy, folder), "--host", HOST, "--port", str(port)]
        if shutil.which(command[0]) is None:
            raise Refused(
                f"engine.vllm: {command[0]}: no such command. What to do: pip install vllm, give the path of "
                "another environment's, or sample in this process (engine.kind = hf)"
            )
        key = from_environment(settings.api_key, "engine.api_key") or secrets.token_urlsafe(32)
        remember_secret(key)
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        variables |= {**VARIABLES, "VLLM_API_KEY": key}
        self._log = folder / "log.txt"
        free_cached()
        self._process = LocalProcess(command, variables, self._log, HOST)
        say(f"engine.kind = vllm: {shlex.join(command)}")
        url, level = f"http://{HOST}:{port}", sleep_level(settings, policy)
        served = settings.model_copy(update={"kind": "server", "urls": (url,), "model": MODEL})
        with ExitStack() as started:
            started.callback(self._end)
            self._wait(f"{url}/health")
            super().__init__(served, policy.encoder, say=say, key=key, level=level)
            started.callback(super().close)
            if self.level:
                self.sleep()
            started.pop_all()

    def close(self) -> None:
        super().close()
        self._end()

    def _wait(self, url: str) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                if httpx.get(url, timeout=5).status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        code = self._process.poll()
        problem = f"didn't serve in {START_SECONDS:g} s" if code is None else f"ended with exit status {code}"
        output = self._log.read_text(errors="replace").strip()[-2000:]
        raise Refused(f"engine.kind = vllm: vLLM {problem}. Its last output:\n{output}")

    def _end(self) -> None:
        self._process.stop()
        deadline = time.monotonic() + END_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        self._process.kill()
        self._folder.cleanup()


def command_of(settings: config.EngineConfig, policy: Policy, folder: Path) -> list[str]:
    """The command line, without the address, of a server with the settings that a run needs.

    A quantized model, or one that is neither on the hub nor in a folder any more, is saved to `folder` first.
    """
    program, *arguments = shlex.split(settings.vllm)
    model = policy.model.config._name_or_path
    quantized = getattr(policy.model, "is_quantized", False)
    if quantized or not model or (Path(model).is_absolute() and not Path(model).exists()):
        policy.save_base(folder / "model")
        model = str(folder / "model")
    dtype = str(policy.dtype).removeprefix("torch.")
    options = ["--served-model-name", MODEL, "--dtype", dtype, "--logprobs-mode", "processed_logprobs"]
    options += ["--max-model-len", str(policy.context)]
    if quantized:
        options += ["--quantization", "bitsandbytes"]
    if policy.device.type == "cuda":
        options += ["--gpu-memory-utilization", f"{settings.memory or SHARE:.3g}"]
    if settings.sleep:
        options += ["--enable-sleep-mode"]
    if settings.api == "generate":
        options += ["--enable-scale-out"]
    if settings.push == "transfer":
        options += ["--weight-transfer-config", '{"backend": "agro_files"}']
    if policy.adapter is not None and settings.push in (None, "adapter"):
        rank = policy.adapter.active_peft_config.r
        rank = next((room for room in RANKS if room >= rank), rank)
        options += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2"]
    return [program, "serve", model, *options, *arguments]
