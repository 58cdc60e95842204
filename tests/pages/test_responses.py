"""Which responses are shown."""

import pytest

from agro.pages.run import experience
from agro.pages.run.experience import choose
from agro.store import Store
from agro.types import Sample


def chosen(path, rewards, run="me"):
    """`rewards`: [(prompt, reward), …] in the order of the store.

    Returns best and worst by place in that order.
    """
    with Store.open(path / "store.db") as store:
        store.append([Sample(prompt, "r", reward=reward) for prompt, reward in rewards], run=run)
        found = choose(store, "me")
    return (
        [(s.id or 0) - 1 for s in found.best],
        [(s.id or 0) - 1 for s in found.worst],
        found.of,
        found.sampled,
    )


def test_one_a_prompt_and_of_equal_ones_the_later(tmp_path):
    rewards = [("a", 1.0), ("a", 1.0), ("b", 0.0), ("b", 0.0), ("c", 1.0), ("d", 0.5), ("e", 0.5), ("f", 0.0)]
    assert chosen(tmp_path, rewards) == ([4, 1, 6], [7, 3, 5], 8, True)


def test_none_stands_in_both(tmp_path):
    assert chosen(tmp_path, [("a", 1.0), ("b", 0.5)]) == ([0, 1], [], 2, True)


def test_equal_rewards_have_no_worst(tmp_path):
    assert chosen(tmp_path, [(p, 0.0) for p in "abcde"]) == ([4, 3, 2], [], 5, True)


def test_unscored_responses_and_other_runs_are_passed_over(tmp_path):
    assert chosen(tmp_path, [("a", None), ("b", 1.0)]) == ([1], [], 1, True)
    assert chosen(tmp_path, [("c", 5.0)] * 3, run="other") == ([1], [], 1, True)


def test_late_responses_of_a_large_store(tmp_path, monkeypatch):
    monkeypatch.setattr(experience, "LATE", 4)
    rewards = [(f"p{i}", float(-i)) for i in range(60)]
    best, worst, of, _ = chosen(tmp_path, [*rewards, *rewards[:57]])  # the last four are of p53 … p56
    assert (best, worst, of) == ([113, 114, 115], [116], 4)


@pytest.mark.parametrize("count", [4, 5, 40])
def test_the_last_responses_of_a_small_store(tmp_path, monkeypatch, count):
    monkeypatch.setattr(experience, "LATE", 4)
    best, worst, of, _ = chosen(tmp_path, [(f"p{i}", float(i)) for i in range(count)])
    assert (best, worst, of) == ([count - 1, count - 2, count - 3], [count - 4], 4)
