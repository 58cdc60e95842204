"""The same table in theory: where exact descent ends on a policy that can be enumerated.

Random problems of nine responses each. The expected gradient is followed from π_ref by Adam, through the
objectives and the step that train (`agro.proof`). The distance is KL(π ‖ π*) to π* = π_ref exp(r/β) / Z.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from agro.errors import Refused
from agro.objectives import NotFinite, differentiate, least_responses
from agro.objectives.core import masked, wanted_streams
from agro.objectives.needs import PAIRS, Need
from agro.proof.claim import Claims
from agro.proof.descent import DescentSettings, follow
from agro.proof.enumerable import Enumerable, Space, optimum
from agro.proof.expectation import AllGroups
from agro.proof.measuring import BETA, Subject, problem
from agro.types import Batch
from reproductions.arena.kinds import (
    KINDS,
    Kind,
    base,
    betas,
    chooses_by_reward,
    needs,
    obstacle,
    settings,
)
from reproductions.arena.task import OTHER

SPACE = Space(3, 2, 4)  # four random problems at once: prompts of a table are independent
UPDATES = 200
REFERENCE = 2  # the seed of the reference in `problem`


@dataclass(frozen=True)
class End:
    """KL(π ‖ π*) at the end in nats, the median of the problems; None with the reason where there is none."""

    objective: str
    kind: str
    kl: float | None
    why: str = ""
    cpu_seconds: float = 0.0


def ends(name: str, updates: int = UPDATES, of: Sequence[str] = tuple(KINDS)) -> list[End]:
    """The end of an objective on each kind of data."""
    return [_end(name, KINDS[kind], updates) for kind in of]


def _end(name: str, kind: Kind, updates: int) -> End:
    why, needed = obstacle(name, kind), needs(name)
    if not why and not chooses_by_reward(needed):
        why = "reads no rewards, and the random problems have no right responses to give it alone"
    if why:
        return End(name, kind.name, None, why)
    torch.set_num_threads(1)
    began = time.process_time()
    try:
        reached = _descend(_subject(name, needed), kind, updates)
    except (Refused, NotFinite) as error:
        return End(name, kind.name, None, str(error))
    return End(name, kind.name, reached, cpu_seconds=time.process_time() - began)


def _subject(name: str, needed: Collection[Need]) -> Subject:
    """The objective with its defaults, and β of the random problems where it has a β without a default."""
    of_beta = {"beta": BETA} if betas(name)[0] is not None else {}
    chosen = {**settings(name), **of_beta}
    read = tuple(sorted(map(str, needed)))
    return Subject(base(name), Claims(lambda s: torch.zeros(()), "unknown", read, chosen))


def _descend(subject: Subject, kind: Kind, updates: int) -> float:
    _, reference, behaviors, reward = problem(SPACE)
    policy = Enumerable.table(SPACE, REFERENCE)
    star = optimum(reference.logp().detach(), reward, BETA)
    behavior = Enumerable.table(SPACE, REFERENCE)
    logged = behaviors["stale"] if kind.log == OTHER else reference
    size = max(2, least_responses({need for need in needs(subject.name) if need != PAIRS}))
    of = ([behavior] if kind.replay < 1 else []) + ([logged] if kind.log else [])
    groups = [AllGroups(subject.data(source, reward, reference), reference, (size,)) for source in of]
    age = _aging(policy, behavior, kind.lag)

    def backward(update: int) -> None:
        age()
        policy.zero_grad()
        for source, of_source in zip(of, groups, strict=True):
            batch = of_source.next_batch() if source is behavior else of_source.batch
            _add_gradient(subject, policy, reference, batch, 1 / len(groups))

    path = follow(policy, star, backward, DescentSettings(updates=updates))
    return max(path.distance[-1].median().item(), 0.0)


def _aging(policy: Enumerable, behavior: Enumerable, lag: int) -> Callable[[], None]:
    """What gives `behavior` the weights that `policy` had `lag` updates ago, before each update."""
    earlier: deque[torch.Tensor] = deque(maxlen=lag + 1)

    def age() -> None:
        earlier.append(policy.weights()["logits"].detach().clone())
        with torch.no_grad():
            behavior.weights()["logits"].copy_(earlier[0])

    return age


def _add_gradient(
    subject: Subject, policy: Enumerable, reference: Enumerable, batch: Batch, share: float
) -> None:
    """Add `share` times the expected gradient over the batch to that of the weights."""
    entry = subject.entry
    options = entry.resolve(subject.name, subject.claims.options)
    want = wanted_streams(entry.needs(options))
    assert batch.tokens is not None
    assert batch.lengths is not None
    live = policy.streams(batch.tokens, batch.lengths, batch.mask, want, reference)
    seen = {name: stream.detach() for name, stream in live.items()}
    grads = differentiate(subject.name, entry, seen, batch, options).grads
    parts = [(grads[name] * masked(batch, live[name])).sum() for name in want]
    (share * torch.stack(parts).sum()).backward()
