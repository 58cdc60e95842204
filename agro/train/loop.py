"""The loop. Read this first: everything that happens between a configuration and a better model.

One step: draw groups (fresh from the sampler, stored from the store, or both), back-propagate the objective over
them, update, evaluate now and then, write a checkpoint now and then. All randomness comes from counters (seed, step,
response, position), so a run that was stopped and resumed is the run that never stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from agro.config import RunConfig
from agro.envs import EpisodeReward, in_environment, load_environment
from agro.errors import Interrupted, Refused, Unwritable
from agro.evaluate import heldout
from agro.files import writing
from agro.objectives import NotFinite, get
from agro.policy import Policy
from agro.prompts import load_prompts
from agro.reference import follow, load_reference
from agro.report import report
from agro.rewards import Reward, load_reward
from agro.samplers import HFSampler, Sampler
from agro.store import Commit, Store
from agro.train import checkpoint
from agro.train.callbacks import Callback
from agro.train.card import write_cards
from agro.train.check import check_config, check_heldout, measures_consistency, reads_reference
from agro.train.checkpoint import Position
from agro.train.consistency import HeldOutGroups
from agro.train.data import (
    Drawn,
    PromptOrder,
    check_store,
    derive,
    draw_rule,
    sample_fresh,
    sampling,
    stored_groups,
    usable,
)
from agro.train.guard import explosion, remember
from agro.train.hub import check_push, push
from agro.train.interruption import Interruption
from agro.train.measure import describe_batch, describe_heldout, describe_step, empty_metrics
from agro.train.micro import MicroBatch
from agro.train.notes import notes
from agro.train.offload import state_on_device
from agro.train.plan import plan
from agro.train.progress import Progress, responses_text
from agro.train.run import Run
from agro.train.saving import keep_best, save_model
from agro.train.schedule import lr_at, options_at
from agro.train.step import Step, backward, collate, streams_of
from agro.train.track import Trackers, check_trackers, load_trackers
from agro.train.watchdog import Watchdog
from agro.types import UNKNOWN_VERSION, Batch


class Trainer:
    """Train as `config` says, in the run folder `out` (default: runs/ and the time).

    `callbacks` are told what happens. After `run`, or while it lasts, `policy` is the policy.
    """

    policy: Policy
    reference: Policy | None  # where an objective or an evaluation reads it
    reward: Reward | None
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
                closing(self.folder), closing(self.progress), closing(self.trackers), Store.open(store) as self.store,
                self.interruption.on_signals(self.progress.say), self.watchdog,
            ):  # fmt: skip
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
        with Store.open(path, read_only=True) if path.exists() else nullcontext() as store:
            return plan(self.config, self._load_policy(), self.prompts, self.eval_prompts, store)

    def _prepare(self) -> Path:
        """Load and check what is cheap; the path of the store."""
        data = self.config.data
        check_push(self.config.train)
        self.prompts = load_prompts(data.prompts) if data.prompts else []
        self.eval_prompts = load_prompts(data.eval_prompts) if data.eval_prompts else []
        check_heldout([p.id for p in self.prompts], [p.id for p in self.eval_prompts])
        path = Path(data.store) if data.store else self.out / "store.db"
        self._check_store(path)
        asked = {name: config.environment for name, config in self.phases if config.environment is not None}
        self.environments = {name: load_environment(environment) for name, environment in asked.items()}
        self.reward = load_reward(self.config.reward) if self.prompts or self.eval_prompts else None
        if self.reward is not None and self.environments:
            self.reward = EpisodeReward(self.reward)
        return path

    def _load_policy(self) -> Policy:
        return Policy.load(self.config.policy, seed=derive(self.config.train.seed, "weights"))

    def _check_store(self, path: Path) -> None:
        """Look at what is in the store before anything is loaded; what a fresh phase adds isn't known yet."""
        alone = sum(1 for _ in takewhile(lambda phase: phase[1].data.replay == 1, self.phases))
        there = path.exists() and path.stat().st_size > 0  # a run that ended while it made the store leaves it empty
        if alone and not there:
            raise Refused(
                f"data.store: {path} isn't there; data.replay = 1 trains from a store (agro import makes one)"
            )
        if there:
            with Store.open(path, read_only=True) as store:
                for _, config in self.phases[: alone + 1]:
                    if config.data.replay > 0:
                        check_store(config, store)

    def _train(self) -> None:
        for note in notes(self.policy, self.prompts, self.config):
            self.progress.say(f"note: {note}")
        needed = any(reads_reference(config) for _, config in self.phases)
        self.reference = load_reference(self.config.policy, self.policy) if needed else None
        position = self._go_back()
        ends = 0
        for name, config in self.phases:
            begins, ends = ends, ends + config.train.steps
            if position.step < ends and not position.stopped:
                if position.phase != name:
                    position = replace(position, phase=name, prompts=0, losses=(), anchor=position.digest)
                self._set_reference(config, position, begins)
                position = Phase(self, config, position, begins).train()
        self.prune(begins, config.train.keep)  # a run killed at its end didn't come to it
        save_model(self.policy, self.out, self.config.policy.lora)

    def _set_reference(self, config: RunConfig, position: Position, begins: int) -> None:
        """The reference's weights where a phase begins or goes on; they are those of the start until then."""
        if self.reference is None:
            return
        if begins and config.policy.reference in ("phase", "ema", "periodic"):
            checkpoint.load(self.folder.checkpoint(begins), position.anchor, self.reference.weights())
        if position.step > begins and config.policy.reference in ("ema", "periodic"):
            checkpoint.load_reference(self.folder.checkpoint(position.step), self.reference.weights())

    def _go_back(self) -> Position:
        """The last committed step whose checkpoint is whole, with its weights: what came after it is undone or marked."""
        self.store.check()
        run, commits = self.folder.id, {c.step: c for c in self.store.commits(self.folder.id)}
        damage = [f"row {row} of the commits in {self.store.path}" for row in self.store.damaged("commits")]
        for commit in reversed(commits.values()):
            found = self._damage(commit, commits)
            if not found:
                break
            damage.append(found)
        else:
            if commits:
                raise Refused(
                    f"{self.out}: none of the checkpoints that the run committed is whole: {'; '.join(damage[:5])}. "
                    "What to do: restore one of them from a copy, or start a new run with another --out"
                )
            commit = None
        at = commit.step if commit else 0
        if damage:
            self.progress.say(f"damaged: {'; '.join(damage)}; going on from step {at}")
        self.store.rewind(run, to=commit)
        for line in self.folder.forget_after(at or -1):  # the measurement of step 0 is made again
            self.progress.say(f"damaged: {self.folder.metrics_file}:{line}; left out")
        if commit is None:
            return Position()
        return checkpoint.load(self.folder.checkpoint(at), commit.digest, self.policy.weights())

    def prune(self, begins: int, keep: int) -> None:
        """Delete all checkpoints but the one that the phase began with and the last `keep` that were committed."""
        kept = {begins, *(c.step for c in self.store.commits(self.folder.id)[-keep:])}
        checkpoint.prune(self.out / "checkpoints", keep={self.folder.checkpoint(step) for step in kept})

    def _damage(self, commit: Commit, commits: Mapping[int, Commit]) -> str:
        """What keeps the run from going on at this commit: damage to its checkpoint, or to its phase's reference."""
        folder = self.folder.checkpoint(commit.step)
        if found := checkpoint.damage(folder, commit):
            return found
        position, begins = checkpoint.load_position(folder, commit.digest), 0
        for name, config in self.phases:
            ends = begins + config.train.steps
            needed = begins and config.policy.reference in ("phase", "ema", "periodic")
            if needed and name == position.phase and position.step < ends:
                reference = commits.get(begins)
                if reference is None or reference.digest != position.anchor:
                    return f"step {commit.step}: the commit of step {begins}, its reference, is missing"
                return checkpoint.damage(self.folder.checkpoint(begins), reference)
            begins = ends
        return ""


class Phase:
    """One phase of a run: a configuration, an optimiser, and the steps from `begins` on."""

    def __init__(self, trainer: Trainer, config: RunConfig, position: Position, begins: int) -> None:
        self.trainer, self.config, self.position, self.begins = trainer, config, position, begins
        self.policy, self.store, self.run_id = trainer.policy, trainer.store, trainer.folder.id
        self.between, self.stage = trainer.between, trainer.stage
        self.saved = position.step if position.digest else -1
        train = config.train
        self.micro = MicroBatch.of(train, trainer.progress.say)
        if position.limits is not None:
            self.micro.sequences, self.micro.tokens = position.limits
        self.policy.recompute = train.gradient_checkpointing
        self.order = PromptOrder(trainer.prompts, derive(train.seed, "prompts", position.phase))
        self.environment = trainer.environments.get(position.phase)
        self.sampler = self._sampler(position.version)
        self.optimiser = torch.optim.AdamW(
            self.policy.weights().values(),
            lr=train.lr, betas=train.adam_betas, eps=train.adam_eps, weight_decay=train.weight_decay,
        )  # fmt: skip
        if position.step > begins:
            checkpoint.load_optimiser(trainer.folder.checkpoint(position.step), self.policy.weights(), self.optimiser)
        if config.data.replay > 0:
            for note in check_store(config, self.store):
                trainer.progress.say(f"{position.phase}: {note}")
            check_heldout([g.prompt_id for g in self.store.groups()], [p.id for p in trainer.eval_prompts])
        self.held = self._held_out_groups()

    @property
    def reference_weights(self) -> dict[str, torch.Tensor] | None:
        """Those of a reference that changes on the way."""
        follows = self.config.policy.reference in ("ema", "periodic")
        return self.trainer.reference.weights() if follows and self.trainer.reference is not None else None

    def train(self) -> Position:
        """All steps that are left; on an interruption, or a refusal in the middle, a checkpoint is written first."""
        config, ends = self.config, self.begins + self.config.train.steps
        try:
            if self.position.step == 0 and (self.trainer.eval_prompts or self.held):
                start = {"step": 0, "phase": self.position.phase, "version": self.position.version}
                self._log(empty_metrics() | start | self._evaluate(0))
            if config.guard.action == "rollback" and self.saved < 0:
                self._save()  # where the first steps can go back to
            while self.position.step < ends and not self.position.stopped:
                self.between()
                self._step(last=self.position.step + 1 == ends)
                if self.position.skipped >= config.train.max_skipped:
                    raise Refused(
                        f"step {self.position.step}: {self.position.skipped} updates in a row were skipped; the lines above say "
                        "why. What to do: mend the data, or start anew with a lower train.lr, a higher objective.beta, or in float32"
                    )
        except Unwritable as error:  # no checkpoint can be written now, and a step may be half logged
            raise Unwritable(f"{error}. The run goes on from step {max(self.saved, 0)} with --resume") from error
        except (Interrupted, Refused) as error:
            if self.position.step != self.saved:
                self.store.rewind(self.run_id, self.position.step)
                self._save()
            if isinstance(error, Interrupted):
                self.trainer.progress.say(f"interrupted after step {self.position.step}; go on with --resume")
            raise
        return self.position

    def _step(self, *, last: bool) -> None:
        """Draw, update, evaluate, log, save. What stops a step does so before the weights move or after it is done."""
        train, every = self.config.train, self.config.evaluate.every
        at = self.position.step - self.begins  # of the phase, from 0
        began = time.perf_counter()
        drawn = self._draw(at)
        self.trainer.tell("before_step", drawn.samples)
        sampled = time.perf_counter()
        metrics = self._update(drawn, at)
        trained = time.perf_counter()
        metrics |= {
            "seconds_sample": sampled - began, "seconds_train": trained - sampled, "seconds": trained - began,
            "tokens_per_second": (drawn.sampled_tokens + metrics["tokens"]) / (trained - began),
        }  # fmt: skip
        last = last or bool(self.trainer.stopped)
        if last or (every and (at + 1) % every == 0):
            metrics |= self._evaluate(at)
            if metrics["kl_ref"] is None:
                metrics["kl_ref"] = metrics["eval_kl_ref"]
        self._log(metrics)
        if train.show_every and (at + 1) % train.show_every == 0 and drawn.samples:
            self.trainer.progress.say(responses_text(self.position.step, drawn.samples))
        if self.trainer.stopped:
            self.position = replace(self.position, stopped=self.trainer.stopped)
            self.trainer.progress.say(f"stopped after step {self.position.step}: {self.trainer.stopped}")
        if last or self.trainer.stopped or metrics["rolled_back"] or (at + 1) % train.checkpoint_every == 0:
            self._save()

    def _draw(self, at: int) -> Drawn:
        """The step's samples: stored groups are drawn before fresh ones are appended, so that no group is both."""
        config, drawn, step = self.config, Drawn([]), self.position.step + 1
        stored, samples = stored_groups(config, at), []
        if stored and config.data.replay < 1:  # a store that is still filling gives what it has
            rule = draw_rule(config, stored)
            stored = min(stored, len(self.store.candidates(rule, run=self.run_id, version=self.position.version)))
        if stored:
            self.stage("waiting for the store")
            rule = draw_rule(config, stored)
            samples = self.store.draw(
                rule,
                run=self.run_id,
                step=step,
                seed=config.train.seed,
                version=self.position.version,
                on_damaged=drawn.damaged.append,
            )
            for row in drawn.damaged:
                self.trainer.progress.say(f"damaged: sample {row.id} of {self.store.path}; left out of step {step}")
        if fresh := config.train.groups - stored:
            assert self.trainer.reward is not None
            prompts = self.order.take(self.position.prompts, fresh)
            drawn.prompts = fresh
            samples += sample_fresh(
                config, self.run_id, step, prompts, self.sampler, self.trainer.reward, self.store, drawn, self.between,
                self.trainer.tell, self.stage,
            )  # fmt: skip
        usable(samples, self.policy, config, drawn)
        return drawn

    def _update(self, drawn: Drawn, at: int) -> dict[str, Any]:
        """All optimiser steps on one batch; the metrics are of the first, before the weights move."""
        train, needs = self.config.train, get(self.config.objective.name).needed(self.config.objective.options)
        metrics = empty_metrics() | describe_batch(drawn, self.position.version)
        batch = collate(drawn.samples, self.position.version).to(self.policy.device) if drawn.samples else None
        if batch is None:
            self._skip(metrics, "nothing of what was drawn can be trained on")
        elif "old_logp" in needs and train.updates:
            batch = batch.replace(old_logp=streams_of(self.policy, batch, ["logp"], self.micro)["logp"])
        for u in range(train.updates if batch is not None else 0):
            assert batch is not None
            self.stage("updating", u + 1, train.updates)
            try:
                done, norm = self._gradient(batch, at, first=u == 0)
            except NotFinite as error:
                self._skip(metrics, str(error))
                continue
            if metrics["loss"] is None:
                metrics |= describe_step(done, drawn, self.config)
                metrics |= {"grad_norm": norm, "grad_norm_clipped": min(norm, train.clip)}
                if not self._is_safe(metrics):
                    break
            self._move(at * train.updates + u)
            metrics["lr"] = metrics["lr"] or self.optimiser.param_groups[0]["lr"]
            batch = done.batch  # which has the reference's log-probs now
        if self.trainer.reference is not None:
            follow(self.trainer.reference, self.policy, self.config.policy, at + 1)
        self.position = replace(
            self.position, step=self.position.step + 1, prompts=self.position.prompts + drawn.prompts,
            limits=(self.micro.sequences, self.micro.tokens),
        )  # fmt: skip
        self.sampler.version = self.position.version
        here = {"step": self.position.step, "phase": self.position.phase, "version": self.position.version}
        return metrics | here

    def _gradient(self, batch: Batch, at: int, *, first: bool) -> tuple[Step, float]:
        """The objective's gradient, clipped, and its norm before that; raises `NotFinite`."""
        train, name = self.config.train, self.config.objective.name
        done = backward(
            self.policy, batch, name, get(name).resolve(name, options_at(self.config.objective.options, at)),
            micro=self.micro, reference=self.trainer.reference, between=self.between if first else _nothing,
            offload="activations" in train.offload,
        )  # fmt: skip
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.weights().values(), train.clip))
        check_gradient(self.policy.weights(), norm)
        return done, norm

    def _move(self, update: int) -> None:
        """One optimiser step, number `update` of the phase."""
        train = self.config.train
        lr = lr_at(train, update, train.steps * train.updates) * 0.5**self.position.rollbacks
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        with state_on_device(self.optimiser, "optimiser" in train.offload):
            self.optimiser.step()
        self.position = replace(self.position, version=self.position.version + 1, skipped=0)

    def _skip(self, metrics: dict[str, Any], why: str) -> None:
        metrics["skipped"] += 1
        self.position = replace(self.position, skipped=self.position.skipped + 1)
        self.trainer.progress.say(f"update skipped: {why}")

    def _is_safe(self, metrics: dict[str, Any]) -> bool:
        """Whether the step may move the weights; where it explodes, the guard's rule is carried out."""
        guard, position = self.config.guard, self.position
        why = explosion(guard, metrics["loss"], metrics["kl_ref"], position.losses)
        if why is None:
            self.position = replace(position, losses=remember(guard, position.losses, metrics["loss"]))
            return True
        if guard.action == "skip":
            self._skip(metrics, why)
        elif guard.action == "rollback" and position.rollbacks < guard.rollbacks:
            self._roll_back(why)
            metrics["rolled_back"] = 1
        else:
            raise Refused(
                f"step {position.step + 1}: {why}. What to do: look at the samples (agro show), then go on from a lower train.lr or a "
                "higher objective.beta in a new run, or raise the limit of the guard"
            )
        return False

    def _roll_back(self, why: str) -> None:
        """Weights and optimiser of the last checkpoint, half the learning rate; weights that change get a new version."""
        committed = self.store.committed(self.run_id)
        assert committed is not None
        folder = self.trainer.folder.checkpoint(committed.step)
        if found := checkpoint.damage(folder, committed):
            raise Refused(
                f"{found}, and step {self.position.step + 1} is to go back to it ({why}). What to do: --resume"
            )
        checkpoint.load(folder, committed.digest, self.policy.weights())
        self.optimiser.state.clear()
        if committed.step > self.begins:
            checkpoint.load_optimiser(folder, self.policy.weights(), self.optimiser)
        if self.reference_weights is not None:
            if committed.step == self.begins > 0:  # the phase began with a copy
                checkpoint.load(folder, committed.digest, self.reference_weights)
            else:
                checkpoint.load_reference(folder, self.reference_weights)
        self.position = replace(
            self.position, version=self.position.version + 1, rollbacks=self.position.rollbacks + 1, losses=()
        )
        self.trainer.progress.say(f"{why}: back to the weights of step {committed.step}, at half the learning rate")

    def _held_out_groups(self) -> HeldOutGroups | None:
        """What data.eval_store holds, where the phase's objective has something to measure on it."""
        data, reference = self.config.data, self.trainer.reference
        if not data.eval_store or not measures_consistency(self.config):
            return None
        assert reference is not None
        held = HeldOutGroups.load(data.eval_store, self.config, reference, self.micro)
        stored = {g.prompt_id for g in self.store.groups()} if data.replay else set()
        check_heldout(stored | {p.id for p in self.trainer.prompts}, held.prompt_ids, "data.eval_store")
        return held

    def _sampler(self, version: int = UNKNOWN_VERSION) -> Sampler:
        return in_environment(HFSampler(self.policy, version), self.environment, self.config.environment)

    def _evaluate(self, at: int) -> dict[str, Any]:
        """Held-out reward at the weights of now, on noise that is the same at every step, and held-out ½ Var(R)."""
        config, out = self.config, dict[str, Any]()
        if self.trainer.eval_prompts or self.held:
            self.stage("evaluating")
            self.trainer.tell("before_evaluate")
        if self.trainer.eval_prompts:
            assert self.trainer.reward is not None
            options = replace(
                sampling(config, derive(config.train.seed, "evaluate")),
                temperature=config.evaluate.temperature, top_k=0, top_p=1.0, min_p=0.0,
            )  # fmt: skip
            prompts = self.trainer.eval_prompts
            found = heldout(self._sampler(), self.trainer.reward, prompts, config.evaluate.n, options)
            out |= describe_heldout(found, self.policy, self.trainer.reference, config, self.micro)
            self._compare(out)
        if self.held is not None:
            out |= self.held.measure(self.policy, options_at(config.objective.options, at)["beta"]).metrics()
            out["eval_left_out"] = self.held.left_out
        if out:
            self.trainer.tell("after_evaluate", out)
        return out

    def _compare(self, found: Mapping[str, Any]) -> None:
        """Held-out reward against the best so far: what is kept, and whether the run goes on."""
        rule, step, reward = self.config.evaluate, self.position.step, found["eval_reward"]
        if reward is None:
            return
        best, waited = self.position.best, self.position.waited + 1
        if best is None or reward > best[0]:
            best, waited = (reward, step), 0
            if rule.keep_best:
                keep_best(self.policy, self.trainer.out, self.config.policy.lora, {**found, "step": step})
        self.position = replace(self.position, best=best, waited=waited)
        if rule.patience and waited >= rule.patience:
            self.trainer.stop(f"{waited} evaluations without more than {best[0]:.4f}, which step {best[1]} had")
        if rule.target is not None and reward >= rule.target:
            self.trainer.stop(f"eval_reward is {reward:.4f}, evaluate.target {rule.target:g}")

    def _save(self) -> None:
        self.stage("saving")
        folder, position = self.trainer.folder, self.position
        files = checkpoint.save(
            folder.checkpoint(position.step), position, self.policy.weights(), self.optimiser, self.reference_weights
        )
        self.position = replace(position, digest=checkpoint.digest_of(files))
        folder.sync()
        self.store.commit(self.run_id, position.step, self.position.digest, files=files)
        self.saved = position.step
        self.trainer.prune(self.begins, self.config.train.keep)

    def _log(self, metrics: dict[str, Any]) -> None:
        self.trainer.folder.log(metrics)
        self.trainer.progress.step(metrics)
        self.trainer.trackers.log(metrics)
        self.trainer.tell("after_step", metrics)


def check_gradient(weights: Mapping[str, torch.Tensor], norm: float) -> None:
    """Raise `NotFinite` naming the parameters where the gradient's norm isn't finite."""
    if not math.isfinite(norm):
        bad = [n for n, p in weights.items() if p.grad is not None and not p.grad.isfinite().all()]
        raise NotFinite(f"the gradient isn't finite in {len(bad)} parameters, {', '.join(bad[:3])} among them")


def _nothing() -> None:
    pass
