"""Stored groups that aren't trained on, of any origin: AGRO's loss, and whether π ranks right above wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from agro.config import RunConfig
from agro.errors import Refused
from agro.objectives.needs import GROUPS, REWARD
from agro.store import Drawn, Store, is_held_out
from agro.store.queries import Filter
from agro.train.collate import collate
from agro.train.diagnostics import distances, ranking, summary
from agro.train.feed import one_each, select_valid
from agro.train.learner import Learner
from agro.train.log_ratios import best_and_worst, exponential, kl_of_best, log_mean_ratios, mean
from agro.train.scales import rescaled
from agro.types import Batch, Sample

TOGETHER = 64  # groups in one batch


class HeldOutGroups:
    """Encoded groups with their log-probs under π_ref."""

    def __init__(self, groups: Sequence[Sequence[Sample]], learner: Learner, *, dropped: int = 0) -> None:
        """`groups`: encoded and scored samples, at least two a group. `dropped`: how many were invalid."""
        self.dropped = dropped
        self.prompt_ids = [samples[0].prompt_id for samples in groups]
        self._batches: list[Batch] = []
        for first in range(0, len(groups), TOGETHER):
            batch = collate(list(chain.from_iterable(groups[first : first + TOGETHER])), 0)
            ref_logp = learner.logp(batch, "reference")
            self._batches.append(batch.to(ref_logp.device).replace(ref_logp=ref_logp))
        self._kl_of_best = mean("eval_kl_of_best", np.concatenate([kl_of_best(b) for b in self._batches]))

    @classmethod
    def load(cls, config: RunConfig, learner: Learner) -> HeldOutGroups:
        """The groups of `data.eval_store`, or of the prompts of `data.store` that `data.hold_out` names.

        Without invalid samples; raises `Refused` where no group remains.
        """
        data = config.data
        path = data.eval_store or data.store
        assert path is not None
        chosen: Filter = {} if data.eval_store else {"roles": data.roles, "sources": data.sources}
        with Store.open(path, read_only=True, create=False) as store:
            found = store.samples(**chosen)
            if data.hold_out:
                found = (s for s in found if is_held_out(s.prompt_id, data.hold_out))
            samples = rescaled(sorted(found, key=_first_seen()), data)
        valid = select_valid(Drawn(samples), learner.encoder, config.train.max_length, {REWARD, GROUPS})
        by_prompt: dict[str, list[Sample]] = {}
        for sample in valid.samples:
            by_prompt.setdefault(sample.prompt_id, []).append(sample)
        groups = [group for group in by_prompt.values() if len(one_each(group)) > 1]
        if not groups:
            key = "hold_out" if data.hold_out else "eval_store"
            raise Refused(
                f"data.{key}: {path}: expected groups of two or more scored responses, got none among "
                f"{len({s.prompt_id for s in samples})} groups; dropped: {dict(valid.dropped) or 'nothing'}"
            )
        return cls(groups, learner, dropped=len(samples) - sum(map(len, groups)))

    def measure(self, learner: Learner, beta: float | None, average: str = "sum") -> dict[str, Any]:
        """Means over groups with their standard errors, groups being the independent units.

        `beta`: in reward per nat; without it ½ Var(R) isn't measured. `average`: as of the objective agro.
        """
        auc, now, start, best, worst, ratio = [], [], [], [], [], []
        for batch in self._batches:
            assert batch.ref_logp is not None
            logp = learner.logp(batch)
            auc.append(ranking(batch, logp, average))
            of_best, of_worst = best_and_worst(batch, logp)
            best.append(of_best)
            worst.append(of_worst)
            ratio.append(log_mean_ratios(batch, logp))
            if beta:
                now.append(distances(batch, logp, beta, average)[0])
                start.append(distances(batch, batch.ref_logp, beta, average)[0])  # R = r
        order = np.concatenate(auc)
        metrics = {**summary("eval_auc", order), "eval_auc_groups": len(order)}
        metrics |= {"eval_groups": len(self.prompt_ids), "eval_dropped": self.dropped}
        metrics |= summary("eval_log_ratio_best", np.concatenate(best))
        metrics |= summary("eval_log_ratio_worst", np.concatenate(worst))
        metrics |= exponential("eval_ratio_mean", np.concatenate(ratio)) | self._kl_of_best
        if now:
            half, fall = np.concatenate(now), np.concatenate(start) - np.concatenate(now)
            metrics |= summary("eval_consistency", half) | summary("eval_consistency_fall", fall)
        return metrics


def _first_seen() -> Callable[[Sample], int]:
    """A sort key that brings the samples of a group together, groups in the order in which they began."""
    order: dict[str, int] = {}
    return lambda sample: order.setdefault(sample.prompt_id, len(order))
