"""What `agro check` found in a store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agro.pages.store.check_survey import StoreSurvey
from agro.store import Counts
from agro.store.location import Location
from agro.train.reward_scales import ScaleConflict

if TYPE_CHECKING:
    from agro.pages.store.measurements import Measurements
    from agro.pages.store.own_reward import OwnReward
    from agro.pages.store.ranking import Ranking
    from agro.pages.store.raters import Explaining


@dataclass(frozen=True)
class Findings:
    """What a store has, whether an objective can train on it, and what a model says of it."""

    path: Location
    objective: str
    counts: Counts
    survey: StoreSurvey
    problem: str = ""  # why the objective can't train on it
    scales_apart: list[ScaleConflict] = field(default_factory=list)  # sources of different scales
    licenses: dict[str, str | None] = field(default_factory=dict)
    measured: Measurements | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of the objective, where they aren't its defaults
    completes: int | None = None  # data.complete_groups
    own_reward: OwnReward | None = None  # the log's mean reward, and the model's own
    explaining: Explaining | None = None  # what explains the rewards of single responses
    recipe: str = ""  # that was found for the data, where none was asked for
    ranking: Ranking | None = None  # what can train on it

    @property
    def trainable(self) -> bool:
        return not self.problem

    @property
    def sources(self) -> list[str]:
        """The most frequent first."""
        return sorted(self.survey.sources, key=lambda name: (-self.survey.sources[name].rows, name))
