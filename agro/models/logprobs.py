"""Token log-probs, entropy and exact KL from hidden states, tile by tile: logits [B,T,V] never exist.

The hidden state at t-1 predicts tokens[t]. The forward pass adds up sums over tiles, of some positions and
some of the vocabulary. The backward pass recomputes each tile, turns it into its gradient in place, and adds
that to the gradients of the hidden states and of the head. So neither pass has more than a few tiles in
memory (plus up to `MAX_KEPT_LOGITS` logits), the weights of the head are read once for many positions, and
their gradient exists once.
For tokens with kept sets (see `agro.types.kept_sets`), log π is over these: z is -inf outside. The other
streams are over the vocabulary; their logits are computed separately.

With z [V] the logits at temperature τ, log π = z - logsumexp z, H = -Σ π log π and
KL = Σ π (log π - log π_ref), the gradients with respect to z are

    d log π(a) = 1_a - π        d H = -π (log π + H)        d KL = π (log π - log π_ref - KL)

For q = softmax(z/κ), a constant, d Σ q log π = q - π; for the normalizer, d logsumexp z = π. Under the
reference, with ρ = log π - log π_ref,

    d Σ π_ref ρ = π_ref - π        d ½ Σ π_ref ρ² = π_ref ρ - π Σ π_ref ρ

All of them follow from sums of e^(z - m) and of its multiples, which are added up tile by tile, with m the
largest logit so far; they are rescaled when m grows (the online softmax of Milakov and Gimelshein,
arXiv:1805.02867).

Instead of q, K tokens may be drawn from it at each position by inverting its distribution function at uniform
numbers, in another pass over the tiles. Each number is a hash of a seed and the tokens before the position.
So both passes of a step draw the same tokens, in micro-batches of any size, and so do equal prefixes with the
same seed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from agro.errors import Refused
from agro.types import KeptSets

TILE = 1024  # vocabulary entries whose logits are computed at once
MAX_KEPT_LOGITS = 1 << 27  # kept for a backward pass, 512 MiB; further logits are computed twice
UNDER_REFERENCE = frozenset({"ref_mean", "ref_square"})  # expectations over π_ref
OF_REFERENCE = frozenset({"kl"}) | UNDER_REFERENCE  # streams that need the reference's logits
PROPOSALS = frozenset({"proposal", "proposal_mean"})
LOWEST = torch.finfo(torch.float32).min  # below any logit; finite, since -inf - -inf is NaN


@dataclass(frozen=True)
class Head:
    """The output layer: logits = cap · tanh(scale · (h Wᵀ + b) / cap), without the tanh if cap is None."""

    weight: Tensor  # [V,H]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, model: Any) -> Head:
        """The head of a transformers causal language model; raises `Refused` if it isn't linear."""
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
    """The type of logits and sums: float64 for float64 weights, else float32."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


class ByTile(NamedTuple):
    """Pairs of a row and a vocabulary token, ordered by token, so that each tile's pairs are a slice.

    The CPU has the bounds of the slices, so no tile waits for a GPU.
    """

    rows: Tensor  # [K]
    tokens: Tensor  # [K]
    bounds: list[int]  # tile i has the pairs bounds[i] … bounds[i+1]-1

    @classmethod
    def of(cls, rows: Tensor, tokens: Tensor, vocabulary: int, device: torch.device) -> ByTile:
        """Sort pairs from tensors [K] on the CPU, and store them on `device`."""
        ordered, order = tokens.sort()
        bounds = torch.searchsorted(ordered, torch.arange(0, vocabulary + TILE, TILE)).tolist()
        ordered, rows = (x.to(device, non_blocking=True) for x in (ordered, rows[order]))
        return cls(rows, ordered, bounds)

    def at(self, tile: slice) -> tuple[Tensor, Tensor]:
        """Row and column of the pairs in a tile."""
        number = tile.start // TILE
        part = slice(self.bounds[number], self.bounds[number + 1])
        return self.rows[part], self.tokens[part] - tile.start


@dataclass(frozen=True)
class Plan:
    """Which streams to compute, from which heads, and how many positions at once."""

    head: Head
    reference: Head | None
    temperature: float
    size: int  # positions per tile
    want: frozenset[str]
    tokens: Tensor  # [N] the chosen tokens, on the CPU
    kappa: float = 1.0  # of q ∝ π^(1/κ)
    kept_sets: KeptSets | None = None  # [N], of log π, on the CPU
    draws: Tensor | None = None  # [N,K] uniform numbers that draw K tokens from q; None: q itself
    max_kept_logits: int = 0  # for the backward pass

    def blocks(self) -> list[Block]:
        """Blocks of `size` positions."""
        return [Block(self, slice(i, i + self.size)) for i in range(0, len(self.tokens), self.size)]

    def tiles(self) -> Iterator[slice]:
        """Slices of the vocabulary."""
        vocab = len(self.head.weight)
        for i in range(0, vocab, TILE):
            yield slice(i, min(i + TILE, vocab))

    def logits(self, head: Head, h: Tensor, tile: slice) -> Tensor:
        """[n,v] logits of π or π_ref for a tile, at the temperature."""
        bias = None if head.bias is None else head.bias[tile]
        z = replace(head, weight=head.weight[tile], bias=bias).logits(h).to(sum_dtype(self.head.weight))
        return z if self.temperature == 1 else z.div_(self.temperature)


class Block:
    """Positions whose logits are computed together, one tile at a time, and the sums over their tiles."""

    def __init__(self, plan: Plan, positions: slice) -> None:
        """`positions`: a slice of all positions."""
        tokens, device = plan.tokens[positions], plan.head.weight.device
        self.plan, self.positions, vocabulary = plan, positions, len(plan.head.weight)
        self.chosen = ByTile.of(torch.arange(len(tokens)), tokens, vocabulary, device)
        self.sets: ByTile | None = None  # the kept tokens of each position that has a kept set
        if plan.kept_sets is not None:
            part = plan.kept_sets.part(positions)
            rows = torch.arange(len(tokens)).repeat_interleave(part.count)
            self.limited = (part.count > 0).to(device, non_blocking=True)  # [n]
            self.sets = ByTile.of(rows, part.ids, vocabulary, device)
        self.sums = Sums.empty(len(tokens), device)
        self.logits: list[Tensor] = []  # of the first tiles, kept for the backward pass

    def tile_logits(self, h: Tensor, tile: slice) -> Tensor:
        """[n,v] logits of a tile, -inf outside the kept sets; they may be overwritten."""
        number = tile.start // TILE
        if number < len(self.logits):
            logits: Tensor = self.logits[number].clone()
            return logits
        z = self.plan.logits(self.plan.head, h, tile)
        if self.sets is not None:
            outside = self.limited[:, None].repeat(1, z.shape[1])
            outside[self.sets.at(tile)] = False
            z.masked_fill_(outside, -math.inf)
        return z


class Sums(NamedTuple):
    """Sums over the tiles so far, each [n] in float64, with x = z - largest."""

    largest: Tensor
    total: Tensor  # Σ e^x
    x_sum: Tensor  # Σ e^x x
    token: Tensor  # x of the token
    ref_largest: Tensor
    ref_total: Tensor  # Σ e^x_ref
    ref_sum: Tensor  # Σ e^x x_ref
    q_total: Tensor  # Σ e^(x/κ)
    q_sum: Tensor  # Σ e^(x/κ) x
    q_token: Tensor  # e^(x/κ) of the token, after the last tile
    gap_sum: Tensor  # Σ e^x_ref u, u = x - x_ref
    gap_squares: Tensor  # Σ e^x_ref u²
    drawn_tokens: Tensor | None = None  # [n,K]; if set, q_total is K and the sums of q count these tokens

    @classmethod
    def empty(cls, n: int, device: torch.device) -> Sums:
        """The sums of n positions before the first tile."""
        sums = cls(*torch.zeros((len(cls._fields) - 1, n), dtype=torch.float64, device=device))
        sums.largest.fill_(LOWEST)
        sums.ref_largest.fill_(LOWEST)
        return sums

    @property
    def entropy(self) -> Tensor:
        return self.total.log() - self.x_sum / self.total

    @property
    def kl(self) -> Tensor:
        return (self.x_sum - self.ref_sum) / self.total - self.log_totals

    @property
    def log_totals(self) -> Tensor:
        """The difference u - ρ, where ρ = log π - log π_ref."""
        return self.total.log() - self.ref_total.log()

    @property
    def ref_mean(self) -> Tensor:
        """Σ π_ref ρ"""
        return self.gap_sum / self.ref_total - self.log_totals

    @property
    def ref_square(self) -> Tensor:
        """½ Σ π_ref ρ²"""
        squares = self.gap_squares / self.ref_total
        return (squares - self.log_totals * (2 * self.gap_sum / self.ref_total - self.log_totals)) / 2


def add_tile(block: Block, z: Tensor, h_ref: Tensor | None, tile: slice) -> None:
    """Add a tile with logits z [n,v] to the sums of a block, in place; z is overwritten."""
    plan, sums = block.plan, block.sums
    rise = _raise_largest(sums.largest, z)
    x = _minus(z, sums.largest)
    sums.token.sub_(rise)
    at_token = block.chosen.at(tile)
    sums.token[at_token[0]] = x[at_token].double()
    if PROPOSALS & plan.want:
        _add_proposal(sums, x, rise, plan.kappa)
    shrink = (-rise).exp()
    if not {"entropy", *OF_REFERENCE} & plan.want:
        sums.total.mul_(shrink).add_(x.exp_().sum(1))
        return
    e = x.exp()
    sums.x_sum.sub_(sums.total * rise).mul_(shrink).add_((e * x).sum(1))
    if h_ref is not None and plan.reference is not None:
        z_ref = plan.logits(plan.reference, h_ref, tile)
        ref_rise = _raise_largest(sums.ref_largest, z_ref)
        x_ref = _minus(z_ref, sums.ref_largest)
        sums.ref_sum.sub_(sums.total * ref_rise).mul_(shrink).add_((e * x_ref).sum(1))
        if UNDER_REFERENCE & plan.want:
            _add_gaps(sums, x, x_ref, ref_rise - rise, ref_rise)
        sums.ref_total.mul_((-ref_rise).exp()).add_(x_ref.exp_().sum(1))
    sums.total.mul_(shrink).add_(e.sum(1))


def _add_proposal(sums: Sums, x: Tensor, rise: Tensor, kappa: float) -> None:
    e = (x / kappa).exp_()
    shrink = (-rise / kappa).exp()
    sums.q_sum.sub_(sums.q_total * rise).mul_(shrink).add_((e * x).sum(1))
    sums.q_total.mul_(shrink).add_(e.sum(1))


def _add_gaps(sums: Sums, x: Tensor, x_ref: Tensor, grows: Tensor, ref_rise: Tensor) -> None:
    """Add a tile's sums under the reference, whose total is still that of the previous tiles; each u of those
    tiles grows by `grows` [n]."""
    e_ref, gap = x_ref.exp(), x - x_ref
    shrink = (-ref_rise).exp()
    sums.gap_squares.add_(grows * (2 * sums.gap_sum + grows * sums.ref_total)).mul_(shrink)
    sums.gap_squares.add_((e_ref * gap.square()).sum(1))
    sums.gap_sum.add_(grows * sums.ref_total).mul_(shrink).add_((e_ref * gap).sum(1))


def add_draws(block: Block, h: Tensor) -> None:
    """Complete the sums of q after the last tile, over all of q or over K tokens drawn from it.

    Another pass over the tiles accumulates their masses; each of the [n,K] targets draws the token at which
    the mass exceeds it. Targets that rounding leaves beyond the last tile draw its last token.
    """
    plan, sums = block.plan, block.sums
    if plan.draws is None:
        block.sums = sums._replace(q_token=(sums.token / plan.kappa).exp())
        return
    targets = plan.draws[block.positions] * sums.q_total[:, None]
    samples = torch.full_like(targets, -1, dtype=torch.long)
    values, reached = torch.zeros_like(targets), torch.zeros_like(targets[:, :1])
    for tile in plan.tiles():
        x = _minus(plan.logits(plan.head, h, tile), sums.largest)
        ends = reached + (x / plan.kappa).exp_().cumsum(1, dtype=torch.float64)
        column = torch.searchsorted(ends, targets, right=True).clamp(max=x.shape[1] - 1)
        here = targets >= reached
        samples = torch.where(here, tile.start + column, samples)
        values = torch.where(here, x.gather(1, column).double(), values)
        reached = ends[:, -1:].contiguous()
    tokens = plan.tokens[block.positions].to(h.device, non_blocking=True)
    block.sums = sums._replace(
        q_total=torch.full_like(sums.q_total, targets.shape[1]),
        q_sum=values.sum(1),
        q_token=(samples == tokens[:, None]).double().sum(1),
        drawn_tokens=samples,
    )


def _raise_largest(largest: Tensor, z: Tensor) -> Tensor:
    """Raise `largest` [n] to the largest of z [n,v], in place; return the increase, 0 for a first tile."""
    previous = largest.clone()
    torch.maximum(largest, z.amax(1).double(), out=largest)
    return (largest - previous).masked_fill_(previous == LOWEST, 0)


def _minus(z: Tensor, largest: Tensor) -> Tensor:
    """z - largest [n,v], in place."""
    return z.sub_(largest[:, None].to(z.dtype))


def fill(values: Tensor, block: Block) -> None:
    """Write the requested streams of a block to `values` [8,N]."""
    values, sums, want = values[:, block.positions], block.sums, block.plan.want
    values[0] = sums.token - sums.total.log()
    if "entropy" in want:
        values[1] = sums.entropy
    if "kl" in want:
        values[2] = sums.kl
    if PROPOSALS & want:
        values[3] = sums.q_token / sums.q_total
        values[4] = sums.q_sum / sums.q_total - sums.total.log()
    if UNDER_REFERENCE & want:
        values[5], values[6] = sums.ref_mean, sums.ref_square
    if "normalizer" in want:
        values[7] = sums.largest + sums.total.log()


class Slopes(NamedTuple):
    """Factors of the gradient of z, each [n,1]; None stands for 0.

    The gradient is e^x (x_factor x + ref_factor x_ref + constant) + q_factor e^(x/κ) + e^x_ref (gap_factor
    u + gap_constant), plus `token_factor` at the token. If tokens were drawn from q, q_factor is added at
    each of them instead.
    """

    constant: Tensor
    token_factor: Tensor
    x_factor: Tensor | None
    ref_factor: Tensor | None
    q_factor: Tensor | None
    gap_factor: Tensor | None
    gap_constant: Tensor | None

    @classmethod
    def of(cls, grads: list[Tensor | None], sums: Sums, dtype: torch.dtype) -> Slopes:
        """The factors for the gradients of the streams."""
        zero = torch.zeros_like(sums.total)
        d_logp, d_entropy, d_kl, _, d_mean, d_ref_mean, d_ref_square, d_normalizer = (
            zero if g is None else g.double() for g in grads
        )
        constant = d_normalizer - (d_logp + d_mean)
        x_factor, ref_factor, q_factor, gap_factor, gap_constant = None, None, None, None, None
        if grads[1] is not None or grads[2] is not None:
            x_factor = (d_kl - d_entropy) / sums.total
        if grads[1] is not None:
            constant = constant + d_entropy * (sums.total.log() - sums.entropy)
        if grads[2] is not None:
            constant = constant - d_kl * (sums.log_totals + sums.kl)
            ref_factor = -d_kl / sums.total
        if grads[4] is not None:
            q_factor = d_mean / sums.q_total
        if grads[5] is not None or grads[6] is not None:
            constant = constant - d_ref_mean - d_ref_square * sums.ref_mean
            gap_factor = d_ref_square / sums.ref_total
            gap_constant = (d_ref_mean - d_ref_square * sums.log_totals) / sums.ref_total
        factors = (constant / sums.total, d_logp, x_factor, ref_factor, q_factor, gap_factor, gap_constant)
        return cls(*(None if f is None else f[:, None].to(dtype) for f in factors))  # type: ignore[arg-type]


def d_logits(block: Block, slopes: Slopes, z: Tensor, h_ref: Tensor | None, tile: slice) -> Tensor:
    """Gradient with respect to h Wᵀ + b [n,v] of a tile with logits z, from the sums over all tiles.

    z is overwritten.
    """
    plan, sums = block.plan, block.sums
    slope = None
    if plan.head.cap is not None:
        slope = (z * (plan.temperature / plan.head.cap)).square_().neg_().add_(1)
        slope.clamp_(min=0)  # not -inf outside of kept sets
    x = _minus(z, sums.largest)
    added: list[Tensor] = []
    if slopes.q_factor is not None and sums.drawn_tokens is None:
        added.append((x / plan.kappa).exp_().mul_(slopes.q_factor))
    if slopes.gap_factor is not None and slopes.gap_constant is not None:
        x_ref = _ref_x(plan, sums, h_ref, tile)
        gaps = (x - x_ref).mul_(slopes.gap_factor).add_(slopes.gap_constant)
        added.append(x_ref.exp_().mul_(gaps))
    if slopes.x_factor is None:
        d = x.exp_().mul_(slopes.constant)
    else:
        e = x.exp()
        d = x.mul_(slopes.x_factor).add_(slopes.constant)
        if slopes.ref_factor is not None:
            d.addcmul_(_ref_x(plan, sums, h_ref, tile), slopes.ref_factor)
        d.mul_(e)
    for part in added:
        d.add_(part)
    if slopes.q_factor is not None and (samples := sums.drawn_tokens) is not None:
        in_tile = (samples >= tile.start) & (samples < tile.stop)
        column = (samples - tile.start).clamp(0, d.shape[1] - 1)
        d.scatter_add_(1, column, slopes.q_factor * in_tile.to(d.dtype))
    rows, columns = block.chosen.at(tile)
    d[rows, columns] += slopes.token_factor[rows, 0]
    if plan.head.scale != plan.temperature:
        d.mul_(plan.head.scale / plan.temperature)
    return d if slope is None else d.mul_(slope)


def _ref_x(plan: Plan, sums: Sums, h_ref: Tensor | None, tile: slice) -> Tensor:
    """[n,v] x of π_ref."""
    assert plan.reference is not None
    assert h_ref is not None
    return _minus(plan.logits(plan.reference, h_ref, tile), sums.ref_largest)


Bits = NDArray[np.uint64]
GAMMA = np.uint64(0x9E3779B97F4A7C15)


def mixed(x: Bits) -> Bits:
    """SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keys(tokens: Tensor, seed: float) -> Bits:
    """[B,T] for each token, a hash of the seed and the tokens before it; `tokens`: [B,T]."""
    position = np.arange(1, tokens.shape[1] + 1, dtype=np.uint64)
    parts = mixed(mixed(tokens.numpy().astype(np.uint64) + np.uint64(1)) + GAMMA * position)
    prefix = parts.cumsum(1) - parts
    return mixed(prefix + mixed(np.array([seed], np.float64).view(np.uint64)))


def uniforms(key: Bits, count: int) -> Tensor:
    """[n,count] numbers in [0,1) in float64 from keys [n]."""
    bits = mixed(np.add.outer(key, GAMMA * np.arange(1, count + 1, dtype=np.uint64)))
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


STREAMS = ("logp", "entropy", "kl", "proposal", "proposal_mean", "ref_mean", "ref_square", "normalizer")


class Outputs(NamedTuple):
    """A model's outputs, from which log-probs are computed."""

    hidden: Tensor  # [B,T,H] last hidden states
    head: Head
    kept_sets: KeptSets | None = None  # log-probs are normalized over these; None: over the vocabulary


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
    """The streams that `want` names, at the positions of `mask`; NaN elsewhere; differentiable in `outputs`.

    Args:
        outputs: hidden states and head of π.
        tokens, mask: [B,T], preferably on the CPU, which decides the positions to compute. The first column
            of `mask` is false, since a first token has no log-prob.
        want: of "logp" (nats), "entropy" (of π), "kl" (exact, of π from the reference), "proposal" (q of the
            token, without gradient) and "proposal_mean" (of log π over q; q has no gradient). q ∝ π^(1/κ), κ
            the `temperature` of such a name if it has one (`agro.objectives.needs.PROPOSAL`); if its `draws`
            isn't 0, the frequencies of that many tokens drawn from q replace q (see `agro.models.logprobs`);
            "ref_mean" and "ref_square" (Σ π_ref ρ and ½ Σ π_ref ρ², ρ = log π/π_ref); "normalizer" (log Σ exp
            of the logits).
        temperature: divides the logits of both policies.
        chunk: largest number of positions per tile; a tile has `TILE` vocabulary entries.
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
    hidden, head, kept_sets = Outputs(*outputs)
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
        max_kept_logits=MAX_KEPT_LOGITS if torch.is_grad_enabled() else 0,
    )
    parts = [plan]
    if kept_sets is not None:  # log-probs are over the kept sets, the other streams over the vocabulary
        limited = kept_sets.to("cpu").masked(mask)
        parts = [
            replace(plan, want=plan.want & {"logp"}, kept_sets=limited),
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
    """N positions -> the `STREAMS`, each [N], or None if it isn't in `want`.

    The function that handles a tile frees all tensors of the tile's size.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ref: Tensor | None, plan: Plan
    ) -> tuple[Tensor | None, ...]:
        values = torch.empty((len(STREAMS), len(hidden)), dtype=sum_dtype(weight), device=hidden.device)
        blocks = plan.blocks()
        spare = plan.max_kept_logits if any(ctx.needs_input_grad) else 0
        for block in blocks:
            h, h_ref = hidden[block.positions], None if ref is None else ref[block.positions]
            logits: list[Tensor] = []
            for number, tile in enumerate(plan.tiles()):
                z = block.tile_logits(h, tile)
                if number == len(logits) and z.numel() <= spare:  # none after one that didn't fit
                    spare -= z.numel()
                    logits.append(z)
                    z = z.clone()
                add_tile(block, z, h_ref, tile)
            if PROPOSALS & plan.want:
                add_draws(block, h)
            block.logits = logits
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
            h, h_ref = hidden[block.positions], None if ref is None else ref[block.positions]
            block_grads = [None if g is None else g[block.positions] for g in grads]
            slopes = Slopes.of(block_grads, block.sums, sum_dtype(weight))
            for tile in plan.tiles():
                d = d_logits(block, slopes, block.tile_logits(h, tile), h_ref, tile).to(weight.dtype)
                if d_hidden is not None:
                    _add_product(d_hidden[block.positions], d, weight[tile])
                if d_weight is not None:
                    _add_product(d_weight[tile], d.T, h)
                if d_bias is not None:
                    d_bias[tile] += d.sum(0)
                del d
            block.logits.clear()  # frees half a GB before the layers' backward pass
        totals = (d_hidden, d_weight, d_bias)
        return *(None if d is None else d.to(weight.dtype) for d in totals), None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, in place; half-precision products are added up in float32."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
