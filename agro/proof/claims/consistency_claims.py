"""Claims of agro.objectives.methods.consistency."""

from __future__ import annotations

from dataclasses import replace

from agro.proof import formulas
from agro.proof.claim import DESCENT, Claims
from agro.proof.ends import LAMBERT, OF_SAMPLER, PER_TOKEN, SHIFTED_LAMBERT
from agro.proof.families import (
    BEHAVIOR,
    FRESH,
    GROUPED,
    OLD,
    REGULARIZED,
    agro_claims,
    baseline_claims,
    corrected,
    dro_claims,
    imitating,
    itself,
    one,
    onpolicy_claims,
    pulled,
    soft_claims,
    squares_claims,
    step_claims,
    stored_claims,
    weighted,
)
from agro.proof.formulas import CorrectionWeight, half_variance, square_to_reward
from agro.proof.measuring import BETA


def _to_reward(shift: float, baseline: str) -> Claims:
    return Claims(
        lambda s: square_to_reward(s, s.d, shift),
        "elsewhere",
        GROUPED,
        {"baseline": baseline, "scale": "square"},
        reference_shift=False,
        updates=0,
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
VARGRAD = squares_claims(lambda s: 2 * (s.n - 1) / s.n / s.beta**2, "trajectory", 4 / 3, -1)
COPG = squares_claims(lambda s: 2.0 * s.n, "pairs", 6.0, 1)

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
        agro_claims(GROUPED, scale="reward"),
        agro_claims(FRESH, regularizer="triangular"),
        agro_claims((*FRESH, "kl"), regularizer="local"),
        agro_claims(
            (*GROUPED, "behavior_logp", "of_reference", "ref_mean", "ref_square"), regularizer="reference"
        ),
        weighted(agro_claims(GROUPED), "reference"),
        weighted(agro_claims(GROUPED), "reference", 4.0),
        weighted(agro_claims(GROUPED), "behavior", 4.0, updates=0),
        baseline_claims("lower", 1.0),
        baseline_claims("lower", 2.0),
        baseline_claims("weighted", 1.0, 0.5),
        baseline_claims("optimal", 1.0, 0.5),
        baseline_claims("balanced", 1.0, 0.5),
        baseline_claims("optimal", 1.0, 0.5, normalize="group"),
        baseline_claims("optimal"),
        baseline_claims("balanced"),
        *(
            corrected(agro_claims(GROUPED), CorrectionWeight("mismatch", 1.5, 0.6, level, rule))
            for level in ("token", "sequence", "mean")
            for rule in ("truncate", "mask")
        ),
        imitating(agro_claims(GROUPED), formulas.is_best),
        imitating(
            weighted(agro_claims(GROUPED), "reference"),
            lambda s: (s.reward >= 0.5).double(),
            shift=False,
            imitation_reward=0.5,
        ),
        pulled(
            agro_claims(GROUPED), lambda s: -0.3 * s.mean(s.policy.logp()), noise=True, baseline_shift=0.3
        ),
        stored_claims(),
        step_claims(),
        # Its optimum is another: that of β/T. A number more in log f is one over the length in R.
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
        onpolicy_claims(likelihood_ratio=1.0),
        onpolicy_claims(squared="triangular"),
        onpolicy_claims(squared="local"),
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
        squares_claims(lambda s: 1.0, "half_variance", 1.0, 1),
        VARGRAD,
        COPG,
        weighted(squares_claims(lambda s: 1.0, "half_variance", 1.0, 1), "reference", updates=0),
        Claims(
            formulas.half_variance_to_behavior, "unknown", BEHAVIOR, {"anchor": "behavior"}, end=OF_SAMPLER
        ),
        Claims(formulas.half_variance_to_behavior, "unknown", OLD, {"anchor": "old"}, updates=0),
        _to_reward(0.0, "reward"),
        _to_reward(1.0, "lowered"),
        soft_claims(lambda s: formulas.soft_maxima(s, s.beta), updates=600),
        soft_claims(lambda s: formulas.soft_maxima(s, 0.7), updates=0, value_beta=0.7),
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
    "vargrad": (replace(VARGRAD, options={}),),
    "copg": (replace(COPG, options={}),),
    "rebel": (
        Claims(lambda s: 2.0 * s.n * formulas.half_variance_to_behavior(s), "unknown", OLD, updates=DESCENT),
    ),
    "kimi": (
        Claims(
            lambda s: square_to_reward(s, s.e_tokens.sum(2)), "elsewhere", BEHAVIOR, updates=300, end=LAMBERT
        ),
    ),
    "kimi_shifted": (
        Claims(
            lambda s: square_to_reward(s, s.e_tokens.sum(2), 1.0),
            "elsewhere",
            BEHAVIOR,
            updates=300,
            end=SHIFTED_LAMBERT,
        ),
    ),
    "oapl": (
        replace(
            soft_claims(lambda s: formulas.soft_maxima(s, s.beta), updates=DESCENT),
            options={"beta": BETA, "value_beta": BETA},
        ),
    ),
    "apo": (replace(STORED_SQUARE, options={"beta": BETA}),),
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
    "dro": (
        dro_claims(lambda beta: 1 / beta, "reward"),
        dro_claims(one, "loss"),
        weighted(dro_claims(lambda beta: 1 / beta, "reward"), "reference", updates=0),
    ),
}
