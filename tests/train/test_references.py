"""References of a run: another model, a moving average, a copy renewed now and then; adapters in a run; and
the cache of their log-probs, with which a run can be killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rounding import rounding
from safetensors.torch import load_file
from tiny_runs import (
    RESPONSE_ROUNDING,
    before_step,
    done,
    fill_store,
    interrupted,
    metrics,
    run_tiny,
    tiny,
    weights,
)

from agro.api.reporting_trainer import Trainer
from agro.config import LoRA, NewModel, PolicyConfig, RunConfig
from agro.errors import Interrupted, Refused
from agro.models.policy import Policy
from agro.models.pretrained import new_model
from agro.store import Store
from agro.train.collate import ReferenceCache, collate
from agro.train.feed import Feed, Valid
from agro.train.learner import Local
from agro.train.monitors import Monitor, View
from agro.types import Batch, Sample


class Weights(Monitor):
    """The weights of policy and reference after each step."""

    def __init__(self) -> None:
        self.policy: list[dict[str, torch.Tensor]] = []
        self.reference: list[dict[str, torch.Tensor]] = []

    def after(self, view: View) -> None:
        if view.step:
            for kept, now in ((self.policy, self.learner.policy), (self.reference, self.learner.reference)):
                kept.append({n: w.detach().clone() for n, w in now.weights().items()})

    def meet(self, feed: Feed, valid: Valid) -> None:
        self.learner = feed.learner


def train(config: RunConfig, folder: Path) -> tuple[Path, Weights]:
    """A run, which ends with the same weights where it ends by Ctrl-C and is resumed."""
    out, seen = folder / "run", Weights()
    with before_step(seen.meet):
        Trainer(config, out, monitors=[seen]).run()
    interrupted(config, folder / "resumed", 3)
    assert weights(Trainer(config, folder / "resumed", resume=True).run()) == weights(out)
    return out, seen


def test_a_moving_average(tmp_path: Path) -> None:
    """In steps of several passes."""
    config = tiny(tmp_path, policy__reference="ema", policy__reference_decay=0.9, train__micro_batch=4)
    out, seen = train(config, tmp_path)
    name = next(iter(seen.policy[0]))
    for i in range(1, 6):
        expected = 0.9 * seen.reference[i - 1][name] + 0.1 * seen.policy[i][name]
        torch.testing.assert_close(seen.reference[i][name], expected)
    stored = load_file(out / "checkpoints/step-00000006/reference.safetensors")
    assert torch.equal(stored[name], seen.reference[-1][name])


def test_a_copy_renewed_every_few_steps(tmp_path: Path) -> None:
    config = tiny(tmp_path, policy__reference="periodic", policy__reference_every=2)
    out, seen = train(config, tmp_path)
    for i in range(1, 6):  # steps 2 to 6
        source = seen.policy[i] if (i + 1) % 2 == 0 else seen.policy[i - 1]
        assert all(torch.equal(seen.reference[i][n], source[n]) for n in source)
    rows = metrics(out)
    assert rows[2]["kl_ref"] == pytest.approx(0.0, abs=RESPONSE_ROUNDING)  # renewed a moment ago
    assert rows[3]["kl_ref"] != pytest.approx(0.0, abs=RESPONSE_ROUNDING)


def base(folder: Path, seed: int = 0) -> str:
    config = tiny(folder).policy
    Policy.load(config, seed=seed).save(folder / f"base{seed}")
    return str(folder / f"base{seed}")


def of_model(folder: Path, **policy) -> RunConfig:
    values = tiny(folder).model_dump()
    return RunConfig.of({**values, "policy": {"model": base(folder), **policy}})


@pytest.mark.parametrize("by_phase", [False, True])
def test_another_model(tmp_path: Path, by_phase: bool) -> None:
    """At the first step they differ already. All phases may name it, in place of the run."""
    model = {"reference": "model", "reference_model": base(tmp_path, 1)}
    config = of_model(tmp_path, **({} if by_phase else model))
    if by_phase:
        config = RunConfig.of(config.model_dump() | {"phases": [{"name": "a", "policy": model}]})
    assert abs(metrics(Trainer(config, tmp_path / "run").run())[0]["kl_ref"]) > 1e-3


def test_a_reference_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    new_model(tmp_path / "other", NewModel(alphabet="xyz", hidden=16, layers=1, heads=2, context=16), 0)
    config = of_model(tmp_path, reference="model", reference_model=str(tmp_path / "other"))
    with pytest.raises(Refused, match=r"policy\.reference_model: .*expected the tokenizer of policy\.model"):
        Trainer(config, tmp_path / "run").run()


def test_an_adapter_trains_and_resumes(tmp_path: Path) -> None:
    config = of_model(tmp_path, lora={"rank": 2})
    out, _ = train(config, tmp_path)
    checkpoint = load_file(out / "checkpoints/step-00000006/model.safetensors")
    assert all("lora_" in name for name in checkpoint)
    assert metrics(out)[0]["kl_ref"] == pytest.approx(0.0, abs=RESPONSE_ROUNDING)
    assert metrics(out)[-1]["grad_norm"] > 0
    plain, merged = (Policy.load(PolicyConfig(model=m)) for m in (config.policy.model, str(out / "model")))
    alone = Policy.load(PolicyConfig(model=config.policy.model, lora=LoRA(start=str(out / "adapter"))))
    tokens, lengths = torch.tensor([[1, 5, 6, 7]]), torch.tensor([4])
    mask = torch.arange(4)[None] > 0
    logp = [p.streams(tokens, lengths, mask)["logp"][mask].detach() for p in (plain, merged, alone)]
    torch.testing.assert_close(logp[1], logp[2], **rounding(logp[2]))
    assert not torch.allclose(logp[0], logp[1], atol=1e-3)


def run_cached(tmp_path: Path, name: str, log: str = "log.db", resume: bool = False, **changes) -> Path:
    if not (tmp_path / log).exists():
        fill_store(tmp_path / log, groups=6)
    common = {
        "data__store": str(tmp_path / log),
        "data__replay": 0.5,
        "policy__cache_reference": True,
        "train__steps": 8,
        "evaluate__kl_samples": 0,
    }
    return run_tiny(tmp_path, name, resume=resume, **common | changes)


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


def test_each_sample_is_computed_once_and_the_values_are_those_without_a_cache(tmp_path, computed) -> None:
    out = run_cached(tmp_path, "run")
    drawn = sum(m["groups"] * 0.5 * 4 + m["groups"] * 0.5 * 3 for m in metrics(out))
    with Store.open(tmp_path / "log.db", read_only=True) as store:
        [(kept, samples)] = store.tables.run("SELECT count(*), count(DISTINCT sample) FROM reference_logp")
    assert sum(computed) == kept == samples < drawn
    plain = run_cached(tmp_path, "plain", "other.db", policy__cache_reference=False)
    losses, expected = ([m["loss"] for m in metrics(run)] for run in (out, plain))
    np.testing.assert_allclose(losses, expected, **rounding(expected))


def test_another_run_finds_what_was_there_when_it_began(tmp_path: Path, computed) -> None:
    """And the values of another temperature, or one that is damaged, are computed again."""
    alone = {"data__replay": 1.0, "data__prompts": None, "reward": {"name": "exact"}}
    run_cached(tmp_path, "one", **alone)
    computed.clear()
    cached = run_cached(tmp_path, "two", **alone)
    assert computed == []
    run_cached(tmp_path, "three", policy__temperature=2.0, **alone)
    assert sum(computed) > 0
    with Store.open(tmp_path / "log.db") as store:
        store.tables.run("UPDATE reference_logp SET logp = zeroblob(length(logp)) WHERE rowid = 3")
    computed.clear()
    last = run_cached(tmp_path, "four", **alone)
    assert sum(computed) == 1
    losses, expected = ([m["loss"] for m in metrics(run)] for run in (last, cached))
    np.testing.assert_allclose(losses, expected, **rounding(expected))


def test_a_killed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    def stop(feed, valid) -> None:
        if done(tmp_path / "killed") == 4:
            raise KeyboardInterrupt  # as a second Ctrl-C: nothing is saved

    plain = run_cached(tmp_path, "plain")
    with before_step(stop), pytest.raises((Interrupted, KeyboardInterrupt)):
        run_cached(tmp_path, "killed", "second.db")
    assert weights(run_cached(tmp_path, "killed", "second.db", resume=True)) == weights(plain)
