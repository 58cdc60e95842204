r"""The final answer of a solution, and comparisons of final answers that need no SymPy.

Standard library only. A comparison of short answers takes about 0.1 ms.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction

from agro_grade import answers
from agro_grade.numerals import COMPOUND, DATE, Number, digits, moment, number, plain, typography, unit

TAIL = 4000  # characters at a solution's end that are searched for an answer without a box
LONGEST = 1000  # most characters of an answer for SymPy

_MARKER = re.compile(r"\b(?:answer|choice)\b[*_\s]*(?:(?:is|are|equals|was)\b|=|:)[*_:=\s]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<![A-Z.])[.!?](?=[\s*]|$)|\n")
_SPAN = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$([^$]+)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_JOINS = re.compile(r"[\s,;]*(?:and|or)?[\s,]*", re.IGNORECASE)
_CURRENCY = re.compile(r"(?<!\\)\$(?!\d)")
_BOLD = re.compile(r"(?:^|(?<=\s))\*\*(?=\S)|(?<=\S)\*\*(?=\W|$)")
_ESCAPED = re.compile(r"\\(?=[$%])")
_NUMBER = re.compile(
    r"(?<![\w.,^_\\/*+({\[-])(?<![-+*/^]\s)[-+]?(?:\\?\$|[€£¥₹])?-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
)
_VALUE = r"[-+]?[\d.,/]*\d"
_ABOUT = r",?\s*\(?(?:(?:which|that)\s+is\s+|or\s+|=\s*)?(?:about|approximately|roughly|around|\\approx)\s*"
_APPROXIMATION = re.compile(_ABOUT)
_NEARLY = re.compile(r"[\s${(]*(?:\\(?:approx|simeq|sim|thickapprox)(?![A-Za-z])|~)")  # ≈ 4, without a name
_ROUNDED = re.compile(rf"\s*{_ABOUT}{_VALUE}[^\d.\n]*\.?\s*$")
_BEFORE_NUMBER = re.compile(
    r"(?:[a-z]\s*[-+*/^]\s*\w+|\w+\s*[-+*/^]\s*[a-z])\s*=\s*$"  # x + y = 5
    rf"|\b[a-z]\s*=\s*(?:{_VALUE}\s*(?:[,;]|(?:,\s*)?\band\b)\s*[a-z]\s*=\s*)+$"  # x = 2 and y = -1
    r"|\b(?:minus|negative)\s+$"
    rf"|{_VALUE}{_ABOUT}$"  # 1/3, which is about 0.33
    r"|(?:\binfinity|[-+]?\d[\d.,]*)\s*(?:(?:,\s*)?\b(?:or|and|to)\b|,|-|–)\s*$"  # 4 or 5
    r"|\d+\s+(?:out\s+of\s+)?$"  # 2 1/3, 3 out of 8
    r"|\d+:$"  # 3:45
    r"|\b\w+\s*\(?(?:in\s+)?base[\s-]*$",  # 43 (base 5)
    re.IGNORECASE,
)
_CONTRAST = re.compile(
    r"(?<=[\w)$}*])(?:,\s*(?:and\s+|but\s+)?not|,?\s+(?:rather\s+than|instead\s+of))\s+[^\s,]+\W*$"
)
_CONCESSION = re.compile(
    r"(\d[\w$)}*%]*(?:\s[a-z]+){0,2}),?\s+(?:although|though|even\s+(?:though|if)|because|since)\b"
    r"(?:(?!\b(?:answer|so|thus|hence|therefore|then)\b)[^.!?\n])*\W*$",
    re.IGNORECASE,
)
_LETTER = re.compile(r"([A-Z])|\(([A-Za-z])\)")
_CHOICE = re.compile(
    r"(?:(?:option|choice)\s+)?(?:\(?([A-Z])|\(([a-z])|([a-z])(?=[.)]*$))(?:\)[.:]?|[.:])?"
    r"(?:\s+(?![-+*/^=<>]|and\b|or\b).*|$)"
)
_OPTION_AND_VALUE = re.compile(r"\(([A-Z])\)[.:]?\s*(\S.*)")
_OPTION = re.compile(
    r"\b(?i:option|choice|choose|select|pick)\s+(?:(?i:is|was|must be)\s+|:\s*)?\(?([A-Z])\b"
    r"(?!\)?,?\s*(?:or|and|,|/)\s*\(?[A-Z]\b)"
)
_PROSE = re.compile(
    r"\b(?!(?:sin|cos|tan|log|exp|sqrt|and|mod)\b)[A-Za-z]{3,}|\b(?:it|is|so|no)\b", re.IGNORECASE
)
_VERB = re.compile(r"\b(?:is|are|be|equals?|gives?|get|becomes?|have|obtain)\s+")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_OPENING = re.compile(
    r"(?:(?:so|thus|therefore|hence|there|we|get|have|has|takes|makes|altogether|this|that|it|its|the|a|an|is|are|"
    r"be|equals?|to|answer|result|value|final|simply|just|only|exactly|option|choice|=|:)\b[\s,:]*)*",
    re.IGNORECASE,
)
_STATED = re.compile(
    r"(?:(?:^|\b(?:is|was|are|be|it|its|it's|equals?|becomes?|remains?|forms?|choose|pick|have|get|obtain|conclude|"
    r"namely|on|in|at|that|answer|result)|[:=])\s*)(?:(?:an?|the|exactly|always|simply)\s+)*$"
)
_LETTERS = re.compile(r"\(?[A-Z]\)?(?:\s*(?:,|;|&|\band\b)[\s,]*(?:and\s+)?\(?[A-Z]\)?)+")
_ELSEWHERE = re.compile(
    r"\b(?:or|and|after|before|than|except|but|of|without|besides|unlike|near|from|to|like)\s+(?:the\s+)?$"
)
_EMPTY = re.compile(
    r"(?:(?:there\s+(?:is|are)|(?:the\s+)?\w+\s+ha(?:s|ve))\s+)?no\s+(?:real\s+)?(?:solution|root)s?(?:\s+exists?)?"
    r"|(?:the\s+)?empty\s+set|\\varnothing|\\\{\s*\\\}"
)
_NONEXISTENT = re.compile(r"(?:(?:the\s+|this\s+|that\s+)?\w+\s+)?does\s+not\s+exist|dne")
_REALS = re.compile(
    r"(?:the\s+set\s+of\s+)?(?:all\s+real(?:\s+number)?s|any\s+real\s+number)|\\R|\\mathbb\s*r"
)
_JOINED = re.compile(r"\s*(?:[,;]|\band\b|\bor\b)[\s,;]*(?:\b(?:and|or)\s+)?|\s+(?=[A-Za-z]\s*=)")
_POINT = re.compile(r"(?:\(([a-z](?:,\s*[a-z])+)\)\s*=\s*)?\(([^()]*)\)")
# No expression contains a word, or marks such as 5' and 5..6. math-verify reads the number next to them.
_UNREADABLE = re.compile(
    r"\d\s*:\s*\d+\s*:\s*\d|\b(?!(?:sin|cos|tan|log|exp|sqrt|mod|print|and)\b)[A-Z]?[a-z]{3,}\b|\d'|\d\.\.\d|\d\s*–\s*\d|\d\s*[-+]$"
    r"|\d \d+ \d"
)
_TUPLE = r"[(\[{][^()\[\]{}A-Za-z\n]*,[^()\[\]{}A-Za-z\n]*[)\]}]"
_TUPLES = re.compile(rf"{_TUPLE}(?:\s*(?:,|\band\b|\bor\b)[\s,]*(?:(?:and|or)\s+)?{_TUPLE})*")
_SQUARED = re.compile(r"\$\s*([A-Za-z]+)\s*\$\s*\^\s*\{?([23])\}?\s*\$")  # $9$ cm$^2$
_UNIT_IN_WORDS = re.compile(
    r"\A((?=.*\\)(?:[^A-Za-z$\\]|\\[a-z]+(?![a-z])|(?<![a-z])[a-z]\b)+?)[\s$]{1,3}"
    r"([A-Za-z][A-Za-z ]+(?:\^\{?[23]\}?)?)\.?\Z"
)
_TEXT_OF_UNIT = re.compile(r"\A([A-Za-z$¢€£¥°/ ]+)")
_POWER = re.compile(r"(?<=[\w)])\*\*(?=-?(?:\d|[a-z]\b))")  # x**2
_QUANTIFIED = re.compile(  # $f(x) = x^2$ for all $x$
    r"([$)}]),?\s*(?:\bfor\s+(?:all|any|every|each)\b(?!.*(?:=|\b(?:is|are|equals)\b))"
    r"|\bwhere\s+\$?[a-z]\$?\s+is\s+an(?:y|\s+arbitrary)?\s+integer)[^.\n]*\W*$"
)
_RANGE = re.compile(r"(?<=\d)\s*(?:–|-|\bto\b)\s*(?=[$]?\d)")
_RATIO = re.compile(r"\d+\s*:\s*\d+")
_EITHER_SIGN = re.compile(r"\\pm\s*(\d[\d./]*)")
_NAMED = re.compile(r"([A-Za-z](?:_\w+)?(?:\(\d+\))?)\s*=\s*")
_WORDS = re.compile(r"(?!(?:pi|infinity)$)[A-Za-z']+(?:[ -][A-Za-z']+)*")
_TEXT = re.compile(r"\\(?:text\w*|mathrm|mbox)\s*\{[^{}]*[A-Za-z][^{}]*\}(?:\s*\^\s*\{?[23]\}?)?")

_DIRECTIONS = re.compile(
    r"\b(?:(increase|gain|profit)|(decrease|loss)|(north)|(south)|(east)|(west))", re.IGNORECASE
)

_BRACED = re.compile(r"(?<!\w)\{\s*(\w)\s*\}|(?<=sqrt)\{\s*(\w)\s*\}")
_NEEDLESS = re.compile(r"(?<!\w)\s|\s(?!\w)|(?<=[A-Za-z])\s(?=\d)")


@dataclass(frozen=True)
class Final:
    """The final answer of a solution.

    `text`: the answer. `source`: the answer with its markup, for math-verify. `is_denied`: the solution
    denies it, only bounds it, or states it under one of several conditions: "not 5", "5 is wrong", "less than
    5", "5 if x > 0, otherwise 6". `direction`: the index in `_DIRECTIONS` of the last such word near it.
    """

    text: str
    source: str
    is_denied: bool = False
    is_boxed: bool = False
    direction: int | None = None

    def is_opposite(self, answer: Final) -> bool:
        """Whether one is an increase and the other a decrease, or one north and the other south."""
        if self.direction is None or answer.direction is None:
            return False
        return self.direction ^ 1 == answer.direction


def final(solution: str, *, may_be_cut: bool = True) -> Final:
    """The final answer of a solution, with its direction: see `_stated`. A solution truncated within its last
    box has none; answers of some datasets have an unclosed box."""
    if may_be_cut and answers.is_cut_in_box(answers.conclusion(solution)):
        return Final("", "")
    answer = _stated(solution)
    directions = [match.lastindex or 0 for match in _DIRECTIONS.finditer(solution[-NEAR:])]
    return replace(answer, direction=directions[-1] - 1) if directions else answer


def _stated(solution: str) -> Final:
    r"""The last \boxed{…} (also several that belong together); without one, what follows the last "answer is"
    or "answer:"; else the last formula; else the last number; else everything.
    """
    text = _POWER.sub("^", typography(answers.conclusion(solution).strip()))
    if len(text) <= LONGEST:
        text = _SQUARED.sub(r"\\text{ \1}^\2$", _UNIT_IN_WORDS.sub(_as_text, text))
    boxes = answers.boxes(text)
    if boxes:
        contents = [text[content : end - 1].strip() for _, content, end in boxes]
        prefix, suffix = text[: boxes[0][0]], text[boxes[-1][2] :]
        tail = _tail(suffix)
        source = ", ".join(rf"\boxed{{{content}}}" for content in contents)
        joined = ", ".join(contents) + tail
        comment = contents[-1].partition(r"\text")[2].lstrip("{ ")
        denied = is_denied(prefix, joined, suffix) or is_refuted(comment)
        return _name_set(Final(joined, source + tail, denied, is_boxed=True))
    text = text[-TAIL:-NEAR] + _QUANTIFIED.sub(r"\1", _CONCESSION.sub(r"\1", _CONTRAST.sub("", text[-NEAR:])))
    markers = list(_MARKER.finditer(text))
    if markers:
        start = markers[-1].end()
        end = _SENTENCE_END.search(text, start)
        stop = end.start() if end else len(text)
        sentence = text[start:stop].strip(" *_")
        if sentence:
            inner = _unboxed(sentence)
            prefix = text[:start] + sentence.rpartition(inner.text)[0]
            denied = inner.is_denied or is_denied(prefix, inner.text, text[stop:])
            return _name_set(Final(inner.text, inner.source, denied))
    return _name_set(_unboxed(text))


def _as_text(match: re.Match[str]) -> str:
    r"""A formula without delimiters and its unit in words, as LaTeX: 36\pi\text{ cubic centimeters}."""
    return match[1] + _TEXT_OF_UNIT.sub(r"\\text{ \1}", match[2]) if unit(plain(match[2])) else match[0]


def _name_set(answer: Final) -> Final:
    """`answer`, or the symbol of the empty set or of the real numbers if it names one in words."""
    if len(answer.text) > NEAR or re.search(r"\d", answer.text):
        return answer
    phrase = plain(answer.text).strip(" .$").lower()
    for pattern, symbol in ((_EMPTY, r"\emptyset"), (_REALS, r"\mathbb{R}"), (_NONEXISTENT, r"\text{DNE}")):
        if pattern.fullmatch(phrase):
            return Final(symbol, f"${symbol}$", answer.is_denied, answer.is_boxed)
    return answer


def _unboxed(text: str) -> Final:
    text = _BOLD.sub("", text)
    if "\\" in _ESCAPED.sub("", text) or (text.count("$") % 2 == 0 and _CURRENCY.search(text)):
        return _formula(text) or _bare_formula(text) or _everything(text)
    if not _PROSE.search(text):
        return _everything(text)
    return _last_number(text) or _spelled(text) or _everything(text)


def _formula(text: str) -> Final | None:
    """The last formula between delimiters, or a number after it; None if it is one of several."""
    spans = list(_SPAN.finditer(text))
    if not spans:
        return None
    formula = spans[-1]
    prefix = text[: formula.start()]
    suffix = text[formula.end() :]
    is_one_of_several = len(spans) > 1 and _JOINS.fullmatch(text, spans[-2].end(), formula.start())
    if is_one_of_several or "\\" in suffix:
        return None
    suffix = _ROUNDED.sub("", suffix[:NEAR]) + suffix[NEAR:]
    if re.search(r"(?<!\^)(?<!\^\{)\d", suffix):  # except the power of a unit
        return _last_number(text)
    content = next(group for group in formula.groups() if group).strip()
    tail = _tail(suffix)
    return Final(content + tail, f"${content}${tail}", is_denied(prefix, content, suffix))


def _bare_formula(text: str) -> Final | None:
    """The LaTeX without delimiters that follows the last verb, if no other words do."""
    sentence = [part for part in _SENTENCE_END.split(text) if part.strip()][-1:]
    verbs = list(_VERB.finditer(sentence[0])) if sentence else []
    formula = sentence[0][verbs[-1].end() :].strip() if verbs else ""
    formula = _UNIT_IN_WORDS.sub(_as_text, _ROUNDED.sub("", formula)[:LONGEST])
    if "$" in formula or "\\" not in formula or _PROSE.search(_COMMAND.sub("", _TEXT.sub("", formula))):
        return None
    return Final(formula, f"${formula}$", is_denied(sentence[0][: verbs[-1].end()], formula, ""))


def _everything(text: str) -> Final:
    """The whole text, or the last paragraphs or sentences of a long one."""
    for separator in ("\n", ". "):
        while len(text) > LONGEST and separator in text:
            text = text.partition(separator)[2]
    text = text[-LONGEST:]
    return Final(text, text, is_denied("", text, ""))


def _last_number(text: str) -> Final | None:
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    match = numbers[-1]
    start = match.start()
    end = match.end()
    amounts = [amount for amount in COMPOUND.finditer(text) if number(plain(amount[0]))]
    for enclosing in (*_TUPLES.finditer(text), *DATE.finditer(text), *amounts):
        if enclosing.start() <= start < enclosing.end():
            start, end = enclosing.span()
    while preceding := _BEFORE_NUMBER.search(text, max(0, start - 50), start):
        start = preceding.start()
    prefix, suffix = text[:start], text[end:]
    answer = (text[start:end] + _SENTENCE_END.split(suffix, maxsplit=1)[0]).strip(" *_")
    sentence = _SENTENCE_END.split(prefix)[-1] + answer
    denied = is_denied(prefix, answer, suffix) or is_bounded(prefix, sentence)
    return Final(answer, answer, denied)


def _spelled(text: str) -> Final | None:
    """The number in words that the last sentence states, as in "So there are twenty-one ways."."""
    sentence = [part for part in _SENTENCE_END.split(text) if part.strip()][-1].strip(" *_")
    verbs = list(_VERB.finditer(sentence))
    answer = _OPENING.sub("", sentence[verbs[-1].end() :] if verbs else sentence, count=1)
    if digits(answer) == answer:
        return None
    return Final(answer, answer, is_denied(sentence[: len(sentence) - len(answer)], answer, ""))


def _tail(suffix: str) -> str:
    """A percent sign, or a unit at the end of the sentence, after a formula."""
    sentence = _SENTENCE_END.split(suffix[:NEAR], maxsplit=1)[0].strip(" $*")
    is_part = re.match(r"\\?%|percent|pct", sentence)
    if unit(plain(sentence)):
        return _TEXT_OF_UNIT.sub(r"\\text{ \1}", sentence, count=1)
    return f" {sentence}" if is_part else ""


def compare(response: Final, answer: Final) -> float | None:
    """1.0 if a response's answer is the sample's, 0.0 if it isn't, None if SymPy must decide."""
    if max(len(response.text), len(answer.text)) > TAIL:
        return float(response == answer) or None
    if response.is_opposite(answer) or _is_only_near(response.text, answer.text):
        return 0.0
    candidate, expected = _joined_alike(plain(response.text), plain(answer.text))
    is_same_word = _PROSE.fullmatch(expected) and candidate.lower() == expected.lower()
    if is_same_word or _squeeze(candidate) == _squeeze(expected):
        return float(response.is_denied == answer.is_denied)
    if response.is_denied or answer.is_denied:
        return 0.0
    value = _compare_choices(response, candidate, expected)
    if value is None:
        value = _compare_numbers(candidate, expected)
    if value is not None:
        return value
    if number(expected) and "\\" not in response.text and _UNREADABLE.search(response.text):
        return 0.0
    response_unit, answer_unit = _last_unit(response.text), _last_unit(answer.text)
    if response_unit and answer_unit and response_unit != answer_unit:
        return 0.0
    is_words = _WORDS.fullmatch(expected) and (_PROSE.search(expected) or _TEXT.search(answer.text))
    if is_words and "\\" not in candidate:
        return float(_says(candidate, expected, response.is_boxed))
    return None


def _is_only_near(response: str, answer: str) -> bool:
    """Whether a response rounds (≈ 4) although the answer is an exact number."""
    exact = number(plain(answer))
    is_rounded = _NEARLY.match(response) and not _NEARLY.match(answer)
    return bool(is_rounded and exact and not exact.places)


def _compare_choices(response: Final, candidate: str, expected: str) -> float | None:
    """Whether a response chooses the expected option of a multiple choice; None if none is expected."""
    letter = _LETTER.fullmatch(expected)
    if letter:
        return float(_choice(candidate) == (letter[1] or letter[2]).upper())
    option = _OPTION_AND_VALUE.fullmatch(expected)
    if option:  # (D) 24
        choice = _choice(candidate)
        return float(choice == option[1]) if choice else compare(response, Final(option[2], option[2]))
    if re.fullmatch(rf"{_LETTERS.pattern}|[A-Z]+", candidate) and _LETTERS.fullmatch(expected):
        chosen, right = (re.findall("[A-Z]", text) for text in (candidate, expected))
        return float(sorted(chosen) == right or chosen == right)
    return None


def _joined_alike(candidate: str, expected: str) -> tuple[str, str]:
    """Both texts with one sign between the numbers of a ratio (3 to 5) or of a range (10-20), if `expected`
    is one."""
    if _RATIO.fullmatch(expected):
        candidate = re.sub(r"(?<=\d) to (?=\d)", ":", candidate)
    elif _RANGE.search(expected) and not re.search(r"\d\s*-", expected):
        candidate, expected = (_RANGE.sub(" to ", text) for text in (candidate, expected))
    return candidate, expected


def _lowest_terms(text: str) -> list[int] | None:
    """The terms of a ratio of three or more numbers, 2, 3, 4 for 4:6:8; None for other text."""
    if not re.fullmatch(r"\d+(?:\s*:\s*\d+){2,}", text):
        return None
    terms = [int(term) for term in text.split(":")]
    divisor = math.gcd(*terms) or 1
    return [term // divisor for term in terms]


def _last_unit(text: str) -> str | None:
    r"""The unit of measure in the last \text{…}."""
    texts = _TEXT.findall(text)
    return unit(plain(texts[-1])) if texts else None


def _compare_numbers(candidate: str, expected: str) -> float | None:
    """Whether two numbers, lists of numbers, times or dates are equal; None if one is none of these."""
    day, other = moment(expected), moment(candidate)
    if day and (day.is_complete or (other and other.is_complete)):
        return float(other is not None and other.equals(day))
    ratio = _lowest_terms(expected)
    if ratio:
        return float(_lowest_terms(candidate) == ratio)
    right = number(expected)
    if right is None:
        candidates, solutions = _several(candidate), _several(expected)
        if candidates and solutions:
            return float(_same(candidates, solutions, ordered=_has_order(expected, solutions)))
        return _compare_solutions(candidate, expected)
    readings = _readings(candidate)
    if readings:
        return float(any(reading.equals(right) for reading in readings))
    return None if re.search(r"[\d\\*]", candidate) else 0.0


def _readings(text: str) -> list[Number]:
    """The number in a text; two for an exact number and its rounding: "1/3, about 0.33"."""
    parts = [number(_NAMED.sub("", part, count=1)) for part in _APPROXIMATION.split(text)]
    numbers = [part for part in parts if part is not None]
    if len(parts) == 1:
        return numbers
    if len(numbers) != 2:
        return []
    exact, rounded = numbers
    is_rounding = abs(exact.value - rounded.value) <= Fraction(1, 10**rounded.places)
    return numbers if is_rounding else []


def _compare_solutions(candidate: str, expected: str) -> float | None:
    """Whether two texts state the same values of several unknowns: "y = -1, x = 2" is (2, -1)."""
    candidates, solutions = _solutions(candidate), _solutions(expected)
    if candidates and solutions:
        return float(candidates == solutions)
    named = candidates or solutions
    point = _point(expected if candidates else candidate)
    if not named or not point or len(named) > 1:
        return None
    values = dict(next(iter(named)))
    return float([values[name] for name in sorted(values)] == point)


def _point(text: str) -> list[Fraction] | None:
    """The coordinates of a point of numbers such as (2, -1)."""
    point = _POINT.fullmatch(text)
    names = re.findall("[a-z]", point[1] or "") if point else []
    if point is None or names != sorted(names):
        return None
    numbers = [number(item.strip()) for item in point[2].split(",")]
    coordinates = [n.value for n in numbers if n is not None]
    return coordinates if len(coordinates) == len(numbers) > 1 else None


def _several(text: str) -> list[Number] | None:
    """The numbers of a list without an order, such as roots: "1,2", "x = 1 or x = 2", "{1, 2}"."""
    text = _EITHER_SIGN.sub(r"\1, -\1", text)
    items = _JOINED.split(text.removeprefix(r"\{").removesuffix(r"\}").strip(" .{}"))
    names = [match[1] for match in map(_NAMED.match, items) if match]
    if len(items) < 2 or len(set(names)) > 1:
        return None
    numbers = [number(_NAMED.sub("", item, count=1)) for item in items]
    values = [n for n in numbers if n is not None]
    return values if len(values) == len(numbers) else None


def _solutions(text: str) -> set[frozenset[tuple[str, Fraction]]] | None:
    """The solutions in several unknowns of a list such as "p = 5, q = 2; p = 7, q = 2", in any order.

    A repeated name starts the next solution.
    """
    solutions: list[dict[str, Fraction]] = [{}]
    for item in _JOINED.split(text.replace(r"\quad", " ").strip()):
        name = _NAMED.match(item)
        value = number(item[name.end() :].strip()) if name else None
        if name is None or value is None:
            return None
        if name[1] in solutions[-1]:
            solutions.append({})
        solutions[-1][name[1]] = value.value
    if len(solutions) == 1 and re.search(r"\bor\b", text):
        return None  # x = 2 or y = -1
    return {frozenset(solution.items()) for solution in solutions}


def _has_order(text: str, numbers: list[Number]) -> bool:
    """Whether a list's order matters: three or more numbers that neither rise nor fall."""
    values = [number.value for number in numbers]
    is_bare = not re.search(r"[{}=]|\bor\b", text)
    return is_bare and len(values) > 2 and sorted(values) not in (values, values[::-1])


def _same(several: list[Number], expected: list[Number], *, ordered: bool) -> bool:
    """Whether the list has each expected number once and no other; `ordered`: in the same order."""
    if ordered:
        pairs = zip(several, expected, strict=False)
        return len(several) == len(expected) and all(number.equals(answer) for number, answer in pairs)
    unmatched = list(several)
    for answer in expected:
        equal = next((n for n in unmatched if n.equals(answer)), None)
        if equal is None:
            return False
        unmatched.remove(equal)
    return not unmatched


def _squeeze(text: str) -> str:
    """`text` without needless white space and braces: x^{2} + 1 is x^2+1."""
    text = answers.normalize(text) if "!" not in text else text
    return _NEEDLESS.sub("", _BRACED.sub(r"\1\2", text))


def _choice(text: str) -> str | None:
    """The letter of a multiple choice; None if it is denied."""
    text = text.strip(" .*")
    letter = _CHOICE.fullmatch(text)
    options = list(_OPTION.finditer(text))
    choice = options[-1] if options else letter
    if choice is None:
        return None
    end = choice.end(choice.lastindex or 0)
    if is_denied(text[: choice.start()], "", text[end:]):
        return None
    return str(choice[choice.lastindex or 0]).upper()


def _says(candidate: str, expected: str, is_boxed: bool) -> bool:
    """Whether a text is the words of the answer or, outside a box, ends with them."""
    candidate, expected = _without_articles(candidate), _without_articles(expected)
    if is_boxed or not candidate.endswith(f" {expected}"):
        return candidate == expected
    prefix = candidate[: -len(expected)]
    is_stated = _STATED.search(prefix) and not _ELSEWHERE.search(prefix)
    return bool(is_stated) and not is_negated(prefix)


def _without_articles(text: str) -> str:
    return re.sub(r"\b(?:an?|the) ", "", text.lower().strip(" .!"))


NEAR = 200  # characters around an answer that are searched for a denial

_ADVERBS = (
    r"(?:actually|all|also|both|certainly|clearly|definitely|ever|just|necessarily|obviously|possibly|really|simply|"
    r"still|surely|truly)"
)
_FILLER = (
    rf"(?:a|an|the|is|be|are|equals?|to|that|it|its|true|correct|case|answer|result|value|final|only|exactly|"
    rf"number|choice|option|=|:|{_ADVERBS})"
)

# Before the answer. Only fillers may separate these words from the answer, which is their object.
_NOT = r"(?:\b(?:not|never|cannot|nor|neither)\b|n['’]t\b|\\neq?(?![a-z])|\\(?:not|lnot|neg)\b|≠|!=)"
_EXCEPT = (
    r"\b(?:(?:any|every)thing\s+but|except(?:\s+for)?|besides|apart\s+from|excluding|far\s+from|hardly|other\s+than"
    r"|(?:different|distinct)\s+from|unequal\s+to|differ(?:s|ed)?\s+from"
    r"|(?:fail(?:s|ed)?|refuse[sd]?)\s+to\s+(?:be|equal|reach))\b"
)
_PART = r"(?:half|thirds?|quarters?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?)"
_FUNCTION = (
    r"(?:square|cube|(?:square\s+|cube\s+)?root|reciprocal|inverse|opposite|negative|negation|double|triple|"
    r"factorial|successor|predecessor)"
)
_MULTIPLIED = (
    rf"\b(?:{_PART}\s+of|(?:the|a|an)\s+{_FUNCTION}\s+of"
    r"|(?:multiples?|square\s+root|log(?:arithm)?)\s+of|divisible\s+by|\d\s+over|twice|thrice|doubled?|tripled?|quadruple"
    r"|(?:\d|two|three|four|five|six|seven|eight|nine|ten)\s+times)"
)
_OBJECT = re.compile(rf"(?:{_NOT}|{_EXCEPT}|{_MULTIPLIED})(?:\s+{_FILLER})*[\s$*({{\\\[]*$", re.IGNORECASE)
# These verbs deny a bare number, as in "this rules out 5". With a noun it is a count: "it rejects 5 items".
_DROPS = re.compile(
    r"\b(?:(?:rul(?:e|es|ed|ing)|cross(?:es|ed|ing)?)\s+out"
    r"|(?:exclud|eliminat|discard|dismiss|reject|disprov|refut|contradict)(?:e|es|ed|ing|s)?)"
    rf"(?:\s+{_FILLER})*[\s$*]*$",
    re.IGNORECASE,
)
_WORD = re.compile("[A-Za-z]")
_DROPPED = (
    r"(?:(?:ruled|crossed|thrown)\s+out|excluded|eliminated|discarded|dismissed|rejected|disproved|refuted)"
)
# A clause that denies what follows it, up to the next clause.
_CLAUSE_END = re.compile(r"[.;:!?,\n]")
_CLAUSE = re.compile(
    r"(?:\b(?:false|wrong|incorrect|untrue|impossible|not\s+true|an?\s+(?:mistake|error))\s+"
    r"(?:that|to\s+(?:answer|assume|believe|claim|conclude|say|think|write))\b"
    r"|\b(?:no\s+way|nobody|no\s+one)\b"
    r"|\b(?:wrong|incorrect|bogus|false|mistaken|erroneous)\s+(?:answer|value|result|solution|choice)\b"
    r"|(?<!no )(?<!any )(?<!without )(?<!beyond )\b(?:doubt|deny|denies|disagree|reject|refute)\b"
    r"|(?:n['’]t|\bnot|\bcannot)\s+(?:accept|believe|claim|conclude|mean|say|think)\b)"
    r"(?:(?!\b(?:but|so|because|since|then|thus|hence|therefore|rather|instead)\b).){0,80}$",
    re.IGNORECASE,
)

# After the answer: "5 is wrong", "5 turned out to be too small", "5 can't be the answer", "5? No."
_WRONG = (
    r"(?:wrong|incorrect|false|untrue|impossible|invalid|mistaken|ruled\s+out|excluded|rejected|too\s+\w+|"
    r"close(?!d)|near|almost|nearly|off|an?\s+(?:mistake|error)|"
    r"what\s+(?!(?:we|I|you|is|was|the\s+(?:question|problem))\b))"
    r"(?:\b|(?<=\s))(?!\s*(?:to|that)\b)"
)
_RIGHT = (
    r"(?:possible|correct|right|true|valid|allowed|permitted|attained|reached|achieved|\w+able|the\s+case|it\b|"
    r"(?:(?:an?|the|my|our|its)\s+)?(?:\w+\s+)?(?:answer|solution|result|value|choice|option)\b)"
)
_IS = (
    r"(?:is|was|are|were|be|seems|looks|"
    r"(?:turn(?:s|ed)|comes?|came)\s+out(?:\s+to\s+be)?|prove[sd]?(?:\s+to\s+be)?)"
)
_REFUTED = (
    rf"(?:{_IS}(?:\s+{_ADVERBS})*\s+{_WRONG}"
    r"|(?:(?:is|was|are|were|can|could|will|would|should|must|does|may)\s*(?:not\b|n['’]t\b|never\b)|cannot\b"
    rf"|can['’]t\b|won['’]t\b|never\b)(?:\s+be)?(?:\s+{_ADVERBS})*\s+{_RIGHT}"
    r"|(?:(?:do|does|did|will|would)\s*(?:not\b|n['’]t\b)|cannot\b|can['’]t\b|won['’]t\b)\s+"
    r"(?:work|hold|fit|satisfy|solve|make\s+sense)\b|fail(?:s|ed)\b)"
)
_AFTERWARDS = re.compile(
    r"[^\w.?!\n]*(?:(?!(?:and|because|but|or|since|so|while)\b)[A-Za-z]+,?\s+){0,3}?"
    rf"(?:would\s+|must\s+)?(?:{_REFUTED}|(?:or|and)\s+(?:more|less|fewer|above|below)\b|at\s+(?:least|most)\b)"
    r"|\s*(?:squared|cubed|factorial|or\s+so|-?ish)\b"
    r"|[^\w\n]*(?:(?:but|and|so)\s+)?(?:none|neither)\s+of\s+(?:them|these|those|which)\s+"
    rf"(?:(?:is|are|was|were|can\s+be)\s+{_RIGHT}|(?:work|hold|fit|solve|satisfie)s?\b)"
    rf"|\s*(?:is|was|(?:can|could|may|must|should|has\s+to|is\s+to)\s+be)\s+{_DROPPED}\b"
    r"|[^\w\n]*[.?!\n][^\w]*(?:(?:wait|hmm|actually|oh|but|oops|sorry)\W+)*"
    r"(?:(?:no|wrong|incorrect)(?=\s*(?:[.,;:!?\n]|$))"
    rf"|(?:that|this|it|the\s+answer|(?:that|this)\s+answer)(?:\s+(?:would\s+|must\s+)?{_REFUTED}|['’]s\s+{_WRONG}))",
    re.IGNORECASE,
)

# The answer itself: a bound, or one value of several that depends on a condition.
_MORE = "more|less|greater|fewer|smaller|larger|bigger|higher|lower"
_BOUND = (
    rf"(?:between|at\s+(?:least|most)|(?:not?\s+)?(?:{_MORE})\s+than(?:\s+or\s+equal\s+to)?|up\s+to"
    r"|almost|nearly|(?:well\s+)?(?:above|below|over|under))[\s}$]*"
)
_SIGN = r"(?:[<>]=?|\\(?:[gl]e(?:q|qslant)?|[gl]t)(?![A-Za-z]))"
_NO_VALUE = re.compile(
    rf"[\s${{(\[]*{_SIGN}|\W*(?:text\w*\W*)?(?:{_NOT}|{_EXCEPT}|{_MULTIPLIED}\W+(?:\\\w+\W*)?\d|{_BOUND}[-\d\\])",
    re.IGNORECASE,
)
_ONLY_BOUND = re.compile(_BOUND, re.IGNORECASE)
_BOUNDED = re.compile(rf"(?:{_SIGN}|\b(?:{_MORE})\s+than)[\s$]*$")
_DEPENDS = re.compile(
    r"\b(?:otherwise|unless|or\s+else)\b|[,;]\s*else\b|\belse\W+\d|\\begin\{d?cases\}", re.IGNORECASE
)


def is_denied(prefix: str, answer: str, suffix: str) -> bool:
    """Whether the answer, or the text around it, says that it isn't the answer or isn't all of it."""
    prefix = prefix[-NEAR:]
    is_bare = not _WORD.search(answer) or ("\\" in answer and "\n" not in answer)
    return bool(
        is_negated(prefix[-NEAR // 2 :])
        or (is_bare and _DROPS.search(prefix))
        or _CLAUSE.search(_CLAUSE_END.split(prefix)[-1])
        or _NO_VALUE.match(answer)
        or _DEPENDS.search(answer)
        or is_refuted(suffix[:NEAR])
    )


def is_negated(prefix: str) -> bool:
    """Whether a text ends with a negation of what follows, or with a factor such as "twice"."""
    return _OBJECT.search(prefix) is not None


def is_refuted(suffix: str) -> bool:
    """Whether a text starts by saying that what precedes it is wrong."""
    return _AFTERWARDS.match(suffix) is not None


def is_bounded(prefix: str, sentence: str) -> bool:
    """Whether a number after `prefix` is only bounded, or its sentence states several values."""
    return bool(
        _ONLY_BOUND.fullmatch(prefix) or _BOUNDED.search(prefix[-20:]) or _DEPENDS.search(sentence, 1)
    )
