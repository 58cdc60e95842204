"""Runs of the panel: one job, one method, one rate, one seed; from the settings to what is measured."""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from agro import objectives
from agro.config import RewardConfig, RunConfig, SamplerConfig
from agro.errors import Refused
from agro.logs.importing import center_rewards
from agro.models.policy import Policy
from agro.rewards import load_reward
from agro.rollout.evaluate import heldout
from agro.rollout.prompts import load_prompts
from agro.rollout.rollout import EpisodeReward
from agro.store import Store
from agro.train.collate import collate
from agro.train.learner import Local
from agro.types import Prompt, Sample
from reproductions import harness
from reproductions.panel import logs
from reproductions.panel.jobs import JOBS, Job, reward
from reproductions.panel.logs import Files, Size
from reproductions.panel.methods import METHODS, NOTHING, Facts, Values

Run = dict[str, Any]
VALUE = "value"  # the name of the reward
RESPONSES = 4  # to a prompt, where fresh samples are made
MICRO = {"very long": 16, "thousand": 16}  # sequences in one pass, where 64 would take more memory


@dataclass(frozen=True)
class Row:
    """One run. `rate` is None where nothing is trained."""

    job: str
    method: str
    rate: float | None
    seed: int = 0

    @property
    def file(self) -> str:
        rate = "" if self.rate is None else f"_{self.rate:g}"
        return f"{logs.slug(self.job)}_{logs.slug(self.method)}{rate}_{self.seed}.json"


@dataclass(frozen=True)
class World:
    """What the runs of a job share, loaded once in each process."""

    job: Job
    files: Files
    facts: Facts
    held_out: Sequence[Prompt]
    start: Local


@cache
def world(name: str, out: Path, size: Size) -> World:
    torch.set_num_threads(1)
    job = size.of(JOBS[name])
    files = logs.prepare(job, out, size)
    start = logs.learner_of(logs.load(files.start))
    return World(job, files, files.facts, load_prompts(files.held_out), start)


def settings(world: World, row: Row, store: Path | None) -> RunConfig:
    """The configuration of a run. `store`: a copy of the log, None where samples are fresh."""
    job = world.job
    given = METHODS[row.method](job, world.facts)
    assert not isinstance(given, str), given
    values: dict[str, Any] = {"train": {"schedule": "linear"}}
    if "recipe" in given:
        values = RunConfig.load(given["recipe"]).model_dump()
    changes = {key: values.get(key, {}) | given.get(key, {}) for key in ("objective", "data", "train")}
    objective, data = changes["objective"], changes["data"]
    on_all = {"hold_out": 0.0, "hold_out_most": None}  # the held-out prompts are others
    data |= on_all | given.get("data", {})
    if store is not None:
        data["store"] = str(store)
    if data.get("value_store"):
        data["value_store"] = str(logs.reference_samples(job, world.files))
    if store is None or data.get("prompts"):  # of the log, where both are asked for
        data["prompts"] = str(world.files.prompts)
    if data.get("eval_prompts"):
        data["eval_prompts"] = str(world.files.held_out)
    options = {key: value for key, value in objective.items() if key != "name"}
    needs = objectives.get(objective["name"]).needed(options)
    changes["train"] |= {
        "steps": job.updates,
        "epochs": None,
        "groups": job.groups,
        "lr": row.rate,
        "warmup": min(10, job.updates // 2),
        "seed": row.seed,
        "micro_tokens": None,
        "micro_batch": MICRO.get(job.name, 64),
        "checkpoint_every": 100_000,
    }
    cached = store is not None and "ref_logp" in needs
    policy = values.get("policy", {}) | {"model": str(world.files.start), "cache_reference": cached}
    sampler = {"n": RESPONSES, "max_new": job.max_new, "batch": 256}
    others = {"reward": {"name": VALUE}, "evaluate": {"kl": False, "kl_samples": 0}, "sampler": sampler}
    return RunConfig.of(values | changes | {"policy": policy} | others, f"{row.job}, {row.method}")


def complete(row: Row, out: Path, size: Size) -> Run:
    """What is measured of a run, which is made unless that was done before."""
    found: Run = harness.once(out / "runs" / row.file, lambda: _play(row, world(row.job, out, size)))
    return found


def _play(row: Row, world: World) -> Run:
    began = time.process_time()
    policy, stopped = world.start.policy, ""
    if row.method != NOTHING:
        with tempfile.TemporaryDirectory() as folder:
            policy, stopped = _train(row, world, Path(folder))
    trained = time.process_time()
    measured = measure(world, policy)
    ended = time.process_time()
    seconds = {"cpu_seconds": trained - began, "measuring_seconds": ended - trained}
    return {**asdict(row), **measured, "stopped": stopped, **seconds}


def _train(row: Row, world: World, folder: Path) -> tuple[Policy, str]:
    """The policy after training, and why that ended early, "" where it didn't."""
    store = None
    if world.job.data != "fresh":
        store = folder / "log.db"
        shutil.copy(world.files.log, store)
        center(store, METHODS[row.method](world.job, world.facts))
    config = settings(world, row, store)
    trainer = harness.SilentTrainer(config, folder / "run")
    trainer.rewards = {VALUE: partial(reward, job=world.job.name)}
    try:
        trainer.run()
    except Refused as error:
        if not hasattr(trainer, "policy"):
            raise  # before the first update: the settings are wrong
        return trainer.policy, str(error)
    return trainer.policy, ""


def center(path: Path, given: Values | str) -> None:
    """As `agro import --center-by` does, where the method asks for it."""
    if isinstance(given, dict) and "center_by" in given:
        with Store.open(path) as store:
            center_rewards(store, given["center_by"])


def measure(world: World, policy: Policy) -> Run:
    """Mean reward of one response to each held-out prompt, at temperature 1, and KL(π ‖ start) in nats.

    All policies have the same random numbers. What isn't finite is None. Rates are chosen by every second
    prompt (`reward_choosing`) and reported on the others (`reward_others`).
    """
    job = world.job
    inner = load_reward(RewardConfig(name=VALUE), {VALUE: partial(reward, job=job.name)})
    scorer = EpisodeReward(inner) if job.environment else inner
    sampler = SamplerConfig(n=1, max_new=job.max_new, batch=512)
    found = heldout(logs.rollout_of(job, policy), scorer, world.held_out, sampler, seed=0)
    far = _log_ratios(world, found.samples)
    return {
        "reward": _known(found.mean),
        "reward_error": _known(found.se),
        "reward_choosing": _known(float(found.rewards[::2].mean())),
        "reward_others": _known(float(found.rewards[1::2].mean())),
        "kl": _known(statistics.mean(far)),
        "kl_error": _known(statistics.stdev(far) / math.sqrt(len(far))),
        "length": statistics.mean(int(s.mask.sum()) for s in found.samples),
    }


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _log_ratios(world: World, samples: Sequence[Sample]) -> list[float]:
    """log π − log π_start of each response, whose log-probs under π were recorded."""
    ratios: list[float] = []
    for first in range(0, len(samples), logs.PARTS):
        batch = collate(samples[first : first + logs.PARTS], 0)
        assert batch.behavior_logp is not None
        start = world.start.logp(batch)
        apart = torch.where(batch.mask, batch.behavior_logp.double() - start, 0.0)
        ratios += apart.sum(1).tolist()
    return ratios
