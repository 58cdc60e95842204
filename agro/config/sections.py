"""The configuration's sections: frozen and typed, with a unit, a meaning and marks for each value.
`agro.config.data` has [data]."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from agro.config.override import LENGTH
from agro.errors import Refused
from agro.io import plugins
from agro.types import truncation

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
COLDEST = 1e-6  # dividing logits by much less overflows float32


def invalid(problem: str) -> PydanticCustomError:
    """The error that a validator raises; pydantic's own would begin with "Value error"."""
    return PydanticCustomError("section", "{problem}", {"problem": problem})


def _warm_enough(value: float) -> float:
    if 0 < value < COLDEST:
        raise invalid(f"expected 0 (greedy) or at least {COLDEST}")
    return value


Temperature = Annotated[float, Field(ge=0), AfterValidator(_warm_enough)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class NoOptions(Section):
    """No options."""


def field(default: Any, *, resume: bool = False, shared: bool = False, **limits: Any) -> Any:
    """Declare a section's value with marks, and limits as in `pydantic.Field`; its docstring is its meaning.

    `resume`: it may change on resume, since no step's result depends on it. `shared`: it is fixed for the
    run, so a phase can't change it.
    """
    marks: dict[str, Any] = {"resume": resume, "shared": shared}
    return Field(default, json_schema_extra=marks, **limits)


class NewModel(Section):
    """A small Llama with random weights and one token per character (or byte), created at the start of a
    run."""

    alphabet: str = "bytes"
    """the characters of the vocabulary, or 'bytes' for all 256"""
    hidden: int = field(128, ge=1, le=2**16)
    """width of the hidden states; a multiple of `heads`"""
    layers: int = field(4, ge=1, le=2**10)
    """transformer blocks"""
    heads: Count = 4
    """attention heads per block"""
    context: Count = 1024
    """context length: tokens of prompt and response together"""
    initializer_range: float = field(0.02, gt=0, le=100)
    """standard deviation of the random weights; a narrow model learns from rewards only with a larger one,
    about 1/√hidden"""


class LoRA(Section):
    """A low-rank adapter (peft): the model's own weights are frozen, and the reference shares them."""

    rank: Count = 16
    """r, the width of the adapter's matrices"""
    alpha: Positive = 32.0
    """the adapter's output is scaled by alpha / rank"""
    targets: tuple[str, ...] = ("all-linear",)
    """names of the modules that get an adapter; all-linear: every linear layer but the head"""
    start: str | None = None
    """folder of an adapter to continue training, instead of a new one; its rank, alpha and targets apply"""
    merge: bool = True
    """true: RUN/model is the model with the adapter merged in; false: RUN/model is the adapter alone"""


class ChatConfig(Section):
    """How a prompt is rendered for a chat model; see `agro.models.chat`."""

    system: str | None = None
    """the system message of conversations that have none; "" is an empty one"""
    wrap: bool = False
    """true: a plain-text prompt becomes a conversation with one user message; false: it stays text"""
    options: dict[str, Any] = field({})
    """variables of the chat template, such as enable_thinking = false"""
    template: str | None = None
    """file of a Jinja template that replaces the tokenizer's own, also in RUN/model"""
    today: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")] = "2024-07-26"
    """the date given to templates that ask for one, so that a prompt has the same tokens on any day"""
    unshown: Literal["refuse", "drop"] = "refuse"
    """parts of a prompt that the template doesn't render (tool declarations, a system message), and
    reasoning: refuse the record by name, or continue without them"""


Threads = Annotated[int, Field(ge=0, le=2**10)]


class PolicyConfig(Section):
    """The model that is trained, where it runs, and the reference π_ref."""

    model: str | None = field(None, shared=True)
    """folder or hub name of a causal language model, or of an adapter, which is merged into its model"""
    new: NewModel | None = field(None, shared=True)
    """instead of `model`: start from random weights"""
    dtype: Literal["float32", "bfloat16", "mixed"] = field("float32", shared=True)
    """precision of weights and updates. In bfloat16, an update smaller than 1/256 of a weight is rounded
    away. mixed: matrix products in bfloat16, of float32 weights, which the optimizer updates and checkpoints
    store; RUN/model is bfloat16"""
    quantize: Literal["4bit"] | None = field(None, shared=True)
    """4bit: the model's own weights are quantized to 4 bits (NF4 of bitsandbytes) while an adapter is trained
    (QLoRA); vLLM serves the same quantized weights. Needs peft, bitsandbytes and accelerate, dtype = bfloat16
    and lora with merge = false"""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = field(
        "auto", shared=True
    )
    """transformers' attention implementation. auto: its default, for most models torch's
    scaled_dot_product_attention, which includes a flash kernel. flash_attention_2 and flash_attention_3 need
    their package and a CUDA GPU"""
    device: str = field("auto", shared=True)
    """auto: CUDA if available, else the CPU. Apple's GPU (mps) is refused: it has no float64"""
    threads: Literal["auto"] | Threads = field("auto", shared=True)
    """CPU threads of the process; auto: 1 for models with fewer than 30 million parameters, which a second
    thread slows down, else all cores. 0: torch's default"""
    temperature: float = field(1.0, shared=True, ge=COLDEST)
    """temperature of π, π_ref and every log-prob that the trainer computes; sampler.temperature applies to
    the behavior policy only"""
    reference: Literal["start", "phase", "model", "ema", "periodic", "sampler"] = "start"
    """π_ref: the weights at the start of the run or of each phase, another model, an exponential moving
    average of the policy's weights (ema), a periodic copy of them, or the lagged weights of the sampler
    (source.sync_every)"""
    reference_model: str | None = None
    """for reference = "model": its folder or hub name, or the URL of a vLLM server, whose model is a teacher
    that scores the policy's samples"""
    reference_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """for reference = "ema": share of the reference's weights that each step keeps"""
    reference_every: Count | None = None
    """for reference = "periodic": steps between copies"""
    cache_reference: bool = field(False, shared=True)
    """cache the reference's log-probs of each sample in the store, for later steps and for other runs with
    the same reference: each epoch after the first saves one of three forward passes"""
    chat: ChatConfig = field(ChatConfig(), shared=True)
    lora: LoRA | None = field(None, shared=True)
    """train this adapter instead of the model's own weights"""
    chunk: Count = field(512, shared=True)
    """positions whose logits are in memory at once while log-probs are computed, for 1,024 vocabulary entries
    at a time"""
    trust_remote_code: bool = field(False, shared=True)
    """run the code that comes with a model on the hub"""

    def check_weights(self) -> None:
        """Raise `Refused` unless exactly one of `model` and `new` is set."""
        if (self.model is None) == (self.new is None):
            got = "neither" if self.model is None else "both"
            raise Refused(
                "policy: expected either policy.model (a folder or hub name) or [policy.new] (random "
                f"weights), got {got}"
            )

    @property
    def reference_is_served(self) -> bool:
        """Whether a server hosts the reference."""
        return "://" in (self.reference_model or "")

    @property
    def reference_moves(self) -> bool:
        """Whether the reference changes during a phase."""
        return self.reference in ("ema", "periodic", "sampler")


class RewardPart(Section):
    """One of several rewards."""

    name: str
    """exact, regex, math, code, judge, model, overlong, an installed one, module:function or
    file.py:function"""
    weight: float = 1.0
    """factor of its value in the sum; 0 records it without counting it"""
    at_least: float | None = None
    """lower values count as this"""
    at_most: float | None = None
    """higher values count as this"""
    gate: float | None = None
    """while its value is below this, parts without a gate count as 0"""
    options: dict[str, Any] = field({})
    """options of this reward, like `reward.options`"""
    label: str | None = None
    """its name in metrics and store; default: `name`"""


class RewardConfig(Section):
    """One reward, or the weighted sum of several `functions`."""

    name: str | None = field(None, shared=True)
    """exact (the default without `functions`), regex, math, code, judge, model, overlong, an installed one,
    module:function or file.py:function"""
    options: dict[str, Any] = field({}, shared=True)
    """options of a built-in reward, keyword arguments of a function"""
    functions: tuple[RewardPart, ...] = field((), shared=True)
    """instead of `name`: several rewards, each with a weight; the reward is Σ weight · value"""
    meaning: str | None = field(None, shared=True)
    """module:function or file.py:function, called like a reward, that returns the same number for responses
    with the same meaning: unit-test results as bits, or agro.rewards.number of a canonical form. For
    objectives with equivalent = "meaning". A response without a meaning has no reward"""
    timeout: Positive = field(10.0, resume=True, shared=True)
    """seconds that a call may take per response; after that, the reward stays unknown"""
    places: str | None = field(None, shared=True, min_length=1)
    """token, turn, or a text that ends steps: for each response, the function returns a list with one number
    per item of its `completion_ids`, per turn of the policy, or per step (a nonblank part between these
    texts). Each number is assigned to the last token of its turn or step; the response's reward is their
    sum"""
    whiten: Literal["none", "group", "batch"] = field("none", shared=True)
    """normalization for training: each part becomes (value − mean) / standard deviation (with n − 1) over the
    responses to the prompt (group, as in GDPO) or of the step (batch), and is then weighted. Metrics and
    store keep the raw values"""
    clip: tuple[float, float] | None = field(None, shared=True)
    """bounds to which rewards are clipped for training, after whitening"""
    max_failed: Share = field(0.5, resume=True, shared=True)
    """the run stops if more than this share of a step's rewards failed"""
    workers: int = field(1, resume=True, shared=True, ge=1, le=2**10)
    """worker processes per reward that uses them: functions, math, code"""

    @model_validator(mode="before")
    @classmethod
    def _one_way(cls, values: Any) -> Any:
        """Accept a name or functions. Without either, set the default name, so that config.json has it."""
        if not isinstance(values, dict):
            return values
        for key in ("name", "options"):
            if values.get("functions") and values.get(key):
                raise invalid(
                    f"reward.{key} and reward.functions exclude each other: give {key} to each of the "
                    "functions, or no functions"
                )
        is_given = values.get("functions") or values.get("name") is not None
        return values if is_given else values | {"name": "exact"}

    @model_validator(mode="after")
    def _parts_differ(self) -> Self:
        labels = [part.label or part.name for part in self.functions]
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise invalid(f"reward.functions: {twice[0]} is given twice; give one a label")
        if labels and not any(part.weight for part in self.functions):
            raise invalid("reward.functions: expected at least one nonzero weight")
        if self.places is not None and (labels or self.whiten != "none" or self.clip is not None):
            raise invalid("reward.places excludes reward.functions, reward.whiten and reward.clip")
        caps = [(part.at_least, part.at_most) for part in self.functions]
        for low, high in (*caps, self.clip or (None, None)):
            if low is not None and high is not None and low >= high:
                raise invalid(f"reward: expected a lower bound below the upper one, got {low} and {high}")
        return self

    @property
    def is_default(self) -> bool:
        """Whether the reward is the default, as far as its values show."""
        return self.name == "exact" and not self.options

    @property
    def title(self) -> str:
        """A readable title: the name, or the weighted sum."""
        return self.name or " + ".join(f"{p.weight:g} · {p.label or p.name}" for p in self.functions)


class SamplerConfig(Section):
    """How fresh responses are sampled.

    The temperature is applied first, then top-k, top-p and min-p, in this order.
    """

    n: Count = 4
    """responses per prompt"""
    temperature: Temperature = 1.0
    """0 is greedy; any other value is at least 1e-6"""
    top_k: int = field(0, ge=0)
    """0 keeps all tokens"""
    top_p: Share = 1.0
    """keeps the most likely tokens until their total probability reaches this; 1 keeps all"""
    min_p: Share = 0.0
    """keeps tokens with at least this share of the most likely token's probability; 0 keeps all"""
    max_new: Count = 256
    """maximum number of tokens per response"""
    stop: tuple[str, ...] = ()
    """a response ends with the first of these texts"""
    batch: Count = 64
    """sequences decoded at once"""
    skip_layers: Share = 0.0
    """share of the policy's layers, without the first and the last, that sampling skips, chosen at random for
    each batch (Nested-ReFT); log-probs are those of the policy without these layers"""

    def of_policy(self, temperature: float, n: int) -> SamplerConfig:
        """These settings for `n` responses of the policy itself, without truncation, at a temperature."""
        changes = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "skip_layers": 0.0}
        return self.model_copy(update={**changes, "n": n})

    def is_of_policy(self, temperature: float) -> bool:
        """Whether it samples from the policy itself, whose log-probs have this temperature."""
        return self == self.of_policy(temperature, self.n)

    keep_sets: bool | None = None
    """record the kept sets of samples, the tokens that top-k, top-p and min-p leave, so that ratios can be
    normalized over them; not set: only if a phase's objective uses ratios and the embedded engine samples"""

    @property
    def truncation(self) -> str:
        """The settings that exclude tokens; see `agro.types.truncation`."""
        return truncation(self.model_dump())

    @property
    def records_kept(self) -> bool:
        """Whether samples record kept sets: not without truncation, nor for greedy decoding."""
        return bool(self.keep_sets and self.truncation and self.temperature)


class EnvironmentConfig(Section):
    """Responses become episodes of several turns; `sampler.max_new` then limits a turn."""

    name: str
    """verifiers:ENV_ID, harness:COMMAND, or an environment as module:Class or file.py:Class"""
    options: dict[str, Any] = field({})
    """keyword arguments of the environment"""
    max_turns: Count = 8
    """maximum number of the policy's turns per episode"""
    timeout: Positive = field(60.0, resume=True)
    """seconds that its reply to a turn may take; after that, the episode's reward stays unknown"""


class SourceConfig(Section):
    """Which process samples the fresh responses."""

    kind: Literal["inline", "elsewhere"] = field("inline", shared=True)
    """inline: this process samples; elsewhere: other processes do (agro collect RUN)"""
    wait_seconds: Positive = field(600.0, resume=True, shared=True)
    """elsewhere: longest wait for samples before the run stops"""
    sync_every: Count = 1
    """optimizer steps between updates of the samplers' weights. Above 1, inline samples with a copy of the
    policy that lags at most this many optimizer steps minus one; elsewhere publishes weights less often"""
    sync_from: Count = 1
    """inline: number of the policy's latest copies, one every `sync_every` optimizer steps, from which the
    sampler's weights are drawn at random whenever one is added; 1: the newest"""
    around: str | None = None
    """a wrapper of this source, which changes what a step gets from it: the name of an installed one,
    module:NAME or file.py:NAME"""
    options: dict[str, Any] = field({})
    """options of the wrapper"""
    lease_seconds: Positive = field(15.0, resume=True, shared=True)
    """elsewhere: a collector or trainer that hasn't renewed its lease for this long counts as dead; another
    collector takes over its prompts"""
    weights: str | None = field(None, resume=True, shared=True)
    """elsewhere: a folder shared by all hosts of the run, through which collectors get the weights. Default:
    the database if data.store is one, else the run's folder"""

    @property
    def lags(self) -> bool:
        """Whether this process may sample fresh responses with earlier weights."""
        return self.kind == "inline" and max(self.sync_every, self.sync_from) > 1


ENGINES = ("hf", "vllm", "server")


def _known_engine(kind: str) -> str:
    if problem := plugins.unknown("engines", kind, ENGINES):
        raise invalid(problem.replace(f", got {kind!r}", ""))
    return kind


class EngineConfig(Section):
    """What decodes responses: the model in this process, or a server."""

    kind: Annotated[str, AfterValidator(_known_engine)] = field("hf", shared=True)
    """hf: transformers, in this process; vllm: a vLLM server that the run starts and stops; server: an
    OpenAI-compatible server that already runs; or the name of an installed engine, or your own as
    file.py:Class or module:Class"""
    options: dict[str, Any] = field({}, shared=True)
    """keyword arguments of another engine's class"""
    vllm: str = field("vllm", resume=True, shared=True)
    """vllm: the command, with extra arguments for `vllm serve`, such as vllm --max-num-seqs 512"""
    memory: Annotated[float, Field(gt=0, lt=1)] | None = field(None, resume=True, shared=True)
    """vllm: share of the GPU's memory for the server; not set: estimated from what the trainer leaves"""
    sleep: bool = field(False, resume=True, shared=True)
    """put the server to sleep while nothing is sampled, so that sampling and training take turns using the
    GPU's memory (vLLM: VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode). It is probed each time it wakes"""
    fused: bool = field(True, shared=True)
    """hf: decode Llama, Mistral, Qwen2 and Qwen3 models on a CPU with fused matrix products and packed
    weights, if a trial gives the same log-probs; sampling then keeps a copy of the weights in memory"""
    urls: tuple[str, ...] = field((), resume=True, shared=True)
    """addresses of the servers, which serve the same model; each request goes to the least busy one. A server
    that fails is excluded until it has new weights and passes its probe"""
    api_key: str | None = field(None, resume=True, shared=True)
    """key of the servers, as env:NAME, whose value is read from the environment"""
    model: str | None = field(None, shared=True)
    """name of the model on the server"""
    dialect: Literal["vllm", "sglang"] = field("vllm", shared=True)
    """which requests the server understands; sglang is untested"""
    api: Literal["completions", "generate"] = field("completions", shared=True)
    """vllm: completions: /v1/completions, where a response has the version that it began with; generate:
    /inference/v1/generate, where each token has its own version (vLLM: --enable-scale-out)"""
    push: Literal["reload", "transfer", "adapter"] | None = field(None, shared=True)
    """how a server gets new weights. reload: it reads a folder; transfer: by vLLM's weight-transfer protocol,
    with the plug-in examples/vllm_weights; adapter: only the adapter of policy.lora, under a new name each
    time. Not set: adapter with policy.lora, else reload"""
    push_error: float | None = field(None, resume=True, shared=True, ge=0)
    """largest mean difference, in nats per token, between the log-probs of server and trainer on the fixed
    sequences that a server scores after each push; 0: no limit. Not set: 0.001, in half precision 0.05"""
    timeout: Positive = field(120.0, resume=True, shared=True)
    """seconds that a complete request may take, even if parts of the reply arrive in between"""
    retries: int = field(3, resume=True, shared=True, ge=0)
    """how often a failed request is sent again"""

    @property
    def uses_servers(self) -> bool:
        return self.kind in ("vllm", "server")

    @property
    def starts_server(self) -> bool:
        return self.kind == "vllm"

    @property
    def servers(self) -> tuple[str, ...]:
        """The URLs of all servers, without /v1. Raises `Refused` if there is none, or a duplicate."""
        urls = tuple(url.rstrip("/").removesuffix("/v1") for url in self.urls)
        if not urls:
            raise Refused('engine.kind = "server" needs engine.urls, such as ["http://127.0.0.1:8000"]')
        if len(set(urls)) < len(urls):
            raise Refused(f"engine.urls: expected different servers, got {', '.join(self.urls)}")
        return urls


class PlaceConfig(Section):
    """How many processes `agro train --place` starts for a run, and how often it restarts one."""

    collectors: Count = field(1, resume=True, shared=True)
    """processes that sample and score; `--place local:2` sets 2"""
    ranks: Count = field(1, resume=True, shared=True)
    """training processes, started by torchrun on the trainer's host"""
    servers: tuple[str, ...] = field((), resume=True, shared=True)
    """commands that start sampling servers, such as "vllm serve MODEL --port 8001", on the trainer's host;
    engine.urls lists their addresses"""
    restarts: int = field(5, resume=True, shared=True, ge=0)
    """how often a dead process is restarted without a step of the run in between; one more death ends the
    run, which `--resume` continues"""


STEPS = 100  # the default without steps and epochs


class ObjectiveConfig(BaseModel):
    """What is minimized: the name of an objective, and its options."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False, use_attribute_docstrings=True)
    name: str = "agro"
    """one of `agro.objectives.names()`, or your own as file.py:NAME or module:NAME"""

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class TrainConfig(Section):
    """Steps, their size, memory, and the optimizer."""

    steps: Count | None = None
    """batches to draw and train on; 100 if neither this nor epochs is given"""
    epochs: Positive | None = None
    """passes over the stored groups that the phase may draw, instead of steps; needs data.replay = 1. When
    the run begins, they become ceil(epochs × stored groups / groups) steps, which stay the same if the store
    grows"""
    start: Literal["previous", "first"] = "previous"
    """initial weights of a phase: those of the previous phase, or those that the run began with, for example
    to train the first model on what later ones found (BFS-Prover-V2, arXiv 2509.06493)"""
    seed: int = field(0, ge=0)
    """random seed of weights, sampling and draws"""
    groups: Count = 16
    """prompts per step"""
    updates: Count = 1
    """optimizer steps per batch"""
    micro_batch: Count | None = None
    """maximum number of sequences in a forward pass. Doesn't change the result"""
    micro_tokens: Count | None = None
    """maximum number of tokens in a forward pass, padding included; a longer sequence gets one of its own.
    2,048 if neither this nor micro_batch is given. Doesn't change the result"""
    gradient_checkpointing: bool = False
    """recompute each layer's activations in the backward pass instead of keeping them"""
    offload: tuple[Literal["activations", "optimizer"], ...] = ()
    """what to keep in CPU memory while the GPU doesn't use it"""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit: both moments in 8 bits (bitsandbytes), 2 bytes per weight instead of 8. Needs bitsandbytes
    and a CUDA GPU"""
    lr: Positive | Literal["auto"] = 1e-5
    """peak learning rate, at which the warm-up ends. auto: found at the phase's first step, as the rate at
    which this step changes the policy by the bound step_kl (0.005 if not given); the step is tried and undone
    a few times, at a forward pass each"""
    value_lr: Positive = 1e-2
    """peak learning rate of the value head, if the objective learns a value; warm-up and schedule as for
    lr"""
    warmup: int = field(0, ge=0)
    """optimizer steps of linear warm-up"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """learning rate over the phase; linear and cosine end at 0"""
    adam_betas: tuple[Share, Share] = (0.9, 0.999)
    """decay rates per update of the gradient's first and second moments"""
    adam_eps: Positive = 1e-8
    """added to the root of the second moment"""
    weight_decay: float = field(0.0, ge=0)
    """an update subtracts this times the learning rate times the weight"""
    weights_average: Annotated[float, Field(gt=0, lt=1)] | None = None
    """decay per optimizer step of an exponential moving average of the policy's weights, which starts at the
    phase's initial weights. Held-out evaluation, RUN/best and RUN/model use the average; training and
    sampling don't. Not set: no average"""
    clip: float = field(1.0, gt=0)
    """maximum norm of a step's gradient; a larger one is scaled down to it"""
    gain_ratio: Annotated[float, Field(gt=0, lt=1)] | None = None
    """least share of the gain predicted by its gradient that an optimizer step should realize (Armijo's
    condition); the best single step realizes 0.5. If steps realize less, the rate of the next ones is
    lowered. Costs a forward pass per batch. Not set, or for an objective that moves the policy by more than
    log-probs, such as an exact KL: no rule"""
    step_kl: Positive | None = None
    """how far an optimizer step should change the policy at most, in nats per token: half the mean squared
    change of the log-probs of the step's tokens. If steps change it more, the rate of the next ones is
    lowered. A phase with fewer than 100 optimizer steps has a larger bound, step_kl √(100 / steps). Costs the
    same forward pass. Not set: no bound"""
    max_length: int | None = field(None, ge=2)
    """maximum number of tokens per sequence; default: the model's context. Longer sequences are dropped and
    counted"""
    max_skipped: Count = 5
    """consecutive steps with a non-finite gradient after which the run stops"""
    rank_seconds: float = field(60.0, resume=True, shared=True, ge=1, le=86400)
    """with several ranks (torchrun), a rank that sends no heartbeat for this many seconds ends the run: its
    process was killed or stopped, or its host is unreachable. A busy rank keeps sending heartbeats"""
    checkpoint_every: Count = 50
    """steps between checkpoints; a killed run loses fewer steps than this"""
    keep: Count = field(2, resume=True)
    """checkpoints to keep, in addition to the phase's first; if one is damaged, the previous one is used"""
    show_every: int = field(0, resume=True, ge=0)
    """steps between sample responses shown on the terminal; 0: none"""
    push: str | None = field(None, resume=True, shared=True, pattern=r"^[\w.-]+/[\w.-]+$")
    """USER/NAME on the Hugging Face hub: RUN/model is uploaded there after the run, with the token of hf auth
    login or HF_TOKEN. Only then is it known whether the hub accepts it; RUN/model stays in any case"""
    push_private: bool = field(True, resume=True, shared=True)
    """make a repository that push creates private"""

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        lengths = [key for key in LENGTH if values.get(key) is not None]
        if len(lengths) > 1:
            raise invalid("expected one of train.steps and train.epochs")
        return values if lengths else {**values, "steps": STEPS}


class GuardConfig(Section):
    """What counts as an explosion, and what happens then: see `agro.train.monitors.guard`."""

    loss: Annotated[float, Field(gt=1)] | None = field(None, resume=True)
    """largest |loss|, in multiples of its median over the last `window` steps; not set: no rule"""
    kl: Positive | None = field(None, resume=True)
    """largest kl_ref, in nats per response; not set: no rule"""
    logp_diff: float = field(0.1, resume=True, ge=0)
    """largest logp_diff_fresh, in nats per token: the difference between the log-probs of sampler and trainer
    at equal weights. A larger one ends the run before the weights move, whatever `action` is; 0: no rule"""
    window: Annotated[int, Field(ge=5)] = 20
    """steps over which `loss` takes the median"""
    action: Literal["skip", "stop", "rollback"] = field("stop", resume=True)
    """skip: drop the update; stop: end the run; rollback: go back to the last checkpoint at half the learning
    rate"""
    rollbacks: Count = field(3, resume=True)
    """how often a run may roll back before it stops"""
    stage_seconds: float = field(600.0, resume=True, shared=True, ge=0)
    """a stage without progress for this many seconds is reported on the terminal; 0: never"""


class EvaluateConfig(Section):
    """Evaluation on held-out data: before the first step, at the ends of phases, and every `every` steps."""

    every: int = field(0, ge=0)
    """steps between evaluations; 0: at the ends of phases only"""
    keep_best: bool = field(False, resume=True)
    """keep the model with the highest eval_reward in RUN/best, or eval_auc without evaluation on held-out
    prompts (the best of many is favored by chance)"""
    patience: int = field(0, resume=True, ge=0)
    """consecutive evaluations without a higher value of that metric after which the run ends; 0: never"""
    target_kl: Positive | None = field(None, resume=True)
    """the run ends when eval_kl_ref reaches this, in nats per response"""
    n: Count = 1
    """responses per prompt"""
    pass_at: float | None = field(None, resume=True)
    """least reward that passes, in the accuracy and pass@k of `agro eval`; default: the reward's own
    maximum"""
    temperature: Temperature = 1.0
    """temperature of held-out responses; eval_kl_ref is known only if it equals policy.temperature"""
    kl: bool = True
    """measure the KL to the reference too; keeps a copy of the reference in memory"""
    kl_samples: int = field(32, ge=0)
    """responses, one per prompt, that measure eval_kl_ref in a phase on stored data without
    data.eval_prompts, if the run has a reference: to held-out prompts of the store, or else to prompts that
    it draws. They need no reward. 0: no KL"""
    side_by_side: int = field(8, ge=0, le=32, shared=True)
    """prompts, chosen by a hash of their ids, for which card and terminal show the log's best response, one
    of the start and one of the trained model. They come from data.eval_prompts; in a phase on stored data
    without these, they are the first ones of `kl_samples`, sampled at every evaluation, with or without a
    reference. 0: none"""
    beta: float | None = field(None, gt=0)
    """β at which ½ Var(R) and regret are measured, for any objective, in reward per nat of the response's
    log-ratio; it affects nothing else. Default: the objective's own β. For an objective without the
    reference's log-probs, setting it costs a copy of the reference and a forward pass over fresh responses
    per step"""


class TrackConfig(Section):
    """Experiment trackers that get copies of the metrics; `metrics.jsonl` is always written."""

    to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = field((), resume=True)
    """trackers, which must be installed"""
    project: str = field("agro", resume=True, min_length=1)
    """project in W&B and trackio"""
    name: str | None = field(None, resume=True)
    """the run's name there; default: that of its folder"""
