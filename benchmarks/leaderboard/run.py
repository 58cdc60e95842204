"""The leaderboard: CPU minutes of training on one log until 90 % of held-out prompts are answered right.

    make leaderboard                       # or make leaderboard TRL=/path/to/python-with-trl
    python benchmarks/leaderboard/run.py [--jobs sums sorting] [--methods NAME …] [--seeds 3]
                                         [--trl-python P]
    python benchmarks/leaderboard/run.py --row "my idea" [--jobs sorting] KEY=VALUE …

Two jobs, each one log, one small model to begin with, and a number of updates. `sorting` has the log of
`agro init --task own-log` and is made here, so anyone can run it; `sums` that of ../shared/peers/trl.

`agro` is its recipe `log`; imitation is of the right responses. TRL's RLOO and GRPO are given the log as if
they had sampled it (trl_log.py), at the best of the rates by the final accuracy of seed 0. A row of your own
is the recipe with the settings that you give.

A run has one thread and a process of its own. The clock counts its CPU seconds from the first update on,
without loading and without measuring the accuracy (clock.py).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

from clock import GOAL, Clock, load_job  # noqa: E402

from benchmarks import recording  # noqa: E402
from reproductions import harness  # noqa: E402
from reproductions.offline import logs  # noqa: E402

RESULTS = ROOT / "benchmarks/results/leaderboard.json"
BUILD = ROOT / "build/leaderboard"
MADE = "made by run.py"
POINTS = 10  # measurements of accuracy in a run
JOBS: dict[str, dict[str, Any]] = {
    "sorting": {"updates": 100, "groups": 64, "max_new": 5, "lr": 1e-3, "right": "right"},
    "sums": {"updates": 150, "groups": 16, "max_new": 64, "lr": 3e-4, "right": "right_sum"},
}
METHODS = {  # what they change of the recipe log
    "agro, recipe log": ("data.spread=true",),
    "imitation of the right responses": ("objective.name=sft", "data.min_reward=1.0", "data.spread=false"),
}
TRL = ("TRL RLOO", "TRL GRPO")
TRL_RATES = ("1e-4", "3e-4", "1e-3")


def prepare(name: str) -> Path:
    """The folder of a job, made where it isn't there yet."""
    folder = BUILD / name
    if not (folder / "job.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        size = JOBS[name]
        model, groups = {"sorting": sorting, "sums": sums}[name](folder)
        lines = [json.dumps(group) + "\n" for group in groups]
        (folder / "log.jsonl").write_text("".join(lines), encoding="utf-8")
        columns = ("prompt=prompt", "response=responses", "reward=rewards")
        harness.import_log(folder / "log.jsonl", folder / "log.db", columns)
        job = {"model": str(model), "log": str(folder / "log.jsonl"), **size}
        job["every"] = size["updates"] // POINTS
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    return folder


def sorting(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The log that agro writes, and the model that its recipe's first phase makes of it."""
    task = folder / "task"
    shutil.rmtree(task, ignore_errors=True)
    run([sys.executable, "-m", "agro", "init", str(task), "--task", "own-log"])
    maps = ["--map", "prompt=question", "--map", "response=output", "--map", "reward=score"]
    run([sys.executable, "-m", "agro", "import", "log.jsonl", "--store", "log.db", *maps], task)
    only = 'phases=[{name="imitate",objective={name="sft"},train={steps=150,groups=64,lr=3e-3}}]'
    run([sys.executable, "-m", "agro", "train", "recipe.toml", only, "--out", "start"], task)
    shutil.copy(task / "held_out.jsonl", folder)
    shutil.copy(task / "reward.py", folder)
    groups: dict[str, dict[str, Any]] = {}
    for line in (task / "log.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        new = {"prompt": row["question"], "responses": [], "rewards": []}
        group = groups.setdefault(row["question"], new)
        group["responses"].append(row["output"])
        group["rewards"].append(row["score"])
    return task / "start/model", list(groups.values())


def sums(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The log and the model of the peer's folder."""
    files = logs.prepare(folder / "task")
    shutil.copy(files["held_out"], folder)
    shutil.copy(ROOT / "reproductions/offline/reward.py", folder)
    return logs.MODEL, logs.groups()


def run(command: Sequence[str], folder: Path | None = None) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)


def train(folder: Path, seed: int, changes: Sequence[str], out: Path) -> None:
    """One run of agro, in this process."""
    from agro import RunConfig, Trainer
    from agro.train.monitors import Monitor, View

    job = load_job(folder)
    stored = [f"policy.model={job['model']}", f"data.store={folder / 'log.db'}", "data.hold_out=0"]
    steps = [f"train.steps={job['updates']}", f"train.groups={job['groups']}", f"train.lr={job['lr']}"]
    unmeasured = ["evaluate.kl_samples=0", "evaluate.side_by_side=0"]
    settings = [*stored, *steps, f"train.seed={seed}", "policy.device=cpu", "policy.threads=1", *unmeasured]
    config = RunConfig.load(ROOT / "agro/config/recipes/log.toml", [*settings, *changes])
    clock = Clock(job)

    class Measured(Monitor):
        def after(self, view: View) -> None:
            policy = trainer.policy
            clock.after(view.step, policy.model, policy.tokenizer)

    shutil.rmtree(out.with_suffix(""), ignore_errors=True)
    trainer = Trainer(config, out.with_suffix(""), monitors=[Measured()])
    trainer.run()
    out.write_text(json.dumps(clock.result()))


def measured(command: Sequence[str], out: Path) -> dict[str, Any]:
    """The result of a run in a process of its own; of one that is complete, its file."""
    if not out.exists():
        print(f"{out.relative_to(BUILD)}", flush=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PYTHONPATH", None)
        with out.with_suffix(".log").open("w") as log:
            subprocess.run([*command, str(out)], env=environment, check=True, stdout=log, stderr=log)
    result: dict[str, Any] = json.loads(out.read_text())
    print(f"{out.relative_to(BUILD)}: {told(result['minutes'])}, at the end {last(result):.3f}", flush=True)
    return result


def last(result: dict[str, Any]) -> float:
    return float(result["curve"][-1]["accuracy"])


def told(minutes: float | None) -> str:
    return "never" if minutes is None else f"{minutes:.2f} min"


def own(folder: Path, name: str, changes: Sequence[str], seeds: int) -> dict[str, Any]:
    """A row of agro's."""
    runs = []
    for seed in range(seeds):
        command = [sys.executable, __file__, "--one", str(folder), str(seed), *changes, "--"]
        runs.append(measured(command, folder / f"{name}-{seed}.json"))
    return row(folder.name, name, runs, " ".join(changes))


def of_trl(folder: Path, name: str, python: Path, seeds: int) -> dict[str, Any]:
    """A row of TRL's, at the best of its rates by the accuracy at the end with seed 0."""

    def one(seed: int, rate: str) -> dict[str, Any]:
        command = [str(python), str(HERE / "trl_log.py"), str(folder), name.split()[-1], str(seed), rate]
        return measured(command, folder / f"{name}-{rate}-{seed}.json")

    trials = {rate: one(0, rate) for rate in TRL_RATES}
    best = max(trials, key=lambda rate: last(trials[rate]))
    runs = [trials[best], *(one(seed, best) for seed in range(1, seeds))]
    return row(folder.name, name, runs, f"{runs[0]['version']}, β = 0.1, lr {best} of {', '.join(TRL_RATES)}")


def row(job: str, name: str, runs: Sequence[dict[str, Any]], settings: str) -> dict[str, Any]:
    minutes, final = [run["minutes"] for run in runs], [last(run) for run in runs]
    more = {"job": job, "method": name, "final": final, "settings": settings}
    return recording.row(f"{job}: {name}", minutes, goal=GOAL, **more, date=date.today().isoformat())


def place(row: dict[str, Any]) -> tuple[Any, ...]:
    """Of a row in the table: by job, then seeds that never got there, minutes, accuracy at the end."""
    known = [minutes for minutes in row["ours"] if minutes is not None]
    missed = len(row["ours"]) - len(known)
    return row["job"], missed, statistics.mean(known) if known else 0.0, -statistics.mean(row["final"])


def page(rows: Sequence[dict[str, Any]]) -> str:
    head = ["job", "method", "settings", "CPU minutes to .90, by seed", "accuracy at the end"]
    lines = []
    for each in sorted(rows, key=place):
        minutes = ", ".join(told(value).removesuffix(" min") for value in each["ours"])
        final = ", ".join(f"{value:.3f}" for value in each["final"])
        about = (each["job"], each["method"], each["settings"])
        lines.append((*about, minutes, final, f"`{each['commit']}`", each["date"]))
    machines = "; ".join(dict.fromkeys(each["machine"] for each in rows))
    note = f"Machine: {machines}. One thread a run; seeds from 0 on, in order."
    return f"{harness.markdown([*head, 'commit', 'date'], lines)}\n\n{note}"


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        folder, seed, *changes, _, out = sys.argv[2:]
        train(Path(folder), int(seed), changes, Path(out))
        return
    options = {"jobs": JOBS, "methods": (*METHODS, *TRL), "seeds": 3, "row": str}
    parser = recording.parser(__doc__, **options, trl_python=Path)
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_args()
    for job in asked.jobs:
        if job == "sums" and not logs.FOLDER.is_dir():
            print(f"sums: skipped: {logs.FOLDER} isn't there")
            continue
        folder = prepare(job)
        rows = []
        if asked.row:
            rows.append(own(folder, asked.row, asked.changes, asked.seeds))
        for name in () if asked.row else asked.methods:
            if name in METHODS:
                rows.append(own(folder, name, METHODS[name], asked.seeds))
            elif asked.trl_python is None:
                print(f"{job}, {name}: skipped: name an interpreter with TRL: --trl-python (make: TRL=…)")
            else:
                rows.append(of_trl(folder, name, asked.trl_python, asked.seeds))
        text = page(recording.keep(RESULTS, *rows))
        harness.put(HERE / "README.md", text, MADE)
        print(text)


if __name__ == "__main__":
    main()
