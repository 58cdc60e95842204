"""Runs over several owners of a store: the same weights as with one file, and an owner that is killed."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

from test_elsewhere import check, start, wait_for_step, write_run
from test_owner import TOKEN, free_port, start_owner
from tiny_runs import fill_store, metrics, tiny, weights

from agro.api.reporting_trainer import Trainer
from agro.store import Store
from agro.store.location import Shards, location_of

MIXED = {"data__replay": 0.5, "data__experts": 1, "data__roles": ["log"], "data__hold_out": 0.2}


def owners(folder: Path, count: int, stack: ExitStack) -> list[str]:
    """The URLs of new owners, each a process."""
    urls = []
    for number in range(count):
        (folder / f"{number}").mkdir(parents=True)
        port = free_port()
        owner = start_owner(folder / f"{number}", port)
        stack.callback(owner.wait, 30)
        stack.callback(owner.terminate)
        urls.append(f"http://127.0.0.1:{port}")
    return urls


def files(folder: Path, count: int) -> Shards:
    """The files of these owners, once they have ended."""
    return Shards(tuple(folder / f"{number}" / "served.db" for number in range(count)))


def test_one_and_three_owners_train_the_same_weights(tmp_path: Path, monkeypatch) -> None:
    """Fresh groups beside groups of a log, some held out; bit by bit, also the metrics but times."""
    monkeypatch.setenv("AGRO_TOKEN", TOKEN)
    runs = []
    for count in (1, 3):
        folder = tmp_path / f"{count}"
        with ExitStack() as stack:
            urls = owners(folder, count, stack)
            store = urls[0] if count == 1 else urls
            fill_store(location_of(store), groups=30)
            Trainer(tiny(folder, data__store=store, **MIXED), folder / "run").run()
        runs.append(folder / "run")
    assert weights(runs[0]) == weights(runs[1])
    for one, three in zip(*map(metrics, runs), strict=True):
        assert all(one[name] == three[name] for name in one if "loss" in name or "reward" in name)
    with Store.open(files(tmp_path / "3", 3), read_only=True) as store:
        assert all(shard.call("experience.last_id") for shard in store.draws._group.shards)
        assert not store.tables.damage()


def test_the_run_goes_on_after_the_owner_of_a_shard_was_killed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("AGRO_TOKEN", TOKEN)
    run = tmp_path / "run"
    with ExitStack() as stack:
        urls = owners(tmp_path, 1, stack)
        port = free_port()
        (tmp_path / "1").mkdir()
        owner = start_owner(tmp_path / "1", port)
        urls.append(f"http://127.0.0.1:{port}")
        trainer = start(*write_run(tmp_path, data__store=urls, source__lease_seconds=2.0), cwd=tmp_path)
        while not (run / "config.json").exists():
            assert trainer.poll() is None
        collector = start("collect", urls[0], cwd=tmp_path)
        wait_for_step(run, 3)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner = start_owner(tmp_path / "1", port)
        stack.callback(owner.wait, 30)
        stack.callback(owner.terminate)
        assert trainer.wait(240) == 0, [p.read_text()[-800:] for p in tmp_path.glob("*.log")]
        assert collector.wait(60) == 0
    check(run, 8, files(tmp_path, 2))
