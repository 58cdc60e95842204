"""What runs in an environment's process: one turn of one episode a call. `EnvironmentProcess` calls it."""

from __future__ import annotations

import inspect
from typing import Any

from agro.io.plugins import defer

defer("torch")  # few environments need it, and the process starts in a third of the time

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
    "over" are the numbers of episodes that have ended.
    """
    if request["do"] == "open":
        try:
            _opened[:] = [make_environment(name, options)]
        except Refused as error:
            return {"refused": str(error)}
        made = _opened[0]
        return {"name": made.name, "stop": list(made.stop), "maximum": getattr(made, "maximum", None)}
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
    """The environment of this name, in this process. Raises `Refused` where it or an option doesn't exist."""
    if name.startswith("verifiers:"):
        return Verifiers(name.partition(":")[2], options)
    if not plugins.is_reference(name) and name not in (others := plugins.installed("environments")):
        raise Refused(
            f"environment.name: expected {', '.join([*others, 'verifiers:ENV_ID'])}, module:Class or "
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
