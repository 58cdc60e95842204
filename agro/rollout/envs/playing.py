"""Runs in an environment's process: `EnvironmentProcess` calls it for one turn of one episode at a time."""

from __future__ import annotations

import inspect
from typing import Any

from agro.io.plugins import defer

defer("torch")  # few environments need it; without it the process starts in a third of the time

from agro.errors import Refused  # noqa: E402
from agro.io import plugins  # noqa: E402
from agro.io.worker import explain  # noqa: E402
from agro.rollout.envs import LOST, Environment, checked  # noqa: E402
from agro.rollout.envs.verifiers import Verifiers  # noqa: E402
from agro.types import Prompt  # noqa: E402

PARTS = ("name", "stop", "reset", "step")
_opened: list[Environment] = []
_states: dict[int, Any] = {}  # of the episodes, by number


def play(request: dict[str, Any], name: str, options: dict[str, Any]) -> Any:
    """`request`: {"do": "open"}, {"do": "reset", "episode", "prompt"} or {"do": "step", "episode", "text"};
    "over" has the numbers of episodes that have ended.
    """
    if request["do"] == "open":
        try:
            _opened[:] = [make_environment(name, options)]
        except Refused as error:
            return {"refused": str(error)}
        opened = _opened[0]
        return {"name": opened.name, "stop": list(opened.stop), "maximum": getattr(opened, "maximum", None)}
    if not _opened:
        return LOST
    for number in request["over"]:
        _states.pop(number, None)
    number = request["episode"]
    if request["do"] == "reset":
        _states[number] = _opened[0].reset(Prompt(**request["prompt"]))
        return None
    if number not in _states:
        return LOST
    turn = checked(_opened[0].step(_states[number], request["text"]), cut=True)
    return {**vars(turn), "info": dict(turn.info)}


def make_environment(name: str, options: dict[str, Any]) -> Environment:
    """Make the environment of this name here. Raises `Refused` if it or an option doesn't exist."""
    if name.startswith("verifiers:"):
        return Verifiers(name.partition(":")[2], options)
    if not plugins.is_reference(name) and name not in (installed := plugins.installed("environments")):
        raise Refused(
            f"environment.name: expected {', '.join([*installed, 'verifiers:ENV_ID'])}, module:Class or "
            f"file.py:Class, got {name!r}; examples are in examples/environments"
        )
    make = plugins.load("environments", name, "environment.name")
    if not callable(make):
        raise Refused(f"environment.name: {name}: expected a class, got {make!r:.80}")
    try:
        inspect.signature(make).bind(**options)
        environment: Environment = make(**options)
    except Refused:
        raise
    except Exception as error:
        reason = explain(error, "")
        raise Refused(f"environment.options: {name} doesn't take {', '.join(options)}: {reason}") from error
    missing = [part for part in PARTS if not hasattr(environment, part)]
    if missing:
        raise Refused(
            f"environment.name: {name} has no {', '.join(missing)}; see agro.rollout.envs.Environment"
        )
    if not isinstance(environment.stop, tuple) or not all(isinstance(x, str) and x for x in environment.stop):
        raise Refused(
            f"environment.name: {name}: stop: expected a tuple of texts, got {environment.stop!r:.80}"
        )
    return environment
