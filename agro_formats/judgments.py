"""Judged responses as declarations: ranked ones, two with the better one's name, and annotators' votes.

A place is a path as in `--map`: the name of a column, or a JMESPath expression.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from agro.errors import Refused
from agro.io.json_values import is_unknown, objects, omit, text
from agro.logs.declared import Parser, at, named
from agro.logs.fields import integer, number, parsed, total
from agro.logs.mapping import heads
from agro.logs.protocol import TIE, Context, Item, Judgment, Row, Votes


@dataclass(frozen=True)
class Ranking:
    """Responses with ranks, of which a lower one is better. `--reward RANK=-1` makes it a reward."""

    prompt: str
    each: str  # the list, whose items have `response`, `model` and `rank`
    response: str
    rank: str
    model: str
    parse: Parser = text  # what is at `prompt`

    def fits(self, row: Row) -> bool:
        """Whether a record has a prompt, and a list of ranked responses."""
        items = row.get(self.each)
        if self.prompt not in row or not isinstance(items, list) or not items:
            return False
        return isinstance(items[0], dict) and items[0].keys() >= {self.response, self.rank}

    def read(self, row: Row, context: Context) -> list[Item]:
        common = {"prompt": self.parse(row[self.prompt], self.prompt)}
        meta = omit(row, (self.prompt, self.each))
        records, names, ranks = [], [], []
        for i, item in enumerate(objects(row[self.each], self.each)):
            name = f"{self.each}[{i}]"
            ranks.append(number(item.get(self.rank), f"{name}.{self.rank}"))
            names.append(name)
            record = {
                "response": text(item.get(self.response), f"{name}.{self.response}"),
                "model": item.get(self.model),
                "meta": meta | omit(item, (self.response, self.model)),
            }
            if context.rewards:
                record["reward"] = total({self.rank: ranks[-1]}, (self.rank,), context.rewards)
            records.append(common | record)
        return [Item(tuple(records), tuple(names), rank_judgments(ranks))]


@dataclass(frozen=True)
class PairColumns:
    """Two responses, and which one is better. `{}` in a path stands for the name of a side."""

    prompt: str
    response: str
    sides: tuple[str, str] = ("0", "1")
    better: Mapping[str, str] = field(default_factory=dict)
    """By preference the column that says which side is better; --choose preference takes one of several."""
    values: tuple[int, int] = (0, 1)  # of such a column, for the sides
    score: str = ""  # without `better`: the side with the higher one is better
    votes: str = ""
    model: str = ""
    meta: Mapping[str, str] = field(default_factory=dict)  # by names in `meta`; with `{}` of a side
    parse: Parser = text  # what is at `prompt`
    columns: tuple[str, ...] = ()  # that records have besides

    def fits(self, row: Row) -> bool:
        """Whether a record has these columns."""
        paths = (self.prompt, *self._both(self.response))
        return row.keys() >= {*self.columns, *heads(paths)}

    def read(self, row: Row, context: Context) -> list[Item]:
        prompt = self.parse(at(row, self.prompt), self.prompt)
        names = self._both(self.response)
        paths = [path for each in (self.model, *self.meta.values()) for path in self._both(each)]
        meta = omit(row, heads((self.prompt, *names, *paths)))
        records = []
        for side, name in zip(self.sides, names):
            record = {
                "prompt": prompt,
                "response": text(at(row, name), name),
                "model": at(row, self.model.replace("{}", side)),
                "meta": meta | named(row, self.meta, side),
            }
            records.append(record)
        return [Item(tuple(records), names, self._judgments(row, context))]

    def _judgments(self, row: Row, context: Context) -> tuple[Judgment, ...]:
        """Which side is better; equal votes, or without votes equal scores, are a tie. A score below 0 is no
        number of votes."""
        a, b = (self._number(row, path, context) for path in self._both(self.votes or self.score))
        votes: Votes = (a, b)
        if not self.votes:
            votes = TIE if a is not None and a == b else (None, None)
        elif min(a or 0, b or 0) < 0:
            votes = (None, None)
        if votes[0] is not None and votes[0] == votes[1]:
            return (Judgment(0, 1, votes),)
        if not self.better:
            winner = None if a is None or b is None else int(b > a)
        else:
            winner = self._winner(row, context)
        if winner is None:
            return ()
        won, lost = votes[winner], votes[1 - winner]
        if won is not None and lost is not None and won < lost:
            better, worse = (self._both(self.votes)[side] for side in (winner, 1 - winner))
            raise Refused(
                f"{better}: expected more than {worse}, as that side is better, got {won} and {lost}"
            )
        return (Judgment(winner, 1 - winner, (won, lost)),)

    def _winner(self, row: Row, context: Context) -> int | None:
        """The side that the column of `better` names; None where it is unknown."""
        columns = {name: column for name, column in self.better.items() if column in row}
        chosen = context.choose.get("preference", next(iter(columns)) if len(columns) == 1 else None)
        if chosen not in columns:
            got = "" if chosen is None else f", got {chosen}"
            raise Refused(f"preference: expected --choose preference=NAME of {', '.join(columns)}{got}")
        column = columns[chosen]
        if is_unknown(row[column]):
            return None
        value = integer(row[column], column)
        if value not in self.values:
            says = ", ".join(f"{v} for {name}" for v, name in zip(self.values, self._both(self.response)))
            raise Refused(f"{column}: expected {says}, got {value}")
        return self.values.index(value)

    def _number(self, row: Row, path: str, context: Context) -> float | None:
        value = at(row, path)
        return number(parsed(value, path) if context.is_text and isinstance(value, str) else value, path)

    def _both(self, path: str) -> tuple[str, str]:
        a, b = (path.replace("{}", side) for side in self.sides)
        return a, b


def rank_judgments(ranks: Sequence[float | None]) -> tuple[Judgment, ...]:
    """Of every two responses with a rank the one with the lower rank is better; equal ranks are a tie."""
    known = [(i, rank) for i, rank in enumerate(ranks) if rank is not None]
    return tuple(
        Judgment(i, j, TIE) if a == b else Judgment(i, j) if a < b else Judgment(j, i)
        for (i, a), (j, b) in combinations(known, 2)
    )


def tally(judgments: Iterable[Judgment]) -> tuple[Judgment, ...]:
    """The judgments of several annotators as one of every two responses, with the votes for both.

    A tie is half a vote for each.
    """
    votes: dict[tuple[int, int], list[float]] = {}
    for judgment in judgments:
        pair = (min(judgment[:2]), max(judgment[:2]))
        counts = votes.setdefault(pair, [0.0, 0.0])
        for side in (0, 1):
            counts[side] += 0.5 if judgment.votes == TIE else float(pair[side] == judgment.winner)
    return tuple(
        Judgment(i, j, (a, b)) if a >= b else Judgment(j, i, (b, a)) for (i, j), (a, b) in votes.items()
    )
