"""Which stored groups and responses a step trains on: pure functions, so a draw can be repeated.

All randomness is a hash of (seed, step, item). Ids of rows matter only for the order of a group's responses,
so a run that is resumed, and appends the same samples again, draws the same again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple

from agro.errors import Refused
from agro.types import Role


@dataclass(frozen=True)
class DrawRule:
    """What to draw. A sample is eligible when it is scored and fits `roles`, `sources` and `max_age`.

    The rows of one episode are one response, eligible when all of them are. All eligible responses of a group
    are drawn, or `group_size` of them. Groups with fewer than `min_group` eligible responses are not drawn.
    With `pairs` only eligible responses with a judgment against another one are drawn.
    """

    groups: int
    group_size: int | None = None
    roles: tuple[Role, ...] | None = None
    sources: tuple[str, ...] | None = None
    max_age: int | None = None  # optimizer steps; excludes samples of unknown staleness
    min_group: int = 1
    order: Literal["least_used", "uniform"] = "least_used"
    scored_only: bool = True
    pairs: bool = False
    fewer: bool = False  # take as many groups as there are, where there are fewer
    wait: float = 0.0  # seconds to wait for other processes to add enough groups

    def __post_init__(self) -> None:
        for name, least in (("groups", 1), ("group_size", self.min_group), ("max_age", 0), ("min_group", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise Refused(f"draw: {name}: expected {least} or more, got {value}")
        if self.order not in ("least_used", "uniform"):
            raise Refused(f"draw: order: expected least_used or uniform, got {self.order!r}")


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


def pick_groups(candidates: Sequence[Candidate], rule: DrawRule, at: At) -> list[str]:
    """The prompt_ids of up to `rule.groups` groups.

    "least_used": those that this run used least, ties by hash, so each is used once before any is twice.
    "uniform": any, without replacement within the step.
    """
    least_used = rule.order == "least_used"
    ranked = sorted(
        (c.uses if least_used else 0, noise(at.seed, at.step, c.prompt_id), i)
        for i, c in enumerate(candidates)
    )
    return [candidates[i].prompt_id for _, _, i in ranked[: rule.groups]]


def pick_responses(n: int, rule: DrawRule, at: At, prompt_id: str) -> list[int]:
    """Which of a group's n eligible responses, as rising positions among them."""
    if rule.group_size is None or n <= rule.group_size:
        return list(range(n))
    return sorted(sorted(range(n), key=lambda i: noise(at.seed, at.step, prompt_id, i))[: rule.group_size])


def pick_pairs(pairs: Sequence[tuple[int, int]], rule: DrawRule, at: At, prompt_id: str) -> list[int]:
    """Which of a group's responses, as rising positions among them; `pairs` consist of such positions.

    Pairs are visited in the order of a hash. One that would exceed `group_size` responses is not taken.
    """
    taken: set[int] = set()
    for p in sorted(range(len(pairs)), key=lambda p: noise(at.seed, at.step, prompt_id, "pair", p)):
        if rule.group_size is None or len(taken | set(pairs[p])) <= rule.group_size:
            taken |= set(pairs[p])
    return sorted(taken)
