"""Second policies that are trained beside the policy: a sampler of what is missing, and a draft."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import copying, metrics, weights, whole_and_resumed

from agro.api.reporting_trainer import Trainer
from agro.config import NewModel, PolicyConfig, RunConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.store import Store
from agro.train.check import check_config, check_sharded
from agro.types import Batch, Sample
from agro_papers.props import aggregate_kl, distance

OFF = 1e-12  # a learning rate with which nothing moves


def proposing(folder: Path, steps: int, lr: float = 1e-3, **changes: Any) -> RunConfig:
    values = {
        "objective": {"name": "agro", "beta": 0.05},
        "source__around": "props",
        "source__options": {"lr": lr, "newest": 1000},
        "sampler": {"n": 4, "max_new": 1},
    }
    return copying(folder, steps, **{**values, **changes})


def drafted(folder: Path, steps: int, every: int | None, **changes: Any) -> RunConfig:
    new = NewModel(alphabet="0123456789>", hidden=16, layers=1, heads=2, context=8, initializer_range=0.2)
    if not (folder / "draft").exists():
        Policy.load(PolicyConfig(new=new), seed=5).save(folder / "draft")
    sampler = {"n": 4, "max_new": 3}
    engine = {"kind": "drafted", "options": {"model": str(folder / "draft"), "tokens": 2}}
    if every is not None:
        changes["source"] = {"around": "trained_draft", "options": {"every": every, "lr": 1e-2}}
    objective = {"name": "agro", "beta": 0.05}
    return copying(folder, steps, **{"objective": objective, "sampler": sampler, "engine": engine, **changes})


def column(run: Path, name: str) -> list[Any]:
    return [row[name] for row in metrics(run) if row["step"]]


def test_responses_together_are_nearer_to_the_policy_than_independent_ones(tmp_path: Path) -> None:
    """The policy doesn't move, and its sampler in one of two runs. 32 responses to each of ten prompts."""
    kl = {}
    for name, lr in (("independent", OFF), ("adapted", 1e-3)):
        (tmp_path / name).mkdir()
        config = proposing(tmp_path / name, 9, lr, train__lr=OFF)
        kl[name] = column(Trainer(config, tmp_path / name / "run").run(), "aggregate_kl")
    assert kl["adapted"][0] is None  # nothing was sampled yet
    assert kl["adapted"][1] == pytest.approx(kl["independent"][1], abs=1e-6)  # the first step is of π
    assert kl["adapted"][-1] < 0.8 * kl["independent"][-1]


def test_samples_record_the_log_probs_of_the_sampler(tmp_path: Path) -> None:
    """At step 2 the policy is as it was: the log-probs differ by what the sampler was trained."""
    config = proposing(tmp_path, 2, train__lr=OFF)
    run = Trainer(config, tmp_path / "run").run()
    policy = Policy.load(PolicyConfig(model=str(run / "model")))
    with Store.open(config.data.store, read_only=True) as store:
        samples = [s for s in store.samples(roles=("policy",)) if s.version == 1]
    assert len(samples) == 40
    differences = []
    for sample in samples:
        assert sample.sampling["adapted"] == "props"
        tokens, mask = torch.tensor(sample.tokens[None]).long(), torch.tensor(sample.action[None])
        logp = policy.streams(tokens, torch.tensor([tokens.shape[1]]), mask)["logp"][mask].detach()
        differences.append(float(logp - torch.tensor(sample.behavior_logp[sample.action])))
    assert np.abs(differences).mean() > 0.01
    row = metrics(run)[-1]
    assert row["proposal_kl"] > 0
    assert row["logp_diff_mean"] is None  # they aren't comparable


def test_a_resumed_run_has_the_same_sampler(tmp_path: Path) -> None:
    whole, run = whole_and_resumed(lambda folder: proposing(folder, 5), tmp_path, 3)
    assert column(run, "aggregate_kl") == column(whole, "aggregate_kl")


def batch_of(logp: list[list[float]], ref_logp: list[list[float]]) -> tuple[torch.Tensor, Batch]:
    """The first token has no log-prob."""
    rows = len(logp)
    mask = torch.ones(rows, len(logp[0]), dtype=torch.bool)
    mask[:, 0] = False
    batch = Batch.of(mask=mask, reward=[0.0] * rows, group=["p"] * rows)
    return torch.tensor(logp), batch.replace(ref_logp=torch.tensor(ref_logp, dtype=torch.float64))


def test_the_kl_of_responses_together_by_hand() -> None:
    """Shares ¾ and ¼, probabilities ½ and ¼: ¾ log 3/2 + ¼ log 1."""

    def sample(token: int) -> Sample:
        ids, action = np.array([7, token], np.int32), np.array([False, True])
        return Sample("p", "x", tokens=ids, action=action, tokenizer="t")

    half, quarter = [0.0, math.log(0.5)], [0.0, math.log(0.25)]
    _, batch = batch_of([half] * 4, [half, half, half, quarter])
    samples = [sample(1), sample(1), sample(1), sample(2)]
    assert aggregate_kl(samples, batch) == pytest.approx(0.75 * math.log(1.5))


def test_the_distance_of_a_sampler_by_hand() -> None:
    """w = 2 and ½: (1 − log 2 + −½ + log 2) / 2."""
    logp, batch = batch_of([[0.0, math.log(0.5), math.log(0.1)]], [[0.0, math.log(0.25), math.log(0.2)]])
    assert distance(logp, batch) == pytest.approx(0.25)


def test_a_draft_that_is_trained_follows_the_policy(tmp_path: Path) -> None:
    """Without training less of what it proposes is accepted as the policy moves; responses are the same."""
    (tmp_path / "fixed").mkdir()
    fixed = Trainer(drafted(tmp_path / "fixed", 14, None), tmp_path / "fixed" / "run").run()
    (tmp_path / "trained").mkdir()
    trained = Trainer(drafted(tmp_path / "trained", 14, 1), tmp_path / "trained" / "run").run()
    accepted = {run: column(run, "draft_accepted") for run in (fixed, trained)}
    assert accepted[fixed][0] == accepted[trained][0]
    assert sum(accepted[trained][-4:]) > 1.3 * sum(accepted[fixed][-4:])
    assert sum(accepted[trained][-4:]) > sum(accepted[trained][:4])
    assert weights(trained) == weights(fixed)


def test_a_resumed_run_has_the_same_draft(tmp_path: Path) -> None:
    whole, run = whole_and_resumed(lambda folder: drafted(folder, 6, 2), tmp_path, 3)
    assert column(run, "draft_accepted") == column(whole, "draft_accepted")
    drafts = sorted(folder.name for folder in (run / "weights" / "draft").iterdir())
    assert drafts[-1] == "v00000006"  # trained before the checkpoint of the last step


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source__sync_every": 2}, r"props needs a source that .* weights .*, but source\.sync_every or"),
        ({"source__kind": "elsewhere"}, r'props needs a source that .*, but source\.kind is "elsewhere"'),
        ({"policy": {"model": "m", "lora": {}}}, r"props excludes \[policy\.lora\]"),
        ({"objective": {"name": "agro_onpolicy", "beta": 0.1}}, r"source\.around = props samples are of an"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        check_config(proposing(tmp_path, 2, **changes))


def test_several_ranks_have_no_complete_policy(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"props needs a source that is in one process .* several ranks"):
        check_sharded(proposing(tmp_path, 2))
    check_sharded(proposing(tmp_path, 2, source={}))


def test_a_draft_is_needed_to_train_one(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"trained_draft needs engine\.kind = .drafted.: no draft is there"):
        check_config(copying(tmp_path, 2, sampler={"n": 2, "max_new": 3}, source__around="trained_draft"))
