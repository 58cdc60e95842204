"""Where gradient descent converges, and how random tool output moves that point.

For methods that don't end at the optimum π_ref exp(r/β)/Z, the end is a closed form, in which μ is the fixed
policy that generated the samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from agro import objectives
from agro.objectives import differentiate, get
from agro.objectives.core import masked, wanted_streams
from agro.proof.claim import End
from agro.proof.enumerable import Enumerable, Space, kl, optimum
from agro.proof.expectation import AllGroups, DataDistribution
from agro.proof.formulas import Situation, wins
from agro.proof.measuring import BETA, EXACT, FAR, INSTANCES, ProofRow, Subject, problem
from agro.types import Batch

RATE = 0.1  # of Adam


def descend(
    start: Enumerable,
    reference: Enumerable,
    data: DataDistribution,
    name: str,
    options: Mapping[str, Any],
    n: int,
    updates: int,
) -> None:
    """Train `start` with Adam on the expected gradient over all groups of n; the rate falls over the last two
    thirds.

    If `start` is `data.behavior` too, samples come from the current policy. Exact gradients have no noise to
    average out, so Adam's second beta is smaller than usual and the rate falls far, which ends closer.
    """
    entry = get(name)
    resolved = entry.resolve(name, options)
    want = wanted_streams(entry.needs(resolved))
    moves = data.behavior is start or data.behavior.follows
    groups = AllGroups(data, reference, (n,))
    optimizer = torch.optim.Adam(start.parameters(), lr=RATE, betas=(0.9, 0.95), fused=True)
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = RATE * 1e-5 ** max(0.0, 1.5 * update / updates - 0.5)
        batch = groups.next_batch() if update and moves else groups.batch
        put_gradient(start, reference, batch, name, resolved, want)
        optimizer.step()


def put_gradient(
    policy: Enumerable,
    reference: Enumerable,
    batch: Batch,
    name: str,
    options: Mapping[str, Any],
    want: list[str],
) -> None:
    """Set the weights' gradients from the objective's own g, as the step does, in a single pass."""
    policy.zero_grad()
    live = policy.streams_of(batch, want, reference)
    grads = differentiate(name, get(name), live, batch, options).grads
    torch.stack([(grads[s] * masked(batch, value)).sum() for s, value in live.items()]).sum().backward()


SEEDS = {"reference": 2, "elsewhere": 9}  # of the tables at which descents start
NEAR = 1e-6  # nats: how close some hundred updates come to a claimed end
DISTANCE = "KL to the optimum at the end of descent"


def tools(subject: Subject) -> Iterator[ProofRow]:
    """How far a tool's output between two actions moves the fixed point from the optimum, if it is random and
    if it is certain."""
    if not subject.claims.tools:
        return
    space = Space(2, 3, 6, observed=(1,))  # action, output, action
    reference = Enumerable.table(space, 2)
    generator = torch.Generator().manual_seed(7)
    reward = torch.rand(6, 8, generator=generator, dtype=torch.float64)
    first_Y = torch.tensor([y[1] == 0 for y in space.responses])
    for output, certain in (("random", 0.5), ("certain", 1.0)):
        chance_Y = torch.where(first_Y, certain, 1 - certain).double()
        star = _optimum_with_tool(reference, reward, chance_Y)
        start = Enumerable.table(space, 2)
        data = DataDistribution(reference, reward, noise=chance_Y.expand(6, -1))
        descend(start, reference, data, subject.name, subject.options(), 2, subject.claims.updates)
        logp = start.logp().detach()
        value = (chance_Y * logp.exp() * (logp - star)).sum(1).median().item()
        setting = f"{output} output between two actions, data from reference, median of 6 instances"
        if output == "random":
            title = "a tool's random output moves the fixed point off the optimum"
            yield subject.row(title, setting, value, lower=1e-4)
        else:
            yield subject.row(DISTANCE, setting, max(value, 0.0), upper=EXACT)
    yield from _selection(subject)
    yield from _rows(subject)


def _selection(subject: Subject) -> Iterator[ProofRow]:
    """How far dropping groups of equal rewards (data.spread) moves the fixed point from the optimum, if
    rewards are 0 or 1 by chance and if they are fixed.

    With noisy rewards the selection depends on the noise: a pair's regularizer counts as often as its rewards
    differ. Without noise a pair of equal rewards only holds the policy in place.
    """
    beta, space = 0.1, Space(3, 2, 8)
    reference, behavior = Enumerable.table(space, 2), Enumerable.table(space, 5)
    mean = torch.rand(8, 9, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    star = optimum(reference.logp().detach(), mean, beta)
    twice, chance = torch.arange(9).repeat(2), torch.cat([1 - mean, mean], 1)
    binary = torch.cat([torch.zeros_like(mean), torch.ones_like(mean)], 1)
    for rewards, spread in (("noisy", True), ("noisy", False), ("fixed", True)):
        data = DataDistribution(behavior, mean, spread=spread)
        if rewards == "noisy":
            data = DataDistribution(behavior, binary, twice, chance, spread=spread)
        start, options = Enumerable.table(space, 2), {**subject.options(), "beta": beta}
        descend(start, reference, data, subject.name, options, 2, updates=600)
        distance = kl(start.logp().detach(), star)
        selection = "groups of unequal rewards alone" if spread else "all groups"
        setting = f"{rewards} rewards, {selection}, n = 2, β = {beta}, median of 8 instances"
        if rewards == "noisy" and spread:
            title = "leaving out groups of equal noisy rewards moves the fixed point off the optimum"
            yield subject.row(title, setting, distance.median().item(), lower=FAR)
        else:
            yield subject.row(DISTANCE, setting, max(distance.median().item(), 0.0), upper=NEAR)


def _rows(subject: Subject) -> Iterator[ProofRow]:
    """An episode of two rows, as from templates that change earlier turns: the rows are one response, whose ρ
    is their sum. Other libraries copy the advantage to each row.

    If a gradient is a sum over tokens times an advantage, copies preserve its direction. Consistency uses the
    ρ of a response: with that of a single row instead, the optimum isn't stationary.
    """
    shared, copied = (_expected_gradient(subject.name, split=split) for split in (False, True))
    setting = "two rows of an episode, all pairs of 9 episodes, at the optimum, β = 0.5"
    yield subject.row(
        "norm of the expected gradient, rows as one response", setting, shared.norm().item(), upper=EXACT
    )
    title = "norm of the expected gradient, each row as a response with a copy of the reward"
    yield subject.row(title, setting, copied.norm().item(), lower=1e-3)
    shared, copied = (_expected_gradient("rloo", split=split) for split in (False, True))
    cosine = torch.nn.functional.cosine_similarity(shared, copied, dim=0)
    title = "of rloo, 1 − cosine of both expected gradients"
    yield subject.row(title, setting, 1 - cosine.item(), upper=EXACT)


def _expected_gradient(name: str, *, split: bool) -> Tensor:
    """The gradient at the optimum in the logits of a first action and of a second one after it; `split`: each
    row is a response."""
    beta, generator = 0.5, torch.Generator().manual_seed(3)
    reward_AB = torch.rand((3, 3), generator=generator, dtype=torch.float64)
    reference_AB = torch.rand((3, 3), generator=generator, dtype=torch.float64).flatten().log_softmax(0)
    star_AB = (reference_AB + reward_AB.flatten() / beta).log_softmax(0).view(3, 3)
    first, second = (x.requires_grad_() for x in (star_AB.logsumexp(1), star_AB.log_softmax(1)))
    logp = torch.stack([first.log_softmax(0)[:, None].expand(3, 3), second.log_softmax(1)], 2).view(9, 2)
    reference_AB = reference_AB.view(3, 3)
    ref_logp = torch.stack(
        [reference_AB.logsumexp(1)[:, None].expand(3, 3), reference_AB.log_softmax(1)], 2
    ).view(9, 2)
    pairs = torch.cartesian_prod(torch.arange(9), torch.arange(9))
    episodes = pairs.flatten().repeat_interleave(2)  # the episode of each row, in pairs of episodes
    turns = torch.tensor([0, 1]).repeat(len(episodes) // 2)
    row_logp = logp[episodes, turns]
    columns = [torch.zeros_like(row_logp), row_logp]  # a prompt's token, and the action
    batch = Batch.of(
        mask=[[False, True]] * len(episodes),
        reward=reward_AB.flatten()[episodes].tolist(),
        group=torch.arange(len(pairs)).repeat_interleave(4).tolist(),
        response=range(len(episodes)) if split else (torch.arange(len(episodes)) // 2).tolist(),
        ref_logp=torch.stack([torch.zeros(len(episodes)), ref_logp[episodes, turns]], 1),
        staleness=[0] * len(episodes),
    )
    out = objectives.evaluate(
        name, torch.stack(columns, 1).detach(), batch, beta=0 if name == "rloo" else beta
    )
    gradient = torch.as_tensor(out.grad)[:, 1] @ row_logp
    return torch.cat([x.flatten() for x in torch.autograd.grad(gradient, (first, second))])


def _optimum_with_tool(reference: Enumerable, reward: Tensor, chance_Y: Tensor) -> Tensor:
    """[X,Y] log π* of two actions around an output with two choices: the first action depends on the expected
    later value.

    `reward` [X,Y] and the output's probability `chance_Y` are over the responses of Space(2, 3).
    """
    X, logp = len(reward), reference.logp_next().detach()
    ends_output = [i for i, context in enumerate(reference.space.contexts) if len(context) == 2]
    last_logp = logp[:, ends_output].view(X, 2, 2, 2)  # action, output, action
    r = reward.view(X, 2, 2, 2)
    later = BETA * (last_logp + r / BETA).logsumexp(-1)  # the value after the output
    expected = (later * chance_Y.view(2, 2, 2)[:, :, 0]).sum(-1)
    first_logp = (logp[:, 0] + expected / BETA).log_softmax(-1)
    second = (last_logp + r / BETA).log_softmax(-1)
    return (first_logp[:, :, None, None] + second).reshape(X, 8)


def ends(subject: Subject) -> Iterator[ProofRow]:
    """Where exact gradient descent goes: KL(π ‖ π*) at its end, from π_ref on each behavior's data, and from
    another start."""
    if not subject.claims.updates:
        return
    logp, star = _descent(subject)
    distances = kl(logp, star).split(INSTANCES.prompts)
    for (source, start), distance in zip(_descents(subject), distances, strict=True):
        claim = "unknown" if source == "lacks support" else subject.claims.ends
        value, statistic, upper, lower = distance.median(), "median", None, None
        if claim == "optimum":
            # A policy learns slowly what it rarely samples: from afar, on its own samples, it takes longer.
            value, statistic = distance.max(), "worst"
            upper = 1e-3 if (source, start) == ("policy", "elsewhere") else EXACT
        elif claim == "elsewhere" and source != "policy":
            lower = FAR
        setting = f"data from {source}, start at {start}, {subject.claims.updates} updates"
        setting += f", {statistic} of {INSTANCES.prompts} instances"
        yield subject.row(DISTANCE, setting, max(value.item(), 0.0), upper=upper, lower=lower)


def own_ends(subject: Subject) -> Iterator[ProofRow]:
    """KL from the end of descent to the claimed end, on others' data."""
    if subject.claims.end is None:
        return
    _, reference, behaviors, reward = problem(INSTANCES)
    reached = _descent(subject)[0].split(INSTANCES.prompts)
    for (source, start), logp in zip(_descents(subject), reached, strict=True):
        if source in ("policy", "lacks support"):
            continue
        policy = behaviors[source]  # an end doesn't depend on the policy that is trained
        situation = Situation(policy, reference, behaviors[source], reward, BETA, subject.claims.n[0])
        claimed = subject.claims.end.of(situation).detach()
        value = kl(logp, claimed).max().item()
        setting = f"data from {source}, start at {start}, worst of {INSTANCES.prompts} instances"
        title = f"KL to {subject.claims.end.name} at the end of descent"
        yield subject.row(title, setting, max(value, 0.0), upper=NEAR)


def _descents(subject: Subject) -> list[tuple[str, str]]:
    """(behavior, start) of each."""
    elsewhere = "reference" if "reference" in subject.behaviors else "policy"
    return [*((source, "reference") for source in subject.behaviors), (elsewhere, "elsewhere")]


@cache
def _descent(subject: Subject) -> tuple[Tensor, Tensor]:
    """[X,Y] log π at the end, and log π*. Prompts of a table are independent, so all descents run at once,
    each in its own part of one table."""
    _, reference, behaviors, reward = problem(INSTANCES)
    descents = _descents(subject)
    times = len(descents)
    initial = Enumerable.joined([Enumerable.table(INSTANCES, SEEDS[start]) for _, start in descents])
    behavior = Enumerable.joined([behaviors[source] for source, _ in descents])
    is_own = torch.tensor([source == "policy" for source, _ in descents])
    behavior = behavior.following(initial, is_own.repeat_interleave(INSTANCES.prompts))
    reference, reward = Enumerable.joined([reference] * times), reward.repeat(times, 1)
    star = optimum(reference.logp().detach(), reward, BETA)
    data = subject.data(behavior, reward, reference)
    n, updates = subject.claims.n[0], subject.claims.updates
    descend(initial, reference, data, subject.name, subject.options(), n, updates)
    return initial.logp().detach(), star


def _lambert(s: Situation) -> Tensor:
    """[X,Y] log π with β log(π/μ) + ν π/μ = A, A = (1 − 1/n)(r − E_μ r): it minimizes E_μ (A − β
    log(π/μ))² over all policies. (The abstract of arXiv 2605.28150 finds Lambert functions for methods
    without ratios; this one is derived here.)

    A is the average over groups of n. ν makes probabilities add up to 1; it is at least 0, and without it
    the end would be π ∝ μ exp(A/β).
    """
    A_XY = (1 - 1 / s.n) * s.centered(s.reward)
    low_X1 = torch.zeros_like(A_XY[:, :1])
    high_X1 = torch.full_like(low_X1, 100.0)
    for _ in range(100):
        middle_X1 = (low_X1 + high_X1) / 2
        too_large_X1 = (s.p * _log_ratio(A_XY, s.beta, middle_X1).exp()).sum(1, keepdim=True) > 1
        low_X1 = torch.where(too_large_X1, middle_X1, low_X1)
        high_X1 = torch.where(too_large_X1, high_X1, middle_X1)
    return s.p.log() + _log_ratio(A_XY, s.beta, high_X1)


def _log_ratio(A_XY: Tensor, beta: float, nu_X1: Tensor) -> Tensor:
    """[X,Y] x with β x + ν e^x = A, by Newton's method from above, where it converges."""
    x_XY = A_XY / beta
    for _ in range(100):
        rise_XY = nu_X1 * x_XY.exp()
        x_XY = x_XY - (beta * x_XY + rise_XY - A_XY) / (beta + rise_XY)
    return x_XY


def _tilted(logp_XY: Tensor, change_XY: Tensor) -> Tensor:
    return (logp_XY + change_XY).log_softmax(1)


SAMPLER = End("μ", lambda s: s.behavior.logp())
BY_REWARD = End("μ r/Z", lambda s: _tilted(s.behavior.logp(), s.reward.log()))
OF_SAMPLER = End("μ exp(r/β)/Z", lambda s: _tilted(s.behavior.logp(), s.reward / s.beta))
LAMBERT = End("β log(π/μ) + ν π/μ = (1 − 1/n)(r − E_μ r)", _lambert)
TEACHER = End("π_ref", lambda s: s.reference.logp())
PER_TOKEN = End(
    "π_ref exp(T r/β)/Z", lambda s: _tilted(s.reference.logp(), s.policy.space.lengths * s.reward / s.beta)
)
BY_WINS = End("π_ref exp(P(y ≻ y')/β)/Z, y' from μ", lambda s: _tilted(s.reference.logp(), wins(s) / s.beta))
