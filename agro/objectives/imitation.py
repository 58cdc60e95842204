"""A share of imitation in an objective's loss: −log π of the better responses, mean over all their tokens.

Which responses these are depends on rewards and judgments alone, so no row's gradient depends on another
row's log-probs. Of rewards they are the best of n, or those of a least reward (RAFT, arXiv 2304.06767), of
judged pairs the winners (RPO, arXiv 2404.19733).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from agro.objectives.core import Gradient, Ingredient, Options
from agro.objectives.needs import REWARD, Need
from agro.objectives.options import Option
from agro.objectives.reduce import Groups, Pairs
from agro.types import Batch, Tensor

Share = Annotated[
    float,
    Option(
        "of imitation in the loss: times −log π, mean over all tokens of the best responses of each group "
        "whose rewards differ, or of the winners of judged pairs",
        "loss per nat",
        ge=0,
    ),
]
LeastReward = Annotated[
    float | None, Option("imitate all responses of at least this reward instead", "reward")
]


@dataclass(frozen=True)
class Imitation(Ingredient):
    """Adds the share to the loss. A weight w counts the rows of a group w times."""

    options: ClassVar = {"imitation": (Share, 0.0), "imitation_reward": (LeastReward, None)}
    metrics: ClassVar = ("imitation_loss",)
    winners: bool = False  # of judged pairs, whatever the rewards

    def needs(self, options: Options) -> set[Need]:
        """What says which responses are imitated, where the objective needs it not already."""
        return set() if options["imitation_reward"] is None else {REWARD}

    def conflict(self, options: Options, explicit: Options) -> str:
        """A schedule may go through 0."""
        if explicit.get("imitation_reward") is None or "imitation" in explicit:
            return ""
        return (
            f"imitation_reward = {explicit['imitation_reward']} says what is imitated, but imitation isn't "
            "set; set imitation, its share in the loss, or leave imitation_reward out"
        )

    def apply(self, options: Options, logp_BT: Tensor, batch: Batch, gradient: Gradient) -> Gradient:
        """Adds the metric `imitation_loss` as well: NaN where nothing is imitated."""
        share = options["imitation"]
        if share == 0:
            return gradient
        imitated_B = _imitated(options["imitation_reward"], batch, self.winners)[batch.response]
        weight_BT = torch.where(batch.mask & imitated_B[:, None], batch.weight.double()[:, None], 0.0)
        return gradient.likelier(share, logp_BT, weight_BT, "imitation_loss")


IMITATION, IMITATION_OF_WINNERS = Imitation(), Imitation(winners=True)


def _imitated(minimum: float | None, batch: Batch, winners: bool) -> Tensor:
    """[N] which responses are imitated."""
    groups = Groups.of(batch)
    if minimum is not None:
        return groups.reward >= minimum
    if winners:
        return torch.zeros_like(groups.group, dtype=torch.bool).index_fill(
            0, Pairs.of(batch).won().winner, True
        )
    return groups.best
