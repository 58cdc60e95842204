"""What each objective's source claims: the expected gradient, what it needs, and where descent goes."""

from __future__ import annotations

from dataclasses import replace

from agro.proof import formulas
from agro.proof.claim import Claims
from agro.proof.families import (
    BEHAVIOR,
    FRESH,
    GROUPED,
    JUDGED,
    OLD,
    REGULARIZED,
    imitating,
    itself,
    of_agro,
    of_dro,
    of_onpolicy,
    of_prefixes,
    of_ratio,
    of_reinforce,
    of_soft,
    of_squares,
    of_topr,
    one,
    weighted,
)
from agro.proof.formulas import half_variance

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
        of_agro(GROUPED, scale="reward"),
        of_agro(FRESH, regularizer="triangular"),
        of_agro((*FRESH, "kl"), regularizer="local"),
        weighted(of_agro(GROUPED), "reference"),
        weighted(of_agro(GROUPED), "reference", 4.0),
        weighted(of_agro(GROUPED), "behavior", 4.0, updates=0),
        imitating(of_agro(GROUPED), formulas.is_best),
        imitating(
            weighted(of_agro(GROUPED), "reference"),
            lambda s: (s.reward >= 0.5).double(),
            shift=False,
            imitation_reward=0.5,
        ),
        # Its optimum is another: that of β/T. A number more in log f is one over the length in R.
        Claims(
            formulas.half_variance_of_means, "elsewhere", GROUPED, {"average": "token"}, reference_shift=False
        ),
        Claims(
            lambda s: formulas.advantage(s, 0.0), "elsewhere", ("reward", "groups"), {"beta": 0.0}, updates=0
        ),
    ),
    "agro_onpolicy": (
        of_onpolicy(likelihood_ratio=1.0),
        of_onpolicy(squared="triangular"),
        of_onpolicy(squared="local"),
        Claims(
            formulas.adaptive,
            "optimum",
            FRESH,
            {"likelihood_ratio": "adaptive"},
            noise=False,
            updates=800,
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
        of_squares(lambda s: 1.0, "half_variance", 1.0, 1),
        of_squares(lambda s: 2 * (s.n - 1) / s.n / s.beta**2, "trajectory", 4 / 3, -1),
        of_squares(lambda s: 2.0 * s.n, "pairs", 6.0, 1),
        weighted(of_squares(lambda s: 1.0, "half_variance", 1.0, 1), "reference", updates=0),
        Claims(formulas.half_variance_to_behavior, "unknown", BEHAVIOR, {"anchor": "behavior"}),
        of_soft(lambda s: formulas.soft_maxima(s, s.beta), updates=600),
        of_soft(lambda s: formulas.soft_maxima(s, 0.7), updates=0, value_beta=0.7),
        Claims(
            formulas.square_with_stored_value,
            "optimum",
            (*REGULARIZED, "stored_value"),
            {"baseline": "stored", "scale": "square"},
            reference_shift=False,
            policy_gradient=lambda beta: 2 * beta,
            n=(1, 2),
        ),
    ),
    "dro": (
        of_dro(lambda beta: 1 / beta, "reward"),
        of_dro(one, "loss"),
        weighted(of_dro(lambda beta: 1 / beta, "reward"), "reference", updates=0),
    ),
    "prefix_consistency": (
        of_prefixes(one, "loss", updates=5000),
        of_prefixes(lambda beta: 1 / beta, "reward", updates=0),
    ),
    "rloo": (
        Claims(lambda s: formulas.advantage(s, 0.0), "elsewhere", ("reward", "groups"), {"beta": 0.0}),
        Claims(lambda s: formulas.advantage(s, s.beta), "optimum", GROUPED, policy_gradient=one),
        weighted(Claims(lambda s: formulas.advantage(s, s.beta), "optimum", GROUPED), "reference", 4.0, 0),
    ),
    "reinforce": (
        of_reinforce(0.0, baseline="none"),
        of_reinforce(0.5, baseline=0.5),
        # The group's mean includes r_i itself, which removes a share 1/n of the gradient.
        Claims(
            lambda s: (1 - 1 / s.n) * formulas.advantage(s, 0.0),
            "elsewhere",
            ("reward", "groups"),
            {"baseline": "mean"},
        ),
    ),
    # The prefixes of the KL are sampled, and no gradient says so: on-policy too it ends beside the optimum.
    "kl_pg": (Claims(formulas.kl_policy_gradient, "elsewhere", ("reward", "groups", "kl")),),
    "topr": (
        of_topr(formulas.tapered),
        of_topr(
            lambda s: formulas.tapered(s, "mean", (0.8, 1.1), (0.3, 0.9)),
            updates=0,
            ratio="mean",
            positive=(0.8, 1.1),
            negative=(0.3, 0.9),
        ),
        of_topr(lambda s: formulas.tapered(s, "token"), updates=0, ratio="token"),
    ),
    "grpo": (
        of_ratio(formulas.grpo, updates=600, beta=0.0),
        replace(
            of_ratio(lambda s: formulas.grpo(s) + s.beta * formulas.k3(s), (*BEHAVIOR, "ref_logp")),
            reference_shift=False,
        ),
        of_ratio(
            lambda s: formulas.grpo(s, 0.9, 1.4, std=False),
            OLD,
            beta=0.0,
            ratio="old",
            clip=(0.1, 0.4),
            std=False,
        ),
    ),
    "gspo": (
        of_ratio(formulas.gspo, updates=600),
        of_ratio(
            lambda s: formulas.gspo(s, 0.9, 1.4, std=False), OLD, ratio="old", clip=(0.1, 0.4), std=False
        ),
    ),
    "pair_consistency": (
        Claims(
            half_variance, "optimum", (*JUDGED, "reward"), {"gap": "reward"}, policy_gradient=itself, n=(2,)
        ),
        weighted(
            Claims(half_variance, "optimum", (*JUDGED, "reward"), {"gap": "reward"}, n=(2,)), "reference"
        ),
        # IPO: judgments that are drawn by σ(r − r') say ½ (2σ − 1), which isn't r − r'.
        Claims(formulas.ipo, "elsewhere", JUDGED, n=(2,), updates=200),
        # Three votes of four say ⅔ after the uniform prior.
        Claims(
            lambda s: formulas.ipo(s, 0.8 / 3),
            "elsewhere",
            (*JUDGED, "votes"),
            {"gap": 0.8, "votes": "mean"},
            n=(2,),
            updates=0,
        ),
    ),
    "dpo": (
        Claims(formulas.bradley_terry, "optimum", JUDGED, n=(2,)),
        weighted(Claims(formulas.bradley_terry, "optimum", JUDGED, n=(2,)), "reference"),
        imitating(Claims(formulas.bradley_terry, "optimum", JUDGED, n=(2,)), formulas.wins),
        Claims(
            lambda s: formulas.bradley_terry(s, 0.9),
            "unknown",
            JUDGED,
            {"label_smoothing": 0.1},
            n=(2,),
            updates=0,
        ),
        Claims(
            lambda s: formulas.bradley_terry(s, 2 / 3),
            "unknown",
            (*JUDGED, "votes"),
            {"votes": "mean"},
            n=(2,),
            updates=0,
        ),
    ),
    "sft": (
        Claims(formulas.imitation, "elsewhere", (), n=(1, 2)),
        weighted(Claims(formulas.imitation, "elsewhere", (), n=(1, 2)), "reference", updates=0),
    ),
}
