"""Logs of other models: split, control, baselines and pooled errors by hand; a small reproduction."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from agro.errors import Refused
from agro.store import Store
from agro.types import Sample
from reproductions import harness
from reproductions.logs import data, measures, run

needs_data = pytest.mark.skipif(
    not (harness.SHARED / "data/generations").is_dir(), reason="../shared/data/generations isn't there"
)


def log(path, groups):
    """A store of groups, each {source: reward}."""
    with Store.open(path) as store:
        store.append(
            Sample(f"question {i}", f"answer {name}", reward=reward, source=name)
            for i, group in enumerate(groups)
            for name, reward in group.items()
        )
    return path


def test_each_group_is_held_out_in_one_fold_and_trained_on_in_the_other(tmp_path):
    store = log(tmp_path / "log.db", [{"a": 0.0, "b": 1.0}] * 20)
    held = []
    for fold in range(data.FOLDS):
        train, heldout = (
            {g[0].prompt_id for g in data.groups_of(path)} for path in data.split(store, fold, most=None)
        )
        assert not train & heldout
        assert len(train | heldout) == 20
        held.append(heldout)
    assert not held[0] & held[1]
    assert len(held[0] | held[1]) == 20


def test_training_has_the_groups_whose_rewards_differ(tmp_path):
    train = log(tmp_path / "train.db", [{"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 0.0}])
    prompts = [group[0].prompt for group in data.groups_of(data.mixed(train))]
    assert prompts == ["question 0", "question 2"]


def test_the_control_has_the_same_responses_and_each_prompts_rewards_in_another_order(tmp_path):
    rewards = {str(i): float(i) for i in range(8)}
    train = log(tmp_path / "train.db", [rewards, rewards])
    first, second = (data.groups_of(data.shuffled(train, seed)) for seed in (0, 1))
    for before, after in zip(data.groups_of(train), first, strict=True):
        assert [(s.prompt, s.response, s.source) for s in before] == [
            (s.prompt, s.response, s.source) for s in after
        ]
        assert sorted(s.reward for s in after) == list(range(8))
        assert [s.reward for s in after] != list(range(8))
    assert [s.reward for s in first[0]] != [s.reward for s in second[0]]


def test_the_constants_of_sources_are_those_of_the_training_groups(tmp_path):
    # On the training groups b is better than a by 0.5 on average (1 and 0): R = r - 0.5 [source is b].
    train = log(tmp_path / "train.db", [{"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 1.0}])
    # The groups differ by 1, -1 and 0: ½ Var is 1/4, 1/4 and 0. Less the constants the differences are 0.5,
    # -1.5 and -0.5: 1/16, 9/16 and 1/16. Of two groups with unequal rewards b is the better one once.
    heldout = log(tmp_path / "heldout.db", [{"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.0}])
    found = measures.baselines([(train, heldout)])["source alone"]
    assert (found["auc"], found["mixed"]) == (0.5, 2)
    assert found["auc_se"] == pytest.approx(np.std([1, 0], ddof=1) / 2**0.5)
    assert found["before"] == pytest.approx(1 / 6)
    assert found["after"] == pytest.approx(11 / 48)
    assert found["fall_se"] == pytest.approx(np.std([3 / 16, -5 / 16, -1 / 16], ddof=1) / 3**0.5)


def test_one_source_is_no_baseline_and_responses_of_equal_length_are_ties(tmp_path):
    with Store.open(tmp_path / "one.db") as store:
        store.append(Sample(p, f"answer {r}", reward=float(r), source="a") for p in "pq" for r in (0, 1))
    found = measures.baselines([(tmp_path / "one.db", tmp_path / "one.db")])
    assert list(found) == ["length alone"]
    assert (found["length alone"]["auc"], found["length alone"]["fall"]) == (0.5, 0)


def test_the_pooled_error_is_that_of_all_groups_together():
    rng = np.random.default_rng(0)
    before, now, auc = (rng.normal(mean, 1, 12) for mean in (3, 2, 0.7))
    falls = before - now
    folds = []
    for part in (slice(0, 5), slice(5, 12)):
        n = part.stop - part.start
        fold = {"eval_groups": n, "eval_auc_groups": n, "eval_dropped": 1}
        for name, values in (("auc", auc), ("consistency", now), ("consistency_fall", falls)):
            fold[f"eval_{name}"] = values[part].mean()
            fold[f"eval_{name}_se"] = values[part].std(ddof=1) / n**0.5
        folds.append(fold)
    found = measures.pooled(folds)
    assert (found["groups"], found["mixed"], found["dropped"]) == (12, 12, 2)
    assert found["auc"] == pytest.approx(auc.mean())
    assert found["auc_se"] == pytest.approx(auc.std(ddof=1) / 12**0.5)
    assert found["before"] == pytest.approx(before.mean())
    assert found["fall"] == pytest.approx(falls.mean())
    assert found["fall_se"] == pytest.approx(falls.std(ddof=1) / 12**0.5)
    assert found["relative"] == pytest.approx(falls.mean() / before.mean())


def test_the_lowest_seed_counts_and_chance_is_two_errors_wide():
    seeds = [{"auc": auc, "auc_se": 0.02, "errors": (auc - 0.5) / 0.02} for auc in (0.6, 0.7, 0.8)]
    found = run.over_seeds(seeds)
    assert found["lowest"] == pytest.approx({"auc": 0.6, "errors": 5})
    assert found["mean"] == pytest.approx(0.7)
    assert found["mean_se"] == pytest.approx(0.1 / 3**0.5)
    assert not run.is_chance(seeds)  # 0.2 against 2 × 0.0577
    assert run.is_chance([{"auc": 0.539, "auc_se": 0.02, "errors": 1.95}])
    assert not run.is_chance([{"auc": 0.541, "auc_se": 0.02, "errors": 2.05}])


def test_says_what_is_missing(tmp_path):
    with pytest.raises(Refused, match="isn't there; expected the shared folder"):
        harness.import_log(tmp_path / data.LOGS["gsm8k"].file, tmp_path / "log.db", ())


@needs_data
def test_runs_on_a_small_scale(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["run.py", "--data", "gsm8k", "--small", "--seeds", "1", "--out", str(tmp_path)]
    )
    run.main()
    result = json.loads((tmp_path / "result.json").read_text())["gsm8k"]
    log = result["log"]
    assert (log["groups"], log["samples"], log["groups_equal"]) == (1319, 5276, 588)
    for [seed] in (result["seeds"], result["control"]):
        assert seed["groups"] == 16
        assert [p["step"] for p in seed["curve"]] == [0, 2, 4]
        assert (seed["curve"][0]["auc"], seed["curve"][0]["fall"]) == (0.5, 0)
        assert abs(seed["fall"]) > 1e-6
    assert result["seeds"][0]["auc"] != result["control"][0]["auc"]
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    said = capsys.readouterr().out
    assert "| seed 0 |" in said
    assert "| shuffled rewards, seed 0 |" in said
    assert "| source alone |" in said
