"""The loop. Read this first: everything that happens between a configuration and a better model.

One step: draw groups (fresh from the sampler, stored from the store, or both), back-propagate the objective over
them, update, evaluate now and then, write a checkpoint now and then. All randomness comes from counters (seed, step,
response, position), so a run that was stopped and resumed is the run that never stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from agro.config import RunConfig
from agro.errors import Interrupted, Refused
from agro.evaluate import heldout
from agro.objectives import NotFinite, get
from agro.policy import Policy
from agro.prompts import load_prompts
from agro.report import report
from agro.rewards import Reward, load_reward
from agro.samplers import HFSampler
from agro.store import Store
from agro.train import checkpoint
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
from agro.train.interruption import Interruption
from agro.train.measure import describe_batch, describe_heldout, describe_step, empty_metrics
from agro.train.run import Progress, Run
from agro.train.schedule import lr_at, options_at
from agro.train.step import backward, collate, streams_of


class Trainer:
    """Train as `config` says, in the run folder `out` (default: runs/ and the time).

    `on_step` is called with the metrics of every step. After `run`, or while it lasts, `policy` is the policy.
    """

    policy: Policy
    reference: Policy | None  # where an objective or an evaluation reads it
    reward: Reward | None
    store: Store
    folder: Run
    progress: Progress

    def __init__(
        self,
        config: RunConfig,
        out: str | Path | None = None,
        *,
        resume: bool = False,
        on_step: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        check_config(config)
        self.config = config
        self.phases = [(name, config.phase(name)) for name in config.phase_names]
        if resume and out is None:
            raise Refused("--resume: expected --out RUN, the folder of the run to go on with")
        self.out = Path(out) if out is not None else Path("runs") / time.strftime("%Y%m%d-%H%M%S")
        self.resume = resume
        self.on_step = on_step
        self.interruption = Interruption()

    def run(self) -> Path:
        """Run to the end and return the run folder; raises `Refused` before any compute where data can't be used."""
        data = self.config.data
        self.prompts = load_prompts(data.prompts) if data.prompts else []
        self.eval_prompts = load_prompts(data.eval_prompts) if data.eval_prompts else []
        check_heldout([p.id for p in self.prompts], [p.id for p in self.eval_prompts])
        path = Path(data.store) if data.store else self.out / "store.db"
        self._check_store(path)
        self.reward = load_reward(self.config.reward) if self.prompts or self.eval_prompts else None
        try:
            self.policy = Policy.load(self.config.policy, seed=derive(self.config.train.seed, "weights"))
            self.folder = Run(self.out, self.config, resume=self.resume)
            self.progress = Progress(sum(config.train.steps for _, config in self.phases))
            with closing(self.folder), Store.open(path) as self.store, self.interruption.on_signals(self.progress.say):
                self._train()
        finally:
            if self.reward is not None:
                self.reward.close()
        report(self.out)
        return self.out

    def _check_store(self, path: Path) -> None:
        """Look at what is in the store before anything is loaded; what a fresh phase adds isn't known yet."""
        alone = sum(1 for _ in takewhile(lambda phase: phase[1].data.replay == 1, self.phases))
        if alone and not path.exists():
            raise Refused(
                f"data.store: {path} isn't there; data.replay = 1 trains from a store (agro import makes one)"
            )
        if path.exists():
            with Store.open(path, read_only=True) as store:
                for _, config in self.phases[: alone + 1]:
                    if config.data.replay > 0:
                        check_store(config, store)

    def _train(self) -> None:
        needed = any(reads_reference(config) for _, config in self.phases)
        self.reference = self.policy.frozen_copy() if needed else None
        position = self._go_back()
        ends = 0
        for name, config in self.phases:
            begins, ends = ends, ends + config.train.steps
            if position.step < ends:
                if position.phase != name:
                    position = replace(position, phase=name, prompts=0, anchor=position.digest)
                if self.reference is not None and config.policy.reference == "phase" and begins:
                    checkpoint.load(self.folder.checkpoint(begins), position.anchor, self.reference.model)
                position = Phase(self, config, position, begins).train()
        self.policy.save(self.out / "model")

    def _go_back(self) -> Position:
        """The last committed step, with its weights: what came after it is undone or marked."""
        committed = self.store.committed(self.folder.id)
        self.store.rewind(self.folder.id)
        if committed is None:
            self.folder.forget_after(-1)
            return Position()
        self.folder.forget_after(committed.step or -1)  # the measurement of step 0 is made again
        return checkpoint.load(self.folder.checkpoint(committed.step), committed.digest, self.policy.model)


class Phase:
    """One phase of a run: a configuration, an optimiser, and the steps from `begins` on."""

    def __init__(self, trainer: Trainer, config: RunConfig, position: Position, begins: int) -> None:
        self.trainer, self.config, self.position, self.begins = trainer, config, position, begins
        self.policy, self.store, self.run_id = trainer.policy, trainer.store, trainer.folder.id
        self.between = trainer.interruption.check
        self.saved = position.step if position.digest else -1
        train = config.train
        self.order = PromptOrder(trainer.prompts, derive(train.seed, "prompts", position.phase))
        self.sampler = HFSampler(self.policy, position.version)
        self.optimiser = torch.optim.AdamW(
            [p for p in self.policy.model.parameters() if p.requires_grad],
            lr=train.lr, betas=train.adam_betas, eps=train.adam_eps, weight_decay=train.weight_decay,
        )  # fmt: skip
        if position.step > begins:
            checkpoint.load_optimiser(trainer.folder.checkpoint(position.step), self.policy.model, self.optimiser)
        if config.data.replay > 0:
            for note in check_store(config, self.store):
                trainer.progress.say(f"{position.phase}: {note}")
            check_heldout([g.prompt_id for g in self.store.groups()], [p.id for p in trainer.eval_prompts])
        self.held = self._held_out_groups()

    def train(self) -> Position:
        """All steps that are left; on an interruption, or a refusal in the middle, a checkpoint is written first."""
        ends = self.begins + self.config.train.steps
        try:
            if self.position.step == 0 and (self.trainer.eval_prompts or self.held):
                start = {"step": 0, "phase": self.position.phase, "version": self.position.version}
                self._log(empty_metrics() | start | self._evaluate(0))
            while self.position.step < ends:
                self.between()
                self._step(last=self.position.step + 1 == ends)
                if self.position.skipped >= self.config.train.max_skipped:
                    raise Refused(
                        f"step {self.position.step}: {self.position.skipped} updates in a row were skipped; the lines above say "
                        "why. What to do: mend the data, or start anew with a lower train.lr, a higher objective.beta, or in float32"
                    )
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
        sampled = time.perf_counter()
        metrics = self._update(drawn, at)
        trained = time.perf_counter()
        metrics |= {
            "seconds_sample": sampled - began, "seconds_train": trained - sampled, "seconds": trained - began,
            "tokens_per_second": (drawn.sampled_tokens + metrics["tokens"]) / (trained - began),
        }  # fmt: skip
        if last or (every and (at + 1) % every == 0):
            metrics |= self._evaluate(at)
            if metrics["kl_ref"] is None:
                metrics["kl_ref"] = metrics["eval_kl_ref"]
        self._log(metrics)
        if last or (at + 1) % train.checkpoint_every == 0:
            self._save()

    def _draw(self, at: int) -> Drawn:
        """The step's samples: stored groups are drawn before fresh ones are appended, so that no group is both."""
        config, drawn, step = self.config, Drawn([]), self.position.step + 1
        stored, samples = stored_groups(config, at), []
        if stored and config.data.replay < 1:  # a store that is still filling gives what it has
            rule = draw_rule(config, stored)
            stored = min(stored, len(self.store.candidates(rule, run=self.run_id, version=self.position.version)))
        if stored:
            rule = draw_rule(config, stored)
            samples = self.store.draw(
                rule, run=self.run_id, step=step, seed=config.train.seed, version=self.position.version
            )
        if fresh := config.train.groups - stored:
            assert self.trainer.reward is not None
            prompts = self.order.take(self.position.prompts, fresh)
            drawn.prompts = fresh
            samples += sample_fresh(
                config, self.run_id, step, prompts, self.sampler, self.trainer.reward, self.store, drawn, self.between
            )
        usable(samples, self.policy, config, drawn)
        return drawn

    def _update(self, drawn: Drawn, at: int) -> dict[str, Any]:
        """All optimiser steps on one batch; the metrics are of the first, before the weights move."""
        train, name, model = self.config.train, self.config.objective.name, self.policy.model
        options = get(name).resolve(name, options_at(self.config.objective.options, at))
        version, skipped = self.position.version, self.position.skipped
        metrics = empty_metrics() | describe_batch(drawn, version)
        updates = train.updates if drawn.samples else 0
        if not drawn.samples:
            skipped += 1
            metrics["skipped"] += 1
        batch = collate(drawn.samples, version).to(self.policy.device) if updates else None
        for u in range(updates):
            assert batch is not None
            if "old_logp" in get(name).needs(options) and batch.old_logp is None:
                batch = batch.replace(old_logp=streams_of(self.policy, batch, ["logp"], train.micro_batch)["logp"])
            for group in self.optimiser.param_groups:
                group["lr"] = lr_at(train, at * train.updates + u, train.steps * train.updates)
            self.optimiser.zero_grad(set_to_none=True)
            try:
                done = backward(
                    self.policy, batch, name, options, micro_batch=train.micro_batch, reference=self.trainer.reference,
                    between=self.between if u == 0 else _nothing,
                )  # fmt: skip
                norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip))
                check_gradient(model, norm)
            except NotFinite as error:
                skipped += 1
                metrics["skipped"] += 1
                self.trainer.progress.say(f"update skipped: {error}")
                continue
            self.optimiser.step()
            if metrics["loss"] is None:
                norms = {"grad_norm": norm, "grad_norm_clipped": min(norm, train.clip)}
                metrics |= (
                    describe_step(done, drawn, self.config) | norms | {"lr": self.optimiser.param_groups[0]["lr"]}
                )
            batch = done.batch  # which has the reference's log-probs now
            version, skipped = version + 1, 0
        self.position = replace(
            self.position, step=self.position.step + 1, version=version, skipped=skipped,
            prompts=self.position.prompts + drawn.prompts,
        )  # fmt: skip
        self.sampler.version = version
        return metrics | {"step": self.position.step, "phase": self.position.phase, "version": version}

    def _held_out_groups(self) -> HeldOutGroups | None:
        """What data.eval_store holds, where the phase's objective has something to measure on it."""
        data, reference = self.config.data, self.trainer.reference
        if not data.eval_store or not measures_consistency(self.config):
            return None
        assert reference is not None
        held = HeldOutGroups.load(data.eval_store, self.config, reference)
        stored = {g.prompt_id for g in self.store.groups()} if data.replay else set()
        check_heldout(stored | {p.id for p in self.trainer.prompts}, held.prompt_ids, "data.eval_store")
        return held

    def _evaluate(self, at: int) -> dict[str, Any]:
        """Held-out reward at the weights of now, on noise that is the same at every step, and held-out ½ Var(R)."""
        config, out = self.config, dict[str, Any]()
        if self.trainer.eval_prompts:
            assert self.trainer.reward is not None
            options = replace(
                sampling(config, derive(config.train.seed, "evaluate")),
                temperature=config.evaluate.temperature, top_k=0, top_p=1.0, min_p=0.0,
            )  # fmt: skip
            prompts = self.trainer.eval_prompts
            found = heldout(HFSampler(self.policy), self.trainer.reward, prompts, config.evaluate.n, options)
            out |= describe_heldout(found, self.policy, self.trainer.reference, config)
        if self.held is not None:
            out |= self.held.measure(self.policy, options_at(config.objective.options, at)["beta"]).metrics()
            out["eval_left_out"] = self.held.left_out
        return out

    def _save(self) -> None:
        folder = self.trainer.folder.checkpoint(self.position.step)
        digest = checkpoint.save(folder, self.position, self.policy.model, self.optimiser)
        self.store.commit(self.run_id, self.position.step, digest)
        self.position = replace(self.position, digest=digest)
        self.saved = self.position.step
        checkpoint.prune(folder.parent, keep={folder, self.trainer.folder.checkpoint(self.begins)})

    def _log(self, metrics: dict[str, Any]) -> None:
        self.trainer.folder.log(metrics)
        self.trainer.progress.step(metrics)
        if self.trainer.on_step:
            self.trainer.on_step(metrics)


def check_gradient(model: torch.nn.Module, norm: float) -> None:
    """Raise `NotFinite` naming the parameters where the gradient's norm isn't finite."""
    if not math.isfinite(norm):
        bad = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        raise NotFinite(f"the gradient isn't finite in {len(bad)} parameters, {', '.join(bad[:3])} among them")


def _nothing() -> None:
    pass
