"""The reward `math`: what is read in a response and an answer, and what stays unknown."""

import json
import time
from contextlib import closing
from pathlib import Path

import pytest

from agro import config
from agro.errors import Refused
from agro.rewards import load_reward
from agro.rewards.answers import conclusion
from agro.types import Sample

GOLDEN = Path(__file__).parents[2] / "../shared/data/grader/golden_pairs.jsonl"


@pytest.fixture(scope="module")
def judge():
    """A function: (response, answer) pairs -> values, or the errors of those without one."""
    with closing(load_reward(config.Reward(name="math", timeout=20.0))) as reward:

        def values(pairs):
            samples = [Sample("p", text, meta={} if a is None else {"answer": a}) for text, a in pairs]
            scores = reward.score(samples)
            assert all((s.value is None) == (s.error is not None) for s in scores)
            return [s.error if s.value is None else s.value for s in scores]

        yield values


def test_the_golden_pairs(judge):
    """Cases of the test suites of answer checkers. math-verify 0.9.0 alone agrees on 193 (see their README).

    Five disagree: 1/3 rounded to 2 digits; two ways to write a list of pairs; a list in another order, which
    its origin counts as wrong; and two answers in words ("None", "the answer is sqrt(2)"), which stay
    unknown.
    """
    if not GOLDEN.exists():
        pytest.skip(f"{GOLDEN} isn't there: this test needs those cases")
    rows = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    found = judge([(row["prediction"], row["gold"]) for row in rows])
    other = [row["id"] for row, value in zip(rows, found, strict=True) if value != row["expected"]]
    assert other == ["g0127", "g0297", "g0308", "g0392", "g0398"]
    assert len(rows) - len(other) == 194


def test_equal_and_unequal(judge):
    assert judge(
        [
            (r"so it is $\frac{1}{2}$.", "0.5"),
            (r"\boxed{(x+1)^2}", "x^2 + 2*x + 1"),
            (r"\boxed{(x+1)^2}", "x^2 + 2*x"),
            ("We get 12 boxes of 4, which is 48 eggs.", 48),
            ("about 0.00001", 1e-05),
            ("the answer is 5", "+5"),
            (r"$2\sqrt{3}\pi$", "2*sqrt(3)*pi"),
            (r"$\{3, 4\}$", "4 and 3"),
            ("I don't know.", "48"),
            ("", "48"),
        ]
    ) == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


def test_the_answer_of_gsm8k_and_of_a_worked_solution(judge):
    """4, 24 and 48 stand in these solutions and aren't their answers."""
    gsm8k = "In April 48.\nIn May 48/2 = <<48/2=24>>24.\nAltogether 48+24 = <<48+24=72>>72 clips.\n#### 72"
    solution = r"Try $x=4$: then \boxed{24}. That isn't even. So $x = \boxed{72}$, and not 48."
    texts = ["It is 72.", r"\boxed{72}", "#### 72", "It is 48.", r"\boxed{24}", "72 or 4"]
    for answer in (gsm8k, solution):
        assert judge([(text, answer) for text in texts]) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert judge([(gsm8k, "72"), (solution, 72), (solution, "24")]) == [1.0, 1.0, 0.0]


def test_what_is_no_mathematics(judge):
    """Two equal texts are equal all the same; an answer in words says nothing about any other response."""
    unread = "no mathematics can be read in the sample's answer "
    assert judge([("Paris.", "Paris"), ("Rome", "Paris"), ("", ""), ("5", "")]) == [
        1.0,
        f"{unread}'Paris'",
        f"{unread}''",
        f"{unread}''",
    ]
    assert judge([("5", None), ("5", [5]), ("5", "5")]) == [
        "the sample has no answer",
        "the sample's answer is a list, expected text or a finite number",
        1.0,
    ]
    assert judge([("2", r"\frac{1}{0}")])[0].startswith(
        "ValueError: Can't evaluate nan or zoo (mathematics.py:"
    )


def test_a_comparison_that_takes_for_ever_costs_only_its_response():
    samples = [Sample("p", text, meta={"answer": "5 - 0"}) for text in ("$5$", "$9^{9^{9^{9}}}$", "so 5")]
    start = time.monotonic()
    with closing(load_reward(config.Reward(name="math", timeout=1.0))) as reward:
        scores = reward.score(samples)
    assert [(s.value, s.error) for s in scores] == [(1.0, None), (None, "timed out after 1 s"), (1.0, None)]
    assert time.monotonic() - start < 15


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<think>is it 4?</think> It is 5.", " It is 5."),
        ("is it 4?</think>5", "5"),
        ("5 <think>or is it", "5 "),
        ("18\n  #### 19\n", "19"),
        ("#### Step 1\nso 5", "#### Step 1\nso 5"),
        (r"\boxed{1}, \boxed{2} and $\boxed{3}$", r"\boxed{1}, \boxed{2} and $\boxed{3}$"),
        (r"$x=\boxed{1}$. Wait, \boxed{2} and \boxed{3}", r"$x=1$. Wait, \boxed{2} and \boxed{3}"),
        (r"\boxed{1} but \boxed{\frac{2}{3}}", r"1 but \boxed{\frac{2}{3}}"),
        (r"1. \boxed{a} 2. \boxed{b}", r"1. \boxed{a} 2. \boxed{b}"),
        (r"\boxed{1 \boxed{2}} so \boxed{3} } \boxed{", r"1 \boxed{2} so \boxed{3} } \boxed{"),
    ],
)
def test_conclusion(text, left):
    assert conclusion(text) == left


def test_options_and_a_missing_package_are_refused(monkeypatch):
    with pytest.raises(Refused, match=r"reward.options.digits: math has no such option; it has none"):
        load_reward(config.Reward(name="math", options={"digits": 3}))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Refused, match=r"pip install 'agro\[math\]'"):
        load_reward(config.Reward(name="math"))
