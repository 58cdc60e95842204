"""Claims of agro.objectives.methods.consistency."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from agro.proof import formulas
from agro.proof.claim import (
    BEHAVIOR,
    DESCENT,
    FRESH,
    GROUPED,
    OLD,
    REGULARIZED,
    STEP,
    STORED,
    Claims,
    baseline_claims,
    corrected,
    imitating,
    itself,
    of_options,
    one,
    preset,
    pulled,
    weighted,
)
from agro.proof.ends import LAMBERT, OF_SAMPLER, PER_TOKEN
from agro.proof.formulas import CorrectionWeight, Situation, half_variance, square_to_reward
from agro.proof.measuring import BETA


def in_rewards(s: Situation) -> Tensor:
    """In units of reward."""
    return half_variance(s) / s.beta


def squares(s: Situation, scale: str) -> Tensor:
    factor = {"half_variance": 1.0, "trajectory": 2 * (s.n - 1) / s.n / s.beta**2, "pairs": 2.0 * s.n}[scale]
    return factor * half_variance(s)


def soft(s: Situation, value_beta: float | None = None) -> Tensor:
    return formulas.soft_maxima(s, value_beta or s.beta)


of_agro = of_options(in_rewards, GROUPED, "optimum", 400, policy_gradient=one)
of_tokens = of_options(in_rewards, FRESH, "optimum", 400, policy_gradient=one, episodes=False)
onpolicy = of_options(formulas.half_variance_on_policy, FRESH, "unknown", 400, noise=False, episodes=False)
of_squares = of_options(squares, GROUPED, "optimum", 400)
of_soft = of_options(soft, BEHAVIOR, "unknown", noise=False)
# Policy and value learn at once, which takes long if the behavior policy rarely samples some response.
DRO = Claims(
    formulas.half_square_with_value,
    "optimum",
    (*REGULARIZED, "value"),
    shift=False,
    reference_shift=False,
    policy_gradient=one,
    n=(1, 2),
    updates=600,
)
STORED_SQUARE = Claims(
    formulas.square_with_stored_value,
    "optimum",
    (*REGULARIZED, "stored_value"),
    {"baseline": "stored", "scale": "square"},
    reference_shift=False,
    policy_gradient=lambda beta: 2 * beta,
    n=(1, 2),
)
# The factors are those of groups of three.
HALF_VARIANCE = replace(of_squares(scale="half_variance"), policy_gradient=itself)
VARGRAD = replace(of_squares(scale="trajectory"), policy_gradient=lambda beta: 4 / 3 * beta**-1)
COPG = replace(of_squares(scale="pairs"), policy_gradient=lambda beta: 6.0 * beta)
SOFT = {"anchor": "behavior", "baseline": "soft", "scale": "square"}

CLAIMS: dict[str, tuple[Claims, ...]] = {
    "agro": (
        Claims(
            half_variance,
            "optimum",
            GROUPED,
            {"scale": "loss"},
            policy_gradient=itself,
            tools=True,
            estimates=("regularizer", 2),
        ),
        replace(of_agro(scale="reward"), limits=True),
        of_tokens(regularizer="triangular"),
        of_tokens((*FRESH, "kl"), regularizer="local"),
        of_tokens(
            (*GROUPED, "behavior_logp", "of_reference", "ref_mean", "ref_square"), regularizer="reference"
        ),
        weighted(of_agro(), "reference"),
        weighted(of_agro(), "reference", 4.0),
        weighted(of_agro(), "behavior", 4.0, updates=0),
        baseline_claims(2.0),
        baseline_claims(1.0, 0.5),
        baseline_claims(1.0, 0.5, normalize="group"),
        baseline_claims(),
        *(
            corrected(of_agro(), CorrectionWeight("mismatch", 1.5, 0.6, level, rule))
            for level in ("token", "sequence", "mean")
            for rule in ("truncate", "mask")
        ),
        imitating(of_agro(), formulas.is_best),
        pulled(of_agro(), lambda s: -0.3 * s.mean(s.policy.logp()), noise=True, baseline_shift=0.3),
        STORED,
        STEP,
        # Its optimum differs: it has β/T for β. A number added to log f is divided by the length in R.
        Claims(
            formulas.half_variance_of_means,
            "elsewhere",
            GROUPED,
            {"average": "token"},
            reference_shift=False,
            end=PER_TOKEN,
        ),
        Claims(
            lambda s: formulas.advantage(s, 0.0), "elsewhere", ("reward", "groups"), {"beta": 0.0}, updates=0
        ),
    ),
    "agro_onpolicy": (
        replace(onpolicy(likelihood_ratio=1.0), episodes=True, estimates=("squared", 3)),
        onpolicy(squared="triangular"),
        onpolicy((*FRESH, "kl"), squared="local"),
        Claims(
            formulas.adaptive, "optimum", FRESH, {"likelihood_ratio": "adaptive"}, noise=False, updates=600
        ),
        Claims(half_variance, "optimum", FRESH, {"likelihood_ratio": 0.0}, policy_gradient=itself),
        Claims(
            formulas.baseline_for_squares,
            "unknown",
            (*REGULARIZED, "triples", "fresh"),
            {"baseline": True},
            noise=False,
            n=(3, 4),
            updates=0,
        ),
    ),
    "squared_consistency": (
        HALF_VARIANCE,
        VARGRAD,
        COPG,
        weighted(HALF_VARIANCE, "reference", updates=0),
        Claims(
            formulas.half_variance_to_behavior, "unknown", BEHAVIOR, {"anchor": "behavior"}, end=OF_SAMPLER
        ),
        Claims(formulas.half_variance_to_behavior, "unknown", OLD, {"anchor": "old"}, updates=0),
        Claims(
            lambda s: square_to_reward(s, s.d),
            "elsewhere",
            GROUPED,
            {"baseline": "reward", "scale": "square"},
            reference_shift=False,
            updates=0,
        ),
        of_soft(updates=600, **SOFT),
        of_soft(**SOFT, value_beta=0.7),
        STORED_SQUARE,
    ),
    "gvpo": (
        Claims(
            lambda s: formulas.half_variance_to_behavior(replace(s, beta=0.1)), "unknown", BEHAVIOR, updates=0
        ),
        Claims(
            formulas.half_variance_to_behavior,
            "unknown",
            BEHAVIOR,
            {"beta": BETA},
            updates=300,
            end=OF_SAMPLER,
        ),
    ),
    "vargrad": (preset(VARGRAD),),
    "copg": (preset(COPG),),
    "rebel": (
        Claims(lambda s: 2.0 * s.n * formulas.half_variance_to_behavior(s), "unknown", OLD, updates=DESCENT),
    ),
    "kimi": (Claims(lambda s: square_to_reward(s, s.e), "elsewhere", BEHAVIOR, updates=300, end=LAMBERT),),
    "oapl": (preset(of_soft(updates=DESCENT), beta=BETA, value_beta=BETA),),
    "apo": (preset(STORED_SQUARE, beta=BETA),),
    "qrpo": (
        Claims(
            formulas.square_of_quantile,
            "elsewhere",
            ("ref_logp", "stored_quantile"),
            reference_shift=False,
            noise=False,
            n=(1, 2),
            updates=DESCENT,
        ),
    ),
    "dro": (DRO, weighted(DRO, "reference", updates=0)),
}
