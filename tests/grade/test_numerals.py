"""Numbers, units and final answers, without SymPy. Expected values are written by hand."""

import gzip
import json
from fractions import Fraction
from pathlib import Path

import pytest

from agro_grade import answers
from agro_grade.answers import normalize
from agro_grade.final import compare, final
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
        *("", "x", "5x", "5m", "2ab", "5!", "12,34", "(1,234)", "7:45", "5 or 6", "one and two", "5_n"),
        *("2A", "third", "1/0", "5 m + 2", "5 sin x"),
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


@pytest.mark.parametrize(
    ("solution", "text"),
    [
        (r"First \boxed{3}. So it is \boxed{4}.", "4"),
        (r"They are \boxed{3} and \boxed{4}.", "3, 4"),
        (r"It is $\boxed{5}$ km.", r"5\text{ km}"),
        (r"\boxed{28}\%", r"28 \%"),
        ("**Answer:** 5", "5"),
        ("The answer is 5. I hope that 3 of us agree.", "5"),
        ("The answer is that she has 5 apples.", "5 apples"),
        ("Therefore $x=4$, as $2x = 8$.", "2x = 8"),
        ("We get 12 boxes of 4, which is 48 eggs.", "48 eggs"),
        ("The result is halved, giving 10. So he has 5.", "5"),
        ("So it is 4 or 5.", "4 or 5"),
        ("So we see that x + y = 5", "x + y = 5"),
        ("It costs $7.50.", "$7.50"),
        ("(1, 3]", "(1, 3]"),
        ("x = -3", "x = -3"),
        ("", ""),
    ],
)
def test_where_the_final_answer_is(solution, text):
    assert final(solution).text == text


@pytest.mark.parametrize(
    ("solution", "denied"),
    [
        (r"not \boxed{5}", True),
        ("The answer is not 5.", True),
        ("It is definitely not the case that the answer is $5$.", True),
        (r"\boxed{\neq 5}", True),
        ("The answer is less than 5.", True),
        ("more than 5", True),
        (r"\boxed{5} is not the answer", True),
        (r"\boxed{5} is wrong", True),
        ("\\boxed{5}\n\nWait, that's incorrect.", True),
        ("It is false that the answer is 5", True),
        ("The claim that it equals 5 is false.", True),
        (r"\boxed{\ge 5}", True),
        ("x is greater than 5", True),
        ("7 if x>0 and 5 otherwise", True),
        ("The answer is half of 5.", True),
        ("This rules out 5.", True),
        ("The factory rejects 5 items.", False),
        ("x fails to be 5", True),
        ("It cannot possibly be 5.", True),
        ("5 turned out false.", True),
        ("5 is never attained.", True),
        ("5 was eliminated.", True),
        ("A third of 15 is 5.", False),
        ("The wrong answer is 4, the right one is 5.", False),
        (r"\boxed{5} is not divisible by 3.", False),
        (r"\boxed{5}, because 4 is wrong.", False),
        ("There is no doubt that it is 5.", False),
        ("It is false that it is 4, so it is 5.", False),
        (r"It is not 4, so the answer is \boxed{5}.", False),
        ("It isn't hard to see that the answer is 5.", False),
        ("not 10, it's 5", False),
        ("She needs at least 5 buses.", False),
        ("More than half of 10 is 6.", False),
    ],
)
def test_whether_the_solution_denies_its_answer(solution, denied):
    assert final(solution).is_denied is denied


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        ("not 5", "not 5", 1.0),
        (r"\boxed{x^{2}+1}", "x^2 + 1", 1.0),
        (r"\boxed{24!}", "24", None),
        ("Yes!", r"\text{yes}", 1.0),
        ("I choose option D.", "D", 1.0),
        (r"\boxed{\text{(D) } 24}", "(D)", 1.0),
        (r"\boxed{D, E}", "D", 0.0),
        ("D or E", "D", 0.0),
        ("The function is even.", r"\text{even}", 1.0),
        ("It is odd or even.", r"\text{even}", 0.0),
        (r"\boxed{5\sqrt{2}\text{ km}}", r"5\sqrt2\text{ cm}", 0.0),
        ("I don't know.", "8", 0.0),
        ("8" * 3000, "8", 0.0),
        (r"\boxed{\frac{x}{2}}", "0.5x", None),
        ("y=-1, x=2", "(2,-1)", 1.0),
        ("x = 2\ny = -1", "(2,-1)", 1.0),
        ("(2, -1)", "x = 2 and y = -1", 1.0),
        ("y=2, x=-1", "(2,-1)", 0.0),
        ("x=2 or y=-1", "(2,-1)", None),
        ("(y, x) = (2, -1)", "x=2, y=-1", None),
        ("5..6", "5", 0.0),
        ("5'", "5", 0.0),
        ("1/3, which is about 0.33", "1/3", 1.0),
        ("1/3, which is about 0.33", "0.33", 1.0),
        ("1/3, which is about 0.5", "0.5", 0.0),
        ("I get 36, though the book says 35 is right.", "36", 1.0),
        ("The temperature is negative 5.", "5", 0.0),
        ("The price is \\$0.50", "$0.50", 1.0),
        ("**48 clips**. Let me know!", "48", 1.0),
        ("5 is the only integer that works.", "5", 1.0),
    ],
)
def test_comparisons_without_sympy(response, answer, value):
    assert compare(final(response), final(answer)) == value


SHARED = Path(__file__).parents[2] / "../shared"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so the final answer is 18", "18"),
        ("The Final Answer is: $18$. I hope it is correct.", "$18$. I hope it is correct."),
        ("the final answer is 1\nNo: the final answer is 2\nbye", "2"),
        ("**The final answer is:** 18", "18"),
        ("**The final answer is** 18", "18"),
        ("the final answer is\n\n  7\n8", "7"),
        ("the final answer is", ""),
        ("İİ the final answer is 3", "3"),  # a letter whose lower case is longer shifts no index
        ("soothe final answer is 4", None),
        ("18", None),
    ],
)
def test_the_answer_follows_the_last_marker_on_its_line(text, found):
    assert answers.after_marker(text) == found


def test_markers_of_gsm8k():
    assert answers.after_marker("6 * 3 = 18\n#### 18", "####") == "18"
    assert answers.after_marker("A: 9\nso\nA: 18\n", "A:") == "18"
    assert answers.after_marker("A: 9\nits area: 5", "A:") == "9"


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("1,000", "1000"),
        ("18.0", "18"),
        ("–5", "-5"),
        ("−5", "-5"),
        ("$1,000.99", "1000.99"),
        (".4", "0.4"),
        ("+5", "5"),
        ("- 5", "-5"),
        ("-0", "0"),
        ("007", "7"),
        ("$18", "18"),
        (r"\$18.00", "18"),
        ("$$18$$", "18"),
        (r"\(x+1\)", "x+1"),
        (r"$\boxed{18}$", "18"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("**18.**", "18"),
        ("`yes`", "yes"),
        ("a  b\tc", "a b c"),
        ("18 .", "18"),
        (r"\text{Monday}", "Monday"),
    ],
)
def test_the_same_answer(a, b):
    assert normalize(a) == normalize(b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("18", "81"),
        ("1.0", "1.01"),
        ("1,00", "100"),
        ("12,34", "1234"),
        ("-5", "5"),
        ("Yes", "yes"),
        ("$1$ and $2$", "1$ and $2"),
        (r"\boxed{1} or {2}", "1} or {2"),
        ("18%", "18"),
        ("", "0"),
        (".", "0"),
        ("-", "0"),
        ("1/2", "12"),
        ("٣", "3"),
    ],
)
def test_another_answer(a, b):
    assert normalize(a) != normalize(b)


def test_a_second_sentence_does_not_spoil_an_answer():
    assert answers.matches("18. I hope it is correct.", "18") == 1.0
    assert answers.matches("3.5. I hope it is correct.", "3.5") == 1.0
    assert answers.matches("3.5", "3") == 0.0
    assert answers.matches("Dr. Smith", "Dr. Jones") == 0.0
    assert answers.matches("Dr. Smith", "Dr. Smith") == 1.0
    assert answers.matches(None, "") == 0.0


def test_logged_gsm8k_answers_are_judged_as_their_authors_did():
    path = SHARED / "data/generations/gsm8k_openai_6b_175b.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    agreed = total = 0
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            truth = answers.after_marker(row["ground_truth"], "A:")
            assert truth is not None
            for answer in row.values():
                if isinstance(answer, dict):
                    total += 1
                    agreed += (
                        answers.matches(answers.after_marker(answer["solution"], "A:"), truth)
                        == answer["is_correct"]
                    )
    assert total == 4 * 1319
    assert agreed == total
