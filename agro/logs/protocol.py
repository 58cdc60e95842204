"""What a format of logs is."""

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


TIE = (1.0, 1.0)  # votes of a judgment by one that finds neither better


class SkipRecord(Exception):
    """A record that isn't taken by a rule of its format, which the message is; the report counts it."""


class Judgment(NamedTuple):
    """That one response of an item is better than another. Equal votes say that neither is."""

    winner: int  # position in the item's records
    loser: int
    votes: Votes = (None, None)  # for the winner and for the loser


class ScoredDocument(NamedTuple):
    """A document of an evaluation, and how what a model made of it was scored, text or log-likelihoods."""

    task: str  # the set that it is of; "" where its record doesn't say
    id: str
    document: Text  # the same whichever model answers, however it was prompted
    prompted: Text  # what the model was given for it
    scores: Mapping[str, float | None]  # by metric; None: unknown


def line_of(location: str, number: int, read: Callable[[], dict[str, Any]]) -> Line:
    """The record that `read` gives, or why it can't be read."""
    try:
        return Line(location, number, read())
    except RECORD_ERRORS as error:
        return Line(location, number, {}, reason_of(error))


class Item(NamedTuple):
    """Responses of a record that belong together, as interchange records (see `agro.logs.interchange`),
    and which of them are better than which."""

    records: tuple[dict[str, Any], ...]
    names: tuple[str, ...]  # of the responses within the record, each another: what tells them apart later
    judgments: tuple[Judgment, ...] = ()

    @classmethod
    def of(cls, record: dict[str, Any], name: str = "response") -> Item:
        """One response."""
        return cls((record,), (name,))

    @classmethod
    def pair(cls, chosen: dict[str, Any], rejected: dict[str, Any], votes: Votes = (None, None)) -> Item:
        """A judged pair. Equal votes say that neither is better; without votes, so do equal rewards."""
        rewards = chosen.get("reward"), rejected.get("reward")
        if votes == (None, None) and rewards[0] is not None and rewards[0] == rewards[1]:
            votes = TIE
        return cls((chosen, rejected), ("chosen", "rejected"), (Judgment(0, 1, votes),))


class Tokenizer(Protocol):
    """What made the tokens of a log's responses; `agro.models.encoding.Encoder` is one."""

    @property
    def fingerprint(self) -> str: ...

    def prompt(self, text: Text) -> list[int]: ...

    def ids(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Context:
    """What a reader is told besides the record."""

    path: Path  # the file
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Weights of the columns whose sum is the reward, from --reward; empty where it isn't given."""
    choose: Mapping[str, str] = field(default_factory=dict)
    """What to take where a format has several of a kind, from --choose: filter, scorer, aspect, …"""
    joined: Mapping[str, Row] = field(default_factory=dict)
    """Records of the file in --join by their id, for formats that are split over two files."""
    is_text: bool = False  # whether numbers and objects are written as text, as in CSV
    tokenizer: Tokenizer | None = None  # what made the tokens, from --tokenizer
    word_rewards: Mapping[str, float | None] = field(default_factory=dict)
    """Rewards of words, from --reward-map; empty where it isn't given."""
    notes: dict[str, Any] = field(default_factory=dict)  # what a reader keeps from one record to the next

    def chosen(self, kind: str, choices: Iterable[str], default: str | None = None) -> str:
        """Which of several of a kind --choose names; where it names none the default, else the only one.

        Raises `Refused` where that is none of them.
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
        """The record of --join that a row names in `column`. Raises `Refused` where there is none."""
        if not self.joined:
            raise Refused(f"{column}: the prompts are in {file}; name it with --join FILE")
        if key not in self.joined:
            raise Refused(f"{column}: the file of --join has no {noun} {key!r}")
        return self.joined[key]


@dataclass(frozen=True)
class Format:
    """One format of logs. The functions raise `Refused` for a record that isn't as the format says."""

    name: str
    title: str
    kind: Kind  # of what it holds; "nothing": it can't be imported, and `read` says why
    written_by: str  # the programs and versions, and where in their source the fields are written
    fits: Callable[[Row], bool]  # whether a record is of this format, by its keys
    read: Callable[[Row, Context], list[Item]]
    carries: tuple[Carried, ...] = ()  # beside prompts and responses
    over: tuple[str, ...] = ()  # formats that fit its records too, and say less
    opens: Callable[[Path], bool] = lambda path: False
    """Whether a path is a file or folder of this format that holds no plain records (see `records`)."""
    records: Callable[[Path], Iterator[Line]] | None = None  # of such a file, for `read`
    gather: Callable[[Iterator[Line]], Iterator[Line]] | None = None
    """Of formats whose records stand on several lines, such as the spans of a trace: the records of a file's
    lines, for `read`. The file is recognized by its first line, which `fits`."""
    joins: str = ""  # what the second file is, where it needs one
    joined_by: Callable[[Row], str] | None = None  # the id of one of that file's records
    identity: Callable[[Row], str] | None = None
    """Of formats that have the same response several times: a text that records of different files share
    exactly when they are the same response. The n-th record with it in one file is the n-th in another, since
    a group may have equal responses; with `once`, records of one file that share it are the same as well."""
    once: bool = False
    repeats: str = ""  # what repeats them, for the report, such as "TRL's queue"
    weighs: bool = False  # whether `read` takes --reward itself; else it names columns of the record
    scored: Callable[[Row], ScoredDocument] | None = None  # of evaluations, for `agro compare`
    chooses: str = ""  # what --choose names, where there may be several; more than one with ", " between
