"""The watchdog names what hangs, once for each doubling, and nothing that goes on."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

from agro.runs.progress import Watchdog

LIMIT = 0.4  # seconds: on a busy machine the sleeps of 0.02 take longer


def test_it_names_the_stage_and_its_progress_when_it_hangs() -> None:
    said: list[str] = []
    with Watchdog(LIMIT, said.append) as watch:
        began = time.monotonic()
        watch.stage("sampling", 37, 64)
        time.sleep(3.5 * LIMIT)  # hangs: said after 1 and 2 limits, next after 4
        hung = list(said)
        doublings = math.log2((time.monotonic() - began) / LIMIT)
        for _ in range(10):
            watch.stage("scoring")
            time.sleep(0.02)
    assert 1 <= len(hung) <= 1 + doublings
    assert all(re.match(r"sampling 37/64 has made no progress for \d+ s", line) for line in hung)
    assert said == hung


def test_it_says_where(tmp_path: Path) -> None:
    """A store that waits for another writer's lock: the line of agro is the database's."""
    import sqlite3
    import threading

    from agro.store import Store
    from agro.types import Sample

    said: list[str] = []
    with Store.open(tmp_path / "s.db") as store:
        other = sqlite3.connect(tmp_path / "s.db", isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        threading.Timer(1.0, lambda: other.execute("ROLLBACK")).start()
        with Watchdog(0.1, said.append) as watch:
            watch.stage("appending")
            store.append([Sample("a", "b")])
        other.close()
    assert "it is in store/sqlite.py:" in said[0]


def test_none() -> None:
    with Watchdog(0, lambda text: None) as watch:
        watch.stage("sampling")
