"""The loop. Read this first: everything that happens between a configuration and a better model.

One step: draw groups (fresh from the sampler, stored from the store, or both), back-propagate the objective over
them, update, evaluate now and then, write a checkpoint now and then. All randomness comes from counters (seed, step,
response, position), so a run that was stopped and resumed is the run that never stopped.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from agro.config import RunConfig
from agro.errors import Refused
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
from agro.train.data import Drawn, PromptOrder, check_store, derive, draw_rule, sample_fresh, sampling, shares, usable
from agro.train.measure import describe_batch, describe_heldout, describe_step, empty_metrics
from agro.train.run import Progress, Run
from agro.train.schedule import lr_at, options_at
from agro.train.step import backward, collate, streams_of
from agro.types import Prompt


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM: a checkpoint is written and the run can be resumed."""


class Trainer:
    """Train as `config` says, in the run folder `out` (default: runs/ and the time)."""

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
        self.out = Path(out) if out is not None else Path("runs") / time.strftime("%Y%m%d-%H%M%S")
        self.resume = resume
        self.on_step = on_step
        self.stop_asked = False

    def run(self) -> Path:
        """Run to the end and return the run folder; raises `Refused` before any compute where data can't be used."""
        config = self.config
        self.prompts = _prompts(config.data.prompts)
        self.eval_prompts = _prompts(config.data.eval_prompts)
        check_heldout([p.id for p in self.prompts], [p.id for p in self.eval_prompts])
        reward: Reward | None = load_reward(config.reward) if self.prompts or self.eval_prompts else None
        try:
            store_path = Path(config.data.store) if config.data.store else self.out / "store.db"
            phases = [config.phase(name) for name in config.phase_names]
            alone = sum(1 for _ in takewhile(lambda p: p.data.replay == 1, phases))
            if alone and not store_path.exists():
                raise Refused(
                    f"data.store: {store_path} isn't there; data.replay = 1 trains from a store (agro import makes one)"
                )
            if store_path.exists():
                with Store.open(store_path, read_only=True) as before:
                    for phase in phases[: alone + 1]:  # what is in the store for later ones isn't known yet
                        if phase.data.replay > 0:
                            check_store(phase, before)
            run = Run(self.out, config, resume=self.resume)
            with Store.open(store_path) as store, self._signals():
                self._run(run, store, reward)
        finally:
            if reward is not None:
                reward.close()
        report(self.out)
        return self.out

    def _run(self, run: Run, store: Store, reward: Reward | None) -> None:
        config = self.config
        last = sum(config.phase(p).train.steps for p in config.phase_names)
        self.progress = Progress(last)
        policy = Policy.load(config.policy, seed=derive(config.train.seed, "weights"))
        reference = policy.frozen_copy() if any(reads_reference(config.phase(p)) for p in config.phase_names) else None
        position = self._resume(run, store, policy)
        ends = 0
        for name in config.phase_names:
            phase = config.phase(name)
            begins, ends = ends, ends + phase.train.steps
            if position.step >= ends:
                continue
            if position.step == begins and position.phase != name:
                anchor = self._digest if begins else ""
                position = Position(name, begins, position.version, anchor)
            if reference is not None and phase.policy.reference == "phase" and begins:
                checkpoint.load(run.checkpoints / f"step-{begins:08d}", position.anchor, reference.model)
            if phase.data.replay > 0:
                check_store(phase, store)
                check_heldout([g.prompt_id for g in store.groups()], [p.id for p in self.eval_prompts])
            position = self._phase(run, store, policy, reference, reward, phase, position, begins)
        policy.save(run.folder / "model")

    def _resume(self, run: Run, store: Store, policy: Policy) -> Position:
        """Go back to the last committed step: what came after it is undone or marked."""
        committed = store.committed(run.id)
        store.rewind(run.id)
        run.forget_after(committed.step if committed and committed.step else -1)
        if committed is None:
            return Position("", 0, 0)
        self._digest = committed.digest
        return checkpoint.load(run.checkpoints / f"step-{committed.step:08d}", committed.digest, policy.model)

    def _phase(
        self, run: Run, store: Store, policy: Policy, reference: Policy | None, reward: Reward | None, config: RunConfig,
        position: Position, begins: int,
    ) -> Position:  # fmt: skip
        train = config.train
        optimiser = torch.optim.AdamW(
            [p for p in policy.model.parameters() if p.requires_grad],
            lr=train.lr, betas=train.adam_betas, eps=train.adam_eps, weight_decay=train.weight_decay,
        )  # fmt: skip
        if position.step > begins:
            checkpoint.load_optimiser(run.checkpoints / f"step-{position.step:08d}", policy.model, optimiser)
        sampler = HFSampler(policy, position.version)
        order = PromptOrder(self.prompts, derive(train.seed, "prompts", position.phase)) if self.prompts else None
        ends = begins + train.steps
        held = self._held_out_groups(store, reference, config)
        if position.step == 0 and (self.eval_prompts or held):
            metrics = {**empty_metrics(), "step": 0, "phase": position.phase, "version": position.version}
            self._log(run, metrics | self._evaluate(policy, reference, reward, held, config, 0))
        saved = position.step if position.step else -1
        try:
            while position.step < ends:
                began = time.perf_counter()
                at, step = position.step - begins, position.step + 1
                self.between()
                drawn = self._draw(run, store, policy, sampler, reward, config, order, at, step)
                sampled = time.perf_counter()
                position, metrics = self._update(policy, reference, optimiser, config, drawn, position, at)
                sampler.version = position.version
                trained = time.perf_counter()
                metrics |= {
                    "seconds_sample": sampled - began, "seconds_train": trained - sampled, "seconds": trained - began,
                    "tokens_per_second": (drawn.sampled_tokens + metrics["tokens"]) / (trained - began),
                }  # fmt: skip
                due = step == ends or (config.evaluate.every > 0 and (at + 1) % config.evaluate.every == 0)
                if due:
                    metrics |= self._evaluate(policy, reference, reward, held, config, at)
                    if metrics["kl_ref"] is None:
                        metrics["kl_ref"] = metrics["eval_kl_ref"]
                self._log(run, metrics)
                if step == ends or (at + 1) % train.checkpoint_every == 0:
                    self._save(run, store, policy, optimiser, position, begins)
                    saved = step
                if position.skipped >= train.max_skipped:
                    raise Refused(
                        f"step {step}: {position.skipped} updates in a row were skipped because their gradients weren't finite; "
                        "the last checkpoint stands. What to do: lower train.lr, raise objective.beta, or train in float32"
                    )
        except Interrupted:
            if position.step != saved:
                store.rewind(run.id, position.step)
                self._save(run, store, policy, optimiser, position, begins)
            self.progress.say(f"interrupted after step {position.step}; go on with --resume")
            raise
        return position

    def _draw(
        self, run: Run, store: Store, policy: Policy, sampler: HFSampler, reward: Reward | None, config: RunConfig,
        order: PromptOrder | None, at: int, step: int,
    ) -> Drawn:  # fmt: skip
        """The step's samples: stored groups are drawn before fresh ones are appended, so that no group is both."""
        drawn = Drawn([])
        before, fresh = shares(config, at)
        samples = []
        if fresh < config.train.groups:
            rule = draw_rule(config, config.train.groups - fresh)
            samples = store.draw(rule, run=run.id, step=step, seed=config.train.seed, version=sampler.version)
        if fresh:
            assert order is not None
            assert reward is not None
            prompts = order.take(before, fresh)
            made, drawn.failed = sample_fresh(config, run.id, step, prompts, sampler, reward, store, self.between)
            drawn.fresh = frozenset(s.id for s in made if s.id is not None)
            drawn.sampled_tokens = sum(int(s.action.sum()) for s in made if s.action is not None)
            samples = [*samples, *made]
        usable(samples, policy, config, drawn)
        return drawn

    def _update(
        self, policy: Policy, reference: Policy | None, optimiser: torch.optim.Optimizer, config: RunConfig, drawn: Drawn,
        position: Position, at: int,
    ) -> tuple[Position, dict[str, Any]]:  # fmt: skip
        """All optimiser steps on one batch; the metrics are of the first, before the weights move."""
        train, objective = config.train, config.objective
        options = get(objective.name).resolve(objective.name, options_at(objective.options, at))
        metrics = {**empty_metrics(), **describe_batch(drawn, position.version)}
        version, skipped, step = position.version, position.skipped, None
        if drawn.samples:
            batch = collate(drawn.samples, version)
            if "old_logp" in get(objective.name).needs(options):
                batch = batch.replace(
                    old_logp=streams_of(policy, batch.to(policy.device), ["logp"], train.micro_batch)["logp"]
                )
            for u in range(train.updates):
                for group in optimiser.param_groups:
                    group["lr"] = lr_at(train, at * train.updates + u, train.steps * train.updates)
                optimiser.zero_grad(set_to_none=True)
                try:
                    step = backward(
                        policy, batch, objective.name, options, micro_batch=train.micro_batch, reference=reference,
                        between=self.between if u == 0 else _nothing,
                    )  # fmt: skip
                    norm = float(torch.nn.utils.clip_grad_norm_(policy.model.parameters(), train.clip))
                    why = "" if math.isfinite(norm) else _not_finite(policy)
                except NotFinite as error:
                    norm, why = math.nan, str(error)
                if why:
                    skipped += 1
                    metrics["skipped"] += 1
                    self.progress.say(f"update skipped: {why}")
                    continue
                optimiser.step()
                version, skipped = version + 1, 0
                if metrics["loss"] is None:
                    assert step is not None
                    metrics |= describe_step(step, drawn, config) | {
                        "grad_norm": norm, "grad_norm_clipped": min(norm, train.clip), "lr": optimiser.param_groups[0]["lr"],
                    }  # fmt: skip
                batch = step.batch.replace(age=step.batch.age + 1) if step else batch
        done = position.step + 1
        metrics |= {"step": done, "phase": position.phase, "version": version}
        return Position(position.phase, done, version, position.anchor, skipped), metrics

    def _held_out_groups(self, store: Store, reference: Policy | None, config: RunConfig) -> HeldOutGroups | None:
        """What data.eval_store holds, where the phase's objective has something to measure on it."""
        if not config.data.eval_store or not measures_consistency(config):
            return None
        assert reference is not None
        held = HeldOutGroups.load(config.data.eval_store, config, reference)
        trained = {p.id for p in self.prompts} | (
            {g.prompt_id for g in store.groups()} if config.data.replay else set()
        )
        check_heldout(trained, held.prompt_ids, "data.eval_store")
        return held

    def _evaluate(
        self, policy: Policy, reference: Policy | None, reward: Reward | None, held: HeldOutGroups | None,
        config: RunConfig, at: int,
    ) -> dict[str, Any]:  # fmt: skip
        """Held-out reward at the weights of now, on noise that is the same at every step, and held-out ½ Var(R)."""
        out: dict[str, Any] = {}
        if self.eval_prompts and reward is not None:
            options = replace(
                sampling(config, derive(config.train.seed, "evaluate")),
                temperature=config.evaluate.temperature, top_k=0, top_p=1.0, min_p=0.0,
            )  # fmt: skip
            found = heldout(HFSampler(policy), reward, self.eval_prompts, config.evaluate.n, options)
            out |= describe_heldout(found, policy, reference, config)
        if held is not None:
            out |= held.measure(policy, options_at(config.objective.options, at)["beta"]).metrics()
            out["eval_left_out"] = held.left_out
        return out

    def _save(
        self, run: Run, store: Store, policy: Policy, optimiser: torch.optim.Optimizer, position: Position, begins: int
    ) -> None:
        folder = run.checkpoints / f"step-{position.step:08d}"
        self._digest = checkpoint.save(folder, position, policy.model, optimiser)
        store.commit(run.id, position.step, self._digest)
        checkpoint.prune(run.checkpoints, keep={folder, run.checkpoints / f"step-{begins:08d}"})

    def _log(self, run: Run, metrics: dict[str, Any]) -> None:
        run.log(metrics)
        self.progress.step(metrics)
        if self.on_step:
            self.on_step(metrics)

    def between(self) -> None:
        """Called between pieces of work; stops here if that was asked."""
        if self.stop_asked:
            raise Interrupted

    @contextmanager
    def _signals(self) -> Any:
        def ask(number: int, frame: object) -> None:
            if self.stop_asked:  # a second Ctrl-C doesn't wait
                raise KeyboardInterrupt
            self.stop_asked = True
            self.progress.say("stopping: writing a checkpoint (again: stop at once)")

        try:
            before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: signals are the caller's
            before = {}
        try:
            yield
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)


def _prompts(path: str | None) -> list[Prompt]:
    return load_prompts(path) if path else []


def _nothing() -> None:
    pass


def _not_finite(policy: Policy) -> str:
    names = [n for n, p in policy.model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    return f"the gradient isn't finite in {len(names)} parameters, {', '.join(names[:3])} among them"
