"""What is claimed of an objective, and what several objectives, or several options of one, have in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from agro.io import plugins
from agro.objectives.needs import NEEDS, Need, grouping, least_responses
from agro.proof import formulas
from agro.proof.formulas import CorrectionWeight, Situation, optimal_baseline

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

    def __post_init__(self) -> None:
        plugins.check_names("Claims: needs", self.needs, NEEDS, tuple)

    @property
    def judged(self) -> bool:
        """Whether the first two responses of a group are judged, as Bradley–Terry has it."""
        return "pairs" in self.needs

    @property
    def grouped(self) -> bool:
        """Whether a group may be too small."""
        return grouping(self._needs) is not None

    @property
    def min_responses(self) -> int:
        """The fewest responses that a group may have, without that of an expert."""
        return max(1, least_responses(self._needs) - (self.expert in ("member", "hinted")))

    @property
    def _needs(self) -> list[Need]:
        return [need for need in NEEDS if need in self.needs]


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


REGULARIZED = ("reward", "ref_logp")
GROUPED = ("reward", "ref_logp", "groups")
FRESH = (*GROUPED, "fresh")
BEHAVIOR = ("reward", "behavior_logp", "groups")
OLD = ("reward", "old_logp", "groups")
JUDGED = ("pairs", "ref_logp")


def one(beta: float) -> float:
    return 1.0


def itself(beta: float) -> float:
    return beta


# With V* as the baseline: −E_μ (R − V*) ∇log π. Another value has the same on-policy gradient, and another
# end off-policy.
STORED = Claims(
    lambda s: 0.5 * formulas.square_with_stored_value(s) / s.beta,
    "optimum",
    (*REGULARIZED, "stored_value"),
    {"baseline": "stored"},
    reference_shift=False,
    policy_gradient=one,
    n=(1, 2),
)
# With the mean of the step's other groups. That its expected gradient on fresh samples is the policy
# gradient, with noise too, is enumerated over independent groups in tests/objectives.
STEP = Claims(
    formulas.against_other_groups,
    "unknown",
    REGULARIZED,
    {"baseline": "step"},
    shift=False,
    reference_shift=False,
    noise=False,
    n=(2,),  # the formula has other groups of the same size
    updates=0,
)


def weighted(claims: Claims, weight: str, maximum: float = 1.0, updates: int = 600) -> Claims:
    """Statement 25: the optimum stays. A response that the policy has left comes back slowly: its weight is
    small."""
    changed = corrected(claims, CorrectionWeight(weight, maximum), ends=claims.ends)  # type: ignore[arg-type]
    return replace(changed, updates=updates)


def moved(claims: Claims) -> Claims:
    """The same, where a number more in log f of a prompt makes a difference."""
    return replace(claims, reference_shift=False)


def baseline_claims(
    maximum: float | None = None,
    power: float = 1.0,
    updates: int = 600,
    normalize: Literal["none", "group"] = "none",
) -> Claims:
    """Statement 26, with a weight where `maximum` is given."""
    options: dict[str, Any] = {"weight_baseline": "optimal"}
    if maximum is not None:
        weight = {"weight": "reference", "weight_max": maximum, "weight_power": power}
        options |= {**weight, "weight_normalize": normalize}
    return Claims(
        lambda s: optimal_baseline(s, maximum, power, normalize == "group"),
        "optimum",
        GROUPED,
        options,
        reference_shift=maximum is None,
        n=(2, 3),
        updates=updates,
    )


RATIOS = {
    "reference": ("ref_logp",),
    "behavior": ("behavior_logp",),
    "mismatch": ("behavior_logp", "old_logp"),
}


def corrected(
    claims: Claims, correction: CorrectionWeight, ends: Literal["optimum", "elsewhere", "unknown"] = "unknown"
) -> Claims:
    """With a correction weight."""
    return replace(
        claims,
        expects=correction(claims.expects),
        ends=ends,
        needs=tuple(dict.fromkeys([*claims.needs, *RATIOS[correction.weight]])),
        options={
            **claims.options,
            "weight": correction.weight,
            "weight_max": correction.maximum,
            "weight_min": correction.minimum,
            "weight_level": correction.level,
            "weight_rule": correction.rule,
        },
        reference_shift=claims.reference_shift and correction.weight != "reference",
        policy_gradient=None,
        limits=False,
        drifted=correction.weight == "mismatch",
        updates=0,
    )


def imitating(claims: Claims, k: Formula) -> Claims:
    """With a share of imitation of responses that are chosen with probability k [X,Y]. Its end is another."""
    return pulled(claims, lambda s: 0.7 * formulas.imitation(s, k(s)), imitation=0.7)


def pulled(claims: Claims, more: Formula, noise: bool = False, **options: Any) -> Claims:
    """With more in the loss, which moves its end."""
    return replace(
        claims,
        expects=lambda s: claims.expects(s) + more(s),
        ends="unknown",
        options={**claims.options, **options},
        noise=noise,
        policy_gradient=None,
        limits=False,
        n=(2,),
        updates=0,
    )


def of_ratios(formula: Formula, average: str = "response") -> Callable[..., Claims]:
    """Claims by options of an objective with ratios, `average` by default.

    Where a ratio is clipped, or rewards are standardized, their noise matters. Where the mean is over all
    tokens of a step, its groups have one size.
    """

    def claim(
        needs: tuple[str, ...] = BEHAVIOR,
        updates: int = 0,
        *,
        penalty: Formula | None = None,  # times β
        drifted: bool = False,
        **options: Any,
    ) -> Claims:
        plain = given(formula, options)
        return Claims(
            plain if penalty is None else lambda s: plain(s) + s.beta * penalty(s),
            "elsewhere",
            needs,
            options,
            reference_shift="ref_logp" not in needs,
            noise=False,
            n=(2,) if options.get("average", average) == "token" else (2, 3),
            drifted=drifted,
            updates=updates,
        )

    return claim
