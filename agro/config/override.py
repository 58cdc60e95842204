"""Changes to nested configuration values, by a phase or by `KEY=VALUE`, and why values are refused."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from agro.errors import Refused
from agro.io import peers
from agro.io.peers import did_you_mean

LENGTH = ("steps", "epochs")  # keys of [train], of which one is set
REPLACED = {  # an override's key: the recipe's key that it replaces
    "data.hold_out": "data.hold_out_most",
    "reward.functions": "reward.name",
    "reward.name": "reward.functions",
}
M = TypeVar("M", bound=BaseModel)
_ALTERNATIVE = re.compile(r"literal\[|constrained-")  # the union member in pydantic's error path
# A quoted text, or a number such as .1 and 1., which TOML lacks.
_SHORT_NUMBER = re.compile(
    r"""
    (?P<quoted> "(?:\\.|[^"\\])*" | '[^']*' )
    | (?<![\w.]) (?P<whole>\d[\d_]*)? \. (?P<fraction>\d[\d_]*)? (?P<exponent>[eE][+-]?\d+)? (?![\w.])
    """,
    re.VERBOSE,
)


def check_values(value: Any, location: str, *keys: Any) -> None:
    """Raise `Refused` for NaN, infinities (JSON has none) and integers beyond 64 bits (tensors have none),
    which options of any type could hold."""
    problem = ""
    if isinstance(value, float) and not math.isfinite(value):
        problem = f"expected a finite number, got {value}"
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        problem = f"expected an integer of at most 64 bits, got one of {value.bit_length()} bits"
    if problem:
        raise Refused(f"{location}: {'.'.join(map(str, keys))}: {problem}")
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_values(item, location, *keys, key)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            check_values(item, location, *keys, index)


def read_options(kind: type[M], options: Mapping[str, Any], location: str) -> M:
    """Validate a part's options. Raises `Refused` with every one that is unknown or invalid."""
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        raise Refused("\n".join(explain(e, kind, location) for e in error.errors())) from None


def explain(
    error: Any, config: type[BaseModel], location: str, overrides: Sequence[str] = (), *, is_run: bool = False
) -> str:
    """Phrase a pydantic error with its dotted key, and for an unknown key the nearest known one.

    `location`: the origin of all values but those of `overrides` (KEY=VALUE), the command line's. `is_run`:
    for a run's configuration, TRL's names count too.
    """
    keys = [str(key) for key in error["loc"] if not _ALTERNATIVE.match(str(key))]
    path = ".".join(keys)
    if path in [item.partition("=")[0].strip() for item in overrides]:
        location = "command line"
    if error["type"] != "extra_forbidden":
        problem = f"{error['msg'][0].lower()}{error['msg'][1:]}, got {error['input']!r:.80}"
        if path == "data.store" and isinstance(error["input"], (list, tuple)):
            problem += ". What to do: agro import all of these logs into one store, and give that"
        return f"{location}: {path}: {problem}"
    *sections, name = keys
    model = config
    for key in sections:
        model = section_at(model, key) or model  # an index into a list has no model
    names, theirs = model.model_fields, peers.ALIASES if is_run else {}
    near = did_you_mean(name, {**names, **theirs}, path.removesuffix(name))
    answer = (peers.hint(path) if is_run else "") or near or f"known here: {', '.join(names) or 'none'}"
    return f"{location}: unknown key {path}; {answer}"


def section_at(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The section at a key, whether optional or a list's item; None if there isn't one."""
    if key not in model.model_fields:
        return None
    annotation = model.model_fields[key].annotation
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _is_text(model: type[BaseModel], keys: Sequence[str]) -> bool:
    """Whether the value at a dotted key can only be text, not a number or a boolean."""
    types: set[Any] = {model}
    for key in keys:
        inner: set[Any] = set()
        for kind in types:
            if isinstance(kind, type) and issubclass(kind, BaseModel) and key in kind.model_fields:
                inner |= _members(kind.model_fields[key].annotation)
            elif get_origin(kind) is dict:
                inner |= _members(get_args(kind)[1])
        types = inner
    return str in types and types.isdisjoint({bool, int, float, Any})


def _members(annotation: Any) -> set[Any]:
    """The members of a union type; any other type is its own only member."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*map(_members, get_args(annotation)))
    return {annotation}


def merge(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `changes` into `base`. A different objective or source wrapper doesn't inherit the options of the
    one in `base`. Epochs replace steps, and steps replace epochs."""
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


def override_all(values: dict[str, Any], items: Sequence[str], config: type[BaseModel]) -> Iterator[str]:
    """Apply every `KEY=VALUE` to a recipe's nested values with `override`; yields notes to print.

    First removes what the overrides replace: steps or epochs, keys of REPLACED, and options of the recipe's
    objective that a new one doesn't have.
    """
    names = {item.partition("=")[0].strip().rpartition(".")[2] for item in items}
    for item in items:
        key, _, raw = item.partition("=")
        section, _, name = REPLACED.get(key.strip(), "").partition(".")
        if isinstance(values.get(section), dict):
            values[section].pop(name, None)
        *sections, name = key.strip().split(".")
        if sections[-1:] == ["train"] and name in LENGTH:
            train = _target(values, item)[0].get("train")
            if isinstance(train, dict):
                for length in LENGTH:
                    train.pop(length, None)
        elif sections[-1:] == ["objective"] and name == "name":
            target, keys = _target(values, item)
            options = target.get("objective")
            if keys == ["objective", "name"] and isinstance(options, dict):
                dropped = _without_options(options, str(parse(raw, f"override {item!r:.80}")))
                reported = [option for option in dropped if option not in names]
                if reported:
                    yield f"{item}: dropped the options of the recipe's objective: {', '.join(reported)}"
    for item in items:
        override(values, item, config)


def _without_options(options: dict[str, Any], name: str) -> list[str]:
    """Delete the options that the objective of this name doesn't have, and return them."""
    from agro.objectives.table import entries  # imports torch

    if name not in entries():
        return []
    options_known = entries()[name].options.model_fields
    dropped = [option for option in options if option != "name" and option not in options_known]
    for option in dropped:
        del options[option]
    return dropped


def override(values: dict[str, Any], item: str, config: type[BaseModel]) -> None:
    """Apply `KEY=VALUE`, a dotted path and a value for `parse`, to nested values of `config`.

    A number or a word such as true stays text if KEY holds text.
    """
    key, equals, raw = item.partition("=")
    if not equals or not key.strip():
        raise Refused(f"override {item!r}: expected KEY=VALUE, such as train.steps=20")
    value = parse(raw, f"override {item!r:.80}")
    target, keys = _target(values, item)
    if _is_text(config, keys) and not isinstance(value, (str, list, dict)):
        value = raw
    check_values(value, "command line", *keys)
    if keys == ["data", "store"] and raw == value and raw[:1] == "[":  # the shell removed a list's quotes
        raise Refused(f"{item}: expected one store, a file or postgresql://…")
    for section in keys[:-1]:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise Refused(f"override {item!r}: {section} is a value, not a section")
    target[keys[-1]] = value


def parse(raw: str, location: str) -> Any:
    """Parse a TOML value, also with numbers such as .1 and 1.; a bare word or date is text."""
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
    """Complete a `_SHORT_NUMBER` match with digits on both sides of its point; other matches stay."""
    if match["quoted"] or not (match["whole"] or match["fraction"]):
        return match[0]
    return f"{match['whole'] or 0}.{match['fraction'] or 0}{match['exponent'] or ''}"


def _target(values: dict[str, Any], item: str) -> tuple[dict[str, Any], list[str]]:
    """Find the values that `KEY=VALUE` changes, the run's or a phase's, and the path of KEY in them."""
    key, _, raw = item.partition("=")
    keys = key.strip().split(".")
    tables = [phase for phase in as_list(values.get("phases")) if isinstance(phase, dict)]
    phases = {str(phase.get("name")): phase for phase in tables}
    if keys[0] == "phases" and len(keys) > 2:
        if keys[1] not in phases:
            names = ", ".join(phases) or "none"
            raise Refused(f"override {item!r}: expected one of the configuration's phases: {names}")
        return phases[keys[1]], keys[2:]
    is_length = keys[-2:-1] == ["train"] and keys[-1] in LENGTH
    same = [[*keys[:-1], length] for length in LENGTH] if is_length else [keys]
    setters = [name for name, phase in phases.items() if any(_has(phase, other) for other in same)]
    if setters and len(setters) == len(phases):
        raise Refused(
            f"override {item!r} would change nothing: every phase sets {key} itself; "
            f"use phases.{setters[0]}.{key}={raw}"
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
