"""Load the scores of a model, prompt by prompt, from any place that has them.

These are a run's latest held-out evaluation, a file of `agro eval --out`, a store, samples of an evaluation
harness (a file of one task, or a folder of several), and any other log that `agro import` accepts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Self

from agro.config import DataConfig
from agro.errors import Refused
from agro.io.jsonlines import RECORD_ERRORS, lines, reason_of
from agro.io.record_files import read_records
from agro.io.strictjson import loads
from agro.logs.format_table import Recognizer, format_at, lines_of
from agro.logs.importing import import_files
from agro.logs.protocol import Format, ScoredDocument
from agro.runs.rundata import FILE, HeldOutRewards, Rewards, RunData, check_number, load_run, reward_of
from agro.store import Store
from agro.store.location import is_store, url_of
from agro.store.split import cluster_names
from agro.types import Text, conversation, prompt_hash

REWARD = "reward"  # the metric of agro's own results
HELD_OUT = "held-out prompts"
WAY_OUT = "What to do: agro eval RUN --prompts FILE --reward NAME --out FILE for each, then compare the files"
ENDINGS = (".jsonl", ".json", ".eval", ".parquet", ".jsonl.gz")  # suffixes of a harness's files
LM_EVAL_NAME = re.compile(r"samples_(.+)_\d{4}-\d\d-\d\dT[^/]*")


@dataclass(frozen=True)
class Result:
    """Scores of one set of prompts by metric and prompt id, and a hash of each prompt's text.

    `clusters`: the smallest id among a prompt's near-copies, by prompt id. `prompted`: a hash of what a
    harness prompted the model with, by document. `scoring`: what determines the rewards, as far as known.
    `step`: the step of a run's evaluation. `unreadable`: missing records, and why. `seeds`: number of runs
    that were averaged. `unscored`: the share of unknown scores by metric and prompt id, if there are any.
    """

    name: str
    scores: Mapping[str, Rewards]
    texts: Mapping[str, str]
    clusters: Mapping[str, str]
    step: int | None = None
    task: str = ""
    prompted: Mapping[str, str] = field(default_factory=dict)
    scoring: Mapping[str, Any] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()
    seeds: int = 1
    unscored: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def of_seeds(cls, results: Sequence[Self], name: str) -> Self:
        """The mean over runs with different seeds, by prompt; unknown if one of them is.

        Raises `Refused` if they answered different prompts.
        """
        base, *peers = results
        if not peers:
            return base
        rewards: dict[str, float | None] = {}
        unscored: dict[str, float] = {}
        for peer in peers:
            if peer.texts != base.texts:
                raise Refused(f"{base.name} and {peer.name}: expected the same held-out prompts, got others")
        for key in base.texts:
            values = [value for r in results if (value := r.scores[REWARD].get(key)) is not None]
            rewards[key] = fmean(values) if len(values) == len(results) else None
            if share := fmean(r.unscored.get(REWARD, {}).get(key, 0.0) for r in results):
                unscored[key] = share
        return replace(
            base,
            name=name,
            scores={REWARD: rewards},
            step=base.step if all(peer.step == base.step for peer in peers) else None,
            seeds=len(results),
            unscored={REWARD: unscored},
        )

    @classmethod
    def of_run(cls, run: RunData) -> Self:
        """The latest evaluation of a run. Raises `Refused` if it has no held-out rewards by prompt."""
        path = run.folder / FILE
        if not path.is_file():
            raise Refused(f"{run.folder}: expected a run with held-out rewards ({FILE}). {WAY_OUT}")
        try:
            saved = HeldOutRewards.of(loads(path.read_bytes()), str(path))
        except (OSError, ValueError) as error:
            raise Refused(f"{path}: expected rewards by prompt as JSON: {error}") from None
        if saved.step > run.steps:
            raise Refused(
                f"{path}: expected an evaluation up to step {run.steps} of the run, got step {saved.step}. "
                "What to do: continue the run with --resume, which repeats these steps"
            )
        unscored = {REWARD: {key: share for key, (_, share) in saved.unscored.items()}}
        result = cls(str(run.folder), {REWARD: saved.rewards}, saved.texts, saved.clusters, saved.step)
        return replace(result, task=HELD_OUT, scoring=reward_of(run), unscored=unscored)

    @classmethod
    def of_prompts(
        cls, name: str, values: Mapping[str, Iterable[float | None]], prompts: Mapping[str, Text], **more: Any
    ) -> Self:
        """The result for rewards (of each prompt's responses) and prompts, both by prompt id."""
        texts = {key: prompt_hash(prompt) for key, prompt in prompts.items()}
        clusters = cluster_names(prompts, DataConfig().near_copies)
        scores, unscored = _means(values)
        return cls(name, {REWARD: scores}, texts, clusters, unscored={REWARD: unscored}, **more)

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Read a file of `agro eval --out`. Raises `Refused` with FILE:LINE."""
        rewards: dict[str, list[float | None]] = {}
        prompts: dict[str, Text] = {}
        scoring: dict[str, Any] = {}
        prompt: Any
        with path.open("rb") as file:
            for line in lines(path, file):
                key, prompt, values = (line.value.get(name) for name in ("prompt_id", "prompt", "rewards"))
                if line.error or not isinstance(key, str) or not isinstance(values, list):
                    got = line.error or f"got {line.value!r:.80}"
                    raise Refused(f"{line.where}: expected prompt_id, prompt and rewards of agro eval: {got}")
                if key in rewards:
                    raise Refused(f"{line.where}: expected each prompt once, got {key} again")
                prompt = conversation(prompt, line.where)
                for value in values:
                    check_number(value, f"{line.where}: rewards")
                rewards[key], prompts[key] = values, prompt
                scoring = line.value.get("scored_by") or {}
        return cls.of_prompts(str(path), rewards, prompts, scoring=scoring)

    @classmethod
    def of_store(cls, name: str, store: Store) -> Self:
        """The mean over the scored responses to each prompt; an episode is one response."""
        values: dict[str, dict[Any, float | None]] = {}
        prompts: dict[str, Text] = {}
        for sample in store.samples():
            key = sample.prompt_id
            prompts.setdefault(key, sample.prompt)
            values.setdefault(key, {})[sample.episode or (sample.id,)] = sample.reward
        return cls.of_prompts(name, {key: list(row.values()) for key, row in values.items()}, prompts)


@dataclass
class _Documents:
    """The documents of one task that were read from a file."""

    path: Path
    values: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)  # scores by metric and id
    documents: dict[str, Text] = field(default_factory=dict)
    prompted: dict[str, str] = field(default_factory=dict)

    def add(self, scored: ScoredDocument) -> None:
        """Add a row. A document has several, one per filter and epoch."""
        if self.documents.setdefault(scored.id, scored.document) != scored.document:
            raise Refused(f"id {scored.id}: expected one document of this id, got another one as well")
        self.prompted.setdefault(scored.id, prompt_hash(scored.prompted))
        for metric, value in scored.scores.items():
            self.values.setdefault(metric, {}).setdefault(scored.id, []).append(value)

    def result(self, name: str, task: str, unreadable: Sequence[str]) -> Result:
        scores: dict[str, Rewards] = {}
        unscored: dict[str, Mapping[str, float]] = {}
        for metric, values in self.values.items():
            scores[metric], unscored[metric] = _means({key: values.get(key, ()) for key in self.documents})
        result = Result.of_prompts(name, {}, self.documents, task=task, prompted=self.prompted)
        return replace(result, scores=scores, unscored=unscored, unreadable=tuple(unreadable))


def _means(values: Mapping[str, Iterable[float | None]]) -> tuple[dict[str, float | None], dict[str, float]]:
    """By prompt, the mean of its known scores (None without any), and the share of unknown ones if any."""
    means: dict[str, float | None] = {}
    unscored: dict[str, float] = {}
    for key, scores in values.items():
        row = list(scores)
        finite = [score for score in row if score is not None]
        means[key] = sum(finite) / len(finite) if finite else None
        if len(finite) < len(row):
            unscored[key] = 1 - len(finite) / len(row)
    return means, unscored


def results_at(path: Path) -> list[Result]:
    """One result per set of prompts. Raises `Refused` if there is none."""
    if is_run(path):
        return [Result.of_run(load_run(path))]
    if url_of(path):
        with Store.open(path, read_only=True) as store:
            return [Result.of_store(path.name, store)]
    if path.is_dir() and format_at(path) is None and not (path / "state.json").is_file():
        files = []
        for file in sorted(path.rglob("*")):
            if file.is_file() and file.name.endswith(ENDINGS):
                with suppress(Refused):  # a file that is no log, such as one of results
                    files.append((file, _scored_format(file)))
        harness = [(file, format) for file, format in files if format is not None]
        if not harness:
            raise Refused(
                f"{path}: expected the folder of a run, or one with samples of lm-evaluation-harness "
                "(--log_samples), lighteval (--save-details) or Inspect; got none of these. A model is "
                "compared with --prompts FILE --reward NAME"
            )
        return _harness_results(harness, str(path))
    if not path.exists():
        raise Refused(f"{path}: no such file or folder")
    if is_store(path):
        with Store.open(path, read_only=True) as store:
            return [Result.of_store(str(path), store)]
    line = None if format_at(path) else next(read_records(path), None)
    if line is not None and line.value.keys() >= {"prompt_id", "prompt", "rewards"}:
        return [Result.of_file(path)]
    format = _scored_format(path)
    if format is not None:
        return _harness_results([(path, format)], str(path))
    with TemporaryDirectory() as folder, Store.open(Path(folder) / "store.db") as store:
        report = import_files(store, [path])
        result = Result.of_store(str(path), store)
    refused = tuple(f"{each.where}: {each.reason}" for each in report.refused)
    return [replace(result, unreadable=refused)]


def is_run(path: Path) -> bool:
    return (path / "metrics.jsonl").is_file() and (path / "config.json").is_file()


def _scored_format(path: Path) -> Format | None:
    """The format of a file, if it is an evaluation with scored documents."""
    format = Recognizer(None).recognize_first(path)
    return format if format is not None and format.scored is not None else None


def _harness_results(files: Sequence[tuple[Path, Format]], name: str) -> list[Result]:
    tasks: dict[str, _Documents] = {}
    unreadable: dict[Path, list[str]] = {path: [] for path, _ in files}
    for path, format in files:
        assert format.scored is not None
        match = LM_EVAL_NAME.match(path.name)
        for line in lines_of(path, format):
            try:
                if line.error:
                    raise Refused(line.error)
                scored = format.scored(line.value)
            except RECORD_ERRORS as error:
                unreadable[path].append(f"{line.where}: {reason_of(error)}")
                continue
            task = scored.task or (match[1] if match else "")
            documents = tasks.setdefault(task, _Documents(path))
            if documents.path != path:
                raise Refused(
                    f"{name}: expected one file of the task {task or 'without a name'}, got {documents.path} "
                    f"and {path}; give the one to compare"
                )
            documents.add(scored)
    if not tasks:
        reasons = [reason for reasons in unreadable.values() for reason in reasons] or ["got no record"]
        raise Refused(f"{name}: expected scored documents; {reasons[0]}")
    return [documents.result(name, task, unreadable[documents.path]) for task, documents in tasks.items()]
