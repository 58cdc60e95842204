"""The parts of a decoding step beside the plain ways: microseconds of CPU, medians of interleaved calls.

python benchmarks/sampling/parts.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from agro.config import SamplerConfig
from agro.rollout.engines.draw import draw
from agro.rollout.engines.fused import _attended, _Product

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
    ways = {
        "sum": lambda: plain_draw(z.clone(), u),
        "two levels": lambda: draw(z.clone(), u, SamplerConfig()),
    }
    print(f"draw {rows} x {vocabulary}", medians(ways), flush=True)


def product(rows: int, width: int, out: int, dtype: torch.dtype) -> None:
    """Of all rows of a batch, and of three quarters and a quarter of them."""
    layer = nn.Linear(width, out, bias=False, dtype=dtype)
    packed = _Product([layer], rows)
    for live in (rows, 3 * rows // 4, rows // 4):
        x = torch.randn(live, width, dtype=dtype)
        ways = {"linear": partial(linear, x, layer.weight), "packed": partial(packed, x)}
        print(f"product {dtype} {live} of {rows} x {width} x {out}", medians(ways), flush=True)


def few_columns(rows: int, columns: int) -> None:
    """Attention of a short response: 8 heads of 32, in buffers of 90 columns."""
    queries = torch.randn(rows, 8, 1, 32)
    keys, values = (torch.randn(rows, 8, 90, 32)[:, :, :columns] for _ in "kv")
    mask = torch.zeros(rows, 1, 1, columns)
    ways = {
        "kernel": lambda: scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=1.0),
        "two products": lambda: _attended(queries, keys, values, mask, 1.0),
    }
    print(f"attention {rows} rows, {columns} columns", medians(ways), flush=True)


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
    for columns in (30, 60, 90):
        few_columns(64, columns)


if __name__ == "__main__":
    main()
