"""The demo on a smaller model and shorter prompts: its store phase learns from rewards, not from texts."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.store import Store
from examples import demo


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[RunConfig, Path]:
    """Warm-up and fresh samples; the store phase is left to the tests."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("LENGTH", 4), ("SLIP", 0.3), ("TRAIN", 1000), ("TAUGHT", 4000)):
            patch.setattr(demo, name, value)
        config = demo.configure(folder, 0)
    values = config.model_dump(mode="json")
    values["policy"]["new"] |= {"hidden": 64, "layers": 3}
    sft, onpolicy, _ = values["phases"]
    sft["train"] |= {"steps": 180, "lr": 3e-3}
    onpolicy["train"] |= {"steps": 25, "lr": 3e-4}
    values["phases"] = [sft, onpolicy]
    return RunConfig.of(values), Trainer(RunConfig.of(values), folder).run()


def held_out(run: Path) -> dict[str, float]:
    return {name: reward for name, reward, _ in demo.summary(run)}


def test_held_out_prompts_stand_in_no_training_data(trained) -> None:
    _, run = trained

    def prompts(name: str) -> set[str]:
        lines = (run / "data" / name).read_text().splitlines()
        return {json.loads(line)["prompt"] for line in lines}

    asked = prompts("eval_prompts.jsonl")
    with Store.open(run / "store.db", read_only=True) as store:
        seen = {s.prompt for s in store.samples()}
    assert len(asked) == 512
    assert not asked & (seen | prompts("prompts.jsonl"))


def test_fresh_samples_raise_the_held_out_reward(trained) -> None:
    found = held_out(trained[1])
    assert found["onpolicy"] > found["sft"] + 0.1


def test_the_store_phase_learns_from_rewards(trained, tmp_path: Path) -> None:
    """From the same weights and the same stored texts: with their rewards, and with these shuffled."""
    config, run = trained
    ends = {}
    for name in ("true", "shuffled"):
        store = tmp_path / f"{name}.db"
        shutil.copy(run / "store.db", store)
        if name == "shuffled":
            with Store.open(store) as opened:
                samples = list(opened.samples(roles=["policy"]))
                rewards = [s.reward for s in samples]
                random.Random(0).shuffle(rewards)
                opened.set_rewards((s.id, r, {}) for s, r in zip(samples, rewards, strict=True))
        values = config.model_dump(mode="json") | {"phases": []}
        values["policy"] = {"model": str(run / "model")}
        values["data"] |= {"store": str(store), "replay": 1.0, "roles": ["policy"]}
        values["train"] |= {"steps": 40, "lr": 2e-4}
        ends[name] = held_out(Trainer(RunConfig.of(values), tmp_path / name).run())
    start = ends["true"]["start"]
    assert ends["shuffled"]["start"] == start
    assert ends["true"]["train"] > start + 0.03
    assert ends["shuffled"]["train"] < start + 0.01
