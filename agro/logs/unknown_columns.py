"""The columns of an unknown log: their paths, types and names; which may be the reward; and for pairs, which
columns have the two responses, and which says which is better."""

from __future__ import annotations

import json
import re
import tomllib
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from agro.errors import Refused
from agro.io.json_values import are_messages, is_unknown, unpacked
from agro.io.terminal import cut
from agro.logs.values import WORDS, number_in, rating_in, scale_of, share_in, word_of, worded_number

DEEP = 4  # levels of nested objects
FEW = 12  # different words of a judgment
OTHER_WORDS = 3  # different words, in at most a sixth of the values, that may mean "not rated"

Type = Literal["messages", "texts", "numbers", "number", "flag", "date", "id", "word", "text", "empty"]
TEXTS = ("text", "word", "texts")
JUDGING = ("number", "flag", "word")  # types of columns that may be judgments

DATE = re.compile(
    r"(\d{4}-\d\d-\d\d|\d{1,2}[./-]\d{1,2}[./-]\d{2,4}|[A-Z][a-z]{2,8}\.? \d{1,2},? \d{4})([T ,]+.*\d.*)?"
    r"|\d{1,2}:\d\d(:\d\d)?"
)
LETTERS = re.compile(r"[^\W\d_]{2}|^[^\W\d_]$")
WITHOUT_SPACES = re.compile("[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]{4}")  # scripts without spaces
ID = re.compile(r"(?=.*\d)[\w.:@/+#-]{3,}|[\w.+-]+@[\w.-]+|https?://\S+")

_WORDS = tomllib.loads(Path(__file__).with_name("unknown_words.toml").read_text("utf-8"))
NAMES: Mapping[str, Sequence[str]] = {role: words.split() for role, words in _WORDS["names"].items()}
ASIDE, LOWER, COSTS, NOT, WORSE = (
    _WORDS["others"][kind].split() for kind in ("aside", "lower", "costs", "not", "worse")
)
PROMPTS, RESPONSES = NAMES["prompt"][:8], NAMES["response"][:8]  # the unambiguous words
_JUDGMENTS = {kind: words.split() for kind, words in _WORDS["judgments"].items()}
WORTH = {
    word: worth for kind, worth in (("good", 1.0), ("bad", 0.0), ("middle", 0.5)) for word in _JUDGMENTS[kind]
}
PLAIN = frozenset(_JUDGMENTS["plain"])
TIES, *SIDES = (frozenset(_WORDS["preferences"][kind].split()) for kind in ("ties", "first", "second"))
BEST_FIRST = re.compile(
    r"\b[01] ?[=:-] ?(very |sehr )?(best|excellent|great|good|top|perfect|gut)|lower is better"
)


def plain(text: str) -> str:
    """The text in lower case and without accents."""
    return "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))


def steps_of(path: str) -> list[list[str]]:
    """The words of each step of a column's path, the last step first."""
    spaced = re.sub(r"([a-z])([A-Z])|([A-Za-z]{3})(\d)", r"\1\3 \2\4", path)
    return [re.findall(r"[^\W_]+", plain(step)) for step in reversed(spaced.split("."))]


def has(token: str, stems: Collection[str]) -> str | None:
    """The stem that a word contains, or for `ASIDE`, begins with: conversion is no version."""
    short = token.removesuffix("s")
    for stem in stems:
        is_part = stem in token if stems is not ASIDE else token.startswith(stem)
        if token == stem or short == stem or (len(stem) > 4 and is_part):
            return stem
    return None


def any_has(tokens: Iterable[str], stems: Collection[str]) -> bool:
    return any(has(token, stems) for token in tokens)


def is_negated(tokens: Collection[str], stems: Collection[str]) -> bool:
    """Whether words say that there is less of a quality, or none: unsafe, not helpful. Two such words cancel:
    no errors, harmless."""
    count = sum(has(token, stems) is not None for token in tokens)
    count += sum(token in NOT or (token.endswith(("less", "free")) and len(token) > 4) for token in tokens)
    return count % 2 == 1


def is_missing(text: str) -> bool:
    """Whether a text says that a value is unknown, also in brackets."""
    return plain(text).strip().strip("()[]<>") in _JUDGMENTS["missing"]


def worth_of(word: str) -> float | None:
    """The worth of a word, stars, a percentage or a fraction; None for others, and for words such as n/a."""
    word = word_of(word)
    if is_missing(word):
        return None
    rating = rating_in(word)
    count = rating.number if rating is not None and rating.highest is None else None
    for number in (share_in(word), count, worded_number(word), WORDS.get(word), WORTH.get(word)):
        if number is not None:
            return number
    return None


def is_number(value: Any) -> bool:
    """Whether a value is a number, a share or a count of stars, also as text."""
    number = number_in(value)
    if isinstance(number, str):
        rating = rating_in(number)
        return rating is not None and rating.highest != 0
    return isinstance(number, int | float) and not isinstance(number, bool)


@dataclass
class Column:
    """The values at a path of `--map` in the first records, without unknown ones."""

    path: str
    values: list[Any] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)  # of the records with these values, from 0

    @cached_property
    def tokens(self) -> list[str]:
        """The words of its path, those of the last step first."""
        return [word for step in steps_of(self.path) for word in step]

    @cached_property
    def type(self) -> Type:
        """The type of all values, except for a few words that mean "not rated"."""
        rated = [value for value in self.values if not (isinstance(value, str) and value in self.unrated)]
        if not rated:
            return "empty"
        tests = (
            ("messages", lambda x: are_messages(unpacked(x))),
            (
                "numbers",
                lambda x: (
                    isinstance(x, list) and all(y is None or isinstance(y, bool) or is_number(y) for y in x)
                ),
            ),
            ("texts", lambda x: isinstance(x, list) and all(isinstance(each, str) for each in x)),
            ("flag", lambda x: isinstance(x, bool) or str(x).casefold() in ("true", "false")),
            ("number", is_number),
            ("date", lambda x: isinstance(x, str) and DATE.fullmatch(x.strip()) is not None),
        )
        for name, test in tests:
            if all(map(test, rated)):
                return name  # type: ignore[return-value]
        distinct = self.distinct
        is_id = all(isinstance(x, str) and ID.fullmatch(x) for x in rated)
        if is_id and len(distinct) > min(FEW, len(rated) / 2):
            return "id"
        is_few = len(distinct) <= FEW and max(len(word) for word in distinct) <= 40
        return "word" if is_few and len(self.values) > len(distinct) else "text"

    @cached_property
    def unrated(self) -> frozenset[str]:
        """The words that mean "not rated", among numbers or other words."""
        texts = [value for value in self.values if isinstance(value, str)]
        missing = frozenset(filter(is_missing, texts))
        unclear = [x for x in texts if x not in missing and not is_number(x) and worth_of(x) is None]
        if 6 * len(unclear) <= len(self.values) and len(set(unclear)) <= OTHER_WORDS:
            missing |= frozenset(text for text in unclear if not re.search(r"\d", text) and len(text) <= 40)
        return missing

    @property
    def distinct(self) -> list[str]:
        return list(dict.fromkeys(str(value) for value in self.values))

    @property
    def tells(self) -> bool:
        """Whether its value differs between records, if there are several."""
        return len(self.distinct) > 1 or len(self.values) < 2

    @property
    def is_spoken(self) -> bool:
        """Whether some value has several words; ids of users and files don't."""
        texts = [text for value in self.values for text in (value if isinstance(value, list) else [value])]
        return any(
            sum(LETTERS.search(word) is not None for word in text.split()) > 1 or WITHOUT_SPACES.search(text)
            for text in texts
            if isinstance(text, str)
        )

    @property
    def length(self) -> float:
        """The mean number of characters."""
        return fmean(len(str(value)) for value in self.values) if self.values else 0.0

    @property
    def is_aside(self) -> bool:
        """Whether its name is that of something other than prompt, response and judgment."""
        return any_has(self.tokens, ASIDE)

    @property
    def step(self) -> str:
        """The column as a JMESPath expression."""
        is_path = re.fullmatch(r"[A-Za-z_][\w.]*", self.path, re.ASCII)
        return self.path if is_path else json.dumps(self.path, ensure_ascii=False)

    def named(self, role: str) -> float:
        """How well its name says that it has this role, from 0 to 1; earlier steps of its path count less."""
        best, stems = 0.0, NAMES[role]
        for depth, step in enumerate(steps_of(self.path)):
            for token in step:
                stem = has(token, stems)
                if stem is not None:
                    # The last word is the noun in English, and the most telling stems come first.
                    weight = (1.0 if token == step[-1] else 0.9) / (1 + depth / 4)
                    best = max(best, weight * (1 - stems.index(stem) / len(stems)))
        return best * (0.3 if self.is_aside else 1)

    def about(self) -> dict[str, Any]:
        """Its path, type and first values as JSON."""
        kind = f"{self.type}, {len(self.distinct)} different" if self.values else "empty"
        return {"column": self.path, "type": kind, "first": [cut(x, 40) for x in self.distinct[:3]]}

    def __str__(self) -> str:
        summary = self.about()
        return f"  {cut(self.path, 60)}: {summary['type']}: {' | '.join(summary['first'])}"


def columns_of(rows: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    """The columns of records, also those nested in objects and in the JSON of a cell."""
    columns: dict[str, Column] = {}
    for i, row in enumerate(rows):
        for name, value in () if _is_table(row) else row.items():
            for below, inner in _leaves(value, DEEP):
                path = f"{quoted(name)}{below}" if below else name
                column = columns.setdefault(path, Column(path))
                if not is_unknown(inner) and inner != "":
                    column.values.append(inner)
                    column.indices.append(i)
    return tuple(columns.values())


def _leaves(value: Any, deep: int) -> Iterator[tuple[str, Any]]:
    """The leaves below a value, each with its path from there; "" is the value itself."""
    parsed, steps = unpacked(value), list[tuple[str, Any]]()
    if isinstance(parsed, dict) and not _is_table(parsed) and deep:
        steps = [(f".{quoted(name)}", item) for name, item in parsed.items()]
    elif are_messages(parsed) and deep:  # the last message may also have a judgment
        yield "", value
        aside = parsed[-1].keys() - {"role", "content", "tool_calls", "name", "id"}
        steps = [(f"[-1].{quoted(name)}", item) for name, item in parsed[-1].items() if name in aside]
    elif isinstance(parsed, list) and parsed and all(isinstance(x, dict) for x in parsed) and deep:
        steps = [("[*]", item) for item in parsed]
    else:
        yield "", value
    for step, item in steps:
        yield from ((f"{step}{below}", inner) for below, inner in _leaves(item, deep - 1))


def _is_table(value: Mapping[str, Any]) -> bool:
    """Whether its keys are numbers or names of similar records, as in pandas' to_json, and not columns."""
    items = list(value.values())
    are_alike = all(isinstance(item, dict) and item.keys() == items[0].keys() for item in items)
    are_numbers = len(items) > 1 and all(str(key).isdecimal() for key in value)
    return are_numbers or (are_alike and len(items) > 2)


def quoted(name: str) -> str:
    """The name as a step of a JMESPath expression."""
    return name if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) else json.dumps(name, ensure_ascii=False)


def best_named(columns: Iterable[Column], role: str) -> Column | None:
    """The column whose name fits a role best, among equals one with sentences; None if no name fits."""
    named = [column for column in columns if column.named(role)]
    return max(named, key=lambda c: (c.named(role), c.is_spoken, c.type != "word", c.length), default=None)


def candidates(columns: Sequence[Column], mapping: Mapping[str, str]) -> list[Column]:
    """The columns that may be the reward, the likeliest first.

    One with a value per response comes before one of another list, which has several values for a response.
    """
    response = mapping.get("response", "")
    is_list = not response or any(c.type == "texts" and c.path == response for c in columns)
    prompt = next((c for c in columns if c.path == mapping.get("prompt")), None)
    ranked = []
    for column in columns:
        if column.type not in (*JUDGING, *(["numbers"] * is_list)) or column.path in mapping.values():
            continue
        owners = [path.rpartition("[*]")[0] for path in (column.path, response)]
        # Whether the value and the response belong to the same record or list item.
        is_beside = not response or owners[0] == owners[1]
        ranked.append((likelihood(column, prompt) + 0.3 * is_beside, column))
    return [c for score, c in sorted(ranked, key=lambda each: each[0], reverse=True) if score >= 0.3]


def likelihood(column: Column, prompt: Column | None) -> float:
    """How likely a column judges responses, by its name and its values: those of judgments repeat, and differ
    between responses to one prompt."""
    tokens = column.tokens
    is_cost, counts = any_has(tokens, COSTS), any_has(tokens, LOWER)
    score = 0.0
    if not is_cost and any_has(tokens, NAMES["reward"]):
        score = 1.0 if has(tokens[-1], NAMES["reward"]) else 0.9
    elif is_cost or counts:
        score = 0.3 if is_cost else 0.9
    if not (is_cost or counts) and any_has(steps_of(column.path)[0], ASIDE):
        score -= 1.2
    if any_has(tokens, PROMPTS) and not any_has(tokens, RESPONSES):  # a score of the question
        score -= 0.8
    if not column.tells or (prompt is not None and _is_of_prompt(column, prompt)):
        score -= 0.8
    if column.type == "word":
        worth = worth_in(column)
        if worth is None:
            return score - 0.1
        is_plain = {plain(word) for word in column.distinct} <= PLAIN
        return score + (0.1 if len(worth) == 2 and is_plain else 0.4)
    # Grades repeat; counts, ids and times don't.
    values = [number_in(value) for value in column.values]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    if len(numbers) == len(values) > 3 and all(a < b for a, b in pairwise(numbers)):
        return score - (0.2 if score >= 0.9 else 0.6)
    repeats = 2 * len(column.distinct) <= len(values)
    likely = 0.3 * (repeats or len(numbers) < len(values))  # such as 7/10, which isn't a number
    if numbers:
        likely += 0.2 * (min(numbers) >= 0 and max(numbers) <= 1) - 0.2 * (max(numbers) > 1000)
    return score + likely


def _is_of_prompt(column: Column, prompt: Column) -> bool:
    """Whether its value is the same in all records of a prompt, if some prompts have several."""
    prompts, values = dict(zip(prompt.indices, map(str, prompt.values))), dict[str, list[str]]()
    for i, value in zip(column.indices, column.values):
        if i in prompts:
            values.setdefault(prompts[i], []).append(str(value))
    several = [each for each in values.values() if len(each) > 1]
    return len(values) > 1 and len(several) > 1 and all(len(set(each)) == 1 for each in several)


def check_scale(column: Column, locations: Sequence[str]) -> None:
    """Raise `Refused` for ratings on two scales. `locations`: FILE:LINE of each record."""
    scales: dict[str, tuple[str, str]] = {}
    for i, value in zip(column.indices, column.values):
        for each in value if isinstance(value, list) else [value]:
            scale = "true or false" if isinstance(each, bool) else scale_of(each)
            if scale is None and not is_missing(str(each)) and str(each) not in column.unrated:
                scale = "a word"
            if scale is not None:
                scales.setdefault(scale, (locations[i], str(each)))
    if len(scales) > 1:
        (a, (here, one)), (b, (there, two)) = list(scales.items())[:2]
        raise Refused(
            f"{column.path}: expected one scale, got {one!r:.80}, {a}, at {here}, and {two!r:.80}, {b}, "
            f"at {there}. What to do: write one scale into the file, say what each is worth (--map and "
            "--reward-map), or name another column with --reward COLUMN"
        )


def is_lower(column: Column) -> bool:
    """Whether lower values seem to be better, by its name and by the words next to numbers. Words that judge,
    such as good and bad, need no direction."""
    if column.type == "word":
        numbered = {  # the worth of the words of a rating such as 5: awful
            number: worth_of(re.sub(r"^\W*[\d.,]+\W*", "", word))
            for word in column.distinct
            if (number := worded_number(word)) is not None
        }
        rated = {number: worth for number, worth in numbered.items() if worth is not None}
        if len(rated) > 1:
            return rated[max(rated)] < rated[min(rated)]
        labels = {plain(word) for word in column.distinct if word not in column.unrated}
        if not labels <= PLAIN and not numbered and worth_in(column):
            return False
    is_best_first = BEST_FIRST.search(plain(column.path)) is not None
    return is_best_first or is_negated(column.tokens, LOWER) != any_has(column.tokens, COSTS)


def worth_in(column: Column) -> dict[str, float | None] | None:
    """The --reward-map for its words; None if the worth of one is unknown. Of two words one is better: the
    person who has to accept the proposal says which."""
    unrated: dict[str, float | None] = dict.fromkeys(word.strip() for word in column.unrated)
    rated = [word for word in column.distinct if word not in column.unrated]
    counts = [word for word in rated if scale_of(word) == "stars"] if column.type == "number" else []
    if column.type != "word" and not counts:
        return unrated
    if all(word_of(word) in WORDS for word in rated) and not unrated:
        return {}
    worth = {word.strip(): worth_of(word) for word in rated}
    numbers = [number for number in worth.values() if number is not None]
    if counts:  # the largest possible number of stars isn't stated
        top = 5.0 if max(numbers) <= 5 else 10.0
        worth = {w: n if "☆" in w or n is None or n < 1 else n / top for w, n in worth.items()}
        return None if max(numbers) > top or len(numbers) > FEW else worth | unrated
    if len(rated) == 2 and not any(worded_number(word) is not None for word in rated):
        a, b = (0.5 if number is None else number for number in worth.values())
        return dict(zip(worth, (float(b <= a), float(b > a)))) | unrated
    return worth | unrated if len(numbers) == len(rated) and len(set(numbers)) > 1 else None


class Judged(NamedTuple):
    """A mapping of responses, its reason, and the judging column. `lower`: it names the worse one."""

    mapping: dict[str, str]
    reason: str
    column: Column | None = None
    lower: bool = False


def guessed_pairs(
    prompt: Column, texts: Sequence[Column], columns: Sequence[Column], named: str
) -> Iterator[Judged | None]:
    """Mappings of pairs, the likeliest first; None last if there are several responses and no column says
    which is better. `named`: the path of the only column that may judge; "" for any."""
    rejected = best_named(texts, "rejected")
    chosen = best_named([c for c in texts if not c.named("rejected")], "chosen")
    if chosen is not None and rejected is not None and not named:
        mapping = {"prompt": prompt.path, "chosen": chosen.path, "rejected": rejected.path}
        yield Judged(mapping, "a better and a worse response by their names")
    scores = sides_of([c for c in columns if c.type == "number" and c.named("reward") and not c.is_aside])
    for alike in sides_of([c for c in texts if c.is_spoken or c.length > 1]):
        rated = [c for each in scores if len(alike.keys() & each.keys()) > 1 for c in each.values()]
        can_judge = list[tuple[Column, dict[str, Column]]]()
        for column in columns:
            sides = {mark: side for mark, side in alike.items() if side is not column}
            is_asked = column.path == named if named else _may_prefer(column, sides)
            is_asked = is_asked and (bool(named) or all(column is not each for each in rated))
            if column.type in JUDGING and column is not prompt and len(sides) > 1 and is_asked:
                can_judge.append((column, sides))
        can_judge.sort(key=lambda each: (each[0].named("preference"), bool(_in_name(*each))), reverse=True)
        for column, sides in can_judge:
            if (conditions := _read(column, sides)) is not None:
                yield _preferred(prompt, column, sides, conditions)
        are_sides = _are_ordinals(alike) or any(
            not alike.keys().isdisjoint((*c.tokens, *map(plain, c.distinct)))
            for c in columns
            if all(c is not side for side in alike.values())
        )
        are_responses = are_sides and all(c.named("response") and not c.is_aside for c in alike.values())
        if not named and (rated or are_responses or (can_judge and _are_ordinals(alike))):
            yield None  # or each response has its own score


def sides_of(columns: Sequence[Column]) -> list[dict[str, Column]]:
    """Columns whose names differ in one word, such as response_a and response_b, by this word. Sets named by
    order (a and b, 1 and 2, …) come before others, and are sorted."""
    alike: dict[tuple[str | None, ...], dict[str, Column]] = {}
    for column in columns:
        for i, word in enumerate(column.tokens):
            key = (*column.tokens[:i], None, *column.tokens[i + 1 :])
            alike.setdefault(key, {}).setdefault(word, column)
    groups = [sides for sides in alike.values() if len(sides) > 1]
    groups = [dict(sorted(sides.items())) if _are_ordinals(sides) else sides for sides in groups]
    return sorted(
        groups,
        key=lambda sides: (_are_ordinals(sides), min(column.length for column in sides.values())),
        reverse=True,
    )


def _are_ordinals(marks: Iterable[str]) -> bool:
    return all(mark in names for mark, names in zip(sorted(marks), SIDES))


def _may_prefer(column: Column, sides: Mapping[str, Column]) -> bool:
    """Whether a column may compare two responses, by its name or by numbers below 0."""
    if column.is_aside and not any_has(column.tokens, NAMES["preference"]):
        return False
    below = any(isinstance(number := number_in(value), int | float) and number < 0 for value in column.values)
    is_named = column.named("preference") or _in_name(column, sides) or below
    return bool(is_named or (_are_ordinals(sides) and (column.type == "word" or column.named("reward"))))


def _mentioned(tokens: Sequence[str], sides: Mapping[str, Column]) -> str | None:
    """The side that the words mention first."""
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
    """The side in a column's name, such as first_wins. Text in brackets explains values and is ignored."""
    return _mentioned(steps_of(column.path.partition("(")[0])[0], sides)


def _read(column: Column, sides: Mapping[str, Column]) -> dict[str | None, str] | None:
    """The conditions under which a column of preferences prefers each side, and under None that for a tie;
    None if the column can't be interpreted."""
    values = {str(value): value for value in column.values}
    read = {text: WORDS.get(word_of(text)) if isinstance(x, str) else None for text, x in values.items()}
    parsed = {text: number_in(x) if read[text] is None else read[text] for text, x in values.items()}
    numbers = {text: float(x) for text, x in parsed.items() if isinstance(x, int | float) and x == x}
    marks, scale = list(sides), set(numbers.values())
    of: Mapping[str, str | None] = {}  # the better side by value; None: a tie
    if scale and len(numbers) == len(values) and len(marks) == 2:
        in_name = _in_name(column, sides)
        a = in_name or marks[0]
        b = marks[1 - marks.index(a)]
        if min(scale) < 0:  # one side has the plus sign; on scales such as 3 to -3 mostly the second
            is_first = in_name is not None or max(map(abs, scale)) <= 1 or any(n % 1 for n in scale)
            plus, minus = (a, b) if is_first else (b, a)
            number = f"to_number({column.step})"
            return {plus: f"{number} > `0`", minus: f"{number} < `0`", None: f"{number} == `0`"}
        if scale <= {0.0, 1.0}:
            is_flag = in_name is not None or any(word_of(text) in WORDS for text in values)
            yes, no = (a, b) if is_flag else (b, a)  # else the number of a side, from 0
            of = {text: yes if number else no for text, number in numbers.items()}
        elif scale <= {0.0, 1.0, 2.0}:
            of = {text: marks[int(number) - 1] if number else None for text, number in numbers.items()}
    else:
        named = {text: _side_of(text, sides) for text in values}
        of = {text: side for text, side in named.items() if side or _is_tie(text)}
        if len(values) == 2 and not of and column.named("preference") and len(marks) == 2:
            of = dict(zip(values, marks, strict=True))
    unread = sum(str(value) not in of for value in column.values)
    better: list[str | None] = [mark for mark in marks if mark in of.values()]
    if len(better) != 2 or 5 * unread > len(column.values):
        return None
    conditions: dict[str | None, str] = {}
    for mark in [*better, *([None] if None in of.values() else [])]:
        literals = [json.dumps(values[text], ensure_ascii=False) for text, side in of.items() if side == mark]
        equal = [f"{column.step} == `{literal}`" for literal in literals]
        conditions[mark] = equal[0] if len(equal) == 1 else f"({' || '.join(equal)})"
    return conditions


def _side_of(text: str, sides: Mapping[str, Column]) -> str | None:
    """The better side by a text of a column of winners, such as A, response_a, not B, A > B and B is worse;
    None if it names none."""
    phrase = plain(text).strip()
    for name, side in sides.items():
        if phrase == plain(side.path):
            return name
    tokens = re.findall(r"[^\W\d_]+|\d+|[<>=]", phrase)
    mark = None if _is_tie(text) else _mentioned(tokens, sides)
    if mark is None or not (is_negated(tokens, WORSE) ^ ("<" in tokens)):
        return mark
    remaining = [other for other in sides if other != mark]
    return remaining[0] if len(remaining) == 1 else None


def _is_tie(text: str) -> bool:
    return not TIES.isdisjoint(re.findall(r"\w+|=", plain(text)))


def _preferred(
    prompt: Column, judge: Column, sides: Mapping[str, Column], conditions: Mapping[str | None, str]
) -> Judged:
    """The mapping for a column of preferences; a tie has equal votes."""
    won = [(sides[mark], condition) for mark, condition in conditions.items() if mark is not None]
    reason = f"{judge.path} says which of {' and '.join(side.path for side, _ in won)} is better"
    is_worse = is_negated(judge.tokens, WORSE)
    (a, is_a), (b, is_b) = ((side.step, condition) for side, condition in won)
    chosen, rejected = f"({is_a} && {a}) || ({is_b} && {b})", f"({is_a} && {b}) || ({is_b} && {a})"
    votes = {}
    if is_tie := conditions.get(None):
        chosen, rejected = f"{chosen} || ({is_tie} && {a})", f"{rejected} || ({is_tie} && {b})"
        votes = {"votes_chosen": "`1`", "votes_rejected": f"({is_tie} && `1`) || `0`"}
    mapping = {"prompt": prompt.path, "chosen": chosen, "rejected": rejected, **votes}
    return Judged(mapping, reason, judge, is_worse)
