"""Claims of agro_papers.methods.rec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from agro.proof.claim import DESCENT, Claims
from agro.proof.claims import advantages as formulas
from agro.proof.families import BEHAVIOR, OLD
from agro.proof.formulas import Situation
from agro_papers.claims.truncated_claims import masked, over_tokens

_ONE = masked("none", "none", 0.0, 1.0)


def _opmd(factor: float, options: Mapping[str, Any], updates: int = 0) -> Claims:
    needs = ("reward", "groups")
    return over_tokens("mean", lambda w, A: factor * _ONE(w, A), options, needs, noise=True, updates=updates)


def _soft(s: Situation) -> Tensor:
    """−E[(r − τ log mean exp(r/τ)) log π]/(1 + τ) over the mean number of tokens, τ = ½."""
    r_XKn, first_K = s.reward[:, s.groups], s.groups[:, 0]
    value_XK = 0.5 * (r_XKn / 0.5).exp().mean(-1).log()
    gain_XK = (r_XKn[..., 0] - value_XK) * s.policy.logp()[:, first_K]
    return -s.mean_groups(gain_XK) / 1.5 / formulas.mean_tokens(s)


def _quadratic(s: Situation, pull: float) -> Tensor:
    squares = formulas.per_token(s, s.e_tokens.square())
    return formulas.weighed(s, "mean", _ONE) + 0.5 * pull * squares


def _mirrored(s: Situation, step_size: float, kl: str) -> Tensor:
    e_XYT = s.e_tokens
    kl_XYT = e_XYT.exp() * e_XYT if kl == "weighted" else e_XYT.square() / 2
    gain = formulas.weighed(s, "mean", lambda w, A: w)
    return gain + formulas.per_token(s, kl_XYT) / step_size


def _claims(
    expects: Callable[[Situation], Tensor], needs: tuple[str, ...], updates: int = 0, **options: Any
) -> Claims:
    """Means over all tokens: groups of one size."""
    return Claims(expects, "unknown", needs, options, n=(2,), updates=updates)


def _props(minimum: float, updates: int = 0, **options: Any) -> Claims:
    """The mean over tokens of max(π/f, minimum) (PROPS)."""

    def expects(s: Situation) -> Tensor:
        return formulas.per_token(s, s.d_tokens.exp().clamp(min=minimum))

    of_one = Claims(expects, "elsewhere", ("ref_logp",), options, n=(1, 2), updates=updates)
    return replace(of_one, reference_shift=False)


GROUPS = ("reward", "groups")
_PLAIN = masked("none", "none", 0.8, 1.2)


def _rec(mask: str, weight: str, options: Mapping[str, Any], noise: bool = False, updates: int = 0) -> Claims:
    token_weight = masked(mask, weight, 0.8, 1.2)
    return over_tokens("mean", token_weight, options, noise=noise, updates=updates)


def _advantage(kind: str) -> Claims:
    needs = {"reinforce_pp": ("reward",), "gdpo": ("reward_parts", "part_weights", "groups")}.get(
        kind, GROUPS
    )
    return over_tokens(kind, _PLAIN, {"advantage": kind}, needs, noise=kind in ("others", "opo"))


CLAIMS: dict[str, tuple[Claims, ...]] = {
    "opmd": (
        _opmd(1 / 2, {}, DESCENT),
        _opmd(1.0, {"form": "pairwise", "tau": 0.5}),
        replace(
            _claims(_soft, ("reward", "groups"), baseline="soft", tau=0.5), ends="elsewhere", noise=False
        ),
    ),
    "token_quadratic": (
        _claims(lambda s: _quadratic(s, 0.1), BEHAVIOR, DESCENT),
        _claims(lambda s: _quadratic(s, 0.5), OLD, pull=0.5, ratio="old"),
    ),
    "opmd_token": (_claims(lambda s: _quadratic(s, 0.2), BEHAVIOR, DESCENT),),
    "props": (_props(0.7, DESCENT), _props(0.9, clip=0.1)),
    "mdpo": (
        _claims(lambda s: _mirrored(s, 1.0, "weighted"), BEHAVIOR, DESCENT),
        _claims(lambda s: _mirrored(s, 0.4, "square"), OLD, step_size=0.4, kl="square", ratio="old"),
    ),
    "rec": (
        over_tokens("mean", _PLAIN, needs=GROUPS, noise=True, updates=DESCENT),
        _rec("none", "is", {"token_weight": "is"}, noise=True),
        _rec("one_side", "is", {"mask": "one_side", "token_weight": "is"}),
        _rec("two_side", "is", {"mask": "two_side", "token_weight": "is"}, noise=True),
        over_tokens(
            "standardized",
            masked("ring", "none", 0.9, 1.4, (0.3, 0.7)),
            {"mask": "ring", "clip": (0.1, 0.4), "ring": (0.3, 0.7), "advantage": "standardized"},
        ),
        *(_advantage(kind) for kind in ("others", "maxrl", "opo", "red_drop")),
        *(_advantage(kind) for kind in ("reinforce_pp", "reinforce_pp_baseline", "gdpo")),
    ),
    "rec_one_side": (_rec("one_side", "none", {}, updates=DESCENT),),
    "rec_two_side": (_rec("two_side", "none", {}, noise=True, updates=DESCENT),),
    "rec_ring": (_rec("ring", "none", {}, updates=DESCENT),),
    "red_weight": (
        over_tokens("mean", lambda w, A: A.exp(), needs=GROUPS, updates=DESCENT),
        over_tokens("mean", lambda w, A: (A / 0.5).exp(), {"temperature": 0.5}, GROUPS),
    ),
    "red_drop": (over_tokens("red_drop", _PLAIN, needs=GROUPS, updates=DESCENT),),
    "gdpo": (
        over_tokens(
            "gdpo",
            masked("one_side", "is", 0.8, 1.2),
            needs=("reward_parts", "part_weights", "groups", "behavior_logp"),
            updates=DESCENT,
        ),
    ),
    "reinforce_pp": (
        over_tokens(
            "reinforce_pp",
            masked("one_side", "is", 0.8, 1.2),
            needs=("reward", "behavior_logp"),
            updates=DESCENT,
        ),
    ),
}
