"""`agro race` on the log and on the thumbs of the chat reproduction: what it chooses, and what that reaches.

    python reproductions/chat/race.py --model DIR [--job log thumbs] [--out runs/chat] [--record]

The same model, adapter, updates and held-out questions as run.py, whose data it makes or finds in --out; one
seed. The rates are those of a race, 3e-3, a third and three times of it. Prints a table, and writes it with
--record into races.json and README.md beside this script. What is complete in --out isn't run again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from reproductions import harness, racing  # noqa: E402
from reproductions.chat import logs, report, run  # noqa: E402

JOBS = ("log", "thumbs")


def values(job: str, model: Path, folder: Path, files: logs.Files) -> dict[str, Any]:
    """What a user would give: what all runs of run.py have, and as many prompts an update."""
    store = folder / "log.db"
    if not store.exists():
        logs.import_into(store, files, job)
    common = run.COMMON
    return {
        **common,
        "policy": {**common["policy"], "model": str(model)},
        "data": {"store": str(store), "eval_prompts": str(files.held_out)},
        "evaluate": {"every": 0, "kl": False},
        "train": {**common["train"], "groups": 32, "lr": run.RATE, "steps": run.STEPS},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__, "runs/chat", job=JOBS, record=harness.RECORD)
    parser.add_argument("--model", type=Path, required=True, help="folder that model.py wrote")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    out = args.out.resolve()
    run.prepare(args.model, out)
    raced = {}
    for job in args.job:
        folder = out / f"race-{job}"
        raced[job] = racing.race(values(job, args.model.resolve(), folder, logs.Files(out / "data")), folder)
    racing.write(HERE, "races.json", report.NAMES, raced, record=args.record)


if __name__ == "__main__":
    harness.guarded(main)
