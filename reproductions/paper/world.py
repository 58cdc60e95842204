"""What all runs share, read once: the model, the prompts and the logs as tensors. Many copies of the model,
each with weights of its own, are one pass.

A run of a model of 0.2 million parameters spends most of its time between the operations. So the weights of
R runs are rows of one tensor, and each operation is done for all of them. The model is a Llama of one layer:
what its attention reads of a token depends on the token and its place alone, and the rest is computed only
where a token of a response is predicted.

Axes: R runs, B sequences, T tokens, N predicted tokens (the last ones), V vocabulary, H width.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

from agro.config import PolicyConfig
from agro.models.encoding import Encoder
from agro.models.policy import Policy
from agro.objectives.needs import REWARD, STORED_QUANTILE, Need
from agro.rollout.prompts import load_prompts
from agro.store import Store
from agro.train.collate import StoredValues
from agro.types import Prompt
from reproductions.paper.task import LENGTH, LOGS, Size

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


Item = TypeVar("Item")


class Asked(NamedTuple):
    """Prompts."""

    names: list[str]
    tokens: Tensor  # [M,prompt]
    answers: Tensor  # [M,N] of the right response

    @classmethod
    def of(cls, prompts: Sequence[Prompt], encoder: Encoder) -> Asked:
        tokens = torch.tensor([encoder.checked_prompt(prompt) for prompt in prompts])
        answers = [[*encoder.ids(prompt.columns["answer"]), encoder.eos_ids[0]] for prompt in prompts]
        return cls([prompt.id for prompt in prompts], tokens, torch.tensor(answers))


class Rows(NamedTuple):
    """Samples: of a log, or of one run's update."""

    names: list[str]  # [B] of the prompts
    roles: list[str]  # [B]
    tokens: Tensor  # [B,T] 0 after the end
    mask: Tensor  # [B,N]
    behavior: Tensor  # [B,N] the recorded log-probs
    ref: Tensor  # [B,N] those of the reference; NaN where they aren't needed
    reward: Tensor  # [B]
    staleness: Tensor  # [B] NaN: unknown

    def part(self, at: Sequence[int]) -> Rows:
        """These rows."""
        rows = list(at)
        return Rows(*([field[i] for i in rows] if isinstance(field, list) else field[rows] for field in self))

    def followed_by(self, other: Rows) -> Rows:
        """Both."""
        pairs = zip(self, other, strict=True)
        return Rows(*(a + b if isinstance(a, list) else torch.cat([a, b]) for a, b in pairs))

    def groups(self, needed: Collection[Need]) -> list[list[int]]:
        """The samples to each prompt that an objective can use: one that doesn't know a good response from a
        bad one is given the right ones alone."""
        found: dict[str, list[int]] = {}
        for i, name in enumerate(self.names):
            if self.reward[i] == 1 or not {REWARD, STORED_QUANTILE}.isdisjoint(needed):
                found.setdefault(name, []).append(i)
        return list(found.values())


class World:
    """The task's files, loaded. `logs`: by source; more may be added."""

    def __init__(self, folder: Path, size: Size) -> None:
        policy = Policy.load(PolicyConfig(model=str(folder / "start")))
        self.encoder, self.size = policy.encoder, size
        prompts = load_prompts(folder / "prompts.jsonl")
        self.fresh = Asked.of(prompts, self.encoder)
        self.held_out = Asked.of(load_prompts(folder / "held_out.jsonl"), self.encoder)
        self.stack = Stack(policy, self.fresh.tokens.shape[1], LENGTH + 1)
        self.start = self.stack.flat(policy.weights())[None]
        self.logs = {source: self._read(folder / file) for source, file in LOGS.items()}
        self.values = StoredValues.load(folder / "values.db", {p.id: p.text for p in prompts})

    def _read(self, log: Path) -> Rows:
        with Store.open(log, read_only=True) as store:
            samples = [self.encoder.encode(sample) for sample in store.samples()]
        count, P, N = len(samples), self.stack.prompt, self.stack.length
        tokens = torch.zeros(count, P + N, dtype=torch.long)
        behavior = torch.zeros(count, N)
        mask = torch.zeros(count, N, dtype=torch.bool)
        for i, sample in enumerate(samples):
            assert sample.tokens is not None
            assert sample.behavior_logp is not None
            end = len(sample.tokens)
            tokens[i, :end] = torch.as_tensor(sample.tokens.copy())
            behavior[i, : end - P] = torch.as_tensor(sample.behavior_logp[P:].copy())
            mask[i, : end - P] = True
        reward = torch.tensor([sample.reward or 0.0 for sample in samples], dtype=torch.float64)
        names, ref = [sample.prompt_id for sample in samples], self.reference(tokens, mask)
        staleness = torch.full((count,), torch.nan)
        return Rows(names, ["log"] * count, tokens, mask, behavior, ref, reward, staleness)

    @torch.no_grad()
    def reference(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """[S,T], [S,N] -> [S,N] log-probs of the reference, 0 outside the mask."""
        return self.logp(self.stack.logits(self.start, tokens[None])[0], tokens[None])[0] * mask

    def logp(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """[R,B,N,V], [R,B,T] -> [R,B,N] log-probs of the responses' tokens."""
        chosen = tokens[:, :, self.stack.prompt :, None]
        return logits.log_softmax(-1).gather(3, chosen)[..., 0]


def order(items: Sequence[Item], size: int, *seed: object) -> Iterator[list[Item]]:
    """Epoch by epoch all items in a random order, `size` at a time, without an incomplete rest."""
    size = min(size, len(items))
    for epoch in itertools.count():
        drawn = random.Random("/".join(map(str, (*seed, epoch)))).sample(items, len(items))
        for i in range(0, len(items) - size + 1, size):
            yield drawn[i : i + size]
