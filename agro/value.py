"""A learned value: the expected reward of a prefix, from the policy's own hidden states."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ValueHead(nn.Module):
    """V(y_<t) in units of reward, linear in the direction of the last hidden state.

    Hidden states are scaled to length 1, so that a learning rate has the same effect at every width: a step
    of Adam moves V by at most lr · √H. V is 0 at first. Hidden states are detached: the policy isn't trained
    through its value.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[…,H] -> […]"""
        wide = hidden.detach().to(self.linear.weight.dtype)
        out: Tensor = self.linear(nn.functional.normalize(wide, dim=-1))[..., 0]
        return out

    def streams(self, hidden: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """The streams "prefix_value" [B,T] and "value" [B].

        "prefix_value" is V of the tokens before each token, NaN outside the mask. "value" is that of the
        first token in the mask.
        """
        before = torch.full(mask.shape, torch.nan, dtype=self.linear.weight.dtype, device=mask.device)
        before[:, 1:] = self(hidden[:, :-1])
        first = mask.int().argmax(1, keepdim=True)
        return {"prefix_value": torch.where(mask, before, torch.nan), "value": before.gather(1, first)[:, 0]}
