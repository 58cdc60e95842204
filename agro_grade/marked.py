"""Final answers after a phrase, or where a pattern finds them. Standard library only."""

from __future__ import annotations

import re

from agro_grade.answers import normalize

MARKER = "the final answer is"
_BEFORE_ANSWER = re.compile(r"[\s:=]*(?:(?:\*\*|__)(?=[\s:=]))?[\s:=]*")  # "**The final answer is:** 18"


def after_marker(text: str, marker: str = MARKER) -> str | None:
    """The text after the last `marker`, to the end of its line or on the next nonempty line; None without
    one.

    Case is ignored. A marker that starts with a letter or digit starts a word: "A:" isn't in "area:".
    """
    start = r"(?<!\w)" if re.match(r"\w", marker) else ""
    markers = list(re.finditer(start + re.escape(marker), text, re.IGNORECASE))
    if not markers:
        return None
    answer = _BEFORE_ANSWER.sub("", text[markers[-1].end() :], count=1)
    return answer.splitlines()[0] if answer else ""


def matches(conclusion: str | None, answer: str) -> float:
    """1.0 where the text `conclusion` in a response is the `answer`, else 0.0.

    Further sentences on the line are ignored: "18. I hope it is correct." is the answer 18.
    """
    if conclusion is None:
        return 0.0
    sentence = re.split(r"[.!]\s", conclusion, maxsplit=1)[0]
    return float(normalize(answer) in (normalize(conclusion), normalize(sentence)))


def match_pattern(completions: list[str], answer: list[str], pattern: str) -> list[float]:
    """`matches` on the last match of a user's pattern. It may never end, so it runs in a worker."""
    found = [list(re.finditer(pattern, text)) for text in completions]
    return [matches(of[-1][1] if of else None, a) for of, a in zip(found, answer)]
