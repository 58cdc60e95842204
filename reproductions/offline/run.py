"""Training on a fixed log: agro by its recipe beside imitation of the right answers and published methods.

    python reproductions/offline/run.py [--only methods] [--seeds N] [--jobs N] [--out runs/offline]
                                        [--record] [--recorded] [--measured] [KEY=VALUE …]

The log has 512 sums with four responses each, by a model that adds carelessly: 28 % of them are right. A run
is 150 updates of 16 prompts, measured on held-out sums at temperature 1. The methods are those of
methods.toml. In the section `methods` the recipe has three learning rates and no trials. Each other method
has the same trials: one run of seed 0 at each rate, and at the best of them each value of one more option.
The best of all by held-out accuracy is run with the other seeds, where it ends near the recipe. The section
`fresh` has no log but 100 updates on fresh samples of the log's prompts.

Writes result.json and figure.png into --out, with --record beside this script too, with the table of
README.md. An interrupted run continues. With --recorded what the result beside this script has counts as
complete. --seeds: of the recipe; other methods have at most 3. --jobs: runs at a time, each with one thread.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro import objectives  # noqa: E402
from agro.config import RunConfig, override  # noqa: E402
from reproductions import harness  # noqa: E402
from reproductions.offline import logs  # noqa: E402

RECIPE = "agro, the recipe"
UNBOUNDED = "agro, the recipe without the bound"  # on the change of a step: train.step_kl
FIXED = (RECIPE, UNBOUNDED)  # their settings aren't chosen here
RATES, OTHER_RATES, FRESH_RATES = (3e-5, 1e-4, 3e-4, 1e-3), ("1e-4", "1e-3"), ("1e-4", "3e-4")
NEAR = 0.15  # methods that end further below the recipe have no further seeds
LAST = 20  # steps at the end over which what the batches show is averaged
METHODS: dict[str, dict[str, Any]] = tomllib.loads((HERE / "methods.toml").read_text(encoding="utf-8"))
Run = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One run; `changes`: KEY=VALUE."""

    section: str
    method: str
    seed: int = 0
    changes: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: Run) -> Row:
        return cls(run["section"], run["method"], run["seed"], tuple(run["changes"]))

    @property
    def folder(self) -> str:
        words = (self.section, self.method, *self.changes, f"seed {self.seed}")
        return "_".join("".join(c if c.isalnum() or c in ".=-" else "-" for c in word) for word in words)


def trials(seeds: int) -> list[Row]:
    """What runs first: all but the further seeds of methods that have trials."""
    few = range(min(seeds, 3))
    rows = [Row("methods", method, seed) for method in FIXED for seed in range(seeds)]
    for method in (RECIPE, UNBOUNDED):
        rows += [Row("methods", method, seed, (f"train.lr={rate}",)) for rate in OTHER_RATES for seed in few]
    for method in [name for name in METHODS["methods"] if name not in FIXED]:
        rows += [Row("methods", method, 0, (f"train.lr={rate:g}",)) for rate in RATES]
    for method in METHODS["fresh"]:
        steps = ("train.steps=100", "evaluate.every=50")
        rows += [Row("fresh", method, seed, (*steps, f"train.lr={r}")) for r in FRESH_RATES for seed in few]
    return rows


def options(measured: Sequence[Run]) -> list[Row]:
    """The trials of each method's option, at the best of its learning rates."""
    rows = []
    for method, best in best_trials(measured).items():
        name, values = METHODS["options"].get(method, ("", ()))
        objective = METHODS["methods"][method]["objective"]
        default = {**objectives.get(objective["name"]).defaults(), **objective}.get(name)
        changes = [f"objective.{name}={value:g}" for value in values if value != default]
        rows += [Row("methods", method, 0, (*best["changes"], change)) for change in changes]
    return rows


def best_trials(measured: Sequence[Run]) -> dict[str, Run]:
    """By method the best run with seed 0. The recipes have no trials."""
    found: dict[str, Run] = {}
    for run in measured:
        method = run["method"]
        if run["section"] != "methods" or run["seed"] or method in FIXED:
            continue
        if method not in found or run["accuracy"][-1] > found[method]["accuracy"][-1]:
            found[method] = run
    return found


def further(measured: Sequence[Run], seeds: int) -> list[Row]:
    """The other seeds of each method that ends near the recipe, with the settings that were best."""
    of_recipe = [m["accuracy"][-1] for m in measured if (m["section"], m["method"]) == ("methods", RECIPE)]
    least = max(of_recipe, default=0.0) - NEAR
    near = {method: run for method, run in best_trials(measured).items() if run["accuracy"][-1] >= least}
    more = range(1, min(seeds, 3))
    return [Row("methods", method, s, tuple(run["changes"])) for method, run in near.items() for s in more]


def configure(row: Row, files: Mapping[str, Path], changes: Sequence[str] = ()) -> RunConfig:
    """The recipe with what this job, the method and the row change of it."""
    method, is_fresh = copy.deepcopy(METHODS[row.section][row.method]), row.section == "fresh"
    data = {"prompts": str(files["prompts"])} if is_fresh else {"store": str(files["own"])}
    place = {
        "policy": {"model": str(logs.MODEL)},
        "data": {**data, "eval_prompts": str(files["held_out"])},
        "reward": {"name": f"{HERE / 'reward.py'}:right_sum"},
        "train": {"seed": row.seed},
    }
    values = RunConfig.load("fresh" if is_fresh else "log").model_dump()
    for changes_of_recipe in (METHODS["job"], place):
        values = harness.merged(values, changes_of_recipe)
    values["objective"] = method.get("objective", values["objective"])
    for section in ("data", "train"):
        values[section] |= method.get(section, {})
    if not method.get("bounded"):  # as these runs were recorded
        values["train"] |= {"gain_ratio": None, "step_kl": None}
    values["phases"] = method.get("phases", [])
    of_objective = {key: value for key, value in values["objective"].items() if key != "name"}
    needs = objectives.get(values["objective"]["name"]).needed(of_objective)
    values["policy"]["cache_reference"] = "ref_logp" in needs
    for change in (*row.changes, *changes):
        override(values, change, RunConfig)
    return RunConfig.of(values, row.method)


def measure(row: Row, run: Run) -> dict[str, Any]:
    """What is reported of a run."""
    seen = [m for m in run["metrics"] if m["eval_reward"] is not None]
    columns = {"step": "step", "accuracy": "eval_reward", "accuracy_se": "eval_reward_se"}
    found: dict[str, Any] = {name: [m[key] for m in seen] for name, key in columns.items()}
    found["kl_ref"] = [m["eval_kl_ref"] for m in seen]
    for name in ("log_ratio_best", "log_ratio_worst", "ratio_mean"):
        values = harness.column(run["metrics"], name)[-LAST:]
        known = values[np.isfinite(values)]
        found[name] = float(known.mean()) if len(known) else None
    return {**asdict(row), **found, "cpu_seconds": run["cpu_seconds"]}


def complete(row: Row, out: Path, changes: Sequence[str]) -> Run:
    """What is measured of a run, which is made unless that was done before."""

    def make() -> Run:
        return measure(row, harness.train(configure(row, logs.prepare(out), changes), out / row.folder))

    measured: Run = harness.once(out / row.folder / "measured.json", make)
    return measured


def line(run: Run) -> str:
    """The end of one run."""
    words = (run["section"], run["method"], *run["changes"], f"seed {run['seed']}")
    end = f"{run['accuracy'][-1]:.3f} ± {run['accuracy_se'][-1]:.3f}, KL {run['kl_ref'][-1]:.2f}"
    return f"{', '.join(words)}: {end}, {run['cpu_seconds'] or 0:.0f} CPU s"


def recorded() -> list[Run]:
    """What the result beside this script has."""
    found: list[Run] = json.loads((HERE / "result.json").read_text())["runs"]
    return found


def restore(out: Path) -> None:
    """Write what was recorded into `out`, so that it isn't run again."""
    for run in recorded():
        harness.once(out / Row.of(run).folder / "measured.json", lambda run=run: run)


def peers() -> list[Run]:
    """TRL's recorded runs on fresh samples."""
    folder = harness.need(logs.FOLDER / "results")
    return [json.loads(file.read_text()) for file in sorted(folder.glob("learn_*.json"))]


def fresh_table(runs: Sequence[Run], peers: Sequence[Run]) -> str:
    """Accuracy by seed on fresh samples, a row for each method and a column for each rate, beside TRL's own.

    `peers`: the recorded runs of TRL's trainers on the same task, without a table of its samples' KL.
    """
    lines = []
    for method in METHODS["fresh"]:
        own = [run for run in runs if (run["section"], run["method"]) == ("fresh", method)]
        by_rate = [[run for run in own if f"train.lr={rate}" in run["changes"]] for rate in FRESH_RATES]
        cells = [by_seed([run["accuracy"][-1] for run in same]) for same in by_rate]
        last = [run["kl_ref"][-1] for run in by_rate[-1]]
        cells.append(f"{statistics.mean(last):.2f}" if last else "–")
        lines.append([method.removeprefix("fresh, "), *cells])
    for trainer in ("rloo", "grpo"):
        own = [run for run in peers if run["settings"]["trainer"] == trainer]
        ends = [(run["settings"]["lr"], run["held_out_accuracy"][-1]["accuracy"]) for run in own]
        cells = [by_seed([end for lr, end in ends if lr == float(rate)]) for rate in FRESH_RATES]
        lines.append([f"TRL 1.16 itself, {trainer.upper()} (512 held-out sums)", *cells, "–"])
    return harness.markdown(["method", "lr 1e-4", "lr 3e-4", "KL at 3e-4"], lines)


def by_seed(ends: Sequence[float]) -> str:
    if not ends:
        return "–"
    text = ", ".join(f"{end:.3f}" for end in ends)
    if len(ends) < 3:
        return text
    return f"{text}: {statistics.mean(ends):.3f} ± {statistics.stdev(ends):.3f}"


def best_of(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """By method of the section "methods" the runs with its best settings: of those with most seeds, by their
    mean, since one trial counts less than settings that were continued."""
    same: dict[tuple[str, tuple[str, ...]], list[Run]] = {}
    for run in runs:
        if run["section"] == "methods":
            same.setdefault((run["method"], tuple(run["changes"])), []).append(run)
    best: dict[str, list[Run]] = {}
    for (method, _), found in same.items():
        best[method] = max(best.get(method, found), found, key=lambda of: (len(of), mean_end(of)))
    return best


def mean_end(runs: Sequence[Run]) -> float:
    return statistics.mean(run["accuracy"][-1] for run in runs)


def figure(runs: Sequence[Run]) -> Figure:
    """Held-out accuracy of each method at its best settings: a point a seed, a line at their mean."""
    best = best_of(runs)
    found = Figure(figsize=(7.0, 1.2 + 0.3 * len(best)), layout="constrained")
    axes = harness.axes(found, (1, 1, 1), "held-out accuracy after training on the log alone", 1)
    names = sorted(best, key=lambda name: mean_end(best[name]))
    for y, name in enumerate(names):
        ends = [run["accuracy"][-1] for run in best[name]]
        color = harness.COLORS[0] if name in (RECIPE, UNBOUNDED) else harness.MUTED
        axes.scatter(ends, [y] * len(ends), s=18, color=color, alpha=0.7, linewidths=0)
        axes.plot([mean_end(best[name])] * 2, [y - 0.3, y + 0.3], color=color, linewidth=2.0)
    start = runs[0]["accuracy"][0]
    axes.axvline(start, color=harness.MUTED, linewidth=0.8, linestyle=":")
    axes.text(start + 0.01, len(names) - 0.5, "before", fontsize=7, color=harness.MUTED)
    # Without the option of a name, which may not be the best.
    plain = [name.partition(", β")[0].partition(", b")[0] for name in names]
    axes.set_yticks(range(len(names)), plain)
    axes.grid(axis="x", color=harness.GRID, linewidth=0.6)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    more = {"record": harness.RECORD, "recorded": harness.RECORDED, "measured": harness.MEASURED}
    parser = harness.parser(__doc__, "runs/offline", seeds=5, jobs=1, **more)
    parser.add_argument("--only", choices=("methods", "fresh"), help="one section")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args(arguments)
    logs.prepare(args.out)
    if args.recorded:
        restore(args.out)
    measured: list[Run] = []
    with harness.processes(args.jobs) as each:

        def run(rows: Sequence[Row]) -> None:
            chosen = [row for row in rows if args.only in (None, row.section)]
            if args.measured:
                chosen = [row for row in chosen if (args.out / row.folder / "measured.json").exists()]
            for found in each(partial(complete, out=args.out, changes=args.changes), chosen):
                print(line(found), flush=True)
                measured.append(found)

        run(trials(args.seeds))
        run(options(measured))
        run(further(measured, args.seeds))
    if args.recorded:  # also what isn't asked for any more
        rows = {Row.of(made) for made in measured}
        measured += [made for made in recorded() if Row.of(made) not in rows]
    result = {"held_out": logs.HELD_OUT, "machine": harness.machine(), "runs": measured}
    harness.keep(args, HERE, result, figure(measured))
    if args.record:
        harness.put(HERE / "README.md", fresh_table(measured, peers()))


if __name__ == "__main__":
    harness.guarded(main)
