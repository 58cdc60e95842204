"""A run that is stopped, however, and resumed is the run that was never stopped."""

from __future__ import annotations

import signal
import sqlite3
import sys
import time
from pathlib import Path

import forked
import pytest
from tiny_runs import metrics, tiny, weights, write_prompts, write_toml

from agro.config import RunConfig
from agro.errors import Interrupted
from agro.runs.interruption import Interruption
from agro.train.trainer import Trainer


def config(tmp_path: Path) -> RunConfig:
    """Two phases, fresh and stored groups mixed, the second phase's reference its own start."""
    phases = [
        {"name": "fresh", "train": {"steps": 7}},
        {
            "name": "mixed",
            "data": {"replay": 0.5},
            "train": {"steps": 8, "updates": 2},
            "objective": {"beta": 0.3},
        },
    ]
    return tiny(
        tmp_path,
        phases=phases,
        policy__reference="phase",
        train__checkpoint_every=3,
        train__schedule="cosine",
        data__eval_prompts=write_prompts(tmp_path / "held.jsonl", range(60, 66)),
        evaluate__every=5,
    )


def draws(run: Path) -> list[tuple]:
    """What was drawn, in order; without ids, which differ where samples were made again."""
    with sqlite3.connect(run / "store.db") as db:
        return db.execute(
            "SELECT d.step, s.prompt_id, s.response, s.reward, s.version "
            "FROM draws d JOIN samples s ON s.id = d.sample ORDER BY d.rowid"
        ).fetchall()


TIMES = {"seconds", "seconds_sample", "seconds_train", "tokens_per_second"}


def same(a: Path, b: Path) -> None:
    assert weights(a) == weights(b)
    assert draws(a) == draws(b)
    assert [{k: v for k, v in m.items() if k not in TIMES} for m in metrics(a)] == [
        {k: v for k, v in m.items() if k not in TIMES} for m in metrics(b)
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    return Trainer(config(folder), folder / "run").run()


@pytest.mark.parametrize("at", [0, 1, 2, 6, 7, 8, 12])
def test_interrupted_in_the_middle_of_a_step(at: int, tmp_path: Path, undisturbed: Path, monkeypatch) -> None:
    """Ctrl-C while step `at` + 1 samples or computes: a checkpoint of step `at` is left."""
    trainer = Trainer(config(tmp_path), tmp_path / "run")
    plain, calls, log = Interruption.check, [], tmp_path / "run" / "metrics.jsonl"

    def ask(self: Interruption) -> None:
        done = metrics(log.parent)[-1]["step"] if log.exists() else 0
        calls.append(done)
        if done == at and calls.count(at) == 5:  # after some responses of the step
            signal.raise_signal(signal.SIGINT)
        plain(self)

    monkeypatch.setattr(Interruption, "check", ask)
    with pytest.raises(Interrupted):
        trainer.run()
    assert metrics(tmp_path / "run")[-1]["step"] == at
    monkeypatch.setattr(Interruption, "check", plain)
    Trainer(config(tmp_path), tmp_path / "run", resume=True).run()
    same(tmp_path / "run", undisturbed)


def test_sigterm_leaves_a_checkpoint_and_exit_code_130(tmp_path: Path, undisturbed: Path) -> None:
    file = write_toml(tmp_path / "config.json", config(tmp_path))
    command = [sys.executable, "-m", "agro", "train", str(file), "--out", str(tmp_path / "run")]
    said = tmp_path / "stderr"
    running = forked.Process(command, stdout=tmp_path / "stdout", stderr=said)
    log = tmp_path / "run" / "metrics.jsonl"
    for _ in range(2400):
        if log.exists() and log.read_text().count("\n") >= 3:
            break
        time.sleep(0.025)
    running.send_signal(signal.SIGTERM)
    code, errors = running.wait(60), said.read_text()
    assert code == 130, errors
    assert "--resume" in errors
    assert "Traceback" not in errors
    resumed = forked.run([*command, "--resume"], timeout=120)
    assert resumed.returncode == 0, resumed.stderr
    same(tmp_path / "run", undisturbed)


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path, undisturbed: Path) -> None:
    before = weights(undisturbed)
    made = RunConfig.load(undisturbed / "config.json")
    Trainer(made, undisturbed, resume=True).run()
    assert weights(undisturbed) == before
