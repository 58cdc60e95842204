"""Collectors and a trainer on PostgreSQL, of which each is killed, stopped and cut off, the server too.

    python tests/store/postgres_faults.py --kills 64

Every response is made once and drawn once, none that was acknowledged is lost, and nobody waits for a client
that is away for more than `LONGEST` seconds. Exits with 1 where this doesn't hold. A server that dies lets
all wait until it is back. The cut is that of a cable between two network namespaces, where they can be made.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


from agro.io.processes import free_port  # noqa: E402
from agro.store import At, Origin, Store  # noqa: E402
from agro.store.sample_rows import ledger_of  # noqa: E402
from agro.types import Sample  # noqa: E402
from benchmarks.postgres.postgres_server import Server  # noqa: E402

RUN, GROUPS, SIZE, LEASE = "r", 4, 8, 3.0
LONGEST = 5.0  # times the processes that want a core, where these are more than the cores
CUT, STOP = 8.0, 5.0  # seconds
WRONG = ("stored twice", "drawn twice", "done without its responses", "acknowledged and lost", "damaged")
NAMESPACE, HERE, THERE = "agro-cut", "10.78.0.1", "10.78.0.2"
context = multiprocessing.get_context("fork")


def collector(url: str, name: str, acknowledged: Any, waits: Any, namespace: bool = False) -> None:
    """Claims, stores, scores and finishes for ever; reports what was acknowledged, and how long it took."""
    if namespace:
        handle = os.open(f"/run/netns/{NAMESPACE}", os.O_RDONLY)
        assert ctypes.CDLL(None).setns(handle, 0) == 0
    rng = random.Random(os.getpid())

    def timed(method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        began = time.monotonic()
        result = method(*args, **options)
        waits.put((name, began, time.monotonic() - began))
        return result

    with Store.open(url) as store:
        while True:
            timed(store.leases.renew, name, LEASE)
            names = store.requests.collectors(RUN)
            dead = set(names) - set(store.leases.alive(names))
            limits = {"maximum": 2, "ahead": 64, "trained": trained.value}
            claimed = timed(store.requests.claim, RUN, name, dead=list(dead), **limits)
            for number in claimed:
                origins = [Origin(ledger_of(RUN), number, str(i)) for i in range(SIZE)]
                text = f"{number} {os.getpid()} {rng.random()}"
                new = [Sample(f"p{number % 50}", f"{text} {i}", None) for i in range(SIZE)]
                ids = timed(store.append, new, run=RUN, origins=origins)
                timed(store.set_rewards, [(i, 1.0, {}) for i in ids], once=True)
            timed(store.requests.finish, RUN, claimed)
            acknowledged.put(claimed)
            if not claimed:
                time.sleep(0.02)


def trainer(url: str) -> None:
    with Store.open(url) as store:
        last = store.ledger.committed(RUN)
        if store.ledger.knows(RUN):
            store.ledger.rewind(RUN)
        step = last.step if last else 0
        while True:
            ready = store.requests.ready(RUN, GROUPS)
            if len(ready) < GROUPS:
                time.sleep(0.02)
                continue
            step += 1
            store.requests.take(RUN, step, ready)
            made = store.experience.find_in_ledger(ledger_of(RUN), ready)
            drawn = store.draw(None, At(RUN, step, 0, step), made=made)
            assert len(drawn.samples) == GROUPS * SIZE
            store.ledger.commit(RUN, step, f"d{step}")
            trained.value = step


trained: Any = context.Value("i", 0)


def ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True).returncode == 0


def make_namespace() -> bool:
    """A second host, on a cable that can be cut."""
    with suppress(FileNotFoundError):
        ip("netns", "del", NAMESPACE)
        inside = ("netns", "exec", NAMESPACE, "ip")
        return (
            ip("netns", "add", NAMESPACE)
            and ip("link", "add", "agro-cut0", "type", "veth", "peer", "name", "agro-cut1")
            and ip("link", "set", "agro-cut1", "netns", NAMESPACE)
            and ip("addr", "add", f"{HERE}/24", "dev", "agro-cut0")
            and ip("link", "set", "agro-cut0", "up")
            and ip(*inside, "addr", "add", f"{THERE}/24", "dev", "agro-cut1")
            and ip(*inside, "link", "set", "agro-cut1", "up")
        )
    return False


class Torture:
    """`server`: None where it isn't this program's to kill."""

    def __init__(self, url: str, server: Server | None, seed: int) -> None:
        self.server, self.rng, self.counts = server, random.Random(seed), Counter[str]()
        self.acknowledged, self.waits = context.Queue(), context.Queue()
        self.url = url
        self.urls = {f"c{i}": url for i in range(4)}
        self.has_namespace = server is not None and make_namespace()
        if self.has_namespace:
            self.urls["far"] = url.replace("127.0.0.1", HERE)
        self.urls["trainer"] = url
        Store.open(url).close()
        self.processes = {name: self.start(name) for name in self.urls}
        self.stopped: list[tuple[str, float]] = []
        self.away: list[tuple[float, float]] = []  # of the server, when all wait

    def start(self, name: str) -> Any:
        if name == "trainer":
            process = context.Process(target=trainer, args=(self.urls[name],), daemon=True)
        else:
            args = (self.urls[name], name, self.acknowledged, self.waits, name == "far")
            process = context.Process(target=collector, args=args, daemon=True)
        process.start()
        return process

    def disturb(self) -> None:
        """One failure, of a kind by chance."""
        x, name = self.rng.random(), self.rng.choice([n for n in self.urls if n not in ("trainer", "far")])
        if x < 0.5:
            self.counts["collector killed"] += 1
            self.kill(name)
        elif x < 0.7:
            self.counts["trainer killed"] += 1
            self.kill("trainer")
        elif x < 0.8:
            self.counts["collector stopped"] += 1
            began = time.monotonic()
            os.kill(self.processes[name].pid, signal.SIGSTOP)
            time.sleep(STOP)
            os.kill(self.processes[name].pid, signal.SIGCONT)
            self.stopped.append((name, began))
        elif x < 0.9 and self.has_namespace:
            self.counts["cable cut"] += 1
            ip("link", "set", "agro-cut0", "down")
            time.sleep(CUT)
            ip("link", "set", "agro-cut0", "up")
        elif self.server is not None:
            self.counts["server killed"] += 1
            began = time.monotonic()
            self.server.kill()
            self.server.start()
            self.away.append((began - 1.0, time.monotonic() + 3.0))
        for each, process in self.processes.items():
            if not process.is_alive():
                self.counts["process ended by an error"] += 1
                self.processes[each] = self.start(each)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].join()
        self.processes[name] = self.start(name)

    def end(self) -> dict[str, Any]:
        """What holds of the store."""
        for process in self.processes.values():
            process.kill()
            process.join()
        claims, waits = drained(self.acknowledged), drained(self.waits)
        if self.has_namespace:
            ip("netns", "del", NAMESPACE)
        near = [took for name, began, took in waits if name != "far" and not self.is_away(name, began, took)]
        with Store.open(self.url) as store:
            run = store.tables.run
            drawn = Counter(draw.sample for draw in store.draws.drawn(RUN))
            origins = "SELECT file, record, part FROM samples WHERE file IS NOT NULL GROUP BY 1, 2, 3"
            done = {number for (number,) in run("SELECT number FROM requests WHERE done = 1")}
            sizes = run("SELECT record, count(*) FROM samples WHERE file IS NOT NULL GROUP BY record")
            damage = store.tables.damage()
            return {
                "steps": trained.value,
                "responses": store.counts().samples,
                "stored twice": len(run(f"SELECT 1 FROM ({origins} HAVING count(*) > 1) AS twice")),
                "drawn": len(drawn),
                "drawn twice": sum(count > 1 for count in drawn.values()),
                "done without its responses": sum(n != SIZE for number, n in sizes if number in done),
                "acknowledged": len({number for claim in claims for number in claim}),
                "acknowledged and lost": len({n for claim in claims for n in claim} - done),
                "damaged": 0 if not damage else str(damage),
                "longest write of a collector, seconds": round(max(near, default=0.0), 2),
            }

    def is_away(self, name: str, began: float, took: float) -> bool:
        """Whether the server was killed, or the collector itself stopped, meanwhile."""
        if any(each == name and began < at < began + took for each, at in self.stopped):
            return True
        return any(began < end and began + took > start for start, end in self.away)


def drained(queue: Any) -> list[Any]:
    items = []
    with suppress(Exception):  # a process that was killed may have left half of an item
        while True:
            items.append(queue.get(timeout=0.5))
    return items


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--url", help="of a server that isn't killed, nor its cable cut")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    server = None if arguments.url else Server(free_port("127.0.0.1"))
    torture = Torture(arguments.url or server.url, server, arguments.seed)  # type: ignore[union-attr]
    began = time.monotonic()
    time.sleep(2.0)
    for _ in range(arguments.kills):
        time.sleep(torture.rng.uniform(0.3, 1.0))
        torture.disturb()
    time.sleep(5.0)
    held = torture.end()
    failures = dict(torture.counts)
    print(json.dumps({"seconds": round(time.monotonic() - began), "failures": failures, **held}, indent=1))
    if server is not None:
        server.close()
    crowd = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    fails = held["longest write of a collector, seconds"] > LONGEST * crowd
    fails |= any(held[name] for name in WRONG) or held["drawn"] < held["steps"] * GROUPS * SIZE
    return int(fails or torture.counts["process ended by an error"] > 0 or held["steps"] == 0)


if __name__ == "__main__":
    sys.exit(main())
