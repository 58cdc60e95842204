"""`agro check`: what it counts, on stores small enough to count by hand."""

from __future__ import annotations

import json
import math
import random
import re

import pytest

from agro.config import RunConfig
from agro.objectives import get
from agro.pages.store import check_store, equal_means
from agro.pages.store.check_survey import explaining, spread, survey
from agro.store import Pair, Store
from agro.types import Sample


def log(prompt: str, response: str, reward: float | None, source: str = "a", **meta: object) -> Sample:
    return Sample(prompt, response, reward=reward, role="log", source=source, meta=meta)


def objective(name, **options):
    return RunConfig.of({"objective": {"name": name, **options}})


@pytest.fixture
def store(tmp_path):
    """Three groups: unequal rewards of two sources, one response alone, and an episode beside a response."""
    samples = [
        log("p", "one", 0.0, finish="length"),
        log("p", "two", 1.0, finish="stop"),
        log("p", "two", 0.5, "b"),
        log("q", "alone", 1.0),
        log("r", "first turn", 1.0).replace(episode="e"),
        log("r", "second turn", 1.0).replace(episode="e"),
        log("r", "other", 1.0, "b"),
    ]
    with Store.open(tmp_path / "log.db") as store:
        store.append(samples)
        yield store


def test_groups_rewards_and_endings(store):
    found = survey(store)
    assert (found.groups, found.responses, dict(found.sizes)) == (3, 6, {3: 1, 1: 1, 2: 1})
    assert (found.scored_groups, found.equal, found.repeats) == (2, 1, 1)
    assert spread(found.quality)["mean"] == 0.5  # (mean 0.5 − 0) / (1 − 0) in the one group that has a spread
    assert spread(found.coverage)["mean"] == pytest.approx((2 / 3 + 1) / 2)
    assert (found.total("ended"), found.total("truncated")) == (2, 1)
    assert spread(found.sources["a"].rewards) == {
        "count": 5,
        "mean": 0.8,
        "std": pytest.approx(math.sqrt(0.2)),  # 4 · 0.2² + 0.8² = 0.8, by n − 1 = 4
        "min": 0.0,
        "max": 1.0,
    }


def test_a_spread_of_large_numbers():
    """It loses no digits; squares that are too large for a float have no standard deviation."""
    found = spread([1e9 + i for i in range(10)])
    assert (found["mean"], found["std"]) == (1e9 + 4.5, pytest.approx(math.sqrt(55 / 6)))  # of 0 … 9
    assert spread([1e308, -1e308]) == {"count": 2, "mean": None, "std": None, "min": -1e308, "max": 1e308}


def test_many_repeats_are_worth_a_warning(tmp_path):
    """Of five responses two equal an earlier one to the same prompt; equal ones of another prompt don't."""
    with Store.open(tmp_path / "log.db") as store:
        store.append(log("p", text, float(i)) for i, text in enumerate(("yes", "yes", "yes", "no")))
        store.append([log("q", "no", 1.0)])
        report = check_store(store, objective("agro", singletons="drop"))
    assert "40% of the responses equal an earlier one to the same prompt." in str(report)


def test_held_out_prompts_of_the_store_are_counted_up_to_case(tmp_path, store):
    (tmp_path / "held.jsonl").write_text('{"prompt": "P"}\n{"prompt": "p q"}\n')
    held = survey(store, tmp_path / "held.jsonl").held_out
    assert held is not None
    assert (held.prompts, len(held.exact), held.near, held.trained) == (2, 1, (), 3)


def test_equal_rewards_mean_something_else_to_each_kind_of_objective():
    assert "β pulls the policy back" in equal_means(get("agro"), {})
    assert "gradient is 0" in equal_means(get("grpo"), {})
    assert "teach too" in equal_means(get("topr"), {})


def test_the_report_names_what_to_do(store):
    report = check_store(store, objective("agro"))
    assert report.problem.startswith("objective agro needs groups of at least 2 responses: 2 of 3 groups")
    texts = [str(verdict) for verdict in report.verdicts]
    assert any("1 of 3 prompts have one response" in t and "data.complete_groups" in t for t in texts)
    assert report.verdicts[0].level == "problem"
    assert check_store(store, objective("sft")).trainable
    assert check_store(store, objective("agro", singletons="drop")).trainable
    values = json.loads(json.dumps(report.to_json()))
    assert (values["samples"], values["groups"], values["groups_of_one"]) == (7, 3, 1)


def test_a_check_of_pairs_counts_them(tmp_path):
    with Store.open(tmp_path / "pairs.db") as store:
        ids = store.append([log("p", "a", None), log("p", "b", None)])
        store.add_pairs([Pair(*ids)])
        report = check_store(store, objective("dpo"))
    assert report.trainable
    assert "pairs" in str(report)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": {"min_reward": 9.0}}, "has no samples that data.roles, data.sources, data.min_reward"),
        ({"data": {"hold_out": 0.9999999}}, "has no samples that"),
        ({}, "no group .* is left to draw: 2 of 2"),
    ],
)
def test_nothing_that_is_left_to_draw_is_a_problem(settings, message, tmp_path):
    with Store.open(tmp_path / "s.db") as store:
        store.append([log("1", "a", 1.0), log("2", "a", 0.0)])
        config = {"objective": {"name": "agro", "singletons": "drop"}, **settings}
        report = check_store(store, RunConfig.of(config))
    assert not report.trainable
    assert re.search(message, report.problem)


def test_near_copies_of_prompts_are_counted(tmp_path):
    """Three questions in four copies each, and one alone."""
    with Store.open(tmp_path / "log.db") as store:
        store.append(
            Sample(f"[v{n}] What is {question}?", str(i), reward=float(i), prompt_id=f"{question[:3]}{n}")
            for question in ("the capital of Chad", "a prime number", "water made of")
            for n in range(4)
            for i in range(2)
        )
        store.append([Sample("Who are you?", str(i), reward=float(i), prompt_id="alone") for i in range(2)])
        report = check_store(store, RunConfig.of({"policy": {"model": "m"}, "data": {"replay": 1.0}}))
    assert report.to_json()["near_copies"] == {"prompts": 12, "clusters": 3}
    assert "near-copies    12 in 3 clusters\n" in str(report)


def rated(path, apart: float, each: int = 1) -> str:
    """Ratings 0 to 4 of 200 prompts by ten users, the last five of whom give `apart` more."""
    with Store.open(path) as store:
        store.append(
            log(f"p{i}", f"r{n}", i // 10 % 5 + apart * (i % 10 >= 5), user=f"u{i % 10}", row=i, day=i % 7)
            for i in range(200)
            for n in range(each)
        )
        report = check_store(store, RunConfig.load("feedback"))
    assert (report.explaining is None) is ("explaining" not in report.to_json())
    return str(report)


def test_a_field_that_explains_single_ratings_is_named(tmp_path):
    """Within a user, 20 of 0 … 4: 20 · 2/19 = 40/19. Of ten means, five of them 2 higher, 10 · 1/9, of which
    40/19/20 is chance."""
    text = rated(tmp_path / "apart.db", 2.0)
    share = (10 / 9 - 2 / 19) / (10 / 9 - 2 / 19 + 40 / 19)
    assert f"{share:.0%} of the variance of 200 rewards is between the 10 values of user" in text
    assert "agro import --center-by user" in text
    assert "--center-by" not in rated(tmp_path / "equal.db", 0.0)
    assert "--center-by" not in rated(tmp_path / "groups.db", 2.0, each=2)


def test_what_chance_explains_is_not_named(tmp_path):
    """Coin flips by 60 users: seed 19 has a share of .15 between them, fewer than four standard errors."""
    rng = random.Random(19)
    with Store.open(tmp_path / "chance.db") as store:
        store.append(log(f"p{i}", "r", float(rng.random() < 0.5), user=i % 60) for i in range(200))
        assert explaining(store) is None
        store.append(log(f"q{i}", "r", float(i % 60 < 30), user=i % 60) for i in range(200))
        found = explaining(store)
    assert found is not None
    assert (found.field, found.values, found.rewards) == ("user", 60, 400)
