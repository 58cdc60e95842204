"""Rewards of steps and turns: which token each comes with, and what is refused."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from agro.config import RunConfig
from agro.errors import Refused
from agro.rewards import load_reward
from agro.rewards.steps import by_token, step_ends, steps, turn_ends
from agro.types import Sample

TEXT = "a 1\n\nb\nc 22"
FUNCTION = """
def each(completions, wanted):
    return [[float(n) for n in counts] for counts in wanted]
"""


def decode(ids) -> str:
    """A character a token; 0 is the end token."""
    return "".join(chr(i) for i in ids if i)


def written(text: str, turns: str = "", **fields) -> Sample:
    """`turns`: of each character p for the policy's, e for the environment's."""
    ids = [62, *map(ord, text), 0]
    action = np.array([False, *(c == "p" for c in turns or "p" * len(text)), True])
    return Sample("p", text, tokens=np.array(ids), action=action, **fields)


def test_steps_are_the_parts_that_arent_blank() -> None:
    assert steps(TEXT, "\n") == [("a 1", 3), ("b", 6), ("c 22", 11)]
    assert steps(" \n", "\n") == []


def test_a_step_ends_with_its_last_character_and_the_last_one_with_the_end_token() -> None:
    assert step_ends(written(TEXT), "\n", decode).tolist() == [3, 6, 12]
    merged = written(TEXT).replace(tokens=np.array([62, *map(ord, TEXT), 0]))
    found = step_ends(merged, "\n", lambda ids: decode(ids)[: 2 * (len(ids) // 2)])  # two characters a token
    assert found.tolist() == [4, 6, 12]


def test_turns_end_where_the_environment_begins() -> None:
    assert turn_ends(written("abcdef", "ppeepp")).tolist() == [2, 7]


def test_rewards_come_with_the_last_tokens_and_replace_their_sum() -> None:
    sample = written(TEXT, reward=1.5, meta={"step_rewards": [0.5, 0.0, 1.0]})
    [spread, other] = by_token([sample, written("x", reward=2.0)], "\n", decode)
    assert (spread.reward, other.reward, other.token_reward) == (None, 2.0, None)
    assert np.isnan(spread.token_reward[0])
    assert np.flatnonzero(np.nan_to_num(spread.token_reward)).tolist() == [3, 12]
    assert np.nansum(spread.token_reward) == 1.5
    tokens = written("ab", reward=3.0, meta={"token_rewards": [1.0, 0.5, 1.5]})
    assert by_token([tokens], None, decode)[0].token_reward[1:].tolist() == [1.0, 0.5, 1.5]


@pytest.fixture
def settings(tmp_path: Path):
    (tmp_path / "each.py").write_text(FUNCTION)
    return lambda **more: RunConfig.of({"reward": {"name": f"{tmp_path / 'each.py'}:each", **more}}).reward


@pytest.mark.test
def test_a_function_gives_a_number_for_each_step_or_turn(settings) -> None:
    """A wrong number of them, an episode of several rows and steps of several turns leave it unknown."""
    samples = [
        written(TEXT, meta={"wanted": [1, 2, 3]}),
        written(TEXT, meta={"wanted": [1, 2]}),
        written("abcdef", "ppeepp", meta={"wanted": [1, 2]}),
        written("ab", meta={"wanted": [1]}, episode="e"),
    ]
    with closing(load_reward(settings(per_step="\n"))) as reward:
        found = reward.score(samples)
    assert [score.value for score in found] == [6.0, None, None, None]
    assert found[0].meta == {"step_rewards": [1.0, 2.0, 3.0]}
    assert [score.error for score in found[1:]] == [
        "returned 2 numbers for 3 steps",
        "the response has several turns; give reward.per_step = 'turn'",
        "the template rewrote the episode's history: it has no one sequence of tokens",
    ]
    with closing(load_reward(settings(per_step="turn"))) as reward:
        assert [score.value for score in reward.score(samples[2:3])] == [3.0]


def test_what_excludes_steps_is_refused(settings) -> None:
    with pytest.raises(Refused, match=r"reward\.per_token excludes reward\.per_step"):
        settings(per_step="\n", per_token=True)
    with pytest.raises(Refused, match=r"reward\.per_step excludes"):
        settings(per_step="\n", clip=[0, 1])
