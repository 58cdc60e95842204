"""What a phase measures on what it isn't trained on: fresh responses to held-out prompts, and stored groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agro.config import RunConfig
from agro.evaluate import heldout
from agro.samplers import Sampler
from agro.train.check import check_heldout, measures_consistency
from agro.train.checkpoint import Position
from agro.train.consistency import HeldOutGroups
from agro.train.data import derive, sampling
from agro.train.diagnostics import diagnostic_beta
from agro.train.measure import describe_heldout
from agro.train.micro import MicroBatch
from agro.train.notes import warn_of_rewards
from agro.train.saving import keep_best

if TYPE_CHECKING:
    from agro.train.loop import Trainer


class HeldOut:
    """Measurements of one phase, on noise that is the same at every step."""

    def __init__(
        self,
        trainer: Trainer,
        config: RunConfig,
        sampler: Callable[[], Sampler],
        micro: MicroBatch,
        trained: Collection[str],
    ) -> None:
        """`sampler` makes one of the weights of now; `trained`: prompts that may be trained on, which may not be held out."""
        self.trainer, self.config, self.sampler, self.micro = trainer, config, sampler, micro
        self.groups: HeldOutGroups | None = None
        if config.data.eval_store and measures_consistency(config):
            assert trainer.reference is not None
            self.groups = HeldOutGroups.load(config.data.eval_store, config, trainer.reference, micro)
            check_heldout(trained, self.groups.prompt_ids, "data.eval_store")

    def __bool__(self) -> bool:
        """Whether there is anything to measure."""
        return bool(self.trainer.eval_prompts) or self.groups is not None

    def measure(self, options: Mapping[str, Any], *, start: bool) -> dict[str, Any]:
        """Held-out reward at the weights of now, and ½ Var(R). `options`: the objective's, of now; `start`: before the first step."""
        trainer, config, out = self.trainer, self.config, dict[str, Any]()
        if trainer.eval_prompts:
            assert trainer.reward is not None
            how = replace(
                sampling(config, derive(config.train.seed, "evaluate")),
                temperature=config.evaluate.temperature,
                top_k=0,
                top_p=1.0,
                min_p=0.0,
            )
            found = heldout(self.sampler(), trainer.reward, trainer.eval_prompts, config.evaluate.n, how)
            if start and (note := warn_of_rewards(found.rewards, config.objective.name, options)):
                trainer.progress.say(note)
            out |= describe_heldout(found, trainer.policy, trainer.reference, config, options, self.micro)
        if self.groups is not None and (beta := diagnostic_beta(config, options)):
            out |= self.groups.measure(trainer.policy, beta, options.get("average", "sum")).metrics()
            out["eval_left_out"] = self.groups.left_out
        return out


def compare(trainer: Trainer, config: RunConfig, position: Position, found: Mapping[str, Any]) -> Position:
    """Held-out reward against the best so far: what is kept, and whether the run goes on."""
    rule, step, reward = config.evaluate, position.step, found.get("eval_reward", math.nan)
    if math.isnan(reward):  # nothing was asked, or could be scored
        return position
    best, waited = position.best, position.waited + 1
    if (
        best is None or reward > best[0] or step == best[1]
    ):  # step 0 is measured again where a run goes on from it
        best, waited = (reward, step), 0
        if rule.keep_best:
            keep_best(trainer.policy, trainer.out, config.policy.lora, {**found, "step": step})
    if rule.patience and waited >= rule.patience:
        trainer.stop(f"{waited} evaluations without more than {best[0]:.4f}, which step {best[1]} had")
    if rule.target is not None and reward >= rule.target:
        trainer.stop(f"eval_reward is {reward:.4f}, evaluate.target {rule.target:g}")
    return replace(position, best=best, waited=waited)
