"""What the paper proves, by proved.toml, and where each is measured: these need no runs of a language model.

The sentences about its figures are in `experiments`.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from agro import Batch, objectives


class Statement(NamedTuple):
    text: str
    where: str


PROVED = tuple(
    Statement(text, where)
    for text, where in tomllib.loads(Path(__file__).with_name("proved.toml").read_text("utf-8")).items()
)


@cache
def magnitudes() -> list[Statement]:
    """How gradients grow with the length T, as powers of T, on tokens of π_ref that are independent."""
    lengths, tokens, count = (16, 64, 256, 1024), 8, 200
    torch.manual_seed(0)
    policy_V = torch.randn(tokens).double().log_softmax(0)
    coin = (torch.arange(count) % 2).double()
    sizes: dict[str, list[float]] = {}
    for length in lengths:
        drawn = torch.randint(tokens, (count, length))
        logp, ref = policy_V[drawn], torch.full((count, length), -np.log(tokens)).double()
        slope = one_hot(drawn, tokens).double().sum(1) - length * policy_V.exp()  # of ρ, in the logits

        def of_pairs(
            reward: Tensor, ref: Tensor, average: str, logp: Tensor = logp, slope: Tensor = slope
        ) -> float:
            mask = pad(torch.ones(logp.shape, dtype=torch.bool), (1, 0))
            names = [str(i // 2) for i in range(count)]
            batch = Batch.of(mask=mask, reward=reward, group=names, ref_logp=pad(ref, (1, 0)))
            found = objectives.evaluate("agro", pad(logp, (1, 0)), batch, beta=1.0, average=average)
            each = found.grad[:, 1:2] * slope
            return float((each[::2] + each[1::2]).norm(dim=1).mean())

        of_this = {
            "square": float(((logp - ref).sum(1).abs() * slope.norm(dim=1)).mean()),
            "score": float(slope.norm(dim=1).mean()),
        }
        for average in ("sum", "token"):
            of_this[average] = of_pairs(0 * coin, ref, average)
            of_this[f"{average}'s reward"] = of_pairs(coin, logp, average)
        for name, value in of_this.items():
            sizes.setdefault(name, []).append(value)
    power = {name: np.polyfit(np.log(lengths), np.log(of), 1)[0] for name, of in sizes.items()}
    pair = power["sum"] - power["sum's reward"]
    token = power["token"] - power["token's reward"]
    return [
        Statement(
            "The gradient of ½ρ² grows as T², that of the reward as T",
            f"as T^{power['square']:.2f} and T^{power['score']:.2f}, T from 16 to 1,024, tokens independent",
        ),
        Statement(
            "So β ∼ 1/T, unless log-ratios are averaged over tokens",
            f"the ratio grows as T^{power['square'] - power['score']:.2f}; of eq. 4's pairs, whose "
            f"common part is gone, as T^{pair:.2f}; with the mean over tokens as T^{token:.2f}",
        ),
    ]
