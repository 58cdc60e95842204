"""Extract a solution's conclusion, or the answer after a marker, and normalize answers.

Standard library only.
"""

from __future__ import annotations

import re

MARKER = "the final answer is"
_BEFORE_ANSWER = re.compile(r"[\s:=]*(?:(?:\*\*|__)(?=[\s:=]))?[\s:=]*")  # "**The final answer is:** 18"
MARKUPS = 12  # the most nested markups removed around an answer
_BRACE = re.compile(r"\\boxed\s*\{|(?<!\\)[{}]")
_REPLACES = re.compile(
    r"(?<!\d)[.!?]\s|\b(?:actually|but|hence|however|no|not|so|then|therefore|thus|wait)\b", re.IGNORECASE
)
_NUMBER = re.compile(r"([-+−–]?)\s*([0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.([0-9]*))?")
_WRAPPINGS = (
    *(("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), (r"\boxed{", "}"), (r"\text{", "}")),
    *((r"\mathrm{", "}"), ("**", "**"), ("*", "*"), ("__", "__"), ("`", "`"), ('"', '"')),
)


def conclusion(text: str) -> str:
    r"""The conclusion of a solution.

    Thinking is removed: everything before the last </think>, or after a <think> that is never closed. The
    last <answer>…</answer> is the answer, or a last line that starts with #### (GSM8K). Of several \boxed{…}
    only the last ones stay boxed: a box is unboxed if, before the next one, a sentence ends or a word such as
    "but" or "thus" revises it.
    """
    _, thought, solution = text.rpartition("</think>")
    if thought:
        text = solution
    else:
        text = text.partition("<think>")[0]
    _, opened, inner = text.rpartition("<answer>")
    if opened and "</answer>" in inner:
        text = inner.partition("</answer>")[0]
    line = text.rstrip().rpartition("\n")[2].lstrip()
    if line.startswith("####"):
        return line.lstrip("#").strip()
    boxed = boxes(text)
    answer = max(len(boxed) - 1, 0)  # the first of the boxes that make up the answer
    while answer > 0 and not _REPLACES.search(text, boxed[answer - 1][2], boxed[answer][0]):
        answer -= 1
    pieces, rest = list[str](), 0
    for start, content, end in boxed[:answer]:
        pieces += text[rest:start], text[content : end - 1]
        rest = end
    return "".join(pieces) + text[rest:]


def boxes(text: str) -> list[tuple[int, int, int]]:
    r"""The outermost \boxed{…}: its start, the start of its content, and its end."""
    return _boxes(text)[0]


def is_cut_in_box(text: str) -> bool:
    r"""Whether a text ends within a \boxed{…} that begins after its last complete one."""
    complete, opened = _boxes(text)
    return opened is not None and (not complete or complete[-1][0] < opened)


def _boxes(text: str) -> tuple[list[tuple[int, int, int]], int | None]:
    """The boxes of `boxes`, and the start of the last unclosed box."""
    if r"\boxed" not in text:
        return [], None
    unclosed, spans = list[re.Match[str]](), list[tuple[int, int, int]]()
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            unclosed.append(brace)
            continue
        opening = unclosed.pop() if unclosed else None
        if opening is None or opening[0] == "{":
            continue
        while spans and spans[-1][0] > opening.start():  # boxes within this one
            spans.pop()
        spans.append((opening.start(), opening.end(), brace.end()))
    return spans, next((brace.start() for brace in reversed(unclosed) if brace[0] != "{"), None)


def normalize(answer: str) -> str:
    r"""A canonical form, so that equal answers are equal texts.

    Runs of white space become one space. These are removed: a trailing . , ; : or !; markup around the text
    ($…$, \(…\), \[…\], \boxed{…}, \text{…}, **…**, *…*, `…`, "…"); a leading $; thousands separators, a
    plus, leading zeros and trailing zeros of the fraction of a decimal number: "$1,000.00" becomes "1000".
    """
    text = " ".join(answer.split())
    for _ in range(MARKUPS):
        previous = text
        text = text.rstrip(".,;:! ")
        for opening, closing in _WRAPPINGS:
            inner = text[len(opening) : len(text) - len(closing)]
            if text == opening + inner + closing and _is_pair(inner, opening, closing):
                text = inner.strip()
        if text.startswith(("$", r"\$")) and _number(text.lstrip("\\$")) is not None:
            text = text.lstrip("\\$")
        if text == previous:
            break
    number = _number(text)
    return text if number is None else number


def _is_pair(inner: str, opening: str, closing: str) -> bool:
    r"""Whether `opening` and `closing` belong together: not in "$1$ and $2$" or "\boxed{1} or {2}"."""
    if closing != "}":
        return bool(inner) and opening not in inner and closing not in inner
    depth = 0
    for character in inner:
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
        if depth < 0:
            return False
    return depth == 0


def _number(text: str) -> str | None:
    """A decimal number in its canonical form; None for other text."""
    match = _NUMBER.fullmatch(text)
    if not match or not (match[2] or match[3]):
        return None
    integer = match[2].replace(",", "").lstrip("0") or "0"
    fraction = (match[3] or "").rstrip("0")
    size = f"{integer}.{fraction}" if fraction else integer
    is_negative = match[1] not in ("", "+") and size != "0"
    return f"-{size}" if is_negative else size


def after_marker(text: str, marker: str = MARKER) -> str | None:
    """The text after the last `marker`, to the end of its line, or the next nonempty line; None without a
    marker.

    Case is ignored. A marker that starts with a letter or digit starts a word: "A:" isn't in "area:".
    """
    start = r"(?<!\w)" if re.match(r"\w", marker) else ""
    markers = list(re.finditer(start + re.escape(marker), text, re.IGNORECASE))
    if not markers:
        return None
    answer = _BEFORE_ANSWER.sub("", text[markers[-1].end() :], count=1)
    return answer.splitlines()[0] if answer else ""


def matches(conclusion: str | None, answer: str) -> float:
    """1.0 if `conclusion`, a text from a response, is the `answer`, else 0.0.

    Further sentences on the line are ignored: "18. I hope it is correct." is the answer 18.
    """
    if conclusion is None:
        return 0.0
    sentence = re.split(r"[.!]\s", conclusion, maxsplit=1)[0]
    return float(normalize(answer) in (normalize(conclusion), normalize(sentence)))
