"""The model that a command uses: a run's, a checkpoint's, or any other; and `agro sample`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import chdir, closing, contextmanager
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from agro.cli.common import LONGEST, TURNS, policy_config
from agro.config import EnvironmentConfig, PolicyConfig, RewardConfig, RunConfig, SamplerConfig
from agro.errors import Refused
from agro.rewards import load_reward
from agro.rollout.prompts import load_prompts
from agro.store import Store, write_samples
from agro.train.phases import derive
from agro.types import Prompt

if TYPE_CHECKING:
    from agro.pages.store.check_survey import Contamination
    from agro.rollout.rollout import EpisodeReward, Rollout


def sample(
    model: str,
    prompts: Path,
    out: Path,
    n: int = 4,
    greedy: bool = False,
    max_new: int = 256,
    temperature: float | None = None,
    seed: int = 0,
    policy: list[str] | None = None,
    environment: str | None = None,
    max_turns: int | None = None,
) -> None:
    """Args:
    model: Folder or hub name of a causal language model.
    prompts: JSONL, one {"prompt": …, "answer": …} per line.
    out: A store, or a .jsonl, .jsonl.gz or .parquet file.
    greedy: Always take the likeliest token.
    max_new: Most tokens per response.
    temperature: Sampling temperature; 1 by default.
    """
    from agro.rollout import Task, collect

    loaded = load_prompts(prompts)
    settings = policy_config(model, policy)
    as_file = out.name.endswith((".jsonl", ".jsonl.gz", ".parquet"))
    if as_file and out.exists():
        raise Refused(f"{out}: this file exists; use another --out, or remove it")
    if greedy and temperature is not None:
        raise Refused(
            f"--greedy takes the likeliest token: expected no --temperature with it, got {temperature}"
        )
    if temperature is None:
        temperature = 0.0 if greedy else 1.0
    sampler = sampler_config(n, temperature, max_new)
    rollout = rollout_of(model, settings, environment_of(environment, max_turns))
    with TemporaryDirectory() as folder, Store.open(Path(folder) / "store.db" if as_file else out) as store:
        start = ceil(store.experience.next_number(seed) / n)  # numbers that no stored response has
        task = Task(seed=seed, numbers=tuple(range(start, start + len(loaded))))
        report = collect(rollout, loaded, sampler, store, task)
        if as_file:
            samples_by_id = {s.id: s for s in store.samples()}
            write_samples(out, (samples_by_id[i] for i in report.ids))
    print(f"{len(report.ids)} responses to {len(loaded)} prompts in {out}", file=sys.stderr)


def sampler_config(n: int, temperature: float, max_new: int) -> SamplerConfig:
    values = {"n": n, "temperature": temperature, "max_new": max_new}
    return RunConfig.of({"sampler": values}, "command line").sampler


def environment_of(name: str | None, max_turns: int | None) -> EnvironmentConfig | None:
    if name is None:
        return None
    return EnvironmentConfig(name=name, max_turns=TURNS if max_turns is None else max_turns)


def rollout_of(
    model: str,
    settings: PolicyConfig,
    environment: EnvironmentConfig | None,
    weights_seed: int = 0,
) -> Rollout:
    """Load a rollout of a model or checkpoint. `weights_seed`: for the random weights of `settings.new`."""
    from agro.models.policy import Policy
    from agro.rollout.rollout import embedded, load_rollout
    from agro.train.learner import load_checkpoint
    from agro.train.phases import is_checkpoint

    folder = Path(model)
    if is_checkpoint(folder):
        policy = load_checkpoint(folder, settings)
    else:
        policy = Policy.load(settings, seed=weights_seed)
    return load_rollout(policy.encoder, embedded(policy), environment, source=model)


START = "start"  # value of --against: the model that the run started from
ANY_TWO = "agro compare A B --prompts FILE --reward NAME compares any two models"


def check_against(against: str | None, run: Path | None) -> None:
    if against not in (None, START):
        raise Refused(f"--against {against}: expected start, the run's first model; {ANY_TWO}")
    if against is not None and run is None:
        raise Refused(f"--against start: expected the folder of a run, got none; {ANY_TWO}")


@dataclass(frozen=True)
class MeasuredModel:
    """A model, and the run whose settings apply to it.

    `path`: its absolute folder, or its name on the hub. `run`: the named folder. `config`: of that run, or of
    the run that saved the model. `started`: base of the configuration's relative paths; `begins`: of the
    model's and the environment's. `changes`: KEY=VALUE of [policy].
    """

    name: str
    path: str
    run: Path | None
    config: RunConfig | None
    started: Path
    begins: Path
    environment: EnvironmentConfig | None = None
    changes: list[str] | None = None

    @classmethod
    def of(
        cls, run: Path | None, model: str | None, changes: list[str] | None = None, flag: str = "--model"
    ) -> MeasuredModel:
        """Return the run's result, unless another model is named."""
        if model is None:
            if run is None:
                raise Refused(f"{flag}: expected it, or the folder of a run, got neither")
            config_of(run)
            if not (run / "model").is_dir():
                raise Refused(f"{run / 'model'}: the run hasn't saved its model yet; use {flag}")
            model = str(run / "model")
        folder = run
        for parent in list(Path(model).absolute().parents)[:2] if run is None else ():
            # Find the run that saved RUN/model or RUN/checkpoints/step-N.
            if (parent / "metrics.jsonl").is_file() and (parent / "config.json").is_file():
                folder = folder or parent
        config = None if folder is None else config_of(folder)
        started, played = started_in(folder), None if config is None else config.environment
        path = str(Path(model).absolute()) if Path(model).exists() else model
        return cls(model, path, run, config, started, started, played, changes)

    def playing(self, environment: EnvironmentConfig | None) -> MeasuredModel:
        """Return the model in a named environment, if there is one."""
        return self if environment is None else replace(self, environment=environment, begins=Path.cwd())

    @property
    def ran(self) -> RunConfig | None:
        """The named run's configuration."""
        return None if self.run is None else self.config

    def rollout(self) -> Rollout:
        settings = policy_config(self.path, self.changes, None if self.config is None else self.config.policy)
        with working_in(self.begins):
            return rollout_of(self.path, settings, self.environment)

    def start(self) -> Rollout:
        """Load a rollout of the model that the run started from, in the same environment."""
        assert self.ran is not None  # see `check_against`
        start, seed = self.ran.policy.model or "random weights", derive(self.ran.train.seed, "weights")
        with working_in(self.started):
            return rollout_of(start, self.ran.policy, self.environment, seed)

    def sampler(self, n: int, temperature: float, max_new: int | None) -> SamplerConfig:
        if max_new is None:
            max_new = LONGEST if self.config is None else self.config.sampler.max_new
        return sampler_config(n, temperature, max_new)

    def held_out(self) -> list[Prompt]:
        """Load the run's held-out prompts. Raises `Refused` if there are none."""
        from agro.api import held_out_prompts

        loaded, got = [], "neither"
        if self.run is not None and self.ran is not None:
            run = self.run.absolute()
            got = f"{run}, which has no data.eval_prompts and set none aside"
            with working_in(self.started):
                loaded = held_out_prompts(run, self.ran)
        if not loaded:
            raise Refused(f"--prompts: expected it, or the folder of a run with held-out prompts, got {got}")
        return loaded

    def reward(self, name: str | None, options: dict[str, Any]) -> RewardConfig:
        """Return the named reward, or the run's."""
        if name is not None:
            return RewardConfig(name=name, options=options)
        if self.ran is None:
            raise Refused("--reward: expected it, or the folder of a run, got neither")
        if options:
            raise Refused("--option belongs to --reward, which is missing; add it, or leave --option out")
        return self.ran.reward

    def seen(self, prompts: Sequence[Prompt]) -> Contamination | None:
        """Find the prompts that the run was trained on; None if its training prompts are unknown."""
        from agro.api import trained_prompts
        from agro.pages.store.check_survey import Contamination

        if self.run is None or self.config is None:
            return None
        folder = self.run.absolute()
        with working_in(self.started):
            trained = trained_prompts(folder, self.config)
        return Contamination.of(prompts, trained, self.config.data.near_copies) if trained else None

    @contextmanager
    def scorer(self, reward: RewardConfig, name: str | None) -> Iterator[EpisodeReward]:
        """Open the reward where its relative paths begin: here, if it was named, else where the run began."""
        with working_in(Path.cwd() if name else self.started):
            loaded = load_reward(reward)
        with closing(loaded):
            from agro.rollout.rollout import EpisodeReward  # here, so that a missing file is refused at once

            yield EpisodeReward(loaded)


def load_sets(paths: list[Path]) -> dict[str, list[Prompt]]:
    """Load sets of prompts, named by their files."""
    sets = {path.stem: load_prompts(path) for path in paths}
    if len(sets) < len(paths):
        raise Refused("--prompts: expected files of different names, which name the sets")
    return sets


def config_of(run: Path) -> RunConfig:
    file = run / "config.json"
    if not file.is_file() or "model_type" in json.loads(file.read_text(encoding="utf-8")):
        raise Refused(f"{run}: expected the folder of a run, with its config.json; use --model for a model")
    config = RunConfig.load(run / "config.json")
    return config.phase(config.phase_names[-1]) if config.phases else config


def started_in(run: Path | None) -> Path:
    """Return the folder where a run was started, the base of its configuration's relative paths; the current
    folder if unknown."""
    if run is not None:
        folder = json.loads((run / "config.json").read_text(encoding="utf-8")).get("started_in")
        if folder is not None and (run / folder).is_dir():
            return (run / str(folder)).resolve()
    return Path.cwd()


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Work in a folder, with its modules importable."""
    with chdir(folder):
        sys.path.insert(0, str(folder))
        try:
            yield
        finally:
            sys.path.remove(str(folder))
