"""How fresh responses are sampled: by which processes, with which engine, in which environment."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from agro.config.section import Count, Positive, Section, Share, Temperature, field
from agro.errors import Refused
from agro.io import plugins
from agro.types import truncation


class SamplerConfig(Section):
    """How fresh responses are sampled.

    The temperature is applied first, then top-k, top-p and min-p, in this order.
    """

    n: Count = 4
    """responses a prompt"""
    temperature: Temperature = 1.0
    """0 is greedy; any other is at least 1e-6"""
    top_k: int = field(0, ge=0)
    """0 keeps all tokens"""
    top_p: Share = 1.0
    """keeps the likeliest tokens until their probability reaches this; 1 keeps all"""
    min_p: Share = 0.0
    """keeps tokens with at least this share of the likeliest one's probability; 0 keeps all"""
    max_new: Count = 256
    """tokens a response at most"""
    stop: tuple[str, ...] = ()
    """a response ends with the first of these texts"""
    batch: Count = 64
    """sequences decoded at once"""
    skip_layers: Share = 0.0
    """share of the policy's layers between the first and the last that responses are sampled without, a
    random choice for each batch (Nested-ReFT); log-probs are those of the policy without these layers"""

    def of_policy(self, temperature: float, n: int) -> SamplerConfig:
        """The same for `n` responses of the policy itself, at a temperature."""
        changes = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "skip_layers": 0.0}
        return self.model_copy(update={**changes, "n": n})

    def is_of_policy(self, temperature: float) -> bool:
        """Whether it draws from the policy itself, whose log-probs are at this temperature."""
        return self == self.of_policy(temperature, self.n)

    keep_sets: bool | None = None
    """samples record their kept sets, the tokens that top-k, top-p and min-p leave, so that ratios can be
    over them; where it isn't set: if a phase's objective has ratios and the embedded engine samples"""

    @property
    def truncation(self) -> str:
        """The settings that exclude tokens; see `agro.types.truncation`."""
        return truncation(self.model_dump())

    @property
    def records_kept(self) -> bool:
        """Whether samples record kept sets: not where all tokens are kept, nor for greedy choices."""
        return bool(self.keep_sets and self.truncation and self.temperature)


class EnvironmentConfig(Section):
    """Responses become episodes of several turns; `sampler.max_new` is then of a turn."""

    name: str
    """verifiers:ENV_ID, harness:COMMAND, or an environment as module:Class or file.py:Class"""
    options: dict[str, Any] = field({})
    """keyword arguments of the environment"""
    max_turns: Count = 8
    """turns of the policy in an episode at most"""
    timeout: Positive = field(60.0, resume=True)
    """seconds that its answer to a turn may take; beyond it the episode's reward stays unknown"""


class SourceConfig(Section):
    """Which process samples the fresh responses."""

    kind: Literal["inline", "elsewhere"] = field("inline", shared=True)
    """inline: this process samples; elsewhere: other processes do (agro collect RUN)"""
    wait_seconds: Positive = field(600.0, resume=True, shared=True)
    """elsewhere: longest wait for samples before the run stops"""
    sync_every: Count = 1
    """optimizer steps for which samplers keep their weights. With more than 1, inline samples with a copy of
    the policy, up to so many optimizer steps behind, less one; elsewhere publishes weights less often"""
    sync_from: Count = 1
    """inline: of how many of the policy's last copies, one every `sync_every` optimizer steps, the sampler
    gets one, drawn anew at each of them; 1: the newest"""
    around: str | None = None
    """a source around this one, which changes what a step gets of it: the name of an installed one,
    module:NAME or file.py:NAME"""
    options: dict[str, Any] = field({})
    """of the source around this one"""
    lease_seconds: Positive = field(15.0, resume=True, shared=True)
    """elsewhere: a collector or trainer that hasn't said for so long that it lives counts as dead; another
    collector samples the prompts of such a one"""
    weights: str | None = field(None, resume=True, shared=True)
    """elsewhere: a folder that all hosts of the run have, through which collectors get the weights. Where it
    isn't given: the database, where data.store is one, or else the run's folder"""

    @property
    def lags(self) -> bool:
        """Whether fresh samples in this process may be of earlier weights."""
        return self.kind == "inline" and max(self.sync_every, self.sync_from) > 1


ENGINES = ("hf", "vllm", "server")


def _known_engine(kind: str) -> str:
    if problem := plugins.unknown("engines", kind, ENGINES):
        raise PydanticCustomError("engine", "{problem}", {"problem": problem.replace(f", got {kind!r}", "")})
    return kind


class EngineConfig(Section):
    """What decodes responses: the model in this process, or a server."""

    kind: Annotated[str, AfterValidator(_known_engine)] = field("hf", shared=True)
    """hf: transformers, in this process; vllm: vLLM, which the run starts and ends; server: an
    OpenAI-compatible server that runs already; or the name of an installed engine, or one of your own, as
    file.py:Class or module:Class"""
    options: dict[str, Any] = field({}, shared=True)
    """of another engine: keyword arguments of its class"""
    vllm: str = field("vllm", resume=True, shared=True)
    """vllm: the command, with further arguments of `vllm serve`, such as vllm --max-num-seqs 512"""
    fused: bool = field(True, shared=True)
    """hf: decode Llama, Mistral, Qwen2 and Qwen3 models on a CPU with fused products and packed weights, if a
    trial finds the same log-probs; a copy of the weights is in memory while responses are sampled"""
    url: str | None = field(None, resume=True, shared=True)
    """of the server; the short form of `urls`"""
    urls: tuple[str, ...] = field((), resume=True, shared=True)
    """of several servers of the same model; each request goes to the least busy. One that fails is left out
    until it has new weights and passes its probe"""
    api_key: str | None = field(None, resume=True, shared=True)
    """of the servers, as env:NAME, whose value is taken from the environment"""
    model: str | None = field(None, shared=True)
    """name of the model on the server"""
    dialect: Literal["vllm", "sglang"] = field("vllm", shared=True)
    """whose requests the server understands; sglang is untried"""
    api: Literal["completions", "generate"] = field("completions", shared=True)
    """vllm: completions: /v1/completions, each response has the version that it began with; generate:
    /inference/v1/generate, each token has its own (vLLM: --enable-scale-out)"""
    push: Literal["reload", "transfer", "adapter"] | None = field(None, shared=True)
    """how new weights reach a server. reload: it reads a folder; transfer: by vLLM's protocol for new
    weights, with the plug-in examples/vllm_weights; adapter: only the adapter of policy.lora, under a new
    name each time. Not set: adapter with policy.lora, else reload"""
    push_error: float | None = field(None, resume=True, shared=True, ge=0)
    """largest mean difference, nats a token, between the log-probs of server and trainer on the fixed
    sequences that a server scores after each push; 0: no limit. Not set: 0.001, in half precision 0.05"""
    timeout: Positive = field(120.0, resume=True, shared=True)
    """seconds that the server may take for a complete request, whatever arrives in between"""
    retries: int = field(3, resume=True, shared=True, ge=0)
    """requests after a failed one before it is given up"""

    @property
    def uses_servers(self) -> bool:
        return self.kind in ("vllm", "server")

    @property
    def starts_server(self) -> bool:
        return self.kind == "vllm"

    @property
    def servers(self) -> tuple[str, ...]:
        """The URLs of all servers, without /v1. Raises `Refused` unless either `url` or `urls` is set."""
        if (self.url is None) == (not self.urls):
            got = "both" if self.urls else "neither"
            raise Refused(
                'engine.kind = "server" needs either engine.url, such as http://127.0.0.1:8000, or '
                f"engine.urls, got {got}"
            )
        given = self.urls if self.url is None else (self.url,)
        urls = tuple(url.rstrip("/").removesuffix("/v1") for url in given)
        if len(set(urls)) < len(urls):
            raise Refused(f"engine.urls: expected different servers, got {', '.join(given)}")
        return urls


class PlaceConfig(Section):
    """How many processes `agro train --place` starts for a run, and how often it starts one again."""

    collectors: Count = field(1, resume=True, shared=True)
    """processes that sample and score; `--place local:2` sets 2"""
    ranks: Count = field(1, resume=True, shared=True)
    """processes that share the training, started by torchrun on the trainer's host"""
    servers: tuple[str, ...] = field((), resume=True, shared=True)
    """commands of servers that sample, such as "vllm serve MODEL --port 8001", each started on the trainer's
    host; engine.url names them"""
    restarts: int = field(5, resume=True, shared=True, ge=0)
    """how often a process that died is started again without a step of the run in between; one more death
    ends the run, which `--resume` continues"""
