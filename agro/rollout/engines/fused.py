"""A decoding step of Llama, Mistral, Qwen2 and Qwen3 models, in fewer operations than transformers' forward.

It computes the same, up to rounding: products with one input become one product, weights are copied into a
layout for few rows if torch has one, and keys and values that several heads share aren't repeated for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers.activations import SiLUActivation
from transformers.cache_utils import Cache, DynamicLayer

from agro.models.logprobs import Head, sum_dtype
from agro.models.packing import kinds_of_cache
from agro.models.policy import Policy

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
FEW, LARGE = 4, 1 << 18  # rows and weights from which oneDNN is faster than plain products in float32
_PLAIN = (nn.Linear, nn.Embedding, nn.ModuleList, SiLUActivation)


def is_fusable(policy: Policy) -> bool:
    """Whether the model is an unmodified one of a family: no adapters, hooks, other layers or windows."""
    base, head = policy.model.base_model, Head.of(policy.model)
    home = type(base).__module__
    if home not in {f"transformers.models.{name}.modeling_{name}" for name in _FAMILIES}:
        return False
    if head.scale != 1 or head.cap is not None:
        return False
    if not kinds_of_cache(base) <= {DynamicLayer}:
        return False
    if any(parameter.dtype != policy.dtype for parameter in base.parameters()):
        return False
    return base.config.hidden_act == "silu" and all(_is_plain(module, home) for module in base.modules())


def _is_plain(module: nn.Module, home: str) -> bool:
    """Whether a module is a layer of the file `home` or of torch, without hooks or a forward of its own."""
    is_known = type(module) in _PLAIN or type(module).__module__ == home
    hooks = module._forward_hooks or module._forward_pre_hooks
    return is_known and not hooks and "forward" not in vars(module)


class FusedStep:
    """A step on a copy of the current weights: construct a new one when they change."""

    @torch.no_grad()
    def __init__(self, policy: Policy, rows: int) -> None:
        """`rows`: the most rows of a step; fewer are possible."""
        base = policy.model.base_model
        self.embedding: Tensor = base.embed_tokens.weight
        self.rotary = base.rotary_emb
        self.layers = [_FusedLayer(layer, rows) for layer in base.layers]
        self.norm = base.norm
        head = policy.model.get_output_embeddings()
        self.head = _Product([head], rows)
        self.dtype = sum_dtype(head.weight)

    def logits(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        """[b] tokens at `positions` [b] -> [b,V] float32 logits; adds their keys and values to `cache`.

        `mask` [b,L] is added to attention: 0 in the columns that a row attends to, else -inf. With float64
        weights the logits are float64.
        """
        x = self.embedding[tokens]
        cos, sin = self.rotary(x, positions[:, None])
        half = sin.shape[2] // 2
        sin[:, :, :half].neg_()  # rotating swaps the halves of a head, and negates the second
        mask = mask[:, None, None]
        for layer, cached in zip(self.layers, cache.layers, strict=True):
            layer.attend(x, (cos, sin), mask, cached)
            layer.feed(x)
        return self.head(_normal(self.norm, x)).to(self.dtype)


class _FusedLayer:
    def __init__(self, layer: Any, rows: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.norms = layer.input_layernorm, layer.post_attention_layernorm
        self.head_norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.width, self.scale = attention.head_dim, attention.scaling
        self.shared = attention.num_key_value_groups  # heads with the same keys and values
        self.read = _Product([attention.q_proj, attention.k_proj, attention.v_proj], rows)
        self.write = _Product([attention.o_proj], rows)
        self.gate_up = _Product([mlp.gate_proj, mlp.up_proj], rows)
        self.down = _Product([mlp.down_proj], rows)

    def attend(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor, cache: Any) -> None:
        """Add to `x` [b,H] the output of attention."""
        b, half = len(x), self.width // 2
        heads = self.read(_normal(self.norms[0], x)).view(b, -1, self.width)
        count = heads.shape[1] // (self.shared + 2)  # number of keys, and of values
        values = heads[:, -count:]
        rotated = heads[:, :-count]  # queries and keys
        if self.head_norms[0] is not None:
            queries, keys = rotated[:, :-count], rotated[:, -count:]
            rotated = torch.cat(
                [_normal(norm, part) for norm, part in zip(self.head_norms, (queries, keys))], 1
            )
        cos, sin = rotation
        swapped = torch.cat([rotated[..., half:], rotated[..., :half]], 2)
        rotated = torch.addcmul(rotated * cos, swapped, sin)
        keys, values = cache.update(rotated[:, -count:, None], values[:, :, None])
        queries = rotated[:, :-count].reshape(b, count, self.shared, self.width)
        x.add_(self.write(_attended(queries, keys, values, mask, self.scale).reshape(b, -1)))

    def feed(self, x: Tensor) -> None:
        """Add to `x` [b,H] the output of the gated layer."""
        gate, up = self.gate_up(_normal(self.norms[1], x)).chunk(2, 1)
        x.add_(self.down(silu(gate).mul_(up)))


def _attended(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """[b,h,S,W], [b,h,L,W] twice, [b,1,1,L] -> [b,h,S,W].

    For a few dozen columns two products take three quarters of the kernel's time, and for many as long. In
    half precision they would round in between.
    """
    if queries.dtype not in (torch.float32, torch.float64):
        return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    q, k, v = (x.flatten(0, 1) for x in (queries, keys, values))  # views: all heads have one stride
    scores = torch.bmm(q, k.transpose(1, 2)).view(*queries.shape[:3], -1)
    shares = scores.mul_(scale).add_(mask).softmax(-1)
    return torch.bmm(shares.flatten(0, 1), v).view_as(queries)


def _normal(norm: Any, x: Tensor) -> Tensor:
    return rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


class _Product:
    """x [b,H] -> the concatenated outputs [b,…] of linear layers.

    As in `torch.compile`, weights are packed, at their first use. In float32, MKL's packing is for exactly
    `rows` rows; oneDNN's is slower there, and faster for fewer rows of large weights.
    """

    def __init__(self, layers: Sequence[nn.Linear], rows: int) -> None:
        self.rows = rows
        self.weight: Tensor = layers[0].weight
        self.bias: Tensor | None = layers[0].bias
        if len(layers) > 1:
            self.weight = torch.cat([layer.weight for layer in layers])
            self.bias = None if self.bias is None else torch.cat([layer.bias for layer in layers])
        on_cpu = self.weight.device.type == "cpu"
        is_half = on_cpu and self.weight.dtype == torch.bfloat16
        self.has_mkl = on_cpu and self.weight.dtype == torch.float32 and torch.backends.mkl.is_available()
        is_large = self.has_mkl and self.weight.numel() >= LARGE
        self.has_onednn = (is_large or is_half) and torch.backends.mkldnn.is_available()
        if is_half:  # oneDNN refuses to pack it on a CPU without AVX-512
            self.has_onednn = self.has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.fewest = FEW if self.has_mkl else 1

    def __call__(self, x: Tensor) -> Tensor:
        b, rows = len(x), self.rows
        product: Tensor
        if self.has_mkl and b == rows:
            product = torch.ops.mkl._mkl_linear(x, self.mkl_weight, self.weight, self.bias, rows)
        elif self.has_onednn and b >= self.fewest:
            product = torch.ops.mkldnn._linear_pointwise(x, self.onednn_weight, self.bias, "none", [], "")
        else:
            product = linear(x, self.weight, self.bias)
        return product

    @cached_property
    def mkl_weight(self) -> Tensor:
        packed: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(self.weight, self.rows)
        return packed

    @cached_property
    def onednn_weight(self) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(self.weight, self.rows)
        return packed
