"""`reward.meaning`: one number for responses that mean the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agro.config import RewardConfig
from agro.errors import Refused
from agro.rewards import load_reward
from agro.rewards.meaning import MeaningfulReward, number
from agro.types import Sample


def spelled(completions: list[str], **_: Any) -> list[float]:
    return [number(text.lower().strip(" .")) for text in completions]


def unit_tests(completions: list[str], **_: Any) -> list[float]:
    """Which of three inputs a program f(x) gets right."""
    results = []
    for program in completions:
        passed = [eval(program, {"x": x}) == 2 * x for x in (0, 1, 2)]
        results.append(float(sum(p << i for i, p in enumerate(passed))))
    return results


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def known_of_two(completions: list[str], **_: Any) -> list[float | None]:
    return [0.0 if text == "2" else None for text in completions]


def scores(texts: list[str], meaning: Callable[..., Any]) -> list[Any]:
    config = RewardConfig(name="inline:length", meaning="inline:meaning")
    reward = load_reward(config, {"inline:length": length, "inline:meaning": meaning})
    assert isinstance(reward, MeaningfulReward)
    return reward.score([Sample("p", text) for text in texts])


def test_spellings_of_one_answer_have_one_number() -> None:
    found = scores(["Yes.", "yes", "no"], spelled)
    assert [score.value for score in found] == [4, 3, 2]
    assert found[0].meaning == found[1].meaning != found[2].meaning
    assert found[0].meta == {"meaning": number("yes")}


def test_a_number_is_an_integer_that_a_float_has_exactly() -> None:
    """Of 2,000 texts no two share one: by chance it happens once in 4 billion times."""
    numbers = {number(str(i)) for i in range(2000)}
    assert len(numbers) == 2000
    assert all(value == int(value) < 2**53 for value in numbers)


def test_programs_with_the_same_results_mean_the_same() -> None:
    found = scores(["2*x", "x+x", "x*x", "x**2"], unit_tests)
    assert [score.meaning for score in found] == [7, 7, 5, 5]


def test_without_a_meaning_there_is_no_reward() -> None:
    found = scores(["1", "2"], known_of_two)
    assert (found[0].value, found[1].value) == (None, 1)
    assert found[0].error.startswith("meaning: ")


def test_a_function_that_there_is_not_is_refused_with_its_setting() -> None:
    with pytest.raises(Refused, match=r"reward\.meaning: "):
        load_reward(RewardConfig(name="exact", meaning="nowhere.py:meaning"))
