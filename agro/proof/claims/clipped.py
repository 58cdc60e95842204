"""Claims of agro.objectives.clipped."""

from __future__ import annotations

from dataclasses import replace

from agro.proof import clipped_formulas as formulas
from agro.proof.claim import DESCENT, Claims
from agro.proof.families import BEHAVIOR, OLD, of_ratio

REGULARIZED = (*BEHAVIOR, "ref_logp")

CLAIMS: dict[str, tuple[Claims, ...]] = {
    "grpo": (
        of_ratio(formulas.grpo, updates=DESCENT, beta=0.0),
        replace(
            of_ratio(lambda s: formulas.grpo(s) + s.beta * formulas.k3(s), REGULARIZED),
            reference_shift=False,
        ),
        replace(
            of_ratio(lambda s: formulas.grpo(s) + s.beta * formulas.k2(s), REGULARIZED, kl="k2"),
            reference_shift=False,
        ),
        replace(
            of_ratio(
                lambda s: formulas.grpo(s) + s.beta * formulas.unbiased_k3(s), REGULARIZED, unbiased_kl=True
            ),
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
        # The number of tokens of a step is that of its groups, so groups have one size.
        replace(of_ratio(lambda s: formulas.grpo(s, average="token"), beta=0.0, average="token"), n=(2,)),
        of_ratio(lambda s: formulas.grpo(s, average=1.5, most=1.3), beta=0.0, average=1.5, dual_clip=1.3),
    ),
    "gspo": (
        of_ratio(formulas.gspo, updates=DESCENT, beta=0.0),
        of_ratio(
            lambda s: formulas.gspo(s, 0.9, 1.4, std=False),
            OLD,
            beta=0.0,
            ratio="old",
            clip=(0.1, 0.4),
            std=False,
        ),
        replace(of_ratio(lambda s: formulas.gspo(s, average="token"), beta=0.0, average="token"), n=(2,)),
        of_ratio(lambda s: formulas.gspo(s, average=1.5), beta=0.0, average=1.5),
    ),
    "gmpo": (
        of_ratio(formulas.gmpo, updates=DESCENT, beta=0.0),
        of_ratio(
            lambda s: formulas.gmpo(s, 0.1, 0.3, std=False),
            OLD,
            beta=0.0,
            ratio="old",
            clip=(0.1, 0.3),
            std=False,
        ),
    ),
    "dr_grpo": (of_ratio(lambda s: formulas.grpo(s, std=False, average=2.5), updates=DESCENT, average=2.5),),
    "dapo": (
        replace(of_ratio(lambda s: formulas.grpo(s, 0.8, 1.28, average="token"), updates=DESCENT), n=(2,)),
    ),
    "ppo_dual_clip": (
        replace(of_ratio(lambda s: formulas.grpo(s, average="token", most=3.0), updates=DESCENT), n=(2,)),
    ),
    "luspo": (of_ratio(lambda s: formulas.gspo(s, average=1.0), updates=DESCENT),),
}
