"""The methods that are compared, and the settings that each may choose from.

Each method has the same trials: one run of seed 0 at each learning rate of `RATES`, and at the best of them
each value of `OPTIONS`. The best of all by held-out accuracy is run with the other seeds. That favors every
method but the recipe, which has no trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

RECIPE = "agro, the recipe"
UNBOUNDED = "agro, the recipe without the bound"  # on the change of a step: train.step_kl
EARLIER = "agro, the earlier recipe"
LOWER = {
    "name": "agro",
    "beta": 0.01,
    "weight": "reference",
    "weight_max": 2.0,
    "weight_baseline": "lower",
    "singletons": "drop",
}
FIXED = (RECIPE, UNBOUNDED, EARLIER)  # their settings aren't chosen here
IMITATION = "sft on the right responses"
RATES = (3e-5, 1e-4, 3e-4, 1e-3)
NEAR = 0.15  # methods that end further below the recipe have no further seeds
RIGHT = {"min_reward": 1.0}  # draws the right responses alone

# What each changes of the recipe; `objective` replaces that of the recipe. All but the recipe draw equal
# groups too, as they were recorded. Other sections have the weight and the baseline of `EARLIER`.
METHODS: dict[str, dict[str, Any]] = {
    RECIPE: {"data": {"spread": True}},
    UNBOUNDED: {"data": {"spread": True}},
    EARLIER: {"objective": LOWER},
    IMITATION: {"objective": {"name": "sft"}, "data": RIGHT},
    "TOPR, b = 0.28": {"objective": {"name": "topr", "baseline": 0.28}},
    "sft, then agro": {
        "phases": [
            {"name": "sft", "objective": {"name": "sft"}, "data": RIGHT, "train": {"steps": 75}},
            {"name": "agro", "train": {"steps": 75}},
        ],
        "objective": {"name": "agro", "beta": 0.1, "singletons": "drop"},
    },
    "agro without the weight, β = 0.1": {"objective": {"name": "agro", "beta": 0.1}},
    "agro without the weight + sft in one loss": {
        "objective": {"name": "agro", "beta": 0.1, "imitation": 1.0}
    },
    "REINFORCE, b = 0.18 (AsymRE)": {"objective": {"name": "reinforce", "baseline": 0.18}},
    "DRO-V, β = 0.1": {"objective": {"name": "dro", "beta": 0.1}},
    "OAPL, β = 0.3, β₁ = 1": {
        "objective": {
            "name": "squared_consistency",
            "anchor": "behavior",
            "baseline": "soft",
            "scale": "square",
            "beta": 0.3,
            "value_beta": 1.0,
        }
    },
    "GRPO": {"objective": {"name": "grpo"}},
}

# The option that each method chooses beside the learning rate. Imitation has none.
BETAS = (0.001, 0.01, 0.1, 1.0)
BASELINES = (0.0, 0.15, 0.3, 0.45)
OPTIONS: dict[str, tuple[str, Sequence[float]]] = {
    RECIPE: ("beta", BETAS),
    EARLIER: ("beta", BETAS),
    "agro without the weight, β = 0.1": ("beta", BETAS),
    "agro without the weight + sft in one loss": ("beta", BETAS),
    "sft, then agro": ("beta", BETAS),
    "DRO-V, β = 0.1": ("beta", BETAS),
    "OAPL, β = 0.3, β₁ = 1": ("beta", BETAS),
    "GRPO": ("beta", (0.0, 0.01, 0.1, 1.0)),
    "TOPR, b = 0.28": ("baseline", BASELINES),
    "REINFORCE, b = 0.18 (AsymRE)": ("baseline", BASELINES),
}
LONGER = (EARLIER, IMITATION, "TOPR, b = 0.28")  # the best three, for 600 updates too

# Other weights than the recipe's, which is min(2, π/π_ref) of the complete response with the lower baseline;
# they have the group's plain mean.
_PLAIN = {"name": "agro", "beta": 0.01, "weight": "reference", "weight_max": 2.0}
_OWN = str(Path(__file__).with_name("variants.py"))
WEIGHTS: dict[str, dict[str, Any]] = {
    "min(1, √(π/π_ref)) and the balanced mean, the recipe": {},
    "min(2, π/π_ref) and the lower mean": {"objective": LOWER},
    "min(2, π/π_ref), the group's plain mean": {"objective": _PLAIN},
    "1": {"objective": {"name": "agro", "beta": 0.01}},
    "min(1, π/π_ref)": {"objective": {"name": "agro", "beta": 0.01, "weight": "reference"}},
    "min(4, π/π_ref)": {
        "objective": {"name": "agro", "beta": 0.01, "weight": "reference", "weight_max": 4.0}
    },
    "min(1, π/π_ref) where the advantage is negative, else 1": {"objective": {"name": f"{_OWN}:tapered"}},
    "min(2, π/π_ref) of the token, geometric mean": {"objective": _PLAIN | {"weight_level": "mean"}},
    "min(2, π/π_ref) of the prefix": {"objective": {"name": f"{_OWN}:prefix"}},
    "min(2, π/π_ref), the group's mean weighted too": {"objective": {"name": f"{_OWN}:weighted_mean"}},
    "min(2, π/π_ref), plain mean, constant rate": {"objective": _PLAIN, "train": {"schedule": "constant"}},
    "min(2, π/π_ref), plain mean, constant rate, weights averaged": {
        "objective": _PLAIN,
        "train": {"schedule": "constant", "weights_average": 0.98},
    },
}

# Other remedies than a weight, each alone: what it changes of agro without the weight, and its rates.
_UNWEIGHTED = {"name": "agro", "beta": 0.1}
_TUNED = {"start": 0.1, "target_kl": 1.0, "rate": 0.5}
EARLY = "the step with the best held-out AUC"
REMEDIES: dict[str, dict[str, Any]] = {
    "weights averaged": {"objective": _UNWEIGHTED, "train": {"weights_average": 0.98}},
    "β tuned to a KL of 1 nat": {
        "objective": _UNWEIGHTED | {"beta": _TUNED},
        "evaluate": {"every": 10},
    },
    "log mean π/π_ref pulled to 0": {"objective": {"name": f"{_OWN}:held", "beta": 0.1, "pull": 1.0}},
    EARLY: {
        "objective": _UNWEIGHTED,
        "data": {"hold_out": 0.1, "hold_out_most": None},
        "evaluate": {"every": 10, "metric": "eval_auc"},
    },
}
REMEDY_RATES = (1e-4, 3e-4)

# The weight of the recipe replay until 24 November 2026, with which these runs were recorded.
BY_SAMPLER = {"name": "agro", "beta": 0.01, "weight": "behavior", "weight_baseline": "lower"}
# What each changes of that recipe: 16 groups a step, of which these shares come from the store.
FRESH = "fresh samples alone"
_REFERENCE = {"name": "agro", "beta": 0.01, "weight": "reference", "weight_baseline": "lower"}
REPLAY: dict[str, dict[str, Any]] = {
    FRESH: {"data": {"replay": 0.0}, "train": {"lr": 4e-4}},
    "half replayed": {"data": {"replay": 0.5}, "train": {"lr": 2e-4}},
    "three quarters replayed": {"data": {"replay": 0.75}, "train": {"lr": 2e-4}},
    "fresh at first, then ever more replayed": {
        "data": {"replay": {"start": 0.0, "end": 1.0, "steps": 30}},
        "train": {"lr": 3e-4, "steps": 150},
    },
    "half replayed, min(1, π/π_ref)": {
        "data": {"replay": 0.5},
        "train": {"lr": 2e-4},
        "objective": _REFERENCE,
    },
    "three quarters replayed, min(1, π/π_ref)": {
        "data": {"replay": 0.75},
        "train": {"lr": 1e-4},
        "objective": _REFERENCE,
    },
}
_OPTIMAL = {"name": "agro", "beta": 0.01, "weight_baseline": "optimal"}  # of each group, the recipe before
# What each changes of recipe fresh: 100 updates on 16 prompts with 4 responses each, as TRL's
# trainers were measured on this task (β = 0.05 in their rewards, a constant rate).
ON_FRESH: dict[str, dict[str, Any]] = {
    "fresh, the recipe": {},
    "fresh, the optimal baseline, bounded": {"objective": _OPTIMAL},
    "fresh, the optimal baseline": {"objective": _OPTIMAL},
    "fresh, the balanced baseline": {
        "objective": {"name": "agro", "beta": 0.01, "weight_baseline": "balanced"}
    },
    "fresh, the group's mean": {"objective": {"name": "agro", "beta": 0.01}},
    "fresh, the mean, β = 0.05, a constant rate": {
        "objective": {"name": "agro", "beta": 0.05},
        "train": {"schedule": "constant"},
    },
    "fresh, RLOO": {"objective": {"name": "rloo", "beta": 0.05}, "train": {"schedule": "constant"}},
    "fresh, REINFORCE": {"objective": {"name": "reinforce"}},
}
FRESH_RATES = ("1e-4", "3e-4")
# Their steps have the bound of their recipes; those of the others have none.
BOUNDED = (RECIPE, "fresh, the recipe", "fresh, the optimal baseline, bounded")
GENERATIONS = (640, 1280, 1920, 2560, 3200)  # responses sampled when accuracy is measured

# Fresh samples of the weights so many updates ago, at first of the start; 800 updates of 8 groups.
LAGS = {"samples of the present weights": 0, "100 updates old": 100, "400 updates old": 400}
LAG_UPDATES = 800
