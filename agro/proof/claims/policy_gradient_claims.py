"""Claims of agro.objectives.methods.policy_gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agro.proof import formulas
from agro.proof.claim import DESCENT, Claims
from agro.proof.claims import truncated_claims
from agro.proof.ends import BY_REWARD
from agro.proof.families import (
    GROUPED,
    baseline_claims,
    one,
    reinforce_claims,
    step_claims,
    stored_claims,
    topr_claims,
    weighted,
)
from agro.proof.formulas import Situation


def _advantage(
    kind: str, shift: float = 0.0, updates: int = 0, preset: bool = False, **options: Any
) -> Claims:
    """Of reinforce with an advantage; `preset`: the shift is that of the preset."""
    if shift and not preset:
        options["shift"] = shift
    sizes = {"red_drop": (3,), "reinforce_pp_baseline": (2,), "gdpo": (2,)}.get(kind, (2, 3))
    needs = {"reinforce_pp": ("reward",), "gdpo": ("reward_parts", "part_weights", "groups")}
    return Claims(
        lambda s: truncated_claims.summed(s, kind, shift),
        "elsewhere",
        needs.get(kind, ("reward", "groups")),
        options,
        shift=kind not in ("maxrl", "reinforce_pp"),
        noise=kind in ("mean", "others", "opo"),
        n=sizes,
        updates=updates,
    )


def _future(strength: float, updates: int = 0, **options: float) -> Claims:
    needs = ("reward", "groups", "future") if strength else ("reward", "groups")
    return Claims(lambda s: formulas.future_gain(s, strength), "elsewhere", needs, options, updates=updates)


def token_baselines(s: Situation) -> Tensor:
    """−E Σ_t (r − b_t) log π of the first response of a group, b_t the mean of those with a t-th token, by
    weights of the squared norm of the gradient in the logits up to it (OTB)."""
    space, first_K = s.policy.space, s.groups[:, 0]
    logits_XYTV = s.policy.logp_next().detach()[:, space.places]
    squares_XYT = logits_XYTV.exp().square().sum(-1)
    energy_XYT = (1 - 2 * s.policy.logp_tokens().detach().exp() + squares_XYT) * space.mask
    W_XKnT = (energy_XYT.cumsum(2) * space.mask)[:, s.groups]
    r_XKn1 = s.reward[:, s.groups][..., None]
    alone_KT = space.mask[s.groups].sum(1) == 1
    b_XKT = torch.where(alone_KT, 0.0, ((W_XKnT * r_XKn1).sum(2) / W_XKnT.sum(2)).nan_to_num())
    gain_XKT = (r_XKn1[:, :, 0] - b_XKT) * s.policy.logp_tokens()[:, first_K]
    return -s.mean_groups(torch.where(space.mask[first_K], gain_XKT, 0.0).sum(2))


TAPER: dict[str, Any] = {"ratio": "mean", "positive": (0.8, 1.1), "negative": (0.3, 0.9)}

CLAIMS: dict[str, tuple[Claims, ...]] = {
    "otb": (
        Claims(
            token_baselines,
            "elsewhere",
            ("reward", "groups", "proposal"),
            shift=False,
            episodes=False,
            updates=0,
        ),
    ),
    "rloo": (
        Claims(lambda s: formulas.advantage(s, 0.0), "elsewhere", ("reward", "groups"), {"beta": 0.0}),
        Claims(lambda s: formulas.advantage(s, s.beta), "optimum", GROUPED, policy_gradient=one),
        weighted(Claims(lambda s: formulas.advantage(s, s.beta), "optimum", GROUPED), "reference", 4.0, 0),
        baseline_claims("lower", 2.0, updates=0),
        stored_claims(),
        step_claims(),
    ),
    "reinforce": (
        replace(reinforce_claims(0.0, baseline="none"), updates=1200, end=BY_REWARD),
        reinforce_claims(0.5, baseline=0.5),
        Claims(
            formulas.advantage_over_value,
            "elsewhere",
            ("reward", "stored_value"),
            {"baseline": "stored"},
            n=(1, 2),
            updates=0,
        ),
        # The group's mean includes r_i itself, which removes a share 1/n of the gradient.
        Claims(
            lambda s: (1 - 1 / s.n) * formulas.advantage(s, 0.0),
            "elsewhere",
            ("reward", "groups"),
            {"baseline": "mean"},
        ),
        *(_advantage(kind, baseline=kind) for kind in ("standardized", "others", "maxrl", "opo", "red_drop")),
        *(_advantage(kind, baseline=kind) for kind in ("reinforce_pp", "reinforce_pp_baseline", "gdpo")),
        _advantage("opo", shift=0.3, baseline="opo"),
    ),
    "maxrl": (_advantage("maxrl", updates=DESCENT),),
    "opo": (_advantage("opo", updates=DESCENT),),
    "asymre": (_advantage("mean", shift=-0.1, updates=DESCENT, preset=True),),
    # The prefixes of the KL are sampled, and no gradient says so: on-policy too it ends beside the optimum.
    "kl_pg": (Claims(formulas.kl_policy_gradient, "elsewhere", ("reward", "groups", "kl")),),
    "fpa": (_future(1.0, DESCENT), _future(0.4, extrapolation=0.4), _future(0.0, extrapolation=0.0)),
    "topr": (
        topr_claims(formulas.tapered),
        topr_claims(lambda s: formulas.tapered(s, **TAPER), updates=0, **TAPER),
        topr_claims(lambda s: formulas.tapered(s, "token"), updates=0, ratio="token"),
    ),
}
