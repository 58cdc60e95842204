"""The column of an unknown log that judges responses, and what its words are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agro.logs.column_kinds import FEW, JUDGING, Column
from agro.logs.column_names import MARKS, VERY, YES_NO, plain, worth_of
from agro.logs.labels import WORDS, count_in, share_in, word_of


def guessed_reward(columns: Sequence[Column], response: str) -> tuple[Column | None, Column | None]:
    """The column of rewards; without one, what may be it, if somebody says what its words are worth.

    One that belongs to each response comes before one of another list, which has several numbers for it.
    """
    judging = [c for c in columns if c.type in (*JUDGING, "numbers")]
    judging = [c for c in judging if c.type != "numbers" or not response or response in _lists(columns)]
    inside = [c for c in judging if _shares_lists(c.path, response)] if response else judging
    for part in (inside, [c for c in judging if c not in inside]):
        candidates = sorted((c for c in part if c.named("reward")), key=_judges, reverse=True)
        if not any(worth_in(c) is not None for c in candidates):
            candidates += sorted((c for c in part if c.named("rank")), key=lambda c: -c.named("rank"))
        for column in candidates:
            if worth_in(column) is not None:
                return column, None
        asked = [c for c in candidates if not c.is_aside]
        if asked:
            return None, asked[0]
    unnamed = [c for c in judging if c.type != "numbers" and c.tells and not c.is_aside]
    graded = [c for c in unnamed if (c.type == "word" and _is_graded(c)) or _are_shares(c)]
    unnamed = graded or [c for c in unnamed if 2 * len(c.distinct) <= len(c.values) and _may_be_judged(c)]
    return (unnamed[0] if len(unnamed) == 1 else None), None


def _is_graded(column: Column) -> bool:
    """Whether its words, such as good and bad, are judgments whatever its name is."""
    return (
        len(set((worth_in(column) or {}).values()) - {None}) > 1
        and not set(map(plain, column.distinct)) <= YES_NO
    )


def _are_shares(column: Column) -> bool:
    """Whether its values are percentages or fractions, such as 85% and 4/5."""
    known = [value for value in column.values if str(value) not in column.unrated]
    return column.type == "number" and all(share_in(str(value)) is not None for value in known)


def _may_be_judged(column: Column) -> bool:
    """Grades repeat; counters and times don't."""
    return column.type == "number" or (len(column.distinct) == 2 and worth_in(column) is not None)


def _judges(column: Column) -> float:
    """Of equal names those of people come first."""
    by_people = 0.01 if {"human", "user", "customer"} & set(column.tokens) else 0.0
    return column.named("reward") * (1.0 if column.tells else 0.1) + by_people


def _lists(columns: Sequence[Column]) -> list[str]:
    return [column.path for column in columns if column.type == "texts"]


def _shares_lists(path: str, response: str) -> bool:
    """Whether a value is of the record, or of the item, that the response is of."""
    owner = path.rpartition("[*]")[0]
    inner = response.rpartition("[*]")[0]
    return owner == inner


def worth_in(column: Column) -> dict[str, float | None] | None:
    """What --reward-map has to say of its words and ranks; None where the worth of one is unknown."""
    unrated: dict[str, float | None] = dict.fromkeys(word.strip() for word in column.unrated)
    said = [word for word in column.distinct if word not in column.unrated]
    if column.type == "number" and column.named("rank") and len(said) <= FEW:
        return {rank: -float(rank) for rank in said if rank.isdecimal()} | unrated
    if column.type != "word":
        return unrated
    if all(word_of(word) in WORDS for word in said) and not unrated:
        return {}
    try:
        worth = {word.strip(): worth_of(word) for word in said}
    except KeyError:
        return None
    if counts := [n for word in said if share_in(word) is None and (n := count_in(word)) is not None]:
        whole = 5.0 if max(counts) <= 5 else 10.0  # stars, of which it isn't said how many there may be
        if max(counts) > whole:
            return None
        shares = {word: share_in(word) for word in worth}
        worth = {w: n / whole if n is not None and shares[w] is None else n for w, n in worth.items()}
    return _spread(worth) | unrated


def why_reward(reward: Column) -> list[str]:
    reasons = [f"{reward.path} is the reward: it has {_content(reward)}"]
    if unrated := sorted(reward.unrated):
        reasons.append(f"of {reward.path} taken as unknown: {', '.join(unrated)}")
    return reasons


def reward_path(reward: Column, mapping: Mapping[str, str]) -> str:
    """The path of the reward; the mean where a response has several."""
    owner, star, value = reward.path.rpartition("[*]")
    if not star or reward.type != "number" or any(f"{owner}[*]" in path for path in mapping.values()):
        return reward.path
    record, inner, listed = owner.rpartition("[*].")
    return f"{record}{inner}avg({listed}[]{value})"


def _content(column: Column) -> str:
    if column.named("rank") and worth_in(column):
        return "ranks, of which a lower one is taken as better"
    if _are_shares(column):
        return f"shares, which become numbers from 0 to 1, such as {column.distinct[0]}"
    if column.type in ("number", "numbers"):
        return "numbers, of which a higher one is taken as better"
    return f"the words {', '.join(word for word in column.distinct[:FEW] if word not in column.unrated)}"


def is_judged(column: Column) -> bool:
    """Whether its words are known judgments."""
    return (
        column.type == "word"
        and column.tells
        and bool(column.named("reward"))
        and worth_in(column) is not None
    )


def _spread(worth: Mapping[str, float | None]) -> dict[str, float | None]:
    """Ok is good where the others are bad, and half as good where they aren't; good is less than very good,
    and bad more than very bad. German marks have six steps."""
    if all(plain(word) in MARKS for word in worth) and not {"befriedigend", "ausreichend"}.isdisjoint(
        map(plain, worth)
    ):
        return {word: MARKS[plain(word)] for word in worth}
    known = [number for number in worth.values() if number is not None]
    if max(known, default=0.0) == 0.5 and min(known) < 0.5:
        return {word: 1.0 if number == 0.5 else number for word, number in worth.items()}
    extremes = {number for word, number in worth.items() if _is_very(word)}
    between = {end: less for end, less in ((1.0, 0.75), (0.0, 0.25)) if end in extremes}
    return {
        word: number if number is None or _is_very(word) else between.get(number, number)
        for word, number in worth.items()
    }


def _is_very(word: str) -> bool:
    return plain(word).split()[0] in VERY
