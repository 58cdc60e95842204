"""What is claimed of an objective."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from agro.proof.formulas import Situation

# Updates of a descent that isn't claimed to arrive: agro, from the reference on data of any full support, is
# within 1e-4 nats of the optimum by then.
DESCENT = 200
Formula = Callable[..., Tensor]  # of a situation, and of options by their names


@dataclass(frozen=True)
class End:
    """A policy that descent ends at, in words and as log-probs [X,Y] of responses."""

    name: str
    of: Callable[[Situation], Tensor]


@dataclass(frozen=True, eq=False)
class Claims:
    """Of an objective with `options`, whose `beta` is filled in where it has one."""

    expects: Callable[[Situation], Tensor]  # a scalar; its gradient is the expected gradient
    ends: Literal["optimum", "elsewhere", "unknown"]  # where descent goes: unknown where nothing is claimed
    needs: tuple[str, ...]  # all that it reads of the data beside the policy's log-probs
    options: Mapping[str, Any] = field(default_factory=dict)
    shift: bool = True  # whether adding a number to all rewards of a prompt changes nothing
    reference_shift: bool = True  # whether adding one to all log f of a prompt changes nothing
    policy_gradient: Callable[[float], float] | None = None
    """β -> the on-policy gradient over that of −E_π r + β KL(π ‖ f), where they are proportional."""
    noise: bool = True  # whether rewards that are noisy count with their mean alone
    n: tuple[int, ...] = (2, 3)
    episodes: bool = True  # whether a response may be in several rows, else it is refused
    drifted: bool = False  # whether the policy when the batch was drawn isn't the behavior
    updates: int = 400  # of the descent; 0: it isn't followed
    end: End | None = None  # where descent on the samples of others goes, where that isn't the optimum
    expert: Literal["none", "apart", "member", "hinted"] = "none"
    """Whether each group has a response more, of role "expert" or of the policy with a hint; "apart" where it
    doesn't count as one of the group's."""
    limits: bool = False  # whether it is RLOO as β → 0, and ½ ∇Var[ρ] as β → ∞
    tools: bool = False  # whether a tool's random output is claimed to move the fixed point
    estimates: tuple[str, int] | None = None
    """An option with three estimates, each of less variance than the one before on responses of this
    length."""

    @property
    def judged(self) -> bool:
        """Whether the first two responses of a group are judged, as Bradley–Terry has it."""
        return "pairs" in self.needs

    @property
    def grouped(self) -> bool:
        """Whether a group may be too small."""
        return bool({"groups", "pairs", "triples"} & set(self.needs))

    @property
    def min_responses(self) -> int:
        """The fewest responses that a group may have, without that of an expert."""
        minimum = max({"groups": 2, "pairs": 2, "triples": 3}.get(need, 1) for need in ("", *self.needs))
        return max(1, minimum - (self.expert in ("member", "hinted")))


def of_options(
    formula: Formula,
    needs: tuple[str, ...],
    ends: Literal["optimum", "elsewhere", "unknown"] = "elsewhere",
    updates: int = 0,
    **fields: Any,
) -> Callable[..., Claims]:
    """Claims of an objective by its options: a function `(needs, updates, **options)` of these.

    `formula` gets those of the options that it names. `needs` and `updates`: where a claim has no others.
    `fields`: what `Claims` has in all of them.
    """

    def claim(needs: tuple[str, ...] = needs, updates: int = updates, **options: Any) -> Claims:
        return Claims(given(formula, options), ends, needs, options, updates=updates, **fields)

    return claim


def given(formula: Formula, options: Mapping[str, Any]) -> Callable[[Situation], Tensor]:
    """The formula with those of the options that it names."""
    own = {key: options[key] for key in inspect.signature(formula).parameters if key in options}
    return lambda s: formula(s, **own)


def preset(claims: Claims, **options: Any) -> Claims:
    """The same of a preset, which has those options by itself but for `options`."""
    return replace(claims, options=options)
