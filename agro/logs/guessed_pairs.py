"""Pairs of responses in an unknown log: which columns have the two, and which says what is better."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agro.logs.column_kinds import Column, as_literal, best_named, step_of
from agro.logs.column_names import SIDES, TIES, plain


def guessed_pairs(
    prompt: Column, others: Sequence[Column], columns: Sequence[Column]
) -> Iterator[tuple[dict[str, str], str]]:
    chosen = best_named(others, "chosen")
    rejected = best_named([c for c in others if c is not chosen], "rejected")
    if chosen is not None and rejected is not None:
        mapping = {"prompt": prompt.path, "chosen": chosen.path, "rejected": rejected.path}
        yield mapping, "a better and a worse response by their names"
    for sides in sides_of(others):
        for column in columns:
            if column is prompt or not column.named("preference"):
                continue
            named = {mark: side for mark, side in sides.items() if side is not column}
            said = _models_named(column, named, columns) or _sides_named(column, named)
            if said is not None:
                yield _preferred(prompt, column, *said)


def sides_of(columns: Sequence[Column]) -> Iterator[dict[str, Column]]:
    """Columns whose names differ in one word, such as response_a and response_b, by this word."""
    alike: dict[tuple[str | None, ...], dict[str, Column]] = {}
    for column in columns:
        words = column.tokens
        for i, word in enumerate(words):
            alike.setdefault((*words[:i], None, *words[i + 1 :]), {}).setdefault(word, column)
    found = [sides for sides in alike.values() if len(sides) > 1]
    yield from sorted(found, key=lambda sides: (_are_ordinals(sides), _said_in(sides)), reverse=True)


def _are_ordinals(marks: Iterable[str]) -> bool:
    return all(mark in words for mark, words in zip(sorted(marks), SIDES))


def _said_in(sides: Mapping[str, Column]) -> float:
    return min(column.length for column in sides.values())


def _sides_named(column: Column, sides: Mapping[str, Column]) -> tuple[list[tuple[Column, str]], str] | None:
    """The sides that a column of winners names, each with the condition that it is better, and the condition
    that both are equal, "" without ties; None where it names fewer than two."""
    better: dict[str, list[str]] = {}
    ties: list[str] = []
    others = 0
    for value in map(str, column.values):
        mark = _side_of(value, sides)
        if mark is not None:
            better.setdefault(mark, []).append(value)
        elif _is_tie(value):
            ties.append(value)
        else:
            others += 1
    if len(better) < 2 or 5 * others > len(column.values):
        return None
    won = [(sides[mark], _is_one_of(column, values)) for mark, values in better.items()]
    won.sort(key=lambda each: list(sides.values()).index(each[0]))
    return won, _is_one_of(column, ties) if ties else ""


def _side_of(value: str, sides: Mapping[str, Column]) -> str | None:
    """The side that a word of a column of winners names; None for none, or several."""
    tokens = re.findall(r"[^\W_]+", plain(value))
    if match := re.match(r"\W*(\w+)\W*?([<>])", plain(value)):  # A > B
        tokens = [match[1]] if match[2] == ">" else tokens[1:]
    named = [mark for mark, side in sides.items() if mark in tokens or value.strip() == side.path]
    if not named and len(sides) == len(SIDES) and _are_ordinals(sides):
        named = [mark for mark, words in zip(sorted(sides), SIDES) if not words.isdisjoint(tokens)]
    return named[0] if len(named) == 1 else None


def _models_named(
    winner: Column, sides: Mapping[str, Column], columns: Sequence[Column]
) -> tuple[list[tuple[Column, str]], str] | None:
    """As `_sides_named`, where winners are named by their models, which have columns of their own."""
    values = dict.fromkeys(str(value) for value in winner.values if str(value) not in winner.unrated)
    ties = [value for value in values if _is_tie(value)]
    for alike in sides_of(columns):
        models = {mark: alike[mark] for mark in sides if mark in alike}
        if models.keys() != sides.keys() or winner in models.values() or models == sides:
            continue
        names = {str(value) for column in models.values() for value in column.values}
        if names and values.keys() - set(ties) <= names:
            won = [(sides[mark], f"{step_of(winner)} == {step_of(model)}") for mark, model in models.items()]
            return won, _is_one_of(winner, ties) if ties else ""
    return None


def _is_tie(value: str) -> bool:
    said = plain(value).strip()
    return said in TIES or "=" in said or not {"tie", "both"}.isdisjoint(re.findall(r"\w+", said))


def _is_one_of(column: Column, values: Iterable[Any]) -> str:
    said = [f"{step_of(column)} == {as_literal(_as_in(column, value))}" for value in dict.fromkeys(values)]
    return f"({' || '.join(said)})" if len(said) > 1 else said[0]


def _as_in(column: Column, text: str) -> Any:
    """A value of a column by its text."""
    return next(value for value in column.values if str(value) == text)


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
