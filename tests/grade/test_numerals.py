"""Numbers as they are written. Expected values are written by hand."""

from fractions import Fraction

import pytest

from agro_grade.numerals import Number, moment, number, plain


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("-3.5", Fraction(-7, 2)),
        (r"- \frac{7}{2}", Fraction(-7, 2)),
        (r"\frac34", Fraction(3, 4)),
        (r"2\frac{1}{3}", Fraction(7, 3)),
        ("2 1/3", Fraction(7, 3)),
        ("21/3", 7),
        ("1,234,567", 1234567),
        (r"1{,}234", 1234),
        (r"1\,024", 1024),
        ("1 000", 1000),
        (r"4.2 \times 10^{5}", 420000),
        ("1e-05", Fraction(1, 100000)),
        (r"0.\overline{6}", Fraction(2, 3)),
        (r"1.2\overline{3}", Fraction(37, 30)),
        ("0,111", Fraction(111, 1000)),
        ("12 apples", 12),
        ("2 Million", 2000000),
        ("$1,250 thousand", 1250000),
        ("twenty-one ways", 21),
        ("two hundred and ten", 210),
        ("three quarters", Fraction(3, 4)),
        ("one and a half", Fraction(3, 2)),
        ("minus three", -3),
        (r"17 \bmod 5", 2),
        (r"0.1\dot{6}", Fraction(1, 6)),
        ("1.234.567", 1234567),
        ("2A_{16}", 42),
    ],
)
def test_the_value_of_a_number(text, value):
    read = number(plain(text))
    assert read is not None
    assert read.value == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "5x",
        "5m",
        "2ab",
        "5!",
        "12,34",
        "(1,234)",
        "7:45",
        "5 or 6",
        "one and two",
        "5_n",
        "2A",
        "third",
        "1/0",
        "5 m + 2",
        "5 sin x",
    ],
)
def test_what_is_not_a_number(text):
    assert number(plain(text)) is None


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        (r"12\text{ cm}", "cm"),
        ("12 centimeters", "cm"),
        (r"9\text{ m}^2", "m^2"),
        ("9 square meters", "m^2"),
        ("60 mph", "mi/h"),
        ("60 miles per hour", "mi/h"),
        (r"\$7.50", "$"),
        (r"60^\circ", "degree"),
        ("12 apples", None),
    ],
)
def test_the_unit_of_a_number(text, unit):
    read = number(plain(text))
    assert read is not None
    assert read.unit == unit


@pytest.mark.parametrize(
    ("response", "answer", "equal"),
    [
        ("5 cm", "5", True),
        ("5", "5 cm", True),
        ("5 cm", "5 km", False),
        ("50 cents", "$0.50", True),
        ("50 cents", "$50", False),
        ("1.2 m", "120 cm", True),
        ("1 m^2", "10000 cm^2", True),
        ("36 km/h", "10 m/s", True),
        ("1 m/s^2", "12960 km/h^2", True),
        ("5 mph per hour", "5 km/h", True),  # no unit that is read
        ("Rs. 1,500", "1500", True),
        ("Rs 5", "$5", False),
        ("90 minutes", "1.5 hours", True),
        ("4 dozen", "4", True),
        ("50%", "50", True),
        ("50%", "0.5", True),
        ("0.5", "50%", True),
        ("50%", "5%", False),
        ("1101", "1101_2", False),
        ("1101_3", "1101_2", False),
        (r"1101_{\text{two}}", "1101_2", True),
        ("0.15%", "0.15", False),
        ("15%", "0.15", True),
        ("90%", "90 degrees", False),
        ("5_{10}", "5", True),
        ("5_6", "5", False),
        ("0.333333", "1/3", True),
        ("0.33333", "1/3", False),
        ("0.333334", "1/3", False),
        ("0.0666668", "0.066666793", True),
        ("0.0000002", "0.0000001", False),
        ("1000000.5", "1000000", False),
    ],
)
def test_equal_numbers(response, answer, equal):
    mine, right = number(plain(response)), number(plain(answer))
    assert isinstance(mine, Number)
    assert isinstance(right, Number)
    assert mine.equals(right) is equal


@pytest.mark.parametrize(
    ("response", "answer", "equal"),
    [
        ("3:45 p.m.", "3:45 PM", True),
        ("3:45", "3:45 PM", True),
        ("3:45 AM", "3:45 PM", False),
        ("10 PM", "10:00 PM", True),
        ("4 July", "July 4th", True),
        ("June 4", "July 4", False),
    ],
)
def test_times_and_dates(response, answer, equal):
    mine, right = moment(plain(response)), moment(plain(answer))
    assert mine is not None
    assert right is not None
    assert mine.equals(right) is equal
