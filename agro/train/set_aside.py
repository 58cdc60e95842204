"""Prompts that a run sets aside: how many `data.hold_out` holds out where `data.hold_out_most` bounds it, and
RUN/set_aside.jsonl, those of them that the start and the trained model answer."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from agro.config import DataConfig, RunConfig
from agro.errors import Refused
from agro.io.files import write
from agro.io.numbers import count
from agro.rollout.paired import LEAST
from agro.rollout.prompts import load_prompts
from agro.runs.folder import SET_ASIDE
from agro.runs.side_by_side import place
from agro.store import Store, is_held_out
from agro.store.draw_rules import noise
from agro.store.location import Location, exists
from agro.store.queries import chosen
from agro.store.split import Clusters
from agro.train.inputs import configured_prompts, near_copies
from agro.train.phases import Phase
from agro.train.source import stored_prompt
from agro.train.trainable import check_enough
from agro.types import Prompt

FEWEST, MOST = 20, 128  # held-out prompts: fewer tell too little; so many are answered, at most


class Budget(NamedTuple):
    """The configuration with the share that is held out, and notes on why it is that."""

    config: RunConfig
    notes: tuple[str, ...] = ()
    clusters: Clusters | None = None  # by which the share was computed


def within_budget(config: RunConfig, location: Location, out: Path, *, resume: bool) -> Budget:
    """The share of `data.hold_out` that `data.hold_out_most` allows. A run that is resumed keeps its own."""
    recorded, data = out / "config.json", config.data
    if resume and recorded.exists():
        before = RunConfig.load(recorded).data
        return Budget(_holding(config, before.hold_out, ask=before.ask_held_out))
    phases = [phase.config.data for phase in Phase.all(config)]
    if not data.hold_out or any(of_phase.eval_prompts or of_phase.eval_store for of_phase in phases):
        return Budget(_holding(config, 0.0))
    alone = Phase.all(_holding(config, 0.0))  # whether that has a reference, which stays the same
    changes = any(phase.config.policy.reference in ("ema", "periodic") for phase in alone)
    if data.store is not None and (changes or not any(phase.reads_reference for phase in alone)):
        return _without(config, "stored groups are measured against a reference, and nothing else needs one")
    prompts, _ = configured_prompts(data, "prompts")
    ids = {prompt.id for prompt in prompts}
    if data.store is not None and exists(location):
        with Store.open(location, read_only=True) as store:
            ids |= {prompt_id for prompt_id, _ in store.survey.each_prompt()}
    most = min(data.hold_out_most or 0, int(data.hold_out * len(ids)))
    if most < FEWEST:
        return _without(config, f"a share of {data.hold_out:g} of {count(len(ids))} is fewer than {FEWEST}")
    clusters, copied = near_copies(data, prompts, location, None)
    share, held = largest_share(ids, clusters, most)
    if held < FEWEST:
        return _without(config, "they have so many near-copies")
    ask = data.ask_held_out
    if ask is None:  # those of a log where a reward is given that may score them
        ask = data.prompts is not None or (not config.reward.is_default and config.environment is None)
    budgeted = _holding(config, share, ask=ask)
    try:
        check_enough(Phase.all(budgeted), location, clusters=clusters)
    except Refused:
        return _without(config, "a step needs all groups that may be drawn")
    note = (
        f"{count(held)} of {count(len(ids))} prompts are held out and never trained on, to compare the "
        "result with the start; data.hold_out=0 trains on all"
    )
    return Budget(budgeted, (note, *copied), clusters)


def largest_share(ids: Iterable[str], clusters: Clusters, most: int) -> tuple[float, int]:
    """The largest share of which `draw_rules.is_held_out` holds out at most so many prompts, and how many."""
    sizes = Counter(clusters.get(prompt_id, prompt_id) for prompt_id in ids)
    ordered = sorted((noise(0, 0, "hold_out", name), size) for name, size in sizes.items())
    held, below = 0, 0
    for position, size in ordered:
        if held + size > most:
            break
        held, below = held + size, position
    return (below + position) / 2**65, held  # between the last that is held out and the next


def few_held_out(data: DataConfig, ids: Collection[str], clusters: Clusters) -> list[str]:
    """A note where the share of `data.hold_out` holds out none of these prompts, or too few to tell much."""
    held = sum(is_held_out(clusters.get(prompt_id, prompt_id), data.hold_out) for prompt_id in ids)
    if held >= FEWEST or not ids:
        return []
    text = f"data.hold_out: by their hashes {held} of {count(len(ids))} prompts are held out"
    if not held:
        least = min(noise(0, 0, "hold_out", clusters.get(prompt_id, prompt_id)) for prompt_id in ids)
        share = math.ceil(least / 2**64 * 1000 + 1) / 1000
        way_out = f"data.hold_out={share} holds out some" if share < 1 else "data.eval_prompts gives others"
        return [f"{text}, so that nothing compares the result with the start; {way_out}"]
    shows = "nothing can be shown" if held < LEAST else "only a large difference can be shown"
    return [f"{text}, of which {shows}; data.eval_prompts or a larger share gives more"]


def _holding(config: RunConfig, share: float, *, ask: bool | None = None) -> RunConfig:
    changes = {"hold_out": share, "hold_out_most": None, "ask_held_out": ask}
    return config.model_copy(update={"data": config.data.model_copy(update=changes)})


def _without(config: RunConfig, reason: str) -> Budget:
    way_out = "data.eval_prompts, or agro rate RUN --prompts FILE, would compare the result with the start"
    return Budget(_holding(config, 0.0), (f"no prompts are held out, since {reason}; {way_out}",))


def set_aside(
    config: RunConfig,
    held_out: Sequence[Prompt],
    location: Location,
    clusters: Clusters,
    recorded: Path | None,
) -> list[Prompt]:
    """Up to `MOST` held-out prompts, chosen by a hash: of `held_out`, those of data.prompts, or of the store.

    `recorded`: the file of a run that is resumed, which are kept.
    """
    if recorded is not None and recorded.exists():
        return load_prompts(recorded)
    if config.data.prompts is not None:
        return sorted(held_out, key=lambda prompt: place(prompt.id))[:MOST]
    with Store.open(location, read_only=True) as store:
        store.split.clusters = clusters
        is_held_out = store.split.held_out(config.data)
        wanted = chosen(config.data) | {"min_reward": None}
        single = {row.prompt_id for row in store.survey.summaries(**wanted) if row.episode is None}
        ordered = sorted(filter(is_held_out, single), key=place)
        stored = (stored_prompt(store, prompt_id) for prompt_id in ordered)
        return list(islice((prompt for prompt in stored if prompt is not None), MOST))


def write_set_aside(folder: Path, prompts: Sequence[Prompt]) -> None:
    """Keep those of a run, for a run that is resumed and for `agro eval RUN`."""
    records = ({**prompt.columns, "prompt": prompt.text, "prompt_id": prompt.id} for prompt in prompts)
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    write(folder / SET_ASIDE, "".join(lines))
