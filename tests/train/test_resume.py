"""A run that is stopped, however, and resumed is the run that was never stopped. What may change when it goes
on, also of its store.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import signal
import sqlite3
import sys
import time
from contextlib import suppress
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from rounding import rounding
from safetensors.torch import load_file
from tiers import some
from tiny_runs import (
    REWARDS,
    InterruptAfter,
    done,
    fill_store,
    metrics,
    tiny,
    weights,
    write_prompts,
    write_toml,
)
from typer.testing import CliRunner

from agro.api.reporting_trainer import Trainer
from agro.cli import app
from agro.config import RunConfig
from agro.errors import Interrupted, Refused
from agro.logs.importing import import_files
from agro.pages.run.card import write_cards
from agro.runs.progress import Progress, RunActivity
from agro.store import Store
from agro.train.monitors import Monitor, View


def config(tmp_path: Path, fresh: int = 7, mixed: int = 8, every: int = 3) -> RunConfig:
    """Two phases of so many steps, fresh and stored groups mixed, the second phase's reference its own start;
    `every`: steps between checkpoints."""
    second = {"data": {"replay": 0.5}, "train": {"steps": mixed, "updates": 2}, "objective": {"beta": 0.3}}
    phases = [{"name": "fresh", "train": {"steps": fresh}}, {"name": "mixed", **second}]
    return tiny(
        tmp_path,
        phases=phases,
        policy__reference="phase",
        train__checkpoint_every=every,
        train__micro_batch=4,  # several passes a step
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


@pytest.mark.parametrize("at", some([0, 1, 2, 7, 6, 8, 12], every=3))
def test_interrupted_in_the_middle_of_a_step(at: int, tmp_path: Path, undisturbed: Path, monkeypatch) -> None:
    """Ctrl-C while step `at` + 1 samples or computes: a checkpoint of step `at` is left."""
    trainer = Trainer(config(tmp_path), tmp_path / "run")
    plain, calls, log = RunActivity.check, [], tmp_path / "run" / "metrics.jsonl"

    def ask(self: RunActivity) -> None:
        done = metrics(log.parent)[-1]["step"] if log.exists() else 0
        calls.append(done)
        if done == at and calls.count(at) == 5:  # after some responses of the step
            signal.raise_signal(signal.SIGINT)
        plain(self)

    monkeypatch.setattr(RunActivity, "check", ask)
    with pytest.raises(Interrupted):
        trainer.run()
    assert metrics(tmp_path / "run")[-1]["step"] == at
    monkeypatch.setattr(RunActivity, "check", plain)
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
    assert "Traceback" not in errors
    _, _, printed = errors.partition("continue with: agro ")
    assert shlex.split(printed) == ["train", str(tmp_path / "run"), "--resume"]
    elsewhere = tmp_path / "elsewhere"  # relative paths begin where the run began
    elsewhere.mkdir()
    resumed = forked.run([*command[:3], *shlex.split(printed)], cwd=elsewhere, timeout=120)
    assert resumed.returncode == 0, resumed.stderr
    same(tmp_path / "run", undisturbed)


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path, undisturbed: Path) -> None:
    before = weights(undisturbed)
    made = RunConfig.load(undisturbed / "config.json")
    Trainer(made, undisturbed, resume=True).run()
    assert weights(undisturbed) == before


def wait_for(file: Path, words: str) -> None:
    for _ in range(2400):
        if file.exists() and words in file.read_text():
            return
        time.sleep(0.025)
    raise AssertionError(f"{words!r} isn't in {file}")


def test_ctrl_c_stops_between_tokens_of_a_response(tmp_path: Path) -> None:
    """Greedy responses of 100,000 tokens, which take minutes; a checkpoint of the step before is left."""
    made = tiny(
        tmp_path,
        policy__new__context=2**17,
        sampler={"n": 2, "max_new": 100_000, "temperature": 0.0},
        train__groups=1,
        guard__stage_seconds=0.0,
    )
    file = write_toml(tmp_path / "config.json", made)
    said, store = tmp_path / "stderr", tmp_path / "run" / "store.db"
    command = [sys.executable, "-m", "agro", "train", str(file), "--out", str(tmp_path / "run")]
    running = forked.Process(command, stdout=tmp_path / "stdout", stderr=said)
    while not store.exists():
        time.sleep(0.1)
    time.sleep(2)
    assert running.poll() is None, said.read_text()
    began = time.monotonic()
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130, said.read_text()
    assert time.monotonic() - began < 50
    assert "stopping, with a checkpoint, when sampling can be interrupted or ends" in said.read_text()
    assert "interrupted after step 0; continue with: agro train " in said.read_text()


SLOW = """
import pathlib, time

def slow(completions):
    if pathlib.Path("slowly").exists():
        pathlib.Path("begun").touch()
        time.sleep(300)
    return [c.count("7") / 3 for c in completions]
"""


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    """While a reward takes five minutes, which nothing interrupts; the last checkpoint is gone on from."""
    (tmp_path / "slow.py").write_text(SLOW)
    made = tiny(tmp_path, reward={"name": "slow:slow", "timeout": 400.0}, train__checkpoint_every=1)
    file = write_toml(tmp_path / "config.json", made)
    command = [sys.executable, "-m", "agro", "train", str(file), "--out"]
    plain = forked.run([*command, str(tmp_path / "plain")], cwd=tmp_path, timeout=120)
    assert plain.returncode == 0, plain.stderr
    first = forked.run([*command, str(tmp_path / "run"), "train.steps=3"], cwd=tmp_path, timeout=120)
    assert first.returncode == 0, first.stderr
    (tmp_path / "slowly").touch()
    said = tmp_path / "stderr"
    again = [*command, str(tmp_path / "run"), "--resume"]
    running = forked.Process(again, cwd=tmp_path, stdout=tmp_path / "stdout", stderr=said)
    while not (tmp_path / "begun").exists():
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    wait_for(said, "when scoring can be interrupted or ends. Again: stop at once")
    running.send_signal(signal.SIGINT)
    assert running.wait(30) == 130, said.read_text()
    assert "agro: interrupted" in said.read_text()
    (tmp_path / "slowly").unlink()
    resumed = forked.run(again, cwd=tmp_path, timeout=120)
    assert resumed.returncode == 0, resumed.stderr
    same(tmp_path / "run", tmp_path / "plain")


def children() -> set[int]:
    """The processes that this one has begun and that aren't gone yet."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it is gone
            _, _, after_name = stat.read_text().rpartition(")")
            if int(after_name.split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


class Children(Monitor):
    """What processes there are after each step."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def after(self, view: View) -> None:
        self.seen |= children()


@pytest.mark.skipif(not Path("/proc").exists(), reason="it looks for processes in /proc")
def test_an_interrupted_run_leaves_no_process_behind(tmp_path: Path) -> None:
    """A copy of the rewards is called in a process of its own, which that of `tiny` isn't."""
    copy = shutil.copy(REWARDS, tmp_path / "copy.py")
    before, during = children(), Children()
    made = tiny(tmp_path, reward={"name": f"{copy}:digits"})
    with pytest.raises(Interrupted) as stopped:
        Trainer(made, tmp_path / "run", monitors=[during, InterruptAfter(2)]).run()
    assert during.seen - before
    assert stopped.tb is not None  # it keeps the run's objects: what ends them isn't that they are collected
    assert not children() - before


def test_what_ends_before_a_stop_is_named_and_the_stage_is_in_a_file(tmp_path: Path) -> None:
    said = io.StringIO()
    for stage, expected in (
        (None, "the model is loaded"),
        ("sampling", "sampling can be interrupted or ends"),
    ):
        with RunActivity(Progress(0, said), file=tmp_path / "stage") as activity:
            if stage:
                activity.stage(stage, 1, 2)
                assert (
                    tmp_path / "stage"
                ).read_text() == "sampling 1/2"  # for the page of a run without a step
            activity.check()
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(Interrupted):
                activity.check()
        assert f"stopping, with a checkpoint, when {expected}. " in said.getvalue()


def run(folder: Path, name: str = "run", resume: bool = False, **changes) -> Path:
    return Trainer(tiny(folder, **changes), folder / name, resume=resume).run()


def test_more_steps_are_those_of_a_longer_run(tmp_path: Path) -> None:
    """Each of several passes."""
    longer = run(tmp_path, "longer", train__steps=7, train__micro_batch=4)
    run(tmp_path, train__steps=4, train__micro_batch=4)
    out = run(tmp_path, resume=True, train__steps=7, train__micro_batch=4)
    assert weights(out) == weights(longer)
    assert [m["step"] for m in metrics(out)] == list(range(1, 8))
    with pytest.raises(Refused, match="last phase had 7, now it has 5"):
        run(tmp_path, resume=True, train__steps=5, train__micro_batch=4)


def test_the_last_of_several_phases_may_grow(tmp_path: Path) -> None:
    def phases(first: int, last: int) -> list:
        return [{"name": "a", "train": {"steps": first}}, {"name": "b", "train": {"steps": last}}]

    longer = run(tmp_path, "longer", phases=phases(2, 4))
    run(tmp_path, phases=phases(2, 2))
    assert weights(run(tmp_path, resume=True, phases=phases(2, 4))) == weights(longer)
    with pytest.raises(Refused, match=r"phases\.a\.train\.steps was 2, now it is 3$"):
        run(tmp_path, resume=True, phases=phases(3, 4))


def test_a_schedule_over_other_steps_is_told(tmp_path: Path, capsys) -> None:
    run(tmp_path, train__steps=3, train__schedule="linear")
    run(tmp_path, resume=True, train__steps=4, train__schedule="linear")
    assert "train.schedule = linear now runs over 4 steps, not 3" in capsys.readouterr().err


def test_a_run_that_ended_early_goes_on_where_its_rule_changes(tmp_path: Path) -> None:
    common = {
        "data__eval_prompts": write_prompts(tmp_path / "held.jsonl", range(60, 66)),
        "evaluate__every": 1,
        "train__steps": 5,
    }
    run(tmp_path, evaluate__target=-1.0, **common)  # reached at once
    assert metrics(tmp_path / "run")[-1]["step"] == 1
    assert metrics(run(tmp_path, resume=True, evaluate__target=-1.0, **common))[-1]["step"] == 1
    assert metrics(run(tmp_path, resume=True, **common))[-1]["step"] == 5


def stored(folder: Path, steps: int) -> RunConfig:
    return tiny(
        folder, data__prompts=None, data__store=str(folder / "log.db"), data__replay=1.0, train__steps=steps
    )


def test_a_run_resumes_on_what_is_left(tmp_path: Path) -> None:
    """8 groups of 4 responses, of which 4 groups are left; a step trains on 4 groups."""
    fill_store(tmp_path / "log.db", groups=8)
    config = stored(tmp_path, 6)
    with pytest.raises(Interrupted):
        Trainer(config, tmp_path / "run", monitors=[InterruptAfter(4)]).run()
    assert done(tmp_path / "run") == 4
    with Store.open(tmp_path / "log.db", timeout=0.5) as store:
        run = json.loads((tmp_path / "run/config.json").read_text())["run"]
        ids = store.experience.find(prompt_id=store.groups()[0].prompt_id)
        for group in store.groups()[1:4]:
            ids += store.experience.find(prompt_id=group.prompt_id)
        [trained] = store.draws.trained(ids)
        assert (trained.run, trained.samples) == (run, 16)  # in 4 steps each group was drawn twice
        store.imports.forget(ids)
        left = {s.id for s in store.samples()}
    Trainer(config, tmp_path / "run", resume=True).run()
    assert [m["step"] for m in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    with Store.open(tmp_path / "log.db") as store:
        drawn = store.draws.drawn(run)
    assert {d.sample for d in drawn if d.step > 4} == left
    assert len(left) == 16
    assert sum(d.source == "(forgotten)" for d in drawn) == 32
    assert not any(d.source == "(forgotten)" for d in drawn if d.step > 4)


def test_a_run_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    fill_store(tmp_path / "log.db", groups=8)
    config = stored(tmp_path, 4)
    with pytest.raises(Interrupted):
        Trainer(config, tmp_path / "run", monitors=[InterruptAfter(2)]).run()
    with Store.open(tmp_path / "log.db", timeout=0.5) as store:
        store.imports.forget(store.experience.find(source="someone"))
    with pytest.raises(Refused, match=r"log\.db"):
        Trainer(config, tmp_path / "run", resume=True).run()


def test_the_card_names_files_and_licenses(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{g}>", "response": str(i), "reward": i % 2, "source": "bob"}
        for g in range(4)
        for i in range(3)
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Store.open(tmp_path / "log.db") as store:
        import_files(store, [path], license="CC-BY-4.0")
    run = Trainer(stored(tmp_path, 1), tmp_path / "run").run()
    write_cards(run)
    card = (run / "model/README.md").read_text()
    assert "imported data: `bob`: 12 samples of `log.jsonl` (SHA-256 " in card
    assert "license: `CC-BY-4.0`" in card


@pytest.mark.parametrize("ending", ["jsonl.gz", "parquet"])
def test_an_exported_store_trains_elsewhere_with_the_same_gradients(tmp_path: Path, ending: str) -> None:
    """The same samples are drawn at each step; rounding differs, since those of a run's own step are summed
    in the order of their numbers, and imported ones in that of their ids."""
    made = Trainer(tiny(tmp_path, train__steps=3), tmp_path / "made").run() / "store.db"
    file, imported = tmp_path / f"export.{ending}", tmp_path / "imported.db"
    for command in (["export", str(made), str(file)], ["import", str(file), "--store", str(imported)]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    rows, drawn, weights = [], [], []
    for name, path in (("here", made), ("elsewhere", imported)):
        log = {"data__store": str(path), "data__replay": 1.0, "train__steps": 3, "train__lr": 3e-3}
        trainer = Trainer(tiny(tmp_path, **log), tmp_path / name)
        run = trainer.run()
        rows.append([row for row in metrics(run) if row["step"]])
        weights.append(load_file(run / "model" / "model.safetensors"))
        with Store.open(path, read_only=True) as store:
            last = store.tables.run("SELECT run FROM draws ORDER BY rowid DESC LIMIT 1")[0][0]
            drawn.append({(draw.step, draw.sample) for draw in store.draws.drawn(last)})
    assert drawn[0] == drawn[1]
    assert all(row["grad_norm"] > 0.1 for row in rows[0])
    for key in ("loss", "grad_norm", "reward_mean", "tokens"):
        here, elsewhere = ([row[key] for row in run] for run in rows)
        np.testing.assert_allclose(elsewhere, here, **rounding(here))
    torch.testing.assert_close(weights[1], weights[0], **rounding(*weights[0].values()))
