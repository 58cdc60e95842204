"""The prompts of a run: those that it can ask and score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from agro.config import DataConfig
from agro.errors import Refused
from agro.io.near_copies import cluster_names
from agro.models.encoding import Encoder, InvalidSample
from agro.rewards import Reward
from agro.rollout.prompts import places, read_prompts
from agro.store import Store, is_held_out
from agro.store.location import Location, exists
from agro.store.queries import chosen
from agro.store.split import Clusters, clusters_in, read_clusters
from agro.train.phases import Phase
from agro.types import Prompt, Text


def valued_prompts(phases: Sequence[Phase], prompts: Sequence[Prompt], path: Location) -> dict[str, Text]:
    """By id, the prompts that phases with stored values train on, as far as is known before the run.

    `path`: the store that phases draw from.
    """
    valued: dict[str, Text] = {}
    samples_fresh = False
    for phase in phases:
        data = phase.config.data
        samples_fresh = samples_fresh or data.samples_fresh  # what a phase samples is stored for later ones
        if not phase.takes_stored_value:
            continue
        if samples_fresh:
            valued |= {p.id: p.text for p in prompts}
        if data.draws_stored and exists(path):
            with Store.open(path, read_only=True) as store:
                scored = store.samples(scored=True, **chosen(data))
                valued |= {sample.prompt_id: sample.prompt for sample in scored}
    return valued


def configured_prompts(data: DataConfig, key: str) -> tuple[list[Prompt], list[str]]:
    """The prompts of `data.{key}`, none where it isn't set, and notes on those that are dropped.

    Raises `Refused` for prompts that are there twice, unless data.invalid_prompts drops them.
    """
    paths = data.paths(key)
    if not paths:
        return [], []
    prompts, repeated = read_prompts(paths, data.columns)
    if not repeated:
        return prompts, []
    text = f"data.{key}: {len(repeated)} prompts are there twice ({'; '.join(repeated[:3])})"
    if data.invalid_prompts == "refuse":
        raise Refused(f'{text}. What to do: keep one of each, or set data.invalid_prompts = "drop"')
    return prompts, [f"{text}; they are dropped"]


def recorded_clusters(run: Path) -> Clusters | None:
    """Of a run that is resumed: none where it began before near-copies were held out together, and None where
    it hasn't begun."""
    recorded = read_clusters(run)
    return {} if recorded is None and (run / "metrics.jsonl").exists() else recorded


def near_copies(
    data: DataConfig, prompts: Sequence[Prompt], store: Location, recorded: Clusters | None
) -> tuple[Clusters, list[str]]:
    """The clusters by which a run holds out prompts of its store and of `prompts`, and a note.

    `recorded`: those of a run that is resumed, which stay.
    """
    if recorded is not None:
        return recorded, []
    texts = texts_of(prompts, store)
    clusters = clusters_in(texts.items(), data.near_copies)
    if not clusters:
        return {}, []
    return clusters, [
        f"data.hold_out: {len(clusters)} of {len(texts)} prompts are near-copies of others, in "
        f"{len(set(clusters.values()))} clusters, each of which is held out or trained on completely "
        "(data.near_copies)"
    ]


def texts_of(prompts: Sequence[Prompt], store: Location | None) -> dict[str, Text]:
    """By id the texts of prompts, and those of a store."""
    texts = {prompt.id: prompt.text for prompt in prompts}
    if store is not None and exists(store):
        with Store.open(store, read_only=True) as opened:
            texts |= dict(opened.survey.each_prompt())
    return texts


def copies_of_training(
    data: DataConfig, held_out: Sequence[Prompt], prompts: Sequence[Prompt], store: Location
) -> list[str]:
    """A note on held-out prompts that are near-copies of prompts to train on: of `prompts`, and of the store
    that is drawn from."""
    texts = texts_of(prompts, store if data.draws_stored else None)
    ids = {prompt.id for prompt in held_out}
    names = cluster_names(texts | {prompt.id: prompt.text for prompt in held_out}, data.near_copies)
    trained = {name for prompt_id, name in names.items() if prompt_id not in ids}
    copies = [prompt.id for prompt in held_out if names[prompt.id] in trained]
    if not copies:
        return []
    return [
        f"data.eval_prompts: {len(copies)} of {len(held_out)} held-out prompts are near-copies of prompts to "
        f"train on (for one: {', '.join(copies[:3])}), so that what is measured on them is partly what was "
        "learned by heart; near-copies are those of data.near_copies"
    ]


def split_prompts(
    prompts: Sequence[Prompt], data: DataConfig, clusters: Clusters
) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts to train on, and those of `data.hold_out`; raises `Refused` where none is to train on."""
    parts: tuple[list[Prompt], list[Prompt]] = ([], [])
    for prompt in prompts:
        parts[is_held_out(clusters.get(prompt.id, prompt.id), data.hold_out)].append(prompt)
    if prompts and not parts[0]:
        held_out = f"holds out all {len(prompts)} prompts of data.prompts"
        raise Refused(f"data.hold_out = {data.hold_out:g} {held_out}; lower it")
    return parts


def check_scorable(
    reward: Reward, prompts_of: Mapping[str, Sequence[Prompt]], max_failed: float
) -> list[str]:
    """Notes on prompts whose responses can't be scored, since they lack a column that `reward` reads.

    Where more than the share `max_failed` of those of one key do, closes it and raises `Refused`.
    """
    notes = []
    for key, prompts in prompts_of.items():
        problems = [(prompt, reward.problem(prompt.columns)) for prompt in prompts]
        bad = [f"{problem} (prompt {prompt.id})" for prompt, problem in problems if problem]
        text = f"data.{key}: {len(bad)} of {len(prompts)} prompts can't be scored: {'; '.join(bad[:3])}"
        if len(bad) > max_failed * len(prompts):
            reward.close()
            has = ", ".join(prompts[0].columns) or "none but the prompt"
            way_out = 'or say which one it is, as in data.columns.NAME = "COLUMN"'
            if key == "hold_out":  # of a store
                way_out = "or set data.ask_held_out = false"
            raise Refused(
                f"{text}. The columns of the first are: {has}. What to do: add the column, {way_out}"
            )
        if bad:
            notes.append(text)
    return notes


def valid_prompts(
    prompts: Sequence[Prompt], encoder: Encoder, config: DataConfig, key: str
) -> tuple[list[Prompt], list[str]]:
    """The prompts of `data.{key}` that the model can be asked, and notes on those that are dropped.

    Raises `Refused` for the others, unless data.invalid_prompts drops them, and where none is valid.
    """
    valid, problems = [], {}
    for prompt in prompts:
        try:
            encoder.checked_prompt(prompt)
            valid.append(prompt)
        except InvalidSample as error:
            problems[prompt.id] = str(error)
    if not problems:
        return valid, []
    named = list(problems)[:3]
    files = config.paths("eval_prompts" if key == "eval_prompts" else "prompts")  # others are of a store
    lines = places(files, config.columns, named)
    reasons = "; ".join((f"{lines[name]}: " if name in lines else "") + problems[name] for name in named)
    text = f"data.{key}: {len(problems)} of {len(prompts)} prompts are invalid ({reasons})"
    if config.invalid_prompts == "refuse" or not valid:
        raise Refused(f'{text}. What to do: remove or shorten them, or set data.invalid_prompts = "drop"')
    return valid, [f"{text}; they are dropped"]
