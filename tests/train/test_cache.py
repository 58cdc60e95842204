"""The cache of reference log-probs: what is computed once, and that a run with it can be killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rounding import rounding
from tiny_runs import before_step, done, fill_store, metrics, tiny, weights

from agro.api.reporting_trainer import Trainer
from agro.errors import Interrupted
from agro.store import Store
from agro.train.collate import ReferenceCache, collate
from agro.train.learner import Local
from agro.types import Batch, Sample


def config(tmp_path: Path, name: str = "log.db", **changes):
    if not (tmp_path / name).exists():
        fill_store(tmp_path / name, groups=6)
    common = {
        "data__store": str(tmp_path / name),
        "data__replay": 0.5,
        "policy__cache_reference": True,
        "train__steps": 8,
        "evaluate__kl_samples": 0,
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


class Reference:
    """A learner whose reference gives the token i a log-prob of −i/8."""

    def __init__(self, key: str | None = "weights") -> None:
        self.reference_key = key
        self.asked: list[str] = []

    def logp(self, batch: Batch, of: str) -> torch.Tensor:
        assert of == "reference"
        self.asked += batch.ids
        assert batch.tokens is not None
        return torch.where(batch.mask, -batch.tokens / 8, 0.0).double()


def test_what_is_missing_is_computed_and_stored(tmp_path: Path) -> None:
    """By sample, reference and run: rows of two lengths, of which a later draw has one more."""
    with Store.open(tmp_path / "s.db") as store:
        bare = [
            Sample("p", text, 1.0, tokens=tokens, action=[i > 1 for i in range(len(tokens))], tokenizer="t")
            for text, tokens in (("a", [1, 2, 3]), ("b", [1, 2, 4, 5]), ("c", [1, 2, 7, 6]))
        ]
        samples = [s.replace(id=i) for s, i in zip(bare, store.append(bare), strict=True)]
        names = collate(samples, 0).ids

        def asked(run: str, chosen: list[int], key: str = "weights", until: int = 0) -> list[str]:
            learner = Reference(key)
            drawn = [samples[i] for i in chosen]
            filled = ReferenceCache(store, run, learner, until).fill(collate(drawn, 0), drawn, 1)
            assert filled.tokens is not None
            assert filled.ref_logp is not None
            assert filled.ref_logp.dtype == torch.float64
            assert torch.equal(filled.ref_logp, torch.where(filled.mask, -filled.tokens / 8, 0.0).double())
            return learner.asked

        assert asked("one", [1, 0]) == [names[1], names[0]]
        assert asked("one", [0, 2, 1]) == [names[2]]
        assert asked("one", [2, 0, 1]) == []
        assert asked("one", [0], key="other weights") == [names[0]]
        assert asked("two", [0]) == [names[0]]  # another run's entries are of after it began
        assert asked("three", [0, 1, 2], until=store.ledger.last_reference_logp()) == []
        shorter = samples[1].replace(learn=[False, False, False, True])
        samples[1] = shorter  # fewer tokens to learn from: the entry isn't of this mask
        assert asked("one", [0, 1]) == [names[1]]


def test_each_sample_is_computed_once_and_the_values_are_those_without_a_cache(
    tmp_path: Path, computed
) -> None:
    out = Trainer(config(tmp_path), tmp_path / "run").run()
    drawn = sum(m["groups"] * 0.5 * 4 + m["groups"] * 0.5 * 3 for m in metrics(out))
    with Store.open(tmp_path / "log.db", read_only=True) as store:
        [(kept, samples)] = store._database.run("SELECT count(*), count(DISTINCT sample) FROM reference_logp")
    assert sum(computed) == kept == samples < drawn
    plain = Trainer(config(tmp_path, "other.db", policy__cache_reference=False), tmp_path / "plain").run()
    losses, expected = ([m["loss"] for m in metrics(run)] for run in (out, plain))
    np.testing.assert_allclose(losses, expected, **rounding(expected))


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
        store._database.run("UPDATE reference_logp SET logp = zeroblob(length(logp)) WHERE rowid = 3")
    computed.clear()
    Trainer(alone, tmp_path / "two").run()
    assert sum(computed) == 1
    assert torch.isfinite(torch.tensor([m["loss"] for m in metrics(tmp_path / "two")])).all()
