"""SplitMix64 (Steele, Lea and Flood 2014): hashes of 64 bits, and numbers made of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint64]
GAMMA = np.uint64(0x9E3779B97F4A7C15)


def mixed(x: Bits) -> Bits:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def unit(x: Bits, bits: int) -> NDArray[np.float64]:
    """Numbers in [0,1) of the highest `bits`."""
    return (x >> np.uint64(64 - bits)).astype(np.float64) * 2.0**-bits
