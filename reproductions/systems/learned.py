"""What learns beside the policy changes: rivals from earlier versions, rewards, samplers and drafts.

Forty prompts of two digits, and a model of some thousand parameters. A right response is the last digit, or
where the reward is learned a single even digit, which is what all demonstrations are then. Runs on
demonstrations alone measure whether responses are right, and don't train on it.
"""

from __future__ import annotations

import json
import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from agro.config import NewModel, PolicyConfig, RunConfig
from agro.models.policy import Policy
from agro.models.published import load_published
from agro.store import Store
from agro.train.stored_tensors import from_text
from agro.types import Sample
from agro_papers.flow_reward import FlowReward
from reproductions.systems import tiny
from reproductions.systems.tiny import RUNS, Measured, measured

MODEL = tiny.MODEL | {"context": 8, "initializer_range": 0.2}
SEEDS = (0, 1, 2)
EVEN = f"{Path(__file__)}:even"  # a reward, and the part of one that it is
OFF = 1e-12  # a learning rate at which nothing moves
Steps = list[dict[str, Any]]


def even(completions: list[str], **_: Any) -> list[float]:
    """Whether a response is a single even digit."""
    return [float(text in {"0", "2", "4", "6", "8"}) for text in completions]


def run(folder: Path, steps: int, *, demonstrations: str = "", **changes: Any) -> tuple[Steps, Path]:
    """The steps of a run, and its folder. `demonstrations`: "copied" or "even"; else there is no store.

    `changes`: dotted keys with __ for the dot.
    """
    folder = Path(tempfile.mkdtemp(dir=folder))
    prompts = [(f"{i:02d}>", str(i % 10)) for i in range(40)]
    asked = tiny.written(folder / "prompts.jsonl", ({"prompt": p, "answer": a} for p, a in prompts))
    values: dict[str, Any] = {
        "policy": {"new": MODEL | {"hidden": 32}},
        "data": {"prompts": asked},
        "sampler": {"n": 4, "max_new": 3},
        "reward": {"name": "exact"},
        "objective": {"name": "agro", "beta": 0.05},
        "train": {"steps": steps, "groups": 10, "micro_batch": 256, "lr": 1e-2, "clip": 20.0},
    }
    if demonstrations:
        values["data"]["store"] = str(folder / "experts.db")
        with Store.open(folder / "experts.db") as store:
            store.append(
                Sample(prompt, answer if demonstrations == "copied" else f"{i * 7 % 5 * 2}", role="expert")
                for i, (prompt, answer) in enumerate(prompts)
            )
    out = tiny.train(RunConfig.of(tiny.changed(values, changes)), folder / "run")
    return tiny.metrics(out), out


def column(steps: Steps, name: str, part: str = "") -> list[float]:
    """The known values of a metric, or of a part of the reward."""
    values = [(row["reward_parts"] or {}).get(part) if part else row[name] for row in steps]
    return [value for value in values if value is not None]


def mean(values: list[float]) -> float:
    return float(np.mean(values))


def rivals(folder: Path) -> Measured:
    """References and samplers that are earlier versions."""
    steps, _ = run(folder, **RUNS["seppo"])
    behind = [row["version"] - 1 - row["sampler_version"] for row in steps[20:]]
    played, _ = run(folder, **RUNS["spin"])
    off_rule = [abs(row["version"] - 1 - row["sampler_version"] - i % 10) for i, row in enumerate(played)]
    begun = [abs(row["loss"] - math.log(2)) for row in played[::10]]
    right = [mean(column(of, "reward_mean")[-10:]) for of in (played, steps)]
    return [max(off_rule), max(begun), right[0], max(behind), min(behind), right[1]]


def imitating(folder: Path, count: int, learned: dict[str, Any], **changes: Any) -> Steps:
    """A run whose reward is learned from demonstrations; the share of even digits is measured."""
    source = {"around": "adversary", "options": {"steps": 20, **learned}}
    reward = {"name": EVEN}
    rate = {"train__lr": 3e-3}  # at 1e-2 it moves too far to climb a learned reward
    return run(folder, count, demonstrations="even", reward=reward, source=source, **rate, **changes)[0]


def share(steps: Steps) -> float:
    """Even digits among the responses at the end."""
    return mean(column(steps, "", EVEN)[-5:])


def imitation(folder: Path) -> Measured:
    """The reward of demonstrations, by two losses."""
    inverse = imitating(folder, 40, {})
    pairs = imitating(folder, 80, {"loss": "pairs", "penalty": 0.0}, objective={"name": "grpo"})
    return [mean(column(inverse, "learned_auc")[:10]), share(inverse), share(pairs)]


def off_policy_imitation(folder: Path) -> Measured:
    """With half of each step replayed: a bounded slope and age weights, and each without."""
    replay = {"data__replay": 0.5, "data__roles": ["policy"]}
    replay["objective"] = {"name": "agro", "beta": 0.05, "weight": "reference"}
    spread, right = {}, {}
    for penalty in (0.0, 10.0):
        learned = {"penalty": penalty, "newest": 320}
        runs = [imitating(folder, 40, learned, data__max_age=8, train__seed=s, **replay) for s in SEEDS]
        spread[penalty] = mean([row["reward_std"] for steps in runs for row in steps[-10:]])
        right[penalty] = mean([share(steps) for steps in runs])
    yield spread[10.0] / spread[0.0]
    yield right[10.0] - right[0.0], f"{right[10.0]:.3f}"
    boosted = {}
    weighted = {"data__order": "age_weighted", "data__age_decay": 0.05}
    for order, changes in (("weighted", weighted), ("uniform", {"data__order": "uniform"})):
        runs = [imitating(folder, 40, {"newest": 1000}, train__seed=s, **changes, **replay) for s in SEEDS]
        boosted[order] = mean([share(steps) for steps in runs])
    yield boosted["weighted"] - boosted["uniform"], f"{boosted['weighted']:.3f}"


def hacking(folder: Path) -> Measured:
    """A discriminator that is fitted once, against one that goes on."""
    once = imitating(folder, 40, {"every": 10_000, "steps": 200, "penalty": 0.0})
    learned, own = column(once, "", "learned"), column(once, "", EVEN)
    return [mean(learned[-5:]) - learned[0], mean(own[-5:]) - mean(own[:2])]


def flow(folder: Path) -> Measured:
    """Token rewards of fresh responses."""
    _, out = run(folder, **RUNS["rlfr"])
    with Store.open(out.parent / "experts.db", read_only=True) as store:
        tokens = [s.token_reward for s in store.samples(roles=("policy",))]
    rewarded = mean([float(t is not None and np.nanmax(np.abs(t)) > 0) for t in tokens])
    position = json.loads((out / "checkpoints" / "step-00000030" / "position.json").read_text())
    return [rewarded, held_out_auc(out, position["monitors"]["flow"])]


def held_out_auc(out: Path, state: dict[str, Any]) -> float:
    """How often a right response to a prompt of no step has a smaller error than a wrong one.

    Of the errors themselves: token rewards are scaled within each response, so that their sums say little.
    """
    policy = load_published(PolicyConfig(new=NewModel(**MODEL | {"hidden": 32})), out / "model")
    flow = FlowReward.load(policy, -1, from_text(state["tensors"]))
    texts = [(f"{i:02d}>", str((i + off) % 10)) for i in range(40, 100) for off in (0, 3)]
    errors = [float(np.nanmean(score)) for score in flow.scores([Sample(*text) for text in texts], draws=8)]
    return mean([float(right < wrong) for right, wrong in zip(errors[::2], errors[1::2], strict=True)])


def props(folder: Path) -> Measured:
    """Responses together against as many independent ones, of a policy that stays as it is."""
    kl = {}
    prompts = tiny.written(folder / "ten.jsonl", ({"prompt": f"{i:02d}>", "answer": "0"} for i in range(10)))
    for name, lr in (("independent", OFF), ("adapted", 1e-3)):
        proposal = {"lr": lr, "newest": 2000}
        changes = {"sampler__max_new": 1, "train__lr": OFF, "data__prompts": prompts}
        steps, _ = run(folder, 10, source={"around": "props", "options": proposal}, **changes)
        kl[name] = column(steps, "aggregate_kl")
    return [kl["adapted"][-1] / kl["independent"][-1], kl["adapted"][-1] / kl["adapted"][0]]


def draft(folder: Path) -> Measured:
    """What is accepted of a draft's tokens, while the policy moves."""
    new = NewModel(**MODEL)
    Policy.load(PolicyConfig(new=new), seed=5).save(folder / "draft")
    accepted = {}
    for every in (None, 1):
        engine = {"kind": "drafted", "options": {"model": str(folder / "draft"), "tokens": 2}}
        around = {"around": "trained_draft", "options": {"every": every, "lr": 1e-2}} if every else {}
        steps, _ = run(folder, 30, sampler={"n": 4, "max_new": 3}, engine=engine, source=around)
        accepted[every] = column(steps, "draft_accepted")
    end = mean(accepted[1][-5:])
    return [end / mean(accepted[None][-5:]), end - mean(accepted[1][:2])]


def residual(folder: Path) -> Measured:
    """A frozen model with an adapter, half of each step from demonstrations with rewards."""
    Policy.load(PolicyConfig(new=NewModel(**MODEL | {"hidden": 32})), seed=1).save(folder / "base")
    with Store.open(folder / "log.db") as store:
        store.append(
            Sample(f"{i:02d}>", text, reward=float(text == str(i % 10)), source="log")
            for i in range(40)
            for text in (str(i % 10), str((i + 1) % 10))
        )
    policy = {"model": str(folder / "base"), "lora": {"rank": 4}}
    run(folder, policy=policy, data__store=str(folder / "log.db"), **RUNS["residual"])
    with Store.open(folder / "log.db", read_only=True) as store:
        own = [(sample.version, float(sample.reward or 0)) for sample in store.samples(roles=("policy",))]
    last, first = ([right for version, right in own if lo <= version < hi] for lo, hi in ((50, 60), (0, 3)))
    return [mean(last) - mean(first)]


rows = partial(measured, (rivals, imitation, off_policy_imitation, hacking, flow, props, draft, residual))
