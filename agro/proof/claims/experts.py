"""Claims of agro.objectives.experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from agro.proof import expert_formulas as formulas
from agro.proof.claim import Claims
from agro.proof.families import BEHAVIOR, OLD
from agro.proof.formulas import Situation

Expert = Literal["apart", "member", "hinted"]


def mixing(
    expects: Callable[[Situation], Tensor],
    expert: Expert,
    needs: tuple[str, ...] = BEHAVIOR,
    updates: int = 0,
    **options: Any,
) -> Claims:
    """Own responses and one of an expert; standardized or clipped, so that noise in rewards matters."""
    return Claims(expects, "elsewhere", needs, options, noise=False, n=(2,), updates=updates, expert=expert)


def of_fix(fix: str, at: float | None = None, **options: Any) -> Claims:
    number = {"shape": 0.8, "cap": 0.8, "anchor": 1.2}[fix] if at is None else at
    make = {"shape": formulas.reshaped, "cap": formulas.capped, "anchor": formulas.anchored}[fix]
    clip = (1 - options["clip"][0], 1 + options["clip"][1]) if "clip" in options else formulas.CLIP
    claims = mixing(
        lambda s: formulas.tempsamp(s, make(number), clip),
        "apart" if fix == "anchor" else "member",
        OLD if options.get("ratio") == "old" else BEHAVIOR,
        beta=0.0,
        fix=fix,
        **options,
    )
    if at is not None:
        claims = replace(claims, options={**claims.options, "fix_at": at})
    return replace(claims, shift=fix == "anchor")


HINTED = ("reward", "behavior_logp", "groups", "hinted")

CLAIMS: dict[str, tuple[Claims, ...]] = {
    "chord": (
        mixing(formulas.chord, "apart", updates=100),
        mixing(
            lambda s: formulas.chord(s, 0.4, "probability", (0.9, 1.4), std=False),
            "apart",
            OLD,
            mu=0.4,
            expert_weight="probability",
            clip=(0.1, 0.4),
            std=False,
            ratio="old",
        ),
        mixing(lambda s: formulas.chord(s, 0.7, "none"), "apart", mu=0.7, expert_weight="none"),
    ),
    "luffy": (
        replace(mixing(formulas.luffy, "member", updates=100), noise=True),
        mixing(
            lambda s: formulas.luffy(s, 0.3, (0.9, 1.4), 1.5, std=True),
            "member",
            OLD,
            gamma=0.3,
            clip=(0.1, 0.4),
            dual_clip=1.5,
            std=True,
            ratio="old",
        ),
    ),
    "ampo": (mixing(lambda s: formulas.luffy(s, 0.1, (0.8, 1.2), 3.0), "member"),),
    "guide": (
        mixing(formulas.guide, "hinted", HINTED, updates=100),
        mixing(
            lambda s: formulas.guide(s, 0.4, (0.9, 1.4), std=False),
            "hinted",
            ("reward", "old_logp", "groups", "hinted"),
            gamma=0.4,
            clip=(0.1, 0.4),
            std=False,
            ratio="old",
        ),
    ),
    "tempsamp_r1": (
        replace(of_fix("shape"), updates=100),
        of_fix("shape", 0.9, clip=(0.1, 0.4), ratio="old"),
        of_fix("cap"),
        of_fix("anchor"),
        replace(
            of_fix("anchor", 0.9),
            expects=lambda s: formulas.tempsamp(s, formulas.anchored(0.9)) + s.beta * formulas.k3(s),
            needs=(*BEHAVIOR, "ref_logp"),
            options={"fix": "anchor", "fix_at": 0.9},
            reference_shift=False,
        ),
    ),
}
