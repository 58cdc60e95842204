"""What a store of 10^5 to 10^9 samples takes and costs: measured, and predicted from the smallest.

    python benchmarks/scaling/stores.py [--samples 100000 1000000]

Makes the stores of benchmarks/draws (short texts with rewards, four responses a prompt) in build/draws, and
measures each in a process of its own: bytes on the disk, CPU seconds to check the file's structure, of the
first draw, which puts the groups in order, of a later one, and of the first one after the store was opened
again, and the bytes of that order. What grows with the samples is predicted from the smallest store, also for
10^7 to 10^9 samples, which aren't made unless they are asked for. Writes benchmarks/results/stores.json, and
stores.md beside this file, where each cell is predicted, and measured in brackets.
"""

from __future__ import annotations

import statistics
import sys
import time
from itertools import count
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from agro.config import DataConfig  # noqa: E402
from agro.store import At, DrawRule, Store  # noqa: E402
from agro.store.database import SqliteDatabase  # noqa: E402
from benchmarks import recording  # noqa: E402
from benchmarks.draws.run import GROUPS, make  # noqa: E402

RESULTS = ROOT / "benchmarks/results/stores.json"
TABLE = ROOT / "benchmarks/scaling/stores.md"
SIZES = [10**n for n in range(5, 10)]
LINEAR = {"bytes": "GB", "check": "s", "first": "s", "order": "GB"}
NAMES = {
    "bytes": "store",
    "check": "check of the file",
    "first": "first draw",
    "order": "order of the groups",
    "draw": "later draw of 16 groups",
    "again": "first draw when opened again",
}
DRAWS = 30


def measure(samples: int) -> dict[str, float]:
    """Of the store of so many samples; seconds are of CPU."""
    path = ROOT / f"build/draws/{samples}.db"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path, samples)
    with Store.open(path) as store:
        database = store.tables
        found: dict[str, float] = {"samples": samples, "bytes": size_of(database)}
        began = time.process_time()
        store.tables.check()
        found["check"] = time.process_time() - began
        [(version, last)] = database.run(
            "SELECT max(version), ifnull((SELECT max(step) FROM draws), max(version)) FROM samples"
        )
        steps = (At("r", step, last, version) for step in count(last + 1))  # the seed: an order of its own
        found["first"] = draw(store, next(steps))
        found["order"] = size_of(database) - found["bytes"]
        found["draw"] = statistics.median(draw(store, next(steps)) for _ in range(DRAWS))
    with Store.open(path) as store:
        store.tables.check()
        return found | {"again": draw(store, next(steps))}


def size_of(database: SqliteDatabase) -> float:
    """Bytes of the pages that are in use."""
    [(pages,)] = database.run("PRAGMA page_count")
    [(free,)] = database.run("PRAGMA freelist_count")
    [(size,)] = database.run("PRAGMA page_size")
    return float((pages - free) * size)


def draw(store: Store, at: At) -> float:
    began = time.process_time()
    store.draw(DrawRule(GROUPS, DataConfig(), min_group=2), at)
    return time.process_time() - began


def predicted(smallest: dict[str, float], samples: int) -> dict[str, float]:
    factor = samples / smallest["samples"]
    return {name: smallest[name] * (factor if name in LINEAR else 1) for name in NAMES}


def shown(name: str, value: float) -> str:
    if LINEAR.get(name) == "GB":
        return f"{value / 1e9:.3g} GB"
    return f"{value:.3g} s" if name in LINEAR else f"{1000 * value:.2g} ms"


def table(rows: list[dict[str, float]], note: str) -> str:
    by_size = {row["samples"]: row for row in rows}
    lines = []
    for samples in SIZES:
        guess, found = predicted(rows[0], samples), by_size.get(samples)
        cells = [f"10^{len(str(samples)) - 1}"]
        for name in NAMES:
            cell = shown(name, guess[name])
            cells.append(cell if found is None else f"{cell} ({shown(name, found[name])})")
        lines.append(cells)
    return f"{recording.markdown(['samples', *NAMES.values()], lines)}\n\n{note}\n"


def main() -> None:
    asked = recording.parser(__doc__, samples=[10**5, 10**6]).parse_args()
    rows = []
    for samples in sorted(asked.samples):
        rows.append(recording.apart(__file__, ROOT, "measure", samples))
        print(rows[-1], flush=True)
    made = [recording.row(f"store of {row['samples']} samples", [row["draw"]], **row) for row in rows]
    recording.write(RESULTS, made)
    note = f"`python benchmarks/scaling/stores.py`, commit {recording.commit()}, {recording.machine()}"
    TABLE.write_text(table(rows, note))
    print(TABLE.read_text())


if __name__ == "__main__":
    main()
