"""The column of an unknown log that judges responses: which one, what its words are worth, and whether lower
is better. All three are proposed, and shown with what they make of the responses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from agro.errors import Refused
from agro.logs.column_kinds import FEW, JUDGING, Column
from agro.logs.column_names import (
    ASIDE,
    COSTS,
    LOWER,
    NAMES,
    PLAIN,
    has,
    is_missing,
    is_negated,
    plain,
    steps_of,
    worth_of,
)
from agro.logs.labels import WORDS, number_in, scale_of, word_of, worded_number

PROMPTS = NAMES["prompt"][:8]  # prompt, question and the like: a score of these isn't one of the response
BEST_FIRST = re.compile(
    r"\b[01] ?[=:-] ?(very |sehr )?(best|excellent|great|good|top|perfect|gut)|lower is better"
)


def candidates(columns: Sequence[Column], mapping: Mapping[str, str]) -> list[Column]:
    """The columns that may be the reward, the likeliest first.

    One that belongs to each response comes before one of another list, which has several numbers for it.
    """
    response = mapping.get("response", "")
    lists = {c.path for c in columns if c.type == "texts"}
    judging = [
        c
        for c in columns
        if c.type in JUDGING or (c.type == "numbers" and (not response or response in lists))
    ]
    prompt = next((c for c in columns if c.path == mapping.get("prompt")), None)
    judging = [c for c in judging if c.path not in mapping.values()]
    ranked = [(likelihood(c, prompt) + 0.3 * _shares_lists(c.path, response), c) for c in judging]
    return [c for score, c in sorted(ranked, key=lambda each: each[0], reverse=True) if score >= 0.3]


def likelihood(column: Column, prompt: Column | None) -> float:
    """How likely a column judges responses: by its name, and by values as judgments have them, which repeat,
    and differ between responses to one prompt."""
    tokens = column.tokens
    is_cost, counts = (any(has(token, stems) for token in tokens) for stems in (COSTS, LOWER))
    score = 0.0
    if not is_cost and any(has(token, NAMES["reward"]) for token in tokens):
        score = 1.0 - 0.1 * (not any(has(token, NAMES["reward"]) for token in tokens[-1:]))
    elif is_cost or counts:
        score = 0.3 if is_cost else 0.9
    own = [] if is_cost or counts else steps_of(column.path)[0]
    score -= 1.2 * any(has(token, ASIDE) for token in own)
    answers = NAMES["response"][:8]
    if any(has(token, PROMPTS) for token in tokens) and not any(has(token, answers) for token in tokens):
        score -= 0.8
    if not column.tells or (prompt is not None and _is_of_prompt(column, prompt)):
        score -= 0.8
    if column.type == "word":
        return score + _likelihood_of_words(column)
    return score + _likelihood_of_numbers(column, is_named=score >= 0.9)


def _likelihood_of_words(column: Column) -> float:
    known = worth_in(column)
    if known is None:
        return -0.1
    is_plain = {plain(word) for word in column.distinct} <= PLAIN
    return 0.1 if len(known) == 2 and is_plain else 0.4


def _likelihood_of_numbers(column: Column, *, is_named: bool) -> float:
    """Grades repeat; counts, ids and times don't."""
    values = [number_in(value) for value in column.values]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    if len(numbers) == len(values) > 3 and all(a < b for a, b in pairwise(numbers)):
        return -0.2 if is_named else -0.6
    repeats = 2 * len(column.distinct) <= len(values)
    likely = 0.3 * (repeats or len(numbers) < len(values))  # what isn't a number is a part of ten
    if numbers:
        likely += 0.2 * (min(numbers) >= 0 and max(numbers) <= 1) - 0.2 * (max(numbers) > 1000)
    return likely


def _is_of_prompt(column: Column, prompt: Column) -> bool:
    """Whether it is the same in all records of each prompt, of which some have several."""
    asked = dict(zip(prompt.places, map(str, prompt.values)))
    values: dict[str, list[str]] = {}
    for place, value in zip(column.places, column.values):
        if place in asked:
            values.setdefault(asked[place], []).append(str(value))
    several = [each for each in values.values() if len(each) > 1]
    return len(values) > 1 and len(several) > 1 and all(len(set(each)) == 1 for each in several)


def check_scale(column: Column, where: Sequence[str]) -> None:
    """Raise `Refused` for ratings of two scales. `where`: the places of the records."""
    scales: dict[str, tuple[str, str]] = {}
    for place, value in zip(column.places, column.values):
        for each in value if isinstance(value, list) else [value]:
            scale = "true or false" if isinstance(each, bool) else scale_of(each)
            if scale is None and not is_missing(str(each)) and str(each) not in column.unrated:
                scale = "a word"
            if scale is not None:
                scales.setdefault(scale, (where[place], str(each)))
    if len(scales) > 1:
        (a, (here, first)), (b, (there, second)) = list(scales.items())[:2]
        raise Refused(
            f"{column.path}: expected one scale, got {first!r:.80}, {a}, at {here}, and {second!r:.80}, {b}, "
            f"at {there}. What to do: write one scale into the file, say what each is worth (--map and "
            "--reward-map), or name another column with --reward COLUMN"
        )


def is_lower(column: Column) -> bool:
    """Whether its lower values seem to be the better ones: by its name, and by the words beside numbers.
    Words that judge, such as good and bad, say it themselves."""
    if column.type == "word":
        numbered = {
            number: worth_text(word)
            for word in column.distinct
            if (number := worded_number(word)) is not None
        }
        known = {number: worth for number, worth in numbered.items() if worth is not None}
        if len(known) > 1:
            return known[max(known)] < known[min(known)]
        words = {plain(word) for word in column.distinct if word not in column.unrated}
        if not words <= PLAIN and not numbered and worth_in(column):
            return False
    is_cost = any(has(token, COSTS) for token in column.tokens)
    return bool(BEST_FIRST.search(plain(column.path))) or is_negated(column.tokens, LOWER) != is_cost


def worth_text(rating: str) -> float | None:
    """What the words of a rating such as 5: awful say."""
    try:
        return worth_of(re.sub(r"^\W*[\d.,]+\W*", "", rating))
    except KeyError:
        return None


def worth_in(column: Column) -> dict[str, float | None] | None:
    """What --reward-map has to say of its words; None where the worth of one is unknown. Of two words one is
    better: the person who is asked says which."""
    unrated: dict[str, float | None] = dict.fromkeys(word.strip() for word in column.unrated)
    said = [word for word in column.distinct if word not in column.unrated]
    counts = [word for word in said if scale_of(word) == "stars"] if column.type == "number" else []
    if column.type not in ("word", "number") or (column.type == "number" and not counts):
        return unrated
    if all(word_of(word) in WORDS for word in said) and not unrated:
        return {}
    worth: dict[str, float | None] = {}
    for word in said:
        try:
            worth[word.strip()] = worth_of(word)
        except KeyError:
            worth[word.strip()] = None
    numbers = [number for number in worth.values() if number is not None]
    if counts:  # of which it isn't said how many there may be
        whole = 5.0 if max(numbers) <= 5 else 10.0
        worth = {w: n if "☆" in w or n is None or n < 1 else n / whole for w, n in worth.items()}
        return None if max(numbers) > whole or len(numbers) > FEW else worth | unrated
    if len(said) == 2 and not any(worded_number(word) is not None for word in said):
        first, second = worth
        a, b = (0.5 if number is None else number for number in worth.values())
        is_second = b > a
        return {first: float(not is_second), second: float(is_second)} | unrated
    return worth | unrated if len(numbers) == len(said) and len(set(numbers)) > 1 else None


def reward_path(reward: Column, mapping: Mapping[str, str]) -> str:
    """The path of the reward; the mean where a response has several."""
    owner, star, value = reward.path.rpartition("[*]")
    if not star or reward.type != "number" or any(f"{owner}[*]" in path for path in mapping.values()):
        return reward.path
    record, inner, listed = owner.rpartition("[*].")
    return f"{record}{inner}avg({listed}[]{value})"


def _shares_lists(path: str, response: str) -> bool:
    """Whether a value is of the record, or of the item, that the response is of."""
    return not response or path.rpartition("[*]")[0] == response.rpartition("[*]")[0]
