"""What was measured of a model, prompt by prompt, wherever it stands.

A run's latest held-out evaluation, a file of `agro eval --out`, a store, samples of an evaluation harness (a
file of one task, or the folder of several), or any other log that `agro import` takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from agro.config import DataConfig
from agro.errors import Refused
from agro.io.jsonlines import lines
from agro.io.near_copies import cluster_names
from agro.io.strictjson import loads
from agro.runs.by_prompt import FILE, HeldOutRewards, Rewards, check_reward, reward_of
from agro.runs.rundata import RunData
from agro.store import Store
from agro.types import Text, check_text, prompt_hash

REWARD = "reward"  # the metric of agro's own results
HELD_OUT = "held-out prompts"
WAY_OUT = "What to do: agro eval RUN --prompts FILE --reward NAME --out FILE for each, then compare the files"


@dataclass(frozen=True)
class Result:
    """Scores of one set of prompts by metric and prompt id, and a hash of each prompt's text.

    `clusters`: by prompt the smallest id of its near-copies. `prompted`: of harnesses what the model was
    given for a document, hashed. `scoring`: what decides the rewards, as far as it is known. `step`: of a
    run's evaluation. `unreadable`: records that aren't in it, and why.
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

    @classmethod
    def of_run(cls, run: RunData) -> Self:
        """Raises `Refused` where the run has no held-out reward by prompt."""
        path = run.folder / FILE
        if not path.is_file():
            measured = run.measures("eval_reward")
            why = f"has no {FILE}, as runs of an earlier version" if measured else "measured none"
            raise Refused(f"{run.folder}: expected held-out rewards by prompt; this run {why}. {WAY_OUT}")
        try:
            kept = HeldOutRewards.of(loads(path.read_bytes()), str(path))
        except (OSError, ValueError) as error:
            raise Refused(f"{path}: expected rewards by prompt as JSON: {error}") from None
        if kept.step > run.steps:
            raise Refused(
                f"{path}: expected an evaluation up to step {run.steps} of the run, got step {kept.step}. "
                "What to do: continue the run with --resume, which makes these steps again"
            )
        scores = {REWARD: kept.rewards}
        name, scoring = str(run.folder), reward_of(run)
        return cls(name, scores, kept.texts, kept.clusters, kept.step, HELD_OUT, scoring=scoring)

    @classmethod
    def of_prompts(cls, name: str, rewards: Rewards, prompts: Mapping[str, Text], **more: Any) -> Self:
        """Of rewards and prompts by id."""
        texts = {key: prompt_hash(prompt) for key, prompt in prompts.items()}
        clusters = cluster_names(prompts, DataConfig().near_copies)
        return cls(name, {REWARD: rewards}, texts, clusters, **more)

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """A file of `agro eval --out`. Raises `Refused` with FILE:LINE."""
        rewards: dict[str, float | None] = {}
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
                check_text(prompt, line.where)
                for value in values:
                    check_reward(value, f"{line.where}: rewards")
                rewards[key], prompts[key] = mean(values), prompt
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
        rewards = {key: mean(of_prompt.values()) for key, of_prompt in values.items()}
        return cls.of_prompts(name, rewards, prompts)


def mean(values: Iterable[float | None]) -> float | None:
    scored = [value for value in values if value is not None]
    return sum(scored) / len(scored) if scored else None


def is_run(path: Path) -> bool:
    return (path / "metrics.jsonl").is_file() and (path / "config.json").is_file()
