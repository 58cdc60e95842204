"""Changes to the nested values of a configuration: by a phase, or by `KEY=VALUE`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time
from typing import Any

from pydantic import BaseModel

from agro.config.messages import SEVERAL_STORES, types_at
from agro.errors import Refused

# A quoted text, or a number such as .1 and 1., which TOML doesn't have.
_SHORT_NUMBER = re.compile(
    r"""
    (?P<quoted> "(?:\\.|[^"\\])*" | '[^']*' )
    | (?<![\w.]) (?P<whole>\d[\d_]*)? \. (?P<fraction>\d[\d_]*)? (?P<exponent>[eE][+-]?\d+)? (?![\w.])
    """,
    re.VERBOSE,
)
LENGTH = ("steps", "epochs")  # of [train], which has one of them
REPLACED = {  # what a recipe may have in place of a key, by the key
    "data.hold_out": "data.hold_out_most",
    "reward.functions": "reward.name",
    "reward.name": "reward.functions",
}


def merge(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `base`, changed. Another objective, or source around the source, doesn't inherit the
    options of the one in `base`.

    Epochs replace steps, and steps epochs.
    """
    merged = dict(base)
    for key, value in changes.items():
        previous = merged.get(key)
        if not (isinstance(value, Mapping) and isinstance(previous, dict)):
            merged[key] = value
        elif key == "objective" and value.get("name", previous["name"]) != previous["name"]:
            merged[key] = dict(value)
        elif key == "source" and value.get("around", previous.get("around")) != previous.get("around"):
            merged[key] = {**previous, "options": {}, **value}
        elif key == "train" and any(value.get(length) is not None for length in LENGTH):
            remaining = {name: item for name, item in previous.items() if name not in LENGTH}
            merged[key] = merge(remaining, value)
        else:
            merged[key] = merge(previous, value)
    return merged


def override(values: dict[str, Any], item: str, config: type[BaseModel]) -> None:
    """Put `KEY=VALUE`, a dotted path and a value as of `parse`, into nested values of `config`.

    A number or a word such as true stays text where the value at KEY is one.
    """
    key, equals, raw = item.partition("=")
    if not equals or not key.strip():
        raise Refused(f"override {item!r}: expected KEY=VALUE, such as train.steps=20")
    value = parse(raw, f"override {item!r:.80}")
    target, keys = _target(values, key, raw, item)
    types = types_at(config, keys)
    is_text = str in types and types.isdisjoint({bool, int, float, Any})
    if is_text and not isinstance(value, (str, list, dict)):
        value = raw
    if keys == ["data", "store"] and raw == value and raw[:1] == "[":  # the shell took a list's quotes
        raise Refused(f"{item}: expected one store. {SEVERAL_STORES}")
    for section in keys[:-1]:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise Refused(f"override {item!r}: {section} is a value, not a section")
    target[keys[-1]] = value


def drop_replaced(values: dict[str, Any], item: str) -> None:
    """Drop the steps of a recipe where `item` sets epochs, its epochs where it sets steps, and what REPLACED
    says of other keys."""
    key, _, raw = item.partition("=")
    of, _, name = REPLACED.get(key.strip(), "").partition(".")
    if isinstance(values.get(of), dict):
        values[of].pop(name, None)
    if not _sets_length(key.strip().split(".")):
        return
    target, keys = _target(values, key, raw, item)
    train = target.get(keys[0])
    if isinstance(train, dict):
        for length in LENGTH:
            train.pop(length, None)


def drop_options(values: dict[str, Any], items: Sequence[str]) -> Iterator[str]:
    """Drop those options of a recipe's objective that the one which an item names doesn't have, but for given
    ones; yields what was dropped, as a note."""
    keys_given = {item.partition("=")[0].strip().rpartition(".")[2] for item in items}
    for item in items:
        key, _, raw = item.partition("=")
        if not key.strip().endswith("objective.name"):
            continue
        target, keys = _target(values, key, raw, item)
        options = target.get("objective")
        name = parse(raw, f"override {item!r:.80}")
        if keys != ["objective", "name"] or not isinstance(options, dict):
            continue
        from agro.objectives.table import entries  # imports torch

        if str(name) not in entries():
            continue
        known = entries()[str(name)].options.model_fields
        dropped = [option for option in options if option != "name" and option not in known]
        for option in dropped:
            del options[option]
        said = [option for option in dropped if option not in keys_given]
        if said:
            yield f"{item}: without the recipe's options of another objective: {', '.join(said)}"


def _sets_length(keys: Sequence[str]) -> bool:
    return len(keys) > 1 and keys[-2] == "train" and keys[-1] in LENGTH


def parse(raw: str, location: str) -> Any:
    """A TOML value, or one with numbers such as .1 and 1.; a bare word or date is text."""
    for text in (raw, _SHORT_NUMBER.sub(_complete_number, raw)):
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            continue
        except (ValueError, RecursionError) as error:  # an integer of thousands of digits, many brackets
            raise Refused(f"{location}: {error}") from None
        return raw if isinstance(value, (date, time)) else value
    return raw


def _complete_number(match: re.Match[str]) -> str:
    """A match of `_SHORT_NUMBER` with digits on both sides of its point; other matches stay."""
    if match["quoted"] or not (match["whole"] or match["fraction"]):
        return match[0]
    return f"{match['whole'] or 0}.{match['fraction'] or 0}{match['exponent'] or ''}"


def _target(values: dict[str, Any], key: str, raw: str, item: str) -> tuple[dict[str, Any], list[str]]:
    """The values that a dotted key is in, those of the run or of a phase, and the keys that lead to it."""
    keys = key.strip().split(".")
    phases: dict[str, dict[str, Any]] = {}
    for phase in as_list(values.get("phases")):
        if isinstance(phase, dict):
            phases[str(phase.get("name"))] = phase
    if keys[0] == "phases" and len(keys) > 2:
        if keys[1] not in phases:
            names = ", ".join(phases) or "which there is none"
            raise Refused(f"override {item!r}: expected a phase of {names}")
        return phases[keys[1]], keys[2:]
    lengths = [[*keys[:-1], length] for length in LENGTH]
    same = lengths if _sets_length(keys) else [keys]
    setters = [name for name, phase in phases.items() if any(_has(phase, other) for other in same)]
    if setters and len(setters) == len(phases):
        raise Refused(
            f"override {item!r} would change nothing: every phase sets {key} itself; "
            f"say phases.{setters[0]}.{key}={raw}"
        )
    return values, keys


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _has(values: Any, keys: list[str]) -> bool:
    for key in keys:
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True
