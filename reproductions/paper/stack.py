"""Many copies of the model, each with weights of its own, in one pass.

A run of a model of 0.2 million parameters spends most of its time between the operations. So the weights of
R runs are rows of one tensor, and each operation is done for all of them. The model is a Llama of one layer:
what its attention reads of a token depends on the token and its place alone, and the rest is computed only
where a token of a response is predicted.

Axes: R runs, B sequences, T tokens, N predicted tokens (the last ones), V vocabulary, H width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

from agro.models.policy import Policy

_LAYER = "model.layers.0."


class DrawnGroups(NamedTuple):
    """Responses, and the log-probs that their tokens were drawn with; both 0 after the end."""

    tokens: Tensor  # [R,B,N]
    logp: Tensor  # [R,B,N]
    mask: Tensor  # [R,B,N] the end token and those before it


class Stack:
    """The architecture. Weights are arguments, [R,P]: those of `policy.weights()`, one after the other."""

    def __init__(self, policy: Policy, prompt: int, length: int) -> None:
        """`prompt`: tokens of each prompt; `length`: of a response, at most."""
        config = policy.model.config
        assert config.model_type == "llama"
        assert config.num_hidden_layers == 1
        assert config.tie_word_embeddings
        self.shapes = {name: tuple(weight.shape) for name, weight in policy.weights().items()}
        self.heads, self.width, self.eps = config.num_attention_heads, config.hidden_size, config.rms_norm_eps
        self.prompt, self.length, self.eos = prompt, length, policy.eos_ids[0]
        places = torch.arange(prompt + length)[None]
        turn = policy.model.base_model.rotary_emb(torch.zeros(1), places)
        self.cos, self.sin = (angle[0] for angle in turn)  # [T,H/heads]
        self.before = torch.ones(length, prompt + length - 1).tril(prompt - 1).bool()

    def flat(self, weights: Mapping[str, Tensor]) -> Tensor:
        """[P] of one model."""
        return torch.cat([weights[name].detach().flatten() for name in self.shapes])

    def embedding(self, weights: Tensor) -> Tensor:
        """[R,P] -> [R,V,H], which is the head too."""
        return self._named(weights)["model.embed_tokens.weight"]

    def logits(self, weights: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[R,P], [R,B,T] -> for the responses' tokens the logits [R,B,N,V] and hidden states [R,B,N,H]."""
        w, n = self._named(weights), self.length
        read = tokens[:, :, :-1]
        table = self._table(w)
        x, q = (_look_up(table[key], read[:, :, -n:]) for key in ("x", "q"))
        k, v = (self._split(_look_up(table[key], read)) for key in ("k", "v"))
        q = self._turned(self._split(q), slice(self.prompt - 1, self.prompt + n - 1))
        k = self._turned(k, slice(0, k.shape[3]))
        found = scaled_dot_product_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), self.before)
        found = found.transpose(1, 2).reshape(x.shape)
        return self._ends(w, x, found)

    @torch.no_grad()
    def draw(self, weights: Tensor, prompts: Tensor, uniform: Tensor) -> DrawnGroups:
        """[R,P], [R,B,prompt], [R,B,N] uniform numbers -> responses at temperature 1."""
        w = self._named(weights)
        n, table = uniform.shape[2], self._table(w)
        k, v = (self._split(_look_up(table[key], prompts[:, :, :-1])) for key in ("k", "v"))
        k = self._turned(k, slice(0, self.prompt - 1))
        token, tokens, logp = prompts[:, :, -1:], [], []
        for i in range(n):
            place = slice(self.prompt - 1 + i, self.prompt + i)
            x = _look_up(table["x"], token)
            q, own_k, own_v = (self._split(_look_up(table[key], token)) for key in ("q", "k", "v"))
            k = torch.cat([k, self._turned(own_k, place)], 3)
            v = torch.cat([v, own_v], 3)
            q = self._turned(q, place)
            found = scaled_dot_product_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
            logits, _ = self._ends(w, x, found.transpose(1, 2).reshape(x.shape))
            of_all = logits[:, :, 0].log_softmax(-1)
            below = of_all.exp().cumsum(-1)
            below = below / below[:, :, -1:]
            token = (below <= uniform[:, :, i, None]).sum(-1, keepdim=True).clamp(max=of_all.shape[-1] - 1)
            tokens.append(token)
            logp.append(of_all.gather(2, token))
        drawn = torch.cat(tokens, 2)
        ended = (drawn == self.eos).cumsum(2) - (drawn == self.eos).long()
        mask = ended == 0
        return DrawnGroups(drawn.where(mask, 0), torch.cat(logp, 2).where(mask, 0.0), mask)

    def _named(self, weights: Tensor) -> dict[str, Tensor]:
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        parts = weights.split(sizes, 1)
        return {
            name: part.view(-1, *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def _table(self, w: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """[R,V,H] of each token: its embedding, and what attention asks, offers and passes on for it."""
        x = w["model.embed_tokens.weight"]
        normal = self._normal(x, w[_LAYER + "input_layernorm.weight"])
        products = {key: normal @ w[f"{_LAYER}self_attn.{key}_proj.weight"].mT for key in "qkv"}
        return {"x": x, **products}

    def _ends(self, w: Mapping[str, Tensor], x: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
        """[R,B,N,H] embeddings and what attention found -> logits and last hidden states."""
        shape = x.shape
        x, found = x.flatten(1, 2), found.flatten(1, 2)
        x = x + found @ w[_LAYER + "self_attn.o_proj.weight"].mT
        normal = self._normal(x, w[_LAYER + "post_attention_layernorm.weight"])
        gate = silu(normal @ w[_LAYER + "mlp.gate_proj.weight"].mT)
        inner = gate * (normal @ w[_LAYER + "mlp.up_proj.weight"].mT)
        x = x + inner @ w[_LAYER + "mlp.down_proj.weight"].mT
        hidden = self._normal(x, w["model.norm.weight"])
        logits = hidden @ w["model.embed_tokens.weight"].mT
        return logits.view(*shape[:3], -1), hidden.view(shape)

    def _normal(self, x: Tensor, weight: Tensor) -> Tensor:
        normal: Tensor = rms_norm(x, x.shape[-1:], None, self.eps)
        return normal * weight[:, None]

    def _split(self, x: Tensor) -> Tensor:
        """[R,B,T,H] -> [R,B,heads,T,H/heads]"""
        heads: Tensor = x.unflatten(3, (self.heads, -1))
        return heads.transpose(2, 3)

    def _turned(self, x: Tensor, places: slice) -> Tensor:
        """Queries or keys with the rotation of their places."""
        first, second = x.chunk(2, -1)
        swapped = torch.cat([-second, first], -1)
        turned: Tensor = x * self.cos[places] + swapped * self.sin[places]
        return turned


def _look_up(table: Tensor, tokens: Tensor) -> Tensor:
    """[R,V,H], [R,B,T] -> [R,B,T,H]"""
    R, V, _ = table.shape
    return embedding(tokens + V * torch.arange(R)[:, None, None], table.flatten(0, 1))
