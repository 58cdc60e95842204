"""The memory of a run: bytes that are always in use, and those that a pass or sampling adds.

For a loaded run, `agro.api.plan` measures the bytes always in use and those that a token saves for the
backward pass. For other runs `Footprint.of` counts them from the model's shape: on torch's `meta` device a
model has shapes but no numbers. Memory other than tensors is then assumed (`CONTEXT`, `SERVER`, `ASLEEP`);
these assumptions weren't measured on a GPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agro.config import EngineConfig, LoRA, PolicyConfig, RunConfig, TrainConfig
from agro.errors import Refused
from agro.io.numbers import size
from agro.models.adapters import adapted, is_adapter
from agro.models.logprobs import MAX_KEPT_LOGITS, TILE
from agro.models.pretrained import context_of, parameters, without_randomness

# Sizes of Qwen3: hidden width, inner width, layers, heads, whether the output layer is the embedding.
SIZES = {
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12288, 36, 32, False),
    "14B": (5120, 17408, 40, 40, False),
}
NF4, NF4_SERVED = 0.5 + 1 / 64 + 4 / 64 / 256, 0.5 + 4 / 64  # bytes per weight; vLLM's scales are float32
CONTEXT, SERVER, ASLEEP = 0.7e9, 2.5e9, 1.5e9  # CUDA; vLLM without weights and cache; vLLM asleep
SPARE = 1.05  # allocated bytes per byte of tensors: memory is allocated in blocks
BACKWARD = 1.25  # a layer's memory in its backward pass if it is recomputed, relative to what it saves
COUNTED = 16  # tokens in the counted pass


@dataclass(frozen=True)
class Shape:
    """The numbers that follow from a model's configuration."""

    text: Any  # the language model's configuration
    context: int  # tokens
    weights: int
    packed: int  # weights in the linear layers that 4 bits can pack
    widest: int  # weights in the largest of these layers
    trained: int
    saved: float  # bytes saved per token and layer

    def stored(self, policy: PolicyConfig, each: float) -> float:
        """Bytes of the weights; `each`: bytes per quantized weight."""
        if policy.quantize is None:
            return self.weights * itemsize(policy)
        return self.packed * each + (self.weights - self.packed) * 2


@cache
def shape(name: str, lora: LoRA | None, dtype: str) -> Shape:
    """The shape of a size of `SIZES`, a folder with a config.json or a hub model; `Refused` for others."""
    model = on_meta(name, dtype)
    text, head = model.config.get_text_config(), model.get_output_embeddings()
    linear = [m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    weights, trained, saved = parameters(model), [], []
    for layers in (1, 2):  # the difference is one layer's; all layers are assumed to be alike
        part = on_meta(name, dtype, layers)
        if lora is not None:
            adapted(part, "", lora.model_copy(update={"start": None, "merge": False}))
        trained.append(sum(p.numel() for p in part.parameters() if p.requires_grad))
        with saved_for_backward(part) as storages:
            states_on_meta(part, COUNTED)
        saved.append(sum(storages.values()) / COUNTED)
    adapter = trained[0] + (text.num_hidden_layers - 1) * (trained[1] - trained[0])
    trains = weights if lora is None else adapter
    return Shape(text, context_of(model), weights, sum(linear), max(linear), trains, saved[1] - saved[0])


def shape_of(policy: PolicyConfig) -> Shape:
    assert policy.model is not None
    return shape(policy.model, policy.lora, "float32" if policy.dtype == "float32" else "bfloat16")


def on_meta(name: str, dtype: str, layers: int | None = None) -> Any:
    """A causal language model without numbers, with all layers or the first `layers`."""
    import transformers as hf
    from transformers.masking_utils import sdpa_mask

    hf.AttentionInterface.register("agro_counted", _attend)
    hf.AttentionMaskInterface.register("agro_counted", sdpa_mask)
    if name in SIZES:
        hidden, inner, count, heads, ties = SIZES[name]
        config = hf.Qwen3Config(
            vocab_size=151_936, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=count,
            num_attention_heads=heads, num_key_value_heads=8, head_dim=128, tie_word_embeddings=ties,
            max_position_embeddings=40_960,
        )  # fmt: skip
    else:
        try:
            config = hf.AutoConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            choices = f"{', '.join(SIZES)} or a model with a config.json"
            raise Refused(f"policy.model: {name}: expected {choices}: {error}") from None
    text = config.get_text_config()
    if layers is not None:
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    computed = {"dtype": getattr(torch, dtype), "attn_implementation": "agro_counted"}
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config, **computed)
    without_randomness(model.eval())
    return model


def states_on_meta(model: Any, tokens: int) -> Tensor:
    """[1,T,H] last hidden states of a model on `meta`, without numbers."""
    ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
    mask = ids.new_empty((1, 1, 1, 0))  # transformers doesn't read it
    output = model.base_model(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)
    states: Tensor = output.last_hidden_state
    return states


def _attend(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> tuple[Tensor, None]:
    """Flash attention, which saves what a GPU's kernels save; on `meta` torch would choose another kernel."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, 0.0, True)[0].transpose(1, 2).contiguous(), None


@contextmanager
def saved_for_backward(model: nn.Module) -> Iterator[dict[int, int]]:
    """Record the bytes that autograd saves, by storage, without the model's weights."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield saved


def itemsize(policy: PolicyConfig) -> int:
    """Bytes per number in a pass."""
    return 4 if policy.dtype == "float32" else 2


def optimized(train: TrainConfig, trained: int, trained_bytes: int) -> float:
    """Bytes of gradients, moments and an average of `trained` weights with `trained_bytes` bytes."""
    moments = 2 * trained if train.optimizer == "adamw_8bit" else 2 * trained_bytes
    average = 0 if train.weights_average is None else 4 * trained
    return SPARE * (trained_bytes + moments + average)


@dataclass(frozen=True)
class Footprint:
    """Bytes of a run: the trainer's, and those of a server on the same GPU."""

    config: RunConfig
    text: Any  # transformers' configuration of the language model
    resting: float  # the trainer's between passes: weights, reference, gradients, moments
    saved: float  # saved for the backward pass per token and layer
    unpacked: float = 0.0  # the largest 4-bit layer, unpacked for a product
    server: float | None = None  # without its cache; None: not counted, as for a loaded run
    on_cpu: bool = False

    @classmethod
    def of(cls, config: RunConfig, *, has_reference: bool) -> Footprint:
        """Count without loading anything. `has_reference`: whether a phase needs the reference in memory."""
        policy = config.phase(config.phase_names[0]).policy  # all phases share its model and reference
        reward, model = config.reward, shape_of(policy)
        paths, copied = [reward.options.get("path")] if reward.name == "model" else [], 0
        if has_reference and policy.reference_model is None:  # bytes per trained weight in a frozen copy
            copied = itemsize(policy) if policy.lora is None else 4
        elif has_reference and not policy.reference_is_served:
            paths.append(policy.reference_model)
        frozen = sum(shape(name, None, "bfloat16").weights for name in paths if name)
        is_extra = policy.lora is not None or policy.dtype == "mixed"  # an adapter, or copies: in float32
        each = 4 if is_extra else itemsize(policy)  # bytes per trained weight
        weights = SPARE * (model.stored(policy, NF4) + (is_extra * each + copied) * model.trained)
        state = optimized(config.train, model.trained, each * model.trained)
        server = None
        if config.engine.starts_server:  # with two adapters in bfloat16
            server = SERVER + model.stored(policy, NF4_SERVED) + 4 * model.trained
        return cls(
            config,
            model.text,
            resting=CONTEXT + frozen * itemsize(policy) + weights + state,
            saved=model.saved,
            unpacked=2 * model.widest if policy.quantize else 0,
            server=server,
        )

    def activations(self, tokens: int) -> tuple[float, float]:
        """Bytes of a pass that wait for the backward pass, and the extra bytes of one layer during its
        backward pass."""
        layer, layers, train = self.saved * tokens, self.text.num_hidden_layers, self.config.train
        if "activations" in train.offload:
            return 0.0, BACKWARD * layer
        if train.gradient_checkpointing:
            inputs = layers * tokens * self.text.hidden_size * itemsize(self.config.policy)
            return inputs, BACKWARD * layer
        return layers * layer, layer

    def training(self, tokens: int) -> float:
        """The trainer's bytes in a pass of `tokens` tokens."""
        waiting, layer = self.activations(tokens)
        vocabulary: int = self.text.vocab_size
        tiles = 4 * self.config.policy.chunk * min(TILE, vocabulary)
        logits = 4 * (min(MAX_KEPT_LOGITS, tokens * vocabulary) + tiles)
        return self.resting + SPARE * (waiting + max(layer + self.unpacked, logits))

    def serving(self, tokens: int, sequences: int) -> float:
        """Bytes for sampling `sequences` sequences at once, in the server or in the trainer's process."""
        text = self.text
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        numbers: int = 2 * text.num_hidden_layers * heads * width * tokens * sequences  # keys and values
        logits: int = 8 * sequences * text.vocab_size  # float32 logits and their exponentials
        if self.server is not None:
            return self.server + 2 * numbers
        return SPARE * (itemsize(self.config.policy) * numbers + logits)

    def peak(self, tokens: int, sequences: int, length: int | None = None) -> float:
        """The peak bytes of a pass of `tokens` tokens and of sampling `sequences` sequences of `length`
        (by default `tokens`) tokens.

        A sleeping server uses hardly any memory. On a CPU, memory from sampling and other passes isn't
        available to a pass: the C library keeps it in fragments that rarely fit again.
        """
        training = self.training(tokens)
        serving = self.serving(tokens if length is None else length, sequences)
        if self.on_cpu:
            return training + serving + sum(self.activations(tokens))
        if self.server is None:
            return max(training, self.resting + serving)
        if not self.config.engine.sleep:
            return training + serving
        return max(training + ASLEEP, self.resting + serving)

    def share(self, tokens: int, limit: float, total: float) -> float:
        """The server's share of a GPU's `total` bytes: what the trainer leaves of `limit`."""
        trainer = self.resting if self.config.engine.sleep else self.training(tokens)
        share = (limit - trainer) / total
        if share <= 0:
            raise Refused(
                f"engine.memory: the trainer needs {size(trainer)} of {size(limit)}, so vLLM gets nothing. "
                "What to do: agro train … --fit, engine.sleep = true, or sample in the trainer's process"
            )
        return round(share, 3)

    def longest(self, limit: float, sequences: int, largest: int) -> int:
        """Length in tokens of the longest sequences that fit, in hundreds or `largest`; 0 if none fit."""
        fitting = [t for t in (*range(100, largest, 100), largest) if self.peak(t, sequences) <= limit]
        return max(fitting, default=0)


def engine_settings(config: RunConfig, device: torch.device, *, has_reference: bool) -> EngineConfig:
    """The settings of a run's engine, with the share of the GPU that a server started by it may use.

    `has_reference`: see `Footprint.of`.
    """
    engine, name, train = config.engine, config.policy.model, config.train
    if not engine.starts_server or engine.memory is not None or device.type != "cuda":
        return engine
    if name is None or is_adapter(name):  # it has no shape to count
        return engine
    total = torch.cuda.mem_get_info(device)[1]
    footprint, tokens = Footprint.of(config, has_reference=has_reference), train.micro_tokens
    share = footprint.share(tokens or train.max_length or 2048, total, total)
    return engine.model_copy(update={"memory": share})


def host_memory() -> float:
    """Available bytes of the host's memory; infinity if that is unknown."""
    file = Path("/proc/meminfo")
    match = re.search(r"MemAvailable:\s+(\d+) kB", file.read_text()) if file.exists() else None
    return 1024.0 * int(match[1]) if match else math.inf
