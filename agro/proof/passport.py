"""A passport: what is measured of an objective on enumerable policies, against what its source claims."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agro.errors import Refused
from agro.objectives import differentiate, get
from agro.objectives.core import STREAMS, wanted_streams
from agro.proof.claims import CLAIMS, Claims, Situation, half_variance
from agro.proof.ends import ends, tools
from agro.proof.enumerable import Enumerable, Space
from agro.proof.expectation import AllGroups, gradient
from agro.proof.measuring import (
    BETA,
    EXACT,
    RAGGED,
    SMALL,
    Row,
    data_of,
    derivative,
    options_of,
    problem,
    row,
)
from agro.types import Batch


def passport(name: str) -> Iterator[Row]:
    for claims in CLAIMS[name]:
        for measure in (expectations, bias, invariances, limits, variances, token_level, noise, tools, ends):
            yield from measure(name, claims)
    yield needs(name, CLAIMS[name][0])


def expectations(name: str, claims: Claims) -> Iterator[Row]:
    """The expected gradient over all groups against the derivative of the claim, on- and off-policy."""
    for space, kind in ((SMALL, "table"), (SMALL, "network"), (RAGGED, "network")):
        policy, reference, behaviors, reward = problem(space, kind)
        on_only = "fresh" in get(name).needed(options_of(name, claims))
        for where, behavior in {"policy": policy, **({} if on_only else behaviors)}.items():
            for n in claims.n:
                found = gradient(
                    policy,
                    reference,
                    AllGroups(data_of(behavior, reward, reference, judged=claims.judged), reference, n).batch,
                    name,
                    options_of(name, claims),
                )
                situation = Situation(policy, reference, behavior, reward, BETA, n)
                worst = (found - derivative(claims.expects(situation), policy)).abs().max().item()
                lengths = "ragged" if space.early_end else "full"
                yield row(
                    name,
                    "expected gradient",
                    f"{kind}, {lengths}, from {where}, n={n}",
                    claims,
                    worst,
                    most=EXACT,
                )


def bias(name: str, claims: Claims) -> Iterator[Row]:
    """On-policy against the gradient of −E_π r + β KL(π ‖ f), as a share of its norm."""
    policy, reference, _, reward = problem(SMALL, "network")
    beta = options_of(name, claims).get("beta", 0.0)
    p = policy.logp().exp()
    exact = derivative(
        (p * (beta * (policy.logp() - reference.logp().detach()) - reward)).sum(1).mean(), policy
    )
    factor = claims.policy_gradient(BETA) if claims.policy_gradient else 1.0
    n = claims.n[-1]
    found = gradient(
        policy,
        reference,
        AllGroups(data_of(policy, reward, reference, judged=claims.judged), reference, n).batch,
        name,
        options_of(name, claims),
    )
    own = sum(w.numel() for w in policy.weights().values())  # the policy's, without the value's
    share = ((found / factor - exact)[:own].norm() / exact.norm()).item()
    setting = f"on-policy, n={n}" + (f", divided by {factor:g}" if factor != 1 else "")
    yield row(
        name,
        "bias against the regularised policy gradient",
        setting,
        claims,
        share,
        most=EXACT if claims.policy_gradient else None,
    )


def invariances(name: str, claims: Claims) -> Iterator[Row]:
    """What may change without changing the gradient."""
    policy, reference, behaviors, reward = problem(RAGGED, "network")
    options, n = options_of(name, claims), claims.n[0]
    behavior = policy if "fresh" in get(name).needed(options) else behaviors["stale"]

    def of(batch: Batch, size: int | None = None) -> Tensor:
        return gradient(policy, reference, batch, name, options, size)

    data = data_of(behavior, reward, reference, judged=claims.judged)
    batch = AllGroups(data, reference, n).batch
    plain = of(batch)
    shift = torch.tensor([0.7, -1.3], dtype=torch.float64)
    moved = AllGroups(
        data_of(behavior, reward + shift[:, None], reference, judged=claims.judged), reference, n
    ).batch
    change = (of(moved) - plain).abs().max().item()
    yield row(
        name,
        "a reward shift per prompt" + ("" if claims.shift else " matters"),
        f"n={n}",
        claims,
        change,
        most=EXACT if claims.shift else None,
        least=None if claims.shift else 1e-3,
    )
    if batch.ref_logp is not None and "ref_logp" in get(name).needed(options):
        first = torch.zeros_like(batch.ref_logp)
        first[:, 1] = shift[batch.tokens[:, 0]] if batch.tokens is not None else 0.0
        change = (of(batch.replace(ref_logp=batch.ref_logp + first)) - plain).abs().max().item()
        kept = claims.reference_shift
        yield row(
            name,
            "a shift of log π_ref per prompt" + ("" if kept else " matters"),
            f"n={n}",
            claims,
            change,
            most=EXACT if kept else None,
            least=None if kept else 1e-3,
        )
    order = torch.randperm(len(batch.mask), generator=torch.Generator().manual_seed(0))
    for what, setting, found in (
        ("the order of rows", "", of(batch.rows(order))),
        ("padding", "three more columns, ", of(_padded(batch, 3))),
        ("the micro-batch", "1 row, ", of(batch, 1)),
        ("the micro-batch", "7 rows, ", of(batch, 7)),
    ):
        yield row(name, what, f"{setting}n={n}", claims, (found - plain).abs().max().item(), most=EXACT)


def _padded(batch: Batch, by: int) -> Batch:
    """The batch with `by` more columns, which aren't in the mask and hold NaN, or the token 0."""
    wider = {}
    for field, fill in (("mask", False), ("tokens", 0), ("ref_logp", math.nan), ("behavior_logp", math.nan)):
        value = getattr(batch, field)
        if value is not None:
            wider[field] = torch.cat([value, torch.full((len(value), by), fill, dtype=value.dtype)], 1)
    return batch.replace(**wider)


def limits(name: str, claims: Claims) -> Iterator[Row]:
    """β → 0 and β → ∞, where there is a claim: RLOO, and ∇½ Var[ρ]."""
    if name != "agro" or claims.options.get("scale") != "reward":
        return
    policy, reference, behaviors, reward = problem(SMALL, "network")
    batch = AllGroups(data_of(behaviors["stale"], reward, reference), reference, 2).batch
    rloo = gradient(policy, reference, batch, "rloo", {"beta": 0.0})
    for beta in (0.0, 1e-9):
        found = gradient(policy, reference, batch, name, options_of(name, claims, beta))
        yield row(
            name,
            "RLOO as β → 0",
            f"β={beta:g}, from stale",
            claims,
            (found - rloo).abs().max().item(),
            most=1e-8,
        )
    beta = 1e9
    found = gradient(policy, reference, batch, name, options_of(name, claims, beta)) / beta
    pull = Situation(policy, reference, behaviors["stale"], torch.zeros_like(reward), 1.0, 2)
    off = (found - derivative(half_variance(pull), policy)).abs().max().item()
    yield row(name, "½ ∇Var[ρ] as β → ∞", f"β={beta:g}, divided by it, from stale", claims, off, most=1e-8)


def variances(name: str, claims: Claims) -> Iterator[Row]:
    """Trace of the covariance of one group's gradient in the logits of a table over its squared mean, against n."""
    options = options_of(name, claims)
    if not {"groups", "triples"} & get(name).needed(options):
        return
    policy, reference, _, reward = problem(Space(3, 2, 1))
    found = {n: _variance(policy, reference, reward, name, options, n) for n in (2, 3, 4)}
    for n, value in found.items():
        yield row(
            name, "variance of a group's gradient over its squared mean", f"on-policy, n={n}", claims, value
        )
    yield row(name, "its fall from n = 2 to 4", "on-policy", claims, found[4] / found[2], most=1.0)


def _variance(
    policy: Enumerable,
    reference: Enumerable,
    reward: Tensor,
    name: str,
    options: dict[str, Any],
    n: int,
    *,
    relative: bool = True,
) -> float:
    """Trace of the covariance of a group's gradient, over its squared mean where that is asked."""
    groups = AllGroups(data_of(policy, reward, reference), reference, n)
    batch = groups.batch
    space = policy.space
    alone = batch.replace(
        weight=torch.ones_like(batch.weight)
    )  # so that each group's gradient is 1/G of its own
    assert batch.tokens is not None
    assert batch.lengths is not None
    resolved = get(name).resolve(name, options)
    want = wanted_streams(get(name).needs(resolved))
    live = policy.streams(batch.tokens, batch.lengths, batch.mask, want, reference)
    rows = torch.zeros(len(batch.mask), 1, dtype=torch.float64)
    for stream, g in differentiate(name, get(name), live, alone, resolved).grads.items():
        values = policy.logp_tokens() if stream == "logp" else policy.kl_tokens(reference)
        jacobian = torch.stack([derivative(x, policy) for x in values[0].flatten()])
        jacobian = jacobian.view(len(space.responses), space.length, -1)
        rows = rows + torch.einsum("bt,btw->bw", g[:, 1:] * batch.n_groups, jacobian[groups.response])
    each = torch.zeros(batch.n_groups, rows.shape[1], dtype=torch.float64).index_add(0, batch.group, rows)
    p = batch.weight[::n]
    mean = (p[:, None] * each).sum(0)
    variance = (p[:, None] * (each - mean).square()).sum()
    return float(variance / mean.square().sum() if relative else variance)


def token_level(name: str, claims: Claims) -> Iterator[Row]:
    """The three estimates of the pull to the reference alone (r = 0, β = 1), and of on-policy AGRO with its squared part."""
    option, length = {"agro": ("regulariser", 2), "agro_onpolicy": ("squared", 3)}.get(name, ("", 0))
    if not option or claims is not CLAIMS[name][0]:
        return
    policy, reference, _, reward = problem(Space(3, length, 1))
    logits = [
        "; ".join(" ".join(f"{x:.3f}" for x in c) for c in p.weights()["logits"][0].tolist())
        for p in (policy, reference)
    ]
    before = math.inf
    for kind in ("sequence", "triangular", "local"):
        found = _variance(
            policy, reference, torch.zeros_like(reward), name, {"beta": 1.0, option: kind}, 2, relative=False
        )
        setting = f"{option}={kind}, on-policy, n=2, logits of π [{logits[0]}], of π_ref [{logits[1]}]"
        what = "variance of the pull's estimate, below the one before"
        bound = None if before == math.inf else before
        yield Row(name, what, setting, found, bound, None if bound is None else found < bound)
        before = found


def noise(name: str, claims: Claims) -> Iterator[Row]:
    """Rewards that are 0.3 u lower with probability ¼ and 0.1 u higher with ¾: against their mean. u is a response's own."""
    policy, reference, behaviors, reward = problem(SMALL, "network")
    options, n = options_of(name, claims), claims.n[0]
    if "reward" not in get(name).needed(options):
        return
    behavior = policy if "fresh" in get(name).needed(options) else behaviors["stale"]
    Y = len(SMALL.responses)
    p = torch.tensor([0.25] * Y + [0.75] * Y, dtype=torch.float64).expand(2, -1)
    u = torch.linspace(0, 2, Y, dtype=torch.float64)
    data = data_of(behavior, reward, reference, judged=claims.judged)
    noisy = replace(
        data,
        reward=torch.cat([reward - 0.3 * u, reward + 0.1 * u], 1),
        response=torch.arange(Y).repeat(2),
        noise=p,
    )
    found, plain = (
        gradient(policy, reference, AllGroups(d, reference, n).batch, name, options) for d in (noisy, data)
    )
    change = (found - plain).abs().max().item()
    yield row(
        name,
        "noisy rewards count with their mean" if claims.noise else "noise in the rewards matters",
        f"n={n}",
        claims,
        change,
        most=EXACT if claims.noise else None,
        least=None if claims.noise else 1e-3,
    )


def needs(name: str, claims: Claims) -> Row:
    """The share of what it declares that it refuses to do without, each withheld by itself."""
    policy, reference, _, reward = problem(SMALL)
    options, entry = options_of(name, claims), get(name)
    resolved = entry.resolve(name, options)
    data = data_of(policy, reward, reference, judged=claims.judged)
    batch = AllGroups(data, reference, max(claims.n)).batch.replace(old_logp=None)
    assert batch.tokens is not None
    assert batch.lengths is not None
    declared = entry.needs(resolved)
    live = policy.streams(batch.tokens, batch.lengths, batch.mask, STREAMS, reference)
    refused = 0
    for need in declared:
        lacking, streams = batch, dict(live)
        if need == "reward":
            lacking = batch.replace(reward=torch.full_like(batch.reward, math.nan))
        elif need == "fresh":
            lacking = batch.replace(age=torch.full_like(batch.age, math.nan))
        elif need in ("groups", "triples"):
            rows = torch.cat([torch.arange(max(claims.n), len(batch.mask)), torch.tensor([0])])
            lacking, streams = batch.rows(rows), {k: v[rows] for k, v in streams.items()}
        elif need in STREAMS:
            del streams[need]
        elif need == "stored_value":
            lacking = batch.replace(extra={})
        else:
            lacking = batch.replace(**{need: None})
        try:
            differentiate(name, entry, streams, lacking, resolved)
        except Refused:
            refused += 1
    share = refused / len(declared) if declared else 1.0
    return row(
        name,
        "what it needs and lacks is refused",
        ", ".join(sorted(declared)) or "nothing",
        claims,
        share,
        least=1.0,
    )
