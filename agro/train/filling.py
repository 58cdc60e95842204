"""The fresh groups of a step: all that a source adds, or only those with a spread of rewards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agro.config import Data
from agro.encoding import Encoder, InvalidSample
from agro.errors import Refused
from agro.rewards.function import RESERVED
from agro.rollout import Collected
from agro.store import Picked, Store
from agro.train.collate import total_reward
from agro.train.source import Source, Wanted
from agro.types import Prompt

ROUNDS = 10  # of sampling for a step


@dataclass(frozen=True)
class Filled:
    """The fresh groups of a step."""

    made: Collected
    prompts: int  # sampled from
    equal: int = 0  # responses of groups with equal rewards, which aren't trained on


def fill(source: Source, store: Store, wanted: Wanted, *, spread: bool) -> Filled:
    """Sample the fresh groups of a step; with `spread`, others in place of those with equal rewards.

    They stay in the store. After `ROUNDS` rounds the step has as many groups as were found.
    """
    made = source.fill(wanted)
    if not spread:
        return Filled(made, wanted.groups)
    parts, kept = [made], _with_spread(store, made.ids)
    prompts = wanted.groups
    while len(kept) < wanted.groups and len(parts) < ROUNDS:
        missing = wanted.groups - len(kept)
        made = source.fill(Wanted(wanted.step, missing, wanted.first + prompts, before=prompts))
        parts.append(made)
        kept += _with_spread(store, made.ids)
        prompts += missing
    ids = tuple(i for group in kept for i in group)
    return Filled(_joined(parts, ids), prompts, equal=sum(len(part.ids) for part in parts) - len(ids))


def complete(
    source: Source,
    store: Store,
    filled: Filled,
    picks: Sequence[Picked],
    wanted: Wanted,
    encoder: Encoder,
) -> tuple[Filled, list[Picked]]:
    """Sample `data.complete_groups` responses to the prompt of each picked group.

    Returns them together with what was sampled before, and the groups whose prompt the model can be asked.
    """
    asked = []
    kept = []
    for picked in picks:
        valid = []
        for prompt_id in picked.groups:
            prompt = stored_prompt(store, prompt_id)
            if prompt is not None and _has_room(prompt, encoder, picked.rule.data):
                asked.append(prompt)
                valid.append(prompt_id)
        kept.append(Picked(picked.rule, valid))
    if not asked:
        return filled, kept
    made = source.fill(Wanted(wanted.step, 0, wanted.first, joining=asked))
    both = _joined([filled.made, made], (*filled.made.ids, *made.ids))
    return replace(filled, made=both), kept


def stored_prompt(store: Store, prompt_id: str) -> Prompt | None:
    """The prompt of a group, with the columns of its first intact record; None where none is intact."""
    for sample in store.samples(prompt_id=prompt_id, on_damaged=lambda i: None):
        columns = {name: value for name, value in sample.meta.items() if name not in RESERVED}
        return Prompt(sample.prompt, sample.prompt_id, columns)
    return None


def _has_room(prompt: Prompt, encoder: Encoder, data: Data) -> bool:
    """Whether the model can be asked a stored prompt; others are refused, unless data.invalid_prompts drops
    them."""
    try:
        encoder.asked(prompt)
    except InvalidSample as error:
        if data.invalid_prompts == "drop":
            return False
        raise Refused(
            f"data.complete_groups: stored prompt {prompt.id} can't be sampled to: {error}. What to do: "
            'delete it (agro forget --prompt-id), or set data.invalid_prompts = "drop"'
        ) from None
    return True


def _with_spread(store: Store, ids: Sequence[int]) -> list[list[int]]:
    """The ids of each group whose known rewards differ, in the order of `ids`."""
    groups: dict[str, list[int]] = defaultdict(list)
    rewards: dict[str, set[float]] = defaultdict(set)
    samples = {s.id: s for s in store.samples(ids=ids, on_damaged=lambda i: None)}
    for i in ids:
        if i in samples:
            sample = samples[i]
            groups[sample.prompt_id].append(i)
            reward = total_reward(sample)
            if not math.isnan(reward):
                rewards[sample.prompt_id].add(reward)
    return [of_group for prompt_id, of_group in groups.items() if len(rewards[prompt_id]) > 1]


def _joined(parts: Sequence[Collected], ids: tuple[int, ...]) -> Collected:
    failures = [part.failed_requests for part in parts]
    return Collected(
        ids,
        failed=sum(part.failed for part in parts),
        tokens=sum(part.tokens for part in parts),
        too_stale=sum(part.too_stale for part in parts),
        failed_requests=None if None in failures else sum(n or 0 for n in failures),
    )
