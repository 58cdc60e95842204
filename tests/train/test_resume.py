"""A run that is stopped, however, and resumed is the run that was never stopped. What may change when it goes
on, also of its store."""

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
from pathlib import Path

import forked
import numpy as np
import pytest
import tiny_runs
import torch
from processes import children, until
from rounding import rounding
from safetensors.torch import load_file, save_file
from tiers import some
from tiny_runs import (
    REWARDS,
    InterruptAfter,
    StopAfter,
    done,
    interrupted,
    log_alone,
    metrics,
    run_tiny,
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
from agro.models.policy import Policy
from agro.runs.progress import RunActivity
from agro.store import Store
from agro.train import learner
from agro.train.learner import Local
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


def same(a: Path, b: Path) -> None:
    tiny_runs.same(a, b)
    assert draws(a) == draws(b)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    return Trainer(config(folder), folder / "run").run()


@pytest.mark.parametrize("at", some([0, 1, 2, 7, 6, 8, 12], every=3))
def test_interrupted_in_the_middle_of_a_step(at: int, tmp_path: Path, undisturbed: Path, monkeypatch) -> None:
    """Ctrl-C while step `at` + 1 samples or computes: a checkpoint of step `at` is left."""
    out, plain, calls = tmp_path / "run", RunActivity.check, []

    def ask(self: RunActivity) -> None:
        calls.append(done(out))
        if calls[-1] == at and calls.count(at) == 5:  # after some responses of the step
            signal.raise_signal(signal.SIGINT)
        plain(self)

    monkeypatch.setattr(RunActivity, "check", ask)
    with pytest.raises(Interrupted):
        Trainer(config(tmp_path), out).run()
    assert done(out) == at
    monkeypatch.setattr(RunActivity, "check", plain)
    Trainer(config(tmp_path), out, resume=True).run()
    same(out, undisturbed)


class Command:
    """`agro train CONFIG --out FOLDER/run …` in a process of its own, in FOLDER."""

    def __init__(self, made: RunConfig, folder: Path) -> None:
        file = write_toml(folder / "config.json", made)
        self.said, self.folder = folder / "stderr", folder
        self.arguments = [sys.executable, "-m", "agro", "train", str(file), "--out", str(folder / "run")]

    def start(self, *more: str) -> forked.Process:
        given = {"cwd": self.folder, "stdout": self.folder / "stdout", "stderr": self.said}
        return forked.Process([*self.arguments, *more], **given)

    def finish(self, *more: str) -> None:
        assert self.start(*more).wait(120) == 0, self.said.read_text()


def test_sigterm_leaves_a_checkpoint_and_exit_code_130(tmp_path: Path, undisturbed: Path) -> None:
    command = Command(config(tmp_path), tmp_path)
    running = command.start()
    log = tmp_path / "run" / "metrics.jsonl"
    until(lambda: log.exists() and log.read_text().count("\n") >= 3)
    running.send_signal(signal.SIGTERM)
    code, errors = running.wait(60), command.said.read_text()
    assert code == 130, errors
    assert "Traceback" not in errors
    _, _, printed = errors.partition("continue with: agro ")
    assert shlex.split(printed) == ["train", str(tmp_path / "run"), "--resume"]
    elsewhere = tmp_path / "elsewhere"  # relative paths begin where the run began
    elsewhere.mkdir()
    resumed = forked.run([*command.arguments[:3], *shlex.split(printed)], cwd=elsewhere, timeout=120)
    assert resumed.returncode == 0, resumed.stderr
    same(tmp_path / "run", undisturbed)


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path, undisturbed: Path) -> None:
    before = weights(undisturbed)
    Trainer(RunConfig.load(undisturbed / "config.json"), undisturbed, resume=True).run()
    assert weights(undisturbed) == before


def test_ctrl_c_stops_between_tokens_of_a_response(tmp_path: Path) -> None:
    """Greedy responses of 100,000 tokens, which take minutes; a checkpoint of the step before is left."""
    long = {"sampler": {"n": 2, "max_new": 100_000, "temperature": 0.0}, "policy__new__context": 2**17}
    command = Command(tiny(tmp_path, **long, train__groups=1, guard__stage_seconds=0.0), tmp_path)
    running = command.start()
    until((tmp_path / "run" / "store.db").exists)
    time.sleep(2)
    assert running.poll() is None, command.said.read_text()
    began = time.monotonic()
    running.send_signal(signal.SIGINT)
    code, errors = running.wait(60), command.said.read_text()
    assert code == 130, errors
    assert time.monotonic() - began < 50
    assert "stopping, with a checkpoint, when sampling can be interrupted or ends" in errors
    assert "interrupted after step 0; continue with: agro train " in errors


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
    command = Command(made, tmp_path)
    command.finish()
    (tmp_path / "run").rename(tmp_path / "plain")
    command.finish("train.steps=3")
    (tmp_path / "slowly").touch()
    running = command.start("--resume")
    until((tmp_path / "begun").exists)
    running.send_signal(signal.SIGINT)
    until(lambda: "when scoring can be interrupted or ends. Again: stop" in command.said.read_text())
    running.send_signal(signal.SIGINT)
    assert running.wait(30) == 130, command.said.read_text()
    assert "agro: interrupted" in command.said.read_text()
    (tmp_path / "slowly").unlink()
    command.finish("--resume")
    same(tmp_path / "run", tmp_path / "plain")


class Children(Monitor):
    """What processes there are after each step."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def after(self, view: View) -> None:
        self.seen |= children(os.getpid())


@pytest.mark.skipif(not Path("/proc").exists(), reason="it looks for processes in /proc")
def test_an_interrupted_run_leaves_no_process_behind(tmp_path: Path) -> None:
    """A copy of the rewards is called in a process of its own, which that of `tiny` isn't."""
    copy = shutil.copy(REWARDS, tmp_path / "copy.py")
    before, during = children(os.getpid()), Children()
    made = tiny(tmp_path, reward={"name": f"{copy}:digits"})
    with pytest.raises(Interrupted) as stopped:
        Trainer(made, tmp_path / "run", monitors=[during, InterruptAfter(2)]).run()
    assert during.seen - before
    assert stopped.tb is not None  # it keeps the run's objects: what ends them isn't that they are collected
    assert not children(os.getpid()) - before


def test_what_ends_before_a_stop_is_named_and_the_stage_is_in_a_file(tmp_path: Path) -> None:
    said = io.StringIO()
    file = tmp_path / "stage"  # for the page of a run without a step
    for stage, expected in (
        (None, "the model is loaded"),
        ("sampling", "sampling can be interrupted or ends"),
    ):
        with RunActivity(file=file, stream=said) as activity:
            if stage:
                activity.stage(stage, 1, 2)
                assert file.read_text() == "sampling 1/2"
            activity.check()
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(Interrupted):
                activity.check()
        assert f"stopping, with a checkpoint, when {expected}. " in said.getvalue()


def test_more_steps_are_those_of_a_longer_run(tmp_path: Path) -> None:
    """Each of several passes."""

    def run(steps: int, name: str = "run", resume: bool = False) -> Path:
        return run_tiny(tmp_path, name, resume=resume, train__steps=steps, train__micro_batch=4)

    longer = run(7, "longer")
    run(4)
    out = run(7, resume=True)
    assert weights(out) == weights(longer)
    assert [m["step"] for m in metrics(out)] == list(range(1, 8))
    with pytest.raises(Refused, match="last phase had 7, now it has 5"):
        run(5, resume=True)


def test_the_last_of_several_phases_may_grow(tmp_path: Path) -> None:
    def run(first: int, last: int, name: str = "run", resume: bool = False) -> Path:
        phases = [{"name": "a", "train": {"steps": first}}, {"name": "b", "train": {"steps": last}}]
        return run_tiny(tmp_path, name, resume=resume, phases=phases)

    longer = run(2, 4, "longer")
    run(2, 2)
    assert weights(run(2, 4, resume=True)) == weights(longer)
    with pytest.raises(Refused, match=r"phases\.a\.train\.steps was 2, now it is 3$"):
        run(3, 4, resume=True)


def test_a_schedule_over_other_steps_is_told(tmp_path: Path, capsys) -> None:
    run_tiny(tmp_path, train__steps=3, train__schedule="linear")
    run_tiny(tmp_path, resume=True, train__steps=4, train__schedule="linear")
    assert "train.schedule = linear now runs over 4 steps, not 3" in capsys.readouterr().err


def stored(folder: Path, steps: int) -> RunConfig:
    return tiny(folder, data=log_alone(folder), train__steps=steps)


def test_a_run_resumes_on_what_is_left(tmp_path: Path) -> None:
    """8 groups of 4 responses, of which 4 groups are left; a step trains on 4 groups."""
    config = stored(tmp_path, 6)
    interrupted(config, tmp_path / "run", 4)
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
    config = stored(tmp_path, 4)
    interrupted(config, tmp_path / "run", 2)
    with Store.open(tmp_path / "log.db", timeout=0.5) as store:
        store.imports.forget(store.experience.find(source="someone"))
    with pytest.raises(Refused, match=r"log\.db"):
        Trainer(config, tmp_path / "run", resume=True).run()


def test_an_exported_store_trains_elsewhere_with_the_same_gradients(tmp_path: Path) -> None:
    """The same samples are drawn at each step; rounding differs, since those of a run's own step are summed
    in the order of their numbers, and imported ones in that of their ids."""
    made = run_tiny(tmp_path, "made", train__steps=3) / "store.db"
    stores = {"here": made}
    for ending in ("jsonl.gz", "parquet"):
        file, stores[ending] = tmp_path / f"export.{ending}", tmp_path / f"{ending}.db"
        for command in (["export", made, file], ["import", file, "--store", stores[ending]]):
            result = CliRunner().invoke(app, [str(part) for part in command])
            assert result.exit_code == 0, result.output
    rows, drawn, learned = {}, {}, {}
    for name, path in stores.items():
        log = {"data__store": str(path), "data__replay": 1.0, "train__lr": 3e-3}
        trainer = Trainer(tiny(tmp_path, **log, train__steps=3), tmp_path / name)
        run = trainer.run()
        rows[name] = [row for row in metrics(run) if row["step"]]
        learned[name] = load_file(run / "model" / "model.safetensors")
        with Store.open(path, read_only=True) as store:
            drawn[name] = {(draw.step, draw.sample) for draw in store.draws.drawn(trainer.folder.id)}
    assert all(row["grad_norm"] > 0.1 for row in rows["here"])
    for ending in ("jsonl.gz", "parquet"):
        assert drawn[ending] == drawn["here"]
        for key in ("loss", "grad_norm", "reward_mean", "tokens"):
            here, elsewhere = ([row[key] for row in rows[name]] for name in ("here", ending))
            np.testing.assert_allclose(elsewhere, here, **rounding(here))
        torch.testing.assert_close(learned[ending], learned["here"], **rounding(*learned["here"].values()))


def test_a_run_that_ended_early_in_a_middle_phase_keeps_the_reference_of_that_phase(tmp_path: Path) -> None:
    """It stays ended where nothing that ends it changes, though what is shown does."""

    def run(last: int, name: str = "run", *monitors: StopAfter, **changes) -> Path:
        steps = {"a": 2, "b": 5, "c": last}
        phases = [{"name": phase, "train": {"steps": n}} for phase, n in steps.items()]
        few = {"train__checkpoint_every": 1, "train__keep": 1}
        return run_tiny(tmp_path, name, *monitors, phases=phases, policy__reference="phase", **few, **changes)

    out = run(2, "run", StopAfter(5))
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-00000002", "step-00000005"]
    assert done(run(2, resume=True, train__show_every=1)) == 5
    assert weights(run(3, resume=True)) == weights(run(3, "whole"))


def test_a_phase_has_its_own_limits_of_a_forward_pass(tmp_path: Path) -> None:
    phases = [{"name": "a", "train": {"micro_batch": 8}}, {"name": "b", "train": {"micro_batch": 2}}]
    out = run_tiny(tmp_path, phases=phases, train__steps=2)
    read = {s: json.loads((out / f"checkpoints/step-0000000{s}/learner.json").read_text()) for s in (2, 4)}
    assert read == {2: {"sequences": 8, "tokens": None}, 4: {"sequences": 2, "tokens": None}}


def test_a_checkpoint_of_other_weights_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    local = Local(Policy.load(tiny(tmp_path).policy), None, print)
    with pytest.raises(Refused, match=r": model: .*\ba, "):
        local.load(tmp_path, 0)


def test_no_checkpoint_is_written_between_the_updates_of_a_step(tmp_path: Path, monkeypatch) -> None:
    """The second update of step 2 doesn't fit into memory, for the optimizer has its state by then."""
    config = tiny(tmp_path, train__updates=2, train__checkpoint_every=3, train__steps=4)
    plain = Trainer(config, tmp_path / "plain").run()
    calls: list[int] = []
    real = learner.backward

    def backward(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise Refused("out of memory on a single sequence")
        return real(*args, **kwargs)

    monkeypatch.setattr(learner, "backward", backward)
    with pytest.raises(Refused, match="out of memory"):
        Trainer(config, tmp_path / "run").run()
    assert weights(Trainer(config, tmp_path / "run", resume=True).run()) == weights(plain)
