"""Options of objectives: declared in a function's signature, turned into a pydantic model, and described from
it.

    def rloo(streams, batch, *, beta: Annotated[float, Option("strength of …", ge=0)] = 0.0) -> Terms: ...

A parameter without a default is required. One without a description is checked by its type alone, float if it
has none. Choices are `Literal[...]` or `bool`; limits apply to every number in the type. An option declares
what the objective needs because of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from agro.errors import Refused
from agro.io import peers
from agro.objectives.needs import (
    GROUPS,
    OBSERVED_LOGP,
    PAIRS,
    PAIRS_AND_TIES,
    REF_LOGP,
    STORED_VALUE,
    VOTES,
    Need,
)

COUNTS = {1: "a number", 2: "two numbers", 3: "three numbers"}


class _Required:
    def __repr__(self) -> str:
        return "(to be given)"


REQUIRED = _Required()  # in a preset's defaults: the option has none


@dataclass(frozen=True)
class Option:
    """What an option means, its unit, the limits of its numbers, and what it needs."""

    meaning: str
    unit: str = "choice"
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    needs: Need | Mapping[Any, tuple[Need, ...]] | None = None
    """What is needed unless the option is 0, False or None; or the needs of each choice."""

    def needed(self, value: Any) -> tuple[Need, ...]:
        """What is needed with this value, which may be a schedule."""
        if self.needs is None:
            return ()
        if isinstance(self.needs, Need):
            return () if value is None or value == 0 else (self.needs,)
        return self.needs.get(value, ()) if isinstance(value, str | bool) else ()

    def expected(self, kind: Any) -> str:
        """Describe the values that this type accepts."""
        if get_origin(kind) in (Union, UnionType):
            members = [member for member in get_args(kind) if member is not type(None)]
            if len(members) == 1:
                return self.expected(members[0])
            return " or ".join(_choices(m) or self.expected(m) for m in members)
        if choices := _choices(kind):
            return f"one of {choices}"
        return COUNTS[max(1, len(get_args(kind)))] + self._limits()

    def _limits(self) -> str:
        lowest = " above " + f"{self.gt:g}" if self.gt is not None else ""
        if self.ge is not None:
            lowest = f", {self.ge:g} or more"
        if self.le is not None and self.gt is not None:
            return f"{lowest} and at most {self.le:g}"
        if self.le is not None:
            return f" from {self.ge:g} to {self.le:g}"
        if self.lt is not None and self.gt is not None:
            return f"{lowest} and below {self.lt:g}"
        if self.lt is not None:
            return f" from {self.ge:g} to below {self.lt:g}"
        return lowest

    def constrained(self, kind: Any) -> Any:
        """The type with these limits on each of its numbers; bool and str have none."""
        if kind is float:
            return Annotated[
                float, Field(strict=True, allow_inf_nan=False, ge=self.ge, gt=self.gt, le=self.le, lt=self.lt)
            ]
        if kind is bool:
            return Annotated[bool, Field(strict=True)]
        members = tuple(self.constrained(member) for member in get_args(kind))
        if get_origin(kind) in (Union, UnionType):
            return Union[members]  # noqa: UP007
        return tuple[members] if get_origin(kind) is tuple else kind  # type: ignore[valid-type]


# Options that several objectives share.
NATS = "reward per nat of the response's log-ratio"
TOWARDS = "strength of the regularization towards the reference"
Beta = Annotated[float, Option(TOWARDS, NATS, ge=0, needs=REF_LOGP)]
BetaAbove0 = Annotated[float, Option(TOWARDS, NATS, gt=0)]  # also with other anchors
Scale = Annotated[
    Literal["reward", "loss"], Option("whether the gradient is divided by beta ('reward') or not ('loss')")
]
Average = Annotated[
    Literal["response", "token"] | float,
    Option(
        "how tokens are averaged: in each response, then over responses and groups; over all tokens of the "
        "step; or each response's sum divided by this number",
        "tokens",
        gt=0,
    ),
]
Votes = Annotated[
    Literal["ignore", "mean"],
    Option(
        "probability that the winner is the better one: 1, or the posterior mean of its votes",
        needs={"ignore": (PAIRS,), "mean": (PAIRS_AND_TIES, VOTES)},
    ),
]
Baseline = Annotated[
    Literal["others", "stored", "step"],
    Option(
        "what a response's R is compared with: the mean of the others in its group; or, which allows groups "
        "of one response, the prompt's stored value, or the mean of nearly least variance over the step's "
        "other groups, for fresh samples",
        needs={"others": (GROUPS,), "stored": (STORED_VALUE,)},
    ),
]
Singletons = Annotated[
    Literal["error", "drop", "pool"],
    Option(
        'what to do with groups that have too few responses, or no pair; "pool" merges a '
        "step's groups of one response into one, which compares responses to different prompts"
    ),
]

Observing = Annotated[
    float,
    Option(
        "share in the loss of the mean −log π over the step's tokens that the environment wrote",
        "loss per nat",
        ge=0,
        needs=OBSERVED_LOGP,
    ),
]


Declared = Mapping[str, tuple[Any, Any]]  # (annotation, default) of options by their names


def options_of(function: Callable[..., Any]) -> Declared:
    """The keyword-only parameters of a function; a user's may lack an `Option` or a type."""
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    return {p.name: (hints.get(p.name, float), p.default) for p in parameters if p.kind is p.KEYWORD_ONLY}


def needed_by(declared: Declared, options: Mapping[str, Any]) -> set[Need]:
    """What declared options need. A required number that is still missing counts as not 0."""
    needs = set[Need]()
    for key, (annotation, default) in declared.items():
        for option in getattr(annotation, "__metadata__", ()):  # none without a description
            needs.update(option.needed(options.get(key, default)))
    return needs


def model_of(name: str, declared: Declared, preset: Mapping[str, Any]) -> type[BaseModel]:
    """Make a frozen model of declared options; `preset` replaces defaults."""
    fields = {}
    for key, (annotation, default) in declared.items():
        if not hasattr(annotation, "__metadata__"):  # in a user's function
            annotation = Annotated[annotation, Option("not described", "not stated")]
        kind, option = get_args(annotation)
        value = preset.get(key, default)
        field = Field(
            ... if value in (inspect.Parameter.empty, REQUIRED) else value,
            description=option.meaning,
            json_schema_extra={"unit": option.unit, "expected": option.expected(kind)},
        )
        fields[key] = option.constrained(kind), field
    config = ConfigDict(frozen=True, extra="forbid")
    model: type[BaseModel] = create_model(name, __config__=config, **fields)  # type: ignore[call-overload]
    return model


def defaults_of(model: type[BaseModel]) -> dict[str, Any]:
    """The defaults of the options that have one."""
    return {key: field.default for key, field in model.model_fields.items() if not field.is_required()}


def described(model: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """Each option's default (None if it is required), required, unit, meaning, expected."""
    descriptions = {}
    for key, field in model.model_fields.items():
        required = field.is_required()
        description = {"default": None if required else field.default, "required": required}
        assert isinstance(field.json_schema_extra, dict)
        descriptions[key] = description | {"meaning": field.description} | field.json_schema_extra
    return descriptions


def checked(name: str, model: type[BaseModel], values: Mapping[str, Any], *, partial: bool) -> dict[str, Any]:
    """Check the options of objective `name` and fill in defaults; `partial` lets required ones be missing.

    Raises `Refused` for an unknown, invalid or missing option.
    """
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in values.items()}
    try:
        return dict(model(**plain))
    except ValidationError as error:
        problems = error.errors()
    descriptions = described(model)
    missing = [str(p["loc"][0]) for p in problems if p["type"] == "missing" and len(p["loc"]) == 1]
    for problem in problems:
        key = str(problem["loc"][0])
        if problem["type"] == "extra_forbidden":
            hint = peers.hint(f"objective.{key}") or peers.did_you_mean(key, descriptions)
            hint = hint or f"it has: {', '.join(descriptions) or 'none'}"
            raise Refused(f"objective {name}: unknown option {key}; {hint}")
        if key not in missing:
            expected = descriptions[key]["expected"]
            raise Refused(f"objective {name}: option {key}: expected {expected}, got {values[key]!r}")
    if not partial:
        key = missing[0]
        raise Refused(
            f"objective {name}: option {key} has no default; set it "
            f"({descriptions[key]['meaning']}, in {descriptions[key]['unit']})"
        )
    return defaults_of(model) | plain


def _choices(kind: Any) -> str:
    """The choices of a type, "" if it isn't one of choices."""
    if kind is bool:
        return "False, True"
    return ", ".join(map(repr, get_args(kind))) if get_origin(kind) is Literal else ""
