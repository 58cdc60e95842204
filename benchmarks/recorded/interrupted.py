"""Cases that roll back, skip an update, end early, are resumed or killed."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from small import case, log, metrics, prompts, run, small

from agro import Trainer


def rolled_back(folder: Path, kl: float, **sections: Any) -> Path:
    """The learning rate is far too high, so the KL passes the guard's limit."""
    guard = {"kl": kl, "action": "rollback", "rollbacks": 100}
    out = run(folder, guard=guard, train={"steps": 14, "lr": 5e-2}, **sections)
    assert any(m["rolled_back"] == 1 for m in metrics(out)), "it was to go back once at least"
    return out


@case
def rollback(folder: Path) -> Path:
    return rolled_back(folder, 2.0)


@case
def rollback_ema(folder: Path) -> Path:
    """The reference goes back too."""
    return rolled_back(folder, 1.0, policy={"reference": "ema", "reference_decay": 0.9})


@case
def rollback_value(folder: Path) -> Path:
    """So does the learned value."""
    return rolled_back(folder, 2.0, objective={"name": "dro", "beta": 0.1})


@case
def guard_skip(folder: Path) -> Path:
    """Updates that are left out."""
    guard = {"loss": 4.0, "window": 5, "action": "skip"}
    out = run(folder, guard=guard, train={"steps": 14, "groups": 2, "max_skipped": 14})
    assert any(m["skipped"] == 1 for m in metrics(out)), "it was to skip an update at least"
    return out


@case
def patience(folder: Path) -> Path:
    """A run that ends early, as held-out rewards don't rise."""
    held = prompts(folder / "held.jsonl", range(60, 64))
    return run(
        folder,
        data={"eval_prompts": held},
        evaluate={"every": 1, "patience": 2},
        train={"steps": 30, "lr": 1e-6},
    )


@case
def resume(folder: Path) -> Path:
    """Of four steps, then of eight."""
    Trainer(small(folder, train={"steps": 4}), folder / "run").run()
    return Trainer(small(folder), folder / "run", resume=True).run()


def killed_and_resumed(folder: Path, at: int, **sections: Any) -> Path:
    """Killed when step `at` is logged, or soon after: where that is must not matter."""
    config, out = small(folder, **sections), folder / "run"
    child = os.fork()
    if not child:
        try:
            Trainer(config, out).run()
        finally:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    lines = out / "metrics.jsonl"
    while not (lines.exists() and lines.read_text().count("\n") >= at):
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended by itself"
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not (out / "model").exists(), "the run was to be killed before its end"
    return Trainer(config, out, resume=True).run()


@case
def killed(folder: Path) -> Path:
    """After step 5, of which the last checkpoint knows nothing; fresh and stored groups."""
    data = {"store": log(folder / "log.db"), "replay": 0.5}
    return killed_and_resumed(folder, 5, data=data, train={"steps": 10, "updates": 2})


@case
def killed_in_second_phase(folder: Path) -> Path:
    """Where a reference follows, beta is tuned, the learning rate falls and a learned value stays."""
    tuned = {"name": "agro", "beta": {"start": 0.02, "target_kl": 0.3, "rate": 0.2}}
    phases = [
        {"name": "valued", "objective": {"name": "dro", "beta": 0.1}, "train": {"steps": 4}},
        {
            "name": "tuned",
            "objective": tuned,
            "data": {"replay": 0.5},
            "train": {"steps": 9, "schedule": "linear"},
        },
    ]
    policy = {"reference": "ema", "reference_decay": 0.8}
    return killed_and_resumed(folder, 9, phases=phases, policy=policy, train={"groups": 8})
