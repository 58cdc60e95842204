"""One response a prompt, rated by users of whom one is more lenient: where centered rewards end.

Two users with two prompts each. The second one gives `lenience` more to every response, which shifts V* as
well; besides that the V* of a user's prompts are `spread` apart. A centered reward is r − E_μ[r | user], the
limit of `agro import --center-by` for a large log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from reproductions.baselines.enumerated import Outcomes, Problems, gradient_of_rows, mean_by

POWER = 0.5  # of the weight min(1, (π/π_ref)^½)
LENIENCE, SPREADS = (0.0, 0.25, 0.5, 1.0), (0.0, 0.25)
PROMPTS, RESPONSES = 4, 3  # the first two prompts are the first user's


def tables(
    drawn: tuple[Tensor, Tensor, Tensor], *, alike: bool, of_reference: bool, lenience: float, spread: float
) -> Problems:
    """`alike`: the second user's prompts are the first one's, but for what this user gives on top."""
    reference, behavior, reward = (
        torch.cat([part[:, :2], part[:, :2]], 1) if alike else part for part in drawn
    )
    problems = Problems(reference, reference if of_reference else behavior, reward)
    wanted = torch.tensor([0.0, spread, lenience, lenience + spread], dtype=torch.float64)
    shift = wanted - problems.value
    return Problems(reference, problems.behavior, reward + shift[..., None])


def centered(problems: Problems) -> Problems:
    """The same with rewards less the mean of their user. π* is the same."""
    assert problems.behavior is not None
    mean = (problems.behavior.exp() * problems.reward).sum(-1)
    of_user = mean.view(-1, 2, 2).mean(-1).repeat_interleave(2, dim=1)
    return Problems(problems.reference, problems.behavior, problems.reward - of_user[..., None])


def pooled(all_: Outcomes) -> Tensor:
    return mean_by(all_.chance * all_.weight * all_.norm, all_.R)[:, None]


def pooled_by_user(all_: Outcomes) -> Tensor:
    """[P,4]"""
    share, R = ((all_.chance * all_.weight * all_.norm).view(-1, 2, 6), all_.R.view(-1, 2, 6))
    return mean_by(share, R).repeat_interleave(2, dim=1)


def learned(all_: Outcomes) -> Tensor:
    shape = (-1, PROMPTS, RESPONSES)
    return mean_by(all_.chance.view(shape), all_.R.view(shape))


def updates(problems: Problems) -> dict[str, Callable[[Tensor], Tensor]]:
    """By name the expected updates of batches without end, with the baseline "optimal"."""
    return {
        "the batch": gradient_of_rows(problems, POWER, pooled),
        "the batch, centered by user": gradient_of_rows(centered(problems), POWER, pooled),
        "the responses of a user": gradient_of_rows(problems, POWER, pooled_by_user),
        "a value that is learned": gradient_of_rows(problems, POWER, learned),
    }


def settings() -> list[dict[str, Any]]:
    return [
        {"data": data, "users": users, "spread": spread, "lenience": lenience}
        for data in ("reference", "other")
        for users in ("alike", "different")
        for spread in SPREADS
        for lenience in LENIENCE
    ]
