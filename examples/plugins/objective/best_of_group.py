"""An objective that declares what it needs; a plain function may be registered too."""

from __future__ import annotations

from typing import Annotated

from agro.objectives import Groups, Objective, Streams, Terms
from agro.objectives.needs import GROUPS, REWARD
from agro.objectives.options import Option
from agro.types import Batch


def imitate_best(
    streams: Streams,
    batch: Batch,
    *,
    margin: Annotated[float, Option("below the best", "reward", ge=0)] = 0.0,
) -> Terms:
    """−log π of the responses whose reward is within the margin of their group's best, mean over all."""
    groups = Groups.of(batch)
    best_N = (groups.reward >= groups.largest(groups.reward)[groups.group] - margin).double()
    return Terms(groups.average_responses(-best_N * groups.sum_tokens(streams["logp"])))


BEST_OF_GROUP = Objective(imitate_best, source="this package", requires=lambda options: {REWARD, GROUPS})
