"""The final answer of a solution, and the comparisons that need no SymPy."""

import pytest

from agro_grade.final import compare, final


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
