"""Stored responses of experts in the steps of a run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import metrics, tiny

from agro.api.reporting_trainer import Trainer
from agro.errors import Refused
from agro.store import Store
from agro.types import Sample


def store_of_experts(path: Path, role: str = "expert", reward: float | None = 1.0) -> str:
    """Two responses to each prompt of a run, without log-probs."""
    with Store.open(path) as store:
        store.append(
            Sample(f"{i:03d}>", f"{i % 10}" * (k + 1), reward=reward, role=role)
            for i in range(60)
            for k in range(2)
        )
    return str(path)


def roles(folder: Path, store: str) -> dict[int, Counter[str]]:
    """By step, how many responses of each role were drawn."""
    found: dict[int, Counter[str]] = {}
    run = json.loads((folder / "config.json").read_text())["run"]
    with Store.open(Path(store), read_only=True) as opened:
        for draw in opened.draws.drawn(run):
            found.setdefault(draw.step, Counter())[draw.role] += 1
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
    config = tiny(tmp_path, objective=objective, data__experts=1, data__store=store, train__steps=2)
    Trainer(config, tmp_path / "run").run()
    assert roles(tmp_path / "run", store) == {step: {"policy": 12, "expert": 4} for step in (1, 2)}
    assert all(row["loss"] is not None for row in metrics(tmp_path / "run") if row["step"])


def test_unscored_experts_are_enough_where_their_rewards_are_not_read(tmp_path: Path) -> None:
    store = store_of_experts(tmp_path / "experts.db", reward=None)
    for name, experts in (("chord", {"expert": 4}), ("luffy", {})):
        config = tiny(tmp_path, objective={"name": name}, data__experts=1, data__store=store, train__steps=1)
        Trainer(config, tmp_path / name).run()
        assert roles(tmp_path / name, store)[1] == {"policy": 12, **experts}


@pytest.mark.parametrize("ratio", ["old", "behavior"])
def test_groups_of_experts_alone_beside_fresh_ones(tmp_path: Path, ratio: str) -> None:
    """Two groups of three samples, and two of one stored response."""
    store = store_of_experts(tmp_path / "experts.db", reward=None)
    data = {"replay": 0.5, "roles": ["expert"], "group_size": 1, "store": store}
    changes = {f"data__{key}": value for key, value in data.items()}
    config = tiny(tmp_path, objective={"name": "chord", "ratio": ratio}, train__steps=2, **changes)
    Trainer(config, tmp_path / "run").run()
    assert roles(tmp_path / "run", store) == {step: {"policy": 6, "expert": 2} for step in (1, 2)}


def test_a_log_without_log_probs_is_still_refused(tmp_path: Path) -> None:
    """Of role "log" the same records are the policy's business."""
    store = store_of_experts(tmp_path / "log.db", role="log")
    config = tiny(tmp_path, objective={"name": "luffy"}, data__replay=0.5, data__store=store)
    with pytest.raises(Refused, match=r"objective luffy needs behavior_logp: 0 of 120 rows have it"):
        Trainer(config, tmp_path / "run").run()
