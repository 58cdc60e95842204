"""Training on a fixed log: agro by its recipe beside imitation of the right answers and published methods.

    python reproductions/offline/run.py [--only SECTION …] [--method METHOD …] [--seeds N] [--jobs N]
                                        [--out runs/offline] [--recorded] [--record] [--measured]
                                        [KEY=VALUE …]

The log has 512 sums with four responses each, by a model that adds carelessly: 28 % of them are right. A run
is 150 updates of 16 prompts, measured on held-out sums at temperature 1. The sections:

- methods: the recipe at three learning rates, the earlier one, and each other method with the best of its
  learning rates and of one more option;
- settings: the earlier recipe with other β and learning rates, as in all sections below;
- weights: other weights of a response;
- remedies: what else could help agro without the weight;
- longer: 450 updates, and 600 of the best three;
- mixture: the log of an unknown mixture of writers, with graded rewards;
- no-logps: on the log without its log-probs;
- fresh: no log but 100 updates on fresh samples of the log's prompts, by the recipe `fresh` and others;
- replay: no log but fresh samples of the log's prompts, and the run's own earlier ones;
- lag: no log but samples of the run's weights 100 and 400 updates ago.

Writes result.json and figure.png into --out, with --record beside this script too. An interrupted run
continues. With --recorded what the result beside this script has counts as complete.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro import objectives  # noqa: E402
from agro.config import RunConfig  # noqa: E402
from reproductions import harness  # noqa: E402
from reproductions.offline import logs, methods, report  # noqa: E402

UPDATES = 150
BEGIN, END = "<!-- begin: made by run.py --record -->", "<!-- end: made by run.py --record -->"
OTHER_RATES = ("1e-4", "1e-3")  # of the recipe, beside 3e-4
SETTINGS = {  # β of the earlier recipe by learning rate; 0.01 at 3e-4 is this recipe itself
    "3e-5": ("0.01",),
    "1e-4": ("0.001", "0.01", "0.1", "1.0"),
    "3e-4": ("0.001", "0.1", "1.0"),
    "1e-3": ("0.01",),
}
LAST = 20  # steps at the end over which what the batches show is averaged
BASES = {"fresh": "fresh.toml", "replay": "replay.toml", "lag": "replay.toml"}  # of sections without a log
SECTIONS = (
    *("methods", "settings", "weights", "remedies", "longer", "mixture", "no-logps"),
    *("replay", "lag", "fresh"),
)


@dataclass(frozen=True)
class Row:
    """One run."""

    section: str
    method: str
    seed: int = 0
    changes: tuple[str, ...] = ()  # KEY=VALUE
    log: str = "own"

    @property
    def folder(self) -> str:
        words = (self.section, self.method, *self.changes, f"seed {self.seed}")
        return "_".join("".join(c if c.isalnum() or c in ".=-" else "-" for c in word) for word in words)


def trials(seeds: int) -> list[Row]:
    """What runs first: all but the further seeds of methods that have trials."""
    rates = [f"train.lr={rate:g}" for rate in methods.RATES]
    rows = [Row("methods", method, seed) for method in methods.FIXED for seed in range(seeds)]
    rows += [
        Row("methods", method, seed, (f"train.lr={rate}",))
        for method in (methods.RECIPE, methods.UNBOUNDED)
        for rate in OTHER_RATES
        for seed in range(min(seeds, 3))
    ]
    others = [method for method in methods.METHODS if method not in methods.FIXED]
    rows += [Row("methods", method, 0, (rate,)) for method in others for rate in rates]
    for rate, betas in SETTINGS.items():
        rows += [
            Row("settings", methods.EARLIER, seed, (f"objective.beta={beta}", f"train.lr={rate}"))
            for beta in betas
            for seed in range(min(seeds, 2))
        ]
    rows += [Row("weights", weight) for weight in methods.WEIGHTS]
    rows += [
        Row("remedies", name, 0, (f"train.lr={rate:g}",))
        for name in methods.REMEDIES
        for rate in methods.REMEDY_RATES
    ]
    few = range(min(seeds, 2))
    for method in (methods.EARLIER, methods.IMITATION):
        rows += [Row("longer", method, seed, ("train.steps=450",)) for seed in few]
        rows += [Row("mixture", method, seed, (), "mixture") for seed in few]
    rows.append(Row("no-logps", methods.EARLIER, 0, (), "plain"))
    rows += [
        Row("fresh", name, seed, ("train.steps=100", "evaluate.every=50", f"train.lr={rate}"), "")
        for rate in methods.FRESH_RATES
        for name in methods.ON_FRESH
        for seed in range(min(seeds, 3))
    ]
    for method, changes in methods.REPLAY.items():
        rows += [Row("replay", method, seed, replay_steps(changes), "") for seed in few]
    steps = (f"train.steps={methods.LAG_UPDATES}", f"evaluate.every={methods.LAG_UPDATES // 4}")
    rows += [Row("lag", name, 0, (*steps, "train.groups=8"), "") for name in methods.LAGS]
    return rows


def replay_steps(changes: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings with which a constant share has sampled GENERATIONS responses when accuracy is measured."""
    share = changes["data"]["replay"]
    if not isinstance(share, float):  # grows, and names its steps
        return ("evaluate.every=50",)
    fresh = round(64 * (1 - share))  # responses a step
    return (
        f"train.steps={methods.GENERATIONS[-1] // fresh}",
        f"evaluate.every={methods.GENERATIONS[0] // fresh}",
    )


def options(measured: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The trials of each method's option, at the best of its learning rates."""
    rows = []
    for method, best in best_trials(measured).items():
        name, values = methods.OPTIONS.get(method, ("", ()))
        objective = methods.METHODS[method]["objective"]
        default = {**objectives.get(objective["name"]).defaults(), **objective}.get(name)
        changes = [f"objective.{name}={value:g}" for value in values if value != default]
        rows += [Row("methods", method, 0, (*best["changes"], change)) for change in changes]
    return rows


def longer(measured: Sequence[Mapping[str, Any]]) -> list[Row]:
    """600 updates of `methods.LONGER`, with the best settings."""
    best: dict[str, Sequence[str]] = {m: run["changes"] for m, run in best_trials(measured).items()}
    return [Row("longer", m, 0, (*best.get(m, ()), "train.steps=600")) for m in methods.LONGER]


def best_trials(measured: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """By method the best run with seed 0. The recipes have no trials."""
    found: dict[str, Mapping[str, Any]] = {}
    for run in measured:
        method = run["method"]
        if run["section"] != "methods" or run["seed"] or method in methods.FIXED:
            continue
        if method not in found or run["accuracy"][-1] > found[method]["accuracy"][-1]:
            found[method] = run
    return found


def further(measured: Sequence[Mapping[str, Any]], seeds: int) -> list[Row]:
    """The other seeds of each method that ends near the recipe, with the settings that were best."""
    rows = []
    recipe = [
        m["accuracy"][-1] for m in measured if (m["section"], m["method"]) == ("methods", methods.RECIPE)
    ]
    reached = max(recipe, default=0.0)
    for method, best in best_trials(measured).items():
        if best["accuracy"][-1] < reached - methods.NEAR:
            continue
        rows += [Row("methods", method, seed, tuple(best["changes"])) for seed in range(1, min(seeds, 3))]
    return rows


def configure(row: Row, files: Mapping[str, Path], changes: Sequence[str] = ()) -> RunConfig:
    """The recipe with what this job and the row change of it."""
    samples = row.section in BASES
    lags: dict[str, dict[str, Any]] = {name: {"data": {"replay": 0.0}} for name in methods.LAGS}
    choices = {
        "fresh": methods.ON_FRESH,
        "replay": methods.REPLAY,
        "weights": methods.WEIGHTS,
        "remedies": methods.REMEDIES,
        "lag": lags,
    }
    method = choices.get(row.section, methods.METHODS)[row.method]
    stored = f"data.prompts={files['prompts']}" if samples else f"data.store={files[row.log]}"
    settings = [
        f"policy.model={logs.MODEL}",
        stored,
        f"data.eval_prompts={files['held_out']}",
        f"reward.name={HERE / 'reward.py'}:right_sum",
        f"train.steps={UPDATES}",
        f"train.seed={row.seed}",
        "train.lr=3e-4",
        "sampler.n=4",
        "sampler.max_new=64",
        "sampler.batch=256",
        "data.spread=false",  # as these runs were recorded
    ]
    recipe = harness.ROOT / "agro/config/recipes" / BASES.get(row.section, "log.toml")
    values = RunConfig.load(recipe, settings).model_dump()
    if "objective" in method:
        values["objective"] = method["objective"]
    elif row.section in ("replay", "lag"):
        values["objective"] = methods.BY_SAMPLER
    for section in ("data", "train", "evaluate"):
        values[section] |= method.get(section, {})
    if row.method not in methods.BOUNDED:
        values["train"] |= {"gain_ratio": None, "step_kl": None}  # as these runs were recorded
    values["phases"] = method.get("phases", [])
    options = {key: value for key, value in values["objective"].items() if key != "name"}
    needs = objectives.get(values["objective"]["name"]).needed(options)
    values["policy"]["cache_reference"] = "ref_logp" in needs
    folder = files["held_out"].parent
    changed = folder / f"{row.folder}.json"
    changed.write_text(json.dumps(RunConfig.of(values, row.method).model_dump(mode="json")))
    return RunConfig.load(changed, [*row.changes, *changes])


def measure(row: Row, run: Mapping[str, Any]) -> dict[str, Any]:
    """What is reported of a run."""
    seen = [m for m in run["metrics"] if m["eval_reward"] is not None]
    columns = {"step": "step", "accuracy": "eval_reward", "accuracy_se": "eval_reward_se"}
    found: dict[str, Any] = {name: [m[key] for m in seen] for name, key in columns.items()}
    found["kl_ref"] = [m["eval_kl_ref"] for m in seen]
    if run["metrics"][-1]["eval_auc"] is not None:
        found["auc"] = [m["eval_auc"] for m in seen]
    for name in ("log_ratio_best", "log_ratio_worst", "ratio_mean"):
        found[name] = _mean_known(harness.column(run["metrics"], name)[-LAST:])
    return {**asdict(row), **found, "cpu_seconds": run["cpu_seconds"]}


def _mean_known(values: NDArray[np.float64]) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def complete(row: Row, out: Path, changes: Sequence[str]) -> dict[str, Any]:
    """Train in a process of its own, unless that was done before."""
    done = out / row.folder / "measured.json"
    if not done.exists():
        words = [json.dumps(asdict(row)), str(out), *changes]
        subprocess.run([sys.executable, __file__, "--row", *words], check=True)
    measured: dict[str, Any] = json.loads(done.read_text())
    print(report.line(measured), flush=True)
    return measured


def peers() -> list[dict[str, Any]]:
    """TRL's recorded runs on fresh samples."""
    folder = harness.need(logs.FOLDER / "results")
    return [json.loads(file.read_text()) for file in sorted(folder.glob("learn_*.json"))]


def restore(out: Path) -> None:
    """Write what was recorded beside this script into `out`, so that it isn't run again."""
    for measured in json.loads((HERE / "result.json").read_text())["runs"]:
        given = {field.name: measured[field.name] for field in fields(Row)}
        done = out / Row(**{**given, "changes": tuple(given["changes"])}).folder / "measured.json"
        done.parent.mkdir(parents=True, exist_ok=True)
        if not done.exists():
            done.write_text(json.dumps(measured))


def recorded_beside(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The recorded runs that aren't among these: of settings that were run once, or weren't asked for."""
    names = [field.name for field in fields(Row)]
    known = {json.dumps([made[name] for name in names]) for made in measured}
    recorded = json.loads((HERE / "result.json").read_text())["runs"]
    return [made for made in recorded if json.dumps([made[name] for name in names]) not in known]


def train(words: Sequence[str]) -> None:
    """The process of one run."""
    given = json.loads(words[0])
    row, out = Row(**{**given, "changes": tuple(given["changes"])}), Path(words[1])
    config = configure(row, logs.prepare(out), words[2:])
    lag = methods.LAGS[row.method] if row.section == "lag" else 0
    measured = measure(row, harness.train(config, out / row.folder, lag))
    (out / row.folder / "measured.json").write_text(json.dumps(measured))


def main() -> None:
    if sys.argv[1:2] == ["--row"]:
        train(sys.argv[2:])
        return
    more = {"recorded": harness.RECORDED, "measured": harness.MEASURED}
    parser = harness.parser(__doc__, "runs/offline", record=harness.RECORD, **more)
    parser.add_argument("--only", action="append", choices=SECTIONS, help="may be given several times")
    parser.add_argument("--method", action="append", help="may be given several times")
    parser.add_argument("--seeds", type=int, default=5, help="of the recipe; of other methods at most 3")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each with one thread")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    logs.prepare(args.out)
    if args.recorded:
        restore(args.out)
    measured: list[dict[str, Any]] = []
    with ThreadPoolExecutor(args.jobs) as pool:

        def run(rows: Sequence[Row]) -> None:
            chosen = [row for row in rows if not args.only or row.section in args.only]
            chosen = [row for row in chosen if not args.method or row.method in args.method]
            if args.measured:
                chosen = [row for row in chosen if (args.out / row.folder / "measured.json").exists()]
            measured.extend(pool.map(lambda row: complete(row, args.out, args.changes), chosen))

        run(trials(args.seeds))
        run(options(measured))
        run(longer(measured))
        run(further(measured, args.seeds))
    if args.recorded:
        measured += recorded_beside(measured)
    result = {"held_out": logs.HELD_OUT, "machine": harness.machine(), "runs": measured}
    harness.keep(args, HERE, result, report.figure(measured))
    if args.record:
        harness.put(HERE / "README.md", report.fresh_table(measured, peers()), BEGIN, END)


if __name__ == "__main__":
    harness.guarded(main)
