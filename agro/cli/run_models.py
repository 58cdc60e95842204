"""Models of a run, for commands: its result, its start, and what it was configured with."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from agro.cli.common import policy_config, sampler_config
from agro.cli.models import LONGEST, rollout_of
from agro.errors import Refused

if TYPE_CHECKING:
    from agro.config import EnvironmentConfig, RunConfig, SamplerConfig
    from agro.rollout.rollout import Rollout

START = "start"  # of --against: the model that the run started from


def other_rollout(
    against: str, ran: RunConfig | None, policy: list[str] | None, played: EnvironmentConfig | None
) -> Rollout:
    """Of the model that the result is compared with."""
    if against != START:
        settings = policy_config(against, policy, None if ran is None else ran.policy)
        return rollout_of(against, settings, played)
    if ran is None:
        raise Refused("--against start: expected the folder of a run, got --model alone; name a model")
    from agro.train.phases import derive

    start = ran.policy.model or "random weights"
    return rollout_of(start, ran.policy, played, derive(ran.train.seed, "weights"))


def config_of(run: Path) -> RunConfig:
    from agro.config import RunConfig

    if not (run / "config.json").is_file():
        raise Refused(f"{run}: expected the folder of a run, with config.json; give --model for a model")
    config = RunConfig.load(run / "config.json")
    return config.phase(config.phase_names[-1]) if config.phases else config


def started_in(run: Path | None) -> Path:
    """The folder where a run was started, in which relative paths of its configuration begin; this one where
    it isn't known."""
    if run is not None:
        folder = json.loads((run / "config.json").read_text(encoding="utf-8")).get("started_in")
        if folder is not None and (run / folder).is_dir():
            return (run / str(folder)).resolve()
    return Path.cwd()


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """In a folder, whose modules are found."""
    with chdir(folder):
        sys.path.insert(0, str(folder))
        try:
            yield
        finally:
            sys.path.remove(str(folder))


def config_of_model(model: str) -> RunConfig | None:
    """The configuration of the run that saved a model: of RUN/model and RUN/checkpoints/step-N."""
    for folder in list(Path(model).absolute().parents)[:2]:
        if (folder / "metrics.jsonl").is_file() and (folder / "config.json").is_file():
            return config_of(folder)
    return None


def sampler_of(n: int, temperature: float, max_new: int | None, ran: RunConfig | None) -> SamplerConfig:
    if max_new is None:
        max_new = LONGEST if ran is None else ran.sampler.max_new
    return sampler_config(n=n, temperature=temperature, max_new=max_new)


def saved_model(run: Path | None, name: str, flag: str) -> str:
    """A model in the folder of a run."""
    if run is None:
        raise Refused(f"{flag}: expected it, or the folder of a run, got neither")
    if not (run / name).is_dir():
        raise Refused(f"{run / name}: the run hasn't saved its model yet; give {flag}")
    return str(run / name)
