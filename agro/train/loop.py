"""The loop. Read this first, then `phase.py`: everything that happens between a configuration and a better model.

A run has phases; a phase has steps. One step: draw groups (fresh from the sampler, stored from the store, or both),
back-propagate the objective over them, update, evaluate now and then, write a checkpoint now and then. All randomness
comes from counters (seed, step, response, position), so a run that was stopped and resumed is the run that never
stopped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from agro.config import RunConfig
from agro.envs import EpisodeReward, load_environment
from agro.errors import Refused
from agro.files import writing
from agro.policy import Policy
from agro.prompts import load_prompts
from agro.reference import load_reference
from agro.report import report
from agro.rewards import Reward, load_reward
from agro.store import Store
from agro.train import checkpoint
from agro.train.callbacks import Callback
from agro.train.card import write_cards
from agro.train.check import check_config, check_heldout, learns_value, reads_reference, takes_stored_value
from agro.train.checkpoint import Position
from agro.train.data import derive
from agro.train.hub import check_push, push
from agro.train.interruption import Interruption
from agro.train.notes import notes
from agro.train.phase import Phase
from agro.train.plan import plan
from agro.train.progress import Progress
from agro.train.recovery import go_back, prune
from agro.train.run import Run
from agro.train.saving import save_model
from agro.train.track import Trackers, check_trackers, load_trackers
from agro.train.trainable import check_store
from agro.train.values import StoredValues
from agro.train.watchdog import Watchdog


class Trainer:
    """Train as `config` says, in the run folder `out` (default: runs/ and the time).

    `callbacks` are told what happens. After `run`, or while it lasts, `policy` is the policy.
    """

    policy: Policy
    reference: Policy | None  # where an objective or an evaluation reads it
    reward: Reward | None
    values: StoredValues | None  # of data.value_store
    store: Store
    folder: Run
    progress: Progress
    watchdog: Watchdog
    trackers: Trackers

    def __init__(
        self,
        config: RunConfig,
        out: str | Path | None = None,
        *,
        resume: bool = False,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        check_config(config)
        check_trackers(config.track)
        self.config = config
        self.phases = [(name, config.phase(name)) for name in config.phase_names]
        if resume and out is None:
            raise Refused("--resume: expected --out RUN, the folder of the run to go on with")
        self.out = Path(out) if out is not None else Path("runs") / time.strftime("%Y%m%d-%H%M%S")
        self.resume = resume
        self.callbacks = callbacks
        self.stopped = ""  # why the run is to end after the present step
        self.interruption = Interruption()

    def stop(self, why: str) -> None:
        """End the run after the present step, as if it were the last."""
        self.stopped = why

    def stage(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """What the run is at, and how far in it."""
        self.progress.stage(name, done, total)
        self.watchdog.stage(name, done, total)

    def between(self) -> None:
        """Called between pieces of work; raises `Interrupted` where a stop was asked for."""
        self.watchdog.beat()
        self.interruption.check()

    def tell(self, event: str, *about: Any) -> None:
        """Call a method of every callback."""
        for callback in self.callbacks:
            getattr(callback, event)(self, *about)

    def run(self) -> Path:
        """Run to the end and return the run folder; raises `Refused` before any compute where data can't be used."""
        store = self._prepare()
        try:
            self.policy = self._load_policy()
            self.folder = Run(self.out, self.config, resume=self.resume)
            self.progress = Progress.on(sum(config.train.steps for _, config in self.phases), store)
            self.trackers = load_trackers(self.config, self.folder, self.progress.say)
            self.watchdog = Watchdog(self.config.guard.stage_seconds, self.progress.say)
            with (
                closing(self.folder),
                closing(self.progress),
                closing(self.trackers),
                Store.open(store) as self.store,
                self.interruption.on_signals(self.progress.say),
                self.watchdog,
            ):
                self._train()
        finally:
            if self.reward is not None:
                self.reward.close()
        with writing(self.out):
            report(self.out)
            write_cards(self.out)
        if where := push(self.out / "model", self.config.train):
            self.progress.say(f"uploaded to {where}")
        return self.out

    def plan(self) -> dict[str, Any]:
        """What `run` would do, all of it loaded and checked, and nothing written; see `agro.train.plan`."""
        path = self._prepare()
        if self.reward is not None:
            self.reward.close()
        with Store.open(path, read_only=True) if is_there(path) else nullcontext() as store:
            policy = self._load_policy()
            return plan(
                self.config, policy, self._load_reference(policy), self.prompts, self.eval_prompts, store
            )

    def _prepare(self) -> Path:
        """Load and check what is cheap; the path of the store."""
        data = self.config.data
        check_push(self.config.train)
        self.prompts = load_prompts(data.prompts) if data.prompts else []
        self.eval_prompts = load_prompts(data.eval_prompts) if data.eval_prompts else []
        check_heldout([p.id for p in self.prompts], [p.id for p in self.eval_prompts])
        path = Path(data.store) if data.store else self.out / "store.db"
        self._check_store(path)
        given = data.value_store
        self.values = StoredValues.load(given, self._valued_prompts(path)) if given else None
        asked = {name: config.environment for name, config in self.phases if config.environment is not None}
        self.environments = {name: load_environment(environment) for name, environment in asked.items()}
        self.reward = load_reward(self.config.reward) if self.prompts or self.eval_prompts else None
        if self.reward is not None and self.environments:
            self.reward = EpisodeReward(self.reward)
        return path

    def _load_policy(self) -> Policy:
        policy = Policy.load(self.config.policy, seed=derive(self.config.train.seed, "weights"))
        if any(learns_value(config) for _, config in self.phases):
            policy.add_value()
        return policy

    def _load_reference(self, policy: Policy) -> Policy | None:
        """What stays in memory for the whole run where any of its phases needs it."""
        needed = any(reads_reference(config) for _, config in self.phases)
        return load_reference(self.phases[0][1].policy, policy) if needed else None

    def _check_store(self, path: Path) -> None:
        """Look at what is in the store before anything is loaded; what a fresh phase adds isn't known yet."""
        alone = sum(1 for _ in takewhile(lambda phase: phase[1].data.replay == 1, self.phases))
        if alone and not is_there(path):
            raise Refused(
                f"data.store: {path} isn't there; data.replay = 1 trains from a store (agro import makes one)"
            )
        if is_there(path):
            with Store.open(path, read_only=True) as store:
                for _, config in self.phases[: alone + 1]:
                    if config.data.replay > 0:
                        check_store(config, store)
        for held in {c.data.eval_store for _, c in self.phases if c.data.eval_store}:
            Store.open(held, read_only=True, create=False).close()

    def _valued_prompts(self, path: Path) -> set[str]:
        """Those that phases with stored values train on, as far as is known before the run; `path`: of the store."""
        found, fresh = set[str](), False
        for _, config in self.phases:
            fresh = fresh or config.data.replay < 1  # what a phase samples is stored for those that follow
            if not takes_stored_value(config):
                continue
            if fresh:
                found |= {p.id for p in self.prompts}
            if config.data.replay > 0 and is_there(path):
                with Store.open(path, read_only=True) as store:
                    groups = store.groups(roles=config.data.roles, sources=config.data.sources)
                    found |= {g.prompt_id for g in groups if g.scored}
        return found

    def _train(self) -> None:
        for note in notes(self.policy, self.prompts, self.config):
            self.progress.say(f"note: {note}")
        self.reference = self._load_reference(self.policy)
        position = go_back(self)
        if self.folder.changed:
            position = replace(position, stopped="")
        for note in self.folder.notes:
            self.progress.say(note)
        ends = 0
        for name, config in self.phases:
            begins, ends = ends, ends + config.train.steps
            if position.step < ends and not position.stopped:
                if position.phase != name:
                    position = replace(
                        position,
                        phase=name,
                        prompts=0,
                        limits=None,
                        losses=(),
                        beta=None,
                        anchor=position.digest,
                    )
                self.set_reference(config, position, begins)
                position = Phase(self, config, position, begins).train()
            if position.stopped and position.step <= ends:
                break
        prune(self, begins, config.train.keep)  # a run killed at its end didn't come to it
        save_model(self.policy, self.out, self.config.policy.lora)

    def set_reference(self, config: RunConfig, position: Position, begins: int) -> None:
        """The reference's weights where a phase begins or goes on; they are those of the start until then."""
        if self.reference is None:
            return
        if begins and config.policy.reference in ("phase", "ema", "periodic"):
            checkpoint.load(self.folder.checkpoint(begins), position.anchor, self.reference.weights())
        if position.step > begins and config.policy.reference in ("ema", "periodic"):
            checkpoint.load_reference(self.folder.checkpoint(position.step), self.reference.weights())


def is_there(store: Path) -> bool:
    """Whether a store was made: a run that ended while it made one leaves an empty file."""
    return store.exists() and store.stat().st_size > 0
