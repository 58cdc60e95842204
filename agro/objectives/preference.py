"""Preferences: pairs of responses to one prompt, of which one was judged the better.

Generation consistency (AGRO, Theorem 1) of two responses, subtracted, is rid of V*: r(y) − r(y') = β (ρ*(y) − ρ*(y')). A judgement
says something of the left side, so all that is read of the policy is h = ρ(winner) − ρ(loser), whoever wrote the two.
Groups weigh equally, and so do the pairs within a group. A response in no pair gets a gradient of 0.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from agro.objectives.core import Streams, Terms
from agro.objectives.pairs import Pairs
from agro.types import Batch


def pair_consistency(streams: Streams, batch: Batch, *, beta: float, gap: float | str, votes: str) -> Terms:
    """¼ (r_w − r_l − β h)², which is ½ Var(R) of the two responses; r_w − r_l is `gap`, or that of the rewards.

    A number, for judgements without rewards: with ½ it is β²/4 times the loss of IPO (arXiv 2310.12036), (h − 1/(2β))². With
    votes = "mean" the gap is (2p − 1) of it, p the chance that the winner is the better one: VIPO (arXiv 2410.22891), up to
    β²/4 and a constant. "reward": CoPG (arXiv 2406.19185) over 4 on the pairs that were judged, whoever won.
    """
    pairs = Pairs.of(batch)
    margin = beta * _h(streams, batch, pairs)
    wanted = pairs.gap(pairs.groups.reward) if isinstance(gap, str) else gap * (2 * pairs.chance(votes) - 1)
    return Terms(pairs.average(0.25 * (wanted - margin).square()), metrics=_said(pairs, margin))


def dpo(streams: Streams, batch: Batch, *, beta: float, label_smoothing: float, votes: str) -> Terms:
    """−p log σ(βh) − (1 − p) log σ(−βh), p = 1 − `label_smoothing`: DPO (arXiv 2305.18290, eq. 7).

    Bradley–Terry's likelihood of the judgements, where r(y) − r(y') = β (ρ(y) − ρ(y')) in logits: on judgements that are drawn so,
    its optimum is π_ref exp(r/β) / Z. With votes = "mean" p is the chance that the winner is the better one (VDPO, arXiv
    2410.22891), smoothed likewise.
    """
    pairs = Pairs.of(batch)
    margin = beta * _h(streams, batch, pairs)
    p = label_smoothing + (1 - 2 * label_smoothing) * pairs.chance(votes)
    loss = -p * F.logsigmoid(margin) - (1 - p) * F.logsigmoid(-margin)
    return Terms(pairs.average(loss), metrics=_said(pairs, margin))


def _h(streams: Streams, batch: Batch, pairs: Pairs) -> Tensor:
    """[P] h = ρ(winner) − ρ(loser), ρ the sum of a response's token log-ratios."""
    assert batch.ref_logp is not None
    return pairs.gap(pairs.groups.sum_tokens(streams["logp"] - batch.ref_logp))


def _said(pairs: Pairs, margin: Tensor) -> dict[str, Tensor]:
    """Averaged as the loss is; at π_ref both are 0."""
    return {"ordered_share": pairs.average((margin > 0).double()), "implicit_margin": pairs.average(margin)}
