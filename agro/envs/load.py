"""The environment that a configuration names."""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from typing import Any

from agro import config
from agro.envs.calculator import Calculator
from agro.envs.protocol import Environment
from agro.envs.search import Search
from agro.envs.verifiers import Verifiers
from agro.errors import Refused
from agro.rewards.worker import explain, load

ENVIRONMENTS: dict[str, Any] = {"calculator": Calculator, "search": Search}


def load_environment(config: config.Environment) -> Environment:
    """Raises `Refused` where there is no such environment, or where it has no such option."""
    if config.name.startswith("verifiers:"):
        return Verifiers(config.name.partition(":")[2], config.options)
    make = ENVIRONMENTS.get(config.name)
    if make is None and ":" not in config.name:
        near = get_close_matches(config.name, ENVIRONMENTS, 1, 0.5)
        raise Refused(
            f"environment.name: expected {', '.join(ENVIRONMENTS)}, verifiers:ENV_ID, module:Class or file.py:Class, got {config.name!r}"
            + (f"; did you mean {near[0]}?" if near else "")
        )
    if make is None:
        make, problem = load(config.name)
        if make is None:
            raise Refused(f"environment.name: {problem}")
    try:
        inspect.signature(make).bind(**config.options)
        environment: Environment = make(**config.options)
    except Refused:
        raise
    except Exception as error:
        raise Refused(
            f"environment: {config.name} can't be made with options {config.options}: {explain(error, '')}"
        ) from error
    lacks = [name for name in ("name", "stop", "reset", "step") if not hasattr(environment, name)]
    if lacks:
        raise Refused(f"environment.name: {config.name} has no {', '.join(lacks)}; see agro.envs.Environment")
    if not isinstance(environment.stop, tuple) or not all(isinstance(x, str) and x for x in environment.stop):
        raise Refused(
            f"environment.name: {config.name}: stop: expected a tuple of texts, got {environment.stop!r:.80}"
        )
    return environment
