"""Functions that are called in this process."""

from __future__ import annotations

import asyncio

import pytest

from agro.errors import Refused
from agro.rewards import FunctionReward
from agro.types import Sample


def scores(function, responses):
    reward = FunctionReward(function, inline=True)
    samples = [Sample("p", text, meta={"answer": "b"}) for text in responses]
    return [s.error if s.value is None else s.value for s in reward.score(samples)]


def test_none_is_unknown_and_not_asked_again() -> None:
    calls = []

    def reward(completions):
        calls.append(len(completions))
        return [None, 1.0]

    assert scores(reward, ["a", "b"]) == ["returned None", 1.0]
    assert calls == [2]


def test_an_async_function_in_a_running_loop() -> None:
    """A notebook's own loop runs while a cell does."""

    async def reward(completions):
        await asyncio.sleep(0)
        return [2.0] * len(completions)

    async def cell():
        return scores(reward, ["a", "b"])

    assert asyncio.run(cell()) == [2.0, 2.0]


def test_other_parameters_are_refused() -> None:
    with pytest.raises(Refused, match=r"object:lambda: expected f\(prompts, completions"):
        FunctionReward(lambda texts: [1.0], inline=True)
