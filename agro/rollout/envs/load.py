"""The environment that a configuration names."""

from __future__ import annotations

import inspect

from agro import config
from agro.config import from_environment
from agro.errors import Refused
from agro.io.worker import explain, load
from agro.rollout.envs.protocol import Environment
from agro.rollout.envs.verifiers import Verifiers

PARTS = ("name", "stop", "reset", "step")


def load_environment(config: config.EnvironmentConfig) -> Environment:
    """Raises `Refused` where there is no such environment, or where it has no such option."""
    options = from_environment(config.options, "environment.options")
    if config.name.startswith("verifiers:"):
        return Verifiers(config.name.partition(":")[2], options)
    if ":" not in config.name:
        raise Refused(
            "environment.name: expected verifiers:ENV_ID, module:Class or file.py:Class, "
            f"got {config.name!r}; examples are in examples/environments"
        )
    make, problem = load(config.name)
    if make is None:
        raise Refused(f"environment.name: {problem}")
    try:
        inspect.signature(make).bind(**options)
        environment: Environment = make(**options)
    except Refused:
        raise
    except Exception as error:
        reason = explain(error, "")
        raise Refused(
            f"environment.options: {config.name} doesn't take {', '.join(options)}: {reason}"
        ) from error
    missing = [part for part in PARTS if not hasattr(environment, part)]
    if missing:
        raise Refused(
            f"environment.name: {config.name} has no {', '.join(missing)}; see agro.rollout.envs.Environment"
        )
    if not isinstance(environment.stop, tuple) or not all(isinstance(x, str) and x for x in environment.stop):
        raise Refused(
            f"environment.name: {config.name}: stop: expected a tuple of texts, got {environment.stop!r:.80}"
        )
    return environment
