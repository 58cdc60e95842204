"""Rules by which a step draws stored groups and responses: pure functions, so a draw can be repeated.

All randomness is a hash of (seed, step, item). Row ids affect only the order of a group's responses, so a
resumed run that appends the same samples again repeats the same draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import NamedTuple

from agro.config import DataConfig
from agro.errors import Refused
from agro.types import UNKNOWN_VERSION

PLACE_BITS = 63  # bits of a group's place, the hash that orders groups; see `place_of`


@dataclass(frozen=True)
class DrawRule:
    """What to draw, by the configuration's `data` and the objective's needs.

    A sample is eligible when it is scored and fits `data.roles`, `data.sources`, `data.min_reward`,
    `data.best_of_group` and `data.max_age`. A group may be drawn at `data.max_uses` steps, and with
    `data.spread` only if the rewards of its eligible responses differ (with `equal`, only if they don't). The
    rows of one episode are one response, eligible when all of them are. All eligible responses of a group are
    drawn, or `data.group_size` of them. Groups with fewer than `min_group` eligible responses are not drawn.
    With `pairs` only eligible responses with a judgment against another one are drawn; unless `ties`, only
    judgments with a winner count.
    """

    groups: int
    data: DataConfig = field(default_factory=DataConfig)
    min_group: int = 1
    scored_only: bool = True
    pairs: bool = False
    ties: bool = False  # whether judgments with equal votes are pairs too
    equal: bool = False  # only groups of equal rewards: the second rule if data.spread is a share
    fewer: bool = False  # accept fewer groups if there aren't enough
    wait: float = 0.0  # seconds to wait for other processes to add enough groups

    @property
    def kinds(self) -> tuple[DrawRule, ...]:
        """This rule; two if data.spread is a share, for groups of different and of equal rewards."""
        return (self,) if isinstance(self.data.spread, bool) else (self, replace(self, equal=True))

    def __post_init__(self) -> None:
        size = self.data.group_size
        if size is not None and size < self.min_group:
            raise Refused(f"data.group_size: expected {self.min_group} or more, got {size}")
        for name, value in (("groups", self.groups), ("min_group", self.min_group)):
            if value < 1:
                raise Refused(f"draw: {name}: expected 1 or more, got {value}")


class Selection(NamedTuple):
    """The groups that a rule picked."""

    rule: DrawRule
    groups: Sequence[str]


class At(NamedTuple):
    """The position of a run when it draws, on which randomness, staleness and the recorded draw depend."""

    run: str
    step: int
    seed: int
    version: int  # optimizer steps of the learner's weights


class Candidate(NamedTuple):
    """A group with enough eligible responses; `uses` counts the steps of the run that drew from it."""

    prompt_id: str
    uses: int
    newest: int = UNKNOWN_VERSION  # version among the run's own eligible samples


def noise(seed: int, step: int, *item: str | int) -> int:
    """64 bits that depend only on the arguments."""
    key = "/".join(map(str, (seed, step, *item)))
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def is_held_out(prompt_id: str, share: float) -> bool:
    """Whether a prompt is in the share `data.hold_out`, which has the same prompts in every run and store."""
    return share > 0 and noise(0, 0, "hold_out", prompt_id) < share * 2**64


def place_of(candidate: Candidate, rule: DrawRule, seed: int) -> int:
    """63 bits that order groups, from the seed and, if the least used come first, the epoch."""
    epoch = candidate.uses if rule.data.order in ("least_used", "newest") else -1
    return noise(seed, epoch, "group", candidate.prompt_id) >> 1


def pick_likely(log_weight: Mapping[str, float], n: int, at: At) -> list[str]:
    """Sample `n` groups without replacement in proportion to exp(log_weight): those with the largest
    log_weight plus Gumbel noise (arXiv 1903.06059)."""

    def key(group: str) -> tuple[float, str]:
        uniform = (noise(at.seed, at.step, "closest", group) + 0.5) / 2**64
        return log_weight[group] - math.log(-math.log(uniform)), group

    return sorted(log_weight, key=key, reverse=True)[:n]


def pick_responses(n: int, rule: DrawRule, at: At, prompt_id: str) -> list[int]:
    """Pick some of a group's n eligible responses, as ascending positions among them."""
    size = rule.data.group_size
    if size is None or n <= size:
        return list(range(n))
    return sorted(sorted(range(n), key=lambda i: noise(at.seed, at.step, prompt_id, i))[:size])


def pick_pairs(pairs: Sequence[tuple[int, int]], rule: DrawRule, at: At, prompt_id: str) -> list[int]:
    """Pick some of a group's responses, as ascending positions among them; `pairs` has such positions.

    Pairs are visited in the order of a hash. One that would exceed `data.group_size` responses is skipped.
    """
    size, selected = rule.data.group_size, set[int]()
    for p in sorted(range(len(pairs)), key=lambda p: noise(at.seed, at.step, prompt_id, "pair", p)):
        if size is None or len(selected | set(pairs[p])) <= size:
            selected |= set(pairs[p])
    return sorted(selected)
