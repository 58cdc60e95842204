"""Final answers: finding them in a text, and comparing them.

Standard library only: worker processes load this file by its path.
"""

from __future__ import annotations

import re

MARKER = "the final answer is"
_BRACE = re.compile(r"\\boxed\s*\{|(?<!\\)[{}]")
_REPLACES = re.compile(
    r"(?<!\d)[.!?]\s|\b(?:actually|but|hence|however|no|not|so|then|therefore|thus|wait)\b", re.IGNORECASE
)
_NUMBER = re.compile(r"([-+]?)\s*([0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.([0-9]*))?")
_BEFORE_ANSWER = re.compile(r"[\s:=]*(?:(?:\*\*|__)(?=[\s:=]))?[\s:=]*")  # "**The final answer is:** 18"
_WRAPPINGS = (
    ("$$", "$$"),
    ("$", "$"),
    (r"\(", r"\)"),
    (r"\[", r"\]"),
    (r"\boxed{", "}"),
    (r"\text{", "}"),
    (r"\mathrm{", "}"),
    ("**", "**"),
    ("*", "*"),
    ("__", "__"),
    ("`", "`"),
    ('"', '"'),
)


def after_marker(text: str, marker: str = MARKER) -> str | None:
    """The text after the last `marker`, to the end of its line or on the next nonempty line; None without
    one.

    Case is ignored. A marker that starts with a letter or digit starts a word: "A:" isn't in "area:".
    """
    start = r"(?<!\w)" if re.match(r"\w", marker) else ""
    found = list(re.finditer(start + re.escape(marker), text, re.IGNORECASE))
    if not found:
        return None
    rest = _BEFORE_ANSWER.sub("", text[found[-1].end() :], count=1)
    return rest.splitlines()[0] if rest else ""


def conclusion(text: str) -> str:
    r"""The conclusion of a solution.

    Thinking is removed: everything before the last </think>, or after a <think> that is never closed. A
    last line that starts with #### is the answer (GSM8K). Of several \boxed{…} only the last ones stay
    boxed: a box is unboxed if, before the next one, a sentence ends or a word such as "but" or "thus"
    revises it.
    """
    _, thought, rest = text.rpartition("</think>")
    if thought:
        text = rest
    else:
        text = text.partition("<think>")[0]
    last = text.rstrip().rpartition("\n")[2].lstrip()
    if last.startswith("####"):
        return last.lstrip("#").strip()
    found = boxes(text)
    joined = len(found) - 1
    while joined > 0 and not _REPLACES.search(text, found[joined - 1][2], found[joined][0]):
        joined -= 1
    for start, inside, end in reversed(found[: max(joined, 0)]):
        text = text[:start] + text[inside : end - 1] + text[end:]
    return text


def boxes(text: str) -> list[tuple[int, int, int]]:
    r"""The outermost \boxed{…}: its start, the start of its content, and its end."""
    if r"\boxed" not in text:
        return []
    open_, found = list[re.Match[str]](), list[tuple[int, int, int]]()
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            open_.append(brace)
        elif open_ and len((first := open_.pop())[0]) > 1:
            while found and found[-1][0] > first.start():
                found.pop()
            found.append((first.start(), first.end(), brace.end()))
    return found


def last_match(text: str, pattern: str) -> str | None:
    """The group of the last match of `pattern`; None without a match."""
    found = list(re.finditer(pattern, text))
    return found[-1][1] if found else None


def normalize(answer: str) -> str:
    r"""A canonical form, so that equal answers are equal texts.

    Runs of white space become one space. These are removed: a trailing . , ; : or !; markup around the text
    ($…$, \(…\), \[…\], \boxed{…}, \text{…}, **…**, *…*, `…`, "…"); a leading $; thousands separators, a
    plus, leading zeros and trailing zeros of the fraction of a decimal number: "$1,000.00" becomes "1000".
    """
    text, before = " ".join(answer.split()), None
    while text != before:
        before = text
        text = text.rstrip(".,;:! ")
        for left, right in _WRAPPINGS:
            inner = text[len(left) : len(text) - len(right)]
            if text == left + inner + right and _is_pair(inner, left, right):
                text = inner.strip()
        if text.startswith(("$", r"\$")) and _number(text.lstrip("\\$")) is not None:
            text = text.lstrip("\\$")
    number = _number(text)
    return text if number is None else number


def _is_pair(inner: str, left: str, right: str) -> bool:
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

    Further sentences on the line are ignored: "18. I hope it is correct." is the answer 18.
    """
    if found is None:
        return 0.0
    sentence = re.split(r"[.!]\s", found, maxsplit=1)[0]
    return float(normalize(answer) in (normalize(found), normalize(sentence)))


def by_pattern(completions: list[str], answer: list[str], pattern: str) -> list[float]:
    """`matches` on the last match of a user's pattern. It may never end, so it runs in a worker."""
    return [matches(last_match(text, pattern), a) for text, a in zip(completions, answer)]
