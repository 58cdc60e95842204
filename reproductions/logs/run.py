"""Logs of other models, without log-probs: AGRO on the responses in a store, and on nothing else.

    python reproductions/logs/run.py [--data gsm8k|game24|both] [--seeds 3] [--out runs/logs] [--small]
                                     [--record] [KEY=VALUE …]

Imports two logs (`agro import`), and splits the prompts of each into two halves, each held out once. For each
half it makes π_ref by imitation, and trains from it with `agro` on the prompts whose rewards differ, seed by
seed, and on rewards that are shuffled within their prompts, as the control. It measures on the held-out
prompts how often log π/π_ref is higher for the better of two responses (AUC), and ½ Var(R), R = r − βρ.
Prints tables and writes result.json and figure.png into --out, with --record beside this script too. An
interrupted run continues. KEY=VALUE are settings of phase `agro`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro.config import RunConfig  # noqa: E402
from agro.stats.intervals import standard_error  # noqa: E402
from reproductions import harness  # noqa: E402
from reproductions.logs.data import FOLDS, LOGS, describe, mixed, shuffled, split  # noqa: E402
from reproductions.logs.measures import above_chance, baselines, pooled  # noqa: E402

SERIES = (("seeds", "agro", harness.COLORS[0]), ("control", "shuffled rewards", harness.COLORS[1]))


def settings(name: str, overrides: Sequence[str], small: bool) -> tuple[RunConfig, RunConfig]:
    """The recipe's two phases, as a run each: π_ref is made once a fold, and every seed starts from it.

    `overrides` are of phase `agro`, so that π_ref stays the same.
    """
    file = HERE / f"{name}.toml"
    phases = RunConfig.load(file).phase("sft"), RunConfig.load(file, overrides).phase("agro")
    if not small:
        return phases
    tiny = {
        "policy": {"new": {"hidden": 16, "layers": 1}},
        "train": {"steps": 4, "groups": 2},
        "evaluate": {"every": 2},
    }
    return changed(phases[0], tiny), changed(phases[1], tiny)


def changed(config: RunConfig, changes: dict[str, dict[str, Any]]) -> RunConfig:
    return RunConfig.of(harness.merged(config.model_dump(), changes))


def one_run(config: RunConfig, seed: int, stores: tuple[Path, Path], folder: Path) -> dict[str, Any]:
    """One training on one fold: its held-out measurements in the order of the steps, and what it took."""
    train, heldout = stores
    data = {"store": str(train), "eval_store": str(heldout)}
    run = harness.train(changed(config, {"train": {"seed": seed}, "data": data}), folder)
    return {
        "measured": [m for m in run["metrics"] if m["eval_auc"] is not None],
        "train_dropped": sum(m["dropped"] or 0 for m in run["metrics"]),
        "seconds": run["seconds"],
        "cpu_seconds": run["cpu_seconds"],
    }


def of_seed(seed: int, folds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The runs of a seed on all folds, as one measurement of all groups."""
    by_step = zip(*(fold["measured"] for fold in folds), strict=True)
    curve = [{"step": rows[0]["step"], **pooled(rows)} for rows in by_step]
    return {
        "seed": seed,
        **curve[-1],
        "errors": above_chance(curve[-1]),
        "train_dropped": sum(fold["train_dropped"] for fold in folds),
        "curve": curve,
        "seconds": [fold["seconds"] for fold in folds],
        "cpu_seconds": [fold["cpu_seconds"] for fold in folds],
    }


def over_seeds(seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The lowest of the seeds, and their mean with its standard error (None for one seed)."""
    auc = np.array([seed["auc"] for seed in seeds])
    lowest = {"auc": float(auc.min()), "errors": min(seed["errors"] for seed in seeds)}
    mean_se = standard_error(auc) if len(seeds) > 1 else None
    return {"lowest": lowest, "mean": float(auc.mean()), "mean_se": mean_se}


def is_chance(control: Sequence[dict[str, Any]]) -> bool:
    """Whether the mean AUC of the control's seeds is within two standard errors of 0.5.

    The larger error counts: that over prompts, which is of one seed, or that over seeds.
    """
    mean = over_seeds(control)
    errors = [mean["mean_se"] or 0.0, *(seed["auc_se"] for seed in control)]
    return bool(abs(mean["mean"] - 0.5) <= 2 * max(errors))


def imported(name: str, folder: Path) -> Path:
    """The store of a log."""
    log, store = LOGS[name], folder / "log.db"
    harness.import_log(harness.SHARED / log.file, store, log.columns)
    return store


def references(sft: RunConfig, folds: Sequence[tuple[Path, Path]], folder: Path) -> list[dict[str, Any]]:
    """π_ref of each fold, where it is, its last loss and what it took."""
    made = []
    for fold, (train, _) in enumerate(folds):
        to = folder / f"reference-{fold}"
        run = harness.train(changed(sft, {"data": {"store": str(train)}}), to)
        spent = {key: run[key] for key in ("seconds", "cpu_seconds")}
        made.append({"model": str(to / "model"), "loss": run["metrics"][-1]["loss"], **spent})
    return made


def one_log(name: str, seeds: int, out: Path, small: bool, overrides: Sequence[str]) -> dict[str, Any]:
    log, folder = LOGS[name], out / name
    store = imported(name, folder)
    sft, agro_ = settings(name, overrides, small)
    folds = [split(store, fold, 8 if small else None) for fold in range(FOLDS)]
    result: dict[str, Any] = {"title": log.title, "goal": {"auc": log.auc, "errors": log.errors}}
    result |= {"log": describe(store, sft), "baselines": baselines(folds)}
    made = references(sft, folds, folder)
    starts = [changed(agro_, {"policy": {"model": of["model"], "new": None}}) for of in made]
    result["references"] = [{key: of[key] for key in ("loss", "seconds", "cpu_seconds")} for of in made]
    result |= {"seeds": [], "control": []}
    for seed in range(seeds):
        trained, control = [], []
        for fold, (train, heldout) in enumerate(folds):
            stores, to = (mixed(train), heldout), folder / f"seed-{seed}-{fold}"
            trained.append(one_run(starts[fold], seed, stores, to))
            stores, to = (shuffled(mixed(train), seed), heldout), folder / f"control-{seed}-{fold}"
            control.append(one_run(starts[fold], seed, stores, to))
        result["seeds"].append(of_seed(seed, trained))
        result["control"].append(of_seed(seed, control))
    config = {key: phase.model_dump(mode="json") for key, phase in (("sft", sft), ("agro", agro_))}
    return result | judged(result) | {"config": config}


def judged(result: dict[str, Any]) -> dict[str, Any]:
    """Means over seeds, whether the goals are reached, and the CPU seconds of all trainings."""
    lowest = over_seeds(result["seeds"])["lowest"]
    goal = result["goal"]
    spent = [run["cpu_seconds"] for run in result["references"]]
    for seed in (*result["seeds"], *result["control"]):
        spent += seed["cpu_seconds"]
    return {
        "over_seeds": over_seeds(result["seeds"]),
        "control_over_seeds": over_seeds(result["control"]),
        "reached": lowest["auc"] >= goal["auc"] and lowest["errors"] >= goal["errors"],
        "control_at_chance": is_chance(result["control"]),
        "cpu_seconds": None if None in spent else sum(spent),
    }


def table(result: dict[str, Any]) -> str:
    log, last = result["log"], result["seeds"][-1]
    rewards = ", ".join(f"{source} {mean:.3f}" for source, mean in log["reward_mean"].items())
    head = ["", "AUC", "standard error", "errors above 0.5", "½Var(R) at π_ref", "after", "fall", "its error"]
    rows = [row(f"seed {seed['seed']}", seed) for seed in result["seeds"]]
    rows += [row(f"shuffled rewards, seed {seed['seed']}", seed) for seed in result["control"]]
    rows += [row(name, found) for name, found in result["baselines"].items()]
    lines = [
        f"\n{result['title']}: {log['groups']} prompts, {log['samples']} responses; "
        f"{log['groups_equal']} prompts have equal rewards; "
        f"invalid responses: {log['dropped'] or 'none'}; mean reward: {rewards}",
        "",
        harness.markdown(head, rows),
    ]
    lowest, goal = result["over_seeds"]["lowest"], result["goal"]
    lines += [
        "",
        f"Over {last['mixed']} held-out prompts with unequal rewards. Lowest seed: AUC {lowest['auc']:.3f}, "
        f"{lowest['errors']:.1f} standard errors above 0.5; the goal of {goal['auc']:g} and "
        f"{goal['errors']:g} is {'reached' if result['reached'] else 'NOT reached'}.",
        f"Mean of the seeds: {mean(result['over_seeds'])}; with shuffled rewards: "
        f"{mean(result['control_over_seeds'])}, which is {'' if result['control_at_chance'] else 'NOT '}"
        "within two standard errors of chance.",
    ]
    if result["cpu_seconds"] is not None:
        lines.append(f"All trainings took {result['cpu_seconds'] / 60:.1f} CPU minutes.")
    return "\n".join(lines)


def row(name: str, found: dict[str, Any]) -> list[str]:
    errors = above_chance(found)
    away = "–" if errors is None else f"{errors:.1f}"
    variance = [f"{found['before']:.5f}", f"{found['after']:.5f}", f"{found['relative']:.1%}"]
    return [
        *(name, f"{found['auc']:.3f}", f"{found['auc_se']:.3f}", away),
        *(*variance, f"{found['fall_se'] / found['before']:.1%}"),
    ]


def mean(over_seeds: dict[str, Any]) -> str:
    if over_seeds["mean_se"] is None:
        return f"{over_seeds['mean']:.3f}"
    return f"{over_seeds['mean']:.3f} ± {over_seeds['mean_se']:.3f}"


def draw(results: Mapping[str, dict[str, Any]]) -> Figure:
    """Held-out AUC against steps, with standard errors at the end, above held-out ½ Var(R)."""
    figure = Figure(figsize=(4.9 * len(results), 6.2), layout="constrained")
    for i, result in enumerate(results.values()):
        steps = result["seeds"][0]["curve"][-1]["step"]
        upper = harness.axes(figure, (2, len(results), i + 1), result["title"], steps)
        ranking(upper, result)
        lower = harness.axes(figure, (2, len(results), len(results) + i + 1), "", steps)
        variance(lower, result)
    return figure


def ranking(axes: Any, result: dict[str, Any]) -> None:
    names: dict[str, tuple[float, str]] = {}
    for key, name, color in SERIES:
        curves(axes, result[key], color, lambda point: point["auc"])
        ends = [seed["auc"] for seed in result[key]]
        at = [seed["curve"][-1]["step"] for seed in result[key]]
        errors = [seed["auc_se"] for seed in result[key]]
        axes.errorbar(at, ends, errors, fmt="none", color=color, linewidth=0.8, clip_on=False)
        names[name] = (sum(ends) / len(ends), color)
    for name, found in result["baselines"].items():
        axes.axhline(found["auc"], color=harness.INK, linewidth=1, linestyle=":", zorder=1)
        names[name] = (found["auc"], harness.INK)
    axes.axhline(0.5, color=harness.MUTED, linewidth=1, zorder=1)
    axes.axhline(result["goal"]["auc"], color=harness.MUTED, linewidth=1, linestyle="--", zorder=1)
    names["goal"] = (result["goal"]["auc"], harness.MUTED)
    axes.set_ylabel("held-out AUC of log π/π_ref", fontsize=8, color=harness.MUTED)
    harness.name_lines(axes, names)


def variance(axes: Any, result: dict[str, Any]) -> None:
    names: dict[str, tuple[float, str]] = {}
    for key, name, color in SERIES:
        curves(axes, result[key], color, lambda point: 100 - 100 * point["relative"])
        ends = [100 - 100 * seed["relative"] for seed in result[key]]
        names[name] = (sum(ends) / len(ends), color)
    axes.axhline(100, color=harness.MUTED, linewidth=1, zorder=1)
    axes.set_ylabel("held-out ½Var(R), % of π_ref's", fontsize=8, color=harness.MUTED)
    harness.name_lines(axes, names)


def curves(axes: Any, seeds: list[dict[str, Any]], color: str, height: Any) -> None:
    for seed in seeds:
        at = [point["step"] for point in seed["curve"]]
        heights = [height(point) for point in seed["curve"]]
        axes.plot(at, heights, color=color, linewidth=1.4, marker="o", markersize=3, clip_on=False)


def main() -> None:
    switches = {"small": "few groups, few steps: seconds, and no result", "record": harness.RECORD}
    parser = harness.parser(__doc__, "runs/logs", seeds=3, **switches)
    parser.add_argument("--data", choices=(*LOGS, "both"), default="both")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    out = args.out.resolve()
    names = LOGS if args.data == "both" else [args.data]
    results = {name: one_log(name, args.seeds, out, args.small, args.overrides) for name in names}
    for result in results.values():
        print(table(result))
    record = {"machine": harness.machine(), **results}
    harness.keep(args, HERE, record, draw(results))


if __name__ == "__main__":
    harness.guarded(main)
