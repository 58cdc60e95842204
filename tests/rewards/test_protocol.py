"""The limit on failures of one step."""

import pytest

from agro.errors import Refused
from agro.rewards import Score, check_failures
from agro.types import Sample


def step(*errors):
    samples = [Sample("p", "r", id=100 + i) for i in range(len(errors))]
    return samples, [Score(None, e) if e else Score(1.0) for e in errors]


def test_up_to_the_limit_failures_are_counted():
    assert check_failures(*step(None, None), 0.0) == 0
    assert check_failures(*step(None, "returned nan"), 0.5) == 1
    assert check_failures([], [], 0.0) == 0
    assert check_failures(*step("a", "b"), 1.0) == 2


def test_above_the_limit_the_message_names_causes_and_samples():
    errors = [f"ValueError: could not convert {i} (r.py:7)" for i in range(5)]
    errors += ["timed out after 10 s"] * 3 + ["returned nan"] * 2 + ["KeyError: 'x' (r.py:8)", None]
    with pytest.raises(Refused) as refused:
        check_failures(*step(*errors), 0.5)
    text = str(refused.value)
    assert "11 of 12 (92%) responses of this step could not be scored; reward.max_failed is 50%" in text
    assert "5 × ValueError: could not convert 0 (r.py:7): sample 100, sample 101, sample 102\n" in text
    assert "3 × timed out after 10 s: sample 105, sample 106, sample 107\n" in text
    assert "2 × returned nan: sample 108, sample 109\n" in text
    assert "1 with other causes" in text


def test_causes_differ_by_more_than_the_value_they_quote():
    errors = [
        "the sample's answer 'a' is odd",
        "the sample's answer 'b' is odd",
        "the sample's answer \"'\" is even",
    ]
    with pytest.raises(Refused) as refused:
        check_failures(*step(*errors), 0.5)
    assert "2 × the sample's answer 'a' is odd: sample 100, sample 101\n" in str(refused.value)


def test_samples_that_are_not_stored_are_named_by_their_prompt():
    with pytest.raises(Refused, match="prompt abc response 5"):
        check_failures(
            [Sample("p", "r", prompt_id="abc", meta={"index": 5})], [Score(None, "returned nan")], 0.0
        )


def test_a_score_is_finite_or_unknown():
    with pytest.raises(ValueError, match="finite"):
        Score(float("nan"))
