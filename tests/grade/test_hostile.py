"""Texts that are written to stall or to crash the rewards that read answers in the trainer's process."""

import time

import pytest
from tiers import some

from agro_grade import answers
from agro_grade.answers import after_marker, matches
from agro_grade.final import LONGEST, TAIL, final
from agro_grade.mathematics import too_large, without_sympy
from agro_grade.numerals import plain

PIECES = [
    *(" ", "\n", "\x00", "~", "1", "²", "½", "°", "é", ".", ".1", "...", r"\dots", ":", "-", "- ", "/"),
    *("'", "_2", "(", "[", "{", "(1,", "\\", r"\left(", r"\frac{", r"\text{", r"\mbox{}", r"\boxed{"),
    *(r"\boxed{1}. ", "$", "$$", "*", "**", "^", "1^", "9**", "a)^ ", "!", "1!", "666!", "1,"),
    *("1, 1, 1, ", "a = ", "x = 1, ", "or ", "1 or ", "not ", "half of ", "more than ", "because "),
    *("twenty ", "5 cm ", "3 km 2 m ", "3:45 ", "July 4 ", "A, ", r"\bmod ", r"\pm 1", r"\quad"),
    *("the answer is ", "<answer>", "<think>", "####"),
]
SHAPES = ("{}5", r"\boxed{{{}}}", r"\boxed{{5}}{}.", "The answer is {}!", "so it is ${}$", "It is 5{}")
EXPECTED = [
    *("42", "x^2+1", "Tuesday", "C", "(1, 2)", "1, 2", "2:3:4", "3:45 PM", "x = 1, y = 2", "10-20"),
    *("(D) 24",),
]


def seconds(function, *arguments):
    """Of the processor: other programs don't count."""
    start = time.process_time()
    function(*arguments)
    return time.process_time() - start


def grade(text):
    """All that a response costs the trainer's process, against answers of many kinds, and as an answer."""
    response = final(text)
    values = [without_sympy(response, final(answer)) for answer in EXPECTED]
    values.append(without_sympy(final("42"), response))
    assert all(score is None or score.value in (0.0, 1.0, None) for score in values)
    assert matches(after_marker(f"the final answer is {text}"), "42") in (0.0, 1.0)


@pytest.mark.parametrize("piece", some(PIECES, every=3))
def test_repeated_texts_are_graded_in_little_time(piece):
    """Up to the longest answers and ends of solutions that are read, and beyond."""
    for length in (LONGEST, TAIL, 60_000):
        for shape in SHAPES:
            room = length - len(shape.format(""))
            assert seconds(grade, shape.format(piece * (room // len(piece)))) < 2.0
    assert seconds(final, piece * (1_000_000 // len(piece))) < 3.0


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (too_large, "666! " * 200),  # took 161 s: one factorial after the other
        (too_large, "2^" + "2" * 400),  # raised: the exponent is no float
        (too_large, "1^" * 499 + "1"),
        (too_large, "1" + "!" * 900),
        (too_large, "a" * 480 + ")^" + " " * 480),
        (plain, "3" * 300 + r"\bmod" + "~" * 3600),  # took 50 s: spaces made of ~
        (plain, "." + "1" * 3990 + "2..."),
        (answers.normalize, r"\text{" * 14_000 + "x" + "}" * 14_000),  # took 40 s: one after the other
        (answers.conclusion, r"\boxed{1}. " * 90_000),
        (final, r"\boxed{5}" + "²" * 60_000),
        (final, r"\boxed{" + "\\" * 60_000 + "\nx}"),  # took 16 s: a line end after many backslashes
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:20]),
)
def test_what_took_long_takes_little_time(function, text):
    assert seconds(function, text) < 1.0
