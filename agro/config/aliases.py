"""TRL's names of settings, where they mean the same here: accepted at every door, and said once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agro.config.override import parse, section_at
from agro.errors import Refused
from agro.io import peers

_said: set[str] = set()


def without_aliases(values: Mapping[str, Any], location: str, config: type[BaseModel]) -> dict[str, Any]:
    """Nested values with agro's names in place of TRL's, at the root and in sections.

    Raises `Refused` where a setting has both names.
    """
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    theirs = [(result, key) for key in values if key in peers.ALIASES]
    for section, inside in values.items():
        model = section_at(config, section)
        if model is not None and isinstance(inside, Mapping):
            ours = {*model.model_fields, *(["beta"] if section == "objective" else [])}
            theirs += [(result[section], key) for key in inside if key in peers.ALIASES and key not in ours]
    for within, theirs_name in theirs:
        setting, value = _ours(theirs_name, within.pop(theirs_name))
        section, _, key = setting.partition(".")
        target = result.setdefault(section, {})
        if key in target:
            raise Refused(
                f"{location}: {theirs_name} is {setting} here, which is given too, as {target[key]!r:.40}; "
                "leave one out"
            )
        target[key] = value
        say(theirs_name, setting)
    return result


def renamed(items: Iterable[str]) -> list[str]:
    """`KEY=VALUE` texts of the command line with agro's keys, so that they replace those of a recipe.

    Raises `Refused` where a setting has both names.
    """
    found = []
    called: dict[str, str] = {}  # by agro's key TRL's name, "" where agro's is given
    for item in items:
        key, equals, value = item.partition("=")
        ours, theirs = key.strip(), ""
        name = ours.rpartition(".")[2]
        is_theirs = equals and name in peers.ALIASES and not key.startswith("phases.")
        if is_theirs and (ours == name or name != "beta"):  # evaluate.beta is ours
            theirs = name
            meant = parse(value, f"command line: {name}")
            if name == "reward_funcs" and isinstance(meant, str):  # names, with brackets or without
                names = [part.strip(" \"'") for part in meant.strip(" []").split(",")]
                value, meant = names[0], names if len(names) > 1 else names[0]
            ours, meant = _ours(name, meant)
            if ours == "reward.functions":
                tables = (f"{{ name = {json.dumps(each['name'])} }}" for each in meant)
                value = f"[{', '.join(tables)}]"
            say(name, ours)
            item = f"{ours}={value}"
        if called.setdefault(ours, theirs) != theirs:
            raise Refused(
                f"command line: {theirs or called[ours]} is {ours} here, which is given too; leave one out"
            )
        found.append(item)
    return found


def _ours(key: str, value: Any) -> tuple[str, Any]:
    """agro's key and value: several rewards are added, as TRL does, and a data set may be a store."""
    if key == "reward_funcs" and isinstance(value, list | tuple):
        return "reward.functions", [{"name": name} for name in value]
    if key == "train_dataset" and isinstance(value, str | Path):
        from agro.io.record_files import has_several_tables  # here: few runs have this name

        if has_several_tables(Path(value)):
            return "data.store", value
    return peers.ALIASES[key], value


def say(theirs: str, ours: str) -> None:
    note(f"TRL's {theirs} is {ours} here")


def note(text: str) -> None:
    """Say it once a process."""
    if text not in _said:
        _said.add(text)
        print(f"note: {text}", file=sys.stderr)
