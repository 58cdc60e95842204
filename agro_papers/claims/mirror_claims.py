"""Claims of agro_papers.methods.mirror."""

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
}
