"""TRL's names of settings, where they mean the same here: accepted at every door, and said once."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agro.config.override import parse, section_at
from agro.config.sections import SamplerConfig
from agro.errors import Refused
from agro.io import peers

THEIRS = frozenset((*peers.ALIASES, *peers.BATCH))
PER_DEVICE = 8  # TRL's own default of per_device_train_batch_size
DEFAULT_N = SamplerConfig().n
_said: set[str] = set()


def without_aliases(
    values: Mapping[str, Any], location: str, config: type[BaseModel], n: int = DEFAULT_N
) -> dict[str, Any]:
    """Nested values with agro's names in place of TRL's, at the root and in sections.

    `n`: responses a prompt, where the values don't say it. Raises `Refused` where a setting has both names,
    and for a batch that isn't of whole groups.
    """
    theirs = _theirs(values, config)
    if not theirs:
        return dict(values)
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    for section, key in theirs:
        value = (result if section is None else result[section]).pop(key)
        if key in peers.BATCH:
            result.setdefault("", {})[key] = value  # taken when the number of responses is known
            continue
        ours, value = _ours(key, value)
        if ours:
            _put(result, ours, value, key, location)
        else:
            note(f"TRL's {key} is not needed: {peers.UNUSED[key]}")
    batch = result.pop("", {})
    if batch:
        complete = {"per_device_train_batch_size": PER_DEVICE, **batch}
        groups = _groups(complete, result.get("sampler", {}).get("n", n), location)
        named = " × ".join(batch) + (" / sampler.n" if len(batch) > 1 else "")
        _put(result, "train.groups", groups, named, location)
    return result


def renamed(items: Iterable[str]) -> list[str]:
    """`KEY=VALUE` texts of the command line with agro's keys, so that they replace those of a recipe.

    Raises `Refused` where a setting has both names.
    """
    found = []
    called: dict[str, str] = {}  # by agro's key TRL's name, "" where agro's is given
    for item in items:
        key, equals, value = item.partition("=")
        ours = key.strip()
        name = ours.rpartition(".")[2]
        is_theirs = equals and name in peers.ALIASES and not key.startswith("phases.")
        is_theirs = is_theirs and (ours == name or name != "beta")  # evaluate.beta is ours
        if is_theirs:
            ours, changed = _ours(name, _parsed(name, value))
            if not ours:
                note(f"TRL's {name} is not needed: {peers.UNUSED[name]}")
                continue
            say(name, ours)
            item = f"{ours}={value if name == 'train_dataset' else _toml(changed)}"
        theirs = name if is_theirs else ""
        if called.setdefault(ours, theirs) != theirs:
            raise Refused(
                f"command line: {theirs or called[ours]} is {ours} here, which is given too; leave one out"
            )
        found.append(item)
    return found


def _theirs(values: Mapping[str, Any], config: type[BaseModel]) -> list[tuple[str | None, str]]:
    """Section, None at the root, and key of each of TRL's names."""
    found: list[tuple[str | None, str]] = [(None, key) for key in values if key in THEIRS]
    for section, inside in values.items():
        model = section_at(config, section)
        if model is None or not isinstance(inside, Mapping):
            continue
        ours = {*model.model_fields, *(["beta"] if section == "objective" else [])}
        found += [(section, key) for key in inside if key in THEIRS and key not in ours]
    return found


def _put(values: dict[str, Any], ours: str, value: Any, theirs: str, location: str) -> None:
    section, _, key = ours.partition(".")
    target = values.setdefault(section, {})
    if key in target:
        raise Refused(
            f"{location}: {theirs} is {ours} here, which is given too, as {target[key]!r:.40}; leave one out"
        )
    target[key] = value
    say(theirs, ours)


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


def _parsed(name: str, text: str) -> Any:
    """A value of the command line, where what it is here depends on it; other text stays."""
    if name == "train_dataset":
        return parse(text, "command line: train_dataset")
    if name != "reward_funcs":
        return text
    names = [part.strip(" \"'") for part in text.strip().strip("[]").split(",")]  # with brackets or without
    return names if len(names) > 1 else names[0]


def _toml(value: Any) -> str:
    """A value of the command line: text as it was, a list of tables in one line."""
    if isinstance(value, str):
        return value
    return "[" + ", ".join(f'{{ name = "{each["name"]}" }}' for each in value) + "]"


def _groups(batch: Mapping[str, Any], n: Any, location: str) -> int:
    """Prompts a step, of completions a step and `n` of each prompt."""
    completions = 1
    for value in batch.values():
        completions *= value if isinstance(value, int) else 0
    if not isinstance(n, int) or completions < n or completions % n:
        named = " × ".join(f"{key} = {value}" for key, value in batch.items())
        raise Refused(
            f"{location}: {named}: expected completions of whole groups, a multiple of sampler.n = {n}; "
            "train.groups is the number of prompts a step"
        )
    return completions // n


def say(theirs: str, ours: str) -> None:
    note(f"TRL's {theirs} is {ours} here")


def note(text: str) -> None:
    """Say it once a process."""
    if text not in _said:
        _said.add(text)
        print(f"note: {text}", file=sys.stderr)
