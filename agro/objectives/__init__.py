"""Objectives: pure functions of log-probs over complete groups, a file per family, listed in `OBJECTIVES`."""

from agro.objectives.core import Gradient, Ingredient, Objective, Streams, Terms
from agro.objectives.evaluation import Evaluation, NotFinite, differentiate, evaluate
from agro.objectives.needs import Need, least_responses
from agro.objectives.reduce import Groups
from agro.objectives.table import OBJECTIVES, describe, get, names

__all__ = [
    "OBJECTIVES",
    "Evaluation",
    "Gradient",
    "Groups",
    "Ingredient",
    "Need",
    "NotFinite",
    "Objective",
    "Streams",
    "Terms",
    "describe",
    "differentiate",
    "evaluate",
    "get",
    "least_responses",
    "names",
]
