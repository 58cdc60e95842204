"""A run stops where sampler and trainer have different log-probs of the same responses at equal weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import logp_rounding, metrics, tiny

from agro.api.reporting_trainer import Trainer
from agro.errors import Refused
from agro.objectives import Evaluation
from agro.rollout.engines import Continuation
from agro.rollout.engines.hf import HF
from agro.train.feed import draws_from
from agro.train.measure import logp_differences
from agro.train.step import Step
from agro.types import Batch, Sample

SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 3}


@pytest.fixture
def off(monkeypatch) -> list[float]:
    """What an engine's log-probs are too low by, nats a token; after the first token, which is unknown."""
    shift = [0.0]
    plain = HF.decode

    def decode(engine: HF, *request) -> Iterator[Continuation]:
        for done in plain(engine, *request):
            logp = done.logp - shift[0]
            logp[0] = np.nan if len(logp) > 1 else logp[0]
            yield replace(done, logp=logp)

    monkeypatch.setattr(HF, "_gap", lambda *_: (0.0, 1.0))  # the engine's own probe
    monkeypatch.setattr(HF, "decode", decode)
    return shift


def test_the_run_stops_before_the_weights_move(tmp_path: Path, off: list[float]) -> None:
    off[0] = 0.2
    words = (
        r"step 1: .*logp_diff_fresh = 0\.2 nats a token, above guard\.logp_diff = 0\.1.*processed_logprobs"
    )
    with pytest.raises(Refused, match=words):
        Trainer(tiny(tmp_path), tmp_path / "run").run()
    assert not (tmp_path / "run/metrics.jsonl").exists() or metrics(tmp_path / "run")[-1]["step"] == 0
    assert not list((tmp_path / "run/checkpoints").glob("step-*[1-9]"))
    off[0] = 0.0
    config = tiny(tmp_path)
    assert metrics(Trainer(config, tmp_path / "run", resume=True).run())[-1]["step"] == 6


@pytest.mark.parametrize(("nats", "guard"), [(0.05, {}), (0.2, {"logp_diff": 0.3}), (0.2, {"logp_diff": 0})])
def test_the_limit_is_a_setting(tmp_path: Path, off: list[float], nats: float, guard: dict) -> None:
    off[0] = nats
    run = Trainer(tiny(tmp_path, guard=guard, train__steps=2), tmp_path / "run").run()
    rows, bound = metrics(run), logp_rounding(run)
    assert [m["logp_diff_fresh"] for m in rows] == pytest.approx([nats] * 2, abs=bound)
    assert [m["logp_diff_mean"] for m in rows] == pytest.approx([nats] * 2, abs=bound)


@pytest.mark.parametrize(
    "changes",
    [{"sampler__temperature": 0.5}, {"sampler__top_p": 0.8}, {"sampler__temperature": 0.0}],
)
def test_responses_of_another_distribution_are_not_compared(
    tmp_path: Path, off: list[float], changes: dict
) -> None:
    off[0] = 0.2
    rows = metrics(Trainer(tiny(tmp_path, train__steps=2, **changes), tmp_path / "run").run())
    assert {m["logp_diff_fresh"] for m in rows} == {None}
    assert {m["logp_diff_mean"] for m in rows} == {None}


def fresh(**changes) -> Sample:
    known = {"tokens": [4, 5], "action": [False, True], "sampling": SAMPLING, "version": 0, "role": "policy"}
    return Sample("a", "b", **known | changes)


@pytest.mark.parametrize(
    ("sample", "over_kept", "same"),
    [
        (fresh(), False, True),
        (fresh(sampling=None), False, False),  # unknown
        (fresh(sampling={"seed": 3}), False, False),
        (fresh(sampling=SAMPLING | {"temperature": 0.5}), False, False),
        (fresh(sampling=SAMPLING | {"top_k": 5}), True, False),
        (fresh(sampling=SAMPLING | {"min_p": 0.1}), False, False),
        (fresh(sampling=SAMPLING | {"top_p": 0.9}, kept=[5, 6], kept_count=[0, 2]), False, False),
        (fresh(sampling=SAMPLING | {"top_p": 0.9}, kept=[5, 6], kept_count=[0, 2]), True, True),
        (fresh(sampling=SAMPLING | {"skipped_layers": [2]}), False, False),
        (fresh(context_tokens=[4]), False, True),
        (fresh(context_tokens=[7, 4]), False, False),
        (fresh(meta={"hint": "h"}), False, False),
    ],
)
def test_which_samples_have_the_log_probs_of_the_policy(sample: Sample, over_kept: bool, same: bool) -> None:
    assert draws_from(sample, 1.0, over_kept=over_kept) == same


def test_only_known_log_probs_of_comparable_rows_count() -> None:
    """Differences: .1 and unknown at staleness 0, .4 at staleness 2, and 9 of another distribution."""
    behavior = [[math.nan, -1.1, math.nan], [math.nan, -1.4, -1.4], [math.nan, -10.0, -10.0]]
    batch = Batch.of(
        mask=[[False, True, True]] * 3,
        reward=[0.0] * 3,
        group=["a"] * 3,
        behavior_logp=behavior,
        age=[0, 2, 0],
    )
    logp = torch.tensor([[0.0, -1.0, -1.0]] * 3, dtype=torch.float64)
    step = Step(Evaluation(0.0, {}, {}), {"logp": logp}, batch)
    found = logp_differences(step, [True, True, False])
    assert found == pytest.approx({"logp_diff_mean": 0.3, "logp_diff_max": 0.4, "logp_diff_fresh": 0.1})
    stale = logp_differences(step, [False, True, False])
    assert stale == pytest.approx({"logp_diff_mean": 0.4, "logp_diff_max": 0.4})
    assert logp_differences(step, [False, False, False]) == {}
    logp[0, 1] = -math.inf  # a token that the trainer's policy never draws
    assert logp_differences(step, [True, True, False])["logp_diff_fresh"] == math.inf
