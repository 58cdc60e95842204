"""The parts of a decoding step beside the plain ways: microseconds of CPU, medians of interleaved calls.

python benchmarks/sampling/parts.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from agro.config import Sampler
from agro.engines.draw import draw
from agro.engines.fused import _product

REPEATS = 9


def medians(ways: dict[str, Callable[[], object]]) -> dict[str, int]:
    found: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(REPEATS + 1):
        for name, way in ways.items():
            start = time.process_time()
            way()
            if repeat > 0:
                found[name].append(time.process_time() - start)
    return {name: round(1e6 * statistics.median(seconds)) for name, seconds in found.items()}


def plain_draw(logits: Tensor, uniform: Tensor) -> Tensor:
    mass = logits.sub_(logits.amax(1, keepdim=True)).exp().cumsum(1, dtype=torch.float64)
    return torch.searchsorted(mass, uniform[:, None] * mass[:, -1:], right=True)


def drawing(rows: int, vocabulary: int) -> None:
    z, u = torch.randn(rows, vocabulary), torch.rand(rows, dtype=torch.float64)
    ways = {"sum": lambda: plain_draw(z.clone(), u), "two levels": lambda: draw(z.clone(), u, Sampler())}
    print(f"draw {rows} x {vocabulary}", medians(ways), flush=True)


def product(rows: int, width: int, out: int, dtype: torch.dtype) -> None:
    x, layer = torch.randn(rows, width, dtype=dtype), nn.Linear(width, out, bias=False, dtype=dtype)
    packed = _product([layer], rows)
    ways = {"linear": lambda: linear(x, layer.weight), "packed": lambda: packed(x)}
    print(f"product {dtype} {rows} x {width} x {out}", medians(ways), flush=True)


def attention(dtype: torch.dtype) -> None:
    """One query of 32 rows over 160 positions: 8 heads, 2 of keys and values."""
    queries, keys = torch.randn(32, 8, 1, 64, dtype=dtype), torch.randn(32, 2, 160, 64, dtype=dtype)

    def repeated() -> Tensor:
        each = [keys[:, :, None].expand(32, 2, 4, 160, 64).reshape(32, 8, 160, 64) for _ in "kv"]
        return scaled_dot_product_attention(queries, *each)

    def shared() -> Tensor:
        return scaled_dot_product_attention(queries.view(32, 2, 4, 64), keys, keys)

    print(f"attention {dtype}", medians({"repeated": repeated, "shared": shared}), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    for rows, vocabulary in ((32, 32000), (256, 32000), (64, 152000)):
        drawing(rows, vocabulary)
    for dtype in (torch.float32, torch.bfloat16):
        for rows, width, out in ((16, 256, 768), (64, 256, 768), (64, 512, 2560), (32, 512, 32000)):
            product(rows, width, out, dtype)
        attention(dtype)


if __name__ == "__main__":
    main()
