"""References of a run: another model, a moving average, a copy renewed now and then; adapters in a run; and
the cache of their log-probs, with which a run can be killed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rounding import rounding
from safetensors.torch import load_file
from tiny_runs import RESPONSE_ROUNDING, before_step, done, fill_store, interrupted, metrics, tiny, weights

from agro.api.reporting_trainer import Trainer
from agro.config import LoRA, PolicyConfig, RunConfig
from agro.errors import Interrupted, Refused
from agro.models.policy import Policy
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


def train(config: RunConfig, out: Path, *monitors: Monitor, resume: bool = False) -> Path:
    return Trainer(config, out, monitors=monitors, resume=resume).run()


def resumes(config: RunConfig, whole: Path) -> None:
    """A run that ends by Ctrl-C and is resumed ends as the run `whole`."""
    interrupted(config, whole.with_name("resumed"), 3)
    assert weights(train(config, whole.with_name("resumed"), resume=True)) == weights(whole)


def test_a_moving_average(tmp_path: Path) -> None:
    """In steps of several passes."""
    config = tiny(tmp_path, policy__reference="ema", policy__reference_decay=0.9, train__micro_batch=4)
    seen = Weights()
    with before_step(seen.meet):
        out = train(config, tmp_path / "run", seen)
    name = "lm_head.weight" if "lm_head.weight" in seen.policy[0] else next(iter(seen.policy[0]))
    for i in range(1, 6):
        expected = 0.9 * seen.reference[i - 1][name] + 0.1 * seen.policy[i][name]
        torch.testing.assert_close(seen.reference[i][name], expected)
    stored = load_file(out / "checkpoints/step-00000006/reference.safetensors")
    assert torch.equal(stored[name], seen.reference[-1][name])
    resumes(config, out)


def test_a_copy_renewed_every_few_steps(tmp_path: Path) -> None:
    config = tiny(tmp_path, policy__reference="periodic", policy__reference_every=2)
    seen = Weights()
    with before_step(seen.meet):
        train(config, tmp_path / "run", seen)
    for i in range(1, 6):  # steps 2 to 6
        source = seen.policy[i] if (i + 1) % 2 == 0 else seen.policy[i - 1]
        assert all(torch.equal(seen.reference[i][n], source[n]) for n in source)
    rows = metrics(tmp_path / "run")
    assert rows[2]["kl_ref"] == pytest.approx(0.0, abs=RESPONSE_ROUNDING)  # renewed a moment ago
    assert rows[3]["kl_ref"] != pytest.approx(0.0, abs=RESPONSE_ROUNDING)
    resumes(config, tmp_path / "run")


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
    assert abs(metrics(train(config, tmp_path / "run"))[0]["kl_ref"]) > 1e-3


def test_a_reference_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    from agro.config import NewModel
    from agro.models.pretrained import new_model

    (tmp_path / "other").mkdir()
    new_model(tmp_path / "other", NewModel(alphabet="xyz", hidden=16, layers=1, heads=2, context=16), 0)
    config = of_model(tmp_path, reference="model", reference_model=str(tmp_path / "other"))
    with pytest.raises(Refused, match=r"policy\.reference_model: .*expected the tokenizer of policy\.model"):
        train(config, tmp_path / "run")


def test_an_adapter_trains_and_resumes(tmp_path: Path) -> None:
    config = of_model(tmp_path, lora={"rank": 2})
    out = train(config, tmp_path / "run")
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
    resumes(config, out)


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
        [(kept, samples)] = store.tables.run("SELECT count(*), count(DISTINCT sample) FROM reference_logp")
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
        store.tables.run("UPDATE reference_logp SET logp = zeroblob(length(logp)) WHERE rowid = 3")
    computed.clear()
    Trainer(alone, tmp_path / "two").run()
    assert sum(computed) == 1
    assert torch.isfinite(torch.tensor([m["loss"] for m in metrics(tmp_path / "two")])).all()
