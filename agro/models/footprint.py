"""The memory of a run: bytes that are always there, and those that a pass or sampling adds.

What is always there, and what a token saves for the backward pass, is measured of a run that is loaded
(`agro.api.plan`). Of one that isn't it is counted from the shape of its model (`Footprint.of`): on torch's
`meta` device a model has shapes and no numbers. What isn't tensors is then assumed (`CONTEXT`, `SERVER`,
`ASLEEP`): nothing of it was measured, there was no GPU.
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
from agro.models.logprobs import KEPT, TILE
from agro.models.pretrained import context_of, parameters, without_randomness

# Of Qwen3: hidden states, inner width, layers, heads, whether the output layer is the embedding.
SIZES = {
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12288, 36, 32, False),
    "14B": (5120, 17408, 40, 40, False),
}
NF4, NF4_SERVED = 0.5 + 1 / 64 + 4 / 64 / 256, 0.5 + 4 / 64  # bytes of a weight; vLLM's scales are float32
CONTEXT, SERVER, ASLEEP = 0.7e9, 2.5e9, 1.5e9  # of CUDA, of vLLM besides weights and cache, while it sleeps
SPARE = 1.05  # times the tensors: memory is allocated in blocks
BACKWARD = 1.25  # what a layer that goes backward has, in what it saves, if all of that is made again
COUNTED = 16  # tokens of the pass


@dataclass(frozen=True)
class Shape:
    """What a model's configuration tells."""

    text: Any  # of the language model
    context: int  # tokens
    weights: int
    packed: int  # of them in the linear layers that 4 bits take
    widest: int  # of the largest of these layers
    trained: int
    saved: float  # bytes of a token, in one layer

    def stored(self, policy: PolicyConfig, each: float) -> float:
        """Bytes of the weights; `each`: of one that is quantized."""
        if policy.quantize is None:
            return self.weights * itemsize(policy)
        return self.packed * each + (self.weights - self.packed) * 2


@cache
def shape(name: str, lora: LoRA | None, dtype: str) -> Shape:
    """Of a size of `SIZES`, a folder with a config.json or a model of the hub; `Refused` for another."""
    model = on_meta(name, dtype)
    text, head = model.config.get_text_config(), model.get_output_embeddings()
    linear = [m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    weights, trained, saved = parameters(model), [], []
    for layers in (1, 2):  # these tell what a layer has; the others are taken to be alike
        part = on_meta(name, dtype, layers)
        if lora is not None:
            adapted(part, "", lora.model_copy(update={"start": None, "merge": False}))
        trained.append(sum(p.numel() for p in part.parameters() if p.requires_grad))
        with saved_for_backward(part) as kept:
            states_on_meta(part, COUNTED)
        saved.append(sum(kept.values()) / COUNTED)
    adapter = trained[0] + (text.num_hidden_layers - 1) * (trained[1] - trained[0])
    trains = weights if lora is None else adapter
    return Shape(text, context_of(model), weights, sum(linear), max(linear), trains, saved[1] - saved[0])


def shape_of(policy: PolicyConfig) -> Shape:
    assert policy.model is not None
    return shape(policy.model, policy.lora, "float32" if policy.dtype == "float32" else "bfloat16")


def on_meta(name: str, dtype: str, layers: int | None = None) -> Any:
    """A causal language model without numbers, with all of its layers or the first ones."""
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
            known = f"{', '.join(SIZES)} or a model with a config.json"
            raise Refused(f"policy.model: {name}: expected {known}: {error}") from None
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
    mask = ids.new_empty((1, 1, 1, 0))  # which transformers doesn't read
    found = model.base_model(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)
    states: Tensor = found.last_hidden_state
    return states


def _attend(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> tuple[Tensor, None]:
    """Flash attention, which saves what the kernels of a GPU do; on `meta` torch would choose another."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, 0.0, True)[0].transpose(1, 2).contiguous(), None


@contextmanager
def saved_for_backward(model: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes that autograd saves, by storage, without the model's weights."""
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
    """Bytes of a number in a pass."""
    return 4 if policy.dtype == "float32" else 2


def optimized(train: TrainConfig, trained: int, trained_bytes: int) -> float:
    """Bytes of gradients, moments and an average, of so many weights that are trained."""
    moments = 2 * trained if train.optimizer == "adamw_8bit" else 2 * trained_bytes
    average = 0 if train.weights_average is None else 4 * trained
    return SPARE * (trained_bytes + moments + average)


@dataclass(frozen=True)
class Footprint:
    """Bytes of a run: of the trainer, and of a server beside it on the same GPU."""

    config: RunConfig
    text: Any  # transformers' configuration of the language model
    resting: float  # of the trainer between passes: weights, reference, gradients, moments
    saved: float  # what a token keeps for the backward pass, in one layer
    unpacked: float = 0.0  # of the largest layer of 4 bits, for a product
    server: float | None = None  # without its cache; None: uncounted, as that of a run which is loaded
    on_cpu: bool = False

    @classmethod
    def of(cls, config: RunConfig, *, has_reference: bool) -> Footprint:
        """Counted: nothing is loaded. `has_reference`: whether a phase reads it, so that it is in memory."""
        policy = config.phase(config.phase_names[0]).policy  # whose model and reference all phases share
        reward, model = config.reward, shape_of(policy)
        others, copied = [reward.options.get("path")] if reward.name == "model" else [], 0
        if has_reference and policy.reference_model is None:  # bytes of a trained weight in a frozen copy
            copied = itemsize(policy) if policy.lora is None else 4
        elif has_reference and not policy.reference_is_served:
            others.append(policy.reference_model)
        beside = sum(shape(name, None, "bfloat16").weights for name in others if name)
        is_extra = policy.lora is not None or policy.dtype == "mixed"  # an adapter, or copies: in float32
        each = 4 if is_extra else itemsize(policy)  # bytes of a weight that is trained
        weights = SPARE * (model.stored(policy, NF4) + (is_extra * each + copied) * model.trained)
        state = optimized(config.train, model.trained, each * model.trained)
        server = None
        if config.engine.starts_server:  # with two adapters in bfloat16
            server = SERVER + model.stored(policy, NF4_SERVED) + 4 * model.trained
        return cls(
            config,
            model.text,
            resting=CONTEXT + beside * itemsize(policy) + weights + state,
            saved=model.saved,
            unpacked=2 * model.widest if policy.quantize else 0,
            server=server,
        )

    def activations(self, tokens: int) -> tuple[float, float]:
        """Bytes of a pass that wait for the backward pass, and what a layer has besides while it goes
        backward."""
        layer, layers, train = self.saved * tokens, self.text.num_hidden_layers, self.config.train
        if "activations" in train.offload:
            return 0.0, BACKWARD * layer
        if train.gradient_checkpointing:
            inputs = layers * tokens * self.text.hidden_size * itemsize(self.config.policy)
            return inputs, BACKWARD * layer
        return layers * layer, layer

    def training(self, tokens: int) -> float:
        """Bytes of the trainer in a pass of so many tokens."""
        waiting, layer = self.activations(tokens)
        vocabulary: int = self.text.vocab_size
        tiles = 4 * self.config.policy.chunk * min(TILE, vocabulary)
        logits = 4 * (min(KEPT, tokens * vocabulary) + tiles)
        return self.resting + SPARE * (waiting + max(layer + self.unpacked, logits))

    def serving(self, tokens: int, sequences: int) -> float:
        """Bytes of what samples so many sequences at once: of the server, or of the trainer's own process."""
        text = self.text
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        numbers: int = 2 * text.num_hidden_layers * heads * width * tokens * sequences  # keys and values
        logits: int = 8 * sequences * text.vocab_size  # float32: to draw from, and their exponentials
        if self.server is not None:
            return self.server + 2 * numbers
        return SPARE * (itemsize(self.config.policy) * numbers + logits)

    def peak(self, tokens: int, sequences: int, length: int | None = None) -> float:
        """The most bytes at once, of a pass of so many tokens, and of so many sequences that are sampled, of
        `length` tokens, or as many.

        A server that sleeps has hardly any while the trainer trains. On a CPU memory that sampling and other
        passes used isn't there for a pass: the C library keeps it in pieces that seldom fit again.
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
        """Of a GPU's `total` bytes, for the server: what the trainer leaves of `limit` then."""
        trainer = self.resting if self.config.engine.sleep else self.training(tokens)
        left = (limit - trainer) / total
        if left <= 0:
            raise Refused(
                f"engine.memory: the trainer needs {size(trainer)} of {size(limit)}, and vLLM gets nothing. "
                "What to do: agro train … --fit, engine.sleep = true, or sample in the trainer's process"
            )
        return round(left, 3)

    def longest(self, limit: float, sequences: int, most: int) -> int:
        """Tokens of the longest sequences that fit, in hundreds or `most`; 0 where none do."""
        fitting = [t for t in (*range(100, most, 100), most) if self.peak(t, sequences) <= limit]
        return max(fitting, default=0)


def engine_settings(config: RunConfig, device: torch.device, *, has_reference: bool) -> EngineConfig:
    """Those of a run's engine, with the share of the GPU that a server which it starts may take.

    `has_reference`: as of `Footprint.of`.
    """
    engine, name, train = config.engine, config.policy.model, config.train
    if not engine.starts_server or engine.memory is not None or device.type != "cuda":
        return engine
    if name is None or is_adapter(name):  # no shape of its own
        return engine
    total = torch.cuda.mem_get_info(device)[1]
    found, tokens = Footprint.of(config, has_reference=has_reference), train.micro_tokens or train.max_length
    share = found.share(tokens or 2048, total, total)
    return engine.model_copy(update={"memory": share})


def host_memory() -> float:
    """Bytes of the host that a process could take now; infinity where that is unknown."""
    file = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", file.read_text()) if file.exists() else None
    return 1024.0 * int(found[1]) if found else math.inf
