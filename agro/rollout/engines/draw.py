"""From logits to tokens: truncation, then inversion of the distribution function at a uniform number.

The inversion has two levels: over the sums of blocks of the vocabulary, then within one block. The noise is a
function of (seed, response, position), independent of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from agro.config import SamplerConfig
from agro.models.logprobs import GAMMA, mixed
from agro.types.kept_sets import ALL, Ids

BLOCK = 128  # tokens
_CACHED = 2**19  # logits that are sampled from at once: as many as fit into a core's cache


def draw(logits: Tensor, uniform: Tensor, sampler: SamplerConfig) -> tuple[Tensor, Tensor]:
    """Sample tokens [b]; returns them and their log-probs [b] under the distribution sampled from.

    `logits` [b,V] are overwritten, excluded ones with -inf; `uniform` [b] are float64 numbers in [0,1). A
    greedy choice uses no noise: its distribution is a point mass, its log-prob 0.
    """
    if sampler.temperature == 0:
        tokens = logits.argmax(1)
        return tokens, torch.zeros_like(logits[:, 0])
    rows = max(1, _CACHED // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    chosen, logps = [], []
    for z, u in zip(logits.split(rows), uniform.split(rows)):
        if sampler.temperature != 1:
            z.div_(sampler.temperature)
        truncate(z, sampler)
        z.sub_(z.amax(1, keepdim=True))
        tokens, total = invert(z.exp(), u[:, None])
        chosen.append(tokens[:, 0])
        logps.append((z.gather(1, tokens) - total.log())[:, 0].to(z.dtype))
    return torch.cat(chosen), torch.cat(logps)


def invert(mass: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The first tokens [b,1] at which a row's cumulative mass exceeds `uniform` [b,1] of its total.

    Also returns the totals [b,1]. `mass` [b,V] is at least 0. Blocks are summed in its dtype, all else in
    float64: with float32, a number within about 1e-7 of the boundary between two tokens may select another
    token than a float64 sum over the vocabulary would.
    """
    b, vocabulary = mass.shape
    blocks = pad(mass, (0, -vocabulary % BLOCK)).view(b, -1, BLOCK)
    ends = blocks.sum(2).cumsum(1, dtype=torch.float64)
    total = ends[:, -1:]
    target = uniform * total
    block = torch.searchsorted(ends, target, right=True)
    cumulative = blocks[torch.arange(b, device=mass.device), block[:, 0]].cumsum(1, dtype=torch.float64)
    start = pad(ends, (1, 0)).gather(1, block)
    # Rounding may put the offset beyond the block's mass; then its last token with mass must be selected.
    offset = torch.minimum(target - start, cumulative[:, -1:] * (1 - 2.0**-52))
    return block * BLOCK + torch.searchsorted(cumulative, offset, right=True), total


def kept_sets(logits: Tensor) -> list[Ids]:
    """The ids that truncation kept in each row of `logits` [b,V] after `draw`; `ALL` if it kept all."""
    is_kept = logits > -math.inf
    row, ids = is_kept.nonzero().cpu().numpy().astype(np.int32).T
    sets = np.split(ids, np.searchsorted(row, np.arange(1, len(logits))))
    return [ALL if len(kept) == logits.shape[1] else kept for kept in sets]


def truncate(z: Tensor, sampler: SamplerConfig) -> Tensor:
    """Set logits z [b,V], at the sampling temperature, that top-k, top-p, then min-p exclude to -inf."""
    if 0 < sampler.top_k < z.shape[1]:
        kth = z.topk(sampler.top_k, 1).values[:, -1:]
        z.masked_fill_(z < kth, -math.inf)
    if sampler.top_p < 1:
        ordered, order = z.softmax(1, dtype=torch.float64).sort(dim=1, descending=True, stable=True)
        excluded = ordered.cumsum(1) - ordered >= sampler.top_p  # likelier tokens have enough mass already
        excluded[:, 0] = False
        z.masked_fill_(excluded.scatter(1, order, excluded), -math.inf)
    if sampler.min_p > 0:
        z.masked_fill_(z < z.amax(1, keepdim=True) + math.log(sampler.min_p), -math.inf)
    return z


def uniforms(
    seed: int, responses: Sequence[int], count: int, start: Sequence[int] | int = 0
) -> NDArray[np.float64]:
    """[R,count] numbers in [0,1) for positions start … start+count-1 of each response.

    `start` is one number, or [R]. SplitMix64 is applied three times: to the seed, then the response, then the
    position. 51 bits are used: u·x rounds to less than x for every float64 x, so an inverse CDF never exceeds
    the last token.
    """
    seed_hash = mixed(np.array([seed % 2**64], dtype=np.uint64) + GAMMA)
    response_hash = mixed(seed_hash + GAMMA * (np.array(responses, dtype=np.uint64) + np.uint64(1)))
    positions: NDArray[np.uint64] = np.add.outer(np.array(start), np.arange(1, count + 1)).astype(np.uint64)
    bits = mixed(response_hash[:, None] + GAMMA * positions)
    return (bits >> np.uint64(13)).astype(np.float64) * 2.0**-51
