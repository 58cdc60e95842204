"""Rewards of several scales in one group, and `data.reward_scale`, which maps those of each source to one.

The rewards of a group are compared with each other. Where a person graded some of its responses from 1 to 5
and a checker others as 0 or 1, the difference is that of the graders, not of the responses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from agro.config import DataConfig
from agro.errors import Refused
from agro.store import Store
from agro.store.queries import chosen
from agro.store.survey import Scale
from agro.types import Sample

SCALE_RATIO = 3.0  # times the largest |reward| of one source is that of another, at least, on another scale


class ScaleConflict(NamedTuple):
    """Two sources of different scales that scored responses to one prompt."""

    lower: Scale
    higher: Scale
    groups: int
    prompt_id: str  # of one of them


def differ_in_scale(a: Scale, b: Scale) -> bool:
    """Whether two ranges of rewards can't be of one scale, as far as it shows.

    Rewards within [−1, 1] count as one scale, since few or poor responses may only use a part of it.
    """
    sizes = sorted(max(1.0, scale.size) for scale in (a, b))
    return sizes[1] >= SCALE_RATIO * sizes[0]


def find_scale_conflicts(data: DataConfig, store: Store) -> list[ScaleConflict]:
    """The pairs of sources whose rewards, by `data.reward_scale`, differ in scale and meet in a group."""
    scales = {s.source: _mapped(s, data) for s in store.survey.scales()}
    if not any(differ_in_scale(a, b) for a in scales.values() for b in scales.values()):
        return []
    conflicts: dict[tuple[Scale, Scale], ScaleConflict] = {}
    for names, count, prompt_id in store.survey.meetings(**chosen(data)):
        for low, high in _conflicting([scales[name] for name in names], data):
            previous = conflicts.get((low, high))
            groups = count + (previous.groups if previous else 0)
            conflicts[low, high] = ScaleConflict(low, high, groups, prompt_id)
    return list(conflicts.values())


def check_scales(data: DataConfig, store: Store) -> None:
    """Raise `Refused` where sources of different scales meet in a group and have no map."""
    conflicts = find_scale_conflicts(data, store)
    if conflicts:
        raise _refusal(conflicts[0], f"{conflicts[0].groups} groups of {store.path}")


def rescaled(samples: Sequence[Sample], data: DataConfig) -> list[Sample]:
    """The samples with rewards of the scale that training uses; token rewards have the factor alone."""
    if not data.reward_scale:
        return list(samples)
    result = []
    for sample in samples:
        rule = data.reward_scale.get(sample.source)
        reward, tokens = sample.reward, sample.token_reward
        if rule is not None and reward is not None:
            reward = rule.factor * reward + rule.offset
        if rule is not None and tokens is not None:
            tokens = (rule.factor * tokens).astype(tokens.dtype)
        result.append(sample if rule is None else sample.replace(reward=reward, token_reward=tokens))
    return result


def check_drawn(samples: Sequence[Sample], data: DataConfig) -> None:
    """`check_scales` of the samples of one step, whose rewards are mapped."""
    rewards: dict[str, list[float]] = {}  # by source
    groups: dict[str, dict[str, None]] = {}  # the sources of each group, in order
    for sample in samples:
        if sample.reward is not None:
            rewards.setdefault(sample.source, []).append(sample.reward)
            groups.setdefault(sample.prompt_id, {})[sample.source] = None
    scales = {source: Scale(source, min(values), max(values)) for source, values in rewards.items()}
    for prompt_id, sources in groups.items():
        for low, high in _conflicting([scales[source] for source in sources], data):
            raise _refusal(ScaleConflict(low, high, 1, prompt_id), "a group of this step")


def _conflicting(scales: Sequence[Scale], data: DataConfig) -> Iterator[tuple[Scale, Scale]]:
    """The pairs, smaller one first, that differ. A map is the user's word, whatever the ranges are then."""
    for low, high in itertools.product(scales, repeat=2):
        have_map = low.source in data.reward_scale and high.source in data.reward_scale
        if low.size < high.size and differ_in_scale(low, high) and not have_map:
            yield low, high


def _mapped(scale: Scale, data: DataConfig) -> Scale:
    rule = data.reward_scale.get(scale.source)
    if rule is None:
        return scale
    ends = sorted(rule.factor * reward + rule.offset for reward in (scale.lowest, scale.highest))
    return Scale(scale.source, *ends)


def _refusal(conflict: ScaleConflict, location: str) -> Refused:
    low, high = conflict.lower, conflict.higher
    return Refused(
        f"rewards of different scales meet in {location} (for one: prompt {conflict.prompt_id}): those of "
        f"{low.source} go from {low.lowest:g} to {low.highest:g}, those of {high.source} from "
        f"{high.lowest:g} to {high.highest:g}, and a group compares them. What to do: a map for each of the "
        f'two sources (data.reward_scale, as in "{high.source}" = {{ factor = '
        f"{max(1.0, low.size) / high.size:.3g} }}; {{ factor = 1 }} keeps one as it is), or draw one of "
        "them (data.sources)"
    )
