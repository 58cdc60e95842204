"""The sections of a configuration: frozen, typed, each value with its unit, its meaning and marks.
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
COLDEST = 1e-6  # logits that are divided by much less overflow float32


def invalid(problem: str) -> PydanticCustomError:
    """What a validator raises; pydantic's own message would begin with "Value error"."""
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
    """A value of a section with marks, and limits as of `pydantic.Field`; its docstring is its meaning.

    `resume`: it may change when a run is resumed: no step computes anything with it. `shared`: it is one for
    the complete run, so a phase can't change it.
    """
    marks: dict[str, Any] = {"resume": resume, "shared": shared}
    return Field(default, json_schema_extra=marks, **limits)


class NewModel(Section):
    """A small Llama with random weights and one token a character (or byte), made at the start of a run."""

    alphabet: str = "bytes"
    """the characters of the vocabulary, or 'bytes' for all 256"""
    hidden: int = field(128, ge=1, le=2**16)
    """width of the hidden states; a multiple of `heads`"""
    layers: int = field(4, ge=1, le=2**10)
    """transformer blocks"""
    heads: Count = 4
    """attention heads of a block"""
    context: Count = 1024
    """context length: tokens of prompt and response together"""
    initializer_range: float = field(0.02, gt=0, le=100)
    """standard deviation of the random weights; a narrow model learns from rewards only with a larger one,
    about 1/√hidden"""


class LoRA(Section):
    """A low-rank adapter (peft): the model's own weights stay, and the reference shares them."""

    rank: Count = 16
    """r, the width of the adapter's matrices"""
    alpha: Positive = 32.0
    """the adapter's output is scaled by alpha / rank"""
    targets: tuple[str, ...] = ("all-linear",)
    """names of the modules that get an adapter; all-linear: every linear layer but the head"""
    start: str | None = None
    """folder of an adapter to go on with, instead of an empty one; rank, alpha and targets are its own
    then"""
    merge: bool = True
    """RUN/model is the model with the adapter merged in; else RUN/model is the adapter alone"""


class ChatConfig(Section):
    """How a prompt becomes the text of a chat model; see `agro.models.chat`."""

    system: str | None = None
    """the system message of conversations that have none; "" is an empty one"""
    wrap: bool = False
    """a prompt that is plain text becomes a conversation of one user message; else it stays text"""
    options: dict[str, Any] = field({})
    """variables of the chat template, such as enable_thinking = false"""
    template: str | None = None
    """file of a Jinja template that takes the place of the tokenizer's own, in RUN/model too"""
    today: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")] = "2024-07-26"
    """the date that templates write which ask for it, so that a prompt has the same tokens on any day"""
    unshown: Literal["refuse", "drop"] = "refuse"
    """what a template doesn't show of a prompt (declarations of tools, a system message), and reasoning:
    refuse the record by name, or go on without it"""


Threads = Annotated[int, Field(ge=0, le=2**10)]


class PolicyConfig(Section):
    """The model that is trained, where it runs, and the reference π_ref."""

    model: str | None = field(None, shared=True)
    """folder or hub name of a causal language model, or of an adapter, which is merged into its model"""
    new: NewModel | None = field(None, shared=True)
    """instead of `model`: start from random weights"""
    dtype: Literal["float32", "bfloat16", "mixed"] = field("float32", shared=True)
    """of weights and updates: in bfloat16 an update smaller than a 256th of a weight rounds away. mixed:
    products in bfloat16 from float32 weights, which the optimizer updates and checkpoints keep; RUN/model is
    bfloat16"""
    quantize: Literal["4bit"] | None = field(None, shared=True)
    """4bit: the model's own weights in 4 bits (NF4 of bitsandbytes) while an adapter is trained (QLoRA); vLLM
    serves the same ones. Needs peft, bitsandbytes and accelerate, dtype = bfloat16 and lora with merge =
    false"""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = field(
        "auto", shared=True
    )
    """the attention of transformers; auto: its own choice, torch's scaled_dot_product_attention for most
    models, which has a flash kernel. The others of that name need their package and a CUDA GPU"""
    device: str = field("auto", shared=True)
    """auto: CUDA where there is one, else the CPU. Apple's GPU (mps) is refused: it has no float64"""
    threads: Literal["auto"] | Threads = field("auto", shared=True)
    """CPU threads of the process; auto: 1 for models of less than 30 million parameters, which a second
    thread slows down, all cores for larger ones. 0 leaves torch's own choice"""
    temperature: float = field(1.0, shared=True, ge=COLDEST)
    """of π, π_ref and every log-prob of the trainer; sampler.temperature belongs to the behavior only"""
    reference: Literal["start", "phase", "model", "ema", "periodic", "sampler"] = "start"
    """π_ref: the weights at the start of the run or of each phase, another model, an exponential moving
    average of the policy's weights, a copy of them renewed every so often, or the earlier weights that sample
    (source.sync_every)"""
    reference_model: str | None = None
    """model: the folder or hub name of the reference, or the URL of vLLM, which serves a teacher that scores
    the policy's samples"""
    reference_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """ema: share of the reference's weights that is kept at a step"""
    reference_every: Count | None = None
    """periodic: steps between copies"""
    cache_reference: bool = field(False, shared=True)
    """keep the reference's log-probs of each sample in the store, for later steps and other runs with the
    same reference: an epoch after the first saves one forward pass of three"""
    chat: ChatConfig = field(ChatConfig(), shared=True)
    lora: LoRA | None = field(None, shared=True)
    """train an adapter of this kind, not the model's own weights"""
    chunk: Count = field(512, shared=True)
    """positions whose logits exist at once when log-probs are computed, for 1,024 tokens of the vocabulary
    at a time"""
    trust_remote_code: bool = field(False, shared=True)
    """run the code that a model on the hub brings along"""

    def check_weights(self) -> None:
        """Raise `Refused` unless the model is named, or a new one."""
        if (self.model is None) == (self.new is None):
            got = "neither" if self.model is None else "both"
            raise Refused(
                "policy: expected either policy.model (a folder or hub name) or [policy.new] (random "
                f"weights), got {got}"
            )

    @property
    def reference_is_served(self) -> bool:
        """Whether a server has the reference."""
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
    """of its value in the sum; 0 measures it without counting it"""
    at_least: float | None = None
    """a lower value counts as this"""
    at_most: float | None = None
    """a higher value counts as this"""
    gate: float | None = None
    """where its value is below this, parts without a gate count as 0"""
    options: dict[str, Any] = field({})
    """of this reward, as `reward.options`"""
    label: str | None = None
    """its name in metrics and store; `name` where it is not given"""


class RewardConfig(Section):
    """One reward, or the weighted sum of several `functions`."""

    name: str | None = field(None, shared=True)
    """exact (where neither it nor `functions` is given), regex, math, code, judge, model, overlong, an
    installed one, module:function or file.py:function"""
    options: dict[str, Any] = field({}, shared=True)
    """options of a built-in reward, keyword arguments of a function"""
    functions: tuple[RewardPart, ...] = field((), shared=True)
    """instead of `name`: several rewards, each with a weight; the reward is Σ weight · value"""
    meaning: str | None = field(None, shared=True)
    """module:function or file.py:function that gives one number to responses of one meaning, called as a
    reward: the results of unit tests as bits, or agro.rewards.number of a canonical form; for objectives
    with equivalent = "meaning". A response without it has no reward"""
    timeout: Positive = field(10.0, resume=True, shared=True)
    """seconds a call may take for one response; beyond it the reward stays unknown"""
    places: str | None = field(None, shared=True, min_length=1)
    """token, turn, or a text that ends steps: the function returns for each response a list with a number for
    each of its `completion_ids`, of the policy's turns, or of its steps: the parts between these texts that
    aren't blank. It comes with the last token of the turn or step; that of the response is their sum"""
    whiten: Literal["none", "group", "batch"] = field("none", shared=True)
    """what is trained on: each part is (value − mean) / standard deviation, with n − 1, over the responses to
    the prompt (group, as GDPO has it) or of the step (batch), and then weighted. Metrics and store have it as
    it was"""
    clip: tuple[float, float] | None = field(None, shared=True)
    """lowest and highest reward that is trained on, after whitening"""
    max_failed: Share = field(0.5, resume=True, shared=True)
    """the run stops where more than this share of one step's rewards failed"""
    workers: int = field(1, resume=True, shared=True, ge=1, le=2**10)
    """processes of each reward that has some: functions, math, code"""

    @model_validator(mode="before")
    @classmethod
    def _one_way(cls, values: Any) -> Any:
        """A name or functions. Without either, the name is filled in, so that config.json has it."""
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
            raise invalid("reward.functions: expected one weight other than 0 at least")
        if self.places is not None and (labels or self.whiten != "none" or self.clip is not None):
            raise invalid("reward.places excludes reward.functions, reward.whiten and reward.clip")
        caps = [(part.at_least, part.at_most) for part in self.functions]
        for low, high in (*caps, self.clip or (None, None)):
            if low is not None and high is not None and low >= high:
                raise invalid(f"reward: expected a lower bound below the upper one, got {low} and {high}")
        return self

    @property
    def is_default(self) -> bool:
        """Whether nothing but the name that is filled in is given, as far as it shows."""
        return self.name == "exact" and not self.options

    @property
    def title(self) -> str:
        """For people: the name, or the sum."""
        return self.name or " + ".join(f"{p.weight:g} · {p.label or p.name}" for p in self.functions)


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
        raise invalid(problem.replace(f", got {kind!r}", ""))
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
    memory: Annotated[float, Field(gt=0, lt=1)] | None = field(None, resume=True, shared=True)
    """vllm: share of the GPU's memory for the server; not set: what the trainer leaves of it, counted"""
    sleep: bool = field(False, resume=True, shared=True)
    """the server sleeps while nothing is sampled, so that sampling and training use the GPU's memory in turns
    (vLLM: VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode). Each time it wakes it is probed"""
    fused: bool = field(True, shared=True)
    """hf: decode Llama, Mistral, Qwen2 and Qwen3 models on a CPU with fused products and packed weights, if a
    trial finds the same log-probs; a copy of the weights is in memory while responses are sampled"""
    urls: tuple[str, ...] = field((), resume=True, shared=True)
    """of the servers, which have the same model; each request goes to the least busy. One that fails is left
    out until it has new weights and passes its probe"""
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
        """The URLs of all servers, without /v1. Raises `Refused` where there is none, or one twice."""
        urls = tuple(url.rstrip("/").removesuffix("/v1") for url in self.urls)
        if not urls:
            raise Refused('engine.kind = "server" needs engine.urls, such as ["http://127.0.0.1:8000"]')
        if len(set(urls)) < len(urls):
            raise Refused(f"engine.urls: expected different servers, got {', '.join(self.urls)}")
        return urls


class PlaceConfig(Section):
    """How many processes `agro train --place` starts for a run, and how often it starts one again."""

    collectors: Count = field(1, resume=True, shared=True)
    """processes that sample and score; `--place local:2` sets 2"""
    ranks: Count = field(1, resume=True, shared=True)
    """processes that share the training, started by torchrun on the trainer's host"""
    servers: tuple[str, ...] = field((), resume=True, shared=True)
    """commands of servers that sample, such as "vllm serve MODEL --port 8001", each started on the trainer's
    host; engine.urls names them"""
    restarts: int = field(5, resume=True, shared=True, ge=0)
    """how often a process that died is started again without a step of the run in between; one more death
    ends the run, which `--resume` continues"""


STEPS = 100  # where neither steps nor epochs are given


class ObjectiveConfig(BaseModel):
    """What is minimized: the name of an objective, and its options."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False, use_attribute_docstrings=True)
    name: str = "agro"
    """one of `agro.objectives.names()`, or one of your own as file.py:NAME or module:NAME"""

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class TrainConfig(Section):
    """Steps, their size, memory, and the optimizer."""

    steps: Count | None = None
    """batches drawn and trained on; 100 where neither this nor epochs is given"""
    epochs: Positive | None = None
    """passes over the stored groups that the phase may draw, instead of steps, with data.replay = 1. When the
    run begins they become ceil(epochs × stored groups / groups) steps, which it keeps where the store
    grows"""
    start: Literal["previous", "first"] = "previous"
    """weights that a phase begins with: those of the phase before, or those that the run began with, such as
    for a phase that trains the first model on what later ones found (BFS-Prover-V2, arXiv 2509.06493)"""
    seed: int = field(0, ge=0)
    """of weights, sampling and draws"""
    groups: Count = 16
    """prompts a step"""
    updates: Count = 1
    """optimizer steps a batch"""
    micro_batch: Count | None = None
    """sequences in one forward pass at most. Doesn't change the result"""
    micro_tokens: Count | None = None
    """tokens in one forward pass at most, padding included; a longer sequence goes alone. 2,048 where neither
    this nor micro_batch is given. Doesn't change the result"""
    gradient_checkpointing: bool = False
    """recompute each layer's activations in the backward pass instead of keeping them"""
    offload: tuple[Literal["activations", "optimizer"], ...] = ()
    """what is kept in the CPU's memory while the GPU doesn't use it"""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit: both moments in 8 bits (bitsandbytes), 2 bytes a weight instead of 8. Needs
    bitsandbytes and a CUDA GPU"""
    lr: Positive | Literal["auto"] = 1e-5
    """largest learning rate, which the warm-up ends at. auto: found at the phase's first step, as the rate at
    which it changes the policy by its bound, that of step_kl or, where it is not given, of step_kl = 0.005;
    the step is tried a few times and taken back, at a forward pass each"""
    value_lr: Positive = 1e-2
    """largest learning rate of the value head, where the objective learns a value; warm-up and schedule as of
    lr"""
    warmup: int = field(0, ge=0)
    """optimizer steps of linear warm-up"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """of the learning rate, over the phase, to 0"""
    adam_betas: tuple[Share, Share] = (0.9, 0.999)
    """decay per update of the gradient's first and second moment"""
    adam_eps: Positive = 1e-8
    """added to the root of the second moment"""
    weight_decay: float = field(0.0, ge=0)
    """share of a weight, times the learning rate, that an update subtracts"""
    weights_average: Annotated[float, Field(gt=0, lt=1)] | None = None
    """decay per optimizer step of an exponential moving average of the policy's weights, which starts at the
    first weights of the phase; held-out data are measured with the average, and RUN/best and RUN/model have
    it. Training and sampling don't use it. No average where it is not given"""
    clip: float = field(1.0, gt=0)
    """largest norm of the gradient of a step; a larger one is scaled down to it"""
    gain_ratio: Annotated[float, Field(gt=0, lt=1)] | None = None
    """least share that an optimizer step is to keep of the gain that its gradient promises (Armijo's
    condition): 0.5 is the best single step's. Where steps keep less, the rate of the next ones is lowered.
    Costs a forward pass of each batch; no rule where it is not given, nor for an objective that moves the
    policy by more than log-probs, such as an exact KL"""
    step_kl: Positive | None = None
    """how far an optimizer step may change the policy, nats a token: half the mean squared change of the
    log-probs of the step's tokens. Where steps change it more, the rate of the next ones is lowered. A phase
    of fewer than 100 optimizer steps has a larger bound, step_kl √(100 / steps). Costs the same forward pass;
    no bound where it is not given"""
    max_length: int | None = field(None, ge=2)
    """tokens a sequence at most; the model's context where it is not given. Longer sequences are dropped and
    counted"""
    max_skipped: Count = 5
    """steps in a row with a non-finite gradient before the run stops"""
    rank_seconds: float = field(60.0, resume=True, shared=True, ge=1, le=86400)
    """on several ranks (torchrun), a rank that isn't heard of for so many seconds ends the run: its process
    was killed or stopped, or its host is out of reach. A rank that works for longer is heard of meanwhile"""
    checkpoint_every: Count = 50
    """steps between checkpoints; a killed run loses fewer than these"""
    keep: Count = field(2, resume=True)
    """checkpoints kept, besides the one that the phase began with: where one is damaged, the one before it is
    used"""
    show_every: int = field(0, resume=True, ge=0)
    """steps between sample responses on the terminal; 0 shows none"""
    push: str | None = field(None, resume=True, shared=True, pattern=r"^[\w.-]+/[\w.-]+$")
    """USER/NAME on the Hugging Face hub: RUN/model is uploaded there after the run, with the token of hf auth
    login or HF_TOKEN. Whether the hub takes it is known then; RUN/model stays where it doesn't"""
    push_private: bool = field(True, resume=True, shared=True)
    """a repository that push makes is private"""

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
    """largest |loss|, in multiples of its median over the last `window` steps; no rule where it is not
    given"""
    kl: Positive | None = field(None, resume=True)
    """largest kl_ref, nats a response; no rule where it is not given"""
    logp_diff: float = field(0.1, resume=True, ge=0)
    """largest logp_diff_fresh, nats a token: how far the log-probs of sampler and trainer are apart at equal
    weights. A larger one ends the run before the weights move, whatever `action` is; 0: no rule"""
    window: Annotated[int, Field(ge=5)] = 20
    """steps over which `loss` takes the median"""
    action: Literal["skip", "stop", "rollback"] = field("stop", resume=True)
    """skip: drop the update; stop: end the run; rollback: go back to the last checkpoint at half the learning
    rate"""
    rollbacks: Count = field(3, resume=True)
    """how often a run may go back; then it stops"""
    stage_seconds: float = field(600.0, resume=True, shared=True, ge=0)
    """a stage without progress for so many seconds is named on the terminal; 0: never"""


class EvaluateConfig(Section):
    """Measurements on held-out data: before the first step, at the ends of phases, every `every` steps."""

    every: int = field(0, ge=0)
    """steps between evaluations; 0: at the ends of phases only"""
    keep_best: bool = field(False, resume=True)
    """keep the model with the highest eval_reward in RUN/best, or eval_auc where no held-out prompts are
    answered (the best of many is flattered by chance)"""
    patience: int = field(0, resume=True, ge=0)
    """evaluations in a row without a higher value of that metric after which the run ends; 0: it doesn't"""
    target_kl: Positive | None = field(None, resume=True)
    """the run ends where eval_kl_ref reaches this, nats per response"""
    n: Count = 1
    """responses a prompt"""
    pass_at: float | None = field(None, resume=True)
    """reward from which a response passes, in the accuracy and pass@k of `agro eval`; where it is not given,
    the reward's own maximum"""
    temperature: Temperature = 1.0
    """of held-out responses; eval_kl_ref is known only where it equals policy.temperature"""
    kl: bool = True
    """measure the KL to the reference too; keeps a copy of the reference in memory"""
    kl_samples: int = field(32, ge=0)
    """responses, one a prompt, that measure eval_kl_ref in a phase on stored data without data.eval_prompts,
    where the run has a reference: to held-out prompts of the store, or else to prompts that it draws. They
    need no reward. 0: no KL"""
    side_by_side: int = field(8, ge=0, le=32, shared=True)
    """prompts, chosen by a hash of their ids, of which card and terminal show the log's best response, one of
    the start and one of the trained model. They are of data.eval_prompts; in a phase on stored data without
    these they are the first of those that `kl_samples` takes, sampled at every evaluation, with or without a
    reference. 0: none are shown"""
    beta: float | None = field(None, gt=0)
    """reward per nat of the response's log-ratio: β at which ½ Var(R) and regret are measured, whatever the
    objective, and of nothing else; the objective's own where it is not given. An objective without the
    reference's log-probs then costs a copy of the reference and a forward pass over fresh responses per
    step"""


class TrackConfig(Section):
    """Copies of the metrics for other, installed programs; `metrics.jsonl` is always written."""

    to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = field((), resume=True)
    """which programs"""
    project: str = field("agro", resume=True, min_length=1)
    """of W&B and trackio"""
    name: str | None = field(None, resume=True)
    """of the run there; the run folder's where it is not given"""
