"""What is said of a run from the rewards of its start."""

from __future__ import annotations

import numpy as np

from agro.train.notes import warn_of_metrics, warn_of_rewards

ONE, HALF, MOST, EQUAL = [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]


def test_the_ratio_of_each_prompt() -> None:
    """One success of four: off-means ¾, −¼, −¼, −¼; 4/2 · (3/8)/(3/4) = 1, so 1/(2β).

    Half: 0. Three: −1/(2β).
    """
    rewards = np.array([ONE, ONE, ONE, HALF, MOST, EQUAL, [1, 0, 0, np.nan]])
    said = warn_of_rewards(rewards, "agro_onpolicy", {"beta": 0.1, "likelihood_ratio": 1.0})
    assert said is not None
    assert said.startswith("on 3 of 5 held-out prompts whose 4 rewards differ (of 7)")
    assert "above 1 (median 5)" in said
    assert "on 0 of 5" in str(warn_of_rewards(rewards, "agro_onpolicy", {"beta": 0.51}))
    half = str(warn_of_rewards(rewards, "agro_onpolicy", {"beta": 0.26, "likelihood_ratio": 0.5}))
    assert half.startswith("on 0 of 5")
    assert "above 2" in half


def test_nothing_is_said_where_nothing_is_known_or_at_stake() -> None:
    rewards = np.array([ONE])
    assert warn_of_rewards(rewards, "agro_onpolicy", {"beta": 0.1})
    assert warn_of_rewards(rewards, "agro", {"beta": 0.1}) is None
    assert warn_of_rewards(rewards[:, :2], "agro_onpolicy", {"beta": 0.1}) is None
    assert warn_of_rewards(np.array([EQUAL]), "agro_onpolicy", {"beta": 0.1}) is None
    for share in ("adaptive", 0.0):
        assert warn_of_rewards(rewards, "agro_onpolicy", {"beta": 0.1, "likelihood_ratio": share}) is None


def test_a_step_is_warned_of_where_most_best_responses_are_pushed_down() -> None:
    options = {"beta": 0.1}
    said = warn_of_metrics({"reversed_share": 0.75}, "agro_onpolicy", options)
    assert said is not None
    assert said.startswith("in 75% of the groups")
    assert "likelihood_ratio" in said
    for share in (0.5, np.nan):
        assert warn_of_metrics({"reversed_share": share}, "agro_onpolicy", options) is None
    assert warn_of_metrics({}, "agro", options) is None
