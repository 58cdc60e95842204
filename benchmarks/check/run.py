"""What `agro check` costs without a model: seconds and memory, from 10^4 to 10^6 records.

    python benchmarks/check/run.py [--records 10000 100000 1000000]

Makes stores in build/check: eight responses a prompt by two sources, 40 to 120 words each, every tenth
prompt with one response alone. Writes benchmarks/results/check.json, where `ours` are CPU seconds of the
command, and prints a table with its wall time and its peak memory, of which 60 MB are the imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import recording  # noqa: E402

RESULTS = ROOT / "benchmarks/results/check.json"
GOAL = 60.0  # seconds
SIZE, ALONE, PART = 8, 10, 2000
MADE = 100_000
OBJECTIVE = ("--objective", "agro")


def make(name: str, records: int) -> None:
    """A store of so many records; beyond `MADE` those before are copied under other prompts."""
    from benchmarks.draws.run import copied  # imports agro, whose memory would count as the command's

    written(Path(name), min(records, MADE))
    if records > MADE:
        copied(Path(name), MADE, records)


def written(path: Path, records: int) -> None:
    """A store of so many records, written by agro."""
    from agro.store import Store
    from agro.types import Sample

    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, rng.integers(2, 9)))) for _ in range(20_000)]
    made = group = 0
    with Store.open(path) as store:
        while made < records:
            samples: list[Sample] = []
            while len(samples) < PART and made < records:
                size = min(1 if group % ALONE == 0 else SIZE, records - made)
                for i in range(size):
                    chosen = rng.integers(0, len(words), rng.integers(40, 121))
                    samples.append(
                        Sample(
                            f"question {group}",
                            " ".join(words[w] for w in chosen),
                            reward=float(rng.random() < 0.3),
                            role="log",
                            source="ab"[i % 2],
                            meta={"finish": "length" if rng.random() < 0.05 else "stop"},
                        )
                    )
                made += size
                group += 1
            store.append(samples)


def measure(path: Path) -> dict[str, Any]:
    """Seconds and peak memory of one run of the command."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "agro", "check", str(path), *OBJECTIVE, "--json"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = json.loads(process.stdout.read())
        _, _, used = os.wait4(process.pid, 0)
        process.returncode = 0
    return {
        "samples": found["samples"],
        "seconds": time.perf_counter() - began,
        "cpu": used.ru_utime + used.ru_stime,
        "megabytes": used.ru_maxrss / 1024,
    }


def main() -> None:
    args = recording.parser(__doc__, records=[10_000, 100_000, 1_000_000]).parse_args()
    folder = ROOT / "build/check"
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    print(f"{'records':>9} {'CPU s':>7} {'wall s':>7} {'MB':>6} {'GB on disk':>11}")
    for records in args.records:
        path = folder / f"{records}.db"
        if not path.exists():
            # In a process of its own: what this one takes would count as that of its children.
            recording.apart(__file__, ROOT, "make", str(path), records)
        runs = [measure(path) for _ in range(3)]
        cpu = sorted(run["cpu"] for run in runs)
        middle = next(run for run in runs if run["cpu"] == cpu[len(cpu) // 2])
        print(
            f"{records:>9} {middle['cpu']:>7.1f} {middle['seconds']:>7.1f} {middle['megabytes']:>6.0f} "
            f"{path.stat().st_size / 1e9:>11.2f}"
        )
        name, memory = f"{records} records", middle["megabytes"]
        rows.append(recording.row(name, cpu, goal=GOAL, megabytes=memory))
    recording.keep(RESULTS, *rows)


if __name__ == "__main__":
    main()
