"""One phase of a run: its steps, and what each of them does."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from agro.config import RunConfig
from agro.envs import in_environment
from agro.errors import Interrupted, Refused, Unwritable
from agro.objectives import NotFinite, get
from agro.reference import follow
from agro.samplers import HFSampler, Sampler
from agro.train import checkpoint
from agro.train.cache import ReferenceCache
from agro.train.check import check_heldout
from agro.train.checkpoint import Position
from agro.train.data import (
    Drawn,
    PromptOrder,
    derive,
    draw_rule,
    sample_fresh,
    stored_groups,
    usable,
)
from agro.train.diagnostics import DWARFED, dwarfed, with_reference
from agro.train.guard import explosion, remember
from agro.train.heldout import HeldOut, compare
from agro.train.measure import describe_batch, describe_step, empty_metrics
from agro.train.micro import MicroBatch
from agro.train.notes import warn_of_metrics
from agro.train.optimiser import Optimiser
from agro.train.progress import responses_text
from agro.train.recovery import prune
from agro.train.schedule import is_tuned, lr_at, options_at, tune
from agro.train.step import Step, backward, collate, streams_of
from agro.train.trainable import check_store
from agro.types import UNKNOWN_VERSION, Batch

if TYPE_CHECKING:
    from agro.train.loop import Trainer


class Phase:
    """One phase of a run: a configuration, an optimiser, and the steps from `begins` on."""

    def __init__(self, trainer: Trainer, config: RunConfig, position: Position, begins: int) -> None:
        self.trainer, self.config, self.position, self.begins = trainer, config, position, begins
        self.policy, self.store, self.run_id = trainer.policy, trainer.store, trainer.folder.id
        self.between, self.stage = trainer.between, trainer.stage
        self.saved = position.step if position.digest else -1
        self.said: set[str] = set()  # warnings
        train = config.train
        self.micro = MicroBatch.of(train, trainer.progress.say)
        if position.limits is not None:
            self.micro.sequences, self.micro.tokens = position.limits
        self.policy.recompute = train.gradient_checkpointing
        self.order = PromptOrder(trainer.prompts, derive(train.seed, "prompts", position.phase))
        self.environment = trainer.environments.get(position.phase)
        self.sampler = self._sampler(position.version)
        self.optimiser = Optimiser(self.policy, train)
        if position.step > begins:
            self._load_optimiser(trainer.folder.checkpoint(position.step))
        if config.data.replay > 0:
            for note in check_store(config, self.store):
                trainer.progress.say(f"{position.phase}: {note}")
            check_heldout(self._stored_prompts(), [p.id for p in trainer.eval_prompts])
        self.held = HeldOut(trainer, config, self._sampler, self.micro, self._prompts())
        self.cache: ReferenceCache | None = None
        if config.policy.cache_reference and trainer.reference is not None:
            if position.cached < 0:
                self.position = position = replace(position, cached=self.store.last_reference_logp())
            self.cache = ReferenceCache(
                self.store, self.run_id, trainer.reference, self.micro, position.cached
            )

    @property
    def reference_weights(self) -> dict[str, torch.Tensor] | None:
        """Those of a reference that changes on the way."""
        follows = self.config.policy.reference in ("ema", "periodic")
        return self.trainer.reference.weights() if follows and self.trainer.reference is not None else None

    @property
    def _half_done(self) -> bool:
        """Whether a step has moved the weights and hasn't ended."""
        return self.sampler.version != self.position.version

    def train(self) -> Position:
        """All steps that are left; on an interruption, or a refusal in the middle, a checkpoint is written first.

        Not where the weights have moved in the present step: then the last checkpoint is where the run goes on.
        """
        config, ends = self.config, self.begins + self.config.train.steps
        try:
            if self.position.step == 0 and self.held:
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
            raise Unwritable(
                f"{error}. The run goes on from step {max(self.saved, 0)} with --resume"
            ) from error
        except (Interrupted, Refused) as error:
            if self.position.step != self.saved and not self._half_done:
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
            "seconds_sample": sampled - began,
            "seconds_train": trained - sampled,
            "seconds": trained - began,
            "tokens_per_second": (drawn.sampled_tokens + metrics["tokens"]) / (trained - began),
        }
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
            stored = min(
                stored, len(self.store.candidates(rule, run=self.run_id, version=self.position.version))
            )
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
                self.trainer.progress.say(
                    f"damaged: sample {row.id} of {self.store.path}; left out of step {step}"
                )
            if rule.pairs:
                drawn.pairs = list(self.store.pairs(s.id for s in samples if s.id is not None))
        if fresh := config.train.groups - stored:
            assert self.trainer.reward is not None
            prompts = self.order.take(self.position.prompts, fresh)
            drawn.prompts = fresh
            samples += sample_fresh(
                config,
                self.run_id,
                step,
                prompts,
                self.sampler,
                self.trainer.reward,
                self.store,
                drawn,
                self.between,
                self.trainer.tell,
                self.stage,
            )
        needs = get(config.objective.name).needed(config.objective.options)
        usable(samples, self.policy, config.train.max_length, needs, drawn)
        return drawn

    def _update(self, drawn: Drawn, at: int) -> dict[str, Any]:
        """All optimiser steps on one batch; the metrics are of the first, before the weights move."""
        train = self.config.train
        metrics = empty_metrics() | describe_batch(drawn, self.position.version)
        batch = self._batch(drawn, at) if drawn.samples else None
        if batch is None:
            self._skip(metrics, "nothing of what was drawn can be trained on")
        for u in range(train.updates if batch is not None else 0):
            assert batch is not None
            self.stage("updating", u + 1, train.updates)
            try:
                done, norm = self._gradient(batch, at, first=u == 0)
            except NotFinite as error:
                self._skip(metrics, str(error))
                continue
            if metrics["loss"] is None:
                metrics |= describe_step(done, drawn, self.config, self._options(at))
                metrics |= {"grad_norm": norm, "grad_norm_clipped": min(norm, train.clip)}
                if (metrics["pull_to_rewards"] or 0) > DWARFED:
                    self._warn(
                        "pull",
                        dwarfed(done, self.config.objective.name, self._options(at), metrics["length_mean"]),
                    )
                if not self._is_safe(metrics):
                    break
            name, options = self.config.objective.name, self._options(at)
            if text := warn_of_metrics(done.evaluation.metrics, name, options):
                self._warn("objective", text)
            lr = self._move(at * train.updates + u)
            metrics["lr"] = metrics["lr"] or lr
            batch = done.batch  # which has the reference's log-probs now
        asked = self.config.objective.options.get("beta", 0.0)
        if is_tuned(asked) and metrics["kl_ref"] is not None:
            self.position = replace(self.position, beta=tune(asked, metrics["beta"], metrics["kl_ref"]))
        if self.trainer.reference is not None:
            follow(self.trainer.reference, self.policy, self.config.policy, at + 1)
        self.position = replace(
            self.position, step=self.position.step + 1, prompts=self.position.prompts + drawn.prompts
        )
        self.sampler.version = self.position.version
        here = {"step": self.position.step, "phase": self.position.phase, "version": self.position.version}
        return metrics | here

    def _batch(self, drawn: Drawn, at: int) -> Batch:
        """What was drawn as tensors, with what the objective and the diagnostics read besides."""
        needs = get(self.config.objective.name).needed(self.config.objective.options)
        batch = collate(drawn.samples, self.position.version, drawn.pairs).to(self.policy.device)
        if "old_logp" in needs:
            batch = batch.replace(old_logp=streams_of(self.policy, batch, ["logp"], self.micro)["logp"])
        if "stored_value" in needs:
            assert self.trainer.values is not None
            batch = self.trainer.values.fill(batch, drawn.samples, self._options(at))
        if self.cache is not None and "ref_logp" in needs:
            return self.cache.fill(batch, drawn.samples, self.position.step + 1)
        now = get(self.config.objective.name).needed(
            self._options(at)
        )  # without it where a schedule brought β to 0
        if "ref_logp" not in now and ("ref_logp" in needs or self.config.evaluate.beta is not None):
            assert self.trainer.reference is not None
            return with_reference(batch, drawn.is_fresh, self.trainer.reference, self.micro)
        return batch

    def _warn(self, about: str, text: str) -> None:
        """Say it once a phase."""
        if about not in self.said:
            self.said.add(about)
            self.trainer.progress.say(f"step {self.position.step + 1}: {text}")

    def _options(self, at: int) -> dict[str, Any]:
        """The objective's options at this step, schedules and a tuned β resolved."""
        return options_at(self.config.objective.options, at, self.position.beta)

    def _gradient(self, batch: Batch, at: int, *, first: bool) -> tuple[Step, float]:
        """The objective's gradient, clipped, and its norm before that; raises `NotFinite`."""
        train, name = self.config.train, self.config.objective.name
        done = backward(
            self.policy,
            batch,
            name,
            get(name).resolve(name, self._options(at)),
            micro=self.micro,
            reference=self.trainer.reference,
            between=self.between if first else _nothing,
            offload="activations" in train.offload,
        )
        return done, self.optimiser.clip()

    def _move(self, update: int) -> float:
        """One optimiser step, number `update` of the phase; its learning rate."""
        train = self.config.train
        lr = lr_at(train, update, train.steps * train.updates) * 0.5**self.position.rollbacks
        self.optimiser.move(lr)
        self.position = replace(self.position, version=self.position.version + 1, skipped=0)
        return lr

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
        checkpoint.load(folder, committed.digest, self.policy.weights(), self.policy.value_weights())
        self.optimiser.adam.state.clear()
        if committed.step > self.begins:
            self._load_optimiser(folder)
        if self.reference_weights is not None:
            if committed.step == self.begins > 0:  # the phase began with a copy
                checkpoint.load(folder, committed.digest, self.reference_weights)
            else:
                checkpoint.load_reference(folder, self.reference_weights)
        self.position = replace(
            self.position, version=self.position.version + 1, rollbacks=self.position.rollbacks + 1, losses=()
        )
        self.trainer.progress.say(
            f"{why}: back to the weights of step {committed.step}, at half the learning rate"
        )

    def _load_optimiser(self, folder: Path) -> None:
        checkpoint.load_optimiser(
            folder, self.policy.weights(), self.optimiser.adam, self.policy.value_weights()
        )

    def _prompts(self) -> set[str]:
        """Those that may be trained on."""
        return (self._stored_prompts() if self.config.data.replay else set()) | {
            p.id for p in self.trainer.prompts
        }

    def _stored_prompts(self) -> set[str]:
        """Those of which stored samples may be drawn."""
        data = self.config.data
        return {g.prompt_id for g in self.store.groups(roles=data.roles, sources=data.sources)}

    def _sampler(self, version: int = UNKNOWN_VERSION) -> Sampler:
        return in_environment(HFSampler(self.policy, version), self.environment, self.config.environment)

    def _evaluate(self, at: int) -> dict[str, Any]:
        """Held-out measurements at the weights of now, and what follows from them."""
        if not self.held:
            return {}
        self.stage("evaluating")
        self.trainer.tell("before_evaluate")
        found = self.held.measure(self._options(at), start=self.position.step == 0)
        self.position = compare(self.trainer, self.config, self.position, found)
        if found:
            self.trainer.tell("after_evaluate", found)
        return found

    def _save(self) -> None:
        self.stage("saving")
        folder, position = (
            self.trainer.folder,
            replace(self.position, limits=(self.micro.sequences, self.micro.tokens)),
        )
        files = checkpoint.save(
            folder.checkpoint(position.step),
            position,
            self.policy.weights(),
            self.optimiser.adam,
            self.reference_weights,
            self.policy.value_weights(),
        )
        self.position = replace(position, digest=checkpoint.digest_of(files))
        folder.sync()
        self.store.commit(self.run_id, position.step, self.position.digest, files=files)
        self.saved = position.step
        prune(self.trainer, self.begins, self.config.train.keep)

    def _log(self, metrics: dict[str, Any]) -> None:
        self.trainer.folder.log(metrics)
        self.trainer.progress.step(metrics)
        self.trainer.trackers.log(metrics)
        self.trainer.tell("after_step", metrics)


def _nothing() -> None:
    pass
