"""Generation consistency with a learned value: one response is enough, for V stands where the group's mean does.

The value is learned by the same loss. At its least π = π* and V = V*, on responses of any origin (AGRO, arXiv
2503.19612, statement of consistency; DRO, arXiv 2405.19107).
"""

from __future__ import annotations

import torch
from torch import Tensor

from agro.errors import Refused
from agro.objectives.core import Streams, Terms, masked
from agro.objectives.reduce import Groups, in_several_rows
from agro.types import Batch


def dro(streams: Streams, batch: Batch, *, beta: float, scale: str) -> Terms:
    """½ (r − β ρ − V(x))² of each response, least over the policy and the value (DRO-V, arXiv 2405.19107).

    V is the mean of the values of a response's rows, mostly one. scale "loss": the loss's own gradient; "reward": its policy part divided
    by β, −(r − β ρ − V) ∇log π(y), which at β = 0 is REINFORCE with a learned baseline. The value's part is the same
    in both. A group counts as one, whatever its size.
    """
    groups = Groups.of(batch)
    ratio = groups.sum_tokens(_pulled(streams["logp"], batch, beta, scale))
    value = groups.mean_rows(streams["value"])
    off = groups.reward - ratio - value
    loss = groups.average_responses(0.5 * off.square())
    return Terms(loss, metrics={"value_loss": loss, "value_mean": groups.average_responses(value)})


def prefix_consistency(streams: Streams, batch: Batch, *, beta: float, scale: str) -> Terms:
    """Consistency along a response: C_t = Σ_{s<t} (r_s − β ρ_s) + V(y_<t) is V*(x) at every token (V* after the last: 0).

    The loss of a response is the mean of ½ (C_s − C_t)² over all pairs of its positions s < t ≤ T + 1, which is the sample
    variance of C: each pair is a residual of V*(y_<s) = Σ_{s≤u<t} (r_u − β ρ_u) + V*(y_<t). A group counts as one.
    Rewards of tokens are `extra["token_reward"]` [B,T] where the batch has it (NaN: none); what of a response's reward
    they leave comes at its last token. `scale` is as of `dro`.

    Between tokens of the policy only: where a tool's random output stands in between, V* holds on average alone.
    Path consistency: Nachum et al., arXiv 1702.08892.
    """
    if split := in_several_rows(batch):
        raise Refused(
            f"objective prefix_consistency looks along a response, but that of {split} lies in several rows; take dro or agro"
        )
    mask = batch.mask
    given = batch.extra.get("token_reward")
    dense = torch.zeros_like(streams["logp"]) if given is None else given.double().nan_to_num()
    pulled = masked(batch, _pulled(streams["logp"], batch, beta, scale))
    total = batch.reward.double() - pulled.sum(1)  # C after the last token, where the value is 0
    before = (dense - pulled).cumsum(1) - (dense - pulled)
    C = torch.where(mask, before + streams["prefix_value"], 0.0)
    n = mask.sum(1) + 1
    mean = (C.sum(1) + total) / n
    squares = torch.where(mask, (C - mean[:, None]).square(), 0.0).sum(1) + (total - mean).square()
    groups = Groups.of(batch)
    loss = groups.average_responses((squares / (n - 1))[groups.first_row])
    first = streams["prefix_value"].gather(1, mask.int().argmax(1, keepdim=True))[:, 0]
    return Terms(
        loss, metrics={"value_loss": loss, "value_mean": groups.average_responses(first[groups.first_row])}
    )


def _pulled(logp: Tensor, batch: Batch, beta: float, scale: str) -> Tensor:
    """[B,T] β (log π − log π_ref). Where scale is "reward" its derivative in log π is 1 and not β."""
    if beta == 0:
        value = torch.zeros_like(logp)
    else:
        assert batch.ref_logp is not None
        value = beta * (logp - batch.ref_logp)
    return value.detach() + (logp - logp.detach()) if scale == "reward" else value
