"""Claims of agro.objectives.truncated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from agro.proof import truncated_formulas as formulas
from agro.proof.claim import DESCENT, Claims
from agro.proof.families import BEHAVIOR, OLD
from agro.proof.truncated_formulas import Weight

SIZES = {"reinforce_pp": (1, 2), "red_drop": (3,)}  # groups of an advantage's claims, else pairs


def over_tokens(
    kind: str,
    weight: Weight,
    options: Mapping[str, Any] = MappingProxyType({}),
    needs: tuple[str, ...] = BEHAVIOR,
    *,
    noise: bool = False,
    updates: int = 0,
) -> Claims:
    """Means over all tokens, in which larger groups count more: groups of one size."""
    return Claims(
        lambda s: formulas.weighed(s, kind, weight),
        "elsewhere",
        needs,
        options,
        noise=noise,
        shift=kind not in ("maxrl", "reinforce_pp"),
        n=SIZES.get(kind, (2,)),
        updates=updates,
    )


def _m2po(kind: str, tokens: str, updates: int) -> Claims:
    return Claims(
        lambda s: formulas.within_budget(s, kind, 0.5, tokens),
        "elsewhere",
        BEHAVIOR,
        {"budget": 0.5, "tokens": tokens, "advantage": kind},
        noise=False,
        n=(2,),
        updates=updates,
    )


def _raft(least: float | None, updates: int = 0) -> Claims:
    return Claims(
        lambda s: formulas.best_clipped(s, 1.2, least),
        "elsewhere",
        BEHAVIOR if least is None else ("reward", "behavior_logp"),
        {"least_reward": least},
        noise=False,
        shift=least is None,
        n=(2, 3) if least is None else (1, 2),
        updates=updates,
    )


def _to_old(of: Claims, **options: Any) -> Claims:
    """The same with ratios to the trainer's log-probs when the batch was drawn."""
    return replace(of, needs=OLD, options={**of.options, **options})


def _nested(weight: Weight, options: Mapping[str, Any], updates: int = 0) -> Claims:
    needs = OLD if options.get("mismatch") == "ignore" else BEHAVIOR
    return Claims(
        lambda s: formulas.in_responses(s, "standardized", weight),
        "elsewhere",
        needs,
        options,
        noise=False,
        updates=updates,
    )


def _in_one_row(claims: Claims) -> Claims:
    return replace(claims, episodes=False)


_OLD_MEAN = {"ratio": "old", "clip": (0.1, 0.4), "advantage": "mean"}
_RATIO = formulas.clamped(0.0, float("inf"))

CLAIMS: dict[str, tuple[Claims, ...]] = {
    "cispo": (
        over_tokens("standardized", formulas.clamped(0.0, 1.28), updates=DESCENT),
        over_tokens("mean", formulas.clamped(0.9, 1.4), _OLD_MEAN, OLD, noise=True),
    ),
    "aipo": (over_tokens("mean", formulas.clamped(0.0, 4.0), noise=True, updates=DESCENT),),
    "minpro": (
        _in_one_row(over_tokens("standardized", formulas.times_least_before(0.0, 1.28), updates=DESCENT)),
        _in_one_row(
            over_tokens(
                "mean",
                formulas.times_least_before(0.9, 1.4, most=1.0),
                {"cap_at_one": True, **_OLD_MEAN},
                OLD,
                noise=True,
            )
        ),
    ),
    "vespo": (
        over_tokens("standardized", formulas.gamma((2.0, 3.0), (3.0, 2.0)), updates=DESCENT),
        over_tokens(
            "mean",
            formulas.gamma((1.5, 1.0), (1.0, 2.5)),
            {"ratio": "old", "positive": (1.5, 1.0), "negative": (1.0, 2.5), "advantage": "mean"},
            OLD,
        ),
    ),
    "m2po": (
        _m2po("standardized", "all", DESCENT),
        _m2po("mean", "harmful", 0),
        _to_old(_m2po("standardized", "all", 0), ratio="old"),
    ),
    "raft_pp": (
        _raft(None, DESCENT),
        _raft(0.5),
        replace(
            _to_old(_raft(None), ratio="old", clip=(0.1, 0.4)),
            expects=lambda s: formulas.best_clipped(s, 1.4, None),
        ),
    ),
    "nested_reft": (
        _nested(_RATIO, {}, DESCENT),
        _nested(_RATIO, {"mismatch": "ignore"}),
        _nested(lambda w, A: 0.8 * w.clamp(max=1.0), {"mismatch": "retrace", "retrace": 0.8}),
    ),
}
