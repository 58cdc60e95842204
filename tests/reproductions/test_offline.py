"""reproductions/offline: its reward, its configurations, and a run of two updates from end to end."""

from __future__ import annotations

import json
import sys

import pytest

from reproductions import harness
from reproductions.offline import run
from reproductions.offline.reward import right_sum

needs_data = pytest.mark.skipif(
    not run.FOLDER.exists(), reason=f"{run.FOLDER} isn't there: the shared folder holds the log and its model"
)


def test_the_reward_looks_at_what_follows_the_last_sign() -> None:
    texts = ["1+2=3#3", "1+2=4#4", "3", "#4#3", "3#"]
    assert right_sum(["1+2="] * 5, texts, ["3"] * 5) == [1.0, 0.0, 0.0, 1.0, 0.0]


@needs_data
def test_trains_every_method_and_writes_the_result(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run, "HELD_OUT", 16)
    arguments = [
        "run.py",
        "--seeds",
        "1",
        "--steps",
        "2",
        "--out",
        str(tmp_path),
        "train.groups=4",
        "evaluate.every=1",
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    run.main()
    runs = json.loads((tmp_path / "result.json").read_text())["runs"]
    assert [r["method"] for r in runs] == list(run.METHODS)
    assert all(r["step"] == [0, 1, 2] and len(r["accuracy"]) == 3 for r in runs)
    assert (tmp_path / "figure.png").stat().st_size > 5000


@needs_data
def test_methods_differ_in_what_they_say_they_do(tmp_path) -> None:
    files = {"log": tmp_path / "a.db", "held_out": tmp_path / "c.jsonl"}
    recipe, plain, imitation = (run.configure(method, 0, 150, files, ()) for method in run.METHODS)
    assert recipe.objective.options["weight"] == "reference"
    assert (plain.objective.options["weight"], plain.objective.options["beta"]) == ("none", 0.1)
    assert (imitation.objective.name, imitation.data.min_reward) == ("sft", 1.0)
    assert recipe.data.min_reward is None
    assert {c.train.lr for c in (recipe, plain, imitation)} == {1e-4}
    assert harness.SHARED in run.FOLDER.parents
