"""Pairs of responses in an unknown log: which columns have the two, and which says what is better."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from agro.io.json_values import is_unknown
from agro.logs.column_kinds import (
    JUDGING,
    NAMES,
    SIDES,
    TIES,
    WORSE,
    Column,
    as_literal,
    best_named,
    has,
    is_negated,
    plain,
    step_of,
    steps_of,
)
from agro.logs.labels import WORDS, number_in, word_of


class Judged(NamedTuple):
    """A mapping of responses, why, and the column that judges them. `lower`: it names the worse one."""

    mapping: dict[str, str]
    reason: str
    column: Column | None = None
    lower: bool = False


def guessed_pairs(
    prompt: Column, others: Sequence[Column], columns: Sequence[Column], named: str
) -> Iterator[Judged | None]:
    """The likeliest first; None at the end where there are two responses, and nothing says which is better.

    `named`: the path of the only column that may judge; "" for any.
    """
    rejected = best_named(others, "rejected")
    chosen = best_named([c for c in others if not c.named("rejected")], "chosen")
    if chosen is not None and rejected is not None and not named:
        mapping = {"prompt": prompt.path, "chosen": chosen.path, "rejected": rejected.path}
        yield Judged(mapping, "a better and a worse response by their names")
    for alike in sides_of([c for c in others if c.is_spoken or c.length > 1]):
        can_judge = list[tuple[Column, dict[str, Column]]]()
        for column in columns:
            sides = {mark: side for mark, side in alike.items() if side is not column}
            is_asked = column.path == named if named else _may_prefer(column, sides)
            if column.type in JUDGING and column is not prompt and len(sides) > 1 and is_asked:
                can_judge.append((column, sides))
        can_judge.sort(key=lambda each: (each[0].named("preference"), bool(_in_name(*each))), reverse=True)
        for column, sides in can_judge:
            won = _read(column, sides)
            if won is not None:
                lower = is_negated(column.tokens, WORSE) and len(sides) == 2
                yield Judged(*_preferred(prompt, column, *won), column, lower)
        if can_judge and not named and _are_ordinals(alike):
            yield None


def sides_of(columns: Sequence[Column]) -> Iterator[dict[str, Column]]:
    """Columns whose names differ in one word, such as response_a and response_b, by this word; those that are
    the first and the second come before others, in their order."""
    alike: dict[tuple[str | None, ...], dict[str, Column]] = {}
    for column in columns:
        for i, word in enumerate(column.tokens):
            key = (*column.tokens[:i], None, *column.tokens[i + 1 :])
            alike.setdefault(key, {}).setdefault(word, column)
    found = [sides for sides in alike.values() if len(sides) > 1]
    found = [dict(sorted(sides.items())) if _are_ordinals(sides) else sides for sides in found]
    lengths = [min(column.length for column in sides.values()) for sides in found]
    order = sorted(range(len(found)), key=lambda i: (_are_ordinals(found[i]), lengths[i]), reverse=True)
    yield from (found[i] for i in order)


def _are_ordinals(marks: Iterable[str]) -> bool:
    return all(mark in words for mark, words in zip(sorted(marks), SIDES))


def _may_prefer(column: Column, sides: Mapping[str, Column]) -> bool:
    """Whether a column may compare two responses: by its name, or by numbers below 0."""
    if column.is_aside and not any(has(token, NAMES["preference"]) for token in column.tokens):
        return False
    below = any(isinstance(number := number_in(value), int | float) and number < 0 for value in column.values)
    is_named = column.named("preference") or _in_name(column, sides) or below
    return bool(is_named or (_are_ordinals(sides) and (column.type == "word" or column.named("reward"))))


def _mentioned(tokens: Sequence[str], sides: Mapping[str, Column]) -> str | None:
    """The side that words name first."""
    marks = list(sides)
    for token in tokens:
        if token in sides:
            return token
        if len(marks) == 2 and _are_ordinals(sides):
            for mark, names in zip(marks, SIDES):
                if token in names:
                    return mark
    return None


def _in_name(column: Column, sides: Mapping[str, Column]) -> str | None:
    """The side that a column's name has, such as first_wins; what stands in brackets explains its values."""
    return _mentioned(steps_of(column.path.partition("(")[0])[0], sides)


Won = tuple[list[tuple[Column, str]], str]
"""The sides that a column names, each with the condition that it is better, and the condition that both are
equal, "" without ties."""


def _read(column: Column, sides: Mapping[str, Column]) -> Won | None:
    """What a column of preferences says; None where it can't be read."""
    values = {str(value): value for value in column.values}
    numbers = {text: found for text, value in values.items() if (found := _number(value)) is not None}
    marks, known = list(sides), set(numbers.values())
    of: Mapping[str, str | None] = {}  # the better side by what the column has; None: neither is
    if known and len(numbers) == len(values) and len(marks) == 2:
        in_name = _in_name(column, sides)
        first = in_name or marks[0]
        second = marks[1 - marks.index(first)]
        if min(known) < 0:  # one side has a plus; of 3 to -3 it is mostly the second one
            is_first = in_name is not None or max(map(abs, known)) <= 1 or any(n % 1 for n in known)
            plus, minus = (first, second) if is_first else (second, first)
            number = f"to_number({step_of(column)})"
            return [(sides[plus], f"{number} > `0`"), (sides[minus], f"{number} < `0`")], f"{number} == `0`"
        if known <= {0.0, 1.0}:
            is_flag = in_name is not None or any(word_of(text) in WORDS for text in values)
            yes, no = (first, second) if is_flag else (second, first)  # else the number of a side, from 0
            of = {text: yes if number else no for text, number in numbers.items()}
        elif known <= {0.0, 1.0, 2.0}:
            of = {text: marks[int(number) - 1] if number else None for text, number in numbers.items()}
        elif column.named("preference") and min(known) == 1.0 and max(known) in (5.0, 7.0, 9.0):
            by_sign, middle = {-1: first, 0: None, 1: second}, (1 + max(known)) / 2
            of = {text: by_sign[(number > middle) - (number < middle)] for text, number in numbers.items()}
    else:
        read = {text: _side_of(text, sides) for text in values}
        of = {text: side for text, side in read.items() if side or _is_tie(text)}
        if len(values) == 2 and not of and column.named("preference") and len(marks) == 2:
            of = dict(zip(values, marks, strict=True))
    others = sum(str(value) not in of for value in column.values)
    better = [mark for mark in marks if mark in of.values()]
    if len(better) < 2 or 5 * others > len(column.values):
        return None
    won = [
        (sides[mark], _is_one_of(column, [values[t] for t, side in of.items() if side == mark]))
        for mark in better
    ]
    ties = [values[text] for text, side in of.items() if side is None]
    return won, _is_one_of(column, ties) if ties else ""


def _number(value: Any) -> float | None:
    if isinstance(value, str) and word_of(value) in WORDS:
        return WORDS[word_of(value)]
    number = number_in(value)
    return float(number) if isinstance(number, int | float) and not is_unknown(number) else None


def _side_of(text: str, sides: Mapping[str, Column]) -> str | None:
    """The side that is better by a word of a column of winners, such as A, response_a, not B, A > B and B is
    worse; None for none."""
    said = plain(text).strip()
    for name, side in sides.items():
        if said == plain(side.path):
            return name
    tokens = re.findall(r"[^\W\d_]+|\d+|[<>=]", said)
    mark = None if _is_tie(text) else _mentioned(tokens, sides)
    if mark is None or not (is_negated(tokens, WORSE) ^ ("<" in tokens)):
        return mark
    others = [other for other in sides if other != mark]
    return others[0] if len(others) == 1 else None


def _is_tie(text: str) -> bool:
    return not TIES.isdisjoint(re.findall(r"\w+|=", plain(text)))


def _is_one_of(column: Column, values: Iterable[Any]) -> str:
    said = [f"{step_of(column)} == {as_literal(value)}" for value in values]
    return f"({' || '.join(said)})" if len(said) > 1 else said[0]


def _preferred(
    prompt: Column, winner: Column, sides: Sequence[tuple[Column, str]], is_tie: str
) -> tuple[dict[str, str], str]:
    """Of a tie both votes are equal, which says that neither is better. Of more than two responses the best
    one has the reward true."""
    said, paths = step_of(winner), [step_of(side) for side, _ in sides]
    reason = f"{winner.path} says which of {' and '.join(side.path for side, _ in sides)} is better"
    if len(sides) > 2:
        rewards = ", ".join(f"{said} && ({is_best})" for _, is_best in sides)
        mapping = {"prompt": prompt.path, "response": f"[{', '.join(paths)}]", "reward": f"[{rewards}]"}
        return mapping, reason.replace("better", "best")
    (a, b), (is_a, is_b) = paths, [is_best for _, is_best in sides]
    chosen, rejected = f"({is_a} && {a}) || ({is_b} && {b})", f"({is_a} && {b}) || ({is_b} && {a})"
    votes = {}
    if is_tie:
        chosen, rejected = f"{chosen} || ({is_tie} && {a})", f"{rejected} || ({is_tie} && {b})"
        votes = {"votes_chosen": "`1`", "votes_rejected": f"({is_tie} && `1`) || `0`"}
    mapping = {"prompt": prompt.path, "chosen": chosen, "rejected": rejected, **votes}
    return mapping, reason
