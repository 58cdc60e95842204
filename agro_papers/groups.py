"""Which responses of a group are trained on, by their rewards: pure rules, whose randomness is a hash of a
seed.

They are for scripts that fill a store, beside `agro sample` and `agro import`; a draw takes what they leave.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import TypeVar

from agro.errors import Refused
from agro.types import Sample

K = TypeVar("K", bound=Hashable)


def on_demand(
    rewards: Sequence[float], teachers: Sequence[float], *, k: int = 2, right: float = 1.0, seed: int = 0
) -> dict[int, int]:
    """Which wrong responses of a group which teacher's responses replace (AMPO, arXiv 2510.02227).

    None where a response is right. Else the k teachers of the highest score, earlier ones first among equal
    ones (so list shorter traces first), replace that many responses chosen at random. Teachers that replace
    have the reward 1. k = n leaves nothing to compare: all advantages are 0.

    Args:
        rewards: of the n responses of the policy.
        teachers: scores of teachers' responses, see `comprehension`.
        right: the least reward of a right response.
        seed: of this group.
    Returns:
        number of the replaced response -> number of the teacher's.
    """
    if any(reward >= right for reward in rewards):
        return {}
    best = sorted(range(len(teachers)), key=lambda i: -teachers[i])[: min(k, len(rewards))]
    places = sorted(range(len(rewards)), key=lambda i: _hash(seed, i))[: len(best)]
    return dict(zip(places, best))


def comprehension(
    answer_logp: Sequence[float], *, without: float = 0.0, format: float = 0.0, share: float = 0.1
) -> float:
    """A teacher's score by how well the policy understands it (AMPO): (1 − share) · max(0, s − `without`) +
    share · `format`, s the mean probability of the right answer's tokens after the teacher's text.

    Args:
        answer_logp: the policy's log-probs of these tokens.
        without: the same s without the teacher's text; the authors' code has 0.
        format: whether the text has the right format, 0 to 1.
    """
    if not answer_logp:
        raise Refused("comprehension: expected log-probs of the answer's tokens, got none")
    s = math.fsum(math.exp(logp) for logp in answer_logp) / len(answer_logp)
    return (1 - share) * max(0.0, s - without) + share * format


def asks_for_hint(rewards: Sequence[float], *, threshold: float = 1e-3) -> bool:
    """Whether a group is sampled again with a hint (Guide, arXiv 2506.13923): its accuracy is at most
    `threshold`."""
    return math.fsum(rewards) / len(rewards) <= threshold


def keeps_hinted(rewards: Sequence[float], *, threshold: float = 1e-3) -> bool:
    """Whether the hinted group is trained on: neither all wrong nor all right."""
    return threshold <= math.fsum(rewards) / len(rewards) <= 1 - threshold


def propagate(parents: Sequence[K], rewards: Sequence[float]) -> dict[K, float]:
    """The reward of each parent: the mean of its children's (SOPHIA, arXiv 2507.16814)."""
    children: dict[K, list[float]] = defaultdict(list)
    for parent, reward in zip(parents, rewards, strict=True):
        children[parent].append(reward)
    return {parent: math.fsum(values) / len(values) for parent, values in children.items()}


def shortest_right(samples: Sequence[Sample], alpha: float, *, right: float = 1.0) -> list[Sample]:
    """The shortest right response to each prompt among those whose parent's reward is above α (SOPHIA).

    The parent of a sample is meta["parent"]; its reward is the mean of its children's, see `propagate`. A
    prompt without such a response isn't there. The first of equally short ones is kept.
    """
    rewards = [_reward(sample) for sample in samples]
    parent_rewards = propagate([_parent(sample) for sample in samples], rewards)
    encoded = all(sample.action is not None for sample in samples)
    best: dict[str, Sample] = {}
    for sample, reward in zip(samples, rewards):
        if reward < right or parent_rewards[_parent(sample)] <= alpha:
            continue
        shortest = best.get(sample.prompt_id)
        if shortest is None or _length(sample, encoded) < _length(shortest, encoded):
            best[sample.prompt_id] = sample
    return list(best.values())


def _reward(sample: Sample) -> float:
    if sample.reward is None:
        raise Refused(
            f"shortest_right: sample {sample.id} has no reward; score it first (agro score), or leave it out"
        )
    return sample.reward


def _parent(sample: Sample) -> tuple[str, str]:
    """A parent belongs to a prompt."""
    meta: Mapping[str, object] = sample.meta
    if meta.get("parent") is None:
        raise Refused(f"shortest_right: sample {sample.id} has no meta.parent; import it (agro import --map)")
    return sample.prompt_id, str(meta["parent"])


def _length(sample: Sample, encoded: bool) -> int:
    """In tokens of the policy, or in characters where not all were encoded."""
    if encoded and sample.action is not None:
        return int(sample.action.sum())
    return len(sample.response)


def _hash(seed: int, item: int) -> bytes:
    return blake2b(f"{seed}/{item}".encode(), digest_size=8).digest()
