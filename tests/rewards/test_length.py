"""The penalty of long responses."""

from __future__ import annotations

import numpy as np
import pytest

from agro.config import RunConfig
from agro.errors import Refused
from agro.rewards import load_reward
from agro.types import Sample


def settings(**options):
    return RunConfig.of({"reward": {"name": "overlong", "options": options}}).reward


def sample(length: int) -> Sample:
    tokens = np.zeros(length + 2, dtype=np.int32)  # after a prompt of two tokens
    return Sample("p", "r", tokens=tokens, action=np.arange(length + 2) >= 2)


def test_it_falls_over_the_last_tokens() -> None:
    """DAPO, eq. 13, with L_max = 10 and L_cache = 4: (6 - |y|)/4 from 6 to 10."""
    reward = load_reward(settings(max_tokens=10, buffer=4))
    lengths = (1, 6, 7, 9, 10, 12)
    assert [s.value for s in reward.score([sample(T) for T in lengths])] == [0, 0, -0.25, -0.75, -1, -1]


def test_without_tokens_it_is_unknown() -> None:
    [score] = load_reward(settings(max_tokens=10, buffer=4)).score([Sample("p", "r")])
    assert (score.value, score.error) == (None, "the sample has no tokens")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "max_tokens: overlong needs it: an integer"),
        ({"max_tokens": 4}, "buffer: overlong needs it: an integer"),
        ({"max_tokens": 4, "buffer": 5}, r"buffer: expected at most max_tokens \(4\), got 5"),
        ({"max_tokens": 4, "buffer": True}, "buffer: expected an integer, got True"),
        ({"max_token": 4}, "max_token: overlong has no such option"),
    ],
)
def test_options(options, said: str) -> None:
    with pytest.raises(Refused, match=said):
        load_reward(settings(**options))
