"""Generation consistency with a learned value: one response is enough, since V takes the place of the group's
mean.

The value is learned by the same loss. At its minimum π = π* and V = V*, on responses of any origin (AGRO,
arXiv 2503.19612, statement of consistency; DRO, arXiv 2405.19107).
"""

from __future__ import annotations

import torch

from agro.objectives.core import Objective, Streams, Terms, regularized, to_reference
from agro.objectives.imitation import IMITATION
from agro.objectives.needs import REWARD, VALUE
from agro.objectives.options import Beta, Scale
from agro.objectives.reduce import Groups
from agro.objectives.weights import WEIGHT
from agro.types import Batch, Tensor


def dro(streams: Streams, batch: Batch, *, beta: Beta, scale: Scale = "reward") -> Terms:
    """½ (r − β ρ − V(x))² of each response, minimized over the policy and the value (DRO-V, arXiv
    2405.19107).

    V is the mean of the values of a response's rows, mostly one. scale "loss": the loss's own gradient;
    "reward": its policy part divided by β, −(r − β ρ − V) ∇log π(y), which at β = 0 is REINFORCE with a
    learned baseline. The value's part is the same in both. A group counts as one, whatever its size.
    """
    groups = Groups.of(batch)
    ratio_N = groups.sum_tokens(regularizer(streams["logp"], batch, beta, scale))
    value_N = groups.mean_rows(streams["value"])
    off_N = groups.reward - ratio_N - value_N
    loss = groups.average_responses(0.5 * off_N.square())
    return Terms(loss, metrics={"value_loss": loss, "value_mean": groups.average_responses(value_N)})


def regularizer(logp_BT: Tensor, batch: Batch, beta: float, scale: str) -> Tensor:
    """[B,T] β (log π − log π_ref). Where scale is "reward" its derivative in log π is 1 and not β."""
    value_BT = torch.zeros_like(logp_BT)
    if beta != 0:
        assert batch.ref_logp is not None
        value_BT = beta * (logp_BT - batch.ref_logp)
    if scale == "reward":
        return value_BT.detach() + (logp_BT - logp_BT.detach())
    return value_BT


ENTRIES: dict[str, Objective] = {
    "dro": Objective(
        dro,
        "DRO-V, arXiv 2405.19107",
        regularized(REWARD, VALUE),
        ingredients=(WEIGHT, IMITATION),
        anchor=to_reference,
        metrics=("value_loss", "value_mean"),
    )
}
