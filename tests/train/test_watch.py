"""Who says what hangs: ranks that vanish, in threads, each with a watch and all of them with one store; and
stages that make no progress."""

from __future__ import annotations

import io
import math
import re
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from processes import until

from agro.runs.progress import RunActivity
from agro.train.process_group import Watch

SECONDS = 1.0


class Ended(list[str]):
    """The messages of the processes that would have ended."""

    def wait(self) -> float:
        """Until there is one; returns the seconds that it took."""
        return until(lambda: self, 3 * SECONDS)


def watch(rank: int, store: Any, ended: Ended, ranks: int = 3) -> Watch:
    return Watch(SECONDS, rank, ranks, lambda wait: store, ended.append)


def until_heard(*watches: Watch) -> None:
    """Each has heard of all ranks."""
    until(lambda: all(len(w.beats) == w.ranks for w in watches), 5.0)


def test_a_silent_rank_ends_the_others_with_its_name_and_within_the_time() -> None:
    store, ended = dist.HashStore(), Ended()
    with watch(0, store, ended) as first, watch(2, store, Ended()) as third:
        with watch(1, store, Ended()) as second:
            until_heard(first, second, third)
            time.sleep(2 * SECONDS)  # ranks at work are heard of for as long as they take
            assert not ended
        took = ended.wait()
    assert 0.5 * SECONDS < took <= SECONDS + 0.2, took  # 0.2: two threads of a busy machine
    assert ended[0].startswith("rank 1 on ")
    assert "--resume" in ended[0]


def test_a_rank_that_has_not_started_is_waited_for() -> None:
    ended = Ended()
    with watch(0, dist.HashStore(), ended) as alone:
        time.sleep(1.5 * SECONDS)
        assert not ended
        assert not alone.beats


def fail(watch: Watch, others: list[Watch], message: str, gone: Watch | None = None) -> float:
    """Seconds from an error of a collective, once all beat, to the end of the watch's context."""
    began = 0.0
    try:
        with watch, watch.naming():
            until_heard(watch, *others)
            if gone is not None:
                gone.left.set()
            began = time.monotonic()
            raise RuntimeError(message)
    except RuntimeError as error:
        assert str(error) == message  # noqa: PT017  its own, and after how long
    return time.monotonic() - began


def test_a_collective_that_fails_names_the_rank_that_stops_beating() -> None:
    """Sooner than a silence: three beats, of twenty in train.rank_seconds."""
    store, ended = dist.HashStore(), Ended()
    with watch(1, store, Ended(), ranks=2) as other:
        took = fail(watch(0, store, ended, ranks=2), [other], "Connection closed by peer", gone=other)
    assert took < 0.6 * SECONDS
    assert ended[0].startswith("rank 1 on ")


def test_an_error_of_its_own_names_nobody() -> None:
    store, ended = dist.HashStore(), Ended()
    with watch(1, store, Ended(), ranks=2) as other:
        fail(watch(0, store, ended, ranks=2), [other], "mine")
    assert not ended


class OutOfReach:
    """A store that answers until the cable is out."""

    def __init__(self) -> None:
        self.store, self.reaches = dist.HashStore(), True

    def __getattr__(self, name: str) -> Any:
        if not self.reaches:
            raise RuntimeError("no route to host")
        return getattr(self.store, name)


def test_a_store_out_of_reach_ends_the_rank() -> None:
    store, ended = OutOfReach(), Ended()
    with watch(1, store, Ended(), ranks=2) as other, watch(0, store, ended, ranks=2) as mine:
        until_heard(mine, other)
        store.reaches = False
        took = ended.wait()
    assert took <= SECONDS + 0.2
    assert ended[0].startswith("the store of the ranks, on the host of rank 0, hasn't answered")


def test_the_store_is_asked_with_a_limit_on_its_answers() -> None:
    waits: list[timedelta] = []
    store = dist.HashStore()

    def connect(wait: timedelta) -> Any:
        waits.append(wait)
        return store

    with Watch(7.0, 0, 1, connect, Ended().append) as mine:
        until_heard(mine)
    assert waits == [timedelta(seconds=7)]


def test_a_rank_whose_launcher_died_ends_before_another_launcher_starts_the_run_again() -> None:
    """It has another parent then; others may be alive and answer."""
    ended = Ended()
    with watch(0, dist.HashStore(), ended) as orphan:
        time.sleep(0.2)
        assert not ended
        orphan.launcher += 1
        assert ended.wait() < SECONDS
    assert ended[0].startswith("the launcher of rank 0")
    assert "--resume" in ended[0]


LIMIT = 0.4  # seconds: on a busy machine the sleeps of 0.02 take longer


def watched(seconds: float) -> tuple[RunActivity, io.StringIO]:
    said = io.StringIO()
    return RunActivity(seconds=seconds, stream=said), said


def test_it_names_the_stage_and_its_progress_when_it_hangs() -> None:
    activity, said = watched(LIMIT)
    with activity:
        began = time.monotonic()
        activity.stage("sampling", 37, 64)
        time.sleep(3.5 * LIMIT)  # hangs: said after 1 and 2 limits, next after 4
        hung = said.getvalue().splitlines()
        doublings = math.log2((time.monotonic() - began) / LIMIT)
        for _ in range(5):
            activity.stage("scoring")
            time.sleep(0.02)
            activity.check()  # is progress too
            time.sleep(0.02)
    assert 1 <= len(hung) <= 1 + doublings
    assert all(re.match(r"sampling 37/64 has made no progress for \d+ s", line) for line in hung)
    assert said.getvalue().splitlines() == hung


def test_none() -> None:
    activity, said = watched(0)
    with activity:
        activity.stage("sampling")
        time.sleep(0.05)
    assert said.getvalue() == ""
