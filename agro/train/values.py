"""V*(x) from samples of the reference that were made before (A*PO, arXiv 2505.20686)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agro.errors import Refused
from agro.store import Store
from agro.train.collate import total_reward
from agro.types import Batch, Sample


class StoredValues:
    """The rewards of a store's responses, prompt by prompt; their soft maximum β log mean exp(r/β) estimates V*(x).

    It is biased low, the more so the fewer responses there are. Whether they are the reference's nobody can check here.
    """

    def __init__(self, rewards: Mapping[str, NDArray[np.float64]]) -> None:
        """`rewards`: prompt_id -> [n]"""
        self.rewards = rewards

    @classmethod
    def load(cls, path: str | Path, prompts: Collection[str]) -> StoredValues:
        """Of all scored responses; raises `Refused` where one of `prompts`, which are trained on, has none."""
        found: dict[
            str, dict[str | int | None, float]
        ] = {}  # a row of each response; only its reward stays in memory
        with Store.open(path, read_only=True, create=False) as store:
            for s in store.samples(scored=True):
                found.setdefault(s.prompt_id, {})[s.id if s.episode is None else s.episode] = total_reward(s)
        lacking = sorted(set(prompts) - found.keys())
        if lacking:
            raise Refused(
                f"data.value_store: {path}: expected scored samples of the reference for all {len(set(prompts))} prompts that are trained on with stored values, "
                f"but {len(lacking)} have none (for one: {', '.join(lacking[:3])}). What to do: agro sample --model REFERENCE "
                "--prompts FILE --out STORE -n 8, then agro score"
            )
        return cls({prompt: np.array(list(rewards.values())) for prompt, rewards in found.items()})

    def value(self, prompt_id: str, beta: float) -> float:
        """The soft maximum, in units of reward; NaN for a prompt that isn't there, which the objective refuses."""
        if prompt_id not in self.rewards:  # it came into the store that is trained on after the run began
            return math.nan
        r = self.rewards[prompt_id]
        return float(beta * (np.logaddexp.reduce(r / beta) - math.log(len(r))))

    def fill(self, batch: Batch, samples: Sequence[Sample], options: Mapping[str, Any]) -> Batch:
        """The batch of these samples with `extra["stored_value"]` [B]; β is the objective's value_beta, or its beta."""
        beta = options.get("value_beta") or options["beta"]
        values = {p: self.value(p, beta) for p in {s.prompt_id for s in samples}}
        column = torch.tensor(
            [values[s.prompt_id] for s in samples], dtype=torch.float64, device=batch.mask.device
        )
        return batch.replace(extra={**batch.extra, "stored_value": column})
