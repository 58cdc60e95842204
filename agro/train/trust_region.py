"""A trust region: how far an optimizer step may change the policy (TRPO, arXiv 1502.05477, by the rate).

The change of a step is KL(before ‖ after) a token, estimated as half the mean squared difference of the
log-probs of the step's own tokens (k2, Schulman 2020). Small changes grow as the square of the learning rate.
So the steps before tell with which rate the next one stays within a bound: with their √(2 KL) per unit of
rate, the speed v, it is √(2 bound)/v. The highest speed counts at once and is forgotten slowly, so that one
large step holds back the next ones. No step is taken back: that a step was too large is known after it.

The rate is set before the step's samples are drawn. So it multiplies the expected step by a number that knows
nothing of their rewards, and where the expected step is 0 it stays so: the optimum is the same.

What it is for: with Adam a rate that is too high moves every weight by as much in every step, whatever the
gradient's norm. What all responses share sinks then, the good ones with the bad ones, and doesn't come back.
"""

from __future__ import annotations

import math

from agro.train.learner import Learner
from agro.train.step import Step

KEPT = 0.7  # of the speed, in a step that is slower


def change(learner: Learner, step: Step) -> float:
    """KL of the weights now from those at `step`'s gradient, nats a token, by one more forward pass."""
    mask = step.batch.mask
    now_BT = learner.logp(step.batch).to(mask.device)
    return float((now_BT - step.streams["logp"])[mask].square().mean()) / 2


def within(bound: float, lr: float, speed: float | None) -> float:
    """The learning rate, lowered to what keeps a step at this speed within the bound.

    Nothing is known of the speed before the first step of a phase, which warm-up makes small.
    """
    return min(lr, math.sqrt(2 * bound) / speed) if speed else lr


def speed_after(kl: float, lr: float, speed: float | None) -> float | None:
    """√(2 KL) per unit of learning rate, after a step with this KL; `speed`: before it.

    A step without a rate, or with a change that isn't finite, tells nothing.
    """
    if lr == 0 or not math.isfinite(kl):
        return speed
    now = math.sqrt(2 * kl) / lr
    if speed is None or now > speed:
        return now
    return KEPT * speed + (1 - KEPT) * now
