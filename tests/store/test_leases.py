"""Who is alive: leases that are renewed, run out, and are given back."""

from __future__ import annotations

import time
from pathlib import Path

from making import group

from agro.store import Origin, Store, shared
from agro.store.location import opened
from agro.store.shared import Leases, leased


def test_a_lease_runs_out_unless_it_is_renewed(path: Path) -> None:
    now = 1000.0
    with opened(path, read_only=False, create=True, timeout=5.0) as database:
        leases = Leases(database, clock=lambda: now)
        assert leases.alive(["a"]) == []  # in a store that never had one
        leases.renew("a", 10.0)
        leases.renew("b", 20.0)
        now = 1009.9
        assert leases.alive(["b", "a", "c"]) == ["a", "b"]
        leases.renew("a", 10.0)
        now = 1015.0
        assert leases.alive(["a", "b"]) == ["a", "b"]
        now = 1020.0
        assert leases.alive(["a", "b"]) == []  # at the end of both
        now = 1000.0
        leases.renew("a", 10.0)
        leases.release("a")
        assert leases.alive(["a"]) == []


def test_a_clock_that_is_set_back_ends_the_leases_of_before(path: Path) -> None:
    now = 1000.0
    with opened(path, read_only=False, create=True, timeout=5.0) as database:
        leases = Leases(database, clock=lambda: now)
        leases.renew("a", 10.0)
        now = 400.0
        assert leases.alive(["a"]) == []
        leases.renew("a", 10.0)
        assert leases.alive(["a"]) == ["a"]


def test_a_process_has_its_lease_for_as_long_as_the_block_runs(store: Store, monkeypatch) -> None:
    """It is renewed every 0.05 s: the time at which it would run out is put off again and again."""
    monkeypatch.setattr(shared, "RENEWALS", 1200)
    ends = {0.0}
    deadline = time.monotonic() + 60
    with leased(store.path, "me", 60.0):
        assert store.leases.alive(["me", "you"]) == ["me"]
        while len(ends) < 4 and time.monotonic() < deadline:
            [(end,)] = store.tables.run("SELECT ends FROM leases")
            ends.add(end)
            time.sleep(0.02)
    assert len(ends) == 4
    assert store.leases.alive(["me"]) == []


def test_a_collector_that_was_stopped_changes_nothing_when_it_goes_on(store: Store) -> None:
    """ "slow" samples, is stopped beyond its lease, and stores and scores after "next" has done all of it."""
    origins = [Origin("run:r", 0, part) for part in "01"]
    assert store.requests.claim("r", "slow", maximum=1, ahead=1) == [0]
    assert store.requests.claim("r", "next", maximum=1, ahead=0, dead=["slow"]) == [0]
    ids = store.append(group("p", [None, None]), run="r", origins=origins)
    store.set_rewards([(ids[0], 1.0, {}), (ids[1], None, {"reward_error": "no answer"})], once=True)
    store.requests.finish("r", [0])
    before = list(store.samples())
    assert store.append(group("other", [None, None]), run="r", origins=origins) == ids
    store.set_rewards([(i, 0.25, {"reward_parts": {}}) for i in ids], once=True)
    store.requests.finish("r", [0])
    assert list(store.samples()) == before
    assert [s.reward for s in before] == [1.0, None]
    assert store.requests.ready("r", 9) == [0]
    assert store.requests.claim("r", "slow", maximum=1, ahead=0) == []
