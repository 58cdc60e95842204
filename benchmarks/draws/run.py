"""What a draw of 16 groups costs, from 10^4 to 10^7 stored samples.

    python benchmarks/draws/run.py [--samples 10000 100000 1000000 10000000] [--rules …] [--repeats 2]

Makes stores of short texts with rewards, four responses a prompt, in build/draws, and draws from each by each
rule: groups, their samples, and the record of the draw, on the disk. Writes benchmarks/results/draws.json,
where `ours` is CPU seconds of a draw, for each of the repeats the median of its steps, and prints a table.
Wall time, most of which is the disk's, depends on what else the machine does; `first` is that of the first
draw by a rule, which puts the groups in order, `first_cpu` its CPU time, and `next_first` and `next_cpu`
those of the first draw of the next process, which finds the order in the store. None of them has the check of
the file. Stores of more than 10^6 samples are copies of that log under other prompts, with indexes made at
the end.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from agro.config import DataConfig  # noqa: E402
from agro.store import At, DrawRule, Store  # noqa: E402
from agro.store.candidates import drop_orders  # noqa: E402
from agro.store.sample_rows import SAMPLE, SELECT, sample_checksum  # noqa: E402
from agro.types import Sample, prompt_hash  # noqa: E402
from benchmarks import recording  # noqa: E402

RESULTS = ROOT / "benchmarks/results/draws.json"
GOAL = 0.005  # seconds
GROUPS, SIZE, STEPS, SAMPLES = 16, 4, 30, [10**4, 10**5, 10**6]
RULES: dict[str, dict[str, Any]] = {
    "least_used": {},
    "uniform": {"order": "uniform"},
    "spread": {"spread": True},
    "sources": {"sources": ("a",)},
    "newest": {"order": "newest"},
    "uniform, max_age": {"order": "uniform", "max_age": 100},
    "age_weighted": {"order": "age_weighted"},
}
MADE = 10**6  # samples of the largest store that is written sample by sample
OWN = 1000  # steps whose samples are the run's own, from a store of that many groups of 16 on


def make(path: Path, samples: int) -> None:
    """A store of so many samples. Beyond `MADE` the log of those before is copied under other prompts."""
    written(path, min(samples, MADE))
    if samples > MADE:
        copied(path, MADE, samples)


def copied(path: Path, made: int, samples: int) -> None:
    """Copy the log of a store of `made` samples until it has so many; two indexes are made at the end."""
    place = [SAMPLE.index(name) for name in ("id", "prompt_id", "prompt")]
    sql = "SELECT name, sql FROM sqlite_master WHERE name IN ('samples_draw', 'samples_state')"
    with Store.open(path) as store:
        store.tables.run("PRAGMA synchronous = OFF")
        indexes = store.tables.run(sql)
        for name, _ in indexes:
            store.tables.run(f"DROP INDEX {name}")
        log = store.tables.run(f"{SELECT} WHERE run IS NULL ORDER BY id")
        for first in range(made, samples, len(log)):
            rows = []
            for i, old in enumerate(log[: samples - first], first + 1):
                row = list(old)
                prompt = f"{old[place[2]]} {first}"
                for column, value in zip(place, (i, prompt_hash(prompt), prompt)):
                    row[column] = value
                rows.append((*row[:-1], sample_checksum(row)))
            with store.transaction():
                store.tables.insert("samples", SAMPLE, rows)
        for _, index in indexes:
            store.tables.run(index)


def written(path: Path, samples: int) -> None:
    """A store of so many samples: a log, and groups of the run "r", 16 at each step."""
    groups = samples // SIZE
    own = min(groups // 2, OWN * GROUPS)
    with Store.open(path) as store:
        store.tables.run("PRAGMA synchronous = OFF")
        for first in range(0, groups - own, 5000):
            store.append(
                Sample(f"prompt {g}", f"response {i}", reward=float((g + i) % 3 == 0), source="ab"[g % 2])
                for g in range(first, min(first + 5000, groups - own))
                for i in range(SIZE)
            )
        for step in range(1, own // GROUPS + 1):
            store.append(
                [
                    Sample(f"own {step} {g}", f"response {i}", reward=float(i % 2), source="a", version=step)
                    for g in range(GROUPS)
                    for i in range(SIZE)
                ],
                run="r",
                step=step,
            )


def measure(samples: int, steps: int, names: list[str], anew: bool) -> dict[str, Any]:
    """Seconds of draws by rule: of the first in a process, of a step, and of its CPU; bytes of the store.
    `anew`: without the orders that a process before has left."""
    path = ROOT / f"build/draws/{samples}.db"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path, samples)
    size = path.with_suffix(".bytes")  # of the samples alone, before any draw
    if not size.exists():
        with Store.open(path) as store:
            store.tables.run("PRAGMA wal_checkpoint(TRUNCATE)")
        size.write_text(str(path.stat().st_size))
    found: dict[str, Any] = {"bytes": int(size.read_text()) / samples}
    with Store.open(path) as store:
        [(version, last)] = store.tables.run(
            "SELECT max(version), ifnull((SELECT max(step) FROM draws), max(version)) FROM samples"
        )
        store.tables.check()
        if anew:
            with store.transaction():
                drop_orders(store.tables)
        for name in names:
            rule = DrawRule(GROUPS, DataConfig(**RULES[name]), min_group=2)
            wall, cpu = [], []
            for step in range(steps):
                last += 1
                at = At("r", last, 0, version + step // 10)
                began, used = time.perf_counter(), time.process_time()
                drawn = store.draw(rule, at)
                wall.append(time.perf_counter() - began)
                cpu.append(time.process_time() - used)
                assert len({s.prompt_id for s in drawn.samples}) == GROUPS, name
            found[name] = {
                "first": wall[0],
                "first_cpu": cpu[0],
                "wall": statistics.median(wall[1:] or wall),
                "cpu": statistics.median(cpu[1:] or cpu),
            }
    return found


def main() -> None:
    asked = recording.parser(__doc__, samples=SAMPLES, rules=RULES, repeats=2).parse_args()
    for samples in asked.samples:
        ours, following = list[dict[str, Any]](), list[dict[str, Any]]()
        for _ in range(asked.repeats):
            ours.append(recording.apart(__file__, ROOT, "measure", samples, STEPS, asked.rules, True))
            following.append(recording.apart(__file__, ROOT, "measure", samples, 1, asked.rules, False))
        for rule in asked.rules:
            name = f"draw of {GROUPS} groups of {samples} samples, {rule}"
            seconds = [found[rule]["cpu"] for found in ours]
            more = {key: [found[rule][key] for found in ours] for key in ("wall", "first", "first_cpu")}
            more["next_first"] = [found[rule]["first"] for found in following]
            more["next_cpu"] = [found[rule]["first_cpu"] for found in following]
            row = recording.row(name, seconds, goal=GOAL, **more)
            row["bytes_per_sample"] = ours[0]["bytes"]
            recording.keep(RESULTS, row)
            first, wall = statistics.median(row["first"]), statistics.median(row["wall"])
            following_first = statistics.median(row["next_first"])
            print(
                f"{name}: {1e3 * statistics.median(seconds):.1f} ms CPU ({1e3 * wall:.1f} ms), first "
                f"{first:.2f} s, of the next process {following_first:.3f} s, "
                f"{row['bytes_per_sample']:.0f} bytes a sample",
                flush=True,
            )


if __name__ == "__main__":
    main()
