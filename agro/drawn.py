"""K tokens drawn at each position from q ∝ π^(1/κ), a tile of logits at a time.

They are where uniform numbers fall in the distribution function of q. The numbers are a hash of the tokens
before a position and of a seed. So both passes of a step draw the same tokens, in micro-batches of any size,
and so do equal beginnings with the same seed.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

_GAMMA = -0x61C8864680B583EB  # SplitMix64's constants (Steele, Lea and Flood 2014), as signed numbers
_FIRST, _SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def keys(tokens: Tensor, seed: float) -> Tensor:
    """[B,T] int64: for each token a hash of those before it and of the seed; of rows [B,T] of tokens."""
    place = torch.arange(tokens.shape[1], device=tokens.device)
    parts = _mixed(_mixed(tokens.long() + 1) + _GAMMA * (place + 1))
    before = parts.cumsum(1) - parts
    (bits,) = struct.unpack("<q", struct.pack("<d", seed))
    return _mixed(before + _mixed(torch.tensor(bits, device=tokens.device)))


def uniforms(key: Tensor, count: int) -> Tensor:
    """[n,count] numbers in [0,1) in float64, of keys [n]."""
    number = torch.arange(1, count + 1, device=key.device)
    bits = _shifted(_mixed(key[:, None] + _GAMMA * number), 11)
    return bits.to(torch.float64) * 2.0**-53


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """A logical shift to the right: int64 tensors shift their sign in."""
    out: Tensor = (x >> by) & (2 ** (64 - by) - 1)
    return out


class Draws:
    """The tokens that [n,K] targets fall on, found as the masses of tiles come by, in order.

    `targets` are numbers from 0 to the total mass of their position.
    """

    def __init__(self, targets: Tensor) -> None:
        self.targets = targets
        self.tokens = torch.full_like(targets, -1, dtype=torch.long)
        self.of_x = torch.zeros_like(targets)
        self.reached = torch.zeros_like(targets[:, :1])

    def add(self, mass: Tensor, x: Tensor, tile: slice) -> None:
        """A tile's masses and values x, [n,v]. What rounding leaves beyond the last tile falls on its end."""
        ends = self.reached + mass.cumsum(1, dtype=torch.float64)
        place = torch.searchsorted(ends, self.targets, right=True).clamp(max=mass.shape[1] - 1)
        here = self.targets >= self.reached
        self.tokens = torch.where(here, tile.start + place, self.tokens)
        self.of_x = torch.where(here, x.gather(1, place).double(), self.of_x)
        self.reached = ends[:, -1:].contiguous()


def add_counts(d: Tensor, tokens: Tensor, factor: Tensor, tile: slice) -> None:
    """Add `factor` [n,1] to d [n,v], in place, for each of the drawn tokens [n,K] that is in the tile."""
    inside = (tokens >= tile.start) & (tokens < tile.stop)
    place = (tokens - tile.start).clamp(0, d.shape[1] - 1)
    d.scatter_add_(1, place, factor * inside.to(d.dtype))
