"""Counter-based sampling noise: a function of (seed, response, position), independent of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniforms(
    seed: int, responses: Sequence[int], count: int, first: Sequence[int] | int = 0
) -> NDArray[np.float64]:
    """[R,count] numbers in [0,1) for positions first … first+count-1 of each response.

    `first` is one number, or [R]. SplitMix64 (Steele, Lea and Flood 2014) is applied three times: to the
    seed, then the response, then the position. 51 bits are used: u·x rounds to less than x for every float64
    x, so an inverse CDF never exceeds the last token.
    """
    of_seed = _mix(np.array([seed % 2**64], dtype=np.uint64) + _GAMMA)
    of_response = _mix(of_seed + _GAMMA * (np.array(responses, dtype=np.uint64) + np.uint64(1)))
    places: NDArray[np.uint64] = np.add.outer(np.array(first), np.arange(1, count + 1)).astype(np.uint64)
    bits = _mix(of_response[:, None] + _GAMMA * places)
    return (bits >> np.uint64(13)).astype(np.float64) * 2.0**-51


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
