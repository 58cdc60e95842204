"""Rewards that are written as words; whether a response is desirable, as its columns are called for KTO."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from agro.errors import Refused
from agro.io.json_values import is_unknown
from agro.io.strictjson import loads
from agro.logs.protocol import Context, Row

LABELS = ("kto_tag", "desirable", "thumbs", "label")
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
_COUNT = re.compile(rf"(\d+(?:[.,]\d+)?) ?{_STARS}|([★⭐]+)")
_WORDED = re.compile(r"(-?\d+(?:[.,]\d+)?) ?(?:[:(=–-].*| [^\d/%]+)")
_TONES = re.compile("[\ufe0f\U0001f3fb-\U0001f3ff]")  # of the skin of an emoji


def parse_words(text: str) -> dict[str, float | None]:
    """The rewards of `up=1,down=0,skip=null`, or of the same as JSON, in which words may have commas.

    Raises `Refused` for other texts.
    """
    rewards: dict[str, float | None] = {}
    words: list[tuple[Any, Any]] = [part.rpartition("=")[::2] for part in text.split(",")]
    if text.startswith("{"):
        try:
            words = list(loads(text).items())
        except ValueError as error:
            raise Refused(
                f"--reward-map {text!r:.80}: expected WORD=NUMBER, or an object of JSON: {error}"
            ) from None
    for word, value in ((str(word).strip(), value) for word, value in words):
        if not word:
            raise Refused(f"--reward-map {value!r}: expected WORD=NUMBER, such as up=1,down=0")
        if word in rewards:
            raise Refused(f"--reward-map {word}: it is {rewards[word]} already")
        number = number_in(value)
        if isinstance(number, str | list | dict):
            raise Refused(f"--reward-map {word}={value}: expected a number, or null where it is unknown")
        rewards[word] = None if number is None else float(number)
    return rewards


def written_words(worth: Mapping[str, str]) -> str:
    """As `parse_words` reads it."""
    if any({",", "="} & set(word) or word.startswith("{") for word in worth):
        return (
            "{"
            + ", ".join(f"{json.dumps(word, ensure_ascii=False)}: {value}" for word, value in worth.items())
            + "}"
        )
    return ",".join(f"{word}={value}" for word, value in worth.items())


def as_reward(value: Any, context: Context, name: str) -> Any:
    """The reward that a word stands for, by --reward-map or by `WORDS`; a share (80%, 4/5, ★★☆☆☆) as a number
    from 0 to 1; another value as it is.

    Raises `Refused` for a word that isn't there; for a number, where --reward-map has numbers; and for shares
    and other numbers in one file, which are of two scales.
    """
    if is_unknown(value):
        return None
    word_rewards, key = context.word_rewards, _written(value)
    if word_rewards and key in word_rewards:
        context.notes["words"] = True
        return word_rewards[key]
    share = share_in(value) if isinstance(value, str) else None
    if share is not None or isinstance(number_in(value), int | float):
        is_share = share is not None
        was_share, first = context.notes.setdefault(f"scale of {name}", [is_share, str(value)])
        if was_share != is_share:
            raise Refused(
                f"{name}: expected one scale, got {value!r:.80}, and {first!r:.80} before it; say what each "
                f"is worth: --reward-map '{_written(value)[:40]}=NUMBER', and so on"
            )
    if share is not None:
        return share
    if not isinstance(value, str):
        if any(re.fullmatch(r"-?[0-9.]+", word) for word in word_rewards):
            raise _unknown_word(value, word_rewards, name)
        return value
    plain = word_of(value)
    if plain in _UNKNOWN:
        return None
    if count_in(value) is not None and not word_rewards:
        raise Refused(
            f"{name}: {value!r:.80} doesn't say of how many; say what each is worth: --reward-map "
            f"'{value.strip()}=NUMBER', and so on (--guess proposes them)"
        )
    if word_rewards or plain not in WORDS:
        raise _unknown_word(value, word_rewards or WORDS, name)
    return WORDS[plain]


def scale_of(value: Any) -> str | None:
    """How a rating is written: 7, 8/10, 85% and ★★ are of four scales; None where it has no number."""
    number = number_in(value)
    if isinstance(number, int | float):
        return "a number"
    if not isinstance(value, str):
        return None
    plain = word_of(value)
    if "★" in plain or "⭐" in plain or "☆" in plain:
        return None if count_in(value) is None and share_in(value) is None else "stars"
    if match := _SHARE.fullmatch(plain):
        return "a percentage" if match[2] else f"a part of {match[3]}"
    if count_in(value) is not None:
        return "stars"
    return "a number" if worded_number(value) is not None else None


def worded_number(text: str) -> float | None:
    """The number that a rating such as 3 - fair, 5: awful or 4 (good) begins with; None for others."""
    match = _WORDED.fullmatch(word_of(text))
    return float(match[1].replace(",", ".")) if match else None


def word_of(text: str) -> str:
    """The word as it stands in `WORDS`."""
    return " ".join(re.split(r"[\s_-]+", _TONES.sub("", text).strip().casefold()))


def number_in(value: Any) -> Any:
    """The number, or true and false, that a text is, also with a plus or a decimal comma; another value, such
    as a word, as it is. Three digits after a comma may be thousands: that is no number."""
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


def share_in(text: str) -> float | None:
    """What a percentage or a fraction is, such as 85%, 4/5, 3 of 5 and ★★☆☆☆; None for other texts."""
    plain = word_of(text)
    if re.fullmatch("[★⭐]*☆+|[★⭐]{5}", plain):
        return (len(plain) - plain.count("☆")) / len(plain)
    match = _SHARE.fullmatch(plain)
    if match is None:
        return None
    whole = 100.0 if match[2] else float(match[3])
    return float(match[1].replace(",", ".")) / whole if whole else None


def count_in(text: str) -> float | None:
    """How many stars or points it is, where it isn't said of how many; None for other texts."""
    match = _COUNT.fullmatch(word_of(text))
    if match is None:
        return None
    return float(match[1].replace(",", ".")) if match[1] else float(len(match[2]))


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, int | float) else str(value).strip()


def _unknown_word(value: Any, expected: Iterable[str], name: str) -> Refused:
    return Refused(
        f"{name}: expected a finite number, or one of the words {', '.join(expected)}, got {value!r:.80}; "
        f"say what it is worth: --reward-map {_written(value)[:40]}=NUMBER, and so on for every word"
    )


def labeled(row: Row, context: Context) -> float | None:
    """1 for true, false is 0; thumbs are 1 and -1, or words. None where it is unknown."""
    names = [name for name in LABELS if name in row]
    if len(names) > 1:
        raise Refused(f"label: expected one of the columns {', '.join(LABELS)}, got {', '.join(names)}")
    value = row[names[0]]
    if value is None:
        return None
    if isinstance(value, bool):
        return float(value)
    if not context.word_rewards and str(value) in ("1", "-1"):
        return float(str(value) == "1")
    if not isinstance(value, str) and not context.word_rewards:
        raise Refused(f"{names[0]}: expected true or false, or thumbs as 1 and -1, got {value!r:.80}")
    reward: float | None = as_reward(value, context, names[0])
    return reward
