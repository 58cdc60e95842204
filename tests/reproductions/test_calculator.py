"""Multiplication with a calculator: the teacher by hand; the reproduction on a small scale."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from agro.errors import Refused
from reproductions.calculator import run

SMALL = [
    "phases.sft.train.steps=2",
    "phases.episodes.train.steps=1",
    "policy.new.hidden=16",
    "policy.new.layers=1",
    "sampler.n=2",
    "train.groups=4",
]


def test_the_parts_share_no_prompt():
    parts = run.questions(3)
    assert {name: len(asked) for name, asked in parts.items()} == {"train": 3000, "test": 512, "taught": 4588}
    assert len({p for asked in parts.values() for p in asked}) == 90 * 90
    assert run.answer("37*46=") == "1702"


def test_the_teacher_calls_and_slips_as_often_as_it_says():
    config = run.configure(run.WAYS[0], 0, SMALL)
    found = run.lessons(config, run.questions(0)["taught"][:1000], random.Random(0))
    calls = [s for s in found if s.meta["turns"] == 2]
    assert len(calls) / 1000 == pytest.approx(0.5, abs=0.05)  # three standard errors
    right = np.mean([s.response.startswith(f"[{s.prompt[:-1]}]") for s in calls])
    assert right == pytest.approx(
        (1 - 0.05 * 0.9) ** 4, abs=0.05
    )  # a random digit is the right one in a tenth
    for s in calls:
        call, result = s.response.split("]")[0][1:], s.response.split("(")[1].split(")")[0]
        misspelt = any(
            len(x) == 2 and x != "00" and x[0] == "0" for x in call.split("*")
        )  # by a slip; no number in Python
        assert result == ("?" if misspelt else run.answer(f"{call}="))
        assert not s.action[
            s.tokens.tolist().index(18)
        ]  # 18 is "(": of the result, which isn't the teacher's
    assert np.mean([s.meta["last_turn"] == s.meta["answer"] for s in found if s.meta["turns"] == 1]) < 0.2


def test_without_the_calculator_the_teacher_is_right():
    config = run.configure(run.WAYS[1], 0, SMALL)
    assert config.environment is None
    (lesson,) = run.lessons(config, ["37*46="], random.Random(0))
    assert (lesson.response, lesson.role) == ("1702", "expert")


def test_the_reproduction_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "TEST", 20)
    monkeypatch.setattr(run, "TRAIN", 7900)
    run.main(["--seeds", "1", "--out", str(tmp_path), *SMALL])
    result = json.loads((tmp_path / "result.json").read_text())
    assert [(r["way"], r["seed"]) for r in result["runs"]] == [("with the calculator", 0), ("without", 0)]
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert "| without | 0 |" in capsys.readouterr().out


def test_no_seeds_are_refused(tmp_path):
    with pytest.raises(Refused, match="--seeds: expected at least 1, got 0"):
        run.main(["--seeds", "0", "--out", str(tmp_path)])
