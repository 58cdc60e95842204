"""What a race is given, checked before anything that takes seconds to import or to read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agro.config.override import override
from agro.config.run import RunConfig
from agro.errors import Refused


def is_log(named: str | None) -> bool:
    """Whether a race's argument is a log or a store, and no recipe."""
    path = Path(named or "")
    return named is not None and path.exists() and path.suffix != ".toml" and path.name != "config.json"


def race_config(named: str | None, overrides: Sequence[str]) -> RunConfig:
    """The configuration that KEY=VALUE, and the recipe where `named` is one, say.

    Raises `Refused` for a recipe that there isn't, and where nothing is named that a race could judge by.
    """
    if named is None or is_log(named):
        values: dict[str, Any] = {}
        for item in overrides:
            override(values, item, RunConfig)
        config = RunConfig.of(values, "agro race", overrides)
    else:
        config = RunConfig.load(named, overrides)
    if config.data.eval_prompts is None:
        raise Refused(
            "agro race judges by the reward of responses to held-out prompts: expected data.eval_prompts and "
            "a reward for them (reward.name=file.py:function), got no data.eval_prompts. What to do: set "
            "both; where nothing can score a response, train the recipe for the data (agro recipes)"
        )
    if is_log(named) and config.data.store is not None:
        raise Refused(f"agro race: expected one log, got {named} and data.store={config.data.store}")
    return config
