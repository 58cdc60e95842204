"""Two results compared on the prompts that both answered.

A result is the latest held-out evaluation of a run, or a file of `agro eval --out`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agro.config import DataConfig
from agro.errors import Refused
from agro.io.files import write
from agro.io.jsonlines import lines
from agro.io.near_copies import cluster_names
from agro.io.numbers import fixed
from agro.io.strictjson import loads
from agro.rollout.paired import Comparison, compare
from agro.runs.rundata import RunData
from agro.runs.verdict import Verdict
from agro.types import Text, check_text, prompt_hash

FILE = "held_out_rewards.json"
NAMED = 3  # prompts of one side alone, on the terminal
WAY_OUT = "What to do: agro eval RUN --prompts FILE --reward NAME --out FILE for each, then compare the files"

# By prompt id the mean over its scored responses; None where there are none.
Rewards = Mapping[str, float | None]


@dataclass(frozen=True)
class HeldOutRewards:
    """Of a run: rewards of its latest evaluation and of step 0, and a hash of each prompt's text.

    `clusters`: by prompt the smallest id of its near-copies, its own where it has none; empty in files of
    before these were counted.
    """

    step: int
    rewards: Rewards
    start: Rewards
    texts: Mapping[str, str]
    clusters: Mapping[str, str]

    @classmethod
    def of(cls, values: Any, location: str) -> HeldOutRewards:
        """From JSON. Raises `Refused` for what no run of this version writes."""
        keys = cls.__dataclass_fields__.keys()
        complete = {"clusters": {}, **values} if isinstance(values, dict) else {}
        if complete.keys() != keys or not isinstance(complete["step"], int):
            raise Refused(f"{location}: expected an object with {', '.join(keys)}, got {values!r:.80}")
        found = cls(**complete)
        if not all(isinstance(table, dict) for key, table in complete.items() if key != "step"):
            raise Refused(f"{location}: expected {', '.join(keys - {'step'})} by prompt, got {values!r:.80}")
        for key, value in [*found.rewards.items(), *found.start.items()]:
            _check_reward(value, f"{location}: {key}")
        if found.texts.keys() != found.rewards.keys():
            raise Refused(f"{location}: expected texts of the prompts that have rewards, got those of others")
        return found


def write_rewards(folder: Path, rewards: HeldOutRewards) -> None:
    """Write them into a run's folder, completely or not at all."""
    write(folder / FILE, json.dumps(vars(rewards), ensure_ascii=False, allow_nan=False) + "\n")


@dataclass(frozen=True)
class Result:
    """Rewards by prompt id, a hash of each prompt's text, and of a run the step of the evaluation.

    `clusters`: by prompt the smallest id of its near-copies.
    """

    name: str
    rewards: Rewards
    texts: Mapping[str, str]
    clusters: Mapping[str, str]
    step: int | None = None

    @classmethod
    def of_run(cls, run: RunData) -> Result:
        """Raises `Refused` where the run has no held-out reward by prompt."""
        path = run.folder / FILE
        if not path.is_file():
            measured = run.measures("eval_reward")
            why = f"has no {FILE}, as runs of an earlier version" if measured else "measured none"
            raise Refused(f"{run.folder}: expected held-out rewards by prompt; this run {why}. {WAY_OUT}")
        try:
            found = HeldOutRewards.of(loads(path.read_bytes()), str(path))
        except (OSError, ValueError) as error:
            raise Refused(f"{path}: expected rewards by prompt as JSON: {error}") from None
        if found.step > run.steps:
            raise Refused(
                f"{path}: expected an evaluation up to step {run.steps} of the run, got step {found.step}. "
                "What to do: continue the run with --resume, which makes these steps again"
            )
        return cls(str(run.folder), found.rewards, found.texts, found.clusters, found.step)

    @classmethod
    def of_file(cls, path: Path) -> Result:
        """A file of `agro eval --out`. Raises `Refused` with FILE:LINE."""
        rewards: dict[str, float | None] = {}
        prompts: dict[str, Text] = {}
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
                    _check_reward(value, f"{line.where}: rewards")
                scored = [value for value in values if value is not None]
                rewards[key] = sum(scored) / len(scored) if scored else None
                prompts[key] = prompt
        texts = {key: prompt_hash(text) for key, text in prompts.items()}
        names = cluster_names(prompts, DataConfig().near_copies)
        return cls(str(path), rewards, texts, names)


@dataclass(frozen=True)
class PairedResults:
    """What `b` is against `a`. `only_a`, `only_b`: prompts of one side alone; `unscored`: of both sides, but
    without a reward on one."""

    a: Result
    b: Result
    comparison: Comparison
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    unscored: tuple[str, ...]

    @classmethod
    def of(cls, a: Result, b: Result) -> PairedResults:
        """Raises `Refused` where they have no prompt in common, or an id names two prompts."""
        both = [key for key in a.rewards if key in b.rewards]
        if not both:
            raise Refused(f"{a.name} and {b.name}: expected prompts that both answered, got none. {WAY_OUT}")
        for key in both:
            if a.texts[key] != b.texts[key]:
                raise Refused(
                    f"{a.name} and {b.name}: expected the same prompts, but {key} names another one in each. "
                    "What to do: evaluate both on one file of prompts"
                )
        before, after = (
            np.array([math.nan if (x := side.rewards[key]) is None else x for key in both]) for side in (a, b)
        )
        unscored = tuple(key for key in both if a.rewards[key] is None or b.rewards[key] is None)
        only_a = tuple(key for key in a.rewards if key not in b.rewards)
        only_b = tuple(key for key in b.rewards if key not in a.rewards)
        numbers: dict[str, int] = {}
        clusters = [numbers.setdefault(a.clusters.get(key, key), len(numbers)) for key in both]
        return cls(a, b, compare(before, after, clusters), only_a, only_b, unscored)

    @property
    def verdict(self) -> Verdict:
        return Verdict.compared(self.comparison)

    @property
    def sentence(self) -> str:
        a, b = (x.name if x.step is None else f"{x.name} at step {x.step}" for x in (self.a, self.b))
        return f"{b} against {a}: {self.verdict.sentence}"

    @property
    def notes(self) -> list[str]:
        """What a reader has to know about the sentence."""
        n, least = self.comparison.n, self.comparison.detectable
        texts = [f"Matched: {n} prompts."]
        if self.comparison.clusters < n:
            texts[0] = f"Matched: {n} prompts in {self.comparison.clusters} clusters of near-copies."
        if least > 0 and self.verdict.answer != "not shown":  # whose sentence says it
            texts[0] += f" So many show a difference of {fixed(least)} or more four times out of five."
        for keys, what in (
            (self.only_a, f"only in {self.a.name}"),
            (self.only_b, f"only in {self.b.name}"),
            (self.unscored, "without a reward on one side"),
        ):
            if keys:
                named = ", ".join(keys[:NAMED]) + (", …" if len(keys) > NAMED else "")
                texts.append(f"Not compared: {len(keys)} prompts {what} ({named}).")
        texts.append("This is about these two models: what another seed would give isn't in the interval.")
        if self.a.step is None or self.b.step is None:
            texts.append("A file of agro eval doesn't say its reward: it has to be the same on both sides.")
        return texts

    def to_json(self) -> dict[str, Any]:
        """As `Verdict.to_json`, of b against a; `gain` is the difference b − a."""
        found = self.verdict.to_json()
        for key in ("step", "kl"):
            del found[key]
        means = {"a": (self.a, self.comparison.a), "b": (self.b, self.comparison.b)}
        sides = {key: {"name": x.name, "step": x.step, "mean": mean} for key, (x, mean) in means.items()}
        unmatched = {"only_a": self.only_a, "only_b": self.only_b, "unscored": self.unscored}
        return {**found, "test": self.comparison.test, **sides, **unmatched, "notes": self.notes}


def compare_runs(a: RunData, b: RunData) -> PairedResults:
    """Raises `Refused` where their rewards by prompt can't be compared."""
    first, second = Result.of_run(a), Result.of_run(b)
    if _reward_of(a) != _reward_of(b):
        raise Refused(
            f"{a.folder} and {b.folder}: expected the same reward and environment, but these, their options "
            f"or their code differ. {WAY_OUT}"
        )
    return PairedResults.of(first, second)


def _reward_of(run: RunData) -> Any:
    """What decides the rewards of its last evaluation."""
    config = run.config.phase(run.config.phase_names[-1])
    reward = config.reward.model_dump(mode="json", include={"name", "options", "functions"})
    inputs = run.values.get("inputs", {})
    code = {key: digest for key, digest in inputs.items() if "reward." in key or "environment." in key}
    played = config.environment
    return reward, None if played is None else (played.name, played.options), code


def _check_reward(value: Any, location: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise Refused(f"{location}: expected a number or null, got {value!r:.80}")
