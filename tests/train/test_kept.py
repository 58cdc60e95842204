"""Ratios of truncated samples: with kept sets their mean is 1, without them it is the kept mass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rounding import rounding
from tiny_runs import logp_rounding, metrics, run_tiny, samples_of, tiny
from torch import Tensor
from typer.testing import CliRunner

from agro.cli import app
from agro.config import PolicyConfig, SamplerConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.objectives import differentiate, get
from agro.rollout import Rollout
from agro.rollout.engines.hf import HF
from agro.store import Store
from agro.train.check import check_config
from agro.train.collate import OVER_KEPT, collate, recording
from agro.train.phases import Phase
from agro.train.step import MicroBatch, Passes, backward, streams_of
from agro.types import Batch, Prompt, Sample

SETTINGS: list[dict[str, Any]] = [
    {"top_p": 0.8},
    {"top_k": 3},
    {"min_p": 0.3},
    {"top_k": 6, "top_p": 0.9, "min_p": 0.05},
]
WORDS = {"alphabet": "0123456789>", "hidden": 16, "layers": 2, "heads": 2, "context": 24}
PASSES = Passes(MicroBatch(sequences=4))


def policy(seed: int = 0, temperature: float = 1.0) -> Policy:
    """Random weights, large enough for unequal probabilities."""
    made = Policy.load(PolicyConfig(new=WORDS, temperature=temperature), seed=seed)
    with torch.no_grad():
        for weight in made.weights().values():
            weight.mul_(3)
    return made


def sampled(made: Policy, n: int = 8, **options: Any) -> list[Sample]:
    prompts = [Prompt(f"{i}>") for i in range(4)]
    sampler = SamplerConfig(max_new=8, keep_sets=True, **options)
    samples = Rollout(made.encoder, HF(made)).sample(prompts, n, sampler, seed=1)
    in_order = sorted(samples, key=lambda s: s.meta["index"])
    return [s.replace(id=i, reward=float(i % 3)) for i, s in enumerate(in_order, 1)]


def logits(made: Policy, batch: Batch) -> Tensor:
    """[B,T,V] of all positions at once, at the policy's temperature, for the token at each."""
    assert batch.tokens is not None
    z = made.model(input_ids=batch.tokens).logits.double() / made.temperature
    return torch.cat([torch.zeros_like(z[:, :1]), z[:, :-1]], 1)


def inside(samples: list[Sample], shape: torch.Size) -> Tensor:
    """[B,T,V] whether an id was kept, read from the samples one id at a time."""
    out = torch.ones(shape, dtype=torch.bool)
    for row, s in enumerate(samples):
        ids = iter(s.kept.tolist())
        for t, count in enumerate(s.kept_count.tolist()):
            if count:
                out[row, t] = False
                out[row, t, [next(ids) for _ in range(count)]] = True
    return out


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_fresh_ratios_are_1_over_the_kept_sets_and_the_kept_mass_over_the_vocabulary(
    options: dict[str, Any],
) -> None:
    made = policy()
    samples = sampled(made, **options)
    ratio = {}
    for over_kept in (True, False):
        batch = collate(samples, 0, over_kept=over_kept)
        logp = streams_of(made, batch, ["logp"], PASSES)["logp"]
        ratio[over_kept] = (logp - batch.behavior_logp)[batch.mask].exp()
    with torch.no_grad():
        z = logits(made, batch)
    torch.testing.assert_close(ratio[True], torch.ones_like(ratio[True]), **rounding(z))
    mass = z.softmax(-1).where(inside(samples, z.shape), 0.0).sum(-1)[batch.mask]
    torch.testing.assert_close(ratio[False], mass, **rounding(z))
    assert ratio[False].mean() < 0.97
    if options == {"top_p": 0.8}:
        assert (mass >= 0.8 - rounding(z)["atol"]).all()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_mean_ratio_of_stale_samples_is_1(temperature: float) -> None:
    """Σ μ(a) π(a)/μ(a) over all tokens a that the sampler kept after a prefix, with π of other weights."""
    old = policy()
    first = sampled(old, n=1, top_p=0.8, temperature=1.3)[0]
    kept = first.kept[: first.kept_count[first.action][0]]
    at = int(first.action.argmax())
    size = slice(None, at + 1)
    variants = []
    for token in kept:
        tokens = first.tokens[size].copy()
        tokens[at] = token
        cut = {name: getattr(first, name)[size] for name in ("action", "behavior_logp", "kept_count")}
        variants.append(first.replace(tokens=tokens, kept=kept, **cut))
    with torch.no_grad():
        z = logits(old, collate(variants[:1], 0))[0, at] / 1.3
    mu = z[torch.from_numpy(kept.astype(np.int64))].softmax(0)
    new = policy(seed=1, temperature=temperature)
    total = {}
    for over_kept in (True, False):
        batch = collate(variants, 0, over_kept=over_kept)
        pi = streams_of(new, batch, ["logp"], PASSES)["logp"][:, at].exp()
        total[over_kept] = float((mu * (pi / mu)).sum())
    assert len(kept) > 1
    assert total[True] == pytest.approx(1, abs=rounding(z)["atol"])
    assert total[False] < 0.9
    assert float(first.behavior_logp[at]) == pytest.approx(
        float(mu.log()[kept.tolist().index(first.tokens[at])]), abs=rounding(z)["atol"]
    )


@pytest.mark.parametrize("name", ["grpo", "gspo", "topr"])
@pytest.mark.parametrize("micro", [1, 64])
def test_the_gradient_is_that_of_renormalized_logits(name: str, micro: int) -> None:
    """By hand: log_softmax of all logits, -inf outside of the kept sets, under Σ (d loss/d log π) · log π."""
    made = policy()
    samples = sampled(policy(seed=1), top_p=0.8)
    samples[3] = samples[3].replace(kept=None, kept_count=None)  # a row over the vocabulary
    batch = collate(samples, 0, over_kept=True)
    options = get(name).resolve(name, {})
    step = backward(made, batch, name, options, Passes(MicroBatch(sequences=micro)))
    found = {key: w.grad.clone() for key, w in made.weights().items()}
    made.zero_grad()
    z = logits(made, batch)
    allowed = torch.ones_like(z, dtype=torch.bool)
    rows = [i for i, s in enumerate(samples) if s.kept is not None]
    allowed[rows] = inside([samples[i] for i in rows], z[rows].shape)
    logp = z.masked_fill(~allowed, -torch.inf).log_softmax(-1).gather(2, batch.tokens[..., None])[..., 0]
    logp = torch.where(batch.mask, logp, 0.0)
    torch.testing.assert_close(step.streams["logp"], logp.detach(), **rounding(logp))
    g = differentiate(name, get(name), {"logp": logp.detach()}, batch, options).grads["logp"]
    (g * logp).sum().backward()
    expected = {key: w.grad for key, w in made.weights().items()}
    torch.testing.assert_close(found, expected, **rounding(*expected.values()))


@pytest.mark.parametrize("name", ["grpo", "gspo", "topr"])
def test_a_run_with_ratios_records_kept_sets_and_replays_them(tmp_path: Path, name: str) -> None:
    settings = {"sampler__top_p": 0.7, "objective": {"name": name}, "train__steps": 2}
    run = run_tiny(tmp_path, **settings)
    for row in metrics(run):  # of engine and learner: over the vocabulary it is up to -ln .7
        assert row["logp_diff_max"] < logp_rounding(run)
        assert row["objective"].get("ratio_max", 1.0) == pytest.approx(1, abs=logp_rounding(run))
    samples = samples_of(run)
    assert all(s.kept is not None and (s.kept_count[s.action] > 0).all() for s in samples)
    assert all("keep_sets" not in s.sampling for s in samples)
    log = str(run / "store.db")
    run_tiny(tmp_path, "replay", **settings, data__store=log, data__replay=1.0)
    shown = CliRunner().invoke(app, ["store", "show", log, "--limit", "1"])
    first = samples[0].kept_count[samples[0].kept_count > 0]
    assert f"kept sets of {first.mean():.1f} ids" in shown.stdout


def test_without_ratios_log_probs_are_over_the_vocabulary_and_nothing_is_recorded(tmp_path: Path) -> None:
    """Recording them changes no token, also in other batches."""
    settings = {"sampler__top_p": 0.7, "train__steps": 1}
    run = run_tiny(tmp_path, **settings)
    again = run_tiny(tmp_path, "kept", sampler__keep_sets=True, sampler__batch=5, **settings)
    assert metrics(run)[0]["logp_diff_max"] is None
    assert {(s.kept is None, s.truncation) for s in samples_of(run)} == {(True, "top_p 0.7")}
    assert {(s.kept is None, s.truncation) for s in samples_of(again)} == {(False, "")}
    tokens = [{s.meta["index"]: s.tokens.tolist() for s in samples_of(folder)} for folder in (run, again)]
    assert tokens[0] == tokens[1]
    assert metrics(again)[0]["loss"] == metrics(run)[0]["loss"]


def test_a_server_does_not_report_kept_sets(tmp_path: Path) -> None:
    server = {"kind": "server", "urls": ["http://x"]}
    old = {"name": "grpo", "ratio": "old"}  # both log-probs of this ratio are the trainer's
    phases = check_config(tiny(tmp_path, sampler__top_p=0.8, objective=old, engine=server))
    assert not recording(phases, phases[0]).sampler.records_kept


def test_they_are_recorded_where_a_phase_of_the_run_has_ratios(tmp_path: Path) -> None:
    def records(*objectives: dict[str, Any], **changes: Any) -> list[bool]:
        named = [{"name": f"p{i}", "objective": x} for i, x in enumerate(objectives)]
        phases = Phase.all(tiny(tmp_path, phases=named, **{"sampler__top_p": 0.8, **changes}))
        return [recording(phases, phase).sampler.records_kept for phase in phases]

    agro, sft, grpo = {"name": "agro", "beta": 0.1}, {"name": "sft"}, {"name": "grpo"}
    assert records(agro, sft) == [False, False]
    assert records(agro, grpo) == [True, True]  # the second may draw what the first sampled
    assert records({"name": "grpo", "ratio": "old"}) == [True]
    assert records(grpo, sampler__keep_sets=False) == [False]
    assert records(agro, sampler__keep_sets=True) == [True]
    assert records(grpo, sampler__top_p=1.0) == [False]


def test_reference_log_probs_over_kept_sets_are_cached_by_themselves(tmp_path: Path) -> None:
    """The same samples, with and without: the cache never gives the ones for the others."""
    settings = {"data__store": str(tmp_path / "log.db"), "sampler__top_p": 0.7, "train__steps": 2}

    def losses(name: str, objective: str, replay: float, cache: bool) -> list[float]:
        changes = {"objective": {"name": objective, "beta": 0.1}, "data__replay": replay}
        run = run_tiny(tmp_path, name, **settings, **changes, policy__cache_reference=cache)
        return [row["loss"] for row in metrics(run)]

    losses("one", "grpo", 0.0, cache=True)
    expected = losses("three", "agro", 1.0, cache=False)
    np.testing.assert_allclose(losses("two", "agro", 1.0, cache=True), expected, **rounding(expected))
    with Store.open(tmp_path / "log.db", read_only=True) as store:
        keys = {key for (key,) in store.tables.run("SELECT DISTINCT key FROM reference_logp")}
    assert sorted(key.endswith(OVER_KEPT) for key in keys) == [False, True]


def test_kept_sets_of_another_tokenizer_are_dropped_and_unknown_ids_are_refused() -> None:
    made = policy()
    sample = sampled(made, n=1, top_p=0.8)[0]
    assert made.encode(sample) == sample
    other = made.encode(sample.replace(tokenizer="another", response="123"))
    assert (other.kept, other.kept_count, other.behavior_logp) == (None, None, None)
    at = int(sample.kept_count[: sample.action.argmax() + 1].sum()) - 1
    kept, count = np.insert(sample.kept, at + 1, 999), sample.kept_count.copy()
    count[sample.action.argmax()] += 1
    with pytest.raises(Refused, match="kept: expected ids below 15, got 999"):
        made.encode(sample.replace(kept=kept, kept_count=count))
