"""TRL's names of settings, where they mean the same here: accepted at every door, and said once."""

from __future__ import annotations

import math
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
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    theirs = [(result, key) for key in values if key in THEIRS]
    for section, inside in values.items():
        model = section_at(config, section)
        if model is not None and isinstance(inside, Mapping):
            ours = {*model.model_fields, *(["beta"] if section == "objective" else [])}
            theirs += [(result[section], key) for key in inside if key in THEIRS and key not in ours]
    batch = {}
    for place, key in theirs:
        value = place.pop(key)
        if key in peers.BATCH:
            batch[key] = value  # taken when the number of responses is known
        elif peers.ALIASES[key]:
            _put(result, *_ours(key, value), key, location)
        else:
            note(f"TRL's {key} is not needed: {peers.UNUSED[key]}")
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


def _groups(batch: Mapping[str, Any], n: Any, location: str) -> int:
    """Prompts a step, of completions a step and `n` of each prompt."""
    completions = math.prod(value if isinstance(value, int) else 0 for value in batch.values())
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
