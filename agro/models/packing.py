"""Packs sequences into one pass without padding, and computes each common prefix once.

In a causal model a hidden state depends only on its own and earlier tokens, so sequences with a common prefix
(the responses to a prompt, the turns of an episode, prompts with the same instructions) share its states. All
layers except attention compute each position independently, so they get the N distinct positions of a pass as
one row. Attention gets queries, keys and values as padded sequences, [B,T], copied to where they are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from agro.models.logprobs import Head

if TYPE_CHECKING:
    from transformers.cache_utils import DynamicCache

NAME = "agro_packed"  # the attention function's name
WORTH = 0.9  # largest share of distinct among padded positions at which packing saves time


class PackedRows(NamedTuple):
    """The distinct positions of B sequences."""

    number: Tensor  # [B,T] number of the position, 0 … N-1; arbitrary in the padding
    source: Tensor  # [N] index into B·T of one occurrence of the position

    @classmethod
    def of(cls, tokens: Tensor, lengths: Tensor) -> PackedRows:
        """Find the distinct positions of right-padded tokens [B,T] of lengths [B], on the CPU."""
        ids, counts = tokens.numpy(), lengths.tolist()
        rows = [row[:count].tolist() for row, count in zip(ids, counts, strict=True)]
        index, source = np.zeros(ids.shape, np.int64), []
        previous, total = None, 0
        for row in sorted(range(len(rows)), key=rows.__getitem__):  # so neighbors share prefixes
            begin = 0
            if previous is not None:
                begin = min(counts[previous], counts[row])
                differing = np.flatnonzero(ids[previous, :begin] != ids[row, :begin])
                begin = int(differing[0]) if len(differing) else begin
                index[row, :begin] = index[previous, :begin]
            columns = np.arange(begin, counts[row])  # positions that no previous row has
            index[row, begin : counts[row]] = total + columns - begin
            source.append(row * ids.shape[1] + columns)
            previous, total = row, total + len(columns)
        return cls(torch.from_numpy(index), torch.from_numpy(np.concatenate(source)))

    @property
    def pays(self) -> bool:
        return len(self.source) <= WORTH * self.number.numel()

    def spread(self, x: Tensor) -> Tensor:
        """[N,…] -> [B,T,…]."""
        copied: Tensor = x.index_select(0, self.number.flatten()).unflatten(0, self.number.shape)
        return copied

    def gather(self, x: Tensor) -> Tensor:
        """[B,T,…] -> [N,…]."""
        return x.flatten(0, 1).index_select(0, self.source)


def last_hidden(model: Any, tokens: Tensor, lengths: Tensor, *, packs: bool) -> Tensor:
    """[B,T], [B] on the CPU -> [B,T,H] last hidden states of right-padded sequences, packed if it pays.

    Causal attention doesn't use later tokens, so padding needs no mask, and attention without a mask has the
    fastest kernel. For float64 weights they are always padded: transformers' norms round to float32, so the
    gradients of a shared position would differ by more than float64's rounding.
    """
    states, packed = _states(model, tokens, lengths, packs)
    return states if packed is None else packed.spread(states[0])


def read_prompts(model: Any, tokens: Tensor, lengths: Tensor, *, packs: bool) -> ReadPrompts:
    """Compute the keys and values of [B,T] right-padded tokens on the CPU, packed if it pays."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache()
    return ReadPrompts(cache, _states(model, tokens, lengths, packs, cache)[1])


class ReadPrompts(NamedTuple):
    """The layers' keys and values of B prompts."""

    cache: DynamicCache
    packed: PackedRows | None

    def at(self, states: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """One layer's keys or values of tokens `places` [R,L] of prompts `rows` [R]: [R,heads,L,width]."""
        if self.packed is None:
            selected = states[rows[:, None], :, places]
        else:
            selected = states[0].transpose(0, 1)[self.packed.number[rows[:, None], places]]
        return selected.transpose(1, 2)


def _states(
    model: Any, tokens: Tensor, lengths: Tensor, packs: bool, cache: DynamicCache | None = None
) -> tuple[Tensor, PackedRows | None]:
    """Last hidden states, and how they are packed, on the model's device.

    They aren't packed if the sequences have too little in common, or if the weights are float64.
    """
    places = torch.arange(tokens.shape[1]).expand(tokens.shape)
    packed = PackedRows.of(tokens, lengths) if packs and model.dtype != torch.float64 else None
    if packed is not None and packed.pays:
        tokens, places = packed.gather(tokens)[None], packed.gather(places)[None]
        packed = PackedRows(*(x.to(model.device, non_blocking=True) for x in packed))
    else:
        packed = None
    tokens, places = (x.to(model.device, non_blocking=True) for x in (tokens, places))
    # A mask of ones, since None makes transformers search for packed sequences. It reads all of the mask to
    # see that it isn't needed, which synchronizes with a GPU. A mask of four dimensions is passed to our
    # attention unread.
    ours = model.config.get_text_config()._attn_implementation == NAME
    output = model.base_model(
        input_ids=tokens,
        attention_mask=tokens.new_empty((1, 1, 1, 0)) if ours else torch.ones_like(tokens),
        position_ids=places,
        past_key_values=cache,
        use_cache=cache is not None,
        **({} if packed is None else {"packed": packed}),
    )
    states: Tensor = output.last_hidden_state
    return states, packed


def kinds_of_cache(model: Any) -> set[type]:
    """The kinds of the layers' caches."""
    from transformers.cache_utils import DynamicCache

    return {type(layer) for layer in DynamicCache(config=model.config).layers}


def can_pack(model: Any, row: Tensor, allowed: float) -> bool:
    """Whether packing changes the log-probs of two sequences with a common prefix by at most `allowed`.

    `row` is one of them. Attention must cover all earlier tokens and be a replaceable function; if the answer
    is yes, it has been replaced.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.cache_utils import DynamicLayer
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    config = model.config.get_text_config()
    if config._attn_implementation not in ("sdpa", NAME) or not kinds_of_cache(model) <= {DynamicLayer}:
        return False
    row, half = row.cpu(), len(row) // 2
    tokens = torch.stack([row, torch.cat([row[:half], row.flip(0)[half:]])])
    lengths = torch.full((2,), len(row))
    head = Head.of(model)
    config._attn_implementation = NAME
    try:
        padded, packed = (
            head.logits(last_hidden(model, tokens, lengths, packs=packs)).log_softmax(-1)
            for packs in (False, True)
        )
        difference = (packed - padded).abs()
        if torch.finfo(model.dtype).bits <= 16:  # weighted by the model's probabilities
            difference = (difference * padded.exp()).sum(-1).mean()
        alike = bool(difference.max() <= allowed)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        alike = False  # for example, its layers don't pass arguments on to attention
    if not alike:
        config._attn_implementation = "sdpa"
    return alike


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    packed: PackedRows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of [1,heads,N,width] over the sequences -> [1,N,heads,width]; transformers' own if padded.

    An empty mask means no mask.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if mask is not None and not mask.numel():
        mask = None
    if packed is None:
        attended: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        return attended
    padded = (packed.spread(x[0].transpose(0, 1)).transpose(1, 2) for x in (query, key, value))
    states, _ = sdpa_attention_forward(module, *padded, None, **kwargs)
    return packed.gather(states)[None], None
