"""A run's inputs: its prompts, which of them are valid, scorable and held out, and the fingerprints of its
models, files and code, by which `--resume` detects changes.

`data.hold_out_most` bounds the number of held-out prompts; RUN/set_aside.jsonl has those that the start and
the trained model answer.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from agro.config import DataConfig, RunConfig
from agro.errors import Refused
from agro.io import record_files
from agro.io.files import digest, digest_of_module, digest_of_object, write
from agro.io.numbers import count
from agro.models.encoding import Encoder, InvalidSample
from agro.models.policy import Policy
from agro.models.reference import fingerprint
from agro.rewards import Reward
from agro.rollout.prompts import load_prompts, places, read_prompts
from agro.runs.folder import SET_ASIDE
from agro.runs.side_by_side import place
from agro.stats.paired import LEAST
from agro.store import Store, is_held_out
from agro.store.draw_rules import noise
from agro.store.location import Location, exists
from agro.store.samples import chosen
from agro.store.split import NEAR_COPIES, Clusters, clusters_in, read_clusters
from agro.train.learner import MOVING
from agro.train.phases import Phase
from agro.train.source import stored_prompt
from agro.train.trainable import check_enough
from agro.types import Prompt, Text

FEWEST, MOST = 20, 128  # held-out prompts: smallest useful number, and largest number that models answer


def configured_prompts(data: DataConfig, key: str) -> tuple[list[Prompt], list[str]]:
    """The prompts of `data.{key}`, none if it isn't set, and notes on those that are dropped.

    Raises `Refused` for duplicate prompts, unless data.invalid_prompts drops them.
    """
    paths = data.paths(key)
    if not paths:
        return [], []
    prompts, repeated = read_prompts(paths, data.columns)
    text = f"data.{key}: {len(repeated)} prompts are there twice ({'; '.join(repeated[:3])})"
    if repeated and data.invalid_prompts == "refuse":
        raise Refused(f'{text}. What to do: keep one of each, or set data.invalid_prompts = "drop"')
    return prompts, [f"{text}; they are dropped"] if repeated else []


def valid_prompts(
    prompts: Sequence[Prompt], encoder: Encoder, data: DataConfig, key: str
) -> tuple[list[Prompt], list[str]]:
    """The prompts of `data.{key}` that the model can encode, and notes on those that are dropped.

    Raises `Refused` for the others, unless data.invalid_prompts drops them, and if none is valid.
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
    files = data.paths("eval_prompts" if key == "eval_prompts" else "prompts")  # others are of a store
    lines = places(files, data.columns, named)
    reasons = "; ".join((f"{lines[name]}: " if name in lines else "") + problems[name] for name in named)
    text = f"data.{key}: {len(problems)} of {len(prompts)} prompts are invalid ({reasons})"
    if data.invalid_prompts == "refuse" or not valid:
        raise Refused(f'{text}. What to do: remove or shorten them, or set data.invalid_prompts = "drop"')
    return valid, [f"{text}; they are dropped"]


def check_scorable(
    reward: Reward, prompts_of: Mapping[str, Sequence[Prompt]], max_failed: float
) -> list[str]:
    """Notes on prompts whose responses can't be scored because they lack a column that `reward` reads.

    If the share of such prompts exceeds `max_failed` for a key, closes the reward and raises `Refused`.
    """
    notes = []
    for key, prompts in prompts_of.items():
        problems = [(prompt, reward.problem(prompt.columns)) for prompt in prompts]
        bad = [f"{problem} (prompt {prompt.id})" for prompt, problem in problems if problem]
        text = f"data.{key}: {len(bad)} of {len(prompts)} prompts can't be scored: {'; '.join(bad[:3])}"
        if len(bad) > max_failed * len(prompts):
            reward.close()
            has = ", ".join(prompts[0].columns) or "none but the prompt"
            way_out = 'name the one to use, as in data.columns.NAME = "COLUMN"'
            if key == "hold_out":  # prompts of a store
                way_out = "set data.ask_held_out = false"
            raise Refused(
                f"{text}. The columns of the first are: {has}. What to do: add the column, or {way_out}"
            )
        notes += [text] if bad else []
    return notes


def valued_prompts(phases: Sequence[Phase], prompts: Sequence[Prompt], path: Location) -> dict[str, Text]:
    """By id, the prompts that phases with stored values train on, as far as is known before the run.

    `path`: the store that phases draw from.
    """
    valued: dict[str, Text] = {}
    samples_fresh = False
    for phase in phases:
        data = phase.config.data
        samples_fresh = samples_fresh or data.samples_fresh  # later phases draw what a phase samples
        if phase.takes_stored_value and samples_fresh:
            valued |= {p.id: p.text for p in prompts}
        if phase.takes_stored_value and data.draws_stored and exists(path):
            with Store.open(path, read_only=True) as store:
                scored = store.samples(scored=True, **chosen(data))
                valued |= {sample.prompt_id: sample.prompt for sample in scored}
    return valued


def _texts(prompts: Sequence[Prompt], store: Location | None) -> dict[str, Text]:
    """By id, the texts of the prompts and of those in a store."""
    texts = {prompt.id: prompt.text for prompt in prompts}
    if store is not None and exists(store):
        with Store.open(store, read_only=True) as opened:
            texts |= dict(opened.survey.each_prompt())
    return texts


class HoldOut(NamedTuple):
    """The prompts that a run trains on, and those that it holds out of data.prompts and its store."""

    prompts: list[Prompt]
    set_aside: list[Prompt]  # up to `MOST` held-out ones that models answer, chosen by a hash
    clusters: Clusters  # near-copies, which are held out or trained on together
    notes: list[str]


def hold_out(
    config: RunConfig, prompts: Sequence[Prompt], location: Location, resumed: Path | None, budget: Budget
) -> HoldOut:
    """Split by `data.hold_out`. `resumed`: the folder of a resumed run, which keeps its split.

    Raises `Refused` if none of `prompts` is left to train on.
    """
    data, clusters, notes = config.data, budget.clusters, list[str]()
    if resumed is not None:
        clusters = read_clusters(resumed)
        if clusters is None and (resumed / "metrics.jsonl").exists():
            raise Refused(
                f"{resumed / NEAR_COPIES}: expected the near-copies that the run holds out together, got no "
                "such file; put it back (a run that began without data.hold_out resumes without it)"
            )
    warns = resumed is None and not budget.bounded and data.eval_prompts is None
    texts = _texts(prompts, location) if clusters is None or warns else {}
    if clusters is None:
        clusters, notes = _near_copies(texts, data)
    if warns:
        notes += _few(data, texts, clusters)
    parts: tuple[list[Prompt], list[Prompt]] = ([], [])
    for prompt in prompts:
        parts[is_held_out(clusters.get(prompt.id, prompt.id), data.hold_out)].append(prompt)
    if prompts and not parts[0]:
        raise Refused(
            f"data.hold_out = {data.hold_out:g} holds out all {len(prompts)} prompts of data.prompts; "
            "lower it"
        )
    set_aside: list[Prompt] = []
    if data.eval_prompts is None:
        file = None if resumed is None else resumed / SET_ASIDE
        if file is not None and file.exists():
            set_aside = load_prompts(file)
        elif data.prompts is not None:
            set_aside = sorted(parts[1], key=lambda prompt: place(prompt.id))[:MOST]
        else:
            set_aside = _stored_held_out(data, location, clusters)
    if config.asks_held_out and set_aside:
        notes.append(
            f"data.hold_out: the start and the trained model answer {len(set_aside)} of the held-out prompts "
            f"(RUN/{SET_ASIDE})"
        )
    return HoldOut(parts[0], set_aside, clusters, notes)


def write_set_aside(folder: Path, prompts: Sequence[Prompt]) -> None:
    """Write a run's set-aside prompts, which a resume and `agro eval RUN` read."""
    records = ({**prompt.columns, "prompt": prompt.text, "prompt_id": prompt.id} for prompt in prompts)
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    write(folder / SET_ASIDE, "".join(lines))


def _stored_held_out(data: DataConfig, location: Location, clusters: Clusters) -> list[Prompt]:
    """Held-out prompts of the store, without those of episodes."""
    with Store.open(location, read_only=True) as store:
        store.split.use(clusters)
        rows = store.survey.summaries(**(chosen(data) | {"min_reward": None}))
        single = {row.prompt_id for row in rows if row.episode is None}
        ordered = sorted(filter(store.split.held_out(data), single), key=place)
        stored = (stored_prompt(store, prompt_id) for prompt_id in ordered)
        return list(islice((prompt for prompt in stored if prompt is not None), MOST))


def _near_copies(texts: Mapping[str, Text], data: DataConfig) -> tuple[Clusters, list[str]]:
    """The clusters by which a new run holds prompts out, and a note."""
    clusters = clusters_in(texts.items(), data.near_copies)
    note = (
        f"data.hold_out: {len(clusters)} of {len(texts)} prompts are near-copies of others, in "
        f"{len(set(clusters.values()))} clusters, each of which is either held out or trained on as a unit "
        "(data.near_copies)"
    )
    return clusters, [note] if clusters else []


def _few(data: DataConfig, ids: Collection[str], clusters: Clusters) -> list[str]:
    """A note if the share of `data.hold_out` holds out none of these prompts, or too few to show much."""
    names = [clusters.get(prompt_id, prompt_id) for prompt_id in ids]
    size = sum(is_held_out(name, data.hold_out) for name in names)
    if size >= FEWEST or not ids:
        return []
    text = f"data.hold_out: by their hashes {size} of {count(len(ids))} prompts are held out"
    if size:
        shows = "too few to show anything" if size < LEAST else "enough to show only a large difference"
        return [f"{text}, {shows}; data.eval_prompts or a larger share gives more"]
    lowest = min(noise(0, 0, "hold_out", name) for name in names)
    share = math.ceil(lowest / 2**64 * 1000 + 1) / 1000
    way_out = f"data.hold_out={share} holds out some" if share < 1 else "data.eval_prompts gives others"
    return [f"{text}, so nothing compares the result with the start; {way_out}"]


class Budget(NamedTuple):
    """The configuration with its held-out share, and notes that explain the share."""

    config: RunConfig
    notes: tuple[str, ...] = ()
    clusters: Clusters | None = None  # the share was computed with these
    bounded: bool = True  # whether data.hold_out_most was given


def within_budget(config: RunConfig, location: Location, folder: Path, *, resume: bool) -> Budget:
    """The share of `data.hold_out` that `data.hold_out_most` allows. A resumed run keeps its share."""
    recorded, data = folder / "config.json", config.data
    if data.hold_out_most is None:
        return Budget(config, bounded=False)
    if resume and recorded.exists():
        previous = RunConfig.load(recorded).data
        return Budget(_holding(config, previous.hold_out, ask=previous.ask_held_out))
    nothing = _holding(config, 0.0)
    phases = Phase.all(nothing)  # with a reference only if the run has one anyway
    configs = [phase.config for phase in phases]
    if not data.hold_out or any(each.data.eval_prompts or each.data.eval_store for each in configs):
        return Budget(nothing)
    changes = any(each.policy.reference in MOVING for each in configs)
    if data.store is not None and (changes or not any(phase.reads_reference for phase in phases)):
        return _without(nothing, "stored groups are measured against a reference, and nothing else needs one")
    prompts, _ = configured_prompts(data, "prompts")
    texts = _texts(prompts, location if data.store is not None else None)
    limit = min(data.hold_out_most, int(data.hold_out * len(texts)))
    if limit < FEWEST:
        return _without(
            nothing, f"a share of {data.hold_out:g} of {count(len(texts))} is fewer than {FEWEST}"
        )
    clusters, copied = _near_copies(texts, data)
    share, size = largest_share(texts, clusters, limit)
    if size < FEWEST:
        return _without(nothing, "too many of them are near-copies")
    ask = data.ask_held_out
    if ask is None:  # a log's prompts are asked only if a configured reward may score them
        ask = data.prompts is not None or (not config.reward.is_default and config.environment is None)
    bounded = _holding(config, share, ask=ask)
    try:
        check_enough(Phase.all(bounded), location, clusters=clusters)
    except Refused:
        return _without(nothing, "a step needs all groups that may be drawn")
    note = (
        f"{count(size)} of {count(len(texts))} prompts are held out and never trained on, to compare the "
        "result with the start; data.hold_out=0 trains on all"
    )
    return Budget(bounded, (note, *copied), clusters)


def largest_share(ids: Iterable[str], clusters: Clusters, limit: int) -> tuple[float, int]:
    """The largest share by which `draw_rules.is_held_out` holds out at most `limit` prompts, and how many."""
    sizes = Counter(clusters.get(prompt_id, prompt_id) for prompt_id in ids)
    total, below = 0, 0
    for position, size in sorted((noise(0, 0, "hold_out", name), size) for name, size in sizes.items()):
        if total + size > limit:
            break
        total, below = total + size, position
    return (below + position) / 2**65, total  # midway between the last held-out prompt and the next


def _holding(config: RunConfig, share: float, *, ask: bool | None = None) -> RunConfig:
    changes = {"hold_out": share, "hold_out_most": None, "ask_held_out": ask}
    return config.model_copy(update={"data": config.data.model_copy(update=changes)})


def _without(config: RunConfig, reason: str) -> Budget:
    way_out = "data.eval_prompts, or agro rate RUN --prompts FILE, would compare the result with the start"
    return Budget(config, (f"no prompts are held out, since {reason}; {way_out}",))


WRITTEN = {"judge": "cache"}  # by reward, the option that names a file to which the run adds
Functions = Mapping[str, Callable[..., Any]]  # rewards that are objects of this process, by their names


def fingerprints(
    config: RunConfig, policy: Policy, reference: Policy | None, functions: Functions
) -> dict[str, str]:
    """Fingerprints, by key, of the models, files and code that the configuration names and steps use."""
    names = [key for key in ("model", "new") if getattr(config.policy, key) is not None]
    if config.policy.lora is not None and config.policy.lora.start is not None:
        names.append("lora.start")
    if config.policy.chat.template is not None:
        names.append("chat.template")
    digests = {", ".join(f"policy.{name}" for name in names): fingerprint(policy)}
    if reference is not None and config.phase(config.phase_names[0]).policy.reference == "model":
        digests["policy.reference_model"] = fingerprint(reference)
    for key in ("prompts", "eval_prompts"):
        if paths := config.data.paths(key):
            digests[f"data.{key}"] = " ".join(map(record_files.fingerprint, paths))
    digests |= of_scoring(config, functions)
    for phase in config.phase_names:
        # The code of the objective, of the engine and of the source's wrapper, and read-only stores' samples.
        part = config.phase(phase)
        entries = _code_digests("objective", part.objective.name, {})
        entries |= _file_digests("source", part.source.options) | _file_digests("engine", part.engine.options)
        for key, name in {"source.around": part.source.around, "engine.kind": part.engine.kind}.items():
            if code := digest_of_module(name or ""):
                entries[key] = code
        for key in ("value_store", "eval_store"):
            path = getattr(part.data, key)
            if path is not None and path != part.data.store and exists(path):
                with Store.open(path, read_only=True) as store:
                    entries[f"data.{key}"] = store.ledger.fingerprint()
        _add(digests, phase, entries)
    return digests


def of_scoring(config: RunConfig, functions: Functions) -> dict[str, str]:
    """Fingerprints, by key, of the rewards and environments."""
    digests: dict[str, str] = {}
    if config.scores:
        digests |= _code_digests("reward", config.reward.name, functions, config.reward.options)
        digests |= _code_digests("reward.meaning", config.reward.meaning, functions)
        for i, part in enumerate(config.reward.functions):
            digests |= _code_digests(f"reward.functions.{i}", part.name, functions, part.options)
    for phase in config.phase_names:
        environment = config.phase(phase).environment
        if environment is not None:
            _add(digests, phase, _code_digests("environment", environment.name, {}, environment.options))
    return digests


def _add(digests: dict[str, str], phase: str, entries: Mapping[str, str]) -> None:
    """Add a phase's entries. A key whose value differs from an earlier phase's gets a prefix."""
    for key, value in entries.items():
        if digests.setdefault(key, value) != value:
            digests[f"phases.{phase}.{key}"] = value


def _code_digests(
    section: str, name: str | None, functions: Functions, options: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Digests of the code that `name` stands for and of the files that options name."""
    digests = _file_digests(section, options or {}, WRITTEN.get(name or "", ""))
    if name is not None:
        code = digest_of_object(functions[name]) if name in functions else digest_of_module(name)
        if code is not None:
            digests[f"{section}.name"] = code
    return digests


def _file_digests(section: str, options: Mapping[str, Any], written: str = "") -> dict[str, str]:
    """Digests of the files whose paths are values of options, also nested ones, except option `written`."""
    digests: dict[str, str] = {}
    for key, value in options.items():
        if isinstance(value, Mapping):
            nested = {f"{key}.{name}": item for name, item in value.items()}
            digests |= _file_digests(section, nested, written)
        elif isinstance(value, str) and key != written:
            with suppress(OSError, ValueError):  # the text can't be a path
                if (path := Path(value).expanduser()).is_file():
                    digests[f"{section}.options.{key}"] = digest(path)
    return digests
