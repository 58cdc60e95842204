"""Bytes of a run on one GPU, counted from the shape of its model: nothing is loaded.

A model on torch's `meta` device has shapes and no numbers. All of it tells how many weights there are, one
and two of its layers what a layer saves of a token for the backward pass; other layers are taken to be alike.
What isn't tensors is assumed (`CONTEXT`, `SERVER`, `ASLEEP`): nothing of it was measured, there was no GPU.
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

from agro.config import EngineConfig, LoRA, RunConfig, TrainConfig
from agro.errors import Refused
from agro.io.numbers import size
from agro.models.adapters import adapted, is_adapter
from agro.models.logprobs import KEPT, TILE
from agro.models.pretrained import context_of, without_randomness

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


@cache
def shape(name: str, lora: LoRA | None, dtype: str) -> Shape:
    """Of a size of `SIZES`, a folder with a config.json or a model of the hub; `Refused` for another."""
    model = on_meta(name, dtype)
    text, head = model.config.get_text_config(), model.get_output_embeddings()
    linear = [m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    weights, trained, saved = sum(p.numel() for p in model.parameters()), [], []
    for layers in (1, 2):
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
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation="agro_counted"
        )
    without_randomness(model.eval())
    return model


def states_on_meta(model: Any, tokens: int) -> Tensor:
    """[1,T,H] last hidden states of a model on `meta`, without numbers."""
    ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
    mask = ids.new_empty((1, 1, 1, 0))  # which transformers doesn't read
    states: Tensor = model.base_model(
        input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False
    ).last_hidden_state
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


def activations(
    text: Any, saved: float, tokens: int, train: TrainConfig, itemsize: int
) -> tuple[float, float]:
    """Bytes of a pass that wait for the backward pass, and what a layer has besides while it goes backward.
    `saved`: bytes of a token in a layer."""
    layer, layers = saved * tokens, text.num_hidden_layers
    if "activations" in train.offload:
        return 0.0, BACKWARD * layer
    if train.gradient_checkpointing:
        return layers * tokens * text.hidden_size * itemsize, BACKWARD * layer
    return layers * layer, layer


def logits(learned: int, vocabulary: int, chunk: int) -> int:
    """Bytes of what log-probs of so many tokens keep, and of tiles."""
    return 4 * (min(KEPT, learned * vocabulary) + 4 * chunk * min(TILE, vocabulary))


def cached(text: Any, itemsize: int) -> int:
    """Bytes of a token's keys and values."""
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    count: int = 2 * text.num_hidden_layers * heads * width * itemsize
    return count


@dataclass(frozen=True)
class Footprint:
    """Of a run: the trainer's memory, and beside it a server's, if the run starts one."""

    config: RunConfig
    shape: Shape
    others: float  # of a reference and a reward's model of their own

    @classmethod
    def of(cls, config: RunConfig) -> Footprint:
        policy, reward = config.policy, config.reward
        dtype = "float32" if policy.dtype == "float32" else "bfloat16"
        others = [] if policy.reference_is_served else [policy.reference_model]
        others += [reward.options.get("path")] if reward.name == "model" else []
        beside = [shape(name, None, dtype).weights for name in others if name]
        assert policy.model is not None
        return cls(
            config, shape(policy.model, policy.lora, dtype), sum(beside) * getattr(torch, dtype).itemsize
        )

    @property
    def itemsize(self) -> int:
        """Bytes of a number in a pass."""
        return 4 if self.config.policy.dtype == "float32" else 2

    def weights(self, each: float) -> float:
        """Bytes of the model's weights; `each`: of one that is quantized."""
        model = self.shape
        if self.config.policy.quantize is None:
            return model.weights * self.itemsize
        return model.packed * each + (model.weights - model.packed) * 2

    @property
    def gradients(self) -> float:
        """Bytes of the gradients of what is trained."""
        return 4.0 * self.shape.trained

    @property
    def resting(self) -> float:
        """Bytes of the trainer while others sample: weights, moments and reference."""
        trained, train = self.shape.trained, self.config.train
        moments = 2 if train.optimizer == "adamw_8bit" else 8
        state = trained * (moments + 4 * (2 if self.config.policy.lora else 1))
        return CONTEXT + self.others + SPARE * (self.weights(NF4) + state)

    def training(self, tokens: int) -> float:
        """Bytes of the trainer in a pass of so many tokens."""
        text, policy = self.shape.text, self.config.policy
        waiting, layer = activations(text, self.shape.saved, tokens, self.config.train, self.itemsize)
        if policy.quantize is not None:
            layer += 2 * self.shape.widest  # unpacked for a product
        largest = max(layer, logits(tokens, text.vocab_size, policy.chunk))
        return self.resting + SPARE * (waiting + largest + self.gradients)

    def serving(self, tokens: int, sequences: int) -> float:
        """Bytes of what samples so many sequences at once: a server, or the trainer's own process."""
        is_served = self.config.engine.starts_server
        held = cached(self.shape.text, 2 if is_served else self.itemsize) * tokens * sequences
        if not is_served:
            return float(SPARE * (held + 8 * sequences * self.shape.text.vocab_size))
        return SERVER + self.weights(NF4_SERVED) + 4 * self.shape.trained + held  # two adapters in bfloat16

    def peak(self, tokens: int, sequences: int) -> float:
        """The most bytes at once. A server that sleeps has hardly any while the trainer trains."""
        training, serving = self.training(tokens), self.serving(tokens, sequences)
        if not self.config.engine.starts_server:
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


def engine_settings(config: RunConfig, device: torch.device) -> EngineConfig:
    """Those of a run's engine, with the share of the GPU that a server which it starts may take."""
    engine, name, train = config.engine, config.policy.model, config.train
    if not engine.starts_server or engine.memory is not None or device.type != "cuda":
        return engine
    if name is None or is_adapter(name):  # no shape of its own
        return engine
    total = torch.cuda.mem_get_info(device)[1]
    share = Footprint.of(config).share(train.micro_tokens or train.max_length or 2048, total, total)
    return engine.model_copy(update={"memory": share})


def host_memory() -> float:
    """Bytes of the host that a process could take now; infinity where that is unknown."""
    file = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", file.read_text()) if file.exists() else None
    return 1024.0 * int(found[1]) if found else math.inf
