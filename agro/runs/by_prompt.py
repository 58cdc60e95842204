"""What a run keeps of its held-out prompts: the rewards of its start and of its latest evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agro.errors import Refused
from agro.io.files import write
from agro.runs.rundata import RunData

FILE = "held_out_rewards.json"

# By prompt id the mean over its scored responses; None where there are none.
Rewards = Mapping[str, float | None]


@dataclass(frozen=True)
class HeldOutRewards:
    """Of a run: rewards of its latest evaluation and of step 0, and a hash of each prompt's text.

    `clusters`: by prompt the smallest id of its near-copies, its own where it has none; empty in files of
    before these were counted. `unscored`: by prompt which shares of its rewards at step 0 and at the latest
    evaluation are unknown, where some are.
    """

    step: int
    rewards: Rewards
    start: Rewards
    texts: Mapping[str, str]
    clusters: Mapping[str, str]
    unscored: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, values: Any, location: str) -> HeldOutRewards:
        """From JSON. Raises `Refused` for what no run of this version writes."""
        keys = cls.__dataclass_fields__.keys()
        complete = {"clusters": {}, "unscored": {}, **values} if isinstance(values, dict) else {}
        if complete.keys() != keys or not isinstance(complete["step"], int):
            raise Refused(f"{location}: expected an object with {', '.join(keys)}, got {values!r:.80}")
        found = cls(**complete)
        if not all(isinstance(table, dict) for key, table in complete.items() if key != "step"):
            raise Refused(f"{location}: expected {', '.join(keys - {'step'})} by prompt, got {values!r:.80}")
        for key, value in [*found.rewards.items(), *found.start.items()]:
            check_reward(value, f"{location}: {key}")
        if found.texts.keys() != found.rewards.keys():
            raise Refused(f"{location}: expected texts of the prompts that have rewards, got those of others")
        return found


def write_rewards(folder: Path, rewards: HeldOutRewards) -> None:
    """Write them into a run's folder, completely or not at all."""
    write(folder / FILE, json.dumps(vars(rewards), ensure_ascii=False, allow_nan=False) + "\n")


def reward_of(run: RunData) -> dict[str, Any]:
    """What decides the rewards of its last evaluation."""
    config = run.config.phase(run.config.phase_names[-1])
    inputs = run.values.get("inputs", {})
    played = config.environment
    return {
        **config.reward.model_dump(mode="json", include={"name", "options", "functions"}),
        "environment": None if played is None else (played.name, played.options),
        "code": {key: code for key, code in inputs.items() if "reward." in key or "environment." in key},
    }


def check_reward(value: Any, location: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise Refused(f"{location}: expected a number or null, got {value!r:.80}")
