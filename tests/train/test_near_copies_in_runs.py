"""A run holds out near-copies together, says so, and counts clusters in its verdict."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import InterruptAfter, metrics, tiny

from agro.errors import Interrupted
from agro.runs.rundata import load_run
from agro.runs.verdict import Verdict
from agro.store import Store, is_held_out
from agro.store.split import read_clusters
from agro.train.trainer import BaseTrainer
from agro.types import Sample, prompt_hash

rng = random.Random(1)
QUESTIONS = ["".join(rng.choices("0123456789", k=4)) + ">" for _ in range(20)]
COPIES = 4


def copies(question: str) -> list[str]:
    """A letter in front of a colon is a label; the alphabet has none, so that digits stand in for letters."""
    return [f"{n}:{question}" for n in range(COPIES)]


def wide(folder: Path, **changes: Any) -> Any:
    new = {"alphabet": "0123456789>:", "hidden": 16, "layers": 1, "heads": 2, "context": 16}
    return tiny(folder, policy__new=new, **changes)


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in texts))
    return str(path)


def log_run(folder: Path, **changes: Any) -> Any:
    if not (folder / "log.db").exists():
        with Store.open(folder / "log.db") as store:
            store.append(
                Sample(text, str(i), reward=float(i))
                for question in QUESTIONS
                for text in copies(question)
                for i in range(2)
            )
    log = {"store": str(folder / "log.db"), "replay": 1.0, "hold_out": 0.3}
    return wide(folder, data=log, **{"train__steps": 4, **changes})


def test_a_log_s_near_copies_are_held_out_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    BaseTrainer(log_run(tmp_path), tmp_path / "run").run()
    held_out = {q for q in QUESTIONS if is_held_out(min(map(prompt_hash, copies(q))), 0.3)}
    held = len(held_out)
    said = capsys.readouterr().err
    assert "80 of 80 prompts are near-copies of others, in 20 clusters" in said
    measured = f"{COPIES * held} stored groups are measured and not trained on, in {held} clusters of"
    assert measured in " ".join(said.split())
    with Store.open(tmp_path / "log.db") as store:
        drawn = {
            s.prompt for s in store.samples(ids={d.sample for d in store.draws.drawn(load_id(tmp_path))})
        }
    trained = {text.partition(":")[2] for text in drawn}
    assert trained
    assert trained <= set(QUESTIONS) - held_out
    assert metrics(tmp_path / "run")[-1]["eval_groups"] == COPIES * held


def load_id(folder: Path) -> str:
    return str(load_run(folder / "run").values["run"])


def test_a_resumed_run_splits_as_it_began(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        BaseTrainer(log_run(tmp_path), folder, monitors=[InterruptAfter(2)]).run()
    before = read_clusters(folder)
    with Store.open(tmp_path / "log.db") as store:
        more = [text for question in QUESTIONS for text in (f"9:{question}", f"8:{question}")]
        store.append(Sample(text, str(i), reward=float(i)) for text in more for i in range(2))
    BaseTrainer(log_run(tmp_path), folder, resume=True).run()
    assert read_clusters(folder) == before
    assert len(before or ()) == 80


def test_a_run_of_before_keeps_its_split(tmp_path: Path) -> None:
    """It has no near_copies.json: each prompt decided for itself."""
    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        BaseTrainer(log_run(tmp_path), folder, monitors=[InterruptAfter(2)]).run()
    (folder / "near_copies.json").unlink()
    BaseTrainer(log_run(tmp_path), folder, resume=True).run()
    held_out = sum(is_held_out(prompt_hash(text), 0.3) for q in QUESTIONS for text in copies(q))
    assert metrics(folder)[-1]["eval_groups"] == held_out


def test_a_verdict_counts_clusters(tmp_path: Path) -> None:
    held = write(tmp_path / "held.jsonl", [text for question in QUESTIONS[:5] for text in copies(question)])
    asked = write(tmp_path / "asked.jsonl", QUESTIONS[10:])
    config = wide(tmp_path, data={"prompts": asked, "eval_prompts": held}, train__steps=2)
    BaseTrainer(config, tmp_path / "run").run()
    [*_, row] = metrics(tmp_path / "run")
    assert (row["eval_gain_n"], row["eval_gain_clusters"]) == (20, 5)
    verdict = Verdict.of(load_run(tmp_path / "run"))
    assert "on 20 held-out prompts in 5 clusters of near-copies" in verdict.sentence
    assert verdict.to_json()["clusters"] == 5


def test_copies_of_what_is_trained_on_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = write(tmp_path / "held.jsonl", [*copies(QUESTIONS[0]), QUESTIONS[1]])
    asked = write(tmp_path / "asked.jsonl", [f"9:{QUESTIONS[0]}", *QUESTIONS[10:]])
    config = wide(tmp_path, data={"prompts": asked, "eval_prompts": held}, train__steps=1)
    BaseTrainer(config, tmp_path / "run").run()
    assert "4 of 5 held-out prompts are near-copies of prompts to train on" in capsys.readouterr().err
