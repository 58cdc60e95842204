"""What the store reports of its samples, judgments and runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from os.path import commonprefix
from typing import Any, NamedTuple

from agro.errors import Refused
from agro.types import Sample, Text


@dataclass(frozen=True)
class Group:
    """All responses to one prompt. The rows of one episode are one response, scored when all of them are."""

    prompt_id: str
    size: int  # responses
    scored: int  # responses with a reward
    reward_mean: float | None  # over those; None where there is none
    reward_min: float | None
    reward_max: float | None


@dataclass(frozen=True)
class Counts:
    """Rows of the store by what is known of them; samples = scored + unscored + failed."""

    samples: int
    groups: int
    scored: int
    unscored: int
    failed: int  # the reward has an error instead of a value
    with_tokens: int
    with_behavior: int  # every action has its behavior log-prob
    pairs: int  # judgments with a winner
    ties: int  # and with equal votes
    sources: dict[str, int]
    roles: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class SampleSummary(NamedTuple):
    """What is known of a sample without reading it."""

    id: int
    prompt_id: str
    scored: bool
    knows_behavior: bool  # every action has its behavior log-prob
    truncation: str  # see `agro.types.Sample.truncation`
    episode: str | None
    role: str


class Draw(NamedTuple):
    """One row that a run drew to train on."""

    step: int
    sample: int
    reward: float | None
    role: str
    source: str
    is_own: bool  # sampled by this run
    staleness: int | None  # optimizer steps from sampling to drawing; None: another run's, or unknown
    length: int | None  # actions; None where the store has no tokens


class RunUse(NamedTuple):
    """A run that drew some samples, and at which steps."""

    run: str
    samples: int
    first: int
    last: int

    def __str__(self) -> str:
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        return f"{self.run} ({self.samples} samples, {steps})"


@dataclass(frozen=True)
class Pair:
    """A judgment: rows of two samples, the better one first, and its votes where they were counted."""

    winner: int
    loser: int
    votes_winner: float | None = None
    votes_loser: float | None = None

    def __post_init__(self) -> None:
        if self.winner == self.loser:
            raise Refused(f"pair: expected two samples, got {self.winner} twice")
        for votes in (self.votes_winner, self.votes_loser):
            if votes is not None and not (math.isfinite(votes) and votes >= 0):
                raise Refused(
                    f"pair of {self.winner} and {self.loser}: expected votes of 0 or more, got {votes}"
                )

    @property
    def is_tie(self) -> bool:
        """Whether its votes are equal: neither of the two won."""
        return self.votes_winner is not None and self.votes_winner == self.votes_loser


@dataclass(frozen=True)
class Commit:
    """What a checkpoint of a run contains: all up to `step`, and the store's samples up to row `cursor`."""

    step: int
    digest: str
    cursor: int
    files: dict[str, str] = field(default_factory=dict)  # name: digest


@dataclass(frozen=True)
class Rewind:
    draws: int  # rows of draws deleted
    samples: int  # samples marked as redone


@dataclass(frozen=True)
class Damage:
    """What of a store isn't as it was written; empty, and false, for an intact one."""

    structure: list[str] = field(default_factory=list)  # what SQLite reports of its pages and indexes
    samples: list[int] = field(default_factory=list)  # ids
    pairs: list[int] = field(default_factory=list)  # rowids, as the following ones
    draws: list[int] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)
    group_uses: list[int] = field(default_factory=list)  # counts of draws
    requests: list[int] = field(default_factory=list)  # of collectors
    imports: list[int] = field(default_factory=list)  # files
    identities: list[int] = field(default_factory=list)  # of responses that files repeat

    def __bool__(self) -> bool:
        return any(asdict(self).values())

    def __str__(self) -> str:
        lines = []
        names = {"group_uses": "draw count", "imports": "imported file", "identities": "repeated response"}
        for table, rows in asdict(self).items():
            if table == "structure" and rows:
                lines.append(f"the file's structure is damaged: {'; '.join(rows[:3])}")
            elif rows:
                name = names.get(table, table.removesuffix("s"))
                plural = "s" if len(rows) > 1 else ""
                lines.append(f"{len(rows)} {name}{plural} not as written: {name} {first_of(rows, 5)}")
        return "; ".join(lines) or "intact"


def first_of(ids: Sequence[int], n: int) -> str:
    """The first `n` of many ids, for a message."""
    return ", ".join(map(str, ids[:n])) + (", …" if len(ids) > n else "")


class LedgerSample(NamedTuple):
    """What is known of a response to a request without reading it."""

    number: int  # of the request
    id: int
    version: int  # the oldest of its tokens; -1: unknown
    has_reward: bool
    actions: int  # tokens that were sampled; 0 where they aren't known


class DamagedSample(NamedTuple):
    """A drawn row that isn't as it was written."""

    id: int
    prompt_id: str
    episode: str | None = None


@dataclass(frozen=True)
class DrawnGroups:
    """What a step trains on, as it came out of the store."""

    samples: list[Sample]
    pairs: list[Pair] = field(default_factory=list)  # judgments of these samples, where the rule has pairs
    damaged: list[DamagedSample] = field(default_factory=list)  # samples that aren't as they were written


class OtherPrompt(Refused):
    """A prompt_id that names another prompt already: a group has one, whoever adds samples."""

    def __init__(self, prompt_id: str, prompt: Text, location: str, got: Text) -> None:
        """`location`: of the prompt that the id names, `got`: the other one."""
        texts = [p if isinstance(p, str) else json.dumps(p, ensure_ascii=False) for p in (prompt, got)]
        start = max(0, len(commonprefix(texts)) - 20)  # noqa: RUF071  some of what these texts share
        first, second = (("…" if start else "") + text[start : start + 80] for text in texts)
        super().__init__(
            f"prompt_id: expected {prompt_id} to name one prompt, {first!r} ({location}), got {second!r}; "
            "give ids that are unique, or leave prompt_id out so that the prompt's hash is used"
        )


def are_repeats(responses: Iterable[str | bytes]) -> list[bool]:
    """Whether each of the responses of a group, in the order of their ids, equals an earlier one."""
    seen = set[str | bytes]()
    repeats = []
    for response in responses:
        repeats.append(response in seen)
        seen.add(response)
    return repeats
