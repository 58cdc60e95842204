"""Claims of agro.objectives.methods.policy_gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agro.proof import formulas
from agro.proof.claim import GROUPED, STEP, STORED, Claims, baseline_claims, of_options, one, weighted
from agro.proof.ends import BY_REWARD


def advantage_claims(kind: str, updates: int = 0, **options: Any) -> Claims:
    """Claims of reinforce with an advantage."""
    return Claims(
        lambda s: formulas.summed(s, kind, options.get("shift", 0.0)),
        "elsewhere",
        ("reward", "groups"),
        options,
        shift=kind != "maxrl",
        noise=kind != "maxrl",
        updates=updates,
    )


reinforce = of_options(
    lambda s, baseline: formulas.reinforce(s, 0.0 if baseline == "none" else baseline),
    ("reward",),
    updates=400,
    shift=False,
)
CLAIMS: dict[str, tuple[Claims, ...]] = {
    "rloo": (
        Claims(lambda s: formulas.advantage(s, 0.0), "elsewhere", ("reward", "groups"), {"beta": 0.0}),
        Claims(lambda s: formulas.advantage(s, s.beta), "optimum", GROUPED, policy_gradient=one),
        weighted(Claims(lambda s: formulas.advantage(s, s.beta), "optimum", GROUPED), "reference", 4.0, 0),
        baseline_claims(2.0, updates=0),
        STORED,
        STEP,
    ),
    "reinforce": (
        replace(reinforce(updates=1200, baseline="none"), end=BY_REWARD),
        reinforce(baseline=0.5),
        Claims(
            lambda s: formulas.reinforce(s, s.optimal_value),
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
        *(advantage_claims(kind, baseline=kind) for kind in ("maxrl", "opo")),
        advantage_claims("opo", baseline="opo", shift=0.3),
    ),
    # The KL's prefixes are sampled without a gradient: even on-policy it ends away from the optimum.
    "kl_pg": (Claims(formulas.kl_policy_gradient, "elsewhere", ("reward", "groups", "kl")),),
}
