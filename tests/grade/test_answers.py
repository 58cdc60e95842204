"""Where the final answer stands and when two are the same. Expected values are written by hand."""

import gzip
import json
from pathlib import Path

import pytest

from agro_grade import marked
from agro_grade.answers import normalize

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
    assert marked.after_marker(text) == found


def test_markers_of_gsm8k():
    assert marked.after_marker("6 * 3 = 18\n#### 18", "####") == "18"
    assert marked.after_marker("A: 9\nso\nA: 18\n", "A:") == "18"
    assert marked.after_marker("A: 9\nits area: 5", "A:") == "9"


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
    assert marked.matches("18. I hope it is correct.", "18") == 1.0
    assert marked.matches("3.5. I hope it is correct.", "3.5") == 1.0
    assert marked.matches("3.5", "3") == 0.0
    assert marked.matches("Dr. Smith", "Dr. Jones") == 0.0
    assert marked.matches("Dr. Smith", "Dr. Smith") == 1.0
    assert marked.matches(None, "") == 0.0


def test_logged_gsm8k_answers_are_judged_as_their_authors_did():
    path = SHARED / "data/generations/gsm8k_openai_6b_175b.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    agreed = total = 0
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            truth = marked.after_marker(row["ground_truth"], "A:")
            assert truth is not None
            for answer in row.values():
                if isinstance(answer, dict):
                    total += 1
                    agreed += (
                        marked.matches(marked.after_marker(answer["solution"], "A:"), truth)
                        == answer["is_correct"]
                    )
    assert total == 4 * 1319
    assert agreed == total
