"""The rule for a step that explodes.

A step explodes when |loss| is above `guard.loss` times the median |loss| of the last `guard.window` steps (once there
are `LEAST` of them; a median of 0, as where rewards are rare, is nothing to compare with), or when kl_ref is above `guard.kl`. Both are measured before the weights move. What happens then:

- "skip": this update isn't made; train.max_skipped in a row stop the run.
- "stop": the run ends as refused, with a checkpoint of the step before.
- "rollback": weights and optimiser go back to the last checkpoint and the learning rate is halved from there on; the
  data goes on. `guard.rollbacks` of them, and the next one stops the run.

A gradient that isn't finite is skipped whatever the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from agro.config import Guard

LEAST = 5


def explosion(config: Guard, loss: float, kl: float | None, before: Sequence[float]) -> str | None:
    """What explodes, in words, or None. `before`: |loss| of the steps before, the latest last; `kl` None: not measured."""
    if config.loss is not None and len(before) >= LEAST:
        usual = median(before)
        if usual and abs(loss) > config.loss * usual:
            return f"|loss| is {abs(loss):.4g}, more than guard.loss = {config.loss:g} times its median of {usual:.4g}"
    if config.kl is not None and kl is not None and kl > config.kl:
        return f"kl_ref is {kl:.4g} nats a response, above guard.kl = {config.kl:g}"
    return None


def remember(config: Guard, before: Sequence[float], loss: float) -> tuple[float, ...]:
    """The losses that the next step is compared with."""
    return (*before, abs(loss))[-config.window :] if config.loss is not None else ()
