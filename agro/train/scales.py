"""Rewards of several scales in one group, and `data.reward_scale`, which maps those of each source to one.

The rewards of a group are compared with each other. Where a person graded some of its responses from 1 to 5
and a checker others as 0 or 1, the difference is that of the graders, not of the responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from agro.config import Data
from agro.errors import Refused
from agro.store import Store
from agro.store.queries import chosen, where
from agro.store.surveying import Scale
from agro.types import Sample

APART = 3.0  # times the largest |reward| of one source is that of another, at least, on another scale


class Apart(NamedTuple):
    """Two sources of different scales that scored responses to one prompt."""

    lower: Scale
    higher: Scale
    groups: int
    prompt_id: str  # of one of them


def apart(a: Scale, b: Scale) -> bool:
    """Whether two ranges of rewards can't be of one scale, as far as it shows.

    Rewards within [−1, 1] count as one scale, since few or poor responses may only use a part of it.
    """
    sizes = sorted(max(1.0, scale.size) for scale in (a, b))
    return sizes[1] >= APART * sizes[0]


def scales_apart(data: Data, store: Store) -> list[Apart]:
    """The pairs of sources whose rewards, by `data.reward_scale`, differ in scale and meet in a group."""
    scales = {s.source: _mapped(s, data) for s in store.scales()}
    if not any(apart(a, b) for a in scales.values() for b in scales.values()):
        return []
    found: dict[tuple[str, str], Apart] = {}
    for names, count, prompt_id in store.meetings(*where(**chosen(data))):
        for low in names:
            for high in names:
                a, b = scales[low], scales[high]
                if a.size < b.size and apart(a, b) and not _has_map(data, low, high):
                    before = found.get((low, high))
                    groups = count + (before.groups if before else 0)
                    found[low, high] = Apart(a, b, groups, prompt_id)
    return list(found.values())


def check_scales(data: Data, store: Store) -> None:
    """Raise `Refused` where sources of different scales meet in a group and have no map."""
    found = scales_apart(data, store)
    if found:
        raise _refusal(found[0], f"{found[0].groups} groups of {store.path}")


def rescaled(samples: Sequence[Sample], data: Data) -> list[Sample]:
    """The samples with rewards of the scale that training uses; token rewards have the factor alone."""
    if not data.reward_scale:
        return list(samples)
    return [_rescaled(sample, data) for sample in samples]


def check_drawn(samples: Sequence[Sample], data: Data) -> None:
    """`check_scales` of the samples of one step, whose rewards are mapped."""
    by_group: dict[str, dict[str, list[float]]] = {}
    for sample in samples:
        if sample.reward is not None:
            of_group = by_group.setdefault(sample.prompt_id, {})
            of_group.setdefault(sample.source, []).append(sample.reward)
    scales = _ranges(by_group.values())
    for prompt_id, sources in by_group.items():
        for low in sources:
            for high in sources:
                a, b = scales[low], scales[high]
                if a.size < b.size and apart(a, b) and not _has_map(data, low, high):
                    raise _refusal(Apart(a, b, 1, prompt_id), "a group of this step")


def _ranges(groups: object) -> dict[str, Scale]:
    rewards: dict[str, list[float]] = {}
    for of_group in groups:  # type: ignore[attr-defined]
        for source, some in of_group.items():
            rewards.setdefault(source, []).extend(some)
    return {source: Scale(source, min(some), max(some)) for source, some in rewards.items()}


def _has_map(data: Data, *sources: str) -> bool:
    """A map is the user's word, whatever the ranges are then."""
    return all(source in data.reward_scale for source in sources)


def _mapped(scale: Scale, data: Data) -> Scale:
    rule = data.reward_scale.get(scale.source)
    if rule is None:
        return scale
    ends = sorted(rule.factor * reward + rule.offset for reward in (scale.lowest, scale.highest))
    return Scale(scale.source, *ends)


def _rescaled(sample: Sample, data: Data) -> Sample:
    rule = data.reward_scale.get(sample.source)
    if rule is None:
        return sample
    reward, tokens = sample.reward, sample.token_reward
    if reward is not None:
        reward = rule.factor * reward + rule.offset
    if tokens is not None:
        tokens = (rule.factor * tokens).astype(tokens.dtype)
    return sample.replace(reward=reward, token_reward=tokens)


def _refusal(found: Apart, where: str) -> Refused:
    low, high = found.lower, found.higher
    return Refused(
        f"rewards of different scales meet in {where} (for one: prompt {found.prompt_id}): those of "
        f"{low.source} go from {low.lowest:g} to {low.highest:g}, those of {high.source} from "
        f"{high.lowest:g} to {high.highest:g}, and a group compares them. What to do: a map for each of the "
        f'two sources (data.reward_scale, as in "{high.source}" = {{ factor = '
        f"{max(1.0, low.size) / high.size:.3g} }}; {{ factor = 1 }} keeps one as it is), or draw one of "
        "them (data.sources)"
    )
