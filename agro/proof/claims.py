"""What each objective's source claims: the expected gradient, what it needs, and where descent goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from agro.proof import formulas
from agro.proof.claim import Claims
from agro.proof.formulas import Situation, half_variance

REGULARIZED = ("reward", "ref_logp")
GROUPED = ("reward", "ref_logp", "groups")
FRESH = (*GROUPED, "fresh")
BEHAVIOR = ("reward", "behavior_logp", "groups")
OLD = ("reward", "old_logp", "groups")
JUDGED = ("pairs", "ref_logp")


def _one(beta: float) -> float:
    return 1.0


def _beta(beta: float) -> float:
    return beta


def _per_beta(expects: Callable[[Situation], Tensor]) -> Callable[[Situation], Tensor]:
    """In units of reward."""
    return lambda s: expects(s) / s.beta


def _agro(needs: tuple[str, ...], **options: Any) -> Claims:
    return Claims(
        _per_beta(half_variance),
        "optimum",
        needs,
        options,
        policy_gradient=_one,
        limits="scale" in options,
        episodes="regularizer" not in options,
    )


def _weighted(of: Claims, weight: str, most: float = 1.0, updates: int = 2000) -> Claims:
    """Statement 25: the optimum stays. A response that the policy has left comes back slowly: its weight is
    small."""
    return replace(
        of,
        expects=formulas.weighted(of.expects, weight, most),
        needs=tuple(dict.fromkeys([*of.needs, "ref_logp" if weight == "reference" else "behavior_logp"])),
        options={**of.options, "weight": weight, "weight_max": most},
        reference_shift=of.reference_shift and weight == "behavior",
        policy_gradient=None,
        limits=False,
        updates=updates,
    )


def _imitating(of: Claims, k: Callable[[Situation], Tensor], shift: bool = True, **options: Any) -> Claims:
    """With a share of imitation of responses that are chosen with probability k [X,Y]. Its end is another."""
    share = 0.7
    return replace(
        of,
        expects=lambda s: of.expects(s) + share * formulas.imitation(s, k(s)),
        ends="unknown",
        options={**of.options, "imitation": share, **options},
        shift=shift,
        noise=False,
        policy_gradient=None,
        limits=False,
        n=(2,),
        updates=0,
    )


def _onpolicy(**options: Any) -> Claims:
    plain = options.get("squared", "sequence") == "sequence"
    return Claims(
        formulas.half_variance_on_policy,
        "unknown",
        (*FRESH, "kl") if options.get("squared") == "local" else FRESH,
        options,
        noise=False,
        episodes=plain,
        estimates=("squared", 3) if plain else None,
    )


def _squares(factor: Callable[[Situation], float], scale: str, policy_gradient: float, power: int) -> Claims:
    """`policy_gradient` · β^power of groups of three."""
    return Claims(
        lambda s: factor(s) * half_variance(s),
        "optimum",
        GROUPED,
        {"scale": scale},
        policy_gradient=lambda beta: policy_gradient * beta**power,
    )


def _soft(expects: Callable[[Situation], Tensor], updates: int, **options: Any) -> Claims:
    chosen = {"anchor": "behavior", "baseline": "soft", "scale": "square", **options}
    return Claims(expects, "unknown", BEHAVIOR, chosen, noise=False, updates=updates)


def _of_dro(slope: Callable[[float], float], scale: str) -> Claims:
    """Policy and value learn at once, which takes long where the behavior policy hardly ever shows some
    response."""
    return Claims(
        lambda s: formulas.half_square_with_value(s, slope(s.beta)),
        "optimum",
        (*REGULARIZED, "value"),
        {"scale": scale},
        shift=False,
        reference_shift=False,
        policy_gradient=lambda beta: slope(beta) * beta,
        n=(1, 2),
        updates=3000,
    )


def _of_prefixes(slope: Callable[[float], float], scale: str, updates: int) -> Claims:
    return Claims(
        lambda s: formulas.prefix_residuals(s, slope(s.beta)),
        "optimum",
        (*REGULARIZED, "prefix_value"),
        {"scale": scale},
        shift=False,
        reference_shift=False,
        n=(1, 2),
        episodes=False,
        updates=updates,
    )


def _reinforce(constant: float, **options: Any) -> Claims:
    return Claims(lambda s: formulas.reinforce(s, constant), "elsewhere", ("reward",), options, shift=False)


def _topr(expects: Callable[[Situation], Tensor], updates: int = 600, **options: Any) -> Claims:
    """A response whose reward crosses the baseline changes its weight, so a shift and noise matter."""
    return Claims(
        expects,
        "elsewhere",
        ("reward", "behavior_logp"),
        {"baseline": 0.5, **options},
        shift=False,
        noise=False,
        n=(1, 2),
        updates=updates,
    )


def _ratio(
    expects: Callable[[Situation], Tensor],
    needs: tuple[str, ...] = BEHAVIOR,
    updates: int = 0,
    **options: Any,
) -> Claims:
    """Of grpo and gspo. Where a ratio is clipped, or rewards are standardized, their noise matters."""
    return Claims(expects, "elsewhere", needs, options, noise=False, updates=updates)


CLAIMS: dict[str, tuple[Claims, ...]] = {
    "agro": (
        Claims(
            half_variance,
            "optimum",
            GROUPED,
            {"scale": "loss"},
            policy_gradient=_beta,
            tools=True,
            estimates=("regularizer", 2),
        ),
        _agro(GROUPED, scale="reward"),
        _agro(FRESH, regularizer="triangular"),
        _agro((*FRESH, "kl"), regularizer="local"),
        _weighted(_agro(GROUPED), "reference"),
        _weighted(_agro(GROUPED), "reference", 4.0),
        _weighted(_agro(GROUPED), "behavior", 4.0, updates=0),
        _imitating(_agro(GROUPED), formulas.is_best),
        _imitating(
            _weighted(_agro(GROUPED), "reference"),
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
        _onpolicy(likelihood_ratio=1.0),
        _onpolicy(squared="triangular"),
        _onpolicy(squared="local"),
        Claims(
            formulas.adaptive,
            "optimum",
            FRESH,
            {"likelihood_ratio": "adaptive"},
            noise=False,
            updates=800,
        ),
        Claims(half_variance, "optimum", FRESH, {"likelihood_ratio": 0.0}, policy_gradient=_beta),
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
        _squares(lambda s: 1.0, "half_variance", 1.0, 1),
        _squares(lambda s: 2 * (s.n - 1) / s.n / s.beta**2, "trajectory", 4 / 3, -1),
        _squares(lambda s: 2.0 * s.n, "pairs", 6.0, 1),
        _weighted(_squares(lambda s: 1.0, "half_variance", 1.0, 1), "reference", updates=0),
        Claims(formulas.half_variance_to_behavior, "unknown", BEHAVIOR, {"anchor": "behavior"}),
        _soft(lambda s: formulas.soft_maxima(s, s.beta), updates=600),
        _soft(lambda s: formulas.soft_maxima(s, 0.7), updates=0, value_beta=0.7),
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
        _of_dro(lambda beta: 1 / beta, "reward"),
        _of_dro(_one, "loss"),
        _weighted(_of_dro(lambda beta: 1 / beta, "reward"), "reference", updates=0),
    ),
    "prefix_consistency": (
        _of_prefixes(_one, "loss", updates=5000),
        _of_prefixes(lambda beta: 1 / beta, "reward", updates=0),
    ),
    "rloo": (
        Claims(lambda s: formulas.advantage(s, 0.0), "elsewhere", ("reward", "groups"), {"beta": 0.0}),
        Claims(lambda s: formulas.advantage(s, s.beta), "optimum", GROUPED, policy_gradient=_one),
        _weighted(Claims(lambda s: formulas.advantage(s, s.beta), "optimum", GROUPED), "reference", 4.0, 0),
    ),
    "reinforce": (
        _reinforce(0.0, baseline="none"),
        _reinforce(0.5, baseline=0.5),
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
        _topr(formulas.tapered),
        _topr(
            lambda s: formulas.tapered(s, "mean", (0.8, 1.1), (0.3, 0.9)),
            updates=0,
            ratio="mean",
            positive=(0.8, 1.1),
            negative=(0.3, 0.9),
        ),
        _topr(lambda s: formulas.tapered(s, "token"), updates=0, ratio="token"),
    ),
    "grpo": (
        _ratio(formulas.grpo, updates=600, beta=0.0),
        replace(
            _ratio(lambda s: formulas.grpo(s) + s.beta * formulas.k3(s), (*BEHAVIOR, "ref_logp")),
            reference_shift=False,
        ),
        _ratio(
            lambda s: formulas.grpo(s, 0.9, 1.4, std=False),
            OLD,
            beta=0.0,
            ratio="old",
            clip=(0.1, 0.4),
            std=False,
        ),
    ),
    "gspo": (
        _ratio(formulas.gspo, updates=600),
        _ratio(lambda s: formulas.gspo(s, 0.9, 1.4, std=False), OLD, ratio="old", clip=(0.1, 0.4), std=False),
    ),
    "pair_consistency": (
        Claims(
            half_variance, "optimum", (*JUDGED, "reward"), {"gap": "reward"}, policy_gradient=_beta, n=(2,)
        ),
        _weighted(
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
        _weighted(Claims(formulas.bradley_terry, "optimum", JUDGED, n=(2,)), "reference"),
        _imitating(Claims(formulas.bradley_terry, "optimum", JUDGED, n=(2,)), formulas.wins),
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
        _weighted(Claims(formulas.imitation, "elsewhere", (), n=(1, 2)), "reference", updates=0),
    ),
}
