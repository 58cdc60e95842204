"""`train.epochs`: how many steps make so many passes over the stored groups of a phase.

Epochs become steps once, when the run begins. `config.json` has the steps, and under "epochs" what they were
computed from.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TypedDict

from agro.config import RunConfig
from agro.config.override import LENGTH
from agro.errors import Refused
from agro.numbers import count
from agro.store import Store
from agro.store.database import exists
from agro.train.phases import Phase


class Epochs(TypedDict):
    """The passes of a phase, the groups that it may draw, and the steps that follow."""

    epochs: float
    groups: int
    steps: int


def resolve(config: RunConfig, out: Path, *, resume: bool) -> tuple[RunConfig, dict[str, Epochs]]:
    """The configuration with steps in place of epochs, and what they were computed from, by phase.

    A run that is resumed keeps its steps, although its store may have grown. Raises `Refused` where a phase
    or one before it samples, and where the store has no groups for it.
    """
    phases = {name: config.phase(name) for name in config.phase_names}
    before = _recorded(out / "config.json") if resume else {}
    found: dict[str, Epochs] = {}
    only_stored = True
    for name, phase in phases.items():
        only_stored = only_stored and not phase.data.samples_fresh
        epochs = phase.train.epochs
        if epochs is None:
            continue
        if not only_stored:
            raise Refused(
                f"phase {name}: train.epochs = {epochs:g} counts passes over groups that are stored when the "
                "run begins: expected data.replay = 1 in this phase and all before it, got data.replay = "
                f"{', '.join(f'{p.data.replay} ({n})' for n, p in phases.items())}. What to do: set "
                "train.steps"
            )
        if name in before and before[name]["epochs"] == epochs:
            found[name] = before[name]
        else:
            found[name] = _count(name, phase, epochs, out)
    return (_with_steps(config, found), found) if found else (config, {})


def describe(name: str, found: Epochs) -> str:
    """One line for people."""
    return (
        f"{name}: train.epochs = {found['epochs']:g}: {count(found['steps'])} steps over "
        f"{count(found['groups'])} stored groups"
    )


def _count(name: str, phase: RunConfig, epochs: float, out: Path) -> Epochs:
    path = Path(phase.data.store) if phase.data.store else out / "store.db"
    groups = 0
    if exists(path):
        with Store.open(path, read_only=True) as store:
            groups = len(store.candidates(Phase(name, phase, 0, 0).rule(1), "", 0))
    if not groups:
        raise Refused(
            f"phase {name}: train.epochs = {epochs:g} counts passes over stored groups, but {path} has none "
            "that may be drawn. What to do: import samples (agro import), widen the choice (agro check), or "
            "set train.steps"
        )
    steps = math.ceil(epochs * groups / phase.train.groups - 1e-9)  # .1 × 30 is 3.0000000000000004
    return {"epochs": epochs, "groups": groups, "steps": max(1, steps)}


def _with_steps(config: RunConfig, found: dict[str, Epochs]) -> RunConfig:
    values = config.model_dump()
    for section in [values, *values["phases"]]:
        train = section.get("train", {})
        if train.get("epochs") is not None:
            section["train"] = {key: value for key, value in train.items() if key not in LENGTH}
    if not config.phases:
        values["train"]["steps"] = found[config.phase_names[0]]["steps"]
    for phase in values["phases"]:
        if phase["name"] in found:
            phase["train"] = {**phase.get("train", {}), "steps": found[phase["name"]]["steps"]}
    return RunConfig.of(values)


def _recorded(file: Path) -> dict[str, Epochs]:
    """What a run's config.json has; empty where there is none."""
    if not file.exists():
        return {}
    record: dict[str, Epochs] = json.loads(file.read_text(encoding="utf-8")).get("epochs", {})
    return record
