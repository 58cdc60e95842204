"""The name that was meant, for the answers to unknown ones: the nearest one, or what TRL and verl call it."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agro.errors import Refused

# Of several names that are as near the one that most people mean.
FAMOUS = ("grpo", "dpo", "ppo", "sft", "rloo", "kto", "dapo", "reinforce", "gspo", "agro", "ipo")
_NAMES = tomllib.loads((Path(__file__).parent / "peers.toml").read_text(encoding="utf-8"))
ALIASES: dict[str, str] = _NAMES["aliases"]  # settings of TRL that mean the same here: accepted, with a note
UNUSED = {"logging_steps": "every step is written to metrics.jsonl"}  # taken, without an effect
OPTIONS: dict[str, str] = _NAMES["options"]  # of their losses: the option of an objective here
# Their other arguments, those of transformers' TrainingArguments among them: the setting here.
SETTINGS = {name: ours for name, ours in ALIASES.items() if name != "loss_type" and ours} | _NAMES["settings"]
ELSEWHERE: dict[str, str] = _NAMES["elsewhere"]  # names of theirs without an entry of their own
ABSENT: tuple[str, ...] = tuple(_NAMES["absent"])  # without a counterpart here


def nearest(name: str, names: Iterable[str], least: float = 0.5) -> str | None:
    """Of `names` the one that a slip turns into `name`: two letters swapped, or one more, less or another.

    Without any the most alike one whose likeness (of difflib, from 0 to 1) is `least` or more; else None.
    """
    known = list(names)
    slips = [(a, b, each) for each in known for a, b in [_rest(name.lower(), each.lower())]]
    swapped = [each for a, b, each in slips if len(a) == 2 and a == b[::-1]]
    near = swapped or [each for a, b, each in slips if len(a) < 2 and len(b) < 2]
    if not near:
        return next(iter(difflib.get_close_matches(name, known, 1, least)), None)
    return min(near, key=lambda each: FAMOUS.index(each) if each in FAMOUS else len(FAMOUS))


def _rest(a: str, b: str) -> tuple[str, str]:
    """What is left of two names without the letters that both begin and end with."""
    while a and b and a[0] == b[0]:
        a, b = a[1:], b[1:]
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    return a, b


def plain(name: str) -> str:
    """Lower case, letters and digits alone: "Dr.GRPO" and "dr_grpo" are the same."""
    return re.sub(r"[^a-z0-9*]", "", name.lower())


def option(key: str, value: Any) -> str:
    """What sets an option of theirs in an objective, and to what where its value is a method's name; "" where
    nothing does."""
    ours = OPTIONS.get(key) or SETTINGS.get(key, "")
    if ours == f"objective.{key}":  # which this objective doesn't have
        return ""
    if ours != "objective.name" or not isinstance(value, str):
        return f"{ours} sets it here" if ours else ""
    words = _elsewhere(value)
    if not words:
        return f'{ours} = "{value}" sets it here, if `agro objectives` lists it'
    name = words.split()[0].rstrip(",")
    return f'{ours} = "{name}" sets it here' + (f" ({words})" if words != name else "")


def near_alias(name: str) -> str | None:
    """The accepted name of TRL's that a name is a slip of; beta is an option here too."""
    return nearest(name, [alias for alias in ALIASES if alias != "beta"], 0.85)


def method(name: str) -> str:
    """The objective that one of their losses is here; a name that is known nowhere stays.

    Raises `Refused` for one that is an objective with an option here.
    """
    words = _elsewhere(name)
    if " " in words:
        raise Refused(f'loss_type = "{name}" is {words} here; set objective.name, and what it says')
    return words or name


def setting(key: str, value: Any) -> str:
    """What sets an argument of theirs in a configuration, as `option`, with its section."""
    if key in SETTINGS:
        return f"{SETTINGS[key]} sets it here"
    answer = option(key, value)
    has_section = answer.startswith(("objective.", "an objective"))
    return answer if has_section or not answer else f"objective.{answer}"


def objective(name: str, known: Mapping[str, str]) -> str:
    """What to use for an objective that isn't known by this name; "" where nothing is near.

    `known`: by name what other libraries call it.
    """
    same = {plain(own): own for own in known}
    if plain(name) in same:
        return f"did you mean {same[plain(name)]}?"
    if _elsewhere(name):
        return f"here it is {_elsewhere(name)}"
    if plain(name) in {plain(peer) for peer in ABSENT}:
        return "it has no counterpart here; see docs/methods.md"
    for own, called in known.items():
        if plain(name) in {plain(word) for word in re.findall(r'"([^"]+)"', called)}:
            return f"here it is {own}"
    near = nearest(name, known, 0.6)
    return f"did you mean {near}?" if near else ""


def _elsewhere(name: str) -> str:
    """What `ELSEWHERE` has for a name in any spelling; "" for a name that isn't there."""
    return {plain(peer): ours for peer, ours in ELSEWHERE.items()}.get(plain(name), "")
