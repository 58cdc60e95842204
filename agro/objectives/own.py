"""An objective of the user's own: `objective.name = "file.py:NAME"` or `"module:NAME"`.

NAME is a function like those of agro,

    def mine(streams: Streams, batch: Batch, *, beta: float = 0.1) -> Terms: ...

which may read rewards in complete groups, and the reference's log-probs if it has an option `beta`. For
anything else NAME is an `agro.objectives.Objective` that declares what its function needs.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import traceback
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from agro.errors import Refused
from agro.objectives.core import Objective, Terms
from agro.objectives.needs import GROUPS, REF_LOGP, REWARD


@cache
def load(name: str) -> Objective:
    """The entry that `name` stands for; raises `Refused` where there is none. A file is run once."""
    place, _, attribute = name.rpartition(":")
    try:
        module = _run_file(place) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise Refused(f"objective.name: {place} can't be imported: {_where(error)}") from error
    found = getattr(module, attribute, None)
    if isinstance(found, Objective):
        return found
    if not inspect.isfunction(found):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise Refused(
            f"objective.name: expected {place} to have a function or an Objective {attribute!r}, got "
            f"{'nothing of that name' if found is None else repr(found)}; its functions: "
            f"{', '.join(functions) or 'none'}"
        )
    needs = {REWARD, GROUPS}
    if "beta" in inspect.signature(found).parameters:
        needs.add(REF_LOGP)
    return Objective(
        _refusing(name, found), name, needs=lambda options: set(needs), couples=lambda options: "step"
    )


def _run_file(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"objective_file_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _refusing(name: str, function: Callable[..., Terms]) -> Callable[..., Terms]:
    """The function, whose errors are refusals that name the line."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Terms:
        try:
            terms = function(*args, **options)
        except Refused:
            raise
        except Exception as error:
            raise Refused(f"objective {name}: {_where(error)}") from error
        if not isinstance(terms, Terms):
            raise Refused(f"objective {name}: expected Terms(loss, …), got {type(terms).__name__}")
        return terms

    return call


def _where(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
