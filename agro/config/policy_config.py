"""The model, its adapter, its chat format, and the reference."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from agro.config.section import COLDEST, Count, Positive, Section, field


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
    """4bit: the model's own weights in 4 bits (NF4 of bitsandbytes) while an adapter is trained (QLoRA).
    Needs peft, bitsandbytes and accelerate, a CUDA GPU, dtype = bfloat16 and lora with merge = false"""
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
    """model: the folder or hub name of the reference"""
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

    @property
    def reference_moves(self) -> bool:
        """Whether the reference changes during a phase."""
        return self.reference in ("ema", "periodic", "sampler")
