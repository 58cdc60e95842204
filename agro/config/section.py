"""What every section of the configuration is: frozen, typed, its values with a unit, a meaning and marks."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]


def _divisible(temperature: float) -> float:
    """Logits over less than this aren't finite in float32."""
    if 0 < temperature < 1e-6:
        raise PydanticCustomError("temperature", "input should be 0 (greedy), or 1e-6 or more")
    return temperature


Temperature = Annotated[float, Field(ge=0), AfterValidator(_divisible)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def field(default: Any, *, resume: bool = False, shared: bool = False, **limits: Any) -> Any:
    """A value of a section with marks, and limits as of `pydantic.Field`; its docstring is its meaning.

    `resume`: it may change when a run is resumed: no step computes anything with it. `shared`: it is one for
    the complete run, so a phase can't change it.
    """
    marks: dict[str, Any] = {}
    if resume:
        marks["resume"] = True
    if shared:
        marks["shared"] = True
    return Field(default, json_schema_extra=marks, **limits)
