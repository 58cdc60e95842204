r"""The final answer of a solution, and comparisons of final answers that need no SymPy.

Standard library only. A comparison of short answers takes about 0.1 ms.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from agro.rewards import answers
from agro.rewards.numerals import number, plain, unit

TAIL = 4000  # characters at a solution's end in which an answer without a box is looked for
LONGEST = 1000  # characters of an answer for SymPy
DEEPEST = 12  # brackets within brackets, which the parser reads in exponential time
DIGITS = 2000  # of a number that SymPy computes

_FILLER = (
    r"(?:a|an|the|is|be|are|equals?|to|that|it|its|true|correct|case|answer|result|value|final|simply|just|"
    r"only|exactly|actually|definitely|choice|option|=|:)"
)
_MARKER = re.compile(r"\b(?:answer|choice)\b[*_\s]*(?:(?:is|are|equals|was)\b|=|:)[*_:=\s]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<![A-Z])[.!?](?=[\s*]|$)|\n")
_SPAN = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$([^$]+)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_JOINS = re.compile(r"[\s,;]*(?:and|or)?[\s,]*", re.IGNORECASE)
_CURRENCY = re.compile(r"(?<!\\)\$(?!\d)")
_NUMBER = re.compile(r"(?<![\w.,^_\\/*+({\[-])(?<![-+*/^]\s)[-+]?[$€]?-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_BEFORE_NUMBER = re.compile(
    r"(?:[a-z]\s*[-+*/^]\s*\w+|\w+\s*[-+*/^]\s*[a-z])\s*=\s*$"  # x + y = 5
    r"|[-+]?\d[\d.,]*\s*(?:(?:,\s*)?\b(?:or|and|to)\b|,|-|–)\s*$"  # 4 or 5
    r"|\d+\s+$"  # 2 1/3
)
# A negation of which the answer is the object: only fillers stand between them.
_NOT = r"(?:\b(?:not|never|cannot|nor|neither)\b|n['’]t\b|\\neq?(?![a-z])|\\not\b|≠|!=)"
_DENIED = re.compile(rf"{_NOT}(?:\s+{_FILLER})*[\s$*({{\\\[]*$", re.IGNORECASE)
_MORE = "more|less|greater|fewer|smaller|larger|bigger|higher|lower"
_BOUND = rf"(?:between|at (?:least|most)|(?:{_MORE}) than)[\s}}$]*"
_NO_VALUE = re.compile(rf"\W*(?:text\w*\W*)?(?:{_NOT}|{_BOUND}[-\d\\])", re.IGNORECASE)
_ONLY_BOUND = re.compile(_BOUND, re.IGNORECASE)
_LETTER = re.compile(r"\(?([A-Z])\)?")
_CHOICE = re.compile(
    r"(?:(?:option|choice)\s+)?\(?([A-Z])(?:\)[.:]?|[.:])?(?:\s+(?![-+*/^=<>]|and\b|or\b).*|$)"
)
_OPTION = re.compile(r"\b(?i:option|choice|choose|select|pick)\s+\(?([A-Z])\b")
_PROSE = re.compile(r"\b(?!(?:sin|cos|tan|log|exp|sqrt|and)\b)[A-Za-z]{3,}|\b(?:it|is|so)\b", re.IGNORECASE)
_WORDS = re.compile(r"(?!(?:pi|infinity)$)[A-Za-z']+(?:[ -][A-Za-z']+)*")
_TEXT = re.compile(r"\\(?:text\w*|mathrm|mbox)\s*\{[^{}]*[A-Za-z][^{}]*\}")

_BRACED = re.compile(r"(?<!\w)\{\s*(\w)\s*\}|(?<=sqrt)\{\s*(\w)\s*\}")
_NEEDLESS = re.compile(r"(?<!\w)\s|\s(?!\w)|(?<=[A-Za-z])\s(?=\d)")
_POWER = re.compile(r"(?<!\d)(\d+)\s*(?:\^|\*\*)\s*[{(]?\s*(\d+)\s*[)}]?(?!\s*(?:\^|\*\*|!|\d))")
_FACTORIAL = re.compile(r"(?<!\d)(\d+)\s*!")
_BRACKETED = re.compile(r"[{(]\s*(\d+)\s*[)}]")
_LARGE = re.compile(
    rf"\\[dt]?binom[^A-Za-z]*\d{{5}}|[A-Za-z][^()]*\)\s*\^\s*\{{?\s*\d{{4}}|\d{{{DIGITS + 1}}}"
)


@dataclass(frozen=True)
class Final:
    """The final answer of a solution.

    `text`: the answer. `source`: the answer with its markup, for math-verify. `is_denied`: the solution
    says "not" or "less than", for example, before it.
    """

    text: str
    source: str
    is_denied: bool = False
    is_boxed: bool = False


def final(solution: str) -> Final:
    r"""The last \boxed{…} (also several that belong together); without one, what follows the last "answer is"
    or "answer:"; else the last formula; else the last number; else everything.
    """
    text = answers.conclusion(solution).strip()
    boxes = answers.boxes(text)
    if boxes:
        insides = [text[inside : end - 1].strip() for _, inside, end in boxes]
        tail = _tail(text[boxes[-1][2] :])
        source = ", ".join(rf"\boxed{{{inside}}}" for inside in insides)
        before = text[: boxes[0][0]]
        return Final(", ".join(insides) + tail, source + tail, _is_denied(before, insides[0]), is_boxed=True)
    text = text[-TAIL:]
    markers = list(_MARKER.finditer(text))
    if markers:
        start = markers[-1].end()
        sentence = _SENTENCE_END.split(text[start:], maxsplit=1)[0].strip(" *_")
        if sentence:
            inner = _unboxed(sentence)
            return Final(inner.text, inner.source, inner.is_denied or _is_denied(text[:start], inner.text))
    return _unboxed(text)


def _unboxed(text: str) -> Final:
    if "\\" in text or (text.count("$") % 2 == 0 and _CURRENCY.search(text)):
        return _formula(text) or _everything(text)
    is_prose = _PROSE.search(text) is not None
    return (_last_number(text) if is_prose else None) or _everything(text)


def _formula(text: str) -> Final | None:
    """The last formula between delimiters, or a number after it; None where it is one of several."""
    spans = list(_SPAN.finditer(text))
    if not spans:
        return None
    last = spans[-1]
    before = text[: last.start()]
    rest = text[last.end() :]
    is_one_of_several = len(spans) > 1 and _JOINS.fullmatch(text, spans[-2].end(), last.start())
    if is_one_of_several or "\\" in rest:
        return None
    if re.search(r"\d", rest):
        return _last_number(text)
    inside = next(group for group in last.groups() if group).strip()
    tail = _tail(rest)
    return Final(inside + tail, f"${inside}${tail}", _is_denied(before, inside))


def _everything(text: str) -> Final:
    """The whole text, or the last paragraphs or sentences of a long one."""
    for separator in ("\n", ". "):
        while len(text) > LONGEST and separator in text:
            text = text.partition(separator)[2]
    text = text[-LONGEST:]
    return Final(text, text, _is_denied("", text))


def _last_number(text: str) -> Final | None:
    found = None
    for found in _NUMBER.finditer(text):  # noqa: B007 the last one
        pass
    if found is None:
        return None
    start = found.start()
    while earlier := _BEFORE_NUMBER.search(text, max(0, start - 50), start):
        start = earlier.start()
    answer = _SENTENCE_END.split(text[start:], maxsplit=1)[0].strip(" *_")
    return Final(
        answer, answer, _is_denied(text[:start], answer) or bool(_ONLY_BOUND.fullmatch(text[:start]))
    )


def _tail(rest: str) -> str:
    """A percent sign, or a unit at the end of the sentence, after a formula."""
    sentence = _SENTENCE_END.split(rest, maxsplit=1)[0].strip(" $*")
    is_part = re.match(r"\\?%|percent|pct", sentence) or unit(plain(sentence))
    return f" {sentence}" if is_part else ""


def _is_denied(before: str, answer: str) -> bool:
    return bool(_DENIED.search(before[-100:]) or _NO_VALUE.match(answer))


def compare(response: Final, answer: Final) -> float | None:
    """1.0 where a response's answer is the sample's, 0.0 where it isn't, None where SymPy has to decide."""
    if max(len(response.text), len(answer.text)) > TAIL:
        return float(response == answer) or None
    found, known = plain(response.text), plain(answer.text)
    if _squeeze(found) == _squeeze(known):
        return float(response.is_denied == answer.is_denied)
    if response.is_denied != answer.is_denied:
        return 0.0
    mine, right = number(found), number(known)
    if mine and right:
        return float(mine.equals(right))
    if right and not re.search(r"[\d\\]", response.text):
        return 0.0
    units = [unit(plain(text[-1])) for text in map(_TEXT.findall, (response.text, answer.text)) if text]
    if len(units) == 2 and all(units) and units[0] != units[1]:
        return 0.0
    letter = _LETTER.fullmatch(known)
    if letter:
        return float(_choice(found) == letter[1])
    is_words = _WORDS.fullmatch(known) and (_PROSE.search(known) or _TEXT.search(answer.text))
    if is_words and "\\" not in found:
        return float(_says(found, known, response.is_boxed))
    return None


def _squeeze(text: str) -> str:
    """`text` without white space and braces that change nothing: x^{2} + 1 is x^2+1."""
    text = answers.normalize(text) if "!" not in text else text
    return _NEEDLESS.sub("", _BRACED.sub(r"\1\2", text))


def _choice(text: str) -> str | None:
    """The letter of a multiple choice."""
    first = _CHOICE.fullmatch(text.strip(" .*"))
    options: list[str] = _OPTION.findall(text) or ([first[1]] if first else [])
    return options[-1] if options else None


def _says(found: str, known: str, is_boxed: bool) -> bool:
    """Whether a text is the words of the answer or, outside a box, ends with them."""
    found, known = (re.sub(r"\b(?:an?|the) ", "", text.lower().strip(" .!")) for text in (found, known))
    if is_boxed or not found.endswith(f" {known}"):
        return found == known
    before = found[: -len(known)]
    return not _DENIED.search(before) and not re.search(r"\b(?:or|and)\s+$", before)


def too_large(text: str) -> str | None:
    """Why SymPy doesn't read an answer: reading or evaluating it takes too long. None where it does."""
    if len(text) > LONGEST:
        return f"has {len(text)} characters, at most {LONGEST} are compared"
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > DEEPEST:
        return f"has {deepest} brackets within brackets, at most {DEEPEST} are compared"
    if _is_large(text):
        return f"is too large to compute: only numbers of at most {DIGITS} digits are"
    return None


def _is_large(text: str) -> bool:
    """Computes the powers and factorials of numbers, the innermost first, until one is too large."""
    before = None
    while text != before:
        before = text
        if _LARGE.search(text):
            return True
        for factorial in _FACTORIAL.finditer(text):
            if int(factorial[1]) > DIGITS // 3:
                return True
        for power in _POWER.finditer(text):
            if int(power[2]) * math.log10(max(2, int(power[1]))) > DIGITS:
                return True
        text = _FACTORIAL.sub(lambda found: str(math.factorial(int(found[1]))), text, count=1)
        text = _POWER.sub(lambda found: str(int(found[1]) ** int(found[2])), text, count=1)
        text = _BRACKETED.sub(r"\1", text)
    return False
