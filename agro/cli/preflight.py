"""What is refused before torch is imported, which takes seconds: names of what isn't there, and settings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from agro.config import RunConfig
from agro.errors import Refused
from agro.io.datasets import on_hub
from agro.io.files import is_complete_folder
from agro.io.record_files import read_records
from agro.place.placement import FILE
from agro.rewards import check_name
from agro.runs.folder import check_out
from agro.store import Store
from agro.store.location import check_made, location_of, url_of
from agro.store.shared import LocalFolder
from agro.train.phases import Phase, options_at


def look_at_run(
    config: RunConfig,
    out: Path | None,
    *,
    resume: bool,
    accept: Sequence[str],
    writes: bool,
) -> None:
    """Of `agro train`: the folder of the run, settings that contradict each other, and `look_at_inputs`."""
    from agro.train.check import check_config

    is_first = os.environ.get("RANK", "0") == "0"  # of the ranks of torchrun: it alone makes the folder
    check_out(out, resume=resume, accept=accept, makes=writes and is_first)
    if config.data.hold_out_most is None:
        check_config(config)
    else:  # data.hold_out is known later, and with it what the settings come to
        # Refuse wrong names and options, of each phase.
        for phase in Phase.all(config):
            phase.resolved(options_at(phase.config.objective.options, 0))
    look_at_inputs(config)


def look_at_inputs(config: RunConfig) -> None:
    """The files of prompts, the store, the model and the reward that a configuration names."""
    for paths in (config.data.paths("prompts"), config.data.paths("eval_prompts")):
        files = [path for path in map(Path, paths) if not on_hub(path)]
        found = [next(read_records(path), None) for path in files]  # unreadable files are refused
        if paths and len(files) == len(paths) and not any(found):
            raise Refused(f"{', '.join(paths)}: empty: expected at least one prompt, got none")
    if config.data.store and not config.phase(config.phase_names[0]).data.samples_fresh:
        location = location_of(config.data.store)
        check_made(location)
        if url_of(location) is None:  # a server is asked later
            Store.open(location, read_only=True).close()
    if config.policy.model is not None and config.policy.new is None:
        look_at_model(config.policy.model)
    reward = config.reward  # of one; several are told apart where they are loaded
    if config.scores and reward.name is not None and not reward.functions and reward.meaning is None:
        check_name(reward.name)


def look_at_model(name: str) -> None:
    """Refuse what is neither a folder of a model, an adapter or a checkpoint, nor a name of the hub."""
    from agro.models.adapters import is_adapter

    if not is_adapter(name) and not (Path(name) / "position.json").is_file():
        is_complete_folder(name)


def look_at_begun(run: str) -> None:
    """Refuse what isn't the folder of a run. In a database, or where a placed run begins, it is waited
    for."""
    from agro.train.publications import Publications

    if url_of(run) is None and not (Path(run) / FILE).exists():
        Publications(LocalFolder(Path(run))).begun()
