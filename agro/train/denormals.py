"""Numbers below 1e-38 in float32 count as 0 while gradients are computed and applied.

Weights π/π_ref of improbable responses leave such numbers, with which a processor works several times slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def denormals_as_zero() -> Iterator[None]:
    """Flush denormal numbers in this thread, on a CPU that can; a decorator too.

    Not longer: rewards and records keep all of their bits.
    """
    before = _flushed()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def _flushed() -> bool:
    """torch has no function for it."""
    return float("1e-310") * 0.5 == 0
