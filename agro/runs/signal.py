"""Why nothing can be learned from a step (metric `no_signal`), and what to do: for terminal and page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agro.config import DataConfig
from agro.runs.rundata import RunData

PATIENCE = 3  # steps in a row without a signal that are worth a warning; single ones are common

WAYS_OUT = {
    "no valid response": (
        "see why responses are dropped (dropped_reasons; agro check on the store); correct these records, or "
        "raise train.max_length"
    ),
    "all rewards are 0": (
        "check that the reward of a right response isn't 0 (agro show, agro score); then easier prompts, a "
        "reward with intermediate values, or sft on good responses first"
    ),
    "equal rewards within groups": (
        "prompts that are solved sometimes, a reward with intermediate values, or more responses of a prompt "
        "(sampler.n; data.group_size of a store). Where all prompts are solved, the task is learned"
    ),
    "a gradient of 0": (
        "see whether groups of one response are dropped (agro check on the store; agro train feedback takes "
        "them), and whether all weights of responses have fallen to 0; then a new run with a lower train.lr"
    ),
}


SPREAD = (
    "where other groups of the store have rewards that differ: data.spread = true, which draws only those. "
    "Otherwise "
)


def way_out(reason: str, data: DataConfig) -> str:
    """What to do about a reason, a key of `WAYS_OUT`; `data`: of the phase."""
    is_equal = reason in ("all rewards are 0", "equal rewards within groups")
    prefix = SPREAD if is_equal and data.draws_stored and not data.spread else ""
    return prefix + WAYS_OUT[reason]


def longest_run(flags: Sequence[bool]) -> int:
    """The most true values in a row."""
    longest = current = 0
    for flag in flags:
        current = current + 1 if flag else 0
        longest = max(longest, current)
    return longest


@dataclass(frozen=True)
class Shortfall:
    """Steps without something: `count` of `steps`, `in_a_row` of them at most in a row, by reason."""

    count: int
    steps: int
    in_a_row: int
    reasons: tuple[str, ...] = ()

    @property
    def is_said(self) -> bool:
        """Whether the run warned about it."""
        return self.in_a_row >= min(PATIENCE, self.steps)


def without_signal(run: RunData) -> Shortfall | None:
    """The steps from which nothing could be learned; None where that wasn't recorded."""
    rows = [row for row in run.rows if "no_signal" in row and row["step"]]
    if not rows:
        return None
    reasons = [row["no_signal"] for row in rows]
    counts = Counter(reason for reason in reasons if reason)
    in_a_row = longest_run([bool(reason) for reason in reasons])
    return Shortfall(counts.total(), len(rows), in_a_row, tuple(reason for reason, _ in counts.most_common()))


def without_share(run: RunData) -> Shortfall | None:
    """The steps for which the store had fewer groups than asked for; None where that wasn't recorded."""
    missing = [row["replay_missing"] for row in run.rows if row.get("replay_missing") is not None]
    if not missing:
        return None
    return Shortfall(sum(n > 0 for n in missing), len(missing), longest_run([n > 0 for n in missing]))
