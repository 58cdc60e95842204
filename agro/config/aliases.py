"""TRL's names for settings that mean the same here: accepted everywhere, with one note each."""

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

_printed: set[str] = set()


def without_aliases(values: Mapping[str, Any], location: str, config: type[BaseModel]) -> dict[str, Any]:
    """Replace TRL's names in nested values by agro's, at the root and in sections.

    Raises `Refused` for a setting given under both names.
    """
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    theirs = [(result, key) for key in values if key in peers.ALIASES]
    for section, entries in values.items():
        model = section_at(config, section)
        if model is not None and isinstance(entries, Mapping):
            ours = {*model.model_fields, *(["beta"] if section == "objective" else [])}
            theirs += [(result[section], key) for key in entries if key in peers.ALIASES and key not in ours]
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
    """Rewrite the command line's `KEY=VALUE` texts to agro's keys, so that they override a recipe's.

    Raises `Refused` for a setting given under both names.
    """
    rewritten = []
    named_as: dict[str, str] = {}  # agro's key: TRL's name, or "" if agro's was used
    for item in items:
        key, equals, value = item.partition("=")
        ours, theirs = key.strip(), ""
        name = ours.rpartition(".")[2]
        is_theirs = equals and name in peers.ALIASES and not key.startswith("phases.")
        if is_theirs and (ours == name or name != "beta"):  # evaluate.beta is ours
            theirs = name
            parsed = parse(value, f"command line: {name}")
            if name == "reward_funcs" and isinstance(parsed, str):  # names, with brackets or without
                names = [part.strip(" \"'") for part in parsed.strip(" []").split(",")]
                value, parsed = names[0], names if len(names) > 1 else names[0]
            ours, parsed = _ours(name, parsed)
            if ours == "reward.functions":
                tables = (f"{{ name = {json.dumps(each['name'])} }}" for each in parsed)
                value = f"[{', '.join(tables)}]"
            say(name, ours)
            item = f"{ours}={value}"
        if named_as.setdefault(ours, theirs) != theirs:
            raise Refused(
                f"command line: {theirs or named_as[ours]} is {ours} here, which is given too; leave one out"
            )
        rewritten.append(item)
    return rewritten


def _ours(key: str, value: Any) -> tuple[str, Any]:
    """Return agro's key and value. Several rewards are summed, as in TRL; a data set may be a store."""
    if key == "reward_funcs" and isinstance(value, list | tuple):
        return "reward.functions", [{"name": name} for name in value]
    if key == "train_dataset" and isinstance(value, str | Path):
        from agro.io.record_files import has_several_tables  # lazy: few runs use this name

        if has_several_tables(Path(value)):
            return "data.store", value
    return peers.ALIASES[key], value


def say(theirs: str, ours: str) -> None:
    note(f"TRL's {theirs} is {ours} here")


def note(text: str) -> None:
    """Print a note once per process."""
    if text not in _printed:
        _printed.add(text)
        print(f"note: {text}", file=sys.stderr)
