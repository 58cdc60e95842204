"""What is reported of the runs: tables by job, by change and by kind of question, and texts."""

from __future__ import annotations

import math
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from agro.config import PolicyConfig, RunConfig, SamplerConfig
from agro.models.policy import Policy
from agro.rollout.prompts import load_prompts
from agro.train.collate import collate
from agro.train.learner import Local
from agro.types import Sample
from reproductions import harness
from reproductions.chat import logs

SHOWN = 2  # held-out questions of each kind whose texts are kept; those of the first one are shown
_WORDS = tomllib.loads(Path(__file__).with_name("jobs.toml").read_text(encoding="utf-8"))
NAMES: dict[str, str] = _WORDS["names"]
TRAINED_BY: dict[str, dict[str, str]] = _WORDS["trained_by"]
Record = dict[str, Any]  # of a run


def texts(model: Path, held_out: Path) -> list[dict[str, Any]]:
    """The first questions of each kind, with a response at temperature 1 and the likeliest one."""
    policy = Policy.load(PolicyConfig(model=str(model), threads=1))
    by_kind = defaultdict(list)
    for prompt in load_prompts(held_out):
        by_kind[prompt.columns["kind"]].append(prompt)
    prompts = [prompt for found in by_kind.values() for prompt in found[:SHOWN]]
    rows = [{"question": p.text[-1]["content"], "answer": p.columns["answer"]} for p in prompts]
    for name, temperature in (("sampled", 1.0), ("likeliest", 0.0)):
        sampler = SamplerConfig(n=1, temperature=temperature, max_new=logs.MAX_NEW)
        for row, sample in zip(rows, harness.responses(policy, prompts, sampler), strict=True):
            row[name] = sample.response
    return rows


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
    for prompt, sample in zip(prompts, harness.responses(policy, prompts, sampler), strict=True):
        found[prompt.columns["kind"]]["likeliest"].append(logs.right(sample))
    return {kind: {name: fmean(values) for name, values in both.items()} for kind, both in found.items()}


def page(result: dict[str, Any]) -> str:
    """Everything that was measured, in Markdown."""
    plain = [r for r in result["runs"] if not r["changes"]]
    changed = [r for r in result["runs"] if r["changes"]]
    start = result["data"]["start"]
    parts = [
        summary(plain, start),
        apart(plain),
        variants(changed, plain),
        kinds(plain, start),
        shown(result),
        where(result),
    ]
    return "\n\n".join(filter(None, parts))


def arms(runs: Sequence[Record]) -> dict[tuple[str, str, int, float], list[Record]]:
    """By job, method, updates and rate."""
    return harness.grouped(runs, "job", "method", "steps", "rate")


def probability(run: Record) -> float:
    return over(run["exact"], "probability")


def summary(runs: Sequence[Record], start: dict[str, dict[str, float]]) -> str:
    """A row for each job, method, number of updates and rate: means over seeds."""
    before = [f"{over(start, name):.3f}" for name in ("probability", "likeliest")]
    head = ["data", "trained by", "updates", "lr", "seeds", "probability of the answer"]
    head += ["the likeliest response is right", "KL in the last step (nats)", "CPU minutes"]
    lines = [["–", "the start", "0", "–", "–", *before, "0", "–"]]
    for (job, method, steps, rate), found in arms(runs).items():
        seeds = ", ".join(str(r["seed"]) for r in found)
        ends = [_mean(over(r["exact"], name) for r in found) for name in ("probability", "likeliest")]
        far = _mean(r["kl_ref"] for r in found if r["kl_ref"] is not None)
        spent = _mean((r["cpu_seconds"] / 60 for r in found if r["cpu_seconds"]), 1)
        words = [NAMES[job], TRAINED_BY[job][method], str(steps), f"{rate:g}"]
        lines.append([*words, seeds, *ends, far, spent])
    return harness.markdown(head, lines)


def best(runs: Sequence[Record], job: str, method: str, steps: int) -> list[Record]:
    """Those at the rate of the highest probability with the least seed; [] where there are none."""
    of_rate = [found for (j, m, s, _), found in arms(runs).items() if (j, m, s) == (job, method, steps)]
    return max(of_rate, key=lambda found: probability(min(found, key=lambda r: r["seed"])), default=[])


def apart(runs: Sequence[Record]) -> str:
    """How far each recipe ends above imitation, each at its best rate, in the seeds that both have."""
    lines = []
    for job, steps in dict.fromkeys((r["job"], r["steps"]) for r in runs):
        ends = [
            {r["seed"]: probability(r) for r in best(runs, job, m, steps)} for m in ("recipe", "imitation")
        ]
        gaps = [ends[0][seed] - ends[1][seed] for seed in sorted(ends[0].keys() & ends[1].keys())]
        if gaps:
            lines.append([NAMES[job], str(steps), _mean(gaps), ", ".join(f"{gap:+.3f}" for gap in gaps)])
    head = ["data", "updates", "recipe less imitation, each at its best rate", "by seed"]
    return harness.markdown(head, lines) if lines else ""


def variants(changed: Sequence[Record], plain: Sequence[Record]) -> str:
    """Runs with other settings beside those without them, at the same rate and seeds."""
    key = ("job", "method", "steps", "rate")
    without = {(*(r[name] for name in key), r["seed"]): probability(r) for r in plain}
    by_change: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for r in changed:
        by_change[(*(r[name] for name in key), *r["changes"])].append(r)
    lines = []
    for (job, method, steps, rate, *changes), runs in by_change.items():
        same = [without.get((job, method, steps, rate, r["seed"])) for r in runs]
        ends = ", ".join(f"{probability(r):.3f}" for r in runs)
        unchanged = ", ".join("–" if end is None else f"{end:.3f}" for end in same)
        lines.append([f"{job}, {method}", f"`{' '.join(changes)}`", f"{rate:g}", ends, unchanged])
    head = ["data, method", "changed", "lr", "probability of the answer, by seed", "unchanged"]
    return harness.markdown(head, lines) if lines else ""


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


def kinds(runs: Sequence[Record], start: dict[str, dict[str, float]]) -> str:
    """Probability of the answer by kind of question, each method at its best rate, means over seeds."""
    before = [f"{of['probability']:.2f}" for of in start.values()]
    lines = [["–", "the start", "0", *before]]
    for job, method, steps in dict.fromkeys((r["job"], r["method"], r["steps"]) for r in runs):
        found = best(runs, job, method, steps)
        after = [f"{fmean(r['exact'][kind]['probability'] for r in found):.2f}" for kind in start]
        lines.append([NAMES[job], TRAINED_BY[job][method], str(steps), *after])
    return harness.markdown(["data", "trained by", "updates", *start], lines)


def shown(result: dict[str, Any]) -> str:
    """Responses at temperature 1 with the same random numbers, of the start and after each recipe, seed 0."""
    after = {r["job"]: r["texts"] for r in result["runs"] if r["texts"] is not None}
    jobs = [job for job in NAMES if job in after]
    lines = []
    for i, row in list(enumerate(result["start"]))[::SHOWN]:
        cells = [row, *(after[job][i] for job in jobs)]
        texts = [f"{_cell(c['sampled'])}; *{_cell(c['likeliest'])}*" for c in cells]
        lines.append([row["question"], row["answer"], *texts])
    head = ["held-out question", "answer", "the start", *(f"after {NAMES[job]}" for job in jobs)]
    return harness.markdown(head, lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def where(result: dict[str, Any]) -> str:
    """Data and machine."""
    d, m = result["data"], result["machine"]
    commits = sorted({str(r["commit"])[:8] for r in result["runs"]})
    counts = ", ".join(f"{kind} {n} and {d['held_out'][kind]}" for kind, n in d["trained"].items())
    lines = [
        f"Questions for training, and held out: {counts}.",
        f"The log: {d['log']['responses']} responses, {d['log']['right']:.3f} of them right, "
        f"{d['mixed_groups']} prompts with right and wrong ones. "
        f"Thumbs: {d['thumbs']['responses']}, {d['thumbs']['up']:.3f} of them up. "
        f"Making both took {d['cpu_seconds'] / 60:.1f} CPU minutes.",
        f"Machine: {m['cpu']}, {m['cores']} cores, one thread, beside other work at a load of "
        f"{m['load_average']:.0f}; commits {', '.join(commits)}.",
    ]
    return "\n".join(lines)
