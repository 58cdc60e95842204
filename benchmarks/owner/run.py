"""What the owner of a store costs: samples that it adds a CPU second, and draws of 96 samples.

    python benchmarks/owner/run.py [--repeats 5]

Starts `agro store serve` as a process of its own, on a new store in build/owner, and asks it over HTTP, as a
run's processes do: samples are encoded and decoded by the client. `ours` of the first rows are samples a CPU
second of the owner, while a client appends groups of 8, 64 samples a call, each with an origin;
`seconds_per_sample` also has what their rewards cost, and the client. `ours` of the draws are CPU seconds of
the owner and of the client together (`owner`, `client`: of each) for a draw of 12 groups of 8 as a step makes
it, in two calls, which decodes all samples; `file` is that of the same draws without an owner. Medians of the
steps of each repeat. Writes benchmarks/results/owner.json. CPU time is that of the processes, so that what
else the machine does matters little; memory that others use makes it longer.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from agro.config import DataConfig  # noqa: E402
from agro.store import At, DrawRule, Origin, Selection, Store  # noqa: E402
from agro.types import Sample  # noqa: E402
from benchmarks import recording  # noqa: E402

FOLDER = ROOT / "build/owner"
RESULTS = ROOT / "benchmarks/results/owner.json"
TOKEN = "benchmark"
SIZE, TOGETHER = 8, 64  # responses a prompt; samples of a call
DRAWN = 96  # samples of a draw
DRAW_SECONDS = 0.010  # goal
STEPS = 20  # draws of a repeat


class Length(NamedTuple):
    tokens: int
    goal: float  # samples a CPU second of the owner
    calls: int  # of a repeat


LENGTHS = (Length(512, 8000, 60), Length(4096, 3000, 25))


def samples_of(length: int, count: int, first: int) -> list[Sample]:
    """Groups of responses of so many tokens, a quarter of them the prompt's, as a sampler makes them."""
    rng = np.random.default_rng(first)
    action = np.arange(length) >= length // 4
    samples = []
    for i in range(first, first + count):
        logp = np.where(action, -rng.exponential(1.0, length), np.nan).astype(np.float32)
        samples.append(
            Sample(
                f"What is {i // SIZE} times {i // SIZE}? " + "Think step by step. " * 8,
                "Then we add the two and find it. " * (length // 12),
                tokens=rng.integers(0, 150_000, length).astype(np.int32),
                action=action,
                learn=action,
                behavior_logp=logp,
                version=3,
                role="policy",
                source="policy",
                tokenizer="0123456789abcdef",
                sampling={"temperature": 1.0, "max_new": length, "top_p": 1.0},
                meta={"index": i, "finish": "stop", "answer": str(i)},
            )
        )
    return samples


class ServedStore:
    """An owner's process, and a store that asks it."""

    def __init__(self, process: subprocess.Popen[str], store: Store, file: Path) -> None:
        self.process, self.store, self.file = process, store, file

    def cpu(self) -> float:
        """CPU seconds of the owner, of all its threads."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) * 1e-9


@contextmanager
def served(name: str) -> Iterator[ServedStore]:
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    (FOLDER / name).mkdir(parents=True)
    file = FOLDER / name / "store.db"
    command = [sys.executable, "-m", "agro", "store", "serve", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().split()[1]
    try:
        with Store.open(url) as store:
            yield ServedStore(process, store, file)
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(FOLDER / name)


def append(served: ServedStore, length: Length, repeat: int) -> dict[str, float]:
    """CPU seconds of the owner, and of the client, by what they do with the samples of a repeat."""
    parts = {"append": 0.0, "set_rewards": 0.0, "client": 0.0}
    for call in range(length.calls):
        first = (repeat * length.calls + call) * TOGETHER
        samples = samples_of(length.tokens, TOGETHER, first)
        origins = [Origin("run:r", i // SIZE, str(i % SIZE)) for i in range(first, first + TOGETHER)]
        before, client = served.cpu(), time.process_time()
        ids = served.store.append(samples, run="r", step=None, origins=origins)
        appended = served.cpu()
        served.store.set_rewards(((i, float(i % 2), {}) for i in ids), once=True)
        parts["client"] += time.process_time() - client
        parts["append"] += appended - before
        parts["set_rewards"] += served.cpu() - appended
    return parts


def draw(store: Store, run: str, owner_cpu: Callable[[], float], repeat: int) -> dict[str, float]:
    """CPU seconds of the owner and of this process, the medians of the draws of a repeat."""
    rule = DrawRule(DRAWN // SIZE, DataConfig(roles=("policy",)), min_group=SIZE)
    owner, client = [], []
    for step in range(1 + repeat * STEPS, 1 + (repeat + 1) * STEPS):
        before, own = owner_cpu(), time.process_time()
        at = At(run, step, seed=0, version=3)
        picked = store.draws.pick(rule, at)
        drawn = store.draws.draw_picked([Selection(rule, picked)], at)
        client.append(time.process_time() - own)
        owner.append(owner_cpu() - before)
        assert len(drawn.samples) == DRAWN
    return {"owner": statistics.median(owner), "client": statistics.median(client)}


def measure(length: Length, repeats: int) -> list[dict[str, Any]]:
    """The rows of one length of samples."""
    count = length.calls * TOGETHER
    with served(str(length.tokens)) as owner, Store.open(owner.file) as file:
        append(owner, length._replace(calls=4), 1000)  # code that is loaded when it is first used
        added = [append(owner, length, repeat) for repeat in range(repeats)]
        draws = [draw(owner.store, "served", owner.cpu, repeat) for repeat in range(repeats + 1)][1:]
        alone = [draw(file, "file", lambda: 0.0, repeat) for repeat in range(repeats + 1)][1:]
    parts = {name: [seconds[name] / count for seconds in added] for name in added[0]}
    return [
        recording.row(
            f"samples of {length.tokens} tokens, added",
            [count / seconds["append"] for seconds in added],
            goal=length.goal,
            seconds_per_sample=parts,
        ),
        recording.row(
            f"draw of {DRAWN} samples of {length.tokens} tokens",
            [seconds["owner"] + seconds["client"] for seconds in draws],
            goal=DRAW_SECONDS,
            unit="CPU s at most",
            owner=[seconds["owner"] for seconds in draws],
            client=[seconds["client"] for seconds in draws],
            file=[seconds["client"] for seconds in alone],
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    os.environ["AGRO_TOKEN"] = TOKEN
    rows = []
    for length in LENGTHS:
        for row in measure(length, args.repeats):
            rows.append(row)
            value = statistics.median(row["ours"])
            print(f"{row['name']}: {value:.4g} (goal {row['goal']:g})", flush=True)
    recording.write(RESULTS, rows)


if __name__ == "__main__":
    main()
