"""Digit completion from random weights, by AGRO and by RLOO on fresh samples.

    python reproductions/digits/run.py [--seeds 3] [--out runs/digits] [--record] [KEY=VALUE …]

The prompt `a,b:max,n` asks for the n terms that follow a, b in the arithmetic sequence modulo max, separated
by commas: `8,3:9,4` -> `7,2,6,1`. Trains recipe.toml for each objective and seed (an interrupted run
continues). Prints the table and writes result.json and figure.png into --out, with --record beside this
script too.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro.config import RunConfig  # noqa: E402
from agro.rollout.prompts import load_prompts  # noqa: E402
from reproductions import harness  # noqa: E402
from reproductions.digits.reward import prefix  # noqa: E402

OBJECTIVES = {"agro": (), "rloo": ("objective.name=rloo", "objective.beta=0")}
GOAL, WINDOW = 0.2, 20  # mean training reward over so many steps, so that one lucky step doesn't count


def numbers(prompt: str) -> tuple[int, int, int, int]:
    """`a,b:max,n`"""
    a, b, top, n = (int(x) for x in prompt.replace(":", ",").split(","))
    return a, b, top, n


def answer(prompt: str) -> str:
    """The n terms after b, each b − a further than the one before, modulo max."""
    a, b, top, n = numbers(prompt)
    return ",".join(str((b + (b - a) * k) % top) for k in range(1, n + 1))


def prepare(folder: Path) -> dict[str, int]:
    """Write train.jsonl and test.jsonl with answers. No prompt is there twice, and none is in both."""
    rows, given = {}, {}
    for part in ("train", "test"):
        path = harness.need(harness.SHARED / f"data/rl_tasks/digit_completion_{part}.jsonl")
        asked = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
        rows[part], given[part] = list(dict.fromkeys(asked)), asked
    trained = set(rows["train"])
    kept = {"train": rows["train"], "test": [p for p in rows["test"] if p not in trained]}
    folder.mkdir(parents=True, exist_ok=True)
    for part, prompts in kept.items():
        harness.write_prompts(folder / f"{part}.jsonl", prompts, answer)
    return {
        "train_rows": len(given["train"]),
        "train_duplicates": len(given["train"]) - len(rows["train"]),
        "train": len(kept["train"]),
        "test_rows": len(given["test"]),
        "test_duplicates": len(given["test"]) - len(rows["test"]),
        "test_in_train": len(rows["test"]) - len(kept["test"]),
        "test": len(kept["test"]),
    }


def baseline(train: Sequence[str], test: Sequence[str]) -> dict[str, Any]:
    """The best rule that needs no model: its name, and mean reward with its standard error over prompts, of
    both parts."""
    row: dict[str, Any] = {"name": "repeat the last number n times"}
    for part, prompts in (("train", train), ("test", test)):
        responses = [",".join([str(numbers(p)[1])] * numbers(p)[3]) for p in prompts]
        scores = np.array(prefix(responses, [answer(p) for p in prompts]))
        row |= {part: float(scores.mean()), f"{part}_se": float(scores.std(ddof=1) / len(scores) ** 0.5)}
    return row


def measure(objective: str, seed: int, run: dict[str, Any]) -> dict[str, Any]:
    """What is reported of a run."""
    metrics = run["metrics"]
    window = min(WINDOW, len(metrics) - 1)
    smooth = harness.trailing_mean(harness.column(metrics, "reward_mean"), window)
    passed = np.flatnonzero(smooth > GOAL)
    clock = harness.column(metrics, "seconds").cumsum()
    last = metrics[-1]
    return {
        "objective": objective,
        "seed": seed,
        "steps": last["step"],
        "first_training_reward": float(smooth[window - 1]),
        "last_training_reward": float(smooth[-1]),
        "passed_at_step": int(passed[0]) + 1 if len(passed) else None,
        "seconds_until_passed": float(clock[passed[0]]) if len(passed) else None,
        "test_reward": last["eval_reward"],
        "test_reward_se": last["eval_reward_se"],
        "kl_ref": last["eval_kl_ref"],
        "seconds": run["seconds"],
        "cpu_seconds": run["cpu_seconds"],
    }


def draw(runs: Sequence[tuple[str, dict[str, Any]]], best: dict[str, Any]) -> Figure:
    """Training reward and held-out reward against steps, one line a seed."""
    figure = Figure(figsize=(8.4, 3.3), layout="constrained")
    steps = max(run["metrics"][-1]["step"] for _, run in runs)
    panels = (
        ("train", f"training reward (mean of {WINDOW} steps)"),
        ("test", "reward on held-out prompts (± standard error)"),
    )
    for i, (part, title) in enumerate(panels):
        axes = harness.axes(figure, (1, 2, i + 1), title, steps)
        ends = defaultdict(list)
        for name, run in runs:
            color = harness.COLORS[list(OBJECTIVES).index(name)]
            if part == "train":
                values = harness.column(run["metrics"], "reward_mean")
                values = harness.trailing_mean(values, min(WINDOW, len(values)))
                axes.plot(np.arange(1, len(values) + 1), values, color=color, linewidth=1.3)
                ends[name].append(values[-1])
            else:
                ends[name].append(harness.held_out(axes, run, color))
        axes.axhline(best[part], color=harness.MUTED, linewidth=0.9, linestyle="--")
        right = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "top"}
        axes.text(1, best[part] - 0.005, best["name"], color=harness.MUTED, fontsize=7, **right)
        axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
        harness.name_phases(axes, runs[0][1]["metrics"])
        colors = dict(zip(OBJECTIVES, harness.COLORS))
        harness.name_lines(axes, {n: (float(np.mean(y)), colors[n]) for n, y in ends.items()})
    return figure


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    between = harness.between
    b = result["baseline"]
    base = [[b["name"], between(b["train"], b["train_se"]), between(b["test"], b["test_se"])]]
    head = ["objective", "seed", f"training, first {WINDOW} steps", f"last {WINDOW} steps"]
    head += [f"above {GOAL} at", "test", "KL (nats)", "minutes", "CPU minutes"]
    rows = []
    for r in result["runs"]:
        reached = "never"
        if r["passed_at_step"] is not None:
            reached = f"step {r['passed_at_step']}, {r['seconds_until_passed']:.0f} s"
        ends = [f"{r[f'{part}_training_reward']:.3f}" for part in ("first", "last")]
        test = between(r["test_reward"], r["test_reward_se"])
        rows.append(
            [r["objective"], str(r["seed"]), *ends, reached, test, f"{r['kl_ref']:.1f}", *harness.minutes(r)]
        )
    counts = ", ".join(f"{name} {count}" for name, count in result["data"].items())
    without = harness.markdown(["without training", "on training prompts", "on test prompts"], base)
    return "\n\n".join([f"Prompts: {counts}", without, harness.markdown(head, rows)])


def main(arguments: Sequence[str] | None = None) -> None:
    args = harness.arguments(__doc__, "digits", arguments, prepare="only write the prompt files")
    counts = prepare(args.prepare or args.out / "data")
    if args.prepare:
        return
    files = {part: args.out / "data" / f"{part}.jsonl" for part in ("train", "test")}
    asked = {part: [str(p.text) for p in load_prompts(path)] for part, path in files.items()}
    base = baseline(asked["train"], asked["test"])
    place = [f'data.prompts="{files["train"]}"', f'data.eval_prompts="{files["test"]}"']
    place.append(f'reward.name="{HERE / "reward.py"}:prefix"')
    runs = []
    for seed in range(args.seeds):
        for name, options in OBJECTIVES.items():
            print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
            config = RunConfig.load(
                HERE / "recipe.toml", [*place, *options, f"train.seed={seed}", *args.overrides]
            )
            runs.append((name, seed, harness.train(config, args.out / f"{name}-{seed}")))
    result = {
        "data": counts,
        "baseline": base,
        "runs": sorted((measure(*run) for run in runs), key=lambda r: (r["objective"], r["seed"])),
        "overrides": args.overrides,
        "machine": harness.machine(),
    }
    harness.keep(args, HERE, result, draw([(name, run) for name, _, run in runs], base))
    print(table(result))


if __name__ == "__main__":
    harness.guarded(main)
