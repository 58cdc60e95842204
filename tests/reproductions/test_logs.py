"""Logs of other models: the split, the constants and the pooled errors by hand; a small reproduction."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from agro.errors import Refused
from agro.store import Store
from agro.types import Sample
from reproductions import harness
from reproductions.logs import run

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


def test_each_group_is_held_out_in_one_fold_and_trained_on_in_the_others(tmp_path):
    store = log(tmp_path / "log.db", [{"a": 0.0, "b": 1.0}] * 20)
    held = []
    for fold in range(2):
        train, heldout = (
            {g[0].prompt_id for g in run.groups_of(path)} for path in run.split(store, fold, of=2, most=None)
        )
        assert not train & heldout
        assert len(train | heldout) == 20
        held.append(heldout)
    assert not held[0] & held[1]
    assert len(held[0] | held[1]) == 20


def test_the_constants_are_those_of_the_training_groups(tmp_path):
    # On the training groups b is better than a by 0.5 on average (1 and 0): R = r - 0.5 [source is b].
    train = log(tmp_path / "train.db", [{"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 1.0}])
    # The groups differ by 1 and by 0: ½ Var is 1/4 and 0. Less the constants they differ by 0.5 both: 1/16.
    heldout = log(tmp_path / "heldout.db", [{"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 0.0}])
    found = run.by_source(train, heldout)
    assert found["before"] == pytest.approx(1 / 8)
    assert found["after"] == pytest.approx(1 / 16)
    assert found["fall_se"] == pytest.approx(np.std([3 / 16, -1 / 16], ddof=1) / 2**0.5)


def test_a_constant_for_the_one_source_says_nothing(tmp_path):
    one = log(tmp_path / "one.db", [{"a": 0.0}, {"a": 1.0}])
    assert run.by_source(one, one) is None


def test_the_pooled_error_is_that_of_all_groups_together():
    rng = np.random.default_rng(0)
    before, now = (rng.normal(3, 1, 12), rng.normal(2, 1, 12))
    falls = before - now
    folds = [
        {
            "eval_groups": part.stop - part.start,
            "eval_consistency": now[part].mean(),
            "eval_consistency_fall": falls[part].mean(),
            "eval_consistency_fall_se": falls[part].std(ddof=1) / (part.stop - part.start) ** 0.5,
        }
        for part in (slice(0, 5), slice(5, 12))
    ]
    found = run.pooled(folds)
    assert found["before"] == pytest.approx(before.mean())
    assert found["fall"] == pytest.approx(falls.mean())
    assert found["fall_se"] == pytest.approx(falls.std(ddof=1) / 12**0.5)
    assert found["relative"] == pytest.approx(falls.mean() / before.mean())


def test_says_what_is_missing(tmp_path):
    with pytest.raises(Refused, match="isn't there; expected the shared folder"):
        harness.import_log(tmp_path / run.LOGS["gsm8k"].file, tmp_path / "log.db", ())


@needs_data
def test_runs_on_a_small_scale(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["run.py", "--data", "gsm8k", "--small", "--seeds", "1", "--out", str(tmp_path)]
    )
    run.main()
    result = json.loads((tmp_path / "result.json").read_text())["gsm8k"]
    assert (result["log"]["groups"], result["log"]["samples"], result["log"]["groups_equal"]) == (
        1319,
        5276,
        588,
    )
    assert result["refused"]["exit"] == 2
    assert "grpo needs behavior_logp: 0 of 32 rows have it" in result["refused"]["message"]
    [seed] = result["seeds"]
    assert seed["groups"] == 8
    assert [p["step"] for p in seed["curve"]] == [0, 2, 4]
    assert seed["curve"][0]["fall"] == 0
    assert abs(seed["fall"]) > 1e-6
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    said = capsys.readouterr().out
    assert "| seed 0 |" in said
    assert "a constant per source" in said
