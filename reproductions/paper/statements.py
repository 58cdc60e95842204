"""How gradients grow with the length of responses: this needs no runs of a language model.

What the paper proves, and where each is measured, stands in proved.toml; the sentences about its figures are
in `experiments`.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from agro import Batch, objectives


@cache
def magnitudes() -> dict[str, float]:
    """The powers of T, the length, as which gradients grow on independent tokens of π_ref.

    Of ½ρ², of the reward, and their ratio; that of eq. 4's pairs, whose common part is gone, and with means
    over tokens.
    """
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
    return {
        "square": power["square"],
        "reward": power["score"],
        "ratio": power["square"] - power["score"],
        "pairs": power["sum"] - power["sum's reward"],
        "tokens": power["token"] - power["token's reward"],
    }
