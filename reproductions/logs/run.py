"""Logs of other models, without log-probs: AGRO on the answers in a store, and on nothing else.

    python reproductions/logs/run.py [--data gsm8k|game24|both] [--seeds 3] [--out runs/logs] [--small]
                                     [--record] [KEY=VALUE …]

Imports two logs (`agro import`) and splits their prompts into training and held-out ones. Then it asks for an
objective that the log can't serve (`agro train … objective.name=grpo` is refused), and trains recipe by
recipe and seed by seed with `agro`. It measures ½ Var(R) within held-out groups, R = r − βρ. At π_ref, where
the second phase of a recipe begins, ρ = 0 and R = r. Prints tables and writes result.json and figure.png into
--out, with --record beside this script too. An interrupted run continues.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro.config import RunConfig  # noqa: E402
from agro.errors import Refused  # noqa: E402
from agro.policy import InvalidSample, Policy  # noqa: E402
from agro.store import Group, Store  # noqa: E402
from agro.types import Sample  # noqa: E402
from reproductions import harness  # noqa: E402

GOAL, ERRORS = 0.05, 3.0  # relative fall of held-out ½ Var(R), and that fall in standard errors


@dataclass(frozen=True)
class Log:
    """A log, how it is imported, and its split.

    Prompts are assigned to `parts` by hash; each of `folds` is held out once.
    """

    title: str
    file: str
    columns: tuple[str, ...]
    parts: int
    folds: int

    @property
    def split(self) -> str:
        folds = " or ".join(map(str, range(self.folds)))
        return f"held out: sha256(prompt_id) mod {self.parts} = {folds}" + (
            ", in turn" if self.folds > 1 else ""
        )


LOGS = {
    "gsm8k": Log(
        "Four models' answers to GSM8K",
        "data/generations/gsm8k_openai_6b_175b.jsonl.gz",
        ("prompt=question", "response=*.solution", "reward=*.is_correct"),
        parts=4,
        folds=1,
    ),
    "game24": Log(
        "GPT-4's answers to the game of 24",
        "data/game24/game24_gpt4_cot_100x100.jsonl.gz",
        ("prompt=puzzle", "response=responses", "reward=rewards"),
        parts=2,
        folds=2,
    ),
}


def part_of(prompt_id: str, parts: int) -> int:
    """By a hash of the prompt's id: the same on every machine, whatever else the log holds."""
    return int(hashlib.sha256(prompt_id.encode()).hexdigest(), 16) % parts


def split(store: Path, fold: int, of: int, most: int | None) -> tuple[Path, Path]:
    """Stores of the training and of the held-out groups (`most` of each at most, where that is given)."""
    parts = (store.with_name(f"train-{fold}.db"), store.with_name(f"heldout-{fold}.db"))
    if not all(p.exists() for p in parts):
        with Store.open(store, read_only=True) as whole:
            ids = [g.prompt_id for g in whole.groups()]
            for path, held in zip(parts, (False, True), strict=True):
                chosen = set([i for i in ids if (part_of(i, of) == fold) == held][:most])
                path.unlink(missing_ok=True)
                with Store.open(path) as part:
                    part.append(s for s in whole.samples() if s.prompt_id in chosen)
    return parts


def groups_of(path: Path) -> list[list[Sample]]:
    found: dict[str, list[Sample]] = {}
    with Store.open(path, read_only=True) as store:
        for sample in store.samples():
            found.setdefault(sample.prompt_id, []).append(sample)
    return list(found.values())


def describe(path: Path, config: RunConfig) -> dict[str, Any]:
    """What a store holds, and how many of its rows the model can't be trained on, by reason."""
    policy, left_out, by_source = Policy.load(config.policy), Counter[str](), dict[str, list[float]]()
    with Store.open(path, read_only=True) as store:
        groups: list[Group] = store.groups()
        for sample in store.samples():
            by_source.setdefault(sample.source, []).append(float(sample.reward or 0))
            try:
                policy.encode(sample, config.train.max_length)
            except InvalidSample as error:
                left_out[error.reason] += 1
    return {
        "groups": len(groups),
        "samples": sum(g.size for g in groups),
        "left_out": dict(left_out),
        "groups_equal": sum(g.reward_min == g.reward_max for g in groups),
        "reward_mean": {source: float(np.mean(r)) for source, r in by_source.items()},
    }


def by_source(train: Path, heldout: Path) -> dict[str, float] | None:
    """½ Var(r − c) on held-out groups, c the best constant for each source on the training groups.

    None for one source.

    Least squares on what differs within groups: ½ Var doesn't see what a whole group has in common.
    """
    fit, test = groups_of(train), groups_of(heldout)
    sources = sorted({s.source for g in fit for s in g})
    if len(sources) == 1:
        return None

    def centered(groups: Sequence[Sequence[Sample]]) -> Iterable[tuple[np.ndarray, np.ndarray]]:
        for group in groups:
            x = np.array([[s.source == name for name in sources] for s in group], dtype=float)
            r = np.array([s.reward for s in group], dtype=float)
            yield x - x.mean(0), r - r.mean()

    weighted = [(x / len(r) ** 0.5, r / len(r) ** 0.5) for x, r in centered(fit)]
    c = np.linalg.lstsq(
        np.concatenate([x for x, _ in weighted]), np.concatenate([r for _, r in weighted]), rcond=None
    )[0]
    before, after = (
        np.array([0.5 * float(e @ e) / (len(e) - 1) for e in errors])
        for errors in ([r for _, r in centered(test)], [r - x @ c for x, r in centered(test)])
    )
    return compare(float(before.mean()), *_fall(before - after))


def _fall(differences: np.ndarray) -> tuple[float, float]:
    return float(differences.mean()), float(differences.std(ddof=1) / len(differences) ** 0.5)


def compare(before: float, fall: float, se: float) -> dict[str, float | None]:
    """A paired decrease by group: absolute, relative, in standard errors over groups.

    The last is None if nothing moved.
    """
    relative, errors = fall / before, fall / se if se else None
    return {
        "before": before,
        "after": before - fall,
        "fall": fall,
        "fall_se": se,
        "relative": relative,
        "errors": errors,
    }


def refusal(recipe: Path, train: Path, folder: Path) -> dict[str, Any]:
    """GRPO needs log-probs of the behavior policy, which no log of texts has."""
    done = harness.agro(
        "train", recipe, "objective.name=grpo", f"data.store={train}", "--out", folder / "refused"
    )
    print(f"{done.stderr.strip()}\n(exit {done.returncode})\n")
    if done.returncode != 2 or "behavior_logp" not in done.stderr:
        raise Refused(f"grpo on {train}: expected a refusal with exit 2, got exit {done.returncode}")
    return {"exit": done.returncode, "message": done.stderr.strip()}


def settings(name: str, overrides: Sequence[str], small: bool) -> tuple[RunConfig, RunConfig]:
    """The recipe's two phases, as a run each: π_ref is made once, and every seed starts from it."""
    recipe = RunConfig.load(HERE / f"{name}.toml", overrides)
    if not small:
        return recipe.phase("sft"), recipe.phase("agro")
    tiny = {
        "policy": {"new": {"hidden": 16, "layers": 1}},
        "train": {"steps": 4, "groups": 2},
        "evaluate": {"every": 2},
    }
    return changed(recipe.phase("sft"), tiny), changed(recipe.phase("agro"), tiny)


def changed(config: RunConfig, changes: dict[str, dict[str, Any]]) -> RunConfig:
    def merge(old: Any, new: Any) -> Any:
        return (
            {**old, **{k: merge(old.get(k), v) for k, v in new.items()}}
            if isinstance(old, dict) and isinstance(new, dict)
            else new
        )

    return RunConfig.of(merge(config.model_dump(), changes))


def one_seed(config: RunConfig, folder: Path) -> dict[str, Any]:
    """One run on one fold: its held-out measurements in the order of the steps, and what it took."""
    run = harness.train(config, folder)
    return {
        "measured": [m for m in run["metrics"] if m["eval_consistency"] is not None],
        "train_left_out": sum(m["dropped"] or 0 for m in run["metrics"]),
        "seconds": run["seconds"],
        "cpu_seconds": run["cpu_seconds"],
    }


def pooled(folds: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Decrease of ½ Var(R) over the groups of all folds, from every fold's mean and error.

    Each group is held out in one fold.
    """
    n, mean, se, now = (
        np.array([f[k] for f in folds], dtype=float)
        for k in ("eval_groups", "eval_consistency_fall", "eval_consistency_fall_se", "eval_consistency")
    )
    fall, total = float(n @ mean / n.sum()), n.sum()
    squares = float((n * (n - 1) * se**2).sum() + (n * (mean - fall) ** 2).sum())
    return compare(float(n @ (now + mean) / total), fall, (squares / (total - 1) / total) ** 0.5)


def one_log(name: str, seeds: int, out: Path, small: bool, overrides: Sequence[str]) -> dict[str, Any]:
    log, folder = LOGS[name], out / name
    store = folder / "log.db"
    harness.import_log(harness.SHARED / log.file, store, log.columns)
    sft, agro_ = settings(name, overrides, small)
    result: dict[str, Any] = {
        "title": log.title,
        "split": log.split,
        "log": describe(store, sft),
        "by_source": [],
        "references": [],
        "seeds": [],
    }
    runs: list[list[dict[str, Any]]] = [[] for _ in range(seeds)]
    for fold in range(log.folds):
        train, heldout = split(store, fold, log.parts, 8 if small else None)
        if fold == 0:
            result["refused"] = refusal(HERE / f"{name}.toml", train, folder)
        result["by_source"].append(by_source(train, heldout))
        reference = folder / f"reference-{fold}"
        made = harness.train(changed(sft, {"data": {"store": str(train)}}), reference)
        result["references"].append(
            {k: made[k] for k in ("seconds", "cpu_seconds")} | {"loss": made["metrics"][-1]["loss"]}
        )
        for seed in range(seeds):
            config = changed(
                agro_,
                {
                    "policy": {"model": str(reference / "model"), "new": None},
                    "train": {"seed": seed},
                    "data": {"store": str(train), "eval_store": str(heldout)},
                },
            )
            runs[seed].append(one_seed(config, folder / f"seed-{seed}-{fold}"))
    for seed, folds in enumerate(runs):
        curve = [
            {"step": rows[0]["step"], **pooled(rows)}
            for rows in zip(*(f["measured"] for f in folds), strict=True)
        ]
        result["seeds"].append(
            {
                "seed": seed,
                **curve[-1],
                "groups": sum(f["measured"][-1]["eval_groups"] for f in folds),
                "left_out": {
                    "training draws": sum(f["train_left_out"] for f in folds),
                    "held-out rows": sum(f["measured"][-1]["eval_dropped"] for f in folds),
                },
                "curve": curve,
                "seconds": [f["seconds"] for f in folds],
                "cpu_seconds": [f["cpu_seconds"] for f in folds],
            }
        )
    lowest = {k: min(s[k] for s in result["seeds"]) for k in ("relative", "errors")}
    reached = lowest["relative"] >= GOAL and lowest["errors"] >= ERRORS
    config = {"sft": sft.model_dump(mode="json"), "agro": agro_.model_dump(mode="json")}
    return result | {"lowest": lowest, "reached": reached, "config": config}


def table(result: dict[str, Any]) -> str:
    """As it stands in the README."""
    log = result["log"]
    rewards = ", ".join(f"{k} {v:.3f}" for k, v in log["reward_mean"].items())
    lines = [
        f"\n{result['title']}: {log['groups']} groups, {log['samples']} samples; "
        f"in {log['groups_equal']} groups all "
        f"rewards are equal; rows that can't be used: {log['left_out'] or 'none'}; mean reward: {rewards}",
        "| | ½Var(R) at π_ref | after | fall | standard error | relative | in standard errors |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = [(f"seed {s['seed']}", s) for s in result["seeds"]]
    rows += [("a constant per source", c) for c in result["by_source"] if c]
    lines += [
        f"| {name} | {s['before']:.5f} | {s['after']:.5f} | {s['fall']:.5f} | {s['fall_se']:.5f} "
        f"| {s['relative']:.1%} | {s['errors']:.1f} |"
        for name, s in rows
    ]
    if not all(result["by_source"]):
        lines.append(
            "There is one source: a constant for it changes no difference within a group; its fall is 0."
        )
    lowest = result["lowest"]
    lines.append(
        f"Lowest of {len(result['seeds'])} seeds: {lowest['relative']:.1%}, "
        f"{lowest['errors']:.1f} standard errors; "
        f"the goal of {GOAL:.0%} and {ERRORS:.0f} is {'reached' if result['reached'] else 'NOT reached'}."
    )
    return "\n".join(lines)


def draw(results: dict[str, dict[str, Any]]) -> Figure:
    """Held-out ½ Var(R) against steps, in percent of its value at π_ref, a panel a log."""
    figure = Figure(figsize=(4.9 * len(results), 3.4), layout="constrained")
    for i, result in enumerate(results.values()):
        axes = harness.axes(
            figure, (1, len(results), i + 1), result["title"], result["seeds"][0]["curve"][-1]["step"]
        )
        names: dict[str, tuple[float, str]] = {}
        for seed, color in zip(result["seeds"], harness.COLORS):
            at = [p["step"] for p in seed["curve"]]
            axes.plot(
                at,
                [100 - 100 * p["relative"] for p in seed["curve"]],
                color=color,
                linewidth=1.8,
                marker="o",
                markersize=3,
                clip_on=False,
            )
            names[f"seed {seed['seed']}"] = (100 - 100 * seed["relative"], color)
        axes.axhline(100, color=harness.MUTED, linewidth=1, zorder=1)
        axes.yaxis.set_major_formatter(lambda percent, _: "π_ref" if percent == 100 else f"{percent:g} %")
        axes.axhline(100 * (1 - GOAL), color=harness.MUTED, linewidth=1, linestyle="--", zorder=1)
        names["goal"] = (100 * (1 - GOAL), harness.MUTED)
        for constant in filter(None, result["by_source"]):
            axes.axhline(100 - 100 * constant["relative"], color=harness.INK, linewidth=1, linestyle=":")
            names["constant per source"] = (100 - 100 * constant["relative"], harness.INK)
        axes.set_ylabel("held-out ½Var(R), % of π_ref's", fontsize=8, color=harness.MUTED)
        harness.name_lines(axes, names)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="run.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", choices=(*LOGS, "both"), default="both")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/logs"))
    parser.add_argument("--small", action="store_true", help="few groups, few steps: seconds, and no result")
    parser.add_argument(
        "--record", action="store_true", help="write result.json and figure.png beside this script"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    out = args.out.resolve()
    names = list(LOGS) if args.data == "both" else [args.data]
    results = {name: one_log(name, args.seeds, out, args.small, args.overrides) for name in names}
    for result in results.values():
        print(table(result))
    record = {"machine": harness.machine(), "goal": {"relative": GOAL, "errors": ERRORS}, **results}
    for folder in (out, *([HERE] if args.record else [])):
        harness.record(folder, record, draw(results))


if __name__ == "__main__":
    harness.guarded(main)
