"""The protocol of a log format: how its records are recognized, read and told apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from agro.errors import Refused
from agro.io.jsonlines import RECORD_ERRORS, Line, reason_of
from agro.types import Text

Row = Mapping[str, Any]
Kind = Literal["samples", "episodes", "pairs", "demonstrations", "prompts", "nothing"]
Carried = Literal["reward", "tokens", "behavior_logp", "version", "group"]
Votes = tuple[float | None, float | None]


TIE = (1.0, 1.0)  # the votes of a judgment that finds neither response better


class SkipRecord(Exception):
    """A rule of the format leaves a record out. The message is the rule, and the report counts it."""


class Judgment(NamedTuple):
    """One response of an item is better than another; with equal votes neither is."""

    winner: int  # position in the item's records
    loser: int
    votes: Votes = (None, None)  # for the winner, for the loser


class ScoredDocument(NamedTuple):
    """A document of an evaluation, and the scores of the model's output (text or log-likelihoods) for it."""

    task: str  # the set it belongs to; "" if the record doesn't name it
    id: str
    document: Text  # the same for every model and prompt template
    prompted: Text  # the prompt that the model got for it
    scores: Mapping[str, float | None]  # by metric; None: unknown


def line_of(location: str, number: int, read: Callable[[], dict[str, Any]]) -> Line:
    """The record that `read` returns, or the reason why it can't be read."""
    try:
        return Line(location, number, read())
    except RECORD_ERRORS as error:
        return Line(location, number, {}, reason_of(error))


class Item(NamedTuple):
    """Responses of a record that belong together, as interchange records (see `agro.logs.interchange`),
    and the judgments between them."""

    records: tuple[dict[str, Any], ...]
    names: tuple[str, ...]  # one per response, unique within the record: part of the response's identity
    judgments: tuple[Judgment, ...] = ()

    @classmethod
    def of(cls, record: dict[str, Any], name: str = "response") -> Item:
        """One response."""
        return cls((record,), (name,))

    @classmethod
    def pair(cls, chosen: dict[str, Any], rejected: dict[str, Any], votes: Votes = (None, None)) -> Item:
        """A judged pair. It is a tie if its votes are equal, or, without votes, if its rewards are."""
        rewards = chosen.get("reward"), rejected.get("reward")
        if votes == (None, None) and rewards[0] is not None and rewards[0] == rewards[1]:
            votes = TIE
        return cls((chosen, rejected), ("chosen", "rejected"), (Judgment(0, 1, votes),))


class Tokenizer(Protocol):
    """The tokenizer of a log's responses; `agro.models.encoding.Encoder` implements it."""

    @property
    def fingerprint(self) -> str: ...

    def prompt(self, text: Text) -> list[int]: ...

    def ids(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Context:
    """What a reader knows in addition to the record."""

    path: Path  # the log file
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Weights of the columns whose weighted sum is the reward, from --reward; empty without it."""
    choose: Mapping[str, str] = field(default_factory=dict)
    """Which of several filters, scorers, aspects, … of a format to use, from --choose."""
    joined: Mapping[str, Row] = field(default_factory=dict)
    """Records of the --join file by their id, for formats that are split over two files."""
    is_text: bool = False  # whether numbers and objects are written as text, as in CSV
    tokenizer: Tokenizer | None = None  # from --tokenizer
    word_rewards: Mapping[str, float | None] = field(default_factory=dict)
    """Rewards of words, from --reward-map; empty without it."""
    notes: dict[str, Any] = field(default_factory=dict)  # a reader's state between records of a file

    def chosen(self, kind: str, choices: Iterable[str], default: str | None = None) -> str:
        """The choice that --choose names; without one the default, or else the only choice.

        Raises `Refused` if that isn't one of `choices`.
        """
        names = list(choices)
        if default is None and len(names) == 1:
            default = names[0]
        name = self.choose.get(kind, default)
        if name in names:
            return name
        got = "" if name is None else f", got {name}"
        raise Refused(f"{kind}: expected --choose {kind}=NAME of {', '.join(names) or 'none'}{got}")

    def joined_record(self, column: str, key: str, file: str, noun: str) -> Row:
        """The --join record that a row names in `column`. Raises `Refused` if there is none."""
        if not self.joined:
            raise Refused(f"{column}: the prompts are in {file}; name it with --join FILE")
        if key not in self.joined:
            raise Refused(f"{column}: the file of --join has no {noun} {key!r}")
        return self.joined[key]


@dataclass(frozen=True)
class Format:
    """One format of logs. Its functions raise `Refused` for a record that violates the format."""

    name: str
    title: str
    kind: Kind  # what it holds; "nothing": it can't be imported, and `read` says why
    written_by: str  # programs and versions, and where in their source the fields are written
    fits: Callable[[Row], bool]  # whether a record has this format, by its keys
    read: Callable[[Row, Context], list[Item]]
    carries: tuple[Carried, ...] = ()  # in addition to prompts and responses
    over: tuple[str, ...] = ()  # less specific formats that fit its records too; this one has priority
    opens: Callable[[Path], bool] = lambda path: False
    """Whether a path is a file or folder of this format that needs `records` to be read."""
    records: Callable[[Path], Iterator[Line]] | None = None  # reads such a file into records for `read`
    gather: Callable[[Iterator[Line]], Iterator[Line]] | None = None
    """Merges the lines of a file into records for `read`, if a record spans several lines, as a trace does.
    The file is recognized by its first line, which `fits`."""
    joins: str = ""  # describes the second file, if the format needs one
    joined_by: Callable[[Row], str] | None = None  # the id of a record of that second file
    identity: Callable[[Row], str] | None = None
    """For formats that log a response more than once: a text that records of different files share exactly
    if they are the same response. The n-th record with it in one file is the n-th in another, since a group
    may have equal responses; with `once`, records of one file that share it are also the same."""
    once: bool = False
    repeats: str = ""  # the report's name for what repeats responses, such as "TRL's queue"
    weighs: bool = False  # whether `read` applies --reward; otherwise --reward names columns of the record
    scored: Callable[[Row], ScoredDocument] | None = None  # for evaluations: `agro compare` reads it
    chooses: str = ""  # the kinds that --choose selects among, separated by ", "
