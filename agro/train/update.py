"""What a step does to the weights: it moves them, or skips the update, or rolls them back to a checkpoint.

The learning rate of a step is lowered by what the steps before it did: the share of their promised gain that
they lost (`train.gain_ratio`, Armijo's condition), and how far they changed the policy (`train.step_kl`, a
trust region by k2). Both are measured by one forward pass after each, the highest value counts at once and is
forgotten slowly, and no step is taken back. The rate is set before a step's samples are drawn and knows
nothing of their rewards: where the expected step is 0 it stays so. The rules are in docs/guide/concepts.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agro.config import TrainConfig
from agro.errors import Refused
from agro.io.numbers import short
from agro.objectives import NotFinite
from agro.objectives.reduce import Groups
from agro.rollout import Activity
from agro.runs.folder import Run
from agro.store import Store
from agro.train.feed import StepBatch
from agro.train.learner import Learner
from agro.train.measure import describe_step, logp_differences
from agro.train.monitors import GO, Action, Monitor, View
from agro.train.phases import TRIED, Phase, Position
from agro.train.recovery import damage, start_of
from agro.train.step import Step

KEPT = 0.7  # of the speed, or of the loss, in a step that has less
LEAST = 0.1  # of its rate, which the step after one that lost more than all has at least
FEW_STEPS = 100  # a phase of fewer optimizer steps has a larger bound
STEP_KL = 0.005  # the bound that a rate is found for, where train.step_kl gives none
# Of finding it: trials, how near the bound one has to come, how far the next one goes, the largest rate.
TRIALS, NEAR, FARTHEST, HIGHEST = 4, 0.1, 1000.0, 1e-2
ROUNDING = 1e-4  # norm of a gradient that may be rounding


@dataclass(frozen=True)
class Updates:
    """The updates of one phase, which its monitors may stop."""

    learner: Learner
    store: Store
    folder: Run
    activity: Activity
    say: Callable[[str], None]
    monitors: Sequence[Monitor]

    def make(self, view: View, position: Position, data: StepBatch | None) -> Position:
        """All optimizer steps on one batch; the metrics are of the first, before the weights move."""
        if data is None:
            return self._skip(view, position, "no sample that was drawn is valid")
        config = view.phase.config
        options = view.phase.resolved(view.options)
        for update in range(config.train.updates):
            self.activity.stage("updating", update + 1, config.train.updates)
            check = self.activity.check if update == 0 else lambda: None
            try:
                step = self.learner.gradient(data.batch, config.objective.name, options, check)
            except NotFinite as error:
                position = self._skip(view, position, str(error))
                continue
            if view.metrics["loss"] is None:
                view.metrics |= describe_step(step, data.recent, view.phase, view.options)
                view.metrics |= logp_differences(step, data.comparable)
                actions = (monitor.judge(view) for monitor in self.monitors)
                action = next((action for action in actions if action.kind != "go"), GO)
                if action is not GO:
                    return self._act(action, view, position)
            if config.train.lr == "auto" and position.rate is None:
                position = replace(position, rate=self._find_rate(step, bound_of(view.phase)))
            position = self._move(view, position, step, view.phase.lr(position, update))
        return position

    def _move(self, view: View, position: Position, step: Step, lr: float) -> Position:
        """One optimizer step at a rate of at most `lr`, and what it did."""
        train, before = view.phase.config.train, None
        if train.gain_ratio or train.step_kl:  # rules that a forward pass after the step measures
            lr = lowered(lr, train, bound_of(view.phase), position)
            before = self.learner.along_gradient()
        self.learner.move(lr, position.rate if train.lr == "auto" else train.lr)
        view.metrics["lr"] = view.metrics["lr"] or lr
        position = replace(position, version=self.learner.version, skipped=0)
        if before is None:
            return position
        promise = max(1.0, step.norm / train.clip) * float(before - self.learner.along_gradient())
        logp_BT = self.learner.logp(step.batch)
        kl, gain = change(logp_BT, step), kept(logp_BT, step)
        if view.metrics["step_kl"] is None:
            view.metrics |= {"step_kl": kl, "promised": promise, "kept": gain}
        lost = loss_of(promise, gain, lr, train.gain_ratio) if step.norm > ROUNDING else None
        speed = recalled(speed_of(kl, lr), position.speed)
        return replace(position, speed=speed, lost=recalled(lost, position.lost))

    def _find_rate(self, step: Step, bound: float) -> float | None:
        """The rate at which the update changes the policy by the bound; None where none is found.

        The KL grows as the square of a small rate, so that each trial tells the next one. A gradient that is
        rounding alone, such as of a batch of equal rewards, tells nothing.
        """
        if step.norm <= ROUNDING:
            return None
        self.activity.stage("finding train.lr")
        rate, factor = TRIED, math.inf
        for _ in range(TRIALS):
            kl = change(self.learner.try_move(rate, step.batch), step)
            factor = math.sqrt(bound / kl) if kl > 0 else FARTHEST * float(kl == 0)
            rate = min(HIGHEST, rate * min(max(factor, 1 / FARTHEST), FARTHEST))
            if abs(factor - 1) < NEAR:
                break
        if kl == 0:
            return None
        found = float(short(rate))
        self.say(
            f"train.lr = {found:g}, at which the first update changes the policy by {bound:.2g} nats a token"
        )
        return found

    def _act(self, action: Action, view: View, position: Position) -> Position:
        if action.kind == "skip":
            return self._skip(view, position, action.why)
        if action.kind == "stop":
            raise Refused(f"step {view.step}: {action.why}")
        view.metrics["rolled_back"] = 1
        return self._roll_back(view.phase, position, action.why)

    def _skip(self, view: View, position: Position, reason: str) -> Position:
        view.metrics["skipped"] += 1
        self.say(f"update skipped: {reason}")
        return replace(position, skipped=position.skipped + 1)

    def _roll_back(self, phase: Phase, position: Position, reason: str) -> Position:
        """Load the last checkpoint's weights, with a new version and half the learning rate."""
        commit = self.store.ledger.committed(self.folder.id)
        if commit is None:
            raise Refused(
                f"step {position.step + 1}: {reason}, and there is no checkpoint to roll back to. "
                'What to do: guard.action = "rollback", which commits one at the start, or a lower '
                "train.checkpoint_every"
            )
        folder = self.folder.checkpoint(commit.step)
        problem = damage(folder, commit)
        if problem:
            step = position.step + 1
            raise Refused(
                f"{problem}, and step {step} has to roll back to it ({reason}). What to do: --resume"
            )
        self.learner.load(folder, position.version + 1)
        in_phase = commit.step > phase.begins or phase.begins == 0
        resumed = folder if in_phase else None
        self.learner.enter(phase.config, began=start_of(self.folder, phase), resumed=resumed)
        self.say(f"{reason}: back to the weights of step {commit.step}, at half the learning rate")
        return replace(position, version=self.learner.version, rollbacks=position.rollbacks + 1)


def change(logp_BT: Tensor, step: Step) -> float:
    """KL, nats a token, of weights with these log-probs from those at `step`'s gradient."""
    mask = step.batch.mask
    return float((logp_BT.to(mask.device) - step.streams["logp"])[mask].square().mean()) / 2


def kept(logp_BT: Tensor, step: Step) -> float | None:
    """What of its promise −⟨g, Δθ⟩ a step kept, by the log-probs after it; in units of the objective.

    With a = −∂loss/∂log π of a token and Δ the change of its log-prob: Σ a Δ of the responses that were
    pushed up, and Σ a (e^Δρ − 1) of those pushed down, Δρ being the change of the response: what is
    improbable can't lose more. Where a differs within a response its Σ a Δ is scaled by (e^Δρ − 1)/Δρ.
    None where the policy was moved by more than log-probs, such as an exact KL.
    """
    others = step.evaluation.grads.keys() - {"logp", "value", "prefix_value"}
    if any(step.evaluation.grads[stream].any() for stream in others):
        return None
    groups, push_BT = Groups.of(step.batch), -step.evaluation.grad
    change_BT = logp_BT.to(push_BT.device) - step.streams["logp"]
    change_N, sum_N = groups.sum_tokens(change_BT), groups.sum_tokens(push_BT * change_BT)
    falls_N = (groups.sum_tokens(push_BT) < 0) & (change_N != 0)
    return float(torch.where(falls_N, sum_N * change_N.expm1() / change_N, sum_N).sum())


def bound_of(phase: Phase) -> float:
    """What an optimizer step of a phase may change the policy, nats a token."""
    train = phase.config.train
    return step_bound(train.step_kl or STEP_KL, phase.steps * train.updates)


def step_bound(step_kl: float, steps: int) -> float:
    """What one of so many optimizer steps may change the policy, nats a token."""
    return step_kl * max(1.0, math.sqrt(FEW_STEPS / steps))


def lowered(lr: float, train: TrainConfig, bound: float, position: Position) -> float:
    """The learning rate, lowered to what the steps before allow.

    Nothing is known of them before the first step of a phase, which warm-up makes small.
    """
    if train.step_kl is not None and position.speed:
        lr = min(lr, math.sqrt(2 * bound) / position.speed)
    if train.gain_ratio is not None and position.lost:
        lr = min(lr, (1 - train.gain_ratio) / position.lost)
    return lr


def speed_of(kl: float, lr: float) -> float | None:
    """√(2 KL) of a step per unit of learning rate; None where it tells nothing."""
    return math.sqrt(2 * kl) / lr if lr > 0 and math.isfinite(kl) else None


def loss_of(promise: float, gain: float | None, lr: float, ratio: float | None) -> float | None:
    """The share of its promise that a step lost, per unit of learning rate; None where it tells nothing.

    A step against its own gradient, along older ones, promised nothing. Where little was promised much more
    may be lost, of which so much counts that the next rate is a tenth of this one.
    """
    if ratio is None or gain is None or lr == 0 or not 0 < promise < math.inf or not math.isfinite(gain):
        return None
    return min(max(1 - gain / promise, 0.0), (1 - ratio) / LEAST) / lr


def recalled(now: float | None, before: float | None) -> float | None:
    """What a step tells, or more of those before it, forgotten slowly; None: it tells nothing."""
    if now is None or before is None or now > before:
        return before if now is None else now
    return KEPT * before + (1 - KEPT) * now
