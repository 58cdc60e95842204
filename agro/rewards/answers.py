"""Final answers: where one stands in a text, and when two are the same.

Standard library only: a worker process loads this file by its path.
"""

from __future__ import annotations

import re

MARKER = "the final answer is"
_NUMBER = re.compile(r"([-+]?)\s*([0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.([0-9]*))?")
_BEFORE_ANSWER = re.compile(r"[\s:=]*(?:(?:\*\*|__)(?=[\s:=]))?[\s:=]*")  # "**The final answer is:** 18"
_WRAPPINGS = (
    ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), (r"\boxed{", "}"), (r"\text{", "}"), (r"\mathrm{", "}"),
    ("**", "**"), ("*", "*"), ("__", "__"), ("`", "`"), ('"', '"'),
)  # fmt: skip


def after_marker(text: str, marker: str = MARKER) -> str | None:
    """What follows the last `marker`, to the end of its line (or on the next line that isn't empty); None without one.

    Letter case doesn't matter. A marker that starts with a letter or digit starts a word: "A:" isn't in "area:".
    """
    start = r"(?<!\w)" if re.match(r"\w", marker) else ""
    found = list(re.finditer(start + re.escape(marker), text, re.IGNORECASE))
    if not found:
        return None
    rest = _BEFORE_ANSWER.sub("", text[found[-1].end() :], count=1)
    return rest.splitlines()[0] if rest else ""


def last_match(text: str, pattern: str) -> str | None:
    """The one group of the last match of `pattern`; None without a match."""
    found = list(re.finditer(pattern, text))
    return found[-1][1] if found else None


def normalise(answer: str) -> str:
    r"""A short form in which equal answers are equal texts.

    Runs of white space become one space; a trailing . , ; : or ! goes; so does markup around the whole ($…$, \(…\),
    \[…\], \boxed{…}, \text{…}, **…**, *…*, `…`, "…") and a leading $. A decimal number loses thousands separators,
    a plus, leading zeros and trailing zeros of the fraction: "$1,000.00" is "1000". Everything else stays.
    """
    text, before = " ".join(answer.split()), None
    while text != before:
        before = text
        text = text.rstrip(".,;:! ")
        for left, right in _WRAPPINGS:
            inner = text[len(left) : len(text) - len(right)]
            if text == left + inner + right and _whole(inner, left, right):
                text = inner.strip()
        if text.startswith(("$", r"\$")) and _number(text.lstrip("\\$")) is not None:
            text = text.lstrip("\\$")
    number = _number(text)
    return text if number is None else number


def _whole(inner: str, left: str, right: str) -> bool:
    r"""Whether `left` and `right` belong together: not in "$1$ and $2$" or "\boxed{1} or {2}"."""
    if right != "}":
        return bool(inner) and left not in inner and right not in inner
    depth = 0
    for c in inner:
        depth += (c == "{") - (c == "}")
        if depth < 0:
            return False
    return depth == 0


def _number(text: str) -> str | None:
    found = _NUMBER.fullmatch(text)
    if not found or not (found[2] or found[3]):
        return None
    whole = found[2].replace(",", "").lstrip("0") or "0"
    fraction = (found[3] or "").rstrip("0")
    size = whole + ("." + fraction if fraction else "")
    return ("-" if found[1] == "-" and size != "0" else "") + size


def matches(found: str | None, answer: str) -> float:
    """1.0 where the text `found` in a response is the `answer`, else 0.0.

    A further sentence on the same line doesn't count: "18. I hope it is correct." is the answer 18.
    """
    if found is None:
        return 0.0
    sentence = re.split(r"[.!]\s", found, maxsplit=1)[0]
    return float(normalise(answer) in (normalise(found), normalise(sentence)))


def by_pattern(completions: list[str], answer: list[str], pattern: str) -> list[float]:
    """`matches` on the last match of a user's pattern, which may take for ever: to be run in a worker."""
    return [matches(last_match(text, pattern), a) for text, a in zip(completions, answer)]
