"""How much sooner a run with a collector beside the trainer is as good as one that samples itself.

    python benchmarks/hosts/asynchrony.py [--seeds 0 1 2] [--target 0.9] [--out FILE]

Both train the same small model to copy digits, with one thread a process, until the held-out reward is at
least `target`. The time is that of the steps until then, without evaluations and starts. On a machine that
others use too, look at the CPU seconds: sampling and training overlap, so the larger of the two is what the
asynchronous run needs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from placed import ENVIRONMENT  # noqa: E402

from agro.config import RunConfig  # noqa: E402

GOAL = 1.6  # times
DIGITS = 6


def recipe(folder: Path, seed: int, target: float) -> Path:
    """Copy six digits: a step samples 128 responses, and takes about as long to train on them."""

    def prompts(name: str, first: int, count: int) -> str:
        numbers = [(first + i) * 7919 % 10**DIGITS for i in range(count)]
        lines = [json.dumps({"prompt": f"{n:06d}>", "answer": f"{n:06d}"}) + "\n" for n in numbers]
        (folder / name).write_text("".join(lines))
        return str(folder / name)

    values = {
        "policy": {"new": {"alphabet": "0123456789>", "hidden": 64, "layers": 2, "heads": 4, "context": 24}},
        "data": {
            "prompts": prompts("prompts.jsonl", 0, 2000),
            "eval_prompts": prompts("held.jsonl", 5000, 64),
        },
        "sampler": {"n": 8, "max_new": DIGITS + 1},
        "reward": {"name": f"{HERE / 'reward.py'}:digits"},
        "objective": {"name": "rloo", "beta": 0.0},
        "train": {"steps": 2000, "groups": 16, "micro_batch": 128, "lr": 3e-3, "seed": seed},
        "evaluate": {"every": 10, "target": target, "metric": "eval_reward"},
    }
    path = folder / "recipe.json"
    path.write_text(json.dumps(RunConfig.of(values).model_dump(mode="json")))
    return path


def measure(folder: Path, seed: int, target: float, extra: Sequence[str]) -> dict[str, Any]:
    """The steps and the seconds that a run takes to the target."""
    folder.mkdir()
    command = [sys.executable, "-m", "agro", "train", str(recipe(folder, seed, target)), *extra]
    with (folder / "log").open("wb") as log:
        done = subprocess.run(
            [*command, "--out", str(folder / "run")], env=ENVIRONMENT, stdout=log, stderr=log, check=False
        )
    assert done.returncode == 0, (folder / "log").read_text()[-2000:]
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()][1:]
    reached = next((row["step"] for row in rows if (row["eval_reward"] or 0) >= target), None)
    assert reached is not None, f"{folder}: the target wasn't reached in {len(rows)} steps"
    until = rows[:reached]
    return {
        "seed": seed,
        "steps": reached,
        "seconds": sum(row["seconds"] for row in until),
        "seconds_sample": sum(row["seconds_sample"] for row in until),
        "seconds_train": sum(row["seconds_train"] for row in until),
        "staleness_mean": statistics.fmean(row["staleness_mean"] for row in until),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "asynchrony.json")
    arguments = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {"synchronous": [], "asynchronous": []}
    for seed in arguments.seeds:
        for name, extra in (("synchronous", ()), ("asynchronous", ("data.max_age=2", "--place", "local:1"))):
            with tempfile.TemporaryDirectory() as folder:
                rows[name].append(measure(Path(folder) / "made", seed, arguments.target, extra))
                print(name, rows[name][-1], flush=True)
    ratios = [
        a["seconds"] / b["seconds"] for a, b in zip(rows["synchronous"], rows["asynchronous"], strict=True)
    ]
    times = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"times as fast: {statistics.median(ratios):.2f} (of {times}); goal {GOAL}")
    result = {"name": "asynchrony", "goal": GOAL, "ratio": ratios, **rows, "load": os.getloadavg()}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
