"""What every section of the configuration is: frozen, typed, its values with a unit, a meaning and marks."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
COLDEST = 1e-6  # logits that are divided by much less overflow float32


def _warm_enough(value: float) -> float:
    if 0 < value < COLDEST:
        raise PydanticCustomError("temperature", "expected 0 (greedy) or at least {n}", {"n": COLDEST})
    return value


Temperature = Annotated[float, Field(ge=0), AfterValidator(_warm_enough)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def field(default: Any, *, resume: bool = False, shared: bool = False, **limits: Any) -> Any:
    """A value of a section with marks, and limits as of `pydantic.Field`; its docstring is its meaning.

    `resume`: it may change when a run is resumed: no step computes anything with it. `shared`: it is one for
    the complete run, so a phase can't change it.
    """
    marks: dict[str, Any] = {"resume": resume, "shared": shared}
    return Field(default, json_schema_extra=marks, **limits)
