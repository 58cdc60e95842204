"""Encoded samples as the tensors of one step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from agro.store import Pair
from agro.types import Batch, Kept, Sample

if TYPE_CHECKING:
    from torch import Tensor


def collate(
    samples: Sequence[Sample], version: int, pairs: Sequence[Pair] = (), *, over_kept: bool = False
) -> Batch:
    """Encoded samples as a batch, padded on the right.

    The reward of a response includes its token rewards. Raises `Refused` for what `Batch.of` and `Sample`
    refuse.

    Args:
        version: of the learner's weights, to which staleness is relative.
        pairs: judgments of these samples.
        over_kept: whether log-probs are over the kept sets of the samples that have them.
    """
    row = {s.id: i for i, s in enumerate(samples)}
    behavior = [s.behavior_logp for s in samples]
    token_reward = [s.token_reward for s in samples]
    extra = {}
    if any(value is not None for value in token_reward):
        extra["token_reward"] = _padded(samples, token_reward, math.nan, torch.float64)
    extra["hinted"] = torch.tensor([s.meta.get("hint") is not None for s in samples], dtype=torch.float64)
    mask = _padded(samples, [s.mask for s in samples], 0, torch.bool)
    batch = Batch.of(
        mask=mask,
        reward=[total_reward(s) for s in samples],
        group=[s.prompt_id for s in samples],
        response=[response_of(s, i) for i, s in enumerate(samples)],
        behavior_logp=None if _all_unknown(behavior) else _padded(samples, behavior, math.nan, torch.float32),
        age=[staleness(s, version) for s in samples],
        role=[s.role for s in samples],
        extra=extra,
        pairs=[(row[p.winner], row[p.loser]) for p in pairs] or None,
        votes=[(p.votes_winner, p.votes_loser) for p in pairs] or None,
        tokens=_padded(samples, [s.tokens for s in samples], 0, torch.long),
        lengths=[len(s.tokens) for s in samples if s.tokens is not None],
        ids=[f"sample {s.id} (prompt {s.prompt_id})" for s in samples],
    )
    if not over_kept:
        return batch
    return batch.replace(kept=Kept.of([kept_sets(s) for s in samples], mask))


def kept_sets(sample: Sample) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
    """`kept` and `kept_count`, where they were recorded."""
    if sample.kept is None or sample.kept_count is None:
        return None
    return sample.kept, sample.kept_count


def response_of(sample: Sample, number: int) -> tuple[str, str] | int:
    """A key for the response of sample `number`: all samples of an episode have the same one."""
    return number if sample.episode is None else (sample.prompt_id, sample.episode)


def staleness(sample: Sample, version: int) -> int | None:
    """Optimizer steps that the sample is behind `version`; None where its own version is unknown."""
    if sample.oldest_version < 0:
        return None
    return version - sample.oldest_version


def total_reward(sample: Sample) -> float:
    """Of the response and of its tokens; NaN where neither is known."""
    if sample.token_reward is None:
        return math.nan if sample.reward is None else sample.reward
    known = sample.token_reward[~torch.as_tensor(sample.token_reward.copy()).isnan().numpy()]
    if sample.reward is None and not len(known):
        return math.nan
    return (sample.reward or 0.0) + float(known.sum(dtype="float64"))


def _all_unknown(values: Sequence[Any]) -> bool:
    return all(value is None for value in values)


def _padded(samples: Sequence[Sample], values: Sequence[Any], fill: float, dtype: torch.dtype) -> Tensor:
    """[B,T] one value a sample, or None, padded on the right with `fill`."""
    T = max(len(s.tokens) for s in samples if s.tokens is not None)
    out = torch.full((len(samples), T), fill, dtype=dtype)
    for padded, value in zip(out, values, strict=True):
        if value is not None:
            padded[: len(value)] = torch.as_tensor(value.copy())
    return out
