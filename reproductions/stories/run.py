"""AGRO on the fresh stories of a real pretrained model of 260,032 parameters.

    python reproductions/stories/run.py [--seeds 3] [--out runs/stories] [--record] [KEY=VALUE …]

The reward (reward.py) counts the different animals that a story names, so that repetition doesn't pay. Trains
recipe.toml with each seed (an interrupted run continues), prints the table and writes result.json and
figure.png into --out, with --record beside this script too.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro.config import PolicyConfig, RunConfig, SamplerConfig  # noqa: E402
from agro.errors import Refused  # noqa: E402
from agro.models.policy import Policy  # noqa: E402
from agro.rollout.prompts import load_prompts  # noqa: E402
from agro.store import Store  # noqa: E402
from agro.types import Sample  # noqa: E402
from reproductions import harness  # noqa: E402
from reproductions.stories.reward import animals, fauna, repeated, words  # noqa: E402

MODEL = harness.SHARED / "models/stories260K"
SHOWN = 4  # held-out openings of which a story before and one after is printed


def tenths(folder: Path, steps: int) -> tuple[list[Sample], list[Sample]]:
    """The samples of the first and the last tenth of a run's steps.

    Their version is the number of steps before.
    """
    count = max(1, steps // 10)
    with Store.open(folder / "store.db", read_only=True) as store:
        found = list(store.samples())
    versions = np.array([np.max(s.version) for s in found])
    return (
        [s for s, v in zip(found, versions, strict=True) if v < count],
        [s for s, v in zip(found, versions, strict=True) if v >= steps - count],
    )


def describe(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean reward with its standard error, and the text.

    A step's responses to one prompt are one independent group.
    """
    groups = defaultdict(list)
    for s in samples:
        if s.reward is not None:
            groups[int(np.max(s.version)), s.prompt_id].append(s.reward)
    means = np.array([fmean(group) for group in groups.values()])
    texts = [s.response for s in samples]
    return {
        "reward": float(means.mean()),
        "se": float(means.std(ddof=1) / len(means) ** 0.5),
        "groups": len(means),
        "animals": fmean(len(animals(t)) for t in texts),
        "repeated": fmean(repeated(t) for t in texts),
        "words": fmean(len(words(t)) for t in texts),
        "different_words": fmean(len(set(words(t))) / max(1, len(words(t))) for t in texts),
    }


def measure(seed: int, folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """What is reported of a run."""
    metrics = run["metrics"]
    start, last = metrics[0], metrics[-1]
    if sum(m["skipped"] or 0 for m in metrics):
        raise Refused(
            f"{folder}: updates were skipped, so versions aren't steps; the tenths can't be told apart"
        )
    first, end = (describe(part) for part in tenths(folder, last["step"]))
    kl = harness.column(metrics, "kl_ref")[-max(1, last["step"] // 10) :]
    return {
        "seed": seed,
        "steps": last["step"],
        "first_tenth": first,
        "last_tenth": end,
        "standard_errors_apart": (end["reward"] - first["reward"]) / float(np.hypot(first["se"], end["se"])),
        "kl_ref": float(kl.mean()),
        "held_out": {
            k: {"reward": m["eval_reward"], "se": m["eval_reward_se"], "kl_ref": m["eval_kl_ref"]}
            for k, m in (("before", start), ("after", last))
        },
        "logp_diff_max": float(np.nanmax(harness.column(metrics, "logp_diff_max"))),
        "seconds": run["seconds"],
        "cpu_seconds": run["cpu_seconds"],
    }


def tell(models: dict[str, Path], max_new: int) -> str:
    """The first story of each model to each of the first held-out openings, in Markdown.

    They use the same noise and aren't selected.
    """
    prompts = load_prompts(HERE / "heldout.jsonl")[:SHOWN]
    told = {}
    for name, model in models.items():
        policy = Policy.load(PolicyConfig(model=str(model)))
        told[name] = harness.responses(policy, prompts, SamplerConfig(n=1, max_new=max_new))
    lines = []
    for i, prompt in enumerate(prompts):
        lines += [f"**{prompt.text}**", ""]
        for name, found in told.items():
            text = found[i].response
            score = fauna([str(prompt.text)], [text])[0]
            lines += [f"- *{name}* ({score:.2f}): {' '.join(text.split())}"]
        lines.append("")
    return "\n".join(lines)


def draw(runs: Sequence[tuple[int, dict[str, Any]]]) -> Figure:
    """Reward and KL against steps, one line a seed."""
    figure = Figure(figsize=(8.4, 3.1), layout="constrained")
    steps = max(run["metrics"][-1]["step"] for _, run in runs)
    window = max(1, steps // 20)
    panels = (
        ("reward_mean", f"training reward (mean of {window} steps)"),
        ("kl_ref", "KL to the pretrained model (nats a response)"),
    )
    for i, (key, title) in enumerate(panels):
        axes = harness.axes(figure, (1, 2, i + 1), title, steps)
        ends = {}
        for seed, run in runs:
            color = harness.COLORS[seed % len(harness.COLORS)]
            raw = harness.column(run["metrics"], key)
            smooth = harness.trailing_mean(raw, window)
            at = np.arange(1, len(raw) + 1)
            axes.plot(at, raw, color=color, linewidth=0.5, alpha=0.3)
            axes.plot(at, smooth, color=color, linewidth=1.4)
            ends[f"seed {seed}"] = (float(smooth[-1]), color)
        axes.set_ylim(0, None)
        harness.name_lines(axes, ends)
    return figure


def table(runs: Sequence[dict[str, Any]]) -> str:
    """The result in Markdown."""
    head = ["seed", "reward, first tenth", "last tenth", "standard errors apart", "KL, last tenth (nats)"]
    head += ["held-out before", "held-out after", "minutes", "CPU minutes"]
    rows, texts = [], []
    for r in runs:
        parts = [r["first_tenth"], r["last_tenth"], r["held_out"]["before"], r["held_out"]["after"]]
        first, last, before, after = (harness.between(part["reward"], part["se"]) for part in parts)
        apart = [f"{r['standard_errors_apart']:.1f}", f"{r['kl_ref']:.1f}"]
        rows.append([str(r["seed"]), first, last, *apart, before, after, *harness.minutes(r)])
        for name in ("first_tenth", "last_tenth"):
            d = r[name]
            figures = [f"{d['animals']:.2f}", f"{d['words']:.1f}", f"{d['different_words']:.2f}"]
            texts.append([str(r["seed"]), name.removesuffix("_tenth"), *figures, f"{d['repeated']:.3f}"])
    of_texts = ["seed", "tenth", "animals", "words", "different words", "repeated three-word sequences"]
    return "\n\n".join([harness.markdown(head, rows), harness.markdown(of_texts, texts)])


def main(arguments: Sequence[str] | None = None) -> None:
    args = harness.arguments(__doc__, "stories", arguments)
    place = [f'policy.model="{harness.need(MODEL)}"', f'reward.name="{HERE / "reward.py"}:fauna"']
    place += [f'data.prompts="{HERE / "prompts.jsonl"}"', f'data.eval_prompts="{HERE / "heldout.jsonl"}"']
    runs = []
    for seed in range(args.seeds):
        print(f"seed {seed}", file=sys.stderr, flush=True)
        config = RunConfig.load(HERE / "recipe.toml", [*place, f"train.seed={seed}", *args.overrides])
        runs.append((seed, harness.train(config, args.out / f"agro-{seed}")))
    found = [measure(seed, args.out / f"agro-{seed}", run) for seed, run in runs]
    stories = tell({"before": MODEL, "after": args.out / "agro-0/model"}, config.sampler.max_new)
    result = {
        "runs": found,
        "overrides": args.overrides,
        "machine": harness.machine(),
        "stories": stories.splitlines(),
    }
    harness.keep(args, HERE, result, draw(runs))
    print(table(found), stories, sep="\n\n")


if __name__ == "__main__":
    harness.guarded(main)
