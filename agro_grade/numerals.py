r"""Numbers as people and models write them: "1,250.00", "2\frac{1}{3}", "35\%", "12\text{ cm}", "1101_2",
"twenty-one", "2 million", "3:45 PM", "July 4th".

Standard library only.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

ROUNDED = 6  # a decimal with this many places equals every number that rounds to it
LARGEST_EXPONENT = 400  # of 10 in scientific notation

# Other meanings of a unit's name.
_AMBIGUOUS = {
    "$": ("cad", "aud"), "pound": ("£",), "oz": ("floz",), "ton": ("tonne",),
    "degree": ("celsius", "fahrenheit"),
}  # fmt: skip
_PHRASES = [
    (re.compile(rf"{pattern}\b\.?", re.IGNORECASE), name)
    for pattern, name in (
        (r"fl(?:uid|\.)?\s*(?:ounces?|oz)", "floz"),
        (r"nautical\s+miles?", "nmi"),
        (r"light[\s-]+years?", "ly"),
        (r"metric\s+tons?|metric\s+tonnes?", "tonne"),
        (r"(?:short|US)\s+tons?", "ton"),
        (r"pounds?\s+sterling|british\s+pounds?", "£"),
        (r"US\s+dollars?|american\s+dollars?", "usd"),
        (r"canadian\s+dollars?", "cad"),
        (r"australian\s+dollars?", "aud"),
        (r"basis\s+points?", "bp"),
        (r"pounds?\s+of\s+force|pound[\s-]force", "lbf"),
    )
]
_UNITS: dict[str, str] = {}  # name → short name
_SIZES: dict[str, tuple[str, Fraction]] = {}  # short name → (quantity, size)
for _quantity, _rows in tomllib.loads(Path(__file__).with_name("units.toml").read_text("utf-8")).items():
    for _row in re.split("[;\n]", _rows.strip()):
        _short, _size, *_names = _row.split()
        _SIZES[_short] = (_quantity, Fraction(_size))
        _UNITS |= dict.fromkeys((_short, *_names), _short)
_UNITS |= {"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "kmph": "km/h", "knot": "nmi/h", "rpm": "turn/min"}
_UNITS |= {"Kbps": "Kb/s", "kbps": "Kb/s", "Mbps": "Mb/s", "Gbps": "Gb/s", "MBps": "MB/s"}
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "²": "2", "³": "3"}

_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"
_SIGNS = {
    "−": "-", "∕": "/", "÷": r"\div ", "×": r"\times ", "·": r"\cdot ",
    "±": r"\pm ", "√": r"\sqrt ",
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ",
    "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "°": r"^\circ ",
    "½": r"\frac12 ", "¼": r"\frac14 ",
    "¾": r"\frac34 ", "⅓": r"\frac13 ", "⅔": r"\frac23 ", "\u00a0": " ", "\u202f": " ", "\u2009": " ",
}  # fmt: skip
_TYPOGRAPHY = str.maketrans(
    {**_SIGNS, **dict.fromkeys("\u2010\u2011\ufe63", "-"), "\u3000": " ", "。": ". "}
    | {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # full-width characters
)
_DECIMAL = re.compile(r"(?![0-9])\d")
# Dashes that are a minus: right before a term, and between terms that aren't two numbers, as in x – 3. A dash
# between two numbers makes a range, except before an equals sign.
_DASH = "[\u2012-\u2015]"
_MINUS = re.compile(
    rf"(?<![\w.)\]}}])(?<![\d)\]}}]\s){_DASH}(?=[\d.$(\\]|[a-z](?![A-Za-z]))|(?<==\s){_DASH}(?=\s?\d)"
    rf"|(?:(?<=[)\]}}])|(?<=(?<![A-Za-z])[a-z]))\s?{_DASH}\s?(?=[\d.(\\]|[a-z](?![A-Za-z]))"
    rf"|(?<=\d)\s?{_DASH}\s?(?=[(\\]|\d*[kntx-z](?![A-Za-z])|[\d.]+\s*(?:[-+*/\u2013]\s*[\d.]+\s*)*=)"
)
_ROOT = re.compile(r"√\s*(\d+|\w)")
_RAISED = re.compile(rf"(?<=[\w)}}])[{_SUPERSCRIPTS}]+")
_LOWERED = str.maketrans(_SUPERSCRIPTS, "0123456789-")

_SIMPLE = re.compile(r"-?[0-9]+(?: (?!degree)[A-Za-z]{3,})*")  # most answers: "480", "480 eggs"
# LaTeX -> plain text, in this order.
_PLAIN = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\!", ""),
        (r"\\(?:text\w*|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}", r" \1 "),
        (r"\s+(?=_)", ""),
        (r"(?<=\w)\s*\(?\b(?:in\s+)?base[\s-]*(\w+)\)?", r"_\1"),
        (r"\+?\s*\\infty|\bpositive infinity", "infinity"),
        (r"\b(?:minus|negative) infinity", "-infinity"),
        (r"\s*\(?\s*\\p?mod\s*\{?\s*(\d+)\s*\}?\s*\)?", r" (mod \1)"),
        (r"\\[dtc]?frac\s*(?:\{\s*([-\d.]+)\s*\}|(\d))\s*(?:\{\s*([-\d.]+)\s*\}|(\d))", r" \1\2/\3\4"),
        (r"\\times|\\cdot|×|(?<=\d)\s*x\s*(?=10\s*\^)", "*"),
        (r"(?<=[\d.])\s*\*\s*10\s*\^\s*\{?\s*([-+]?\d+)(?:\s*\})?", r"e\1"),
        (r"\\overline\s*\{(\d+)\}", r"(\1)"),
        (r"\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?", r"(\1\2\3)"),
        (r"(\.\d{0,30}?)(?:(\d)\2{2,}|(\d{2,6}?)\3+)(?:\\[lc]?dots|\.{3}|…)", r"\1(\2\3)"),  # 0.333…
        (r"\^\s*\{?\s*\\circ\s*\}?|°|\\degree", " degree "),
        (r"\bdegrees?\s+(?:C\b|(?i:celsius))", "celsius"),
        (r"\bdegrees?\s+(?:F\b|(?i:fahrenheit))", "fahrenheit"),
        (r"\\([%$])", r"\1"),
        (r"\{([,:])\}", r"\1"),
        (r"\\[,;: ]|~", " "),
        (r"\\geq?(?:slant)?(?![A-Za-z])", ">="),
        (r"\\leq?(?:slant)?(?![A-Za-z])", "<="),
        (r"(?<![\d.,])0,(?=\d+(?![\d,]))", "0."),  # a decimal comma
        (r"(?<=\d) out of (?=\d)", "/"),
        (r"(?:\bUS|\bUSD\s*)(?=\$)|\bUSD(?=\s*\d)", ""),
        (r"\b(?:Rs|INR)\b\.?\s*(?=\d)", "₹"),
        (r"^(?:minus|negative)\s+(?=\d)", "-"),
    )
]
_GROUPS = re.compile(
    r"(?<![\d.,])\d{1,3}(?:(?:,\d{3})+|(?:_\d{3})+|(?:'\d{3})+)(?![\d,_'])"
    r"|(?<![\d.,])\d{1,3}(?:\.\d{3}){2,}(?![\d.])"
    r"|(?<![\d.,])\d{1,3}(?: \d{3})+(?! ?\d)"
)
_MODULO = re.compile(r"(-?\d{1,300})\s*\\bmod\s*\{?\s*(\d{1,300})\}?")
COMPOUND = re.compile(
    r"(?<!\d)(\d+)\s*([A-Za-z]+),?\s*(?:and\s+)?(\d+)\s*([A-Za-z]+)\b"
)  # 3 hours and 20 minutes
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<currency>[$€£¥₹]?)\s*(?P<minus>-?)"
    r"(?:(?P<count>\d+)\s+(?=\d+/\d))?"  # a mixed number's integer part
    r"(?P<top>\d+(?:\.\d*)?|\.\d+)(?:\((?P<cycle>\d+)\))?(?:[eE](?P<exponent>[-+]?\d{1,4})(?!\w))?"
    r"(?:\s*/\s*(?P<bottom>-?(?:\d+(?:\.\d*)?|\.\d+)))?"
    r"(?:\s*(?P<magnitude>(?i:hundred|thousand|million|billion|trillion))\b)?"
    r"(?:_\{?\s*(?P<base>\w+)\s*\}?)?"
    r"(?P<percent>\s*(?:%|percent(?:age)?\b|pct\b))?"
)
_DIGITS = re.compile(r"(?P<digits>[0-9A-Za-z]+)_\{?\s*(?P<base>\w+)\s*\}?")  # 2A_{16}
_UNIT = re.compile(
    r"\s*(?:(?P<shape>square|sq|cubic)\b\.?)?\s*(?P<unit>[A-Za-zμ$€¢£¥₹Ω]+)(?:\s*(?:/|\bper\b)\s*(?P<per>[A-Za-z]+))?"
    r"(?:\s*\^?\s*\{?(?P<power>[23²³])\}?)?"
)
_TO_19 = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen",
)
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_COUNTS = {word: n for n, word in enumerate(_TO_19)} | {word: 10 * n for n, word in enumerate(_TENS, start=2)}
_MAGNITUDES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_ORDINALS = ["fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth"]
_PARTS = {"half": 2, "halves": 2, "third": 3, "quarter": 4, "fourth": 4, "hundredth": 100}
_PARTS |= {word: n for n, word in enumerate(_ORDINALS, start=5)}
_PARTS |= {f"{word}s": n for word, n in _PARTS.items()}
_SMALL = rf"(?:(?:{'|'.join(_TENS)})[\s-]+(?:{'|'.join(_TO_19[1:10])})|{'|'.join([*_TENS, *_TO_19[::-1]])})"
_HUNDREDS = rf"(?:(?:(?:a|{_SMALL})[\s-]+)?hundred(?:\s+(?:and\s+)?{_SMALL})?|{_SMALL})"
_GREAT = rf"(?:(?:a|{_HUNDREDS})[\s-]+)?(?:thousand|million|billion|trillion)"
_SPELLED = re.compile(
    r"(?P<sign>(?:minus|negative)\s+)?"
    rf"(?:(?P<number>{_GREAT}(?:,?\s+(?:and\s+)?{_GREAT})*(?:,?\s+(?:and\s+)?{_HUNDREDS})?|{_HUNDREDS})"
    rf"(?:\s+and\s+(?:a|one)\s+(?P<more>half|third|quarter)|[\s-]+(?P<part>{'|'.join(_PARTS)}))?"
    r"|(?P<part_alone>(?:a\s+)?half|a\s+(?:third|quarter)))(?![\w-])",
    re.IGNORECASE,
)
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_MONTH = (
    r"jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|"
    r"nov(?:ember)?|dec(?:ember)?"
)
_DAY = r"(?:[12]?\d|3[01])"
_TIME = re.compile(
    r"(?<![\d:.])(?P<hour>\d{1,2})(?::(?P<minute>[0-5]\d)(?![:\d]))?(?:\s*(?P<half>[ap])\.?\s?m\b|(?<=:\d\d))",
    re.IGNORECASE,
)
DATE = re.compile(
    rf"\b(?:(?P<month>{_MONTH})\b\.?\s+(?:the\s+)?(?P<day>{_DAY})(?:st|nd|rd|th)?\b"
    rf"|(?P<day_before>{_DAY})(?:st|nd|rd|th)?\s+(?:of\s+)?(?P<month_after>{_MONTH})\b)"
    r"(?:,?\s+(?P<year>\d{4})\b)?",
    re.IGNORECASE,
)
# Words that aren't part of the number before them.
_WORDS = re.compile(
    r"(?:,\s+)?(?:(?:as|at|by|in|is|of|on|so)\s+(?:an?\s+)?)?(?!(?:and|or|to|plus|minus|times(?!\s+as)|over|mod|sin|cos|tan|log|exp|sqrt|hundred|thousand|million|billion|"
    r"trillion|squared|cubed|factorial|choose|halves|thirds?|"
    r"fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|elevenths?|twelfths?|hundredths?)\b)[A-Za-z]{3,}[A-Za-z\s.,'-]*"
)


@dataclass(frozen=True)
class Number:
    """A number as written. `places`: the digits after its point. `percent`: its value is in percent."""

    value: Fraction
    places: int = 0
    percent: bool = False
    base: int | None = None
    unit: str | None = None

    @property
    def share(self) -> Fraction:
        """The value with its percent sign applied: 0.35 for 35%."""
        return self.value / 100 if self.percent else self.value

    def equals(self, answer: Number) -> bool:
        """Whether the number of a response is the answer.

        A unit and a percent sign may be missing. Units of one quantity are converted: 50 cents equal $0.50. A
        missing base is ten. A percent sign may be added if the answer counts percents, which a number below
        1 doesn't: 0.15% isn't 0.15.
        """
        measured, expected = self.unit or "%" * self.percent, answer.unit or "%" * answer.percent
        if measured and expected and measured != expected:
            return any(
                _measure(a)[0] == _measure(b)[0]
                and self.value * _measure(a)[1] == answer.value * _measure(b)[1]
                for a in (measured, *_AMBIGUOUS.get(measured, ()))
                for b in (expected, *_AMBIGUOUS.get(expected, ()))
            )
        if (self.base or 10) != (answer.base or 10):
            return False
        if self.percent == answer.percent:
            return _close(self, answer, self.value, answer.value)
        if _close(self, answer, self.share, answer.share):
            return True
        counts_percents = answer.percent or abs(answer.value) >= 1
        return counts_percents and _close(self, answer, self.value, answer.value)


@dataclass(frozen=True)
class Moment:
    """A time of day (hour, minute, "a" or "p") or a date (month from 0, day, year).

    `qualifier`, the half of the day or the year, may be missing.
    """

    kind: str
    major: int
    minor: int
    qualifier: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether it is certainly a time or date: "3:45" may be a ratio."""
        return self.kind == "date" or self.qualifier is not None

    def equals(self, answer: Moment) -> bool:
        a, b = self._by_halves(), answer._by_halves()
        same = (a.kind, a.major, a.minor) == (b.kind, b.major, b.minor)
        return same and (a.qualifier == b.qualifier or None in (a.qualifier, b.qualifier))

    def _by_halves(self) -> Moment:
        """19:45 as 7:45 PM."""
        if self.kind == "time" and 12 < self.major < 24:
            return Moment("time", self.major - 12, self.minor, "p")
        return self


def _close(a: Number, b: Number, x: Fraction, y: Fraction) -> bool:
    """Whether values x of `a` and y of `b` are equal, up to the rounding of a long decimal."""
    rounded = [number.places for number in (a, b) if number.places >= ROUNDED]
    tolerance = Fraction(1, 2 * 10 ** min(rounded)) if rounded else 0
    return abs(x - y) <= tolerance


def typography(text: str) -> str:
    """`text` with LaTeX or ASCII in place of Unicode's mathematical signs, such as √, π, ≤ and x²."""
    if text.isascii():
        return text
    text = _DECIMAL.sub(lambda match: str(unicodedata.decimal(match[0])), text)
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    text = _RAISED.sub(lambda match: f"^{{{match[0].translate(_LOWERED)}}}", text)
    text = text.translate(_TYPOGRAPHY)
    return _MINUS.sub("-", text) if re.search(_DASH, text) else text


@lru_cache(1024)  # the responses to one prompt share one expected answer, and many are equal
def plain(text: str) -> str:
    """`text` with the LaTeX of numbers, units and words as plain text, and numbers in words as digits."""
    if _SIMPLE.fullmatch(text):
        return text
    text = " ".join(text.split())
    for pattern, replacement in _PLAIN:
        text = " ".join(pattern.sub(replacement, text).split())  # runs of spaces take cubic time
    text = _GROUPS.sub(lambda match: re.sub("[,_'. ]", "", match[0]), text)
    text = _MODULO.sub(_remainder, text)
    while (joined := COMPOUND.sub(_joined, text)) != text:
        text = joined
    return digits(" ".join(text.split()))


def _remainder(match: re.Match[str]) -> str:
    divisor = int(match[2])
    return str(int(match[1]) % divisor) if divisor else match[0]


def _joined(match: re.Match[str]) -> str:
    """Two amounts of one quantity, larger unit first, as one amount in the smaller unit."""
    large, small = _unit(match[2]), _unit(match[4])
    if large is None or small is None or "/" in large + small:
        return match[0]
    (quantity, size), (small_quantity, part) = _SIZES[large], _SIZES[small]
    if quantity != small_quantity or size <= part:
        return match[0]
    amount = int(match[1]) * size / part + int(match[3])
    return f"{amount} {small}" if amount.denominator == 1 else match[0]


def digits(text: str) -> str:
    """`text` with its leading number in words as digits: "twenty-one ways" is "21 ways"."""
    match = _SPELLED.match(text)
    if not match:
        return text
    count = _count(match["number"]) if match["number"] else 1
    value = f"{count}"
    if match["more"]:
        parts = _PARTS[match["more"].lower()]
        value = f"{parts * count + 1}/{parts}"
    elif part := match["part"] or match["part_alone"]:
        value = f"{count}/{_PARTS[part.lower().split()[-1]]}"
    return ("-" if match["sign"] else "") + value + text[match.end() :]


def _count(phrase: str) -> int:
    """The whole number of words such as "two hundred and ten"."""
    total = 0  # up to the last thousand, million, …
    part = 0  # after that
    for word in re.findall("[a-z]+", phrase.lower()):
        if word == "hundred":
            part = max(1, part) * 100
        elif word in _MAGNITUDES:
            total += max(1, part) * _MAGNITUDES[word]
            part = 0
        else:
            part += _COUNTS.get(word, 0)
    return total + part


def moment(text: str) -> Moment | None:
    """The time of day or the date at the end of a plain text; None without one."""
    matches = list(_TIME.finditer(text)) or list(DATE.finditer(text))
    if not matches or text[matches[-1].end() :].strip(" .,;:*") or re.search(r"\bor\b", text):
        return None
    match = matches[-1]
    if match.re is _TIME:
        return Moment(
            "time", int(match["hour"]), int(match["minute"] or 0), match["half"] and match["half"].lower()
        )
    month = (match["month"] or match["month_after"])[:3].lower()
    return Moment("date", _MONTHS.index(month), int(match["day"] or match["day_before"]), match["year"])


@lru_cache(1024)
def number(text: str) -> Number | None:
    """The number in a plain text that may continue with a unit or other words; None for other text."""
    in_base = _DIGITS.fullmatch(text)
    base = _base(in_base["base"]) if in_base else None
    if in_base and (not in_base["digits"].isdigit() or (base or 0) > 10):
        return _number_in_base(in_base["digits"], base)
    match = _NUMBER.match(text)
    if not match:
        return None
    suffix = text[match.end() :].rstrip(" .,;:")
    if re.fullmatch("[A-Za-z]", suffix):
        return None  # a variable: 5m, where 5 m has a unit
    suffix = suffix.lstrip()
    unit_name = unit(match["currency"] + suffix)
    if suffix and not unit_name and not _WORDS.fullmatch(suffix):
        return None
    value = _value(match)
    if value is None:
        return None
    base = _base(match["base"]) if match["base"] else None
    if match["base"] and base is None:
        return None  # an indexed variable
    places = len(match["top"].partition(".")[2]) - int(match["exponent"] or 0)
    return Number(value, max(0, places), bool(match["percent"]), base, unit_name)


def _base(text: str) -> int | None:
    if text.isdigit():
        return int(text)
    return _COUNTS.get(text.lower())


def _number_in_base(written: str, base: int | None) -> Number | None:
    """A number in a base whose digits may be letters."""
    if base is None or not 11 <= base <= 36:
        return None
    try:
        return Number(Fraction(int(written, base)), base=base)
    except ValueError:  # a letter that isn't a digit of this base
        return None


def _value(match: re.Match[str]) -> Fraction | None:
    """The value of a match of `_NUMBER`; None if it is too large to compute, or divided by 0."""
    exponent, bottom = int(match["exponent"] or 0), Fraction(match["bottom"] or 1)
    if abs(exponent) > LARGEST_EXPONENT or not bottom:
        return None
    top = Fraction(match["top"])
    if match["cycle"]:  # 0.1(6) is 1/10 + 6/90
        places = len(match["top"].partition(".")[2])
        nines = 10 ** len(match["cycle"]) - 1
        top += Fraction(int(match["cycle"]), 10**places * nines)
    size = int(match["count"] or 0) + top * Fraction(10) ** exponent / bottom
    if match["magnitude"]:
        size *= _MAGNITUDES[match["magnitude"].lower()]
    is_negative = (match["sign"] == "-") != bool(match["minus"])  # -$5 or $-5
    return -size if is_negative else size


def unit(text: str) -> str | None:
    """The short form ("cm^2") of the unit of measure at the start of a text; None without one."""
    for phrase, short in _PHRASES:
        text = phrase.sub(short, text, count=1) if phrase.match(text.lstrip()) else text
    match = _UNIT.match(text)
    if not match:
        return None
    name = _unit(match["unit"])
    per = _unit(match["per"]) if match["per"] else None
    power = _POWERS.get(match["shape"] or match["power"], match["power"])
    if name is None:
        return None
    if match["per"] and (per is None or match["shape"] or "/" in name + per):
        return None
    suffix = text[match.end() :].strip(" .,;:")
    if suffix and (name == "in" or not _WORDS.match(suffix)):
        return None  # "3 in total", "5 m + 2"
    return name + (f"/{per}" if per else "") + (f"^{power}" if power else "")


def _measure(unit: str) -> tuple[str, Fraction]:
    """The quantity and size of a unit in its short form: ("length^2", 1/10000) for "cm^2"."""
    base, _, power = unit.partition("^")
    name, _, per = base.partition("/")
    quantity, size = _SIZES[name]
    if not per:
        return f"{quantity}^{power}".rstrip("^"), size ** int(power or 1)
    divisor, part = _SIZES[per]
    return f"{quantity}/{divisor}^{power}".rstrip("^"), size / part ** int(power or 1)


def _unit(name: str) -> str | None:
    """The short form of a unit's name or plural; None for another word. Symbols are case-sensitive."""
    if name in _UNITS:
        return _UNITS[name]
    name = name.lower()
    return _UNITS.get(name) or _UNITS.get(name.removesuffix("s"))
