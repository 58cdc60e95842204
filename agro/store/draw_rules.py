"""Which stored groups and responses a step trains on: pure functions, so a draw can be repeated.

All randomness is a hash of (seed, step, item). Ids of rows matter only for the order of a group's responses,
so a run that is resumed, and appends the same samples again, draws the same again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from agro.config import Data
from agro.errors import Refused


@dataclass(frozen=True)
class DrawRule:
    """What to draw, by the configuration's `data` and what the objective needs.

    A sample is eligible when it is scored and fits `data.roles`, `data.sources`, `data.min_reward`,
    `data.best_of_group` and `data.max_age`.
    The rows of one episode are one response, eligible when all of them are. All eligible responses of a group
    are drawn, or `data.group_size` of them. Groups with fewer than `min_group` eligible responses are not
    drawn. With `pairs` only eligible responses with a judgment against another one are drawn.
    """

    groups: int
    data: Data = field(default_factory=Data)
    min_group: int = 1
    scored_only: bool = True
    pairs: bool = False
    fewer: bool = False  # take as many groups as there are, where there are fewer
    wait: float = 0.0  # seconds to wait for other processes to add enough groups

    def __post_init__(self) -> None:
        size = self.data.group_size
        if size is not None and size < self.min_group:
            raise Refused(f"data.group_size: expected {self.min_group} or more, got {size}")
        for name, value in (("groups", self.groups), ("min_group", self.min_group)):
            if value < 1:
                raise Refused(f"draw: {name}: expected 1 or more, got {value}")


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


def noise(seed: int, step: int, *item: str | int) -> int:
    """64 bits that depend on nothing but the arguments."""
    key = "/".join(map(str, (seed, step, *item)))
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def is_held_out(prompt_id: str, share: float) -> bool:
    """Whether a prompt is among the share of `data.hold_out`. The same prompts are in every run and store."""
    return noise(0, 0, "hold_out", prompt_id) < share * 2**64


def pick_groups(candidates: Sequence[Candidate], rule: DrawRule, at: At) -> list[str]:
    """The prompt_ids of up to `rule.groups` groups.

    "least_used": those that this run used least, ties by hash, so each is used once before any is twice.
    "uniform": any, without replacement within the step.
    """
    least_used = rule.data.order == "least_used"
    ranked = sorted(
        (c.uses if least_used else 0, noise(at.seed, at.step, c.prompt_id), i)
        for i, c in enumerate(candidates)
    )
    return [candidates[i].prompt_id for _, _, i in ranked[: rule.groups]]


def pick_responses(n: int, rule: DrawRule, at: At, prompt_id: str) -> list[int]:
    """Which of a group's n eligible responses, as rising positions among them."""
    size = rule.data.group_size
    if size is None or n <= size:
        return list(range(n))
    return sorted(sorted(range(n), key=lambda i: noise(at.seed, at.step, prompt_id, i))[:size])


def pick_pairs(pairs: Sequence[tuple[int, int]], rule: DrawRule, at: At, prompt_id: str) -> list[int]:
    """Which of a group's responses, as rising positions among them; `pairs` consist of such positions.

    Pairs are visited in the order of a hash. One that would exceed `data.group_size` responses is not taken.
    """
    size, taken = rule.data.group_size, set[int]()
    for p in sorted(range(len(pairs)), key=lambda p: noise(at.seed, at.step, prompt_id, "pair", p)):
        if size is None or len(taken | set(pairs[p])) <= size:
            taken |= set(pairs[p])
    return sorted(taken)
