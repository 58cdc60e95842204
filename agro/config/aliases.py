"""TRL's names of settings, where they mean the same here: accepted at every door, and said once."""

from __future__ import annotations

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
        value = within.pop(theirs_name)
        if not peers.ALIASES[theirs_name]:
            note(f"TRL's {theirs_name} is not needed: {peers.UNUSED[theirs_name]}")
            continue
        setting, value = _ours(theirs_name, value)
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
            if not peers.ALIASES[name]:
                note(f"TRL's {name} is not needed: {peers.UNUSED[name]}")
                continue
            if name == "reward_funcs":  # names, with brackets or without
                names = [part.strip(" \"'") for part in value.strip().strip("[]").split(",")]
                tables = ", ".join(f'{{ name = "{each}" }}' for each in names)
                ours, value = peers.ALIASES[name], names[0]
                if len(names) > 1:
                    ours, value = "reward.functions", f"[{tables}]"
            elif name == "train_dataset":
                ours, _ = _ours(name, parse(value, "command line: train_dataset"))
            else:
                ours, value = _ours(name, value)
            say(name, ours)
            item = f"{ours}={value}"
        if called.setdefault(ours, theirs) != theirs:
            raise Refused(
                f"command line: {theirs or called[ours]} is {ours} here, which is given too; leave one out"
            )
        found.append(item)
    return found


def _ours(key: str, value: Any) -> tuple[str, Any]:
    """agro's key and value: several rewards are added, as TRL does, a loss has its name here, and a data set
    may be a store."""
    if key == "reward_funcs" and isinstance(value, list | tuple):
        return "reward.functions", [{"name": name} for name in value]
    if key == "loss_type" and isinstance(value, str):
        value = peers.method(value)
    if key == "bf16":
        value = "mixed" if str(value).lower() in ("true", "1") else "float32"
    if key == "train_dataset":
        from agro.io.record_files import has_several_tables  # here: few runs have this name

        paths = value if isinstance(value, list | tuple) else [value]
        if paths and all(isinstance(path, str | Path) and has_several_tables(Path(path)) for path in paths):
            return "data.store", value
    return peers.ALIASES[key], value


def say(theirs: str, ours: str) -> None:
    note(f"TRL's {theirs} is {ours} here")


def note(text: str) -> None:
    """Say it once a process."""
    if text not in _said:
        _said.add(text)
        print(f"note: {text}", file=sys.stderr)
