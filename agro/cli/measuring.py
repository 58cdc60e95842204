"""Responses of a model to prompts, scored; kept in a store as they finish, so that a kill loses few."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agro.config import SamplerConfig
    from agro.rewards import Reward
    from agro.rollout.evaluate import Heldout
    from agro.rollout.rollout import Rollout
    from agro.types import Prompt


@dataclass(frozen=True)
class Measurement:
    """How responses are sampled and scored. `store`: where they are kept, if anywhere."""

    scorer: Reward
    sampler: SamplerConfig
    seed: int
    store: Path | None = None

    def of(self, rollout: Rollout, model: str, prompts: Sequence[Prompt]) -> Heldout:
        """Of a model; those that the store has already from the same weights, prompts and settings aren't
        sampled again."""
        from agro.rollout.collect import Task, collect
        from agro.rollout.evaluate import heldout
        from agro.store import Store

        if self.store is None:
            return heldout(rollout, self.scorer, prompts, self.sampler, self.seed)
        with Store.open(self.store) as store:
            ledger = self._ledger(model, rollout, prompts)
            earlier = len(store.experience.find_in_ledger(ledger, range(len(prompts))))
            if earlier:
                print(f"{self.store}: {earlier} responses are there already", file=sys.stderr)
            done = collect(rollout, prompts, self.sampler, store, Task(seed=self.seed, ledger=ledger))
            samples = list(store.samples(ids=done.ids))
            result = heldout(rollout, self.scorer, prompts, self.sampler, self.seed, samples)
            store.set_rewards((s.id or 0, s.reward, {}) for s in result.samples)
            return result

    def _ledger(self, model: str, rollout: Rollout, prompts: Sequence[Prompt]) -> str:
        """A name for all that decides the responses."""
        from agro.logs.record_files import fingerprint

        played = rollout.environment
        decides = {
            "model": fingerprint(model) if Path(model).is_dir() else model,
            "tokenizer": rollout.encoder.fingerprint,
            "prompts": [[prompt.id, prompt.text] for prompt in prompts],
            "sampler": self.sampler.model_dump(mode="json"),
            "seed": self.seed,
            "environment": None if played is None else played.name,
        }
        return f"eval:{hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]}"
