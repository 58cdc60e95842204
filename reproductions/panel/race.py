"""`agro race` on jobs of the panel: what it tries, what it chooses, and whether that holds.

    python reproductions/panel/race.py [--only JOB …] [--out runs/panel] [--record] [--small]

Each job's race has the job's start, its log or prompts, and 512 of its held-out prompts, a half of which
choose. Prints a table; --record writes result_races.json beside this script.
What is complete in --out isn't run again.
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro.store import Pair, Store  # noqa: E402
from reproductions import harness, racing  # noqa: E402
from reproductions.panel import logs  # noqa: E402
from reproductions.panel.jobs import JOBS, chosen  # noqa: E402
from reproductions.panel.logs import FULL, SMALL, Size  # noqa: E402

DATA = {
    "own": "a log, 0/1 (own)",
    "better, noisy": "a better author, noisy grades (better, noisy)",
    "better, graded": "a better author, grades (better, graded)",
    "worse": "a much worse author (worse)",
    "fresh": "prompts and a reward (fresh)",
    "stars": "one rating a prompt (stars)",
    "pairs": "judged pairs (pairs)",
}
HELD_OUT = 512


def values(name: str, folder: Path, out: Path, size: Size) -> dict[str, Any]:
    """What a user would give; the held-out prompts and a copy of the log are put into `folder`."""
    job = size.of(JOBS[name])
    files = logs.prepare(job, out, size)
    folder.mkdir(parents=True, exist_ok=True)
    held_out = folder / "held_out.jsonl"
    lines = files.held_out.read_text().splitlines(keepends=True)
    held_out.write_text("".join(lines[:HELD_OUT]))
    data = {"eval_prompts": str(held_out)}
    if job.data == "fresh":
        data["prompts"] = str(files.prompts)
    else:
        data["store"] = str(folder / "log.db")
        if not Path(data["store"]).exists():
            copy_log(files.log, Path(data["store"]), judged=job.data == "pairs")
    place = {
        "policy": {"model": str(files.start)},
        "data": data,
        "reward": {"options": {"job": name}},
        "sampler": {"max_new": job.max_new},
        "train": {"steps": max(job.updates, 4), "groups": job.groups},
    }
    found: dict[str, Any] = harness.merged(tomllib.loads((HERE / "race.toml").read_text("utf-8")), place)
    return found


def copy_log(log: Path, to: Path, *, judged: bool) -> None:
    """Of its own, since a run writes draws and log-probs of the reference into its store. Of judged pairs
    without the rewards 1 and 0, which other methods of the panel read."""
    if not judged:
        shutil.copy(log, to)
        return
    with Store.open(log, read_only=True) as store, Store.open(to) as copied:
        samples = list(store.samples())
        ids = copied.append(sample.replace(id=None, reward=None) for sample in samples)
        new = {sample.id: id for sample, id in zip(samples, ids, strict=True)}
        copied.add_pairs(Pair(new[pair.winner], new[pair.loser]) for pair in store.pairs())


def main(arguments: Sequence[str] | None = None) -> None:
    switches = {"record": harness.RECORD, "small": harness.SMALL}
    args = harness.parser(__doc__, "runs/panel", only=[], **switches).parse_args(arguments)
    size, out = SMALL if args.small else FULL, args.out.resolve()
    raced = {}
    for name in chosen(args.only, DATA, "--only"):
        folder = out / "races" / name
        raced[name] = racing.race(values(name, folder, out, size), folder)
    racing.write(HERE, "result_races.json", DATA, raced, record=args.record, on_page=False)


if __name__ == "__main__":
    harness.guarded(main)
