"""Training sharded over two ranks with FSDP2, on the CPU: gradients, and a run that stops and resumes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import logp_rounding, metrics, tiny, write_prompts, write_toml

from agro import objectives
from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.train.check import check_sharded

HERE = Path(__file__).parent


def torchrun(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def two_ranks(*arguments: str, folder: Path) -> str:
    """Without torchrun's agent. Returns what rank 0 says."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        forked.Process(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=folder / f"stdout{rank}",
            stderr=folder / f"stderr{rank}",
        )
        for rank in (0, 1)
    ]
    codes = [rank.wait(400) for rank in ranks]
    assert codes == [0, 0], [(folder / f"stderr{rank}").read_text()[-3000:] for rank in (0, 1)]
    return (folder / "stdout0").read_text()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def test_gradients_are_those_of_one_process_for_every_objective(tmp_path: Path) -> None:
    """Float64, micro-batches of three of eleven responses: two passes a rank, one of them over nothing."""
    found = json.loads(two_ranks(str(HERE / "ranks_gradients.py"), folder=tmp_path))
    assert found["not_finite"] == ["raised", "raised"]  # on whichever rank the row is, and no rank hangs
    during, after = found["threads"]
    assert after < during or not Path("/proc").exists()  # the group of the calls has ended with its threads
    rows = found["gradients"]
    assert {row["objective"].split()[0] for row in rows} == set(objectives.names())
    for row in rows:
        assert row["norm"] > 1e-6, row
        assert row["difference"] <= 1e-10 * row["norm"], row
        assert max(row["loss"], row["reported"]) <= 1e-10 * max(1.0, row["norm"]), row


@pytest.mark.nightly
def test_a_run_of_ten_steps_saves_resumes_and_ends_with_a_model(tmp_path: Path) -> None:
    """Beside the same run in one process: equal up to the rounding of float32 sums in another order."""
    settings = {
        "data__eval_prompts": write_prompts(tmp_path / "held.jsonl", range(60, 80)),
        "evaluate__every": 5,
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
    for change, name in (
        ({"policy__cache_reference": True}, r"policy\.cache_reference"),
        ({"train__offload": ("optimizer",)}, r"train\.offload"),
        ({"train__gradient_checkpointing": True}, r"train\.gradient_checkpointing"),
    ):
        with pytest.raises(Refused, match=name):
            check_sharded(tiny(tmp_path, **change))
    check_sharded(tiny(tmp_path))
    assert torch.distributed.is_available()
