"""`agro.train` with three arguments on jobs of the panel: a model, data and a reward.

    python reproductions/panel/arguments.py [--jobs JOB …] [--seed N] [--out runs/panel]

β and the learning rate are what `agro.train` chooses, and so is the method; updates, prompts of an update and
lengths are the job's. "the recipe" is the same with the recipe's settings at lr 1e-3, as the panel has it.
Writes arguments.json into `--out`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import agro  # noqa: E402
from reproductions.panel import logs, play  # noqa: E402
from reproductions.panel.jobs import reward  # noqa: E402
from reproductions.panel.logs import FULL  # noqa: E402

JOBS = ("own", "graded", "fresh")


def trained(world: play.World, seed: int, folder: Path, **settings: Any) -> dict[str, Any]:
    """What comes of a model, data and a reward."""
    job = world.job
    data: dict[str, Any] = {"prompts": str(world.files.prompts), "reward": partial(reward, job=job.name)}
    if job.data != "fresh":
        store = folder / "log.db"
        shutil.copy(world.files.log, store)
        data = {"log": str(store)}
    run = agro.train(
        str(world.files.start),
        **data,
        out=folder / "run",
        train__steps=job.updates,
        train__groups=job.groups,
        train__warmup=min(10, job.updates // 2),
        train__seed=seed,
        sampler__n=play.RESPONSES,
        sampler__max_new=job.max_new,
        data__hold_out=0,
        evaluate__kl=False,
        **settings,
    )
    config = json.loads((run.folder / "config.json").read_text())
    found = play.measure(world, logs.load(run.folder / "model"))
    return {"objective": config["objective"], "lr": config["train"]["lr"], **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", nargs="*", default=JOBS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/panel"))
    args = parser.parse_args()
    found = {}
    for name in args.jobs:
        world = play.world(name, args.out, FULL)
        with tempfile.TemporaryDirectory() as folder:
            ours = trained(world, args.seed, Path(folder))
        theirs = play.complete(play.Row(name, "the default", 1e-3, args.seed), args.out, FULL)
        start = play.complete(play.Row(name, play.NOTHING, None), args.out, FULL)
        found[name] = {"start": start, "three arguments": ours, "the recipe": theirs}
        print(
            name,
            *(f"{key} {run['reward']:.3f}" for key, run in found[name].items()),
            ours["lr"],
            ours["objective"],
        )
    (args.out / "arguments.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
