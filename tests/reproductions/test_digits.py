"""Digit completion: the task, the reward and the baselines by hand; the reproduction on a small scale."""

from __future__ import annotations

import json

import pytest

from agro.errors import Refused
from reproductions import harness
from reproductions.digits import run
from reproductions.digits.reward import prefix

needs_data = pytest.mark.skipif(
    not (harness.SHARED / "data/rl_tasks").is_dir(), reason="../shared/data/rl_tasks isn't there"
)


@pytest.mark.parametrize(
    ("prompt", "right"),
    [
        ("1,2:6,5", "3,4,5,0,1"),  # the example of the task's source
        ("8,3:9,4", "7,2,6,1"),  # the difference is -5, that is 4 modulo 9
        ("9,0:9,2", "0,0"),  # 9 is 0 modulo 9
        ("4,4:9,3", "4,4,4"),
        ("5,8:9,0", ""),
    ],
)
def test_the_sequence_goes_on_modulo_max(prompt, right):
    assert run.answer(prompt) == right


@pytest.mark.parametrize(
    ("text", "right", "reward"),
    [
        ("7,2,6,1", "7,2,6,1", 1.0),
        ("7,2,6,1,5", "7,2,6,1", 1.0),  # what follows the whole answer costs nothing
        ("7,2,1", "7,2,6,1", 4 / 7),
        ("7", "7,2,6,1", 1 / 7),
        ("2,7,2,6,1", "7,2,6,1", 0.0),  # only what matches from the start counts
        ("", "7", 0.0),
        ("", "", 1.0),
        ("7", "", 0.0),
    ],
)
def test_the_reward_is_the_share_of_the_answer_that_is_matched(text, right, reward):
    assert prefix(completions=[text], answer=[right]) == [reward]


@needs_data
def test_prompts_stand_once_and_none_is_in_both_parts(tmp_path):
    counts = run.prepare(tmp_path)
    # counted with sort | uniq -d and comm on the source's files
    assert counts == {
        "train_rows": 800,
        "train_duplicates": 64,
        "train": 736,
        "test_rows": 200,
        "test_duplicates": 7,
        "test_in_train": 29,
        "test": 164,
    }
    parts = [
        {json.loads(line)["prompt"] for line in (tmp_path / f"{part}.jsonl").read_text().splitlines()}
        for part in ("train", "test")
    ]
    assert [len(part) for part in parts] == [736, 164]
    assert not parts[0] & parts[1]


def test_the_rule_is_right_where_the_sequence_stands_still():
    """Of 4,4:9,3 and where n is 0; elsewhere it is wrong from the first digit."""
    train, test = ["4,4:9,3", "8,3:9,4"], ["5,8:9,0", "4,4:9,3", "1,2:6,5", "8,3:9,4"]
    found = run.baseline(train, test)
    assert (found["train"], found["test"]) == (0.5, 0.5)


@needs_data
def test_the_reproduction_runs_and_learns_where_to_end(tmp_path, capsys):
    """Small: 40 steps, most of them on one character; the end where n = 0 is what is learned first."""
    small = [
        "phases.one character.train.steps=38",
        "phases.four.train.steps=1",
        "phases.whole.train.steps=1",
        "train.groups=32",
        "policy.new.hidden=32",
        "train.lr=3e-3",
        "evaluate.n=2",
        "evaluate.every=0",
    ]
    run.main(["--seeds", "1", "--out", str(tmp_path), *small])
    result = json.loads((tmp_path / "result.json").read_text())
    assert [(r["objective"], r["seed"], r["steps"]) for r in result["runs"]] == [
        ("agro", 0, 40),
        ("rloo", 0, 40),
    ]
    for r in result["runs"]:
        # at random 1/16 of the responses end at once and a digit is right as often: 0.02
        assert r["last_training_reward"] > max(0.06, r["first_training_reward"])
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "| repeat the last number n times |" in printed
    assert "test_in_train 29" in printed


def test_without_the_data_it_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "SHARED", tmp_path / "shared")
    with pytest.raises(Refused, match=r"digit_completion_train\.jsonl isn't there"):
        run.prepare(tmp_path / "data")


def test_a_refusal_ends_with_2_and_its_message(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["reproductions/digits/run.py", "--seeds", "0"])
    with pytest.raises(SystemExit) as ended:
        harness.guarded(run.main)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "digits: --seeds: expected at least 1, got 0\n"
