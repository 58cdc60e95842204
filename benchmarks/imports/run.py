"""What an import costs: records and MB a second of CPU, and the memory that it takes.

    python benchmarks/imports/run.py [--records 100000] [--megabytes 300] [--repeats 3]
        [--workers 1 2] [--only …]

Makes logs in build/imports: small records, four responses a prompt (text alone; with tokens and log-probs),
and trajectories of about 120 KB (plain, gzip, zstd). Imports each in a process of its own, without a
tokenizer. Writes benchmarks/results/imports.json, where `ours` are records, or MB, a CPU second, `bytes`
those of the file, unpacked, and `peak` is the memory in MB above that of the process before it began. Prints
a line for each. `wall` is in seconds; it depends on the disk and on what else the machine does. With
`--workers 2` two processes read and a third writes; `ours` counts the CPU seconds of all, and `own` has those
of the one that writes, by which time is bounded on many cores.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import zstandard

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from benchmarks import recording  # noqa: E402

RESULTS = ROOT / "benchmarks/results/imports.json"
LOGS = ROOT / "build/imports"
GOALS = {"text": 20_000, "tokens": 20_000, "large": 100, "large.gz": 100, "large.zst": 100}
WORDS = [f"word{i}" for i in range(2000)]
LINES = [" ".join(random.Random(i).choices(WORDS, k=10)) for i in range(2000)]


def text(some: random.Random, count: int) -> str:
    return " ".join(some.choices(WORDS, k=count))


def small(count: int, *, tokens: bool) -> Iterator[dict[str, Any]]:
    some = random.Random(0)
    for i in range(count):
        if i % 4 == 0:
            prompt = f"Question {i // 4}: {text(some, 12)}?"
        record = {"prompt": prompt, "response": text(some, 16), "reward": float(i % 3 == 0), "model": "m"}
        if tokens:
            record["tokens"] = [some.randrange(32000) for _ in range(48)]
            record["mask"] = [0] * 16 + [1] * 32
            record["behavior_logp"] = [None] * 16 + [-some.random() for _ in range(32)]
        yield record


def trajectories(megabytes: float) -> Iterator[dict[str, Any]]:
    """Forty turns each, of an assistant that calls a tool."""
    some = random.Random(0)
    written, number = 0, 0
    while written < 1e6 * megabytes:
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"Task {number}: {text(some, 100)}"}]
        for call in range(20):
            arguments = json.dumps({"cmd": text(some, 20)})
            function = {"name": "run", "arguments": arguments}
            calls = [{"id": f"c{call}", "type": "function", "function": function}]
            thought = " ".join(some.choices(LINES, k=15))
            messages.append({"role": "assistant", "content": thought, "tool_calls": calls})
            output = "\n".join(some.choices(LINES, k=50))
            messages.append({"role": "tool", "tool_call_id": f"c{call}", "content": output})
        messages.append({"role": "assistant", "content": f"Done: {text(some, 5)}"})
        record = {"messages": messages, "reward": some.random()}
        written += len(json.dumps(record)) + 1
        number += 1
        yield record


def make(name: str, records: int, megabytes: float) -> Path:
    """The log of a case, written once."""
    size = f"{megabytes:g}MB" if name.startswith("large") else str(records)
    kind, _, packed = name.partition(".")
    path = LOGS / (f"{kind}_{size}.jsonl" + (f".{packed}" if packed else ""))
    if path.exists():
        return path
    LOGS.mkdir(parents=True, exist_ok=True)
    if packed:
        pack: Callable[..., Any] = gzip.open if packed == "gz" else zstandard.open
        with make(kind, records, megabytes).open("rb") as plain, pack(path, "wb") as file:
            while block := plain.read(1 << 20):
                file.write(block)
        return path
    rows = trajectories(megabytes) if kind == "large" else small(records, tokens=kind == "tokens")
    with path.open("w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    return path


def most_memory() -> int:
    """KB that this process had at most. (ru_maxrss begins with what its parent had.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def measure(log: str, workers: int) -> dict[str, float]:
    """Import a log into a new store."""
    from agro.logs.importing import import_files
    from agro.store import Store

    options: dict[str, Any] = {"workers": workers} if workers > 1 else {}
    path = Path(log)
    store = path.with_suffix(f".{os.getpid()}.db")
    began, used = time.perf_counter(), time.process_time()
    before = most_memory()
    try:
        with Store.open(store) as opened:
            report = import_files(opened, [path], **options)
        peak = most_memory() - before
        own, wall = time.process_time() - used, time.perf_counter() - began
        others = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = own + others.ru_utime + others.ru_stime
    finally:
        for suffix in ("", "-wal", "-shm"):
            Path(f"{store}{suffix}").unlink(missing_ok=True)
    return {"cpu": cpu, "own": own, "wall": wall, "peak": peak / 1e3, "samples": report.samples}


def case(name: str, workers: int, asked: Any) -> dict[str, Any]:
    """Each import in a process of its own."""
    path = make(name, asked.records, asked.megabytes)
    size = make(name.partition(".")[0], asked.records, asked.megabytes).stat().st_size
    ours = [recording.apart(__file__, ROOT, "measure", str(path), workers) for _ in range(asked.repeats)]
    by = f" by {workers} processes and one that writes" if workers > 1 else ""
    title = f"import of {path.name}{by}, {'MB' if name.startswith('large') else 'records'} a CPU second"

    rates = [(size / 1e6 if name.startswith("large") else found["samples"]) / found["cpu"] for found in ours]
    more: dict[str, Any] = {key: [found[key] for found in ours] for key in ("peak", "wall", "own")}
    row = recording.row(title, rates, goal=GOALS[name], bytes=size, **more)
    print(f"{title}: {statistics.median(rates):.0f}, {max(row['peak']):.0f} MB above the start", flush=True)
    return row


def main() -> None:
    sizes = {"records": 100_000, "megabytes": 300.0, "repeats": 3}
    asked = recording.parser(__doc__, **sizes, workers=[1], only=GOALS).parse_args()
    for name, workers in product(asked.only, asked.workers):
        recording.keep(RESULTS, case(name, workers, asked))


if __name__ == "__main__":
    main()
