"""The table of a log, as it stands in the README, and the figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from reproductions import harness
from reproductions.logs.measures import above_chance

SERIES = (("seeds", "agro", harness.COLORS[0]), ("control", "shuffled rewards", harness.COLORS[1]))


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
