"""The methods of the experiments, under the names that the figures give them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agro import objectives
from agro.config.recipes import recipes
from agro.objectives.needs import ordered
from reproductions.arena.kinds import BETAS
from reproductions.paper.plans import Plan


def _of_log() -> dict[str, Any]:
    """The weight of the recipe `log`, and its baseline. Its β is of the grid, as others'."""
    options = tomllib.loads(recipes()["log"].text)["objective"]
    return {key: value for key, value in options.items() if key.startswith("weight")}


@dataclass(frozen=True)
class Method:
    """An objective with options; `betas`: those that are tried, the first one with each learning rate."""

    name: str
    objective: str
    about: str
    options: Mapping[str, Any] = field(default_factory=dict)
    betas: tuple[float | None, ...] = BETAS

    def options_for(self, n: int, beta: float | None) -> dict[str, Any]:
        """With one response a prompt a group is the update, as in the recipe `feedback`."""
        options = dict(self.options) | ({} if beta is None else {"beta": beta})
        if n == 1 and "singletons" in objectives.get(self.objective).defaults():
            options["singletons"] = "pool"
        return options

    def obstacle(self, plan: Plan) -> str:
        """Why it can't train on these data; "" where it can."""
        needed = objectives.get(self.objective).needed(self.options_for(plan.n, self.betas[0]))
        provided = {str(need) for need in plan.provided}
        missing = [
            need.what for need in ordered(needed) if need.provider == "record" and need not in provided
        ]
        return f"needs {missing[0]}" if missing else ""


AGRO, WEIGHTED, BY_SAMPLER = "AGRO", "AGRO, weighted", "AGRO, weighted by the sampler"
ON_POLICY, ADAPTIVE = "on-policy AGRO", "on-policy AGRO, adaptive"
KL_PG, UNREGULARIZED, RLOO = "KL-PG", "KL-PG, β = 0", "RLOO"
IMITATION, DRO, TOPR, QRPO, FPA = "imitation of the right", "DRO-V", "TOPR", "QRPO", "FPA"
OAPL, M2PO, CLIP, DPPO = "OAPL", "M2PO", "PPO's clip", "DPPO"
NONE = (None,)
METHODS = {
    method.name: method
    for method in (
        Method(AGRO, "agro", "eq. 4"),
        Method(WEIGHTED, "agro", "with the weight and the baseline of our recipe `log`", _of_log()),
        Method(
            BY_SAMPLER,
            "agro",
            "weighted by min(1, π/μ), with the baseline `lower`",
            {"weight": "behavior", "weight_baseline": "lower"},
        ),
        Method(ON_POLICY, "agro_onpolicy", "eqs. 5 and 6"),
        Method(ADAPTIVE, "agro_onpolicy", "our default share", {"likelihood_ratio": "adaptive"}),
        Method(KL_PG, "kl_pg", "policy gradient with the tokens' exact KL"),
        Method(UNREGULARIZED, "kl_pg", "the same without the KL", {"beta": 0.0}, NONE),
        Method(RLOO, "rloo", "β times the log-ratio is part of the reward"),
        Method(IMITATION, "sft", "likelihood of the right responses", betas=NONE),
        Method(DRO, "dro", "a learned value of the prompt", betas=BETAS[:1]),
        Method(TOPR, "topr", "tapered ratios", betas=NONE),
        Method(QRPO, "qrpo", "quantile of the reward among 4 samples of the start", betas=BETAS[:1]),
        Method(FPA, "fpa", "gradients of the extrapolated policy", betas=NONE),
        Method(OAPL, "oapl", "square with the sampler as anchor", betas=(None, 0.1)),
        Method(M2PO, "m2po", "second moment of the ratios", betas=NONE),
        Method(CLIP, "grpo", "clipped ratios to the sampler", betas=NONE),
        Method(DPPO, "dppo", "mask by total variation", betas=NONE),
    )
}
