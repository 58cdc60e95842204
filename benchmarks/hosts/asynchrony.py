"""How much sooner a run with a collector beside the trainer is as good as one that samples itself.

    python benchmarks/hosts/asynchrony.py [--seeds 0 1 2] [--model HIDDEN LAYERS] [--target 0.8] [--out FILE]

The task is "very long" of reproductions/panel with more lessons: write the 200 letters after the last one of
a word, from a model that is right one time in three. All runs begin with that model, use one thread a
process, and train until the mean reward of ten steps is at least `target`. The time is that of the steps
until then, without evaluations and starts. --model is the model's size, --timeout the
seconds of a run. The row of a size replaces the one that --out has.

Sampling and training overlap in the asynchronous run, so it can be faster by (sampling + training) / the
longer of the two at most, and never by more than 2. On a machine that others use too, wall time says little:
look at the CPU seconds of each process, and at `bound`, which is that quotient of CPU seconds a step.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from placed import ENVIRONMENT, last_step  # noqa: E402

from agro.config import RunConfig  # noqa: E402
from agro.place.placement import PlacedRecord  # noqa: E402
from benchmarks import recording  # noqa: E402
from reproductions.panel import logs  # noqa: E402
from reproductions.panel.jobs import JOBS, Model  # noqa: E402
from reproductions.systems import tiny  # noqa: E402

GOAL = 1.6  # times
CORES = 2
# Responses of 200 tokens cost each side about as much, and much more than their way through the store.
# Those of the demo's task, 8 tokens, don't: three seeds on two quiet cores were .81 to 1.10 times as fast.
JOB = replace(JOBS["very long"], name="asynchrony", data="fresh", warm_up=120, prompts=4000)
RESULTS = HERE.parent / "results" / "asynchrony.json"
WINDOW = 10  # steps
WAYS = {"synchronous": (), "asynchronous": ("data.max_age=1", "--place", "local:1")}
TICK = os.sysconf("SC_CLK_TCK")  # of the times in /proc, a second


def recipe_of(folder: Path, model: Model, steps: int) -> Path:
    """Fresh samples for the start of `JOB`."""
    files = logs.prepare(replace(JOB, model=model), folder, logs.FULL)
    place = [f"policy.model={files.start}", f"data.prompts={files.prompts}"]
    size = [f"train.steps={steps}", f"evaluate.every={steps}", f"sampler.max_new={JOB.max_new}"]
    config = RunConfig.load(HERE / "asynchrony.toml", [*place, *size])
    path = folder / "recipe.json"
    path.write_text(json.dumps(config.model_dump(mode="json")))
    return path


def cpu_seconds(pid: int) -> float:
    """Of a process and those of its children that have ended; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICK


def measure(folder: Path, recipe: Path, seed: int, words: Sequence[str], timeout: float) -> Run:
    """Train for all steps, and note what each process has computed after which of them."""
    command = [sys.executable, "-m", "agro", "train", str(recipe), f"train.seed={seed}", *words]
    run, deadline = folder / "run", time.monotonic() + timeout
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--out", str(run)], env=ENVIRONMENT, stdout=log, stderr=log)
        used: dict[int, dict[str, float]] = {}  # by step
        while process.poll() is None:
            assert time.monotonic() < deadline, f"{words} took longer than {timeout:g} s"
            placed = PlacedRecord.read(run)
            pids = {p["name"]: p["pid"] for p in placed.processes} if placed else {"trainer": process.pid}
            used.setdefault(last_step(run), {name: cpu_seconds(pid) for name, pid in pids.items() if pid})
            time.sleep(0.05)
    assert process.returncode == 0, (folder / "log").read_text()[-2000:]
    return Run(seed, tiny.metrics(run), used)


@dataclass
class Run:
    """A run of all steps."""

    seed: int
    rows: list[dict[str, Any]]  # the metrics of each step
    used: dict[int, dict[str, float]]  # CPU seconds of each process, when a step was first seen to be done

    def reached(self, target: float) -> int:
        """The step whose last `WINDOW` steps have a mean reward of at least `target`.

        Its prompts were never trained on before, so it is as good as a held-out one.
        """
        rewards = [row["reward_mean"] for row in self.rows]
        means = {n: statistics.fmean(rewards[n - WINDOW : n]) for n in range(WINDOW, len(rewards) + 1)}
        reached = next((step for step, mean in means.items() if mean >= target), None)
        assert reached is not None, f"{target} wasn't reached: {max(means.values()):.3f} in {len(rewards)}"
        return reached

    def until(self, target: float) -> dict[str, Any]:
        """What the steps until the target took. The first one, which waits for a collector, isn't counted."""
        reached = self.reached(target)
        rows = self.rows[1:reached]
        total = {key: sum(row[key] for row in rows) for key in ("seconds", "seconds_sample", "seconds_train")}
        first, last = min(s for s in self.used if s >= 1), min(s for s in self.used if s >= reached)
        cpu = {name: self.used[last][name] - self.used[first][name] for name in self.used[last]}
        return {
            "seed": self.seed,
            "steps": reached,
            **total,
            "cpu_a_step": {name: seconds / (last - first) for name, seconds in cpu.items()},
            "staleness_mean": statistics.fmean(row["staleness_mean"] for row in rows),
            "staleness_max": max(row["staleness_max"] for row in rows),
            "reward_last": statistics.fmean(row["reward_mean"] for row in self.rows[-WINDOW:]),
        }


def main() -> None:
    parser = recording.parser(__doc__, seeds=[0, 1, 2], target=0.8, steps=80, timeout=600.0, out=RESULTS)
    parser.add_argument("--model", type=int, nargs=2, default=[128, 1], metavar=("HIDDEN", "LAYERS"))
    arguments = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as made:
        recipe = recipe_of(Path(made), Model(*arguments.model), arguments.steps)
        for seed in arguments.seeds:
            for name, words in WAYS.items():
                folder = Path(made) / f"{name}-{seed}"
                folder.mkdir()
                run = measure(folder, recipe, seed, words, arguments.timeout)
                rows[name].append(run.until(arguments.target) | {"load": os.getloadavg()[0]})
                print(name, json.dumps(rows[name][-1]), flush=True)
    found = summary(rows)
    seconds = {name: [run["seconds"] for run in rows[name]] for name in WAYS}
    hidden, layers = arguments.model
    row = recording.row(
        f"time to equal accuracy of a collector beside the trainer, {layers} × {hidden}",
        seconds["asynchronous"],
        peer=seconds["synchronous"],
        goal=GOAL,
        ratio=found["ratio_median"],
        **{"target": arguments.target, **found, **rows},
    )
    recording.keep(arguments.out, row)
    print(json.dumps(found))


def summary(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Ratios of pairs, synchronous to asynchronous, and what the CPU seconds of the processes allow."""
    pairs = list(zip(rows["synchronous"], rows["asynchronous"], strict=True))
    alone = [sum(a["cpu_a_step"].values()) * a["steps"] for a, _ in pairs]
    longest = [max(b["cpu_a_step"].values()) * b["steps"] for _, b in pairs]
    both = [sum(b["cpu_a_step"].values()) * b["steps"] / CORES for _, b in pairs]
    bounds = [a / max(b, c) for a, b, c in zip(alone, longest, both, strict=True)]
    ratios = [a["seconds"] / b["seconds"] for a, b in pairs]
    overlaps = [1 - b["seconds_sample"] / b["seconds"] for _, b in pairs]
    return {
        "ratios": ratios,
        "ratio_median": statistics.median(ratios),
        "steps_ratio": [b["steps"] / a["steps"] for a, b in pairs],
        "trainer_at_work": overlaps,  # the share of time in which it doesn't wait for samples
        "bound": bounds,  # on two cores of their own: by the busiest process, and by all of them
        "bound_median": statistics.median(bounds),
    }


if __name__ == "__main__":
    main()
