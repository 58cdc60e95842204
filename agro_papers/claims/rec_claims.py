"""Claims of agro_papers.methods.rec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agro.proof.claim import DESCENT, Claims
from agro_papers.claims.truncated_claims import masked, over_tokens

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
