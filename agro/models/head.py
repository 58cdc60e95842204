"""The output layer of a causal language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agro.errors import Refused


@dataclass(frozen=True)
class Head:
    """The output layer: logits = cap · tanh(scale · (h Wᵀ + b) / cap), without the tanh where cap is None."""

    weight: Tensor  # [V,H]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, model: Any) -> Head:
        """The head of a transformers causal language model; `Refused` where it isn't linear."""
        linear = model.get_output_embeddings()
        if not isinstance(linear, nn.Linear):
            raise Refused(
                f"{type(model).__name__}: expected a linear output layer (torch.nn.Linear), got "
                f"{type(linear).__name__}; agro computes log-probs in chunks from a linear layer, so use "
                "another architecture"
            )
        config = model.config.get_text_config()
        scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
        scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite
        scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)  # Falcon-H1
        cap = getattr(config, "final_logit_softcapping", None)  # Gemma
        return cls(linear.weight, linear.bias, scale, cap)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[...,H] -> [...,V] without gradient, float32 (float64 for float64 weights).

        The product is computed in the type of the weights.
        """
        z = nn.functional.linear(hidden, self.weight, self.bias).to(sum_dtype(self.weight))
        if self.scale != 1:
            z.mul_(self.scale)
        if self.cap is None:
            return z
        return z.div_(self.cap).tanh_().mul_(self.cap)


def sum_dtype(weight: Tensor) -> torch.dtype:
    """The type of logits and sums that are computed from weights: float64 from float64, else float32."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32
