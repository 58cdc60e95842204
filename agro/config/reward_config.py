"""How responses are scored."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from agro.config.section import Positive, Section, Share, field


class RewardPart(Section):
    """One of several rewards."""

    name: str
    """exact, regex, math, code, judge, model, overlong, an installed one, module:function or
    file.py:function"""
    weight: float = 1.0
    """of its value in the sum; 0 measures it without counting it"""
    at_least: float | None = None
    """a lower value counts as this"""
    at_most: float | None = None
    """a higher value counts as this"""
    gate: float | None = None
    """where its value is below this, parts without a gate count as 0"""
    options: dict[str, Any] = field({})
    """of this reward, as `reward.options`"""
    label: str | None = None
    """its name in metrics and store; `name` where it is not given"""


class RewardConfig(Section):
    """One reward, or the weighted sum of several `functions`."""

    name: str | None = field(None, shared=True)
    """exact (where neither it nor `functions` is given), regex, math, code, judge, model, overlong, an
    installed one, module:function or file.py:function"""
    options: dict[str, Any] = field({}, shared=True)
    """options of a built-in reward, keyword arguments of a function"""
    functions: tuple[RewardPart, ...] = field((), shared=True)
    """instead of `name`: several rewards, each with a weight; the reward is Σ weight · value"""
    meaning: str | None = field(None, shared=True)
    """module:function or file.py:function that gives one number to responses of one meaning, called as a
    reward: the results of unit tests as bits, or agro.rewards.meaning.number of a canonical form; for
    objectives with equivalent = "meaning". A response without it has no reward"""
    timeout: Positive = field(10.0, resume=True, shared=True)
    """seconds a call may take for one response; beyond it the reward stays unknown"""
    per_token: bool = field(False, shared=True)
    """whether the function returns for each response a list with a number for each of its `completion_ids`,
    the reward of that token; that of the response is their sum"""
    per_step: str | None = field(None, shared=True)
    """turn, or a text that ends steps: the function returns for each response a list with a number for each
    of the policy's turns, or of its steps: the parts between these texts that aren't blank. It comes with
    the last token; that of the response is their sum"""
    whiten: Literal["none", "group", "batch"] = field("none", shared=True)
    """what is trained on: each part is (value − mean) / standard deviation, with n − 1, over the responses to
    the prompt (group, as GDPO has it) or of the step (batch), and then weighted. Metrics and store have it as
    it was"""
    clip: tuple[float, float] | None = field(None, shared=True)
    """lowest and highest reward that is trained on, after whitening"""
    max_failed: Share = field(0.5, resume=True, shared=True)
    """the run stops where more than this share of one step's rewards failed"""
    workers: int = field(1, resume=True, shared=True, ge=1, le=2**10)
    """processes of each reward that has some: functions, math, regex patterns"""

    @model_validator(mode="before")
    @classmethod
    def _one_way(cls, values: Any) -> Any:
        """A name or functions. Without either, the name is filled in, so that config.json has it."""
        if not isinstance(values, dict):
            return values
        for key in ("name", "options"):
            if values.get("functions") and values.get(key):
                raise PydanticCustomError(
                    "reward",
                    "reward.{key} and reward.functions exclude each other: give {key} to each of the "
                    "functions, or no functions",
                    {"key": key},
                )
        is_given = values.get("functions") or values.get("name") is not None
        return values if is_given else values | {"name": "exact"}

    @model_validator(mode="after")
    def _parts_differ(self) -> Self:
        labels = [part.label or part.name for part in self.functions]
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise PydanticCustomError(
                "reward", "reward.functions: {name} is given twice; give one a label", {"name": twice[0]}
            )
        if labels and not any(part.weight for part in self.functions):
            raise PydanticCustomError("reward", "reward.functions: expected one weight other than 0 at least")
        others = labels or self.whiten != "none" or self.clip is not None
        for name in ("per_token", "per_step"):
            if getattr(self, name) and (others or (self.per_token and self.per_step)):
                raise PydanticCustomError(
                    "reward",
                    "reward.{name} excludes reward.{other}, reward.functions, reward.whiten and reward.clip",
                    {"name": name, "other": "per_step" if name == "per_token" else "per_token"},
                )
        caps = [(part.at_least, part.at_most) for part in self.functions]
        for low, high in (*caps, self.clip or (None, None)):
            if low is not None and high is not None and low >= high:
                raise PydanticCustomError(
                    "reward",
                    "reward: expected a lower bound below the upper one, got {low} and {high}",
                    {"low": low, "high": high},
                )
        return self

    @property
    def is_default(self) -> bool:
        """Whether nothing but the name that is filled in is given, as far as it shows."""
        return self.name == "exact" and not self.options

    @property
    def title(self) -> str:
        """For people: the name, or the sum."""
        return self.name or " + ".join(f"{p.weight:g} · {p.label or p.name}" for p in self.functions)
