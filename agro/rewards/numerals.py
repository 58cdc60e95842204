r"""Numbers as people and models write them: "1,250.00", "2\frac{1}{3}", "35\%", "12\text{ cm}", "1101_2".

Standard library only: the reward `math` compares them without SymPy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

ROUNDED = 6  # a decimal with so many digits after the point stands for every number that rounds to it
LARGEST_EXPONENT = 400  # of 10 in scientific notation

# Names of the units that are compared. Other words after a number, such as "apples", are ignored.
_NAMES = {
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "m": "meter metre",
    "km": "kilometer kilometre",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram",
    "kg": "kilogram",
    "oz": "ounce",
    "ml": "milliliter millilitre",
    "l": "liter litre",
    "s": "sec second",
    "min": "minute",
    "h": "hr hour",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "yr year",
    "degree": "degree",
    "radian": "rad radian",
    "$": "dollar usd",
    "¢": "cent",
    "€": "euro eur",
}
_UNITS = {name: unit for unit, names in _NAMES.items() for name in (unit, *names.split())}
_SPEEDS = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h"}
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "²": "2", "³": "3"}

# LaTeX and typography -> plain text, in this order.
_PLAIN = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\!", ""),
        (r"\\(?:text\w*|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\[dtc]?frac\s*(?:\{\s*([-\d.]+)\s*\}|(\d))\s*(?:\{\s*([-\d.]+)\s*\}|(\d))", r" \1\2/\3\4"),
        (r"\\times|\\cdot|×", "*"),
        (r"(?<=[\d.])\s*\*\s*10\s*\^\s*\{?\s*([-+]?\d+)\s*\}?", r"e\1"),
        (r"\\overline\s*\{(\d+)\}", r"(\1)"),
        (r"\^\s*\{?\s*\\circ\s*\}?|°|\\degree", " degree "),
        (r"\\([%$])", r"\1"),
        (r"\{([,:])\}", r"\1"),
        (r"\\[,;: ]|~", " "),
        (r"−", "-"),
        (r"(?<![\d.,])0,(?=\d+(?![\d,]))", "0."),  # a decimal comma
    )
]
_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])|(?<![\d.,])\d{1,3}(?: \d{3})+(?! ?\d)")
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<currency>[$€]?)\s*(?P<minus>-?)"
    r"(?:(?P<count>\d+)\s+(?=\d+/\d))?"  # of a mixed number
    r"(?P<top>\d+(?:\.\d*)?|\.\d+)(?:\((?P<cycle>\d+)\))?(?:[eE](?P<exponent>[-+]?\d{1,4})(?!\w))?"
    r"(?:\s*/\s*(?P<bottom>-?(?:\d+(?:\.\d*)?|\.\d+)))?"
    r"(?:_\{?(?P<base>\d+)\}?)?"
    r"(?P<percent>\s*(?:%|percent(?:age)?\b|pct\b))?"
)
_UNIT = re.compile(
    r"\s*(?:(?P<shape>square|sq|cubic)\b\.?)?\s*(?P<unit>[A-Za-z$€¢]+)(?:\s*(?:/|\bper\b)\s*(?P<per>[A-Za-z]+))?"
    r"(?:\s*\^?\s*\{?(?P<power>[23²³])\}?)?"
)
# Words that make no part of the number before them.
_WORDS = re.compile(
    r"(?!(?:and|or|to|plus|minus|times|over|mod|sin|cos|tan|log|exp|sqrt|hundred|thousand|million|billion|"
    r"trillion|dozen|squared|cubed|factorial|choose)\b)[A-Za-z]{3,}[A-Za-z\s.,'-]*"
)


@dataclass(frozen=True)
class Number:
    """A number as it is written. `places`: the digits after its point. `percent`: its value is in percent."""

    value: Fraction
    places: int = 0
    percent: bool = False
    base: int | None = None
    unit: str | None = None

    def equals(self, answer: Number) -> bool:
        """Whether the number of a response is the answer.

        A unit, a percent sign and the answer's base may be left out, but they may not differ.
        """
        if self.unit and answer.unit and self.unit != answer.unit:
            return False
        if self.base not in (None, answer.base or 10):
            return False
        if self.percent == answer.percent:
            return _close(self, answer, self.value, answer.value)
        smaller = (n.value / 100 if n.percent else n.value for n in (self, answer))
        return _close(self, answer, self.value, answer.value) or _close(self, answer, *smaller)


def _close(a: Number, b: Number, x: Fraction, y: Fraction) -> bool:
    places = min((p for p in (a.places, b.places) if p >= ROUNDED), default=None)
    return abs(x - y) <= (0 if places is None else Fraction(1, 2 * 10**places))


def plain(text: str) -> str:
    """`text` with the LaTeX of numbers, units and words as plain text."""
    for pattern, replacement in _PLAIN:
        text = pattern.sub(replacement, text)
    text = _GROUPS.sub(lambda found: re.sub("[, ]", "", found[0]), text)
    return " ".join(text.split())


def number(text: str) -> Number | None:
    """The number that a plain text consists of, also with a unit or other words after it, else None."""
    found = _NUMBER.match(text)
    if not found:
        return None
    rest = text[found.end() :].rstrip(" .,;:")
    if re.fullmatch("[A-Za-z]", rest):
        return None  # a variable: 5m, where 5 m has a unit
    rest = rest.lstrip()
    known = unit(found["currency"] + rest)
    if rest and not known and not _WORDS.fullmatch(rest):
        return None
    value = _value(found)
    if value is None:
        return None
    base = int(found["base"]) if found["base"] else None
    places = len(found["top"].partition(".")[2]) - int(found["exponent"] or 0)
    return Number(value, max(0, places), bool(found["percent"]), base, known)


def _value(found: re.Match[str]) -> Fraction | None:
    exponent, bottom = int(found["exponent"] or 0), Fraction(found["bottom"] or 1)
    if abs(exponent) > LARGEST_EXPONENT or not bottom:
        return None
    top = Fraction(found["top"])
    if found["cycle"]:
        places = len(found["top"].partition(".")[2])
        cycle = len(found["cycle"])
        top += Fraction(int(found["cycle"]), 10**places * (10**cycle - 1))
    size = int(found["count"] or 0) + top * Fraction(10) ** exponent / bottom
    return size * (-1 if found["sign"] == "-" else 1) * (-1 if found["minus"] else 1)


def unit(text: str) -> str | None:
    """The unit of measure at the start of a text in its short form ("cm^2"), None where there is none."""
    found = _UNIT.match(text)
    if not found:
        return None
    name = _unit(found["unit"])
    power = _POWERS.get(found["shape"] or found["power"], found["power"])
    per = _unit(found["per"]) if found["per"] else None
    if name is None or (found["per"] and per is None):
        return None
    if len(found["unit"]) < 3 and text[found.end() :].strip(" .,;:"):
        return None  # "3 in total"
    return name + (f"/{per}" if per else "") + (f"^{power}" if power else "")


def _unit(name: str) -> str | None:
    name = name.lower()
    name = _SPEEDS.get(name, name)
    return _UNITS.get(name) or _UNITS.get(name.removesuffix("s"), name if "/" in name else None)
