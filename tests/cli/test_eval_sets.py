"""`agro eval` of several sets, gone on with after a kill, and `agro compare` of models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import done, refused, report_of, write_rows

from agro.cli.eval_command import Measurement
from agro.cli.run_models import rollout_of
from agro.config import NewModel, PolicyConfig, RewardConfig, SamplerConfig
from agro.models.pretrained import new_model
from agro.pages.run.evaluation import by_prompt
from agro.rewards import load_reward
from agro.rollout import Rollout
from agro.store import Store
from agro.types import Prompt


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp(name) for name in "ab"]
    for seed, folder in enumerate(folders):
        new_model(folder, NewModel(alphabet="0123456789>", hidden=16, layers=1, heads=2, context=32), seed)
    return folders


def prompts(path: Path, start: int = 0, count: int = 12) -> Path:
    return write_rows(path, ({"prompt": f"{i}>", "answer": str(i % 10)} for i in range(start, start + count)))


class Killed(Rollout):
    """Dies after so many responses."""

    left = 0

    def sample(self, *args: Any, **options: Any) -> Iterator[Any]:
        for sample in super().sample(*args, **options):
            if not self.left:
                raise MemoryError
            self.left -= 1
            yield sample


def test_a_killed_evaluation_goes_on_without_a_doubled_response(models: list[Path], tmp_path: Path) -> None:
    asked = [Prompt(f"{i}>", columns={"answer": "1"}) for i in range(10)]
    sampler = SamplerConfig(n=3, max_new=4)
    rollout = rollout_of(str(models[0]), PolicyConfig(model=str(models[0])), None)
    scorer = load_reward(RewardConfig(name="exact"))
    whole = Measurement(scorer, sampler, 0).of(rollout, str(models[0]), asked)
    kept = Measurement(scorer, sampler, 0, tmp_path / "e.db")
    killed = Killed(rollout.encoder, rollout.engine)
    for stored in (7, 14):
        killed.left = 7
        with pytest.raises(MemoryError):
            kept.of(killed, str(models[0]), asked)
        with Store.open(tmp_path / "e.db") as store:
            assert store.counts().samples == stored
    result = kept.of(rollout, str(models[0]), asked)
    assert by_prompt(result) == by_prompt(whole)
    again = kept.of(killed, str(models[0]), asked)  # nothing is sampled
    assert by_prompt(again) == by_prompt(whole)
    with Store.open(tmp_path / "e.db") as store:
        assert (store.counts().samples, store.counts().scored) == (30, 30)
    kept.of(rollout, str(models[1]), asked)  # other weights
    with Store.open(tmp_path / "e.db") as store:
        assert store.counts().samples == 60


def test_several_sets_at_once(models: list[Path], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("agro.cli.eval_command.SHOWN", 1)
    one, two = prompts(tmp_path / "one.jsonl"), prompts(tmp_path / "two.jsonl", 12, 8)
    command = ["eval", "--model", models[0], "--prompts", one, "--prompts", two, "--reward", "exact", "-n", 2]
    found = report_of(*command, "--max-new", 2, "--against", models[1], "--out", tmp_path / "out")
    assert [(s["name"], s["prompts"]) for s in found["sets"]] == [("one", 12), ("two", 8)]
    assert {"accuracy", "pass@2", "verdict"} <= found["sets"][0].keys()
    shown = done(*command, "--max-new", 2, "--against", models[1]).stdout
    assert "p is adjusted for 2 sets (Holm)" in shown
    assert re.search(r"best \(reward [01]\): ' … \d more characters → ' … \d more characters", shown)
    lines = (tmp_path / "out" / "two.jsonl").read_text().splitlines()
    assert len(lines) == 8
    assert json.loads(lines[0])["scored_by"] == {"name": "exact", "options": {}}
    other = tmp_path / "more"
    other.mkdir()
    assert "files of different names" in refused(*command, "--prompts", prompts(other / "one.jsonl"))


def test_a_prompt_that_leaves_no_room_is_refused_with_its_line(models: list[Path], tmp_path: Path) -> None:
    rows = [{"prompt": "1>", "answer": "1"}, {"prompt": "1" * 4001, "answer": "1"}]
    path = write_rows(tmp_path / "long.jsonl", rows)
    said = refused("eval", "--model", models[0], "--prompts", path, "--reward", "exact")
    assert f"{path}:2: prompt" in said
    assert "leave no room" in said


def test_models_are_compared_on_sets_of_prompts(models: list[Path], tmp_path: Path) -> None:
    one, two = prompts(tmp_path / "one.jsonl"), prompts(tmp_path / "two.jsonl", 12, 8)
    command = ["compare", *models, "--prompts", one, "--prompts", two, "--reward", "exact", "-n", 2]
    options = ["--max-new", 2, "--out", tmp_path / "out"]
    found = report_of(*command, *options)
    assert [(s["name"], s["n"]) for s in found["sets"]] == [("one", 12), ("two", 8)]
    for side, model in zip("ab", models, strict=True):
        given = ("--model", model, "--prompts", one, "--reward", "exact", "-n", 2, "--max-new", 2)
        said = report_of("eval", *given)
        assert found["sets"][0][side] == pytest.approx(said["reward_mean"]["value"])
    assert "models are compared with --prompts" in refused("compare", *models)
