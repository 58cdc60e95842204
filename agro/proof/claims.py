"""What each objective's source claims: the expected gradient, and where descent goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from agro.proof import formulas
from agro.proof.formulas import Situation, half_variance


@dataclass(frozen=True, eq=False)
class Claims:
    """Of an objective with `options`, whose `beta` is filled in where it has one."""

    expects: Callable[[Situation], Tensor]  # a scalar; its gradient is the expected gradient
    ends: Literal["optimum", "elsewhere", "unknown"]  # where descent goes: unknown where nothing is claimed
    options: Mapping[str, Any] = field(default_factory=dict)
    shift: bool = True  # whether adding a number to all rewards of a prompt changes nothing
    reference_shift: bool = True  # whether adding one to all log f of a prompt changes nothing
    policy_gradient: Callable[[float], float] | None = None
    """β -> the on-policy gradient over that of −E_π r + β KL(π ‖ f), where they are proportional."""
    noise: bool = True  # whether rewards that are noisy count with their mean alone
    n: tuple[int, ...] = (2, 3)
    updates: int = 600  # of the descent
    judged: bool = False  # whether the two responses of a group are judged, as Bradley–Terry has it
    limits: bool = False  # whether it is RLOO as β → 0, and ½ ∇Var[ρ] as β → ∞
    tools: bool = False  # whether a tool's random output is claimed to move the fixed point
    estimates: tuple[str, int] | None = None
    """An option with three estimates, each of less variance than the one before on responses of this
    length."""


def _one(beta: float) -> float:
    return 1.0


def _beta(beta: float) -> float:
    return beta


def _per_beta(expects: Callable[[Situation], Tensor]) -> Callable[[Situation], Tensor]:
    """In units of reward."""
    return lambda s: expects(s) / s.beta


def _of_dro(expects: Callable[[Situation], Tensor], scale: str, factor: Callable[[float], float]) -> Claims:
    """Policy and value learn at once, which takes long where the behavior policy hardly ever shows some
    response."""
    return Claims(
        expects,
        "optimum",
        {"scale": scale},
        shift=False,
        reference_shift=False,
        policy_gradient=factor,
        n=(1, 2),
        updates=3000,
    )


def _agro(**options: Any) -> Claims:
    return Claims(
        _per_beta(half_variance), "optimum", options, policy_gradient=_one, limits="scale" in options
    )


CLAIMS: dict[str, tuple[Claims, ...]] = {
    "agro": (
        Claims(
            half_variance,
            "optimum",
            {"scale": "loss"},
            policy_gradient=_beta,
            tools=True,
            estimates=("regularizer", 2),
        ),
        _agro(scale="reward"),
        _agro(regularizer="triangular"),
        _agro(regularizer="local"),
        # Statement 25. A response that the policy has left comes back slowly: its weight is small.
        Claims(
            formulas.weighted_residual,
            "optimum",
            {"weight": "reference"},
            reference_shift=False,
            updates=2000,
        ),
        # Its optimum is another: that of β/T. A number more in log f is one over the length in R.
        Claims(formulas.half_variance_of_means, "elsewhere", {"average": "token"}, reference_shift=False),
    ),
    "agro_onpolicy": (
        Claims(
            formulas.half_variance_on_policy,
            "unknown",
            {"likelihood_ratio": 1.0},
            noise=False,
            estimates=("squared", 3),
        ),
        Claims(formulas.half_variance_on_policy, "unknown", {"squared": "triangular"}, noise=False),
        Claims(formulas.half_variance_on_policy, "unknown", {"squared": "local"}, noise=False),
        Claims(
            formulas.adaptive_pairs,
            "optimum",
            {"likelihood_ratio": "adaptive"},
            noise=False,
            n=(2,),
            updates=800,
        ),
        Claims(half_variance, "optimum", {"likelihood_ratio": 0.0}, policy_gradient=_beta),
    ),
    "squared_consistency": (
        Claims(half_variance, "optimum", {"scale": "half_variance"}, policy_gradient=_beta),
        Claims(
            lambda s: 2 * (s.n - 1) / s.n / s.beta**2 * half_variance(s),
            "optimum",
            {"scale": "trajectory"},
            policy_gradient=lambda beta: 4 / (3 * beta),
        ),
        Claims(
            lambda s: 2 * s.n * half_variance(s),
            "optimum",
            {"scale": "pairs"},
            policy_gradient=lambda beta: 6 * beta,
        ),
        Claims(formulas.half_variance_to_behavior, "unknown", {"anchor": "behavior"}),
        Claims(
            formulas.soft_pairs,
            "unknown",
            {"anchor": "behavior", "baseline": "soft", "scale": "square"},
            noise=False,
            n=(2,),
        ),
        Claims(
            formulas.square_with_stored_value,
            "optimum",
            {"baseline": "stored", "scale": "square"},
            reference_shift=False,
            policy_gradient=lambda beta: 2 * beta,
            n=(1, 2),
        ),
    ),
    "dro": (
        _of_dro(formulas.dro_in_units_of_reward, "reward", _one),
        _of_dro(formulas.half_square_with_value, "loss", _beta),
    ),
    "prefix_consistency": (
        Claims(
            formulas.prefix_residuals,
            "optimum",
            {"scale": "loss"},
            shift=False,
            reference_shift=False,
            n=(1, 2),
            updates=5000,
        ),
    ),
    "rloo": (
        Claims(lambda s: formulas.advantage(s, 0.0), "elsewhere", {"beta": 0.0}),
        Claims(lambda s: formulas.advantage(s, s.beta), "optimum", policy_gradient=_one),
    ),
    "reinforce": (
        Claims(lambda s: formulas.reinforce(s, 0.0), "elsewhere", {"baseline": "none"}, shift=False),
        Claims(lambda s: formulas.reinforce(s, 0.5), "elsewhere", {"baseline": 0.5}, shift=False),
        # The group's mean includes r_i itself, which removes a share 1/n of the gradient.
        Claims(lambda s: (1 - 1 / s.n) * formulas.advantage(s, 0.0), "elsewhere", {"baseline": "mean"}),
    ),
    # The prefixes of the KL are sampled, and no gradient says so: on-policy too it ends beside the optimum.
    "kl_pg": (Claims(formulas.kl_policy_gradient, "elsewhere"),),
    # A response whose reward crosses the baseline changes its weight, so a shift and noise matter.
    "topr": (
        Claims(
            lambda s: formulas.tapered(s, 0.5),
            "elsewhere",
            {"baseline": 0.5},
            shift=False,
            noise=False,
            n=(1, 2),
        ),
    ),
    "grpo": (Claims(formulas.grpo_pairs, "elsewhere", {"beta": 0.0}, noise=False, n=(2,)),),
    "gspo": (Claims(formulas.gspo_pairs, "elsewhere", noise=False, n=(2,)),),
    "pair_consistency": (
        Claims(half_variance, "optimum", {"gap": "reward"}, policy_gradient=_beta, n=(2,), judged=True),
        # IPO: judgments that are drawn by σ(r − r') say ½ (2σ − 1), which isn't r − r'.
        Claims(formulas.ipo, "elsewhere", n=(2,), updates=200, judged=True),
    ),
    "dpo": (Claims(formulas.bradley_terry, "optimum", n=(2,), judged=True),),
    "sft": (Claims(formulas.imitation, "elsewhere", n=(1, 2)),),
}
