"""Token log-probs, entropy and exact KL from hidden states, a tile of logits at a time: [B,T,V] never exists.

The hidden state at t-1 predicts tokens[t]. The forward pass adds up sums over the tiles of
`agro.models.tiles`; the backward pass computes each tile once more, turns it into its gradient in place, and
adds that to the gradients of the hidden states and of the head. So neither pass has more than a few tiles in
memory (and of some positions the logits, `KEPT` of them), the weights of the head are read once for many
positions, and their gradient exists once.
Where tokens have kept sets (see `agro.types.kept_sets`), log π is over them: z is -inf outside. The other
streams remain over the vocabulary; logits are computed once more for them.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from agro.errors import Refused
from agro.models.tiles import (
    KEPT,
    OF_REFERENCE,
    PROPOSALS,
    Head,
    Plan,
    Slopes,
    add_draws,
    add_tile,
    d_logits,
    fill,
    keys,
    sum_dtype,
    uniforms,
)
from agro.types import KeptSets

STREAMS = (
    *("logp", "entropy", "kl", "proposal", "proposal_mean"),
    *("ref_mean", "ref_square", "normalizer", "future"),
)


class Outputs(NamedTuple):
    """What a model's log-probs are computed from."""

    hidden: Tensor  # [B,T,H] last hidden states
    head: Head
    kept: KeptSets | None = None  # what log-probs are normalized over; None: the vocabulary


def token_streams(
    outputs: Outputs,
    tokens: Tensor,
    mask: Tensor,
    *,
    want: Collection[str] = ("logp",),
    temperature: float = 1.0,
    chunk: int = 512,
    reference: Outputs | None = None,
) -> dict[str, Tensor]:
    """What `want` names, at the positions of `mask`; NaN elsewhere; differentiable in `outputs`.

    Args:
        outputs: hidden states and head of π.
        tokens, mask: [B,T], best on the CPU, where it is decided which positions to compute. The first column
            of `mask` is false, since a first token has no log-prob.
        want: of "logp" (nats), "entropy" (of π), "kl" (exact, of π from the reference), "proposal" (q of the
            token, without gradient) and "proposal_mean" (of log π over q, which has no gradient itself). q ∝
            π^(1/κ), κ the `temperature` of such a name where it has one (`agro.objectives.needs.PROPOSAL`);
            where its `draws` isn't 0, the shares of so many tokens drawn from q stand for q (see
            `agro.models.tiles`); "ref_mean" and "ref_square" (Σ π_ref ρ and ½ Σ π_ref ρ²,
            ρ = log π/π_ref); "normalizer" (log Σ exp of the logits) and "future" (log π̂ of the token,
            without gradient, π̂ ∝ π (π/π_ref)^λ, λ the `strength` of such a name where it has one).
        temperature: divides the logits of both policies.
        chunk: positions of a tile, at most; it has `TILE` tokens.
        reference: hidden states and head of π_ref, for `OF_REFERENCE`. They receive no gradient.
    Returns:
        name -> [B,T], float32 (float64 for float64 weights), on the device of the hidden states.
    """
    unknown = set(want) - set(STREAMS)
    if unknown:
        raise ValueError(f"streams: expected some of {', '.join(STREAMS)}, got {', '.join(sorted(unknown))}")
    tokens, mask = tokens.cpu(), mask.cpu()
    if mask[:, 0].any():
        raise ValueError("mask: the first token is in the mask, but a first token has no log-prob")
    hidden, head, kept = Outputs(*outputs)
    needing = OF_REFERENCE & set(want)
    if needing and reference is None:
        raise ValueError(f"streams: {', '.join(sorted(needing))} needs a reference")
    if not needing:
        reference = None
    if reference is not None and len(reference[1].weight) != len(head.weight):
        raise Refused(
            f"kl: expected a reference with the policy's vocabulary of {len(head.weight)} tokens, "
            f"got {len(reference[1].weight)}; start both from the same model"
        )
    masked = mask.flatten().nonzero()[:, 0]  # of the B·T positions
    places = masked.to(hidden.device, non_blocking=True)
    predicts = places - 1  # the positions whose hidden states predict a token of the mask
    proposal = next((name for name in want if hasattr(name, "temperature")), None)
    draws = None
    if count := getattr(proposal, "draws", 0):
        numbers = uniforms(keys(tokens, getattr(proposal, "seed", 0.0))[mask.numpy()], count)
        draws = numbers.to(hidden.device, non_blocking=True)
    plan = Plan(
        head=head,
        reference=None if reference is None else reference[1],
        temperature=temperature,
        size=chunk,
        want=frozenset(map(str, want)),
        tokens=tokens.flatten()[masked].long(),
        kappa=getattr(proposal, "temperature", 1.0),
        draws=draws,
        strength=next((name.strength for name in want if hasattr(name, "strength")), 1.0),
        keeps=KEPT if torch.is_grad_enabled() else 0,
    )
    parts = [plan]
    if kept is not None:  # log-probs are over the kept sets, the other streams over the vocabulary
        limited = kept.to("cpu").masked(mask)
        parts = [
            replace(plan, want=plan.want & {"logp"}, kept=limited),
            replace(plan, want=plan.want - {"logp"}),
        ]
    states = hidden.flatten(0, 1).index_select(0, predicts)
    ref_states = None if reference is None else reference[0].flatten(0, 1)[predicts].detach()
    streams: dict[str, Tensor] = {}
    for part in parts:
        if not part.want:
            continue
        other = ref_states if OF_REFERENCE & part.want else None
        values = _Streams.apply(states, head.weight, head.bias, other, part)  # type: ignore[no-untyped-call]
        for name, value in zip(STREAMS, values):
            if value is not None:
                empty = torch.full((mask.numel(),), math.nan, dtype=value.dtype, device=value.device)
                streams[name] = empty.index_copy(0, places, value).view(mask.shape)
    return streams


class _Streams(torch.autograd.Function):
    """N positions -> the `STREAMS`, each [N], or None where it isn't in `want`.

    The function that handles a tile frees what it allocated: nothing of its size outlives it.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ref: Tensor | None, plan: Plan
    ) -> tuple[Tensor | None, ...]:
        values = torch.empty((len(STREAMS), len(hidden)), dtype=sum_dtype(weight), device=hidden.device)
        blocks = plan.blocks()
        spare = plan.keeps if any(ctx.needs_input_grad) else 0
        for block in blocks:
            h, h_ref = hidden[block.at], None if ref is None else ref[block.at]
            kept: list[Tensor] = []
            for number, tile in enumerate(plan.tiles()):
                z = block.tile_logits(h, tile)
                if number == len(kept) and z.numel() <= spare:  # none after one that didn't fit
                    spare -= z.numel()
                    kept.append(z)
                    z = z.clone()
                add_tile(block, z, h_ref, tile)
            if PROPOSALS & plan.want:
                add_draws(block, h)
            block.logits = kept
            fill(values, block)
        ctx.blocks = blocks
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, ref)
        return tuple(v if n in plan.want else None for n, v in zip(STREAMS, values))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ref = ctx.saved_tensors
        plan: Plan = ctx.plan
        d_hidden = torch.zeros_like(hidden, dtype=sum_dtype(weight)) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=sum_dtype(weight)) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=sum_dtype(weight)) if ctx.needs_input_grad[2] else None
        for block in ctx.blocks:
            h, h_ref = hidden[block.at], None if ref is None else ref[block.at]
            block_grads = [None if g is None else g[block.at] for g in grads]
            slopes = Slopes.of(block_grads, block.sums, sum_dtype(weight))
            for tile in plan.tiles():
                d = d_logits(block, slopes, block.tile_logits(h, tile), h_ref, tile).to(weight.dtype)
                if d_hidden is not None:
                    _add_product(d_hidden[block.at], d, weight[tile])
                if d_weight is not None:
                    _add_product(d_weight[tile], d.T, h)
                if d_bias is not None:
                    d_bias[tile] += d.sum(0)
                del d
            block.logits.clear()  # half a GB that the layers' backward pass would have beside its own
        totals = (d_hidden, d_weight, d_bias)
        return *(None if d is None else d.to(weight.dtype) for d in totals), None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, in place; of half precision the products are added up in float32."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
