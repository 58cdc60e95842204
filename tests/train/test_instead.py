"""Logs of single responses and of judged pairs: `agro check` prints commands, refusals a recipe."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import fill_store, run_tiny, tiny, write_toml

from agro.config import RunConfig
from agro.errors import Refused
from agro.store import Store
from agro.train.trainable import instead

sys.path.append(str(Path(__file__).parents[1] / "cli"))
from running import agro, done


def write_log(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def single(count: int) -> list[dict[str, Any]]:
    """Ratings from 1 to 5, whose middle is 3."""
    return [{"prompt": f"{100 + i}>", "response": str(i % 10), "reward": i % 5 + 1} for i in range(count)]


def judged(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{100 + i}>", "chosen": "1", "rejected": "2"} for i in range(count)]


def imported(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings of a run on a log that has these rows too."""
    done("import", write_log(folder / "log.jsonl", rows), "--store", folder / "log.db")
    return {"data": {"store": str(folder / "log.db"), "replay": 1.0}}


def trained_by(found: Any) -> dict[str, str]:
    """By its recipe, each command that was printed: agro import LOG --store DB && agro train NAME."""
    lines = [line.strip() for line in found.stdout.splitlines() if line.startswith("  agro ")]
    return {shlex.split(line)[8]: line for line in lines}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_tiny(tmp_path_factory.mktemp("start"), train__steps=1) / "model"


@pytest.mark.parametrize(
    ("rows", "names", "wrong"),
    [
        (single(12), ["dro", "kto", "feedback"], "--objective=agro"),
        (judged(6), ["dpo", "pairs"], "--objective=grpo"),
    ],
)
def test_check_prints_commands_that_run(
    tmp_path: Path, monkeypatch, model: Path, rows: list[dict[str, Any]], names: list[str], wrong: str
) -> None:
    monkeypatch.chdir(tmp_path)
    log = write_log(tmp_path / "my log.jsonl", rows)  # the name has to be quoted
    refused = agro("check", log.name, "--model", model, wrong)
    assert refused.exit_code == 2
    assert f"recipe {names[-1]}, which trains on" in refused.stderr
    assert f"(agro check {log.name} prints" in refused.stderr
    found = agro("check", log.name, "--model", model)
    assert found.exit_code == 0
    assert list(trained_by(found)) == list(trained_by(refused)) == names
    for name, line in trained_by(found).items():
        imports, trains = line.split(" && ")
        done(*shlex.split(imports)[1:])
        done(*shlex.split(trains)[1:], "train.steps=1")
        assert (tmp_path / "runs" / name / "model").is_dir()
    assert RunConfig.load(tmp_path / "runs" / names[-1] / "config.json").train.groups == len(rows)


def test_training_is_refused_with_the_recipe(tmp_path: Path) -> None:
    config = write_toml(tmp_path / "recipe.json", tiny(tmp_path, **imported(tmp_path, single(6))))
    found = agro("train", config, "--out", tmp_path / "run")
    assert found.exit_code == 2
    assert "recipe feedback, which trains on single responses" in found.stderr
    assert f"(agro check {tmp_path}/log.db prints its command)" in found.stderr


def test_too_few_groups_beside_many_single_responses(tmp_path: Path) -> None:
    """One group to compare, and eight prompts of one response: the draw refuses, and says what takes them."""
    fill_store(tmp_path / "log.db", groups=1)
    with pytest.raises(Refused, match=r"expected 4 groups(.|\n)*, or recipe feedback"):
        run_tiny(tmp_path, **imported(tmp_path, single(9)[1:]), objective__singletons="drop")


def test_groups_are_compared_as_they_are(tmp_path: Path) -> None:
    fill_store(tmp_path / "log.db", groups=4)
    imported(tmp_path, single(7)[4:])
    with Store.open(tmp_path / "log.db", read_only=True) as store:
        assert store.counts().groups == 7  # three of them of one response: not half
        assert instead(store) == ""
