"""What is claimed of an objective, and the parts that claims of several objectives or options share."""

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

# Updates of a descent that isn't claimed to converge: by then agro, from the reference on any data with full
# support, is within 1e-4 nats of the optimum.
DESCENT = 200
Formula = Callable[..., Tensor]  # takes a situation, and options by name


@dataclass(frozen=True)
class End:
    """A policy at which descent ends, in words and as log-probs [X,Y] of responses."""

    name: str
    of: Callable[[Situation], Tensor]


@dataclass(frozen=True, eq=False)
class Claims:
    """Claims of an objective with `options`, plus `beta` if it has one."""

    expects: Callable[[Situation], Tensor]  # a scalar; its gradient is the expected gradient
    ends: Literal["optimum", "elsewhere", "unknown"]  # where descent goes; unknown: no claim
    needs: tuple[str, ...]  # all that it reads of the data, besides the policy's log-probs
    options: Mapping[str, Any] = field(default_factory=dict)
    shift: bool = True  # whether adding a number to all rewards of a prompt changes nothing
    reference_shift: bool = True  # whether adding a number to all log f of a prompt changes nothing
    policy_gradient: Callable[[float], float] | None = None
    """β -> the on-policy gradient divided by that of −E_π r + β KL(π ‖ f), if they are proportional."""
    noise: bool = True  # whether noisy rewards count only with their mean
    n: tuple[int, ...] = (2, 3)
    episodes: bool = True  # whether a response may be in several rows; else they are refused
    drifted: bool = False  # whether the policy when the batch was drawn differs from the behavior
    updates: int = 400  # of the descent; 0: none
    end: End | None = None  # where descent on others' samples goes, if not to the optimum
    expert: Literal["none", "apart", "member", "hinted"] = "none"
    """Whether each group has one more response, of role "expert" or of the policy with a hint; "apart" if it
    doesn't count as one of the group."""
    limits: bool = False  # whether it is RLOO as β → 0, and ½ ∇Var[ρ] as β → ∞
    tools: bool = False  # whether random tool output is claimed to move the fixed point
    estimates: tuple[str, int] | None = None
    """An option with three estimates, of decreasing variance on responses of this length."""

    def __post_init__(self) -> None:
        plugins.check_names("Claims: needs", self.needs, NEEDS, tuple)

    @property
    def judged(self) -> bool:
        """Whether the first two responses of a group are judged, by the Bradley–Terry model."""
        return "pairs" in self.needs

    @property
    def grouped(self) -> bool:
        """Whether a group may be too small."""
        return grouping(self._needs) is not None

    @property
    def min_responses(self) -> int:
        """The fewest responses that a group may have, without an expert's."""
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
    """Make a function `(needs, updates, **options)` of an objective's claims.

    `formula` gets the options that it names. `needs` and `updates` are the defaults of a claim. `fields` are
    fields of `Claims` that all claims share.
    """

    def claim(needs: tuple[str, ...] = needs, updates: int = updates, **options: Any) -> Claims:
        return Claims(given(formula, options), ends, needs, options, updates=updates, **fields)

    return claim


def given(formula: Formula, options: Mapping[str, Any]) -> Callable[[Situation], Tensor]:
    """The formula with the options that it names."""
    accepted = {key: options[key] for key in inspect.signature(formula).parameters if key in options}
    return lambda s: formula(s, **accepted)


def preset(claims: Claims, **options: Any) -> Claims:
    """The same claims of a preset, which sets their options itself, except for `options`."""
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


# With V* as the baseline: −E_μ (R − V*) ∇log π. Another value has the same on-policy gradient, but another
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
# With the mean of the step's other groups. tests/objectives enumerates independent groups to show that the
# expected gradient on fresh samples is the policy gradient, even with noise.
STEP = Claims(
    formulas.against_other_groups,
    "unknown",
    REGULARIZED,
    {"baseline": "step"},
    shift=False,
    reference_shift=False,
    noise=False,
    n=(2,),  # the formula assumes other groups of the same size
    updates=0,
)


def weighted(claims: Claims, weight: str, maximum: float = 1.0, updates: int = 600) -> Claims:
    """Statement 25: the optimum stays. A response that became improbable comes back slowly, since its weight
    is small."""
    changed = corrected(claims, CorrectionWeight(weight, maximum), ends=claims.ends)  # type: ignore[arg-type]
    return replace(changed, updates=updates)


def moved(claims: Claims) -> Claims:
    """The same claims, except that adding a number to log f of a prompt makes a difference."""
    return replace(claims, reference_shift=False)


def baseline_claims(
    maximum: float | None = None,
    power: float = 1.0,
    updates: int = 600,
    normalize: Literal["none", "group"] = "none",
) -> Claims:
    """Statement 26, with a weight if `maximum` is given."""
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
    """The claims with a correction weight."""
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
    """With a share of imitation of responses chosen with probability k [X,Y], which moves the end."""
    return pulled(claims, lambda s: 0.7 * formulas.imitation(s, k(s)), imitation=0.7)


def pulled(claims: Claims, term: Formula, noise: bool = False, **options: Any) -> Claims:
    """With a `term` added to the loss, which moves the end."""
    return replace(
        claims,
        expects=lambda s: claims.expects(s) + term(s),
        ends="unknown",
        options={**claims.options, **options},
        noise=noise,
        policy_gradient=None,
        limits=False,
        n=(2,),
        updates=0,
    )


def of_ratios(formula: Formula, average: str = "response") -> Callable[..., Claims]:
    """Make claims, by options, of an objective with ratios, whose default is `average`.

    Noise in rewards matters, since ratios are clipped or rewards standardized. With a mean over all tokens of
    a step, its groups have one size.
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
