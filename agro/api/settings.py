"""Arguments of `agro.train` as the values of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from agro.config import RunConfig
from agro.errors import Refused
from agro.io import peers
from agro.objectives import describe

LORA = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
OF_THE_MODEL = ("base_model_name_or_path", "task_type")  # agro writes its own


def configured(objective: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values of an objective and settings.

    A key is `section.key`, or `section__key`, or a complete section, or else an option of the objective.
    Raises `Refused` for another key, and for one that is given twice.
    """
    values: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    put(values, ["objective", "name"], objective)
    for name, value in settings.items():
        keys = name.replace("__", ".").split(".")
        if name in (*peers.ALIASES, *peers.BATCH) and name != "beta":
            keys = [name]  # which the configuration knows
        elif len(keys) == 1 and name not in RunConfig.model_fields:
            if name not in describe(objective)["options"]:
                unknown[name] = _instead(name, value)
            keys = ["objective", name]
        put(values, keys, value)
    if unknown:
        options = ", ".join(describe(objective)["options"])
        named = "; ".join(f"{name}{words}" for name, words in unknown.items())
        raise Refused(
            f"agro.train: unknown: {named}. Expected "
            "settings with their section, such as train__steps=20, where __ is the dot, or options of "
            f"{objective}: {options}"
        )
    return values


def put(values: dict[str, Any], keys: list[str], value: Any) -> None:
    """Put a value under nested keys, which must have none yet."""
    section, key_name = values, keys[-1]
    for key in keys[:-1]:
        section = section.setdefault(key, {})
        if not isinstance(section, dict):
            raise Refused(f"{'.'.join(keys)}: {key} is a value, not a section")
    if isinstance(value, Mapping) and isinstance(section.get(key_name), dict):
        for key, item in value.items():
            put(section, [key_name, str(key)], item)
    elif key_name in section:
        raise Refused(f"{'.'.join(keys)}: given twice, as {section[key_name]!r:.80} and as {value!r:.80}")
    else:
        section[key_name] = plain(value)


def plain(value: Any) -> Any:
    """The value as a configuration has it: paths as text, mappings as dictionaries."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value


def _instead(name: str, value: Any) -> str:
    """What an unknown argument may be here, in brackets; empty where nothing is near."""
    theirs = peers.option(name, value)
    if theirs:
        return f" ({theirs})"
    near = [alias for alias in [peers.near_alias(name)] if alias]
    ways = [f"{section}__{name}" for section in _sections_with(name)] or near
    return f" (did you mean {' or '.join(ways)}?)" if ways else ""


def _sections_with(name: str) -> list[str]:
    """The sections of the configuration that have a value of this name."""
    sections = []
    for section, field in RunConfig.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            is_section = isinstance(kind, type) and issubclass(kind, BaseModel)
            if is_section and name in kind.model_fields:
                sections.append(section)
    return sections


def lora_of(peft: Any) -> dict[str, Any]:
    """The values of `policy.lora` for a `peft.LoraConfig`.

    Raises `Refused` for another configuration of peft's, and where it sets what agro's adapters don't have.
    """
    if type(peft).__name__ != "LoraConfig":
        raise Refused(f"peft: expected a peft.LoraConfig, got {type(peft).__name__}")
    values, defaults = vars(peft), vars(type(peft)())
    if peft.task_type not in (None, "CAUSAL_LM"):
        raise Refused(f"peft: task_type: expected CAUSAL_LM, got {peft.task_type}")
    allowed = {*LORA, *OF_THE_MODEL}
    unsupported = [name for name in values if name not in allowed and values[name] != defaults.get(name)]
    if unsupported:
        got = ", ".join(f"{name}={values[name]!r:.40}" for name in unsupported)
        raise Refused(
            f"peft: agro's adapters have {', '.join(LORA)} alone, got {got}. What to do: leave it out, or "
            "give the folder of an adapter that was made with it as policy__lora={'start': FOLDER}"
        )
    return {LORA[name]: values[name] for name in ("r", "lora_alpha")} | {"targets": _targets(peft)}


def _targets(peft: Any) -> tuple[str, ...]:
    targets = peft.target_modules
    if targets == "all-linear":
        return (targets,)
    if targets is None or isinstance(targets, str):
        raise Refused(
            f"peft: target_modules: expected 'all-linear' or a list of names of modules, got {targets!r}"
        )
    return tuple(sorted(targets))
