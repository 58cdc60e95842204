"""Check and convert values of other programs' records: numbers, flags and lists, and rewards that are written
as words, stars or shares."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from agro.errors import Refused
from agro.io.json_values import is_unknown, objects, unpacked
from agro.io.strictjson import loads
from agro.logs.protocol import Context, Row


def wrong(name: str, expected: str, value: Any, way_out: str = "") -> Refused:
    """A refusal of a value: what was expected, what came, and what to do."""
    return Refused(f"{name}: expected {expected}, got {value!r:.80}" + (f"; {way_out}" if way_out else ""))


def number(value: Any, name: str, *, is_text: bool = False) -> float | None:
    """A number, true or false; None for null and NaN, which are unknown. Raises `Refused` for others.

    `is_text`: whether the number may be written as text, and "N/A" if it is unknown.
    """
    expected = "a finite number, or null where it is unknown"
    if is_text and isinstance(value, str):
        expected, written = "a number or 'N/A'", value
        value = None if value.strip().upper() in ("", "N/A") else number_in(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):  # .5, 05 and nan aren't JSON
                value = float(value)
        if isinstance(value, bool | str):
            raise wrong(name, expected, written)
    if is_unknown(value):
        return None
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise wrong(name, expected, value)


def integer(value: Any, name: str) -> int:
    """An integer, which some programs write as text."""
    if isinstance(value, str) and value.strip().lstrip("-").isdigit():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise wrong(name, "an integer", value)


def parsed(value: str, name: str) -> Any:
    """The value that a text has as JSON, or as `unpacked` reads it."""
    inner = unpacked(value)
    if not isinstance(inner, str):
        return inner
    try:
        return loads(value)
    except ValueError:
        raise wrong(name, "a number, true, false, or JSON", value) from None


def flag(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return value
    raise wrong(name, "true or false", value)


def one_of(value: Any, meanings: Mapping[str, str], name: str) -> str:
    """The meaning of a text, such as the role that another program calls by this name."""
    if isinstance(value, str) and value in meanings:
        return meanings[value]
    raise wrong(name, f"one of {', '.join(meanings)}", value)


def a_list(value: Any, name: str) -> list[Any]:
    """A list, empty for null."""
    if value is None:
        return []
    if isinstance(value, list):
        return value
    raise wrong(name, "a list", value)


def listed(value: Any, name: str) -> list[dict[str, Any]]:
    """A list of objects, empty for null."""
    return [] if value is None else objects(value, name)


def list_of_length(value: Any, name: str, length: int, noun: str = "values") -> list[Any]:
    """A list of `length` values. `noun`: what they are, for the refusal."""
    if isinstance(value, list) and len(value) == length:
        return value
    got = f"{len(value)} values" if isinstance(value, list) else f"{value!r:.80}"
    raise Refused(f"{name}: expected {length} {noun}, got {got}")


def integers(value: Any, name: str) -> list[int]:
    """A list of integers, such as token ids."""
    if isinstance(value, list) and all(isinstance(x, int) and not isinstance(x, bool) for x in value):
        return value
    raise wrong(name, "a list of integers", value)


def numbers(value: Any, name: str, length: int) -> list[float | None]:
    """A list of `length` numbers; unknown ones may be null or NaN."""
    values = list_of_length(value, name, length, "numbers, one per token")
    return [number(x, f"{name}[{i}]") for i, x in enumerate(values)]


def flags(value: Any, name: str, length: int) -> list[bool]:
    """A list of `length` flags, as true and false or as 1 and 0."""
    values = numbers(value, name, length)
    for each in values:
        if each not in (0.0, 1.0):
            raise wrong(name, "true and false, or 1 and 0", each)
    return [each == 1.0 for each in values]


def digest(*values: Any) -> str:
    """A hash that equal values share."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def identified(row: Mapping[str, Any], *ids: Any) -> str:
    """A hash that a call has in every export: of its ids, or of the record's content if an id is missing."""
    return digest(*ids) if all(id is not None for id in ids) else digest(dict(row))


def total(
    row: Row, columns: Collection[str], weights: Mapping[str, float], *, partial: bool = False
) -> float | None:
    """The reward of a record with these columns of rewards: the only one, or the weighted sum of those named.

    It is unknown if any part is; with `partial`, for trainers that sum the known parts, only if all are.
    Raises `Refused` if there are several and none is named, since they may be parts of one sum, or the same
    reward on several scales.
    """
    if not weights and len(columns) > 1:
        raise Refused(
            f"reward: there are several columns of rewards ({', '.join(columns)}), and no weights in the "
            f"file; say --reward {next(iter(columns))}, or several with weights, --reward NAME=WEIGHT"
        )
    weights = weights or dict.fromkeys(columns, 1.0)
    for name in weights:
        if name not in row:
            raise Refused(f"--reward {name}: no such column; there are {', '.join(columns) or 'none'}")
    parts = {name: number(row[name], name) for name in weights}
    terms = [weights[name] * part for name, part in parts.items() if part is not None]
    if len(terms) < len(parts) and not partial:
        return None
    return sum(terms) if terms else None


_GOOD = ("up", "thumbs up", "thumbsup", "yes", "like", "liked", "positive", "true", "👍")
_BAD = ("down", "thumbs down", "thumbsdown", "no", "dislike", "disliked", "negative", "false", "👎")
WORDS = {**dict.fromkeys(_GOOD, 1.0), **dict.fromkeys(_BAD, 0.0)}
_UNKNOWN = ("", "n/a")
_DECIMAL_COMMA = re.compile(r"-?\d+,(\d{1,2}|\d{4,})")
_STARS = r"(?:stars?|sterne?n?|étoiles?|estrellas?|points?|punkten?)"
_SHARE = re.compile(
    rf"(\d+(?:[.,]\d+)?) ?(?:{_STARS} ?)?"
    rf"(?:(%|percent|prozent)|(?:/|of|out of|von|sur|de|su|van) ?(\d+)(?: ?{_STARS})?)"
)
_COUNT = re.compile(rf"(\d+(?:[.,]\d+)?) ?{_STARS}")
_WORDED = re.compile(r"(-?\d+(?:[.,]\d+)?) ?(?:[:(=–-].*| [^\d/%]+)")
_TONES = re.compile("[\ufe0f\U0001f3fb-\U0001f3ff]")  # skin tones of emoji


class Rating(NamedTuple):
    """A rating written as text."""

    number: float
    scale: str  # 7, 8/10, 85% and ★★ are on four scales
    highest: float | None  # the highest rating possible; None if the text doesn't say


def rating_in(text: str) -> Rating | None:
    """The rating in a percentage, fraction or count of stars, such as 85%, 4/5, 3 of 5, ★★☆☆☆ and 3 stars;
    None for other texts."""
    plain = word_of(text)
    if re.fullmatch("[★⭐]+☆*|☆+", plain):
        filled = len(plain) - plain.count("☆")
        is_whole = "☆" in plain or filled == 5
        return Rating(float(filled), "stars", float(len(plain)) if is_whole else None)
    if match := _SHARE.fullmatch(plain):
        scale = "a percentage" if match[2] else f"a part of {match[3]}"
        return Rating(_decimal(match[1]), scale, 100.0 if match[2] else float(match[3]))
    if match := _COUNT.fullmatch(plain):
        return Rating(_decimal(match[1]), "stars", None)
    return None


def share_in(text: str) -> float | None:
    """A percentage, a fraction, or stars out of a number, as a share from 0 to 1; None for other texts."""
    rating = rating_in(text)
    return rating.number / rating.highest if rating is not None and rating.highest else None


def scale_of(value: Any) -> str | None:
    """The scale of a rating; None without a number."""
    if isinstance(number_in(value), int | float):
        return "a number"
    if not isinstance(value, str):
        return None
    rating = rating_in(value)
    if rating is not None or not set("★⭐☆").isdisjoint(value):
        return None if rating is None else rating.scale
    return "a number" if worded_number(value) is not None else None


def worded_number(text: str) -> float | None:
    """The number at the start of a rating such as 3 - fair, 5: awful or 4 (good); None for other texts."""
    match = _WORDED.fullmatch(word_of(text))
    return _decimal(match[1]) if match else None


def word_of(text: str) -> str:
    """The word in the form of `WORDS`."""
    return " ".join(re.split(r"[\s_-]+", _TONES.sub("", text).strip().casefold()))


def number_in(value: Any) -> Any:
    """The number, true or false that a text says, also with a plus sign or a decimal comma; other values,
    such as words, unchanged. Three digits after a comma may mean thousands: such a text is no number."""
    if not isinstance(value, str):
        return value
    plain = value.strip()
    if plain[:1] == "+" and plain[1:2].isdigit():
        plain = plain[1:]
    if _DECIMAL_COMMA.fullmatch(plain):
        plain = plain.replace(",", ".")
    try:
        return loads(plain)
    except ValueError:
        return value


def _decimal(text: str) -> float:
    return float(text.replace(",", "."))


def parse_words(text: str) -> dict[str, float | None]:
    """Parse `up=1,down=0,skip=null`, or the same as JSON, in which words may have commas.

    Raises `Refused` for other texts.
    """
    rewards: dict[str, float | None] = {}
    items: Iterable[Sequence[Any]] = (part.rpartition("=")[::2] for part in text.split(","))
    if text.startswith("{"):
        try:
            items = loads(text).items()
        except ValueError as error:
            expected = "WORD=NUMBER, or an object of JSON"
            raise Refused(f"--reward-map {text!r:.80}: expected {expected}: {error}") from None
    for word, value in ((str(word).strip(), value) for word, value in items):
        if not word:
            raise Refused(f"--reward-map {value!r}: expected WORD=NUMBER, such as up=1,down=0")
        if word in rewards:
            raise Refused(f"--reward-map {word}: it is {rewards[word]} already")
        worth = number_in(value)
        if isinstance(worth, str | list | dict):
            raise Refused(f"--reward-map {word}={value}: expected a number, or null where it is unknown")
        rewards[word] = None if worth is None else float(worth)
    return rewards


def written_words(worth: Mapping[str, str]) -> str:
    """The text that `parse_words` reads."""
    if not any({",", "="} & set(word) or word.startswith("{") for word in worth):
        return ",".join(f"{word}={value}" for word, value in worth.items())
    pairs = (f"{json.dumps(word, ensure_ascii=False)}: {value}" for word, value in worth.items())
    return "{" + ", ".join(pairs) + "}"


def as_reward(value: Any, context: Context, name: str) -> Any:
    """The reward of a word by --reward-map, or else by `WORDS`; a share (80%, 4/5, ★★☆☆☆) as a number from 0
    to 1; other values unchanged.

    Raises `Refused` for a word without a reward, for a number missing in a --reward-map of numbers, and for
    shares and other numbers in one file, which are two scales.
    """
    if is_unknown(value):
        return None
    word_rewards, key = context.word_rewards, _written(value)
    if key in word_rewards:
        context.notes["--reward-map"] = True  # it was used
        return word_rewards[key]
    share = share_in(value) if isinstance(value, str) else None
    if share is not None or isinstance(number_in(value), int | float):
        is_share = share is not None
        was_share, prior = context.notes.setdefault(f"scale of {name}", [is_share, str(value)])
        if was_share != is_share:
            raise Refused(
                f"{name}: expected one scale, got {value!r:.80}, and {prior!r:.80} before it; say what each "
                f"is worth: --reward-map '{key[:40]}=NUMBER', and so on"
            )
    if share is not None:
        return share
    if not isinstance(value, str):
        if any(re.fullmatch(r"-?[0-9.]+", word) for word in word_rewards):
            raise _unknown_word(value, word_rewards, name)
        return value
    word = word_of(value)
    if word in _UNKNOWN:
        return None
    rating = rating_in(value)
    if rating is not None and rating.highest is None and not word_rewards:
        raise Refused(
            f"{name}: {value!r:.80} doesn't say out of how many; say what each is worth: --reward-map "
            f"'{key}=NUMBER', and so on (--guess proposes them)"
        )
    if word_rewards or word not in WORDS:
        raise _unknown_word(value, word_rewards or WORDS, name)
    return WORDS[word]


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, int | float) else str(value).strip()


def _unknown_word(value: Any, expected: Iterable[str], name: str) -> Refused:
    way_out = f"say what it is worth: --reward-map {_written(value)[:40]}=NUMBER, and so on for every word"
    return wrong(name, f"a finite number, or one of the words {', '.join(expected)}", value, way_out)
