"""Draws a second from one, two and four owners, each a process, that have 100,000 samples together.

    python benchmarks/owner/shards.py [--samples 100000] [--repeats 5]

Groups of 4 short texts with rewards; a draw is 16 groups, picked and drawn by one client, one after the
other. Of each number of owners: `draws`, a second of wall time; `client` and `owners`, CPU milliseconds a
draw, of all owners together; `first`, seconds of wall time of the first draw. The numbers of owners take
turns. Writes benchmarks/results/shards.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import ExitStack
from typing import Any

from run import ROOT, TOKEN, ServedStore, recording, served

from agro.store import At, DrawRule, Selection, Store
from agro.store.location import location_of
from agro.types import Sample

RESULTS = ROOT / "benchmarks/results/shards.json"
OWNERS = (1, 2, 4)
SIZE, GROUPS, TOGETHER, DRAWS = 4, 16, 2000, 40


def fill(store: Store, count: int) -> None:
    for first in range(0, count, TOGETHER):
        numbers = range(first, min(first + TOGETHER, count))
        store.append(Sample(f"question {i // SIZE}", f"answer {i}", reward=float(i % 2)) for i in numbers)


def draws(store: Store, owners: list[ServedStore], steps: range) -> dict[str, float]:
    rule = DrawRule(GROUPS, min_group=SIZE)
    began, client = time.perf_counter(), time.process_time()
    before = sum(owner.cpu() for owner in owners)
    for step in steps:
        at = At("run", step, seed=0, version=0)
        store.draws.draw_picked([Selection(rule, store.draws.pick(rule, at))], at)
    return {
        "draws": len(steps) / (time.perf_counter() - began),
        "client": (time.process_time() - client) / len(steps) * 1e3,
        "owners": (sum(owner.cpu() for owner in owners) - before) / len(steps) * 1e3,
    }


def recorded(row: dict[str, Any]) -> recording.Row:
    name = f"draws a second of {row['samples']} samples in {row['owners']} stores"
    return recording.row(name, [repeat["draws"] for repeat in row["repeats"]], **row)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    os.environ["AGRO_TOKEN"] = TOKEN
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        stores = {}
        for count in OWNERS:
            owners = [stack.enter_context(served(f"shards-{count}-{number}")) for number in range(count)]
            urls = [str(owner.store.path) for owner in owners]
            store = stack.enter_context(Store.open(location_of(urls[0] if count == 1 else urls)))
            fill(store, args.samples)
            began = time.perf_counter()
            draws(store, owners, range(1, 2))
            first = time.perf_counter() - began
            stores[count] = store, owners
            rows.append({"owners": count, "samples": args.samples, "first": first, "repeats": []})
        for repeat in range(args.repeats):
            for row in rows:
                steps = range(2 + repeat * DRAWS, 2 + (repeat + 1) * DRAWS)
                row["repeats"].append(draws(*stores[row["owners"]], steps))
    for row in rows:
        medians = {name: statistics.median(r[name] for r in row["repeats"]) for name in row["repeats"][0]}
        row["medians"] = medians
        shown = {name: round(value, 2) for name, value in medians.items()}
        print(row["owners"], "owners:", shown, f"first {row['first']:.2f}")
    recording.write(RESULTS, map(recorded, rows))


if __name__ == "__main__":
    main()
