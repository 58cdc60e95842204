"""An objective of the user's own: `objective.name = "file.py:NAME"` or `"module:NAME"`.

NAME is a function like those of agro,

    def mine(streams: Streams, batch: Batch, *, beta: float = 0.1) -> Terms: ...

which may read rewards in complete groups, and the reference's log-probs if it has an option `beta`. For
anything else NAME is an `agro.objectives.Objective` that declares what its function needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from agro.errors import Refused
from agro.objectives.core import Objective, Terms
from agro.objectives.needs import GROUPS, REF_LOGP, REWARD


@cache
def load(name: str) -> Objective:
    """The entry that `name` stands for; raises `Refused` where there is none. A file is run once."""
    from agro.rewards.worker import find  # here, since it takes as long to import as all objectives

    found, problem = find(name)
    if problem:
        raise Refused(f"objective.name: {problem}")
    if isinstance(found, Objective):
        return found
    if not inspect.isfunction(found):
        raise Refused(f"objective.name: {name}: expected a function or an Objective, got {found!r}")
    needs = {REWARD, GROUPS}
    if "beta" in inspect.signature(found).parameters:
        needs.add(REF_LOGP)
    return Objective(
        _refusing(name, found), name, requires=lambda options: set(needs), couples=lambda options: "step"
    )


def _refusing(name: str, function: Callable[..., Terms]) -> Callable[..., Terms]:
    """The function, whose errors are refusals that name the line."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Terms:
        try:
            terms = function(*args, **options)
        except Refused:
            raise
        except Exception as error:
            from agro.rewards.worker import explain

            raise Refused(f"objective {name}: {explain(error, function.__code__.co_filename)}") from error
        if not isinstance(terms, Terms):
            raise Refused(f"objective {name}: expected Terms(loss, …), got {type(terms).__name__}")
        return terms

    return call
