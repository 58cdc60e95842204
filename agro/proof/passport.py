"""A passport: what is measured of an objective on enumerable policies, against what its source claims."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from agro.errors import Refused
from agro.objectives import differentiate
from agro.objectives.core import STREAMS
from agro.objectives.needs import OLD_LOGP, REF_LOGP, REWARD, withhold
from agro.proof.claims import CLAIMS
from agro.proof.ends import ends, tools
from agro.proof.expectation import AllGroups
from agro.proof.formulas import Situation, half_variance
from agro.proof.measuring import BETA, EXACT, RAGGED, SMALL, Row, Subject, derivative, problem
from agro.proof.variance import estimates, variances
from agro.types import Batch


def passport(name: str) -> Iterator[Row]:
    for claims in CLAIMS[name]:
        subject = Subject(name, claims)
        for measure in (expectations, bias, invariances, limits, variances, estimates, noise, tools, ends):
            yield from measure(subject)
    yield needs(Subject(name, CLAIMS[name][0]))


def expectations(subject: Subject) -> Iterator[Row]:
    """The expected gradient over all groups against the derivative of the claim, on- and off-policy."""
    for space, kind in ((SMALL, "table"), (SMALL, "network"), (RAGGED, "network")):
        policy, reference, behaviors, reward = problem(space, kind)
        lengths = "ragged" if space.early_end else "full"
        for where in subject.behaviors:
            for n in subject.claims.n:
                batch = subject.batch(behaviors[where], reward, reference, n)
                situation = Situation(policy, reference, behaviors[where], reward, BETA, n)
                exact = derivative(subject.claims.expects(situation), policy)
                worst = (subject.gradient(policy, reference, batch) - exact).abs().max().item()
                setting = f"{kind}, {lengths}, from {where}, n={n}"
                yield subject.row("expected gradient", setting, worst, most=EXACT)


def bias(subject: Subject) -> Iterator[Row]:
    """On-policy against the gradient of −E_π r + β KL(π ‖ f), as a share of its norm."""
    policy, reference, _, reward = problem(SMALL, "network")
    claims, n = subject.claims, subject.claims.n[-1]
    penalty = subject.options().get("beta", 0.0) * (policy.logp() - reference.logp().detach())
    exact = derivative((policy.logp().exp() * (penalty - reward)).sum(1).mean(), policy)
    factor, most, setting = 1.0, None, f"on-policy, n={n}"
    if claims.policy_gradient is not None:
        factor, most = claims.policy_gradient(BETA), EXACT
    if factor != 1:
        setting += f", divided by {factor:g}"
    got = subject.gradient(policy, reference, subject.batch(policy, reward, reference, n))
    own = sum(w.numel() for w in policy.weights().values())  # the policy's, without the value's
    share = ((got / factor - exact)[:own].norm() / exact.norm()).item()
    yield subject.row("bias against the regularized policy gradient", setting, share, most=most)


def invariances(subject: Subject) -> Iterator[Row]:
    """What may change without changing the gradient."""
    policy, reference, behaviors, reward = problem(RAGGED, "network")
    claims, n = subject.claims, subject.claims.n[0]
    behavior = behaviors["stale" if "stale" in subject.behaviors else "policy"]
    batch = subject.batch(behavior, reward, reference, n)
    plain = subject.gradient(policy, reference, batch)

    def change(changed: Batch, size: int | None = None) -> float:
        return (subject.gradient(policy, reference, changed, size=size) - plain).abs().max().item()

    shift_X = torch.tensor([0.7, -1.3], dtype=torch.float64)
    moved = change(subject.batch(behavior, reward + shift_X[:, None], reference, n))
    what = "a reward shift per prompt"
    yield subject.changes(claims.shift, what, f"{what} matters", f"n={n}", moved)
    if REF_LOGP in subject.needs:
        assert batch.ref_logp is not None
        assert batch.tokens is not None
        shift_BT = torch.zeros_like(batch.ref_logp)
        shift_BT[:, 1] = shift_X[batch.tokens[:, 0]]
        moved = change(batch.replace(ref_logp=batch.ref_logp + shift_BT))
        what = "a shift of log π_ref per prompt"
        yield subject.changes(claims.reference_shift, what, f"{what} matters", f"n={n}", moved)
    order = torch.randperm(len(batch.mask), generator=torch.Generator().manual_seed(0))
    for what, setting, moved in (
        ("the order of rows", "", change(batch.rows(order))),
        ("padding", "three more columns, ", change(_padded(batch, 3))),
        ("the micro-batch", "1 row, ", change(batch, 1)),
        ("the micro-batch", "7 rows, ", change(batch, 7)),
    ):
        yield subject.row(what, f"{setting}n={n}", moved, most=EXACT)


def _padded(batch: Batch, by: int) -> Batch:
    """The batch with `by` more columns outside the mask, of NaN or the token 0."""
    wider = {}
    for field, fill in (("mask", False), ("tokens", 0), ("ref_logp", math.nan), ("behavior_logp", math.nan)):
        value = getattr(batch, field)
        if value is not None:
            wider[field] = torch.cat([value, torch.full((len(value), by), fill, dtype=value.dtype)], 1)
    return batch.replace(**wider)


def limits(subject: Subject) -> Iterator[Row]:
    """β → 0 and β → ∞, where there is a claim: RLOO, and ∇½ Var[ρ]."""
    if not subject.claims.limits:
        return
    policy, reference, behaviors, reward = problem(SMALL, "network")
    batch = subject.batch(behaviors["stale"], reward, reference, 2)
    rloo = Subject("rloo", CLAIMS["rloo"][0]).gradient(policy, reference, batch)
    for beta in (0.0, 1e-9):
        off = (subject.gradient(policy, reference, batch, beta) - rloo).abs().max().item()
        yield subject.row("RLOO as β → 0", f"β={beta:g}, from stale", off, most=1e-8)
    beta = 1e9
    situation = Situation(policy, reference, behaviors["stale"], torch.zeros_like(reward), 1.0, 2)
    exact = derivative(half_variance(situation), policy)
    off = (subject.gradient(policy, reference, batch, beta) / beta - exact).abs().max().item()
    yield subject.row("½ ∇Var[ρ] as β → ∞", f"β={beta:g}, divided by it, from stale", off, most=1e-8)


def noise(subject: Subject) -> Iterator[Row]:
    """Rewards that are 0.3 u lower with probability ¼ and 0.1 u higher with ¾: against their mean. u is a
    response's own."""
    if REWARD not in subject.needs:
        return
    policy, reference, behaviors, reward = problem(SMALL, "network")
    n, Y = subject.claims.n[0], len(SMALL.responses)
    behavior = behaviors["stale" if "stale" in subject.behaviors else "policy"]
    u_Y = torch.linspace(0, 2, Y, dtype=torch.float64)
    data = subject.data(behavior, reward, reference)
    noisy = replace(
        data,
        reward=torch.cat([reward - 0.3 * u_Y, reward + 0.1 * u_Y], 1),
        response=torch.arange(Y).repeat(2),
        noise=torch.tensor([0.25] * Y + [0.75] * Y, dtype=torch.float64).expand(2, -1),
    )
    with_noise, plain = (
        subject.gradient(policy, reference, AllGroups(d, reference, n).batch) for d in (noisy, data)
    )
    moved = (with_noise - plain).abs().max().item()
    kept, changed = "noisy rewards count with their mean", "noise in the rewards matters"
    yield subject.changes(subject.claims.noise, kept, changed, f"n={n}", moved)


def needs(subject: Subject) -> Row:
    """The share of what it declares that it refuses to do without, each withheld by itself."""
    policy, reference, _, reward = problem(SMALL)
    batch = subject.batch(policy, reward, reference, max(subject.claims.n))
    assert batch.tokens is not None
    assert batch.lengths is not None
    assert OLD_LOGP not in subject.needs
    live = policy.streams(batch.tokens, batch.lengths, batch.mask, STREAMS, reference)
    resolved = subject.entry.resolve(subject.name, subject.options())
    declared = subject.entry.needs(resolved)
    refused = 0
    for need in declared:
        without, streams = withhold(need, batch, live)
        try:
            differentiate(subject.name, subject.entry, streams, without, resolved)
        except Refused:
            refused += 1
    share = refused / len(declared) if declared else 1.0
    setting = ", ".join(sorted(declared)) or "nothing"
    return subject.row("what it needs and doesn't get is refused", setting, share, least=1.0)
