"""Sampling in other processes: one store, a trainer and collectors, any of which may be killed, and what the
trainer publishes; and samplers that keep their weights for some optimizer steps.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import forked
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import (
    RESPONSE_ROUNDING,
    StopAfter,
    logp_rounding,
    metrics,
    run_id,
    run_tiny,
    samples_of,
    tiny,
    weights,
    write_prompts,
    write_toml,
)

from agro.api.reporting_trainer import Trainer
from agro.errors import Refused
from agro.models.published import load_published
from agro.place.collector import Collector
from agro.rollout import Activity
from agro.store import Store
from agro.store.shared import LocalFolder
from agro.train.phases import Phase
from agro.train.publications import Publications, PublishedWeights
from agro.train.source import CollectorSource, ahead
from agro.types import Prompt

GROUPS, N = 4, 3  # of the tiny run


def start(*arguments: str, cwd: Path) -> forked.Process:
    log = cwd / f"{arguments[0]}-{time.monotonic_ns()}.log"
    return forked.Process([sys.executable, "-m", "agro", *arguments], cwd=cwd, stdout=log, stderr=log)


def wait_until(holds: Callable[[], object], folder: Path) -> None:
    deadline = time.monotonic() + 180.0
    while not holds():
        assert time.monotonic() < deadline, [p.read_text()[-500:] for p in folder.glob("*.log")]
        time.sleep(0.05)


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


def check(run: Path, steps: int, file: Path | str | None = None) -> None:
    """Each step trained on complete groups of its own; no response was made, or trained on, twice."""
    rows = metrics(run)
    assert [m["step"] for m in rows] == list(range(steps + 1))
    for m in rows[1:]:
        assert (m["groups"], m["replay_share"]) == (GROUPS, 0)
        assert 0 <= m["staleness_max"] <= 2
        assert None not in (m["kl_ref"], m["logp_diff_mean"])
    assert rows[1]["kl_ref"] == pytest.approx(0, abs=RESPONSE_ROUNDING)
    assert any(m["regret"] for m in rows[1:])
    with Store.open(file or run / "store.db", read_only=True) as store:
        assert not store.tables.damage()
        drawn = [draw.sample for draw in store.draws.drawn(run_id(run))]
        numbers = [(s.meta["index"], s.prompt_id) for s in store.samples()]
    assert len(drawn) == len(set(drawn)) == steps * GROUPS * N
    assert len(numbers) == len(set(numbers))


def begun(folder: Path, *arguments: str) -> forked.Process:
    """The trainer, which has made its run folder."""
    trainer = start(*arguments, cwd=folder)
    wait_until(lambda: (folder / "run/config.json").exists() or trainer.poll() is not None, folder)
    assert trainer.poll() is None, [p.read_text()[-500:] for p in folder.glob("*.log")]
    return trainer


def end_well(folder: Path, trainer: forked.Process, *collectors: forked.Process) -> None:
    assert trainer.wait(240) == 0, [p.read_text()[-800:] for p in folder.glob("*.log")]
    assert [collector.wait(60) for collector in collectors] == [0] * len(collectors)


def test_two_collectors_and_a_trainer(tmp_path: Path) -> None:
    trainer = begun(tmp_path, *write_run(tmp_path))
    end_well(tmp_path, trainer, *(start("collect", "run", cwd=tmp_path) for _ in range(2)))
    check(tmp_path / "run", 8)
    with Store.open(tmp_path / "run" / "store.db") as store:  # who ended well gave its lease back
        assert store.tables.run("SELECT name FROM leases") == []


@pytest.mark.test
def test_weights_that_a_crash_of_the_server_lost_are_published_again(
    tmp_path: Path, postgres_url: str
) -> None:
    """The trainer waits for samples of a collector, which waits for weights."""
    trainer = begun(tmp_path, *write_run(tmp_path, steps=2, data__store=postgres_url))
    publications = Publications.of(postgres_url, run_id(tmp_path / "run"), tmp_path)
    with Store.open(postgres_url) as store:
        wait_until(publications.newest, tmp_path)
        store.tables.run("TRUNCATE pieces")  # as a crash does
        assert not publications.has(publications.newest())
        collector = start("collect", postgres_url, "--name", "a", cwd=tmp_path)
        assert (trainer.wait(120), collector.wait(60)) == (0, 0)
        check(tmp_path / "run", 2, postgres_url)


@pytest.mark.nightly
def test_either_side_is_killed_and_started_again(tmp_path: Path) -> None:
    arguments = write_run(tmp_path, steps=12)
    run = tmp_path / "run"

    def kill(process: forked.Process, after: int) -> None:
        log = run / "metrics.jsonl"  # another process appends: its last line may be half written
        wait_until(lambda: log.exists() and log.read_text().count("\n") > after, tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()

    trainer = begun(tmp_path, *arguments)
    kill(start("collect", "run", cwd=tmp_path), after=3)
    collector = start("collect", "run", cwd=tmp_path)
    kill(trainer, after=7)
    end_well(tmp_path, start(*arguments, "--resume", cwd=tmp_path), collector)
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
            two_steps = [number for name in "abcd" for number in claim(name, max_age)]
            assert two_steps == list(range(8))
            assert claim("e", max_age) == more
            store.requests.finish(made.id, range(GROUPS))
            assert claim("f", max_age) == []


def test_waiting_has_a_limit_that_names_what_is_waited_for(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"source\.wait_seconds.*4 prompts.*agro collect"):
        run_tiny(tmp_path, source__kind="elsewhere", source__wait_seconds=0.3)


def test_a_collector_refuses_what_is_not_such_a_run(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"config\.json"):
        Collector.of(str(tmp_path), None)  # type: ignore[arg-type]
    with pytest.raises(Refused, match=r"source\.kind"):
        Collector.of(str(run_tiny(tmp_path, train__steps=1)), None)  # type: ignore[arg-type]


def test_how_far_collectors_may_be_ahead(tmp_path: Path) -> None:
    assert ahead(tiny(tmp_path)) == 2 * GROUPS
    assert ahead(tiny(tmp_path, data__max_age=0)) == GROUPS
    assert ahead(tiny(tmp_path, data__max_age=6, train__updates=2)) == 4 * GROUPS


@pytest.fixture
def publications(tmp_path: Path) -> Publications:
    return Publications(LocalFolder(tmp_path))


def test_replay_leaves_alone_what_waits_to_be_fresh(tmp_path: Path) -> None:
    """Half of each step from the store, and yet no step loses a group to a later one."""
    trainer = begun(tmp_path, *write_run(tmp_path, steps=8, data__replay=0.5))
    end_well(tmp_path, trainer, start("collect", "run", cwd=tmp_path))
    rows = metrics(tmp_path / "run")[1:]
    assert [m["groups"] for m in rows] == [GROUPS] * 8
    assert any(m["replay_share"] == 0.5 for m in rows)  # less where max_age leaves nothing to replay


PROMPTS = [
    Prompt("line\u2028break \n and \x85", "a", {"answer": 1, "id": "a column", "none": None}),
    Prompt([{"role": "user", "content": "¿?"}], "b\n", {"nested": {"x": [0.1]}}),
    Prompt("", "c"),
]


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"")


def versions(publications: Publications) -> list[str]:
    names = publications.shared.names("weights")
    return [name.removeprefix("weights/v") for name in names if name != "weights/latest.json"]


def test_collectors_get_the_record_and_the_prompts(publications: Publications) -> None:
    assert publications.record() is None
    with pytest.raises(Refused, match=r"expected prompts\.jsonl.*--resume"):
        publications.prompts()
    publications.begin({"run": "r", "train": {"steps": 3}}, PROMPTS)
    assert publications.record() == {"run": "r", "train": {"steps": 3}}
    assert publications.prompts() == PROMPTS
    with pytest.raises(Refused, match="prompt x: expected a value that JSON has"):
        publications.begin({}, [Prompt("x", "x", {"answer": math.nan})])


def test_the_newest_weights_and_the_ones_before_them(publications: Publications) -> None:
    assert publications.newest() is None
    publications.end()  # nothing was published, so that nobody waits for more
    assert publications.newest() is None
    for version in range(5):
        publications.publish(PublishedWeights(version, "train", step=version + 1), write)
    assert publications.newest() == PublishedWeights(4, "train", 5)
    assert versions(publications) == ["00000002", "00000003", "00000004"]  # so many are kept
    with publications.weights(PublishedWeights(3, "train")) as folder:
        assert [file.name for file in folder.iterdir()] == ["model.safetensors"]
    publications.publish(PublishedWeights(4, "again", 6), lambda folder: pytest.fail("they are there"))
    assert publications.newest() == PublishedWeights(4, "again", 6)
    publications.end()
    assert publications.newest() == PublishedWeights(4, "again", 6, ended=True)
    publications.begin({}, PROMPTS)  # it goes on with more steps: collectors that start now have work
    assert publications.newest() == PublishedWeights(4, "again", 6)


def test_weights_that_were_never_announced_are_removed(publications: Publications) -> None:
    """A trainer was killed after it wrote version 3 and before it announced it: another 3 will take its
    place. The weights of a server aren't touched."""
    for version in (1, 2):
        publications.publish(PublishedWeights(version, "train"), write)
    publications.shared.add("weights/v00000003", write)
    publications.shared.add("weights/served", write)
    publications.begin({}, PROMPTS)
    assert versions(publications) == ["weights/served", "00000001", "00000002"]


def staleness(run: Path) -> list[float]:
    return [row["staleness_mean"] for row in metrics(run) if row["step"]]


@pytest.mark.parametrize(
    ("every", "updates", "behind"), [(3, 1, [0, 1, 2, 0, 1, 2]), (6, 3, [0, 3, 0, 3, 0, 3])]
)
def test_the_sampler_is_behind_by_up_to_so_many_optimizer_steps_less_one(
    tmp_path: Path, every: int, updates: int, behind: list[int]
) -> None:
    """With three updates a step, before step s the version is 3 (s − 1)."""
    assert staleness(run_tiny(tmp_path, source__sync_every=every, train__updates=updates)) == behind


def test_samples_have_version_and_log_probs_of_the_weights_that_sampled(tmp_path: Path) -> None:
    config = tiny(tmp_path, source__sync_every=4)
    run = Trainer(config, tmp_path / "run", monitors=[StopAfter(4)]).run()
    start = load_published(config.policy, run / "weights" / "synced" / "v00000000")
    samples = samples_of(run)[-12:]
    assert len(samples) == 12
    for sample in samples:
        assert sample.version == 0
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        mask = torch.tensor(sample.action)[None]
        logp = start.streams(tokens, torch.tensor([tokens.shape[1]]), mask)["logp"][mask].detach().numpy()
        assert logp == pytest.approx(sample.behavior_logp[sample.action], abs=logp_rounding(run))


def test_with_one_it_is_a_run_without_a_lag(tmp_path: Path) -> None:
    one = run_tiny(tmp_path, "one", source__sync_every=1)
    assert weights(one) == weights(run_tiny(tmp_path, "plain"))
    assert not (one / "weights" / "synced").exists()


def test_weights_that_no_checkpoint_continues_with_are_removed(tmp_path: Path) -> None:
    """When the weights of version 6 are synced, the checkpoints are those of versions 2 and 4."""
    run = run_tiny(tmp_path, source__sync_every=2, train__keep=2)
    names = sorted(folder.name for folder in (run / "weights" / "synced").iterdir())
    assert names == ["v00000002", "v00000004", "v00000006"]


def test_beta_matters_to_an_anchor_at_the_behavior_only_with_a_lag(tmp_path: Path) -> None:
    """OAPL is (β log π/μ − (r − V))²: where π = μ, β scales the gradient alone, which Adam undoes."""
    plain_adam = {"train__steps": 8, "train__adam_eps": 1e-30, "train__clip": 1e9}

    def trained(beta: float, every: int) -> torch.Tensor:
        changes = {"objective": {"name": "oapl", "beta": beta}, "source__sync_every": every, **plain_adam}
        run = run_tiny(tmp_path, f"{beta}-{every}", **changes)
        return torch.cat([w.flatten() for w in load_file(run / "model" / "model.safetensors").values()])

    def moved(every: int) -> float:
        return (trained(0.05, every) - trained(0.5, every)).abs().max().item()

    assert moved(8) > 10 * moved(1)


def test_collectors_keep_their_weights_and_know_how_far_a_resumed_run_is(
    tmp_path: Path, publications: Publications
) -> None:
    """The trainer publishes at its versions 0 to 5, of which 0 and 3 are new. Of its step: collectors aren't
    ahead of what it has trained on; else, with max_age = 0, both sides would wait for ever."""
    [phase] = Phase.all(tiny(tmp_path, source__kind="elsewhere", source__sync_every=3))
    published = []
    with Store.open(tmp_path / "store.db") as store:
        source = CollectorSource(phase, store, "run", publications, Activity(), step=6)
        for version in range(6):
            source.publish(SimpleNamespace(version=version, publish=partial(Path.mkdir, parents=True)))
            published.append(publications.newest())
    assert published == [PublishedWeights(version, "train", step=6) for version in (0, 0, 0, 3, 3, 3)]
    assert versions(publications) == ["00000000", "00000003"]
