"""Stored responses of experts in the steps of a run, and rivals that are earlier versions of the policy:
SePPO and self-play on demonstrations.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import (
    RESPONSE_ROUNDING,
    before_step,
    copying,
    metrics,
    run_id,
    run_tiny,
    tiny,
    whole_and_resumed,
)

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Refused
from agro.store import Store
from agro.train.feed import Feed, Valid
from agro.train.trainer import BaseTrainer
from agro.types import Sample


def store_of_experts(path: Path, role: str = "expert", reward: float | None = 1.0, count: int = 2) -> str:
    """So many responses to each prompt of a run, of which the first is right; without log-probs."""
    with Store.open(path) as store:
        store.append(
            Sample(f"{i:03d}>", f"{i % 10}" * (k + 1), reward=reward, role=role)
            for i in range(60)
            for k in range(count)
        )
    return str(path)


def roles(folder: Path, store: str) -> dict[int, Counter[str]]:
    """By step, how many responses of each role were drawn."""
    found: dict[int, Counter[str]] = defaultdict(Counter)
    with Store.open(Path(store), read_only=True) as opened:
        for draw in opened.draws.drawn(run_id(folder)):
            found[draw.step][draw.role] += 1
    return found


@pytest.mark.parametrize(
    "objective",
    [
        {"name": "luffy"},
        {"name": "luffy", "ratio": "old"},
        {"name": "ampo"},
        {"name": "tempsamp_r1", "fix": "anchor"},
        {"name": "chord", "mu": {"start": 0.9, "end": 0.1, "steps": 2, "shape": "cosine", "warmup": 1}},
        {"name": "agro", "beta": 0.1},
    ],
    ids=str,
)
def test_experts_join_the_samples_of_their_prompts(tmp_path: Path, objective: dict[str, Any]) -> None:
    """Four prompts with three samples and one of two stored responses each."""
    store = store_of_experts(tmp_path / "experts.db")
    run = run_tiny(tmp_path, objective=objective, data__experts=1, data__store=store, train__steps=2)
    assert roles(run, store) == {step: {"policy": 12, "expert": 4} for step in (1, 2)}
    assert all(row["loss"] is not None for row in metrics(run) if row["step"])


def test_unscored_experts_are_enough_where_their_rewards_are_not_read(tmp_path: Path) -> None:
    store = store_of_experts(tmp_path / "experts.db", reward=None)
    for name, experts in (("chord", {"expert": 4}), ("luffy", {})):
        changes = {"objective": {"name": name}, "data__experts": 1, "data__store": store}
        run = run_tiny(tmp_path, name, **changes, train__steps=1)
        assert roles(run, store)[1] == {"policy": 12, **experts}


@pytest.mark.parametrize("ratio", ["old", "behavior"])
def test_groups_of_experts_alone_beside_fresh_ones(tmp_path: Path, ratio: str) -> None:
    """Two groups of three samples, and two of one stored response."""
    store = store_of_experts(tmp_path / "experts.db", reward=None)
    data = {"data__replay": 0.5, "data__roles": ["expert"], "data__group_size": 1, "data__store": store}
    run = run_tiny(tmp_path, objective={"name": "chord", "ratio": ratio}, train__steps=2, **data)
    assert roles(run, store) == {step: {"policy": 6, "expert": 2} for step in (1, 2)}


def test_a_log_without_log_probs_is_still_refused(tmp_path: Path) -> None:
    """Of role "log" the same records are the policy's business."""
    store = store_of_experts(tmp_path / "log.db", role="log")
    with pytest.raises(Refused, match=r"objective luffy needs behavior_logp: 0 of 120 rows have it"):
        run_tiny(tmp_path, objective={"name": "luffy"}, data__replay=0.5, data__store=store)


def of_rivals(folder: Path, **changes: Any) -> RunConfig:
    """Demonstrations without rewards against samples of one of the last three copies of the policy."""
    values = {
        "objective": {"name": "seppo", "beta": 0.1, "singletons": "drop"},
        "data__store": store_of_experts(folder / "experts.db", reward=None, count=1),
        "data__experts": 1,
        "policy__reference": "sampler",
        "source": {"around": "rivals", "sync_every": 2, "sync_from": 3},
        "train__steps": 12,
    }
    return tiny(folder, **{**values, **changes})


def sampler_versions(run: Path) -> list[int]:
    return [row["sampler_version"] for row in metrics(run) if row["step"]]


@pytest.fixture(scope="module")
def rivals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bool], list[float]]:
    """A run, and of each step whether the reference has the weights of the copy that sampled, and how far its
    log-probs are from those that the samples recorded."""
    folder = tmp_path_factory.mktemp("rivals")
    copies, differences = [], []

    def look(feed: Feed, valid: Valid) -> None:
        [version] = {sample.version for sample in valid.samples if sample.role == "policy"}
        copy = load_file(folder / "run/weights/synced" / f"v{version:08d}" / "model.safetensors")
        reference = feed.learner.reference.weights()
        copies.append(all(torch.equal(copy[name], reference[name]) for name in copy))
        batch = feed.batch(valid, 1, {"beta": 0.1}).batch
        known = batch.mask & batch.behavior_logp.isfinite()
        differences.append((batch.ref_logp - batch.behavior_logp)[known].abs().max().item())

    with before_step(look):
        return BaseTrainer(of_rivals(folder), folder / "run").run(), copies, differences


def test_the_rival_is_one_of_the_last_copies_drawn_anew_at_each(rivals) -> None:
    """A copy is made at versions 0, 2, …, 10, and each one is the newest for two steps."""
    versions = sampler_versions(rivals[0])
    assert versions[::2] == versions[1::2]
    for newest, version in zip(range(0, 12, 2), versions[::2], strict=True):
        assert version in {newest, newest - 2, newest - 4} - {-2, -4}
    behind = {newest - version for newest, version in zip(range(4, 12, 2), versions[4::2], strict=True)}
    assert len(behind) > 1  # the rival isn't always as old


def test_the_reference_is_the_version_that_samples(rivals) -> None:
    _, copies, differences = rivals
    assert copies == [True] * 12
    assert max(differences) < RESPONSE_ROUNDING


def test_of_one_copy_the_rival_is_the_iterate_before(tmp_path: Path) -> None:
    config = of_rivals(tmp_path, source__sync_every=4, source__sync_from=1)
    run = Trainer(config, tmp_path / "run").run()
    assert sampler_versions(run) == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8]


def test_pairs_are_of_a_demonstration_and_a_sample_of_the_rival(rivals) -> None:
    """Each sample against the demonstration to its prompt."""
    run, _, _ = rivals
    with Store.open(run.parent / "experts.db", read_only=True) as store:
        samples = {s.id: s for s in store.samples()}
        pairs = list(store.pairs())
        drawn = Counter(draw.role for draw in store.draws.drawn(run_id(run)))
    assert [pair.loser for pair in pairs] == [s.id for s in samples.values() if s.role == "policy"]
    for pair in pairs:
        winner, loser = samples[pair.winner], samples[pair.loser]
        assert (winner.role, loser.role, winner.prompt) == ("expert", "policy", loser.prompt)
    assert drawn == {"policy": 12 * 4 * 3, "expert": 12 * 4}


@pytest.mark.parametrize("at", [3, pytest.param(5, marks=pytest.mark.nightly)])
def test_a_resumed_run_has_the_same_rivals_and_ends_with_the_same_bytes(tmp_path: Path, at: int) -> None:
    whole_and_resumed(of_rivals, tmp_path, at)


@pytest.mark.parametrize(
    ("objective", "sync_from"), [("seppo", 4), pytest.param("dpo", 1, marks=pytest.mark.nightly)]
)
def test_the_policy_learns_from_demonstrations_alone(tmp_path: Path, objective: str, sync_from: int) -> None:
    """They have no reward; the one that is measured isn't trained on."""
    config = copying(
        tmp_path,
        steps=40,
        objective={"name": objective, "beta": 0.1, "singletons": "drop"},
        data__experts=1,
        policy__reference="sampler",
        source={"around": "rivals", "sync_every": 5, "sync_from": sync_from},
    )
    rewards = [row["reward_mean"] for row in metrics(Trainer(config, tmp_path / "run").run()) if row["step"]]
    assert sum(rewards[:4]) / 4 < 0.1
    assert sum(rewards[-4:]) / 4 > 0.3
