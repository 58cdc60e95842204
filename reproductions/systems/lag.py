"""A sampler that lags (`source.sync_every`): what an anchor at the behavior is for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from reproductions.systems import tiny
from reproductions.systems.row import Row
from reproductions.systems.tiny import column, config, of_recipe, train, weights

LAGS = (50, 100, 400)  # OAPL's own, in optimizer steps
MORE = "β tenfold moves the weights: largest difference, as a multiple of that without a lag"
# Adam doesn't see the scale of a gradient, so that without a lag β, which scales it, does nothing.
SCALE_FREE = {"train__adam_eps": 1e-30, "train__clip": 1e9}


def rows(folder: Path) -> Iterator[Row]:
    yield _matters("OAPL", {"name": "oapl"}, folder)
    yield _matters("GVPO, VarGrad", {"name": "gvpo"}, folder)
    for lag in LAGS:
        yield from _oapl(lag, folder)
    yield _meanwhile("LlamaRL", "aipo", folder)
    yield _meanwhile("Async RLHF", "online_dpo", folder)


def _matters(system: str, objective: dict[str, Any], folder: Path) -> Row:
    """With β = 0.05 and 0.5, over 8 steps with one set of weights, and with the present ones."""

    def moved(every: int) -> float:
        ends = []
        for beta in (0.05, 0.5):
            changes = {"objective": {**objective, "beta": beta}, "source__sync_every": every, **SCALE_FREE}
            run = folder / f"{objective['name']}-{beta}-{every}"
            ends.append(weights(train(config(folder, train__steps=8, **changes), run)))
        return (ends[0] - ends[1]).abs().max().item()

    mechanism = f"`source.sync_every` = 8 and 1, `{objective['name']}`, 8 steps"
    return Row(system, mechanism, MORE, moved(8) / moved(1), 10.0, "at least")


def _oapl(lag: int, folder: Path) -> list[Row]:
    """A lag and a quarter: how stale samples are, and what a lag of steps on the start's samples learned."""
    steps = lag + lag // 4
    objective = {"name": "oapl", "beta": 0.05}
    changes = {"train__steps": steps, "source__sync_every": lag, "train__groups": 4}
    changes |= {"reward__name": f"{Path(tiny.__file__)}:low"}
    run = train(config(folder, objective=objective, **changes), folder / f"oapl-{lag}")
    staleness, reward = column(run, "staleness_mean"), column(run, "reward_mean")
    mechanism = f"`source.sync_every` = {lag}, {steps} steps"
    off = np.abs(staleness - np.arange(steps) % lag).max()
    gain = reward[lag:].mean() - reward[:lag].mean()
    consequence = "staleness of a step's samples less (step mod L), at most, in optimizer steps"
    learned = "mean reward after the sampler's first renewal less that before"
    return [
        Row("OAPL", mechanism, consequence, float(off), 0.0, "at most"),
        Row("OAPL", mechanism, learned, float(gain), 0.1, "at least"),
    ]


def _meanwhile(system: str, name: str, folder: Path) -> Row:
    """How often a step trains on what a collector sampled while the policy learned."""
    settings = of_recipe(name, folder, source__sync_every=1, train__steps=40, data__max_age=2)
    recipe, run = folder / f"{name}.json", folder / f"{name}-meanwhile"
    recipe.write_text(settings.model_dump_json(exclude_unset=True))
    command = [sys.executable, "-m", "agro", "train", str(recipe), "--out", str(run), "--place", "local:1"]
    environment = {**os.environ, "PYTHONPATH": str(Path(tiny.__file__).parents[2])}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, timeout=300)
    stale = column(run, "staleness_mean")[10:]
    consequence = "share of the last 30 steps that train on samples of earlier weights"
    return Row(
        system, f"recipe `{name}`, `--place local:1`", consequence, (stale > 0).mean(), 0.5, "at least"
    )
