"""V*(x) from stored samples of the reference (A*PO, arXiv 2505.20686)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agro.errors import Refused
from agro.store import Store
from agro.train.collate import total_reward
from agro.types import Batch, Sample, Text


class StoredValues:
    """The rewards of a store's responses by prompt. β log mean exp(r/β) of them estimates V*(x).

    The estimate is biased low, the more so the fewer responses there are. It assumes that the responses are
    samples of the reference, which can't be checked here.
    """

    def __init__(self, rewards: Mapping[str, NDArray[np.float64]]) -> None:
        """`rewards`: prompt_id -> [n]"""
        self.rewards = rewards

    @classmethod
    def load(cls, path: str | Path, prompts: Mapping[str, Text]) -> StoredValues:
        """The rewards of all scored responses.

        `prompts`: by id. Raises `Refused` where one of them has none, or is another prompt in the store.
        """
        by_response: dict[str, dict[str | int | None, float]] = {}
        with Store.open(path, read_only=True, create=False) as store:
            store.check_prompts(prompts.items())
            for s in store.samples(scored=True):
                response = s.id if s.episode is None else s.episode
                by_response.setdefault(s.prompt_id, {})[response] = total_reward(s)
        missing = sorted(prompts.keys() - by_response.keys())
        if missing:
            raise Refused(
                f"data.value_store: {path}: expected scored samples of the reference for all {len(prompts)} "
                f"prompts that are trained on with stored values, but {len(missing)} have none (for one: "
                f"{', '.join(missing[:3])}). What to do: agro sample --model REFERENCE --prompts FILE --out "
                "STORE -n 8, then agro score"
            )
        return cls({prompt: np.array(list(rewards.values())) for prompt, rewards in by_response.items()})

    def value(self, prompt_id: str, beta: float) -> float:
        """The estimate, in units of reward; NaN for an unknown prompt, which the objective refuses."""
        if prompt_id not in self.rewards:  # added to the training store after the run began
            return math.nan
        r = self.rewards[prompt_id]
        return float(beta * (np.logaddexp.reduce(r / beta) - math.log(len(r))))

    def fill(self, batch: Batch, samples: Sequence[Sample], options: Mapping[str, Any]) -> Batch:
        """The batch of `samples` with `extra["stored_value"]` [B]; β is the option value_beta, or beta."""
        beta = options.get("value_beta") or options["beta"]
        values = {p: self.value(p, beta) for p in {s.prompt_id for s in samples}}
        column = torch.tensor(
            [values[s.prompt_id] for s in samples], dtype=torch.float64, device=batch.mask.device
        )
        return batch.replace(extra={**batch.extra, "stored_value": column})
