"""Why a configuration is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from agro.errors import Refused
from agro.io import peers
from agro.io.nearest import nearest

_ALTERNATIVE = re.compile(r"literal\[|constrained-")  # in pydantic's path, which of several types was tried


SEVERAL_STORES = (
    "Several stores as one aren't read any more. What to do: make one of the files: "
    "agro store join A.db B.db OUT.db. Then name OUT.db here"
)


# By key, what was a setting of its own and is a part now: the setting that names it, and what runs without it
# have in their config.json.
PARTS: dict[str, tuple[str, float | None]] = {
    "again": ('source.around = "resample"', None),
    "search": ('source.around = "tree_search"', None),
    "source.props": ('source.around = "props"', None),
    "reward.learned": ('source.around = "adversary"', None),
    "reward.flow": ('source.around = "flow_reward"', None),
    "data.experts_win": ('source.around = "rivals"', False),
    "sampler.draft": ('engine.kind = "drafted"', None),
    "sampler.draft_tokens": ('engine.kind = "drafted"', 4),
    "sampler.draft_every": ('source.around = "trained_draft"', None),
    "sampler.draft_lr": ('source.around = "trained_draft"', 1e-3),
}


def check_values(value: Any, location: str, *keys: Any) -> None:
    """Options of objectives and rewards have any type, but JSON (`config.json`) has no NaN or infinity, and
    tensors no integers beyond 64 bits."""
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


def explain(error: Any, config: type[BaseModel], location: str, overrides: Sequence[str] = ()) -> str:
    """One error of pydantic's, with the dotted key; for an unknown key with the nearest known one.

    `location`: what has the values, but those of `overrides`, KEY=VALUE, which are of the command line.
    """
    keys = [str(key) for key in error["loc"] if not _ALTERNATIVE.match(str(key))]
    path = ".".join(keys)
    if path in [item.partition("=")[0].strip() for item in overrides]:
        location = "command line"
    if error["type"] != "extra_forbidden":
        problem = error["msg"][0].lower() + error["msg"][1:]
        text = f"{location}: {path}: {problem}, got {error['input']!r:.80}"
        is_several = path == "data.store" and isinstance(error["input"], list | tuple)
        return f"{text}. {SEVERAL_STORES}" if is_several else text
    if path in PARTS:
        part = PARTS[path][0]
        return f"{location}: {path}: it is {part} now, with its values in {part.partition('.')[0]}.options"
    *sections, name = keys
    model = config
    for key in sections:
        model = section_at(model, key) or model  # a place in a list of sections is none
    theirs = peers.setting(name, error["input"])
    if theirs:
        return f"{location}: unknown key {path}; {theirs}"
    names = list(model.model_fields)
    near = peers.near_alias(name) or nearest(name, names)
    if near:
        return f"{location}: unknown key {path}; did you mean {'.'.join([*sections, near])}?"
    return f"{location}: unknown key {path}; known here: {', '.join(names)}"


def section_at(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The section at a key, also an optional one or the item of a list; None where there isn't one."""
    if key not in model.model_fields:
        return None
    annotation = model.model_fields[key].annotation
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def types_at(model: type[BaseModel], keys: Sequence[str]) -> set[Any]:
    """The types that the value at a dotted key may have; none where the model doesn't declare the key."""
    types: set[Any] = {model}
    for key in keys:
        inner: set[Any] = set()
        for kind in types:
            if isinstance(kind, type) and issubclass(kind, BaseModel) and key in kind.model_fields:
                inner |= _members(kind.model_fields[key].annotation)
            elif get_origin(kind) is dict:
                inner |= _members(get_args(kind)[1])
        types = inner
    return types


def _members(annotation: Any) -> set[Any]:
    """The types of a union, one by one; other types are their only member."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _members(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return set().union(*map(_members, get_args(annotation)))
    return {annotation}
