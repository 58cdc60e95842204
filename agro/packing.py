"""Sequences in one pass without padding, and with each common beginning computed once.

In a causal model a hidden state depends on the tokens before it alone, so sequences that begin alike (the
responses to a prompt, the turns of an episode, prompts with the same instructions) share states there. All
layers except attention compute one position at a time, so they get the N different positions of a pass as one
row. Attention gets queries, keys and values as padded sequences, [B,T], each copied to where it is needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "agro_packed"  # of the attention; transformers makes no mask for one that it doesn't know
WORTH = 0.9  # share of the padded positions from which copying costs more than it saves


class Packed(NamedTuple):
    """The different positions of B sequences."""

    at: Tensor  # [B,T] number of the position, 0 … N-1; any where the sequence is padded
    first: Tensor  # [N] index into B·T of a sequence that has the position

    @classmethod
    def of(cls, tokens: Tensor, lengths: Tensor) -> Packed:
        """From right-padded tokens [B,T] of lengths [B]."""
        ids, counts = tokens.cpu().numpy(), lengths.tolist()
        rows = [row[:count].tolist() for row, count in zip(ids, counts, strict=True)]
        at, first = np.zeros(ids.shape, np.int64), []
        before, n = -1, 0
        for i in sorted(range(len(rows)), key=rows.__getitem__):  # so neighbors begin alike
            begin = 0
            if before >= 0:
                begin = _shared(ids[before, : counts[before]], ids[i, : counts[i]])
                at[i, :begin] = at[before, :begin]
            added = np.arange(begin, counts[i])
            at[i, begin : counts[i]] = n - begin + added
            first.append(i * ids.shape[1] + added)
            before, n = i, n + len(added)
        both = torch.from_numpy(at), torch.from_numpy(np.concatenate(first))
        return cls(*(x.to(tokens.device) for x in both))

    @property
    def pays(self) -> bool:
        return len(self.first) <= WORTH * self.at.numel()

    def spread(self, x: Tensor) -> Tensor:
        """[N,…] -> [B,T,…]."""
        return x.index_select(0, self.at.flatten()).unflatten(0, self.at.shape)

    def gather(self, x: Tensor) -> Tensor:
        """[B,T,…] -> [N,…]."""
        return x.flatten(0, 1).index_select(0, self.first)


def _shared(a: Any, b: Any) -> int:
    """How many values two arrays begin with alike."""
    count = min(len(a), len(b))
    differing = np.flatnonzero(a[:count] != b[:count])
    return int(differing[0]) if len(differing) else count


def may_pack(model: Any) -> bool:
    """Whether attention is one function that transformers lets us replace, over all tokens before."""
    config = model.config.get_text_config()
    layers = {type(layer) for layer in DynamicCache(config=config).layers}
    return config._attn_implementation == "sdpa" and layers <= {DynamicLayer}


def packed_hidden(model: Any, tokens: Tensor, packed: Packed) -> Tensor:
    """[B,T] -> [B,T,H] last hidden states. Raises some error for models that do more than `may_pack` sees."""
    config = model.config.get_text_config()
    places = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    own = config._attn_implementation
    config._attn_implementation = NAME
    try:
        states = model.base_model(
            input_ids=packed.gather(tokens)[None],
            attention_mask=torch.ones_like(packed.first)[None],
            position_ids=packed.gather(places)[None],
            use_cache=False,
            packed=packed,
        ).last_hidden_state
    finally:
        config._attn_implementation = own
    return packed.spread(states[0])


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, packed: Packed, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of [1,heads,N,width] over the sequences -> [1,N,heads,width]."""
    padded = (packed.spread(x[0].transpose(0, 1)).transpose(1, 2) for x in (query, key, value))
    found, _ = sdpa_attention_forward(module, *padded, None, **kwargs)
    return packed.gather(found)[None], None


AttentionInterface.register(NAME, _attend)
