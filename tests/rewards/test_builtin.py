"""The built-in rewards: exact, regex and overlong."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from agro import config
from agro.config import RunConfig
from agro.errors import Refused
from agro.rewards import load_reward
from agro.types import Sample


def values(name, pairs, **options):
    samples = [
        Sample("p", response, meta={} if answer is None else {"answer": answer}) for response, answer in pairs
    ]
    with closing(load_reward(config.RewardConfig(name=name, options=options))) as reward:
        assert reward.name == name
        scores = reward.score(samples)
    assert all((s.value is None) == (s.error is not None) for s in scores)
    return [s.error if s.value is None else s.value for s in scores]


def test_exact():
    pairs = [(" 18\n", "18"), ("18.0", "18"), ("", ""), ("a", "A"), ("18", 18), ("b", " b")]
    assert values("exact", pairs) == [1.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    assert values("exact", pairs, strip=False) == [0.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert values("exact", pairs, case=False) == [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["exact", "regex"])
def test_without_an_answer_the_reward_is_unknown(name):
    pairs = [("the final answer is 1", None), ("1", True), ("1", [1]), ("1", "2")]
    assert values(name, pairs) == [
        "the sample has no answer",
        "the sample's answer is a bool, expected text or a finite number",
        "the sample's answer is a list, expected text or a finite number",
        0.0,
    ]


def test_regex_by_marker():
    assert values(
        "regex",
        [
            ("… the final answer is $1,000$.", "1000"),
            ("The final answer is 5", "6"),
            ("5", "5"),
            ("#### 5", "5"),
        ],
    ) == [1.0, 0.0, 0.0, 0.0]


def test_regex_on_gsm8k():
    answer = "Natalia sold 48+24 = <<48+24=72>>72 clips altogether.\n#### 72"
    assert values(
        "regex", [("so\nA: 72", answer), ("so\nA: 71", answer)], marker="A:", answer_marker="####"
    ) == [
        1.0,
        0.0,
    ]
    assert values("regex", [("#### 72.0", "72"), ("72", "72")], marker="####") == [1.0, 0.0]
    assert values("regex", [("#### 72", "72")], marker="####", answer_marker="####") == [
        "the sample's answer has no '####'"
    ]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("exct", {}, "got 'exct'; did you mean exact?"),
        ("exact", {"strp": True}, "reward.options of exact: unknown key strp; did you mean strip?"),
        ("exact", {"strip": 3}, "strip: input should be a valid boolean"),
        ("regex", {"pattern": "(a)"}, "unknown key pattern; known here: marker, answer_marker"),
        ("regex", {"marker": " "}, "marker: expected text"),
    ],
)
def test_invalid_options_are_refused(name, options, message):
    with pytest.raises(Refused) as refused:
        load_reward(config.RewardConfig(name=name, options=options))
    assert message in str(refused.value)


@pytest.mark.parametrize("name", ["regex", pytest.param("math", marks=pytest.mark.test)])
@pytest.mark.parametrize(
    ("prompt", "response", "finish", "value"),
    [
        ("p", "the final answer is 18", None, 1.0),
        ("p", "the final answer is 18", "length", 1.0),  # cut behind its answer
        ("p <think>", "Maybe the final answer is 18", "length", 0.0),  # a guess within a thought
        ("p <think>", "Maybe 17</think>the final answer is 18", "length", 1.0),
        ("p", "<think>Maybe the final answer is 18", None, 0.0),
        ("p", "the final answer is 18\n<think>the final answer is 19", None, 1.0),
    ],
)
def test_an_open_thought_has_no_answer(name, prompt, response, finish, value):
    meta = {"answer": "18"} | ({"finish": finish} if finish else {})
    with closing(load_reward(config.RewardConfig(name=name))) as reward:
        assert [s.value for s in reward.score([Sample(prompt, response, meta=meta)])] == [value]


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
        ({}, "overlong: max_tokens: field required.*\n.*overlong: buffer: field required"),
        ({"max_tokens": 4, "buffer": 0}, "buffer: input should be greater than or equal to 1"),
        ({"max_tokens": 4, "buffer": 5}, r"buffer: expected at most max_tokens \(4\), got 5"),
        ({"max_token": 4}, r"unknown key max_token; did you mean max_tokens\?$"),
    ],
)
def test_options(options, said: str) -> None:
    with pytest.raises(Refused, match=said):
        load_reward(settings(**options))
