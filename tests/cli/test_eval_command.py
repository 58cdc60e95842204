"""`agro eval` of several sets, gone on with after a kill, and of a log; `agro compare` of models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from running import done, refused, report_of
from writing import write_rows

from agro.cli.eval_command import Measurement
from agro.cli.run_models import rollout_of
from agro.config import NewModel, PolicyConfig, RewardConfig, RunConfig, SamplerConfig
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


@pytest.fixture(scope="module")
def run(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a run leaves it that began with one of the models and ended with the other."""
    folder = tmp_path_factory.mktemp("run")
    copytree(models[0], folder / "model")
    config = RunConfig.of({"policy": {"model": str(models[1])}})
    (folder / "config.json").write_text(config.model_dump_json())
    return folder


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


def test_several_sets_at_once(run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("agro.cli.eval_command.SHOWN", 1)
    one, two = prompts(tmp_path / "one.jsonl"), prompts(tmp_path / "two.jsonl", 12, 8)
    command = ["eval", run, "--prompts", one, "--prompts", two, "--reward", "exact", "-n", 2]
    found = report_of(*command, "--max-new", 2, "--against", "start", "--out", tmp_path / "out")
    assert [(s["name"], s["prompts"]) for s in found["sets"]] == [("one", 12), ("two", 8)]
    assert {"accuracy", "pass@2", "verdict"} <= found["sets"][0].keys()
    shown = done(*command, "--max-new", 2, "--against", "start").stdout
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


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = ({"prompt": f"{i}>", "answer": str(i)} for i in range(5))
    return write_rows(tmp_path_factory.mktemp("five") / "prompts.jsonl", rows)


@pytest.fixture(scope="module")
def log(models: list[Path], five: Path) -> Path:
    """40 responses of the first model to each of five prompts, scored by their first digit."""
    path = five.with_name("log.db")
    done("sample", "--model", models[0], "--prompts", five, "-n", 40, "--max-new", 3, "--out", path)
    with Store.open(path) as store:
        store.set_rewards((s.id or 0, float(s.response[:1] < "5"), {}) for s in list(store.samples()))
    return path


def test_of_its_own_log_a_model_is_worth_what_it_got(models, log) -> None:
    found = report_of("eval", "--model", models[0], "--log", log)
    value = found["value"]
    assert (value["responses"], value["ess"], value["clusters"]) == (200, pytest.approx(200), 5)
    assert value["estimates"]["doubly_robust"]["value"] == pytest.approx(value["behavior"], abs=1e-5)
    assert value["answer"] == "not shown"


def test_another_model_is_worth_what_its_own_responses_get(models, five, log, tmp_path: Path) -> None:
    """200 responses of the first model: the interval of the second's value holds the share of its own 600
    responses, made here."""
    out = tmp_path / "own.db"
    given = ("--model", models[1], "--prompts", five, "-n", 120)
    done("sample", *given, "--max-new", 3, "--out", out)
    with Store.open(out) as store:
        own = np.mean([s.response[:1] < "5" for s in store.samples()])
    asked = ("eval", "--model", models[1], "--log", log)
    best = report_of(*asked)["value"]["estimates"]["doubly_robust"]
    assert best["low"] - 0.05 <= own <= best["high"] + 0.05  # the share's own standard error is .02
    said = done(*asked).stdout
    assert "(doubly robust)" in said
    assert "  doubly robust: " in said
    assert "  per decision: " in said


def test_what_cant_be_estimated_says_what_to_do(models, log, tmp_path: Path) -> None:
    rows = ({"prompt": f"{i}>", "response": "1", "reward": i % 2} for i in range(5))
    bare = write_rows(tmp_path / "log.jsonl", rows)
    said = done("eval", "--model", models[0], "--log", bare).stdout
    assert "Not estimable: the log has no log-probs of what wrote it for 5 of its 5 responses" in said
    assert "agro eval --model M --prompts FILE --reward NAME" in said
    with Store.open(tmp_path / "few.db") as few, Store.open(log) as store:
        few.append([s.replace(id=None) for s in store.samples() if s.meta["index"] % 40 < 4])
    found = report_of("eval", "--model", models[1], "--log", tmp_path / "few.db")
    assert found["value"]["answer"] == "not estimable"
    assert "of the log's responses count, and 30 are needed" in found["value"]["obstacle"]
    assert found["value"]["estimates"] is None
    asked = ("eval", "--model", models[0], "--log")
    assert "no such file" in refused(*asked, tmp_path / "none.db")
    sampling = refused(*asked, log, "-n", 2, "--reward", "exact")
    assert "--log samples and scores nothing: leave out --reward, -n" in sampling


def test_eval_measures_entropy_and_kl_along_its_samples(models, run, five) -> None:
    """KL of a model from itself is 0, and nothing is gained; entropy is at most the log of the vocabulary."""
    asked = ("eval", run, "--prompts", five, "--reward", "exact", "-n", 2)
    of_itself = report_of(*asked, "--max-new", 3, "--against", "start", "--model", models[1])
    assert of_itself["kl"]["value"] == pytest.approx(0, abs=1e-6)
    assert (of_itself["verdict"]["gain"], of_itself["verdict"]["p"]) == (0, 1)
    assert 1 < of_itself["entropy"]["value"] < np.log(20)
    other = report_of(*asked, "--max-new", 3, "--against", "start")
    assert other["kl"]["value"] > 0.01
    assert other["before"]["reward_mean"]["value"] is not None
    assert "kl" not in report_of(*asked, "--max-new", 3)
    shown = done(*asked, "--max-new", 3, "--against", "start").stdout
    assert ", before " in shown
    assert f"against the start: {other['verdict']['sentence']}" in shown
