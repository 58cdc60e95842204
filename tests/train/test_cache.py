"""The cache of reference log-probs: what is computed once, and that a run with it can be killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_runs import before_step, done, fill_store, metrics, tiny, weights

from agro.errors import Interrupted
from agro.store import Store
from agro.train.learner import Local
from agro.train.trainer import Trainer


def config(tmp_path: Path, name: str = "log.db", **changes):
    if not (tmp_path / name).exists():
        fill_store(tmp_path / name, groups=6)
    common = {
        "data__store": str(tmp_path / name),
        "data__replay": 0.5,
        "policy__cache_reference": True,
        "train__steps": 8,
    }
    return tiny(tmp_path, **common | changes)


@pytest.fixture
def computed(monkeypatch) -> list[int]:
    """Rows whose reference log-probs were computed, step by step."""
    rows: list[int] = []
    plain = Local.logp

    def counted(self, batch, of="policy"):
        if of == "reference":
            rows.append(len(batch.mask))
        return plain(self, batch, of)

    monkeypatch.setattr(Local, "logp", counted)
    return rows


def test_each_sample_is_computed_once_and_the_values_are_those_without_a_cache(
    tmp_path: Path, computed
) -> None:
    out = Trainer(config(tmp_path), tmp_path / "run").run()
    drawn = sum(m["groups"] * 0.5 * 4 + m["groups"] * 0.5 * 3 for m in metrics(out))
    with Store.open(tmp_path / "log.db", read_only=True) as store:
        [(kept, samples)] = store._run("SELECT count(*), count(DISTINCT sample) FROM reference_logp")
    assert sum(computed) == kept == samples < drawn
    plain = Trainer(config(tmp_path, "other.db", policy__cache_reference=False), tmp_path / "plain").run()
    for a, b in zip(metrics(out), metrics(plain), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_another_run_finds_what_was_there_when_it_began(tmp_path: Path, computed) -> None:
    alone = config(tmp_path, data__prompts=None, reward={"name": "exact"})
    alone = alone.model_copy(update={"data": alone.data.model_copy(update={"replay": 1.0})})
    Trainer(alone, tmp_path / "one").run()
    computed.clear()
    Trainer(alone, tmp_path / "two").run()
    assert computed == []
    other = alone.model_copy(update={"policy": alone.policy.model_copy(update={"temperature": 2.0})})
    Trainer(other, tmp_path / "three").run()
    assert sum(computed) > 0


def test_a_killed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    def stop(feed, valid) -> None:
        if done(tmp_path / "killed") == 4:
            raise KeyboardInterrupt  # as a second Ctrl-C: nothing is saved

    plain = Trainer(config(tmp_path), tmp_path / "plain").run()
    again = config(tmp_path, "second.db")
    with before_step(stop), pytest.raises((Interrupted, KeyboardInterrupt)):
        Trainer(again, tmp_path / "killed").run()
    assert weights(Trainer(again, tmp_path / "killed", resume=True).run()) == weights(plain)


def test_a_damaged_entry_is_computed_again(tmp_path: Path, computed) -> None:
    alone = config(tmp_path)
    alone = alone.model_copy(update={"data": alone.data.model_copy(update={"replay": 1.0})})
    Trainer(alone, tmp_path / "one").run()
    with Store.open(tmp_path / "log.db") as store:
        store._run("UPDATE reference_logp SET logp = zeroblob(length(logp)) WHERE rowid = 3")
    computed.clear()
    Trainer(alone, tmp_path / "two").run()
    assert sum(computed) == 1
    assert torch.isfinite(torch.tensor([m["loss"] for m in metrics(tmp_path / "two")])).all()
