"""Training on a fixed log: agro by the recipe, agro without its weight, and imitation of the right answers.

    python reproductions/offline/run.py [--seeds 3] [--only METHOD …] [--steps 150] [--out runs/offline]
                                        [--record] [KEY=VALUE …]

The log has 512 sums with four responses each, by a model that adds carelessly: 28 % of them are right. Each
method takes 150 updates of 16 prompts at learning rate 1e-4, and is measured on held-out sums at temperature
1. Writes result.json and figure.png into --out, with --record beside this script too. An interrupted run
continues.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro.config import RunConfig  # noqa: E402
from reproductions import harness  # noqa: E402

FOLDER = harness.SHARED / "peers/trl"
RECIPE = harness.ROOT / "recipes/log.toml"
HELD_OUT = 1024
METHODS: dict[str, tuple[str, ...]] = {  # changes of the recipe
    "agro, the recipe": (),
    "agro, no weight": ("objective.weight=none", "objective.beta=0.1"),
    "sft on right responses": ("data.min_reward=1.0",),
}
IMITATION = "sft on right responses"


def task() -> Any:
    """The module that made the log, for its held-out prompts."""
    spec = importlib.util.spec_from_file_location("task", harness.need(FOLDER / "task.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prepare(out: Path) -> dict[str, Path]:
    """The log as a store, and the held-out prompts."""
    files = {"log": out / "log.db", "held_out": out / "held_out.jsonl"}
    if all(f.exists() for f in files.values()):
        return files
    out.mkdir(parents=True, exist_ok=True)
    for f in files.values():
        f.unlink(missing_ok=True)
    columns = ("prompt=prompt", "response=responses", "reward=rewards")
    harness.import_log(FOLDER / "logged.jsonl.gz", files["log"], columns)
    made = task()
    prompts = made.make_prompts(HELD_OUT, made.EVAL_SEED)
    answers = [str(sum(map(int, p.rstrip("=").split("+")))) for p in prompts]
    rows = [json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in zip(prompts, answers, strict=True)]
    files["held_out"].write_text("".join(rows))
    return files


def configure(
    method: str, seed: int, steps: int, files: Mapping[str, Path], changes: Sequence[str]
) -> RunConfig:
    """The recipe with what this job changes of it."""
    settings = [
        f"policy.model={FOLDER / 'models/tiny'}",
        f"data.store={files['log']}",
        f"data.eval_prompts={files['held_out']}",
        f"reward.name={HERE / 'reward.py'}:right_sum",
        f"train.steps={steps}",
        f"train.seed={seed}",
        "train.lr=1e-4",
        "sampler.max_new=64",
        "sampler.batch=256",
        "evaluate.every=50",
        *METHODS[method],
        *changes,
    ]
    config = RunConfig.load(RECIPE, settings)
    if method != IMITATION:
        return config
    values = config.model_dump(exclude={"phases"})
    return RunConfig.of({**values, "objective": {"name": "sft"}}, "imitation")


def measure(method: str, seed: int, run: Mapping[str, Any]) -> dict[str, Any]:
    """What is reported of a run."""
    seen = [m for m in run["metrics"] if m["eval_reward"] is not None]
    return {
        "method": method,
        "seed": seed,
        "step": [m["step"] for m in seen],
        "accuracy": [m["eval_reward"] for m in seen],
        "accuracy_se": [m["eval_reward_se"] for m in seen],
        "kl_ref": [m["eval_kl_ref"] for m in seen],
        "cpu_seconds": run["cpu_seconds"],
    }


def figure(runs: Sequence[Mapping[str, Any]], steps: int) -> Figure:
    """Held-out accuracy against updates; a thin line a seed, a thick one the mean."""
    found = Figure(figsize=(7.0, 3.4), layout="constrained")
    axes = harness.axes(found, (1, 1, 1), "held-out accuracy from the log alone", steps)
    ends = {}
    for method, color in zip(METHODS, harness.COLORS, strict=True):
        curves = [r for r in runs if r["method"] == method]
        for curve in curves:
            axes.plot(curve["step"], curve["accuracy"], color=color, linewidth=0.8, alpha=0.4)
        if curves:
            mean = np.mean([c["accuracy"] for c in curves], axis=0)
            axes.plot(curves[0]["step"], mean, color=color, linewidth=2.0)
            ends[method] = (float(mean[-1]), color)
    axes.set_ylim(0, 1)
    harness.name_lines(axes, ends)
    return found


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """The end of each run as Markdown."""
    lines = [
        "| method | seed | accuracy | KL to the reference, nats | CPU seconds |",
        "|---|---|---|---|---|",
    ]
    for r in runs:
        end = f"{r['accuracy'][-1]:.3f} ± {r['accuracy_se'][-1]:.3f} | {r['kl_ref'][-1]:.2f}"
        seconds = "not known" if r["cpu_seconds"] is None else f"{r['cpu_seconds']:.0f}"
        lines.append(f"| {r['method']} | {r['seed']} | {end} | {seconds} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=list(METHODS), help="may be given several times")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("runs/offline"))
    parser.add_argument("--record", action="store_true", help="write the result beside this script too")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    files = prepare(args.out)
    runs = []
    for seed in range(args.seeds):
        for method in args.only or METHODS:
            config = configure(method, seed, args.steps, files, args.changes)
            name = method.replace(", ", "-").replace(" ", "-")
            runs.append(measure(method, seed, harness.train(config, args.out / f"{name}-{seed}")))
            print(table(runs[-1:]), flush=True)
    result = {"updates": args.steps, "held_out": HELD_OUT, "machine": harness.machine(), "runs": runs}
    for folder in (args.out, *((HERE,) if args.record else ())):
        harness.record(folder, result, figure(runs, args.steps))
    print(table(runs))


if __name__ == "__main__":
    harness.guarded(main)
