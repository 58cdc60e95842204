"""What is reported of the runs: tables by job, by change and by kind of question, and texts."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from agro.config import PolicyConfig, RunConfig, SamplerConfig
from agro.models.policy import Policy
from agro.rollout import Rollout
from agro.rollout.prompts import load_prompts
from agro.rollout.rollout import embedded
from agro.train.collate import collate
from agro.train.learner import Local
from agro.types import Sample
from reproductions.chat import logs

SHOWN = 2  # held-out questions of each kind whose texts are kept; those of the first one are shown
BEGIN, END = "<!-- begin: made by run.py --record -->", "<!-- end -->"
NAMES = {
    "fresh": "fresh samples",
    "log": "a log of the start's responses",
    "thumbs": "one thumb a prompt",
}
TRAINED_BY = {
    ("fresh", "recipe"): "recipe `lora`",
    ("fresh", "imitation"): "imitation of the right ones (REINFORCE)",
    ("log", "recipe"): "recipe `log`",
    ("log", "imitation"): "imitation of the right ones (`sft`)",
    ("thumbs", "recipe"): "recipe `feedback`",
    ("thumbs", "imitation"): "imitation of the liked ones (`sft`)",
}
Record = dict[str, Any]  # of a run


def texts(model: Path, held_out: Path) -> list[dict[str, Any]]:
    """The first questions of each kind, with a response at temperature 1 and the likeliest one."""
    policy = Policy.load(PolicyConfig(model=str(model), threads=1))
    rollout = Rollout(policy.encoder, embedded(policy))
    by_kind = defaultdict(list)
    for prompt in load_prompts(held_out):
        by_kind[prompt.columns["kind"]].append(prompt)
    prompts = [prompt for found in by_kind.values() for prompt in found[:SHOWN]]
    rows = [{"question": p.text[-1]["content"], "answer": p.columns["answer"]} for p in prompts]
    for name, temperature in (("sampled", 1.0), ("likeliest", 0.0)):
        sampler = SamplerConfig(n=1, temperature=temperature, max_new=logs.MAX_NEW)
        for sample in rollout.sample(prompts, 1, sampler, seed=1):
            rows[int(sample.meta["index"])][name] = sample.response
    return rows


def kept_texts(files: logs.Files) -> list[dict[str, Any]]:
    """Those of the start."""
    found: list[dict[str, Any]] = json.loads(files.texts.read_text())
    return found


def exact(model: Path, held_out: Path) -> dict[str, dict[str, float]]:
    """Of each kind of question, without the noise of a sample: the mean probability that a response is the
    answer alone, and the share of questions whose likeliest response is right."""
    policy = Policy.load(PolicyConfig(model=str(model), threads=1))
    prompts = load_prompts(held_out)
    answers = [Sample(p.text, p.columns["answer"], prompt_id=p.id, id=i) for i, p in enumerate(prompts)]
    learner = Local(policy, None, lambda text: None)
    learner.enter(RunConfig.of({"train": {"micro_tokens": 8192}}), began=None, resumed=None)
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"probability": [], "likeliest": []})
    batch = collate([policy.encoder.encode(sample) for sample in answers], 0)
    logp_B = torch.where(batch.mask, learner.logp(batch), 0.0).sum(1)
    for prompt, logp in zip(prompts, logp_B.tolist(), strict=True):
        found[prompt.columns["kind"]]["probability"].append(math.exp(logp))
    sampler = SamplerConfig(n=1, temperature=0.0, max_new=logs.MAX_NEW)
    for sample in Rollout(policy.encoder, embedded(policy)).sample(prompts, 1, sampler, seed=1):
        kind = prompts[int(sample.meta["index"])].columns["kind"]
        found[kind]["likeliest"].append(logs.right(sample))
    return {kind: {name: fmean(values) for name, values in both.items()} for kind, both in found.items()}


def page(result: dict[str, Any]) -> str:
    """Everything that was measured, in Markdown."""
    plain = [r for r in result["runs"] if not r["changes"]]
    changed = [r for r in result["runs"] if r["changes"]]
    start = result["data"]["start"]
    parts = [
        summary(plain, start),
        *([apart(plain)] if apart(plain)[2:] else []),
        *([variants(changed, plain)] if changed else []),
        kinds(plain, start),
        shown(result),
        where(result),
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def arms(runs: Sequence[Record]) -> dict[tuple[str, str, int, float], list[Record]]:
    """By job, method, updates and rate."""
    found: dict[tuple[str, str, int, float], list[Record]] = defaultdict(list)
    for run in runs:
        found[run["job"], run["method"], run["steps"], run["rate"]].append(run)
    return dict(found)


def probability(run: Record) -> float:
    return over(run["exact"], "probability")


def summary(runs: Sequence[Record], start: dict[str, dict[str, float]]) -> list[str]:
    """A row for each job, method, number of updates and rate: means over seeds."""
    before = {name: over(start, name) for name in ("probability", "likeliest")}
    lines = [
        "| data | trained by | updates | lr | seeds | probability of the answer | the likeliest response is "
        "right | KL in the last step (nats) | CPU minutes |",
        "|---|---|---|---|---|---|---|---|---|",
        f"| – | the start | 0 | – | – | {before['probability']:.3f} | {before['likeliest']:.3f} | 0 | – |",
    ]
    for (job, method, steps, rate), found in arms(runs).items():
        columns = [
            NAMES[job],
            TRAINED_BY[job, method],
            str(steps),
            f"{rate:g}",
            ", ".join(str(r["seed"]) for r in found),
            *(_mean(over(r["exact"], name) for r in found) for name in ("probability", "likeliest")),
            _mean(r["kl_ref"] for r in found if r["kl_ref"] is not None),
            _mean((r["cpu_seconds"] / 60 for r in found if r["cpu_seconds"]), 1),
        ]
        lines.append("| " + " | ".join(columns) + " |")
    return lines


def best(runs: Sequence[Record], job: str, method: str, steps: int) -> list[Record]:
    """Those at the rate of the highest probability with the least seed; [] where there are none."""
    of_rate = [found for (j, m, s, _), found in arms(runs).items() if (j, m, s) == (job, method, steps)]
    return max(of_rate, key=lambda found: probability(min(found, key=lambda r: r["seed"])), default=[])


def apart(runs: Sequence[Record]) -> list[str]:
    """How far each recipe ends above imitation, each at its best rate, in the seeds that both have."""
    lines = [
        "| data | updates | recipe less imitation, each at its best rate | by seed |",
        "|---|---|---|---|",
    ]
    for job, steps in dict.fromkeys((r["job"], r["steps"]) for r in runs):
        ends = [
            {r["seed"]: probability(r) for r in best(runs, job, m, steps)} for m in ("recipe", "imitation")
        ]
        gaps = [ends[0][seed] - ends[1][seed] for seed in sorted(ends[0].keys() & ends[1].keys())]
        if gaps:
            by_seed = ", ".join(f"{gap:+.3f}" for gap in gaps)
            lines.append(f"| {NAMES[job]} | {steps} | {_mean(gaps)} | {by_seed} |")
    return lines


def variants(changed: Sequence[Record], plain: Sequence[Record]) -> list[str]:
    """Runs with other settings beside those without them, at the same rate and seeds."""
    lines = [
        "| data, method | changed | lr | probability of the answer, by seed | unchanged |",
        "|---|---|---|---|---|",
    ]
    key = ("job", "method", "steps", "rate")
    without = {(*(r[name] for name in key), r["seed"]): probability(r) for r in plain}
    by_change: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for r in changed:
        by_change[(*(r[name] for name in key), *r["changes"])].append(r)
    for (job, method, steps, rate, *changes), runs in by_change.items():
        same = [without.get((job, method, steps, rate, r["seed"])) for r in runs]
        ends = ", ".join(f"{probability(r):.3f}" for r in runs)
        unchanged = ", ".join("–" if end is None else f"{end:.3f}" for end in same)
        lines.append(f"| {job}, {method} | `{' '.join(changes)}` | {rate:g} | {ends} | {unchanged} |")
    return lines


def over(kinds: dict[str, dict[str, float]], name: str) -> float:
    """The mean over the kinds, which have 30 questions each but for one with 29."""
    return fmean(of_kind[name] for of_kind in kinds.values())


def _mean(values: Iterable[float], digits: int = 3) -> str:
    """With the standard deviation over seeds, where there are several; "–" of nothing."""
    numbers = list(values)
    if not numbers:
        return "–"
    spread = f" ± {stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{fmean(numbers):.{digits}f}{spread}"


def kinds(runs: Sequence[Record], start: dict[str, dict[str, float]]) -> list[str]:
    """Probability of the answer by kind of question, each method at its best rate, means over seeds."""
    before = [f"{of['probability']:.2f}" for of in start.values()]
    lines = [
        f"| data | trained by | updates | {' | '.join(start)} |",
        "|---|---|---|" + "---|" * len(start),
        f"| – | the start | 0 | {' | '.join(before)} |",
    ]
    for job, method, steps in dict.fromkeys((r["job"], r["method"], r["steps"]) for r in runs):
        found = best(runs, job, method, steps)
        after = [f"{fmean(r['exact'][kind]['probability'] for r in found):.2f}" for kind in start]
        lines.append(f"| {NAMES[job]} | {TRAINED_BY[job, method]} | {steps} | {' | '.join(after)} |")
    return lines


def shown(result: dict[str, Any]) -> list[str]:
    """Responses at temperature 1 with the same random numbers, of the start and after each recipe, seed 0."""
    after = {r["job"]: r["texts"] for r in result["runs"] if r["texts"] is not None}
    jobs = [job for job in NAMES if job in after]
    lines = [
        "| held-out question | answer | the start | "
        + " | ".join(f"after {NAMES[job]}" for job in jobs)
        + " |",
        "|---|---|---|" + "---|" * len(jobs),
    ]
    for i, row in list(enumerate(result["start"]))[::SHOWN]:
        cells = [row, *(after[job][i] for job in jobs)]
        texts = [f"{_cell(c['sampled'])}; *{_cell(c['likeliest'])}*" for c in cells]
        lines.append(f"| {row['question']} | {row['answer']} | " + " | ".join(texts) + " |")
    return lines


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def where(result: dict[str, Any]) -> list[str]:
    """Data and machine."""
    d, m = result["data"], result["machine"]
    commits = sorted({str(r["commit"])[:8] for r in result["runs"]})
    counts = ", ".join(f"{kind} {n} and {d['held_out'][kind]}" for kind, n in d["trained"].items())
    return [
        f"Questions for training, and held out: {counts}.",
        f"The log: {d['log']['responses']} responses, {d['log']['right']:.3f} of them right, "
        f"{d['mixed_groups']} prompts with right and wrong ones. "
        f"Thumbs: {d['thumbs']['responses']}, {d['thumbs']['up']:.3f} of them up. "
        f"Making both took {d['cpu_seconds'] / 60:.1f} CPU minutes.",
        f"Machine: {m['cpu']}, {m['cores']} cores, one thread, beside other work at a load of "
        f"{m['load_average']:.0f}; commits {', '.join(commits)}.",
    ]


def put(page: str, readme: Path) -> None:
    """Replace what is between the marks."""
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    readme.write_text(f"{before}{BEGIN}\n\n{page}\n\n{END}{after}", encoding="utf-8")
