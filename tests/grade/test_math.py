"""The reward `math`: what is read in a response and an answer, and what stays unknown."""

import gzip
import json
import time
from contextlib import closing
from pathlib import Path

import pytest
from tiers import some

from agro import config
from agro.errors import Refused
from agro.rewards import load_reward
from agro.types import Sample
from agro_grade.answers import conclusion

GOLDEN = Path(__file__).parents[2] / "../shared/data/grader/golden_pairs.jsonl"


@pytest.fixture(scope="module")
def judge():
    """A function: (response, answer) pairs -> values, or the errors of those without one."""
    with closing(load_reward(config.RewardConfig(name="math", timeout=20.0))) as reward:

        def values(pairs):
            samples = [Sample("p", text, meta={} if a is None else {"answer": a}) for text, a in pairs]
            scores = reward.score(samples)
            assert all((s.value is None) == (s.error is not None) for s in scores)
            return [s.error if s.value is None else s.value for s in scores]

        yield values


def test_the_golden_pairs(judge):
    """Cases of the test suites of answer checkers. math-verify 0.9.0 alone agrees on 193 (see their README).

    Two disagree: 1/3 rounded to 2 digits; and "the answer is sqrt(2)" as the sample's answer, which is read
    here.
    """
    if not GOLDEN.exists():
        pytest.skip(f"{GOLDEN} isn't there: this test needs those cases")
    rows = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    scores = judge([(row["prediction"], row["gold"]) for row in rows])
    other = [row["id"] for row, value in zip(rows, scores, strict=True) if value != row["expected"]]
    assert other == ["g0127", "g0398"]
    assert len(rows) == 199


def judged(judge, name):
    """Of a file of judged pairs: those that are accepted, rejected and left unknown though they shouldn't be,
    and how many are wrong and right."""
    pairs, expected = [], []
    for line in (Path(__file__).parent / f"pairs/{name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        pairs += [(text, row["answer"]) for text in row["right"] + row["wrong"]]
        expected += [1.0] * len(row["right"]) + [0.0] * len(row["wrong"])
    outcomes = list(zip(pairs, judge(pairs), expected, strict=True))
    accepted = [pair for pair, value, truth in outcomes if value == 1.0 > truth]
    rejected = [pair for pair, value, truth in outcomes if value == 0.0 < truth]
    unknown = [pair for pair, value, _ in outcomes if isinstance(value, str)]
    return accepted, rejected, unknown, expected.count(0.0), expected.count(1.0)


@pytest.mark.parametrize(
    ("name", "sizes", "taken", "rejected"),
    [
        ("development", (319, 279), [], []),
        ("heldout", (215, 193), [], []),
        ("issue", (10, 12), [], []),
        ("afterwards", (67, 50), [], []),
        ("outside", (282, 233), [], []),
        # A unit may be left out: how many dozens is also asked for, and how many more.
        (
            "second_look",
            (99, 77),
            [("The total is 48 dozen.", "48"), ("The answer is 5 more than the above.", "5")],
            [],
        ),
        # Fractions, units, intervals, sets, percents, LaTeX, matrices, …: when first scored, 1 of 102 wrong
        # answers was accepted, 5 of 90 right ones were rejected and 1 unknown; rules were made for 5.
        ("fourth_look", (102, 90), [], [("The correct option is C: 14", "C")]),
        # When first scored, 1 of 428 was accepted and 10 were rejected in error, of 214 more 3 and 7; with
        # rules for these 1 of the other 315 was accepted, 5 rejected and 4 unknown; they got rules too.
        ("fifth_look", (485, 472), [], [("1 in 2", "1/2"), ("So Alice wins.", "Alice")]),
        # Mass, length, time, volume, area, speed, temperature, money, data, angle, energy, share, …, and
        # answers that are denied together. Before their units had a table and a rounded integer was rejected,
        # 94 of the 210 wrong ones were accepted, 37 right ones rejected.
        ("units", (210, 153), [], []),
        *some(
            [
                ("outside_aside", (142, 123), 0, 0),  # 1 and 4 when first scored
                ("third_look", (36, 32), 1, 1),  # 2 and 1
                ("sixth_look", (180, 170), 0, 2),  # 1 and 3
                ("seventh_look", (252, 293), 3, 1),  # 3 and 12
                ("eighth_look", (282, 300), 1, 1),  # 5 and 6
                ("ninth_look", (237, 259), 0, 4),  # 3 and 9
                ("tenth_look", (322, 333), 1, 3),  # 3 and 5
            ],
            every=3,
        ),
    ],
)
def test_judged_pairs(judge, name, sizes, taken, rejected):
    """Pairs judged by hand: how many are wrong and right, and which, or how many, are accepted or left
    unknown in error, and rejected in error. `heldout` was written before the checker, `outside` and the looks
    without its code.

    When a file had been scored once, rules were made for the kinds of writing that it showed.
    """
    accepted, refused, unknown, *counts = judged(judge, name)
    assert tuple(counts) == sizes
    for found, expected in ((accepted + unknown, taken), (refused, rejected)):
        assert (len(found) if isinstance(expected, int) else found) == expected


def test_logged_gsm8k_answers_are_judged_as_their_authors_did(judge):
    path = GOLDEN.parents[1] / "generations/gsm8k_openai_6b_175b.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path} isn't there: this test needs those responses")
    pairs, expected = [], []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            answer = row["ground_truth"].rpartition("A:")[2].strip()
            for logged in (value for value in row.values() if isinstance(value, dict)):
                pairs.append((logged["solution"].replace("\nA: ", "\nSo it is "), answer))
                expected.append(float(logged["is_correct"]))
    assert len(pairs) == 4 * 1319
    assert judge(pairs) == expected


def test_the_answer_of_gsm8k_and_of_a_worked_solution(judge):
    """4, 24 and 48 stand in these solutions and aren't their answers."""
    gsm8k = "In April 48.\nIn May 48/2 = <<48/2=24>>24.\nAltogether 48+24 = <<48+24=72>>72 clips.\n#### 72"
    solution = r"Try $x=4$: then \boxed{24}. That isn't even. So $x = \boxed{72}$, and not 48."
    texts = ["It is 72.", r"\boxed{72}", "#### 72", "It is 48.", r"\boxed{24}", "72 or 4"]
    for answer in (gsm8k, solution):
        assert judge([(text, answer) for text in texts]) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert judge([(gsm8k, "72"), (solution, 72), (solution, "24")]) == [1.0, 1.0, 0.0]


def test_an_answer_that_cannot_be_read_leaves_the_reward_unknown(judge):
    assert judge([("", ""), ("5", "")]) == ["the sample's answer is empty"] * 2
    assert judge([("5", None), ("5", [5]), ("5", "5")]) == [
        "the sample has no answer",
        "the sample's answer is a list, expected text or a finite number",
        1.0,
    ]
    assert "no mathematics" in judge([(r"\boxed{\mathbb{Q}}", "a number of two digits")])[0]
    assert judge([("2", r"\frac{1}{0}")])[0].startswith("ValueError: Can't evaluate nan or zoo (symbolic.py:")


@pytest.mark.parametrize(
    "answer",
    [
        "9**9**9**9",
        "9^9!",
        r"9^{9^{9^{9}}}",
        r"(9^9)^{(9^9)}",
        r"10^{10^{10}}",
        "100000!",
        "((3!)!)!",
        r"\binom{1000000000}{500000000}",
        "[0, 9^{9^9}]",
        "(" * 30 + "x" + ")" * 30,
        r"\sqrt{" * 30 + "x" + "}" * 30,
        "(x+y+z)^{99999}",
        "x+" * 501 + "x",
    ],
)
def test_what_takes_long_to_compute_is_not_computed(judge, answer):
    start = time.monotonic()
    assert judge([(rf"\boxed{{{answer}}}", "5x")]) == [0.0]  # unknown, it would be a way out of being wrong
    assert "the sample's answer" in judge([("5x", rf"\boxed{{{answer}}}")])[0]
    assert judge([(rf"\boxed{{{answer}}}", rf"\boxed{{{answer}}}")]) == [1.0]
    assert time.monotonic() - start < 10.0  # hundredths; most would take hours


@pytest.mark.parametrize(
    "attack",
    [
        r"\boxed{40} \boxed{41} \boxed{42} \boxed{43}",
        r"\boxed{40, 41, 42, 43}",
        r"\boxed{\{41, 42, 43\}}",
        "The answer is one of 41, 42 or 43.",
        "The answer is 41 or 42.",
        r"\boxed{42 \pm 10}",
        "The answer is between 0 and 1000.",
        "The answer is any integer.",
        "The question has 6 and 7.",
        r"\boxed{x}",
        "9" * 2**20,
        r"\boxed{" + "4" * 2**20 + "}",
        r"\boxed{" + "42," * 2**18 + "}",
        "42" + " " * 3000 + "x",
        r"\boxed{" + " " * 3000 + "x}",
        r"\boxed{9**9**9}",
        r"\boxed{9**9**9 - 9**9**9 + 42}",
        r"\boxed{" + "(" * 2**16 + "42" + ")" * 2**16 + "}",
        "\\boxed{" * 2**14 + "42",
    ],
    ids=lambda text: text[:30],
)
def test_what_an_attacker_writes_is_not_the_answer(judge, attack):
    """Several answers, lists of candidates, the question's numbers, and what would take long to read."""
    start = time.monotonic()
    assert judge([(attack, "42")]) == [0.0]
    assert time.monotonic() - start < 5.0


def test_a_large_solution_is_read_in_little_time(judge):
    pieces = ["$", "(", r"\(", "1,", "1 or ", "the answer is ", r"\boxed{", r"\boxed{1}. ", "1.", "- "]
    start = time.monotonic()
    judge([(piece * (100_000 // len(piece)), "5") for piece in pieces])
    assert time.monotonic() - start < 60.0  # a second here; quadratic would be hours


def test_a_slow_comparison_costs_only_its_response():
    """The integral passes the limits on size, and SymPy looks for it for minutes."""
    slow = r"$\int_0^1 x^x \sin(x^x) \log(1 + x^3) dx$"
    samples = [Sample("p", text, meta={"answer": r"5\pi - 0"}) for text in (r"$5\pi$", slow, r"$4\pi$")]
    start = time.monotonic()
    with closing(load_reward(config.RewardConfig(name="math", timeout=4.0))) as reward:
        scores = reward.score(samples)
    assert [(s.value, s.error) for s in scores] == [(1.0, None), (None, "timed out after 4 s"), (0.0, None)]
    assert time.monotonic() - start < 60


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
    with pytest.raises(Refused, match="unknown key digits; known here: none"):
        load_reward(config.RewardConfig(name="math", options={"digits": 3}))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Refused, match=r"pip install 'math-verify>=0\.9,<0\.10'"):
        load_reward(config.RewardConfig(name="math"))


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        (r"so it is $\frac{1}{2}$.", "0.5", 1.0),
        (r"\boxed{(x+1)^2}", "x^2 + 2*x + 1", 1.0),
        (r"\boxed{(x+1)^2}", "x^2 + 2*x", 0.0),
        ("We get 12 boxes of 4, which is 48 eggs.", 48, 1.0),
        ("about 0.00001", 1e-05, 1.0),
        ("the answer is 5", "+5", 1.0),
        (r"$2\sqrt{3}\pi$", "2*sqrt(3)*pi", 1.0),
        (r"$\{3, 4\}$", "4 and 3", 1.0),
        ("I don't know.", "48", 0.0),
        ("", "48", 0.0),
        # Words are compared as words.
        ("Paris.", "Paris", 1.0),
        ("Rome", "Paris", 0.0),
        ("It lies in Paris.", "Paris", 1.0),
        ("5", "Paris", 0.0),
        # The last of several isn't the answer.
        ("Rome, Paris", "Paris", 0.0),
        ("The answer is: no, yes", "yes", 0.0),
        ("Bob beats Alice.", "Alice", 0.0),
        ("July 4, 1776 or July 5, 1776", "July 5, 1776", 0.0),
        ("(1, 2) and (3, 4)", "(3, 4)", 0.0),
        ("2 hours 30 minutes", "30 minutes", 0.0),
        ("infinity or 5", "5", 0.0),
        ("A, B, C, D", "A, C", 0.0),
        # Roots are sorted; what neither rises nor falls, such as the places of runners, was put in its order.
        ("4, 1, 2", "4, 1, 2", 1.0),
        ("1, 2, 4", "4, 1, 2", 0.0),
        ("4, 2, 1", "1, 2, 4", 1.0),
        (r"\boxed{\{1, 2, 4\}}", r"\{4, 1, 2\}", 1.0),
        ("2, 1", "1, 2", 1.0),
        (r"\boxed{6}. Let me check again: \boxed{7", "6", 0.0),  # cut within its last box: no answer
        (r"\boxed{6}. Let me check again: \boxed{7", "7", 0.0),
        (r"So it is \boxed{\frac{1", "1", 0.0),
        (r"\boxed{6}. Let me check again: \boxed{7}", "7", 1.0),
        (r"It is \boxed{7} in the set \{7", "7", 1.0),  # what is open there isn't a box
        # Dashes and digits of other keyboards.
        ("–5", "-5", 1.0),
        ("−5", "-5", 1.0),
        ("—5", "-5", 1.0),
        ("‐5", "-5", 1.0),
        ("the answer is —5", "-5", 1.0),
        (r"\boxed{–5}", "-5", 1.0),
        (r"$–\frac{1}{2}$", "-1/2", 1.0),
        ("x = – 5", "-5", 1.0),
        ("-5", "–5", 1.0),
        ("–5", "5", 0.0),
        ("5 – 2 = 3", "3", 1.0),
        ("5 – 2 = 3", "5", 0.0),
        ("1 – 2 – 3 = –4", "-4", 1.0),
        ("x² – 5x + 6", "x^2-5x+6", 1.0),
        ("（x – 3)", "x-3", 1.0),
        ("The numbers are 3, –5", "3, -5", 1.0),
        ("5–10", "-5", 0.0),  # a range
        ("answer: 3 – 5", "-2", 0.0),
        ("There are 5 apples – 2 red ones and 3 green ones, so 5.", "5", 1.0),
        ("５", "5", 1.0),
        ("－３．５", "-3.5", 1.0),
        ("（１，２）", "(1,2)", 1.0),
        ("The answer is ５。", "5", 1.0),
        ("٣", "3", 1.0),
        ("𝟓", "5", 1.0),
    ],
)
def test_equal_and_unequal(judge, response, answer, value):
    assert judge([(response, answer)]) == [value]
