"""What a disk does to a run: it is full, it can only be read, it damages a checkpoint or the store."""

from __future__ import annotations

import os
import random
import resource
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_resume import config as two_phases
from test_resume import same
from tiers import some
from tiny_runs import fill_store, metrics, run_tiny, tiny, weights

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Refused, Unwritable
from agro.store import Store, recover
from agro.train.learner import Local


def config(folder: Path) -> RunConfig:
    """7 steps. The second phase, whose reference is its start, begins after 3. Checkpoints: 3, 5 and 7."""
    return two_phases(folder, fresh=3, mixed=4, every=2)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    return Trainer(config(folder), folder / "run").run()


def damage(checkpoint: Path, how: str, rng: random.Random) -> str:
    """Damage a checkpoint, or its row in the store; returns the name of what is damaged."""
    if how == "row":
        with sqlite3.connect(checkpoint.parents[1] / "store.db") as db:
            db.execute("UPDATE commits SET step = 6 WHERE step = 7")
        return "row 4 of the commits"
    if how == "no folder":
        shutil.rmtree(checkpoint)
        return checkpoint.name
    file = checkpoint / rng.choice(["model.safetensors", "optimizer.safetensors", "position.json"])
    content = bytearray(file.read_bytes())
    if how == "flipped byte":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
    elif how == "cut off":
        file.write_bytes(content[: rng.randrange(len(content))])
    elif how == "no file":
        file.unlink()
    else:
        for each in checkpoint.iterdir():
            each.unlink()
    return f"{checkpoint.name}/{'model.safetensors' if how == 'empty' else file.name}"


@pytest.fixture
def run(tmp_path: Path, undisturbed: Path) -> Path:
    """A copy of the run, to be damaged."""
    return shutil.copytree(undisturbed, tmp_path / "run")


def resume(run: Path, undisturbed: Path) -> None:
    Trainer(config(undisturbed.parent), run, resume=True).run()


@pytest.mark.parametrize(
    "how", [*some(["flipped byte", "cut off", "no file", "no folder", "empty"], every=2), "row"]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_gone_back_to(
    how: str, run: Path, undisturbed: Path, capsys
) -> None:
    named = damage(run / "checkpoints" / "step-00000007", how, random.Random(how))
    resume(run, undisturbed)
    said = capsys.readouterr().err
    assert named in said
    assert "step 5" in said
    same(run, undisturbed)
    with Store.open(run / "store.db") as store:
        assert bool(store.tables.damage()) == (how == "row")  # which stays there


def test_a_damaged_reference_is_made_again_or_named(run: Path, undisturbed: Path) -> None:
    """Step 3 is the reference of steps 4 to 7: without it only the end of the run, step 7, is whole."""
    damage(run / "checkpoints" / "step-00000003", "flipped byte", random.Random(0))
    resume(run, undisturbed)
    same(run, undisturbed)
    damage(run / "checkpoints" / "step-00000007", "cut off", random.Random(0))
    with pytest.raises(Refused, match=r"(?s)checkpoint.*step-00000007/.*step-00000003/.*step-00000003/"):
        resume(run, undisturbed)


def test_a_damaged_draw_is_refused_by_its_row(run: Path, undisturbed: Path) -> None:
    file = run / "store.db"
    with sqlite3.connect(file) as db:
        db.execute("UPDATE draws SET sample = sample + 1 WHERE rowid = 5")
    with pytest.raises(Refused, match=r"1 draw not as written: draw 5.*agro store recover"):
        resume(run, undisturbed)
    assert recover(file, run / "new.db").lost_rows["draws"] == 1
    for beside in ("-wal", "-shm"):  # a log of another file would spoil the new one
        (run / f"store.db{beside}").unlink(missing_ok=True)
    (run / "new.db").replace(file)
    damage(run / "checkpoints" / "step-00000007", "no file", random.Random(0))
    resume(run, undisturbed)
    assert weights(run) == weights(undisturbed)


def test_a_damaged_line_of_the_metrics_is_named_and_left_out(run: Path, undisturbed: Path, capsys) -> None:
    log = run / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b"{", b"\xff")
    log.write_bytes(b"".join(lines))
    resume(run, undisturbed)
    assert "metrics.jsonl:4; dropped" in capsys.readouterr().err
    assert [m["step"] for m in metrics(run)] == [i for i in range(8) if i != 3]


def test_training_leaves_a_damaged_sample_out_and_counts_it(tmp_path: Path, capsys) -> None:
    """8 groups of 4 and one step that draws all of them.

    Group 1 loses sample 5; group 2, all but one of its samples.
    """
    log = fill_store(tmp_path / "log.db")
    with sqlite3.connect(tmp_path / "log.db") as db:
        db.execute("UPDATE samples SET response = response || '1' WHERE id IN (5, 9, 10, 11)")
    (only,) = metrics(run_tiny(tmp_path, **log, train__groups=8, train__steps=1))
    assert only["dropped_reasons"] == {"damaged": 4, "group too small after others were dropped": 1}
    assert only["dropped"] == 5
    assert f"damaged: sample 5 of {tmp_path / 'log.db'}; dropped from step 1" in capsys.readouterr().err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """4 MiB of their own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system isn't permitted here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill(disk: Path, room: int) -> Path:
    """Leave `room` KiB."""
    ballast = disk / "ballast"
    ballast.write_bytes(b"x" * (shutil.disk_usage(disk).free - room * 1024))
    return ballast


def goes_on(run: Path, undisturbed: Path) -> None:
    assert not list(run.glob("checkpoints/.*"))
    resume(run, undisturbed)
    same(run, undisturbed)


@pytest.mark.parametrize("room", [0, 40, 150, 305, 340, 400])  # KiB: from not even config.json to some steps
def test_a_full_disk_is_named_and_the_run_goes_on_once_there_is_room(
    room: int, small_disk: Path, undisturbed: Path
) -> None:
    run, ballast = small_disk / "run", fill(small_disk, room)
    with pytest.raises(Unwritable, match=rf"{run}\S*: .*the disk is full.*make room"):
        Trainer(config(undisturbed.parent), run).run()
    ballast.unlink()
    goes_on(run, undisturbed)


def test_a_disk_that_fills_while_a_checkpoint_is_written(
    small_disk: Path, undisturbed: Path, monkeypatch
) -> None:
    run, ballast = small_disk / "run", []
    save = Local.save

    def no_room(self, folder):
        ballast.append(fill(small_disk, 12))  # for some of the files
        save(self, folder)

    monkeypatch.setattr(Local, "save", no_room)
    with pytest.raises(Unwritable, match=r"step-00000002: .*the disk is full.*make room"):
        Trainer(config(undisturbed.parent), run).run()
    monkeypatch.undo()
    ballast[0].unlink()
    goes_on(run, undisturbed)


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path) -> None:
    """A checkpoint that can't be written, without file rights.

    The optimizer's state has twice the size of the weights.
    """
    made = tiny(tmp_path, policy__new__hidden=128, train__steps=2)
    whole = Trainer(made, tmp_path / "whole").run()
    size = (whole / "checkpoints" / "step-00000002" / "optimizer.safetensors").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, limits[1]))
    try:
        words = "step-00000002: can't be written: a file may not grow that large"
        with pytest.raises(Unwritable, match=words):
            Trainer(made, tmp_path / "run").run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    Trainer(made, tmp_path / "run", resume=True).run()
    same(tmp_path / "run", whole)


def test_a_folder_that_can_only_be_read_is_named() -> None:
    with tempfile.TemporaryDirectory() as folder:  # that every user can get to
        Path(folder).chmod(0o755)
        made = tiny(Path(folder), reward__name="exact", train__steps=2)
        run = Trainer(made, Path(folder) / "run").run()
        files = [run, *run.rglob("*")]
        before = {f: f.read_bytes() for f in files if f.is_file()}
        for file in files:
            file.chmod(0o555 if file.is_dir() else 0o444)
            if not os.geteuid():
                os.chown(file, 65534, 65534)
        privileged = not os.geteuid()
        if privileged:  # whom the bits don't bind
            os.seteuid(65534)
        try:
            with pytest.raises(Unwritable, match=r"run: can't be written: it can only be read.*writable"):
                Trainer(made, run, resume=True).run()
        finally:
            if privileged:
                os.seteuid(0)
            for file in files:
                file.chmod(0o755)
        assert {f: f.read_bytes() for f in files if f.is_file()} == before
