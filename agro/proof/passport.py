"""A passport: measurements of an objective on enumerable policies, against the claims of its source."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from agro.errors import Refused
from agro.io.processes import cores
from agro.objectives import Need, NotFinite, differentiate
from agro.objectives.core import STREAMS
from agro.objectives.needs import NEEDS, PAIRS, GroupSize, OfReference
from agro.proof.claims import claims_of
from agro.proof.ends import ends, own_ends, tools
from agro.proof.enumerable import Space
from agro.proof.expectation import PER_TOKEN, all_groups
from agro.proof.formulas import Situation, half_variance
from agro.proof.measuring import (
    BETA,
    EXACT,
    RAGGED,
    SMALL,
    ProofRow,
    Subject,
    derivative,
    estimates,
    problem,
    variances,
)
from agro.types import Batch


def passport(name: str) -> Iterator[ProofRow]:
    """Yield all rows of an objective, claim by claim."""
    measurements: tuple[Callable[[Subject], Iterator[ProofRow]], ...] = (
        *(expectations, episodes, bias, invariances, limits, variances, estimates, noise, tools),
        *(ends, own_ends, needs),
    )
    for claims in claims_of(name):
        subject = Subject(name, claims)
        for measure_property in measurements:
            yield from measure_property(subject)


def expectations(subject: Subject) -> Iterator[ProofRow]:
    """Compare the expected gradient over all groups with the claim's derivative, on- and off-policy.

    Also over groups of several sizes, and with the smaller ones dropped.
    """
    claims = subject.claims
    for space, kind in ((SMALL, "table"), (SMALL, "network"), (RAGGED, "network")):
        for source in subject.behaviors:
            for n in claims.n:
                yield _expectation(subject, space, kind, source, (n,))
    for source in subject.behaviors[::3]:  # policy and stale
        yield _expectation(subject, RAGGED, "network", source, (2, 3) if claims.judged else claims.n)
        if claims.grouped:
            dropping = replace(claims, options={**claims.options, "singletons": "drop"})
            sizes = (1, claims.n[0])
            yield _expectation(Subject(subject.name, dropping), RAGGED, "network", source, sizes)


def episodes(subject: Subject) -> Iterator[ProofRow]:
    """The same for responses in two rows each, or check that these are refused."""
    if subject.claims.episodes:
        for source in subject.behaviors[::3]:  # policy and stale
            sizes = subject.claims.n[-1:]
            yield _expectation(subject, RAGGED, "network", source, sizes, two_rows=True)
        return
    policy, reference, _, reward = problem(RAGGED)
    batch = subject.batch(policy, reward, reference, subject.claims.min_responses, two_rows=True)
    refused = _refuses(lambda: subject.gradient(policy, reference, batch))
    yield subject.row("responses in several rows are refused", "", float(refused), lower=1.0)


def _expectation(
    subject: Subject, space: Space, kind: str, source: str, sizes: tuple[int, ...], *, two_rows: bool = False
) -> ProofRow:
    policy, reference, behaviors, reward = problem(space, kind)
    batch = subject.batch(behaviors[source], reward, reference, *sizes, two_rows=two_rows)
    old, expert = subject.old(space), subject.expert(space)
    situation = Situation(policy, reference, behaviors[source], reward, BETA, 0, two_rows, old, expert)
    claimed = [
        subject.claims.expects(replace(situation, n=n)) for n in sizes if n >= subject.claims.min_responses
    ]
    exact = derivative(torch.stack(claimed).mean(), policy)
    worst = (subject.gradient(policy, reference, batch) - exact).abs().max().item()
    lengths = "ragged" if space.early_end else "full"
    setting = f"{kind}, {lengths}, from {source}, n={' and '.join(map(str, sizes))}"
    if two_rows:
        setting += ", two rows each"
    return subject.row("expected gradient", setting, worst, upper=EXACT)


def _refuses(work: Callable[[], object]) -> bool:
    """Whether the data are refused; a gradient that isn't finite is no such refusal."""
    try:
        work()
    except NotFinite:
        return False
    except Refused:
        return True
    return False


def bias(subject: Subject) -> Iterator[ProofRow]:
    """The on-policy distance to the gradient of −E_π r + β KL(π ‖ f), as a share of its norm."""
    if "policy" not in subject.behaviors:
        return
    policy, reference, _, reward = problem(SMALL, "network")
    claims, n = subject.claims, subject.claims.n[-1]
    penalty = subject.options().get("beta", 0.0) * (policy.logp() - reference.logp().detach())
    exact = derivative((policy.logp().exp() * (penalty - reward)).sum(1).mean(), policy)
    factor, bound, setting = 1.0, None, f"on-policy, n={n}"
    if claims.policy_gradient is not None:
        factor, bound = claims.policy_gradient(BETA), EXACT
    if factor != 1:
        setting += f", divided by {factor:g}"
    got = subject.gradient(policy, reference, subject.batch(policy, reward, reference, n))
    size = sum(w.numel() for w in policy.weights().values())  # only the policy's weights, not the value's
    share = ((got / factor - exact)[:size].norm() / exact.norm()).item()
    yield subject.row("bias against the regularized policy gradient", setting, share, upper=bound)


def invariances(subject: Subject) -> Iterator[ProofRow]:
    """Changes of the data that don't change the gradient."""
    policy, reference, behaviors, reward = problem(RAGGED, "network")
    claims, n = subject.claims, subject.claims.n[0]
    behavior = behaviors[subject.usual]
    batch = subject.batch(behavior, reward, reference, n, two_rows=claims.episodes)
    plain = subject.gradient(policy, reference, batch)

    def change(changed: Batch, size: int | None = None) -> float:
        return (subject.gradient(policy, reference, changed, size=size) - plain).abs().max().item()

    shift_X = torch.tensor([0.7, -1.3], dtype=torch.float64)
    shifted = reward + shift_X[:, None]
    moved = change(subject.batch(behavior, shifted, reference, n, two_rows=claims.episodes))
    title = "a reward shift per prompt"
    yield subject.changes(claims.shift, title, f"{title} matters", f"n={n}", moved)
    if "ref_logp" in claims.needs and "of_reference" not in claims.needs:
        assert batch.ref_logp is not None
        assert batch.tokens is not None
        shift_BT = torch.zeros_like(batch.ref_logp)
        shift_BT[:, 1] = shift_X[batch.tokens[:, 0]]
        moved = change(batch.replace(ref_logp=batch.ref_logp + shift_BT))
        title = "a shift of log π_ref per prompt"
        yield subject.changes(claims.reference_shift, title, f"{title} matters", f"n={n}", moved)
    order = torch.randperm(len(batch.mask), generator=torch.Generator().manual_seed(0))
    wider = {}  # three more columns outside the mask, of NaN or token 0
    for field, fill in (("mask", False), ("tokens", 0), *((name, math.nan) for name in PER_TOKEN)):
        value = getattr(batch, field)
        wider[field] = torch.cat([value, torch.full((len(value), 3), fill, dtype=value.dtype)], 1)
    for title, setting, moved in (
        ("the order of rows", "", change(batch.rows(order))),
        ("padding", "three more columns, ", change(batch.replace(**wider))),
        ("the micro-batch", "1 row, ", change(batch, 1)),
        ("the micro-batch", "7 rows, ", change(batch, 7)),
    ):
        yield subject.row(title, f"{setting}n={n}", moved, upper=EXACT)


def limits(subject: Subject) -> Iterator[ProofRow]:
    """β → 0 and β → ∞, if claimed: RLOO, and ∇½ Var[ρ]."""
    if not subject.claims.limits:
        return
    policy, reference, behaviors, reward = problem(SMALL, "network")
    batch = subject.batch(behaviors["stale"], reward, reference, 2)
    rloo = Subject("rloo", claims_of("rloo")[0]).gradient(policy, reference, batch)
    for beta in (0.0, 1e-9):
        off = (subject.gradient(policy, reference, batch, beta) - rloo).abs().max().item()
        yield subject.row("RLOO as β → 0", f"β={beta:g}, from stale", off, upper=1e-8)
    beta = 1e9
    situation = Situation(policy, reference, behaviors["stale"], torch.zeros_like(reward), 1.0, 2)
    exact = derivative(half_variance(situation), policy)
    off = (subject.gradient(policy, reference, batch, beta) / beta - exact).abs().max().item()
    yield subject.row("½ ∇Var[ρ] as β → ∞", f"β={beta:g}, divided by it, from stale", off, upper=1e-8)


def noise(subject: Subject) -> Iterator[ProofRow]:
    """Compare rewards that are 0.3 u lower with probability ¼ and 0.1 u higher with ¾ to their mean. u
    depends on the response."""
    if "reward" not in subject.claims.needs:
        return
    policy, reference, behaviors, reward = problem(SMALL, "network")
    n, Y = subject.claims.n[0], len(SMALL.responses)
    behavior = behaviors[subject.usual]
    u_Y = torch.linspace(0, 2, Y, dtype=torch.float64)
    data = subject.data(behavior, reward, reference)
    noisy = replace(
        data,
        reward=torch.cat([reward - 0.3 * u_Y, reward + 0.1 * u_Y], 1),
        response=torch.arange(Y).repeat(2),
        noise=torch.tensor([0.25] * Y + [0.75] * Y, dtype=torch.float64).expand(2, -1),
    )
    with_noise, plain = (
        subject.gradient(policy, reference, all_groups(d, reference, n)) for d in (noisy, data)
    )
    moved = (with_noise - plain).abs().max().item()
    invariant, changed = "noisy rewards count with their mean", "noise in the rewards matters"
    yield subject.changes(subject.claims.noise, invariant, changed, f"n={n}", moved)


def needs(subject: Subject) -> Iterator[ProofRow]:
    """Check that withholding any one of the claimed needs is refused, and that withholding all other needs
    changes nothing."""
    policy, reference, behaviors, reward = problem(SMALL)
    claims, resolved = subject.claims, subject.entry.resolve(subject.name, subject.options())
    behavior = behaviors[subject.behaviors[0]]
    batch = subject.batch(behavior, reward, reference, claims.min_responses)
    with torch.no_grad():
        live = policy.streams_of(batch, STREAMS, reference)

    def gradient(without: Collection[Need]) -> Tensor:
        remaining, streams = batch, dict(live)
        for need in without:
            remaining = need.without(remaining)
            streams.pop(need, None)
        grads = differentiate(subject.name, subject.entry, streams, remaining, resolved).grads
        return torch.cat([grad.flatten() for grad in grads.values()])

    refused = [_refuses(partial(gradient, [need])) for need in NEEDS if need in claims.needs]
    share = sum(refused) / len(refused) if refused else 1.0
    setting = ", ".join(claims.needs) or "nothing"
    yield subject.row("what it needs and doesn't get is refused", setting, share, lower=1.0)
    # Groups already have the smallest claimed size. Withholding whose responses they are changes the
    # behavior's log-probs, which may be needed themselves.
    excluded = (GroupSize, OfReference)
    unneeded = [n for n in NEEDS if n not in claims.needs and (n is PAIRS or not isinstance(n, excluded))]
    try:
        enough = torch.equal(gradient(unneeded), gradient([]))
    except Refused:
        enough = False
    yield subject.row("what it is claimed to need is enough", setting, float(enough), lower=1.0)


def measure(name: str) -> list[ProofRow]:
    torch.set_num_threads(1)  # the tensors are small: a second thread would only wait
    return list(passport(name))


def prove(names: Sequence[str]) -> dict[str, list[ProofRow]]:
    """Measure the passport of each of `names`, in this order."""
    workers = min(len(names), cores())
    if workers == 1:
        return {name: measure(name) for name in names}
    longest_first = sorted(names, key=lambda name: -sum(c.updates for c in claims_of(name)))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        done = dict(zip(longest_first, pool.map(measure, longest_first)))
    return {name: done[name] for name in names}
