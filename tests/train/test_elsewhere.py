"""Sampling in other processes: one store, a trainer and collectors, any of which may be killed."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import forked
import pytest
from tiny_runs import RESPONSE_ROUNDING, metrics, tiny, write_prompts, write_toml

from agro.api.reporting_trainer import Trainer
from agro.errors import Refused
from agro.place.collector import Collector
from agro.rollout.collect import Activity
from agro.store import Store
from agro.store.shared import LocalFolder
from agro.train.phases import Phase
from agro.train.publications import Publications, PublishedWeights
from agro.train.source import CollectorSource, ahead

GROUPS, N = 4, 3  # of the tiny run


def start(*arguments: str, cwd: Path) -> forked.Process:
    log = cwd / f"{arguments[0]}-{time.monotonic_ns()}.log"
    return forked.Process([sys.executable, "-m", "agro", *arguments], cwd=cwd, stdout=log, stderr=log)


def write_run(folder: Path, steps: int = 8, **changes: object) -> list[str]:
    settings = {
        "source__kind": "elsewhere",
        "source__wait_seconds": 120.0,
        "data__max_age": 2,
        "train__steps": steps,
        "train__checkpoint_every": 2,
        "data__eval_prompts": write_prompts(folder / "held.jsonl", range(60, 80)),
    }
    config = tiny(folder, **{**settings, **changes})
    return ["train", str(write_toml(folder / "config.json", config)), "--out", "run"]


def wait_for_step(run: Path, step: int, seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        file = run / "metrics.jsonl"
        if file.exists() and file.read_text().count("\n") > step:
            return
        time.sleep(0.05)
    raise AssertionError(
        f"step {step} wasn't reached: {[p.read_text()[-500:] for p in run.parent.glob('*.log')]}"
    )


def check(run: Path, steps: int, file: Path | str | None = None) -> None:
    """Each step trained on complete groups of its own; no response was made, or trained on, twice."""
    rows = metrics(run)
    assert [m["step"] for m in rows] == list(range(steps + 1))
    assert all(m["groups"] == GROUPS and m["replay_share"] == 0 for m in rows[1:])
    assert all(0 <= m["staleness_max"] <= 2 for m in rows[1:])
    assert all(m["kl_ref"] is not None and m["logp_diff_mean"] is not None for m in rows[1:])
    assert rows[1]["kl_ref"] == pytest.approx(0, abs=RESPONSE_ROUNDING)
    assert any(m["regret"] for m in rows[1:])
    with Store.open(file or run / "store.db", read_only=True) as store:
        assert not store.tables.damage()
        run_id = next(iter(store.samples())).source and _run_id(run)
        drawn = [draw.sample for draw in store.draws.drawn(run_id)]
        numbers = [(s.meta["index"], s.prompt_id) for s in store.samples()]
    assert len(drawn) == len(set(drawn)) == steps * GROUPS * N
    assert len(numbers) == len(set(numbers))


def _run_id(run: Path) -> str:
    import json

    return str(json.loads((run / "config.json").read_text())["run"])


def test_two_collectors_and_a_trainer(tmp_path: Path) -> None:
    trainer = start(*write_run(tmp_path), cwd=tmp_path)
    while not (tmp_path / "run" / "config.json").exists():
        assert trainer.poll() is None
        time.sleep(0.05)
    collectors = [start("collect", "run", cwd=tmp_path) for _ in range(2)]
    assert trainer.wait(240) == 0, [p.read_text()[-800:] for p in tmp_path.glob("*.log")]
    assert [c.wait(60) for c in collectors] == [0, 0]
    check(tmp_path / "run", 8)
    with Store.open(tmp_path / "run" / "store.db") as store:  # who ended well gave its lease back
        assert store._database.run("SELECT name FROM leases") == []


@pytest.mark.test
def test_weights_that_a_crash_of_the_server_lost_are_published_again(
    tmp_path: Path, postgres_url: str
) -> None:
    """The trainer waits for samples of a collector, which waits for weights."""
    trainer = start(*write_run(tmp_path, steps=2, data__store=postgres_url), cwd=tmp_path)
    with Store.open(postgres_url) as store:
        pieces = "SELECT count(*) FROM pieces"
        deadline = time.monotonic() + 120.0
        while store._database.run(pieces) == [(0,)] or not (tmp_path / "run/config.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        publications = Publications.of(postgres_url, _run_id(tmp_path / "run"), tmp_path)
        while (newest := publications.newest()) is None:
            time.sleep(0.1)
        store._database.run("TRUNCATE pieces")  # as a crash does
        assert not publications.has(newest)
        collector = start("collect", postgres_url, "--name", "a", cwd=tmp_path)
        assert (trainer.wait(120), collector.wait(60)) == (0, 0)
        check(tmp_path / "run", 2, postgres_url)


@pytest.mark.nightly
def test_either_side_is_killed_and_started_again(tmp_path: Path) -> None:
    arguments = write_run(tmp_path, steps=12)
    run = tmp_path / "run"
    trainer = start(*arguments, cwd=tmp_path)
    while not (run / "config.json").exists():
        time.sleep(0.05)
    collector = start("collect", "run", cwd=tmp_path)
    wait_for_step(run, 3)
    collector.send_signal(signal.SIGKILL)
    collector.wait()
    collector = start("collect", "run", cwd=tmp_path)
    wait_for_step(run, 7)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer = start(*arguments, "--resume", cwd=tmp_path)
    assert trainer.wait(240) == 0, [p.read_text()[-800:] for p in tmp_path.glob("*.log")]
    assert collector.wait(60) == 0
    check(run, 12)


def test_slow_prompts_let_no_collector_wait(tmp_path: Path) -> None:
    """It waits where a step's prompts are done. With data.max_age all count: what comes late is dropped."""
    made = Collector.__new__(Collector)
    with Store.open(tmp_path / "store.db") as store:

        def claim(name: str, max_age: int | None) -> list[int]:
            made.id, made.name = f"run {max_age}", name
            store.leases.renew(name, 60.0)
            source = {"source__kind": "elsewhere", "sampler__batch": 2 * N, "data__max_age": max_age}
            return made._claim(store, tiny(tmp_path, **source), 0)

        for max_age, more in ((None, [8, 9]), (1, [])):
            assert [number for name in "abcd" for number in claim(name, max_age)] == list(
                range(8)
            )  # two steps
            assert claim("e", max_age) == more
            store.requests.finish(made.id, range(GROUPS))
            assert claim("f", max_age) == []


def test_waiting_has_a_limit_that_names_what_is_waited_for(tmp_path: Path) -> None:
    config = tiny(tmp_path, source__kind="elsewhere", source__wait_seconds=0.3)
    with pytest.raises(Refused, match=r"source\.wait_seconds.*4 prompts.*agro collect"):
        Trainer(config, tmp_path / "run").run()


def test_a_collector_refuses_what_is_not_such_a_run(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"config\.json"):
        Collector.of(str(tmp_path), None, print)  # type: ignore[arg-type]
    run = Trainer(tiny(tmp_path, train__steps=1), tmp_path / "run").run()
    with pytest.raises(Refused, match=r"source\.kind"):
        Collector.of(str(run), None, print)  # type: ignore[arg-type]


def test_claims_of_the_dead_come_first_and_no_more_than_training_allows(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store.db") as store:

        def claim(collector: str, dead: str = "", trained: int = 0) -> list[int]:
            return store.requests.claim("run", collector, maximum=3, ahead=4, trained=trained, dead=[dead])

        assert claim("a") == [0, 1, 2]
        assert claim("b") == [3]
        assert claim("b") == [3]  # again
        assert store.requests.collectors("run") == ["a", "b"]
        assert claim("c", dead="a") == [0, 1, 2]
        store.requests.finish("run", [1, 3])
        assert store.requests.ready("run", 9) == [1, 3]
        store.requests.take("run", 1, [1])
        assert store.requests.ready("run", 9) == [3]
        assert claim("c") == [0, 2]  # its own alone: step 1 is being trained on
        assert claim("c", trained=1) == [0, 2, 4]
        store.ledger.rewind("run")
        assert store.requests.ready("run", 9) == [1, 3]


def test_how_far_collectors_may_be_ahead(tmp_path: Path) -> None:
    assert ahead(tiny(tmp_path)) == 2 * GROUPS
    assert ahead(tiny(tmp_path, data__max_age=0)) == GROUPS
    assert ahead(tiny(tmp_path, data__max_age=6, train__updates=2)) == 4 * GROUPS


def test_collectors_of_a_resumed_run_know_how_far_it_is(tmp_path: Path) -> None:
    """They aren't ahead of what it has trained on; else, with max_age = 0, both sides would wait for ever."""

    class Learner:
        version = 9

        def publish(self, folder: Path) -> None:
            folder.mkdir(parents=True)

    publications = Publications(LocalFolder(tmp_path))
    phase = Phase.all(tiny(tmp_path))[0]
    with Store.open(tmp_path / "store.db") as store:
        source = CollectorSource(phase, store, "run", publications, Activity(), step=6)
        source.publish(Learner())  # type: ignore[arg-type]
    assert publications.newest() == PublishedWeights(9, "train", step=6)


def test_replay_leaves_alone_what_waits_to_be_fresh(tmp_path: Path) -> None:
    """Half of each step from the store, and yet no step loses a group to a later one."""
    arguments = write_run(tmp_path, steps=8, data__replay=0.5)
    trainer = start(*arguments, cwd=tmp_path)
    while not (tmp_path / "run" / "config.json").exists():
        time.sleep(0.05)
    collector = start("collect", "run", cwd=tmp_path)
    assert trainer.wait(240) == 0, [p.read_text()[-800:] for p in tmp_path.glob("*.log")]
    assert collector.wait(60) == 0
    rows = metrics(tmp_path / "run")[1:]
    assert [m["groups"] for m in rows] == [GROUPS] * 8
    assert any(m["replay_share"] == 0.5 for m in rows)  # less where max_age leaves nothing to replay


def test_what_collectors_cannot_do_is_refused(tmp_path: Path) -> None:
    elsewhere = {"source__kind": "elsewhere"}
    phases = [{"name": "a"}, {"name": "b", "sampler": {"n": 4}}]
    with pytest.raises(Refused, match=r"\[sampler\]"):
        Trainer(tiny(tmp_path, **elsewhere, phases=phases))
    with pytest.raises(Refused, match=r"data\.max_age"):
        Trainer(tiny(tmp_path, **elsewhere, objective={"name": "agro_onpolicy", "beta": 0.1}))
