"""A rank that is killed or stopped in the middle of a run, which torchrun starts again. Linux only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_runs import metrics, tiny, write_toml

from agro.api.reporting_trainer import Trainer

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds ranks in /proc"),
]
ROOT = Path(__file__).parents[2]
STEPS = 12
SECONDS = 10.0


@contextmanager
def launched(folder: Path, config: Path) -> Iterator[subprocess.Popen[str]]:
    """Two ranks, which torchrun starts once more."""
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--standalone"]
    command = ["-m", "torch.distributed.run", *options, "-m", "agro", "train", str(config)]
    launcher = subprocess.Popen(
        [sys.executable, *command, "--out", "run", "--resume"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=(folder / "stderr").open("w"),
        text=True,
    )
    try:
        yield launcher
    finally:
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait(60)


def rank_of(launcher: int, number: int) -> int | None:
    """The process of a rank that `launcher` has started; None where there is none."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it ended meanwhile
        if parent == launcher and b"RANK=%d" % number in variables:
            return int(process.name)
    return None


def until(holds: Callable[[], object], seconds: float = 300.0) -> float:
    """Seconds until something holds."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds
        time.sleep(0.05)
    return time.monotonic() - began


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_vanishes_is_named_in_time_and_the_run_goes_on(number: int, tmp_path: Path) -> None:
    config = tiny(tmp_path, train__steps=STEPS, train__rank_seconds=SECONDS)
    alone = Trainer(config, tmp_path / "alone").run()
    file, run = write_toml(tmp_path / "config.json", config), tmp_path / "run"
    with launched(tmp_path, file) as launcher:
        until(lambda: (run / "metrics.jsonl").exists() and len(metrics(run)) >= 3)
        first, second = (rank_of(launcher.pid, rank) for rank in (0, 1))
        os.kill(second, number)
        took = until(lambda: not Path(f"/proc/{first}").exists())
        assert took <= SECONDS + 1, took  # 1: the process ends, on a busy machine
        assert launcher.wait(600) == 0
    errors = (tmp_path / "stderr").read_text()
    assert "error: rank 1 on " in errors
    assert [step["step"] for step in metrics(run)] == list(range(1, STEPS + 1))
    one, two = (load_file(folder / "model" / "model.safetensors") for folder in (alone, run))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-4
