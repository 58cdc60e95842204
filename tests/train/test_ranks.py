"""Training sharded over ranks with FSDP2, on the CPU: updates, checkpoints, runs that stop and resume, and a
rank that is killed or stopped, which torchrun starts again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from processes import children, is_running, until
from ranks_settings import SETTINGS, SPEC, TOGETHER
from safetensors.torch import load_file
from tiny_runs import logp_rounding, metrics, tiny, write_prompts, write_toml

from agro import config as configuration
from agro import objectives
from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.train.check import check_sharded

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)]), "OMP_NUM_THREADS": "1"}
SIZES = ("sample", pytest.param("complete", marks=pytest.mark.nightly))


def torchrun(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "text": True, "timeout": 400, "check": False}
    done = subprocess.run([*TORCHRUN, *arguments], cwd=cwd, env={**os.environ, **ENVIRONMENT}, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def ranks(count: int, *arguments: str, folder: Path) -> str:
    """Without torchrun's agent. Returns what rank 0 prints."""
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    output = Path(tempfile.mkdtemp(dir=folder))
    started = [
        forked.Process(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=output / f"stdout{rank}",
            stderr=output / f"stderr{rank}",
        )
        for rank in range(count)
    ]
    codes = [rank.wait(1800) for rank in started]
    assert codes == [0] * count, [(output / f"stderr{rank}").read_text()[-3000:] for rank in range(count)]
    return (output / "stdout0").read_text()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to start from: an adapter needs one."""
    folder = tmp_path_factory.mktemp("model") / "base"
    Policy.load(configuration.PolicyConfig(new=configuration.NewModel(**SPEC)), seed=0).save(folder)
    return folder


@pytest.mark.timeout(1800)  # the complete cases are 660 pairs of updates
@pytest.mark.parametrize("size", SIZES)
def test_updates_are_those_of_one_process_for_every_objective_and_setting(size: str, base, tmp_path) -> None:
    """Float64, micro-batches of three of eleven responses: two passes a rank, one of them over nothing."""
    found = json.loads(ranks(2, str(HERE / "ranks_settings.py"), size, str(base), folder=tmp_path))
    assert found["not_finite"] == ["raised", "raised"]  # on whichever rank the row is, and no rank hangs
    during, after = found["threads"]
    assert after < during or not Path("/proc").exists()  # the group of the calls has ended with its threads
    rows = found["cases"]
    assert {row["objective"].split()[0] for row in rows} == set(objectives.names())
    settings = {"sample": set(TOGETHER), "complete": set(SETTINGS)}[size]
    assert {row["setting"] for row in rows} == found["averaged"].keys() == settings
    for row in rows:
        bound = 1e-12
        if row["setting"] == "mixed":  # sums in float32, of the same bfloat16 products
            bound = 1e-6
        assert row["norm"] > 1e-3, row
        assert max(row["gradient"], row["weights"], row["reference"]) <= bound, row
        assert max(row["loss"], row["reported"], row["promised"]) <= bound * max(1.0, row["norm"]), row
    for setting, differences in found["averaged"].items():
        bound = 1e-2 if setting == "mixed" else 1e-12  # bfloat16 has 2⁻⁸ of a logit
        assert max(differences) <= bound, setting


@pytest.mark.parametrize("size", SIZES)
def test_a_checkpoint_is_continued_on_any_number_of_ranks(size: str, base: Path, tmp_path: Path) -> None:
    """Written by one process, by two and by three: each of them reads the same bits from it, and goes on."""
    script, alone = [str(HERE / "ranks_checkpoints.py"), size], tmp_path / "on1"
    found = {}
    for count in (1, 2, 3):
        others = [str(tmp_path / f"on{other}") for other in range(1, count)]
        printed = ranks(count, *script, str(base), str(tmp_path / f"on{count}"), *others, folder=tmp_path)
        found[count] = json.loads(printed)
    last = json.loads(ranks(1, *script, str(base), str(alone), str(tmp_path / "on3"), folder=tmp_path))
    assert found[2].pop("few") == found[3].pop("few") == [1.0, 2.0]
    for count in (2, 3):
        assert f"few: x: expected 6 values, got {6 // count}." in found[count].pop("not shared")
    assert found[2].pop("unwritable") == found[3].pop("unwritable") == "NotADirectoryError"
    for setting in found[1]:
        written = {str(tmp_path / f"on{count}"): found[count][setting]["written"] for count in found}
        expected = torch.tensor(found[1][setting]["resumed"][str(alone)]["after"])
        for run in (*found.values(), last):
            for folder, resumed in run[setting]["resumed"].items():
                assert resumed["read"] == written[folder], (setting, folder)
                difference = float((torch.tensor(resumed["after"]) - expected).abs().max())
                assert difference <= (1e-6 if setting == "mixed" else 1e-12), (setting, folder, difference)
    assert not list(tmp_path.glob("on*/*/*.metadata"))  # nor anything else but safetensors and JSON
    assert {file.suffix for file in tmp_path.glob("on*/*/*") if file.is_file()} == {".safetensors", ".json"}


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are measured on Linux")
def test_saving_and_loading_take_little_memory_beside_the_shards(tmp_path: Path) -> None:
    """Of a model and its moments of 227 MB on two ranks: at most a fifth of a rank's shards."""
    found = json.loads(ranks(2, str(HERE / "ranks_memory.py"), str(tmp_path / "step"), folder=tmp_path))
    for own in found:
        assert max(own["saving"], own["loading"]) <= 1.2, own


@pytest.mark.nightly
@pytest.mark.parametrize("adapter", [False, True])
def test_a_run_of_ten_steps_saves_resumes_and_ends_with_a_model(adapter: bool, tmp_path: Path) -> None:
    """Beside the same run in one process: equal up to the rounding of float32 sums in another order."""
    held = write_prompts(tmp_path / "held.jsonl", range(60, 80))
    settings: dict[str, Any] = {"data__eval_prompts": held, "evaluate__every": 5}
    if adapter:
        Policy.load(tiny(tmp_path).policy, seed=0).save(tmp_path / "base")
        settings |= {
            "policy": {"model": str(tmp_path / "base"), "lora": {"rank": 2}, "cache_reference": True},
            "train__gradient_checkpointing": True,
            "train__weights_average": 0.5,
            "evaluate__keep_best": True,
        }
    alone = Trainer(tiny(tmp_path, train__steps=10, **settings), tmp_path / "alone").run()
    for steps in (6, 10):
        config = write_toml(tmp_path / f"{steps}.json", tiny(tmp_path, train__steps=steps, **settings))
        resume = ["--resume"] if steps == 10 else []
        torchrun("-m", "agro", "train", str(config), "--out", "sharded", *resume, cwd=tmp_path)
    sharded = tmp_path / "sharded"
    assert [m["step"] for m in metrics(sharded)] == list(range(11))
    one, two = (load_file(run / "model" / "model.safetensors") for run in (alone, sharded))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-4
    for expected, found in zip(metrics(alone)[1:], metrics(sharded)[1:], strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-2, abs=1e-4)
        if expected["eval_reward"] is not None:  # the first half also measured at its end
            assert found["eval_reward"] == expected["eval_reward"]
    # The copy that samples has the weights.
    assert max(m["logp_diff_max"] for m in metrics(sharded)[1:]) < logp_rounding(sharded)
    Policy.load(RunConfig.of({"policy": {"model": str(sharded / "model")}}).policy)


def test_what_does_not_work_on_several_ranks_is_refused(tmp_path: Path) -> None:
    """Packed values, which can't be cut; and nothing else."""
    packed = {"optimizer": "adamw_8bit"}
    for changes, name in (
        ({"train": packed}, r"train\.optimizer = adamw_8bit"),
        ({"policy__quantize": "4bit"}, r"policy\.quantize = 4bit"),
        ({"phases": [{"name": "one"}, {"name": "two", "train": packed}]}, r"train\.optimizer"),
        ({"phases": [{"name": "one", "policy": {"reference": "sampler"}}]}, r'policy\.reference = "sampler"'),
    ):
        with pytest.raises(Refused, match=f"{name}.* doesn't work on several ranks"):
            check_sharded(tiny(tmp_path, **changes))
    check_sharded(tiny(tmp_path))


STEPS = 12
SECONDS = 10.0


@contextmanager
def launched(folder: Path, config: Path) -> Iterator[subprocess.Popen[str]]:
    """Two ranks, which torchrun starts once more."""
    command = ["--max-restarts", "1", "-m", "agro", "train", str(config), "--out", "run", "--resume"]
    launcher = subprocess.Popen(
        [*TORCHRUN, *command],
        cwd=folder,
        env={**os.environ, **ENVIRONMENT},
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
    for pid in children(launcher):
        with suppress(OSError):  # it ended meanwhile
            if b"RANK=%d" % number in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
    return None


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds ranks in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_vanishes_is_named_in_time_and_the_run_goes_on(number: int, tmp_path: Path) -> None:
    config = tiny(tmp_path, train__steps=STEPS, train__rank_seconds=SECONDS)
    alone = Trainer(config, tmp_path / "alone").run()
    file, run = write_toml(tmp_path / "config.json", config), tmp_path / "run"
    with launched(tmp_path, file) as launcher:
        log = run / "metrics.jsonl"  # another process appends: its last line may be half written
        until(lambda: log.exists() and log.read_text().count("\n") >= 3)
        first, second = (rank_of(launcher.pid, rank) for rank in (0, 1))
        assert None not in (first, second)
        os.kill(second, number)
        took = until(lambda: not is_running(first))
        assert took <= SECONDS + 1, took  # 1: the process ends, on a busy machine
        assert launcher.wait(600) == 0
    errors = (tmp_path / "stderr").read_text()
    assert "error: rank 1 on " in errors
    assert [step["step"] for step in metrics(run)] == list(range(1, STEPS + 1))
    one, two = (load_file(folder / "model" / "model.safetensors") for folder in (alone, run))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-4
