"""Runs of the arena, from their settings to what is measured."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reproductions.arena.kinds import KINDS, Row
from reproductions.arena.lockstep import Racer, measure, train
from reproductions.arena.task import Files
from reproductions.arena.world import world

Run = dict[str, Any]


def complete(
    rows: Sequence[Row], files: Files, out: Path, playing: Callable[..., list[Run]] | None = None
) -> list[Run]:
    """What is measured of runs on one kind of data, which are made unless that was done before.

    One that was refused before its first update has no measurement, and `stopped` says why.
    `playing(rows, files)`: makes them, in place of the arena's own way.
    """
    folder = out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    new = [row for row in rows if not (folder / row.file).exists()]
    for row, run in zip(new, (playing or _play)(new, files) if new else [], strict=True):
        making = folder / f"{row.file}.making"
        making.write_text(json.dumps(run))
        making.rename(folder / row.file)
    return [json.loads((folder / row.file).read_text()) for row in rows]


def _play(rows: Sequence[Row], files: Files) -> list[Run]:
    loaded = world(files)
    began = time.process_time()
    racers, weights = train(rows, loaded, files.size.updates)
    measured = measure(loaded, weights)
    shared = time.process_time() - began - sum(racer.seconds for racer in racers)
    return [
        {
            **asdict(racer.row),
            **(ends if racer.updates else {}),
            "updates": racer.updates,
            "skipped": racer.skipped,
            "staleness": _staleness(racer, files.size.updates),
            "stopped": racer.stopped,
            "cpu_seconds": racer.seconds + shared / len(racers),
        }
        for racer, ends in zip(racers, measured, strict=True)
    ]


def _staleness(racer: Racer, updates: int) -> float | None:
    """The mean age of the fresh samples, in updates; None without any."""
    kind = KINDS[racer.row.kind]
    if kind.replay == 1:
        return None
    return sum(min(update, kind.lag) for update in range(updates)) / updates


def start(files: Files) -> Run:
    """The same of the model that training starts from."""
    loaded = world(files)
    return measure(loaded, loaded.start)[0]
