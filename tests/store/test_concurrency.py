"""What processes do at the same time, or again as after a lost answer: appends, requests, draws, leases."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest
from making import group, sample

from agro.errors import Refused
from agro.store import At, DrawRule, Origin, Selection, Store, shared
from agro.store.location import opened
from agro.store.sample_rows import ledger_of
from agro.store.shared import Leases, leased
from agro.types import Sample

fork = multiprocessing.get_context("fork")
AT = At("r", 2, seed=0, version=1)


def append_in_turn(path: Path, responses: str, start, out) -> None:
    """Append a response for each letter, with the origins of its place."""
    start.wait(30)
    with Store.open(path) as store:
        origins = [Origin("run:r", i, "0") for i in range(len(responses))]
        out.put(store.append([sample("p", r) for r in responses], run="r", origins=origins))


@pytest.mark.test
def test_two_processes_that_append_the_same_origins_get_the_same_ids(tmp_path: Path) -> None:
    path, start, out = tmp_path / "s.db", fork.Event(), fork.Queue()
    Store.open(path).close()
    processes = [fork.Process(target=append_in_turn, args=(path, r, start, out)) for r in ("abc", "xyz")]
    for process in processes:
        process.start()
    start.set()
    ids = [out.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert ids == [[1, 2, 3], [1, 2, 3]]
    with Store.open(path) as store:  # the first one's, complete
        assert "".join(s.response for s in store.samples()) in ("abc", "xyz")


def test_an_append_adds_only_the_origins_that_are_new(store: Store) -> None:
    a, b, c = (Origin("f", i, "0") for i in range(3))
    assert store.append([sample("p", "b")], origins=[b]) == [1]
    repeated = [sample("p", r) for r in ("a", "other", "c", "again")]
    assert store.append(repeated, origins=[a, b, c, a]) == [2, 1, 3, 2]
    assert [s.response for s in store.samples()] == ["b", "a", "c"]
    assert not store.tables.damage()


def test_a_repeated_claim_returns_what_the_collector_has_not_finished(store: Store) -> None:
    assert store.requests.claim("r", "a", maximum=3, ahead=9) == [0, 1, 2]
    assert store.requests.claim("r", "b", maximum=2, ahead=9) == [3, 4]
    assert store.requests.claim("r", "a", maximum=3, ahead=9) == [0, 1, 2]
    store.requests.finish("r", [0, 2])
    assert store.requests.claim("r", "a", maximum=3, ahead=6) == [1, 5]
    store.requests.finish("r", [1, 5])
    assert store.requests.claim("r", "a", maximum=3, ahead=9, dead=["b"]) == [3, 4, 6]


def test_collectors_that_claim_at_the_same_time_are_not_further_ahead_together(store: Store) -> None:
    """With a limit that each computed for itself, samples of a whole step were too stale to be trained on."""
    assert store.requests.claim("r", "a", maximum=4, ahead=6) == [0, 1, 2, 3]
    assert store.requests.claim("r", "b", maximum=4, ahead=6) == [4, 5]
    store.requests.finish("r", [0, 1, 2, 3])
    store.requests.take("r", 1, [0, 1])
    assert store.requests.ready("r", 9) == [2, 3]
    assert store.requests.claim("r", "a", maximum=4, ahead=6) == []  # step 1 is being trained on
    assert store.requests.claim("r", "a", maximum=4, ahead=6, trained=1) == [6, 7]
    assert store.requests.collectors("r") == ["a", "b"]
    store.ledger.rewind("r")
    assert store.requests.ready("r", 9) == [0, 1, 2, 3]


def test_a_repeated_draw_returns_the_recorded_one(store: Store) -> None:
    for name in "abcd":
        store.append(group(name, [0.0, 1.0]))
    ids = store.append([sample("e", "fresh")], run="r", step=2)
    rule = DrawRule(2)
    drawn = store.draw(rule, AT, made=ids)
    assert len(drawn.samples) == 5
    store.append(group("a", [0.5]) + group("b", [0.5]) + group("c", [0.5]))
    assert store.draw(rule, AT, made=ids) == drawn
    assert [d.sample for d in store.draws.drawn("r")] == [s.id for s in drawn.samples]
    later = store.draw(rule, AT._replace(step=3))  # the groups of step 2 count as used once
    assert not {s.prompt_id for s in later.samples} & {s.prompt_id for s in drawn.samples}


def test_another_draw_at_a_recorded_step_is_refused(store: Store) -> None:
    store.append(group("a", [0.0, 1.0]) + group("b", [0.0, 1.0]))
    a, b = (sample(name).prompt_id for name in "ab")
    drawn = store.draws.draw_picked([Selection(DrawRule(1), [a])], AT)
    with pytest.raises(Refused, match=r"run r has drawn other samples at step 2.*sample 1"):
        store.draws.draw_picked([Selection(DrawRule(1), [b])], AT)
    with pytest.raises(Refused, match="run r has drawn other samples at step 2"):
        store.draws.draw_picked([Selection(DrawRule(1), [a])], AT, [3])
    assert store.draws.draw_picked([Selection(DrawRule(1), [a])], AT) == drawn
    store.ledger.rewind("r")
    assert [s.prompt_id for s in store.draws.draw_picked([Selection(DrawRule(1), [b])], AT).samples] == [b, b]


def test_requests_that_are_sampled_again(store: Store, path: Path) -> None:
    """Their responses are redone, and others take their places; requests of other numbers stay."""
    origins = [Origin(ledger_of("run"), number, part) for number in (0, 1) for part in ("0", "1")]

    def sampled(version: int) -> list[Sample]:
        return [
            Sample(f"{o.record}", f"{o.part}, {version}", source="policy", version=version) for o in origins
        ]

    assert store.requests.claim("run", "a", maximum=2, ahead=9) == [0, 1]
    first = store.append(sampled(1), run="run", origins=origins)
    store.requests.finish("run", [0, 1])
    store.requests.reopen("run", [1])
    assert store.requests.ready("run", 9) == [0]
    assert store.requests.backlog("run", 0) == 2
    assert store.experience.find_in_ledger(ledger_of("run"), [0, 1]) == first[:2]
    assert [s.response for s in store.samples()] == ["0, 1", "1, 1"]
    assert store.requests.claim("run", "b", maximum=9, ahead=0) == []
    assert store.requests.claim("run", "a", maximum=9, ahead=0) == [1]  # who claimed it samples it again
    second = store.append(sampled(2), run="run", origins=origins)
    assert second[:2] == first[:2]
    assert not set(second[2:]) & set(first)
    assert [s.response for s in store.samples(ids=second)] == ["0, 1", "1, 1", "0, 2", "1, 2"]
    assert not store.tables.damage()


def test_a_lease_runs_out_unless_it_is_renewed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    with opened(path, read_only=False, create=True, timeout=5.0) as database:
        monkeypatch.setattr(database, "now", lambda: now)
        leases = Leases(database)
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


def test_a_clock_that_is_set_back_ends_the_leases_of_before(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    with opened(path, read_only=False, create=True, timeout=5.0) as database:
        monkeypatch.setattr(database, "now", lambda: now)
        leases = Leases(database)
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
