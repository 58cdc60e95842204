"""Systems that are whole by a setting or a recipe: what it changes in runs of some seconds."""

from __future__ import annotations

import itertools
import json
import math
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from agro.models.published import load_published
from agro.pages.store.check_survey import survey
from agro.pages.store.measurements import measure
from agro.rollout.envs import Turn
from agro.stats.intervals import Values
from agro.stats.off_policy import compare_on_log
from agro.store import Store
from agro.store.samples import Pair
from agro.train.collate import collate
from agro.types import Prompt, Sample
from reproductions.systems import tiny
from reproductions.systems.tiny import Measured, column, config, measured, metrics, of_recipe, train, weights


def lagging(folder: Path) -> Measured:
    """What an anchor at the behavior is for: β = 0.05 and 0.5, over 8 steps with one set of sampling weights,
    and with the present ones."""
    # Adam doesn't see the scale of a gradient, so that without a lag β, which scales it, does nothing.
    changes = {"train__adam_eps": 1e-30, "train__clip": 1e9, "train__steps": 8}
    for name in ("oapl", "gvpo"):
        moved = {}
        for every in (1, 8):
            ends = []
            for beta in (0.05, 0.5):
                objective = {"name": name, "beta": beta}
                settings = config(folder, objective=objective, source__sync_every=every, **changes)
                ends.append(weights(train(settings, folder / f"{name}-{beta}-{every}")))
            moved[every] = (ends[0] - ends[1]).abs().max().item()
        yield moved[8] / moved[1]


def arb(folder: Path) -> Measured:
    """A log of the start, then fresh samples: the closest stored groups, and any. As the recipe has it."""
    reward: dict[str, list[float]] = {"closest": [], "uniform": []}
    easy = {"reward__name": f"{Path(tiny.__file__)}:low"}
    for order, seed in itertools.product(reward, (0, 1)):
        here = folder / f"{order} {seed}"
        still = config(here, train__steps=20, objective={"name": "reinforce"}, train__lr=1e-9, **easy)
        log = train(still, here / "log") / "store.db"
        changes = {"data__order": order, "train__steps": 30, "data__store": str(log), "train__seed": seed}
        run = train(of_recipe("arb", here, **changes, **easy), here / "run")
        reward[order].append(float(column(run, "reward_mean")[-10:].mean()))
    return [float(np.mean(reward["closest"]) - np.mean(reward["uniform"]))]


def remix(folder: Path) -> Measured:
    """Stored samples first; then a new reference and fresh samples alone."""
    settings = of_recipe("remix", folder).model_dump(mode="json", exclude_unset=True)
    for phase, steps in zip(settings["phases"], (12, 6), strict=True):
        phase["train"]["steps"] = steps
    run = train(type(config(folder)).of(settings), folder / "remix")
    replayed = [m["replay_share"] for m in metrics(run) if m["phase"] == "mixed"][4:]
    return [float(np.mean(replayed))]


def erc(folder: Path) -> Measured:
    """Far samples are dropped before a step."""
    changes = {"train__steps": 30, "data__max_drift": 0.02}
    run = train(of_recipe("erc", folder, **changes), folder / "erc")
    return [float(column(run, "dropped").sum())]


def tuned_beta(folder: Path) -> Measured:
    """β moves until the KL is its target."""
    beta = {"start": 0.02, "target_kl": 0.5, "rate": 0.1}
    changes = {"objective__beta": beta, "train__steps": 80, "reward__name": f"{Path(tiny.__file__)}:low"}
    run = train(of_recipe("tuned_beta", folder, **changes), folder / "tuned")
    return [abs(math.log(float(column(run, "kl_ref")[-30:].mean()) / 0.5))]


def opa_dpo(folder: Path) -> Measured:
    """Imitation of winners, then DPO; DPO alone has the same pairs and steps.

    The winners are digits below 5, which the start hardly writes.
    """
    with Store.open(folder / "pairs.db") as store:
        ids = store.append(Sample(f"{i:03d}>", str(i % 5 + 5 * j)) for i in range(60) for j in range(2))
        store.add_pairs(Pair(ids[2 * i], ids[2 * i + 1]) for i in range(60))
    stored = {"data__store": str(folder / "pairs.db"), "data__prompts": None}
    gains = []
    for seed in (0, 1):
        here = {**stored, "train__seed": seed}
        both = train(of_recipe("opa_dpo", folder, **here, train__steps=15), folder / f"both {seed}")
        alone = of_recipe("opa_dpo", folder, **here, train__steps=30, phases=[], objective__winner=0.0)
        gains.append(_right(both, folder) - _right(train(alone, folder / f"alone {seed}"), folder))
    return [float(np.mean(gains))]


def evaluation(folder: Path) -> Measured:
    """The value of a policy from another one's log: how often its interval holds the truth."""
    rng = np.random.default_rng(0)
    held, runs, prompts = 0, 200, 400
    reward = np.linspace(0, 1, 5)
    for _ in range(runs):
        behavior, start, now = rng.dirichlet(np.full(5, 5.0), size=3)
        y = rng.choice(5, size=prompts, p=behavior)
        drawn = (rng.random(prompts) < reward[y]).astype(float)
        a, b = (np.log(policy[y] / behavior[y]) for policy in (start, now))
        found = compare_on_log(a, b, drawn, np.arange(prompts))
        held += found.low <= (now - start) @ reward <= found.high
    return [float(held / runs)]


def sharpe_ratio(estimated: Values, true: Values, behavior: int, k: int) -> float:
    """SharpeRatio@k of policies by estimates (arXiv 2311.18207, section 3): (best@k − J(μ))/std@k of the
    true values of the k with the highest ones. NaN where these are equal. The official code differs: a
    standard deviation with k − 1, and 0 for a negative numerator."""
    chosen = np.argsort(-estimated, kind="stable")[:k]
    spread = float(true[chosen].std())
    return (float(true[chosen].max()) - float(true[behavior])) / spread if spread else math.nan


def checkpoints(folder: Path) -> Measured:
    """Of eight policies the best three by a log are tried: what is gained over μ for the risk of bad ones."""
    rng = np.random.default_rng(0)
    reward, prompts, found = np.linspace(0, 1, 5), 400, {"estimates": [], "hash": []}
    for _ in range(200):
        behavior, *policies = rng.dirichlet(np.full(5, 5.0), size=8)
        y = rng.choice(5, size=prompts, p=behavior)
        drawn = (rng.random(prompts) < reward[y]).astype(float)
        each = [np.log(policy[y] / behavior[y]) for policy in (behavior, *policies)]
        estimated = np.array([compare_on_log(each[0], a, drawn, np.arange(prompts)).b for a in each])
        true = np.array([policy @ reward for policy in (behavior, *policies)])
        found["estimates"].append(sharpe_ratio(estimated, true, 0, 3))
        found["hash"].append(sharpe_ratio(rng.random(8), true, 0, 3))
    return [float(np.nanmean(found["estimates"]) / np.nanmean(found["hash"]))]


def checked(folder: Path) -> Measured:
    """What `agro check` says of a log that is written down: two prompts, rewards and repeats."""
    with Store.open(folder / "checked.db") as store:
        store.append(
            Sample("a", text, reward=r) for text, r in (("x", 0.0), ("x", 0.0), ("y", 1.0), ("z", 0.5))
        )
        store.append(Sample("b", text, reward=r) for text, r in (("x", 0.0), ("y", 1.0)))
        found = survey(store)
    quality = fmean(found.quality) - (0.375 + 0.5) / 2  # (mean − least) / (best − least) of both prompts
    coverage = fmean(found.coverage) - (3 / 4 + 1) / 2  # distinct responses per response
    return [abs(quality), abs(coverage)]


def ranked(folder: Path) -> Measured:
    """Of pairs to prompts that weren't trained on, every seventh, the share that the model ranks right."""
    others = range(0, 1000, 7)
    for name, numbers in (("pairs", sorted({*range(1000)} - {*others})), ("others", others)):
        with Store.open(folder / f"{name}.db") as store:
            ids = store.append(Sample(f"{i:03d}>", str((i + j) % 10)) for i in numbers for j in (0, 3))
            store.add_pairs(Pair(ids[2 * k], ids[2 * k + 1]) for k in range(len(numbers)))
    changes = {"data__store": str(folder / "pairs.db"), "data__prompts": None, "data__hold_out": 0}
    run = train(of_recipe("dpo", folder, train__steps=150, **changes), folder / "dpo")
    with Store.open(folder / "others.db") as store:
        found = measure(store, load_published(config(folder).policy, run / "model")).values
    assert found["ranked_pairs"] == len(others)
    return [found["ranked_share"]]


def coverage(folder: Path) -> Measured:
    """E_μ (π/μ)² of a log: 1 of the policy's own samples, more of another's."""
    still = config(folder, train__steps=12, train__lr=1e-9)
    run = train(still, folder / "own")
    moved = train(config(folder, train__steps=40), folder / "moved")
    found = []
    with Store.open(run / "store.db", read_only=True) as store:
        for model in (run, moved):
            policy = load_published(still.policy, model / "model")
            found.append(measure(store, policy).values["concentrability"])
    return [abs(found[0] - 1), found[1]]


def freshper(folder: Path) -> Measured:
    """Of one policy's responses, replayed by age and reward and by age alone."""
    replayed = {}
    for name, power in (("priority", 0.6), ("age", None)):
        changes = {"data__reward_power": power, "train__steps": 40, "train__lr": 1e-9}
        run = train(of_recipe("freshper", folder, **changes), folder / name)
        with Store.open(run / "store.db", read_only=True) as store:
            draws = store.draws.drawn(json.loads((run / "config.json").read_text())["run"])
        seen, again = set[int](), []
        for draw in draws:
            again += [abs(draw.reward or 0.0)] if draw.sample in seen else []
            seen.add(draw.sample)
        replayed[name] = float(np.mean(again))
    return [replayed["priority"] / replayed["age"]]


def _right(run: Path, folder: Path) -> float:
    """What the policy then writes: the share that begins with a digit below 5."""
    still = {"policy": {"model": str(run / "model")}, "reward__name": f"{Path(__file__)}:starts_low"}
    last = train(config(folder, train__steps=2, train__lr=1e-12, **still), folder / f"last {run.name}")
    return float(column(last, "reward_mean").mean())


def asymre(folder: Path) -> Measured:
    """A baseline below the mean reward of a log, half of which is right, and one above it."""
    with Store.open(folder / "log.db") as store:
        store.append(Sample(f"{i:03d}>", str(j), reward=float(j < 5)) for i in range(60) for j in range(10))
    changes: dict[str, Any] = {"data__store": str(folder / "log.db"), "data__prompts": None}
    changes |= {"data__replay": 1.0, "data__group_size": 10, "train__steps": 80, "source__sync_every": 1}
    right = {}
    for shift in (-0.1, 0.1):
        settings = of_recipe("asymre", folder, **changes, objective__shift=shift)
        right[shift] = _right(train(settings, folder / f"asymre {shift}"), folder)
    return [(right[-0.1] - right[0.1], f"{right[0.1]:.2g}")]


def starts_low(completions: list[str], **_: Any) -> list[float]:
    """1 where the first character is a digit below 5."""
    return [float(text[:1] in set("01234")) for text in completions]


def spo(folder: Path) -> Measured:
    """Groups of one, compared with a value that is tracked."""
    changes = {"train__steps": 60, "train__groups": 32, "reward__name": f"{Path(tiny.__file__)}:low"}
    run = train(of_recipe("one_response", folder, **changes), folder / "spo")
    reward = column(run, "reward_mean")
    return [float(reward[-10:].mean() - reward[:10].mean())]


class Telling:
    """Tells the answer after the first of two turns, which end with any character."""

    name, stop = "telling", tuple(tiny.DIGITS)

    def reset(self, prompt: Prompt) -> dict[str, Any]:
        return {"answer": str(prompt.columns["answer"]), "turns": 0}

    def step(self, state: dict[str, Any], text: str) -> Turn:
        state["turns"] += 1
        if state["turns"] == 2:
            return Turn(None, float(text in "01234"), True)
        return Turn(state["answer"] + ">", 0.0)


def echo(folder: Path) -> Measured:
    """One set of episodes, and two policies: with a share of what the environment answered, and without."""
    found = []
    for share in (0.0, 0.1):
        changes = {"environment__name": f"{Path(__file__)}:Telling", "environment__max_turns": 2}
        changes |= {"objective__observations": share, "train__steps": 40, "sampler__max_new": 1}
        settings = of_recipe("echo", folder, **changes)
        run = train(settings, folder / f"echo {share}")
        with Store.open(folder / "echo 0.0" / "store.db", read_only=True) as store:
            batch = collate(list(store.samples())[:200], 0, observed=True)
        policy, observed = load_published(settings.policy, run / "model"), batch.extra["observed"]
        assert batch.tokens is not None
        assert batch.lengths is not None
        with torch.no_grad():
            found.append(
                -float(policy.streams(batch.tokens, batch.lengths, observed)["logp"][observed].mean())
            )
    return [(found[1] / found[0], f"{found[0]:.2f}")]


rows = partial(
    measured,
    (
        *(lagging, arb, remix, erc, tuned_beta, opa_dpo, evaluation, checkpoints, checked, ranked),
        *(coverage, freshper, asymre, spo, echo),
    ),
)
