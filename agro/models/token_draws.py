"""Tokens that are drawn from the distribution of each position, and the numbers that they are drawn by.

A number is a hash of the tokens before a position and of a seed. So both passes of a step draw the same
tokens, in micro-batches of any size, and so do equal beginnings with the same seed.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bits = NDArray[np.uint64]
GAMMA = np.uint64(0x9E3779B97F4A7C15)


def mixed(x: Bits) -> Bits:
    """SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keys(tokens: Tensor, seed: float) -> Bits:
    """[B,T]: for each token a hash of those before it and of the seed; of rows [B,T] of tokens."""
    position = np.arange(1, tokens.shape[1] + 1, dtype=np.uint64)
    parts = mixed(mixed(tokens.numpy().astype(np.uint64) + np.uint64(1)) + GAMMA * position)
    prefix = parts.cumsum(1) - parts
    return mixed(prefix + mixed(np.array([seed], np.float64).view(np.uint64)))


def uniforms(key: Bits, count: int) -> Tensor:
    """[n,count] numbers in [0,1) in float64, of keys [n]."""
    bits = mixed(np.add.outer(key, GAMMA * np.arange(1, count + 1, dtype=np.uint64)))
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


class TokenDraws:
    """The tokens that [n,K] targets fall on, found as the masses of tiles come by, in order.

    `targets` are numbers from 0 to the total mass of their position.
    """

    def __init__(self, targets: Tensor) -> None:
        self.targets = targets
        self.tokens = torch.full_like(targets, -1, dtype=torch.long)
        self.values = torch.zeros_like(targets)
        self.reached = torch.zeros_like(targets[:, :1])

    def add(self, mass: Tensor, x: Tensor, tile: slice) -> None:
        """A tile's masses and values x, [n,v]. What rounding leaves beyond the last tile falls on its end."""
        ends = self.reached + mass.cumsum(1, dtype=torch.float64)
        column = torch.searchsorted(ends, self.targets, right=True).clamp(max=mass.shape[1] - 1)
        here = self.targets >= self.reached
        self.tokens = torch.where(here, tile.start + column, self.tokens)
        self.values = torch.where(here, x.gather(1, column).double(), self.values)
        self.reached = ends[:, -1:].contiguous()


def add_counts(d: Tensor, tokens: Tensor, factor: Tensor, tile: slice) -> None:
    """Add `factor` [n,1] to d [n,v], in place, for each of the drawn tokens [n,K] that is in the tile."""
    in_tile = (tokens >= tile.start) & (tokens < tile.stop)
    column = (tokens - tile.start).clamp(0, d.shape[1] - 1)
    d.scatter_add_(1, column, factor * in_tile.to(d.dtype))
