"""From logits to tokens: truncation, and the inverse of the distribution function at a given uniform number."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from agro.config import Sampler


def draw(logits: Tensor, uniform: Tensor, sampler: Sampler) -> tuple[Tensor, Tensor]:
    """Logits [b,V] (overwritten) and numbers in [0,1) [b] float64 -> tokens [b], their log-probs [b] as sampled.

    A greedy choice has no noise: its distribution is a point mass, its log-prob 0.
    """
    if sampler.temperature == 0:
        tokens = logits.argmax(1)
        return tokens, torch.zeros_like(logits[:, 0])
    z = logits.div_(sampler.temperature)
    z = truncate(z, sampler)
    z.sub_(z.amax(1, keepdim=True))
    mass = z.exp().cumsum(1, dtype=torch.float64)
    total = mass[:, -1:]
    tokens = torch.searchsorted(mass, uniform[:, None] * total, right=True)
    return tokens[:, 0], (z.gather(1, tokens) - total.log())[:, 0].to(z.dtype)


def truncate(z: Tensor, sampler: Sampler) -> Tensor:
    """z [b,V] at the sampling temperature, with -inf (in place) where top-k, top-p and min-p, in this order, leave out."""
    if 0 < sampler.top_k < z.shape[1]:
        kth = z.topk(sampler.top_k, 1).values[:, -1:]
        z.masked_fill_(z < kth, -math.inf)
    if sampler.top_p < 1:
        ordered, order = z.softmax(1, dtype=torch.float64).sort(dim=1, descending=True, stable=True)
        out = ordered.cumsum(1) - ordered >= sampler.top_p  # what stands before a token is enough already
        out[:, 0] = False
        z.masked_fill_(out.scatter(1, order, out), -math.inf)
    if sampler.min_p > 0:
        z.masked_fill_(z < z.amax(1, keepdim=True) + math.log(sampler.min_p), -math.inf)
    return z
