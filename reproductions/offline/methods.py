"""The methods that are compared, by methods.toml, and the settings that each may choose from.

Each method has the same trials: one run of seed 0 at each learning rate of `RATES`, and at the best of them
each value of `OPTIONS`. The best of all by held-out accuracy is run with the other seeds. That favors every
method but the recipe, which has no trials.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECIPE = "agro, the recipe"
UNBOUNDED = "agro, the recipe without the bound"  # on the change of a step: train.step_kl
EARLIER = "agro, the earlier recipe"
IMITATION = "sft on the right responses"
FRESH = "fresh samples alone"
EARLY = "the step with the best held-out AUC"
FIXED = (RECIPE, UNBOUNDED, EARLIER)  # their settings aren't chosen here
LONGER = (EARLIER, IMITATION, "TOPR, b = 0.28")  # the best three, for 600 updates too
# Their steps have the bound of their recipes; those of the others have none.
BOUNDED = (RECIPE, "fresh, the recipe", "fresh, the optimal baseline, bounded")
RATES = (3e-5, 1e-4, 3e-4, 1e-3)
REMEDY_RATES = (1e-4, 3e-4)
FRESH_RATES = ("1e-4", "3e-4")
NEAR = 0.15  # methods that end further below the recipe have no further seeds
GENERATIONS = (640, 1280, 1920, 2560, 3200)  # responses sampled when accuracy is measured
# Fresh samples of the weights so many updates ago, at first of the start; 800 updates of 8 groups.
LAGS = {"samples of the present weights": 0, "100 updates old": 100, "400 updates old": 400}
LAG_UPDATES = 800
# The weight of the recipe replay until 24 November 2026, with which these runs were recorded.
BY_SAMPLER = {"name": "agro", "beta": 0.01, "weight": "behavior", "weight_baseline": "lower"}

Changes = dict[str, dict[str, Any]]  # by method: what it changes of the recipe


def _section(name: str) -> Changes:
    """Objectives of variants.py with the path of that file."""
    found: Changes = tomllib.loads((HERE / "methods.toml").read_text(encoding="utf-8"))[name]
    for method in found.values():
        objective = method.get("objective", {})
        if objective.get("name", "").startswith("variants.py:"):
            objective["name"] = f"{HERE}/{objective['name']}"
    return found


METHODS, WEIGHTS, REMEDIES = _section("methods"), _section("weights"), _section("remedies")
REPLAY, ON_FRESH = _section("replay"), _section("fresh")
REMEDIES[EARLY]["data"]["hold_out_most"] = None  # which TOML can't say
OPTIONS: dict[str, tuple[str, Sequence[float]]] = {
    method: (name, tuple(values))
    for method, (name, values) in tomllib.loads((HERE / "methods.toml").read_text())["options"].items()
}
