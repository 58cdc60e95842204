"""Logs of single responses and of judged pairs: refusals name commands that train on them as they stand."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import fill_store, tiny, write_toml

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Refused
from agro.store import Store
from agro.train.instead import instead

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


def commands(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.startswith("  agro ")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    return Trainer(tiny(folder, train__steps=1), folder / "run").run() / "model"


@pytest.mark.parametrize(
    ("rows", "names", "changes"),
    [
        (single(12), ["dro", "kto", "feedback"], []),
        (single(12), ["feedback", "dro", "kto"], ["--recipe", "log"]),
        (single(12), ["feedback", "dro", "kto"], ["--objective", "dpo"]),
        (judged(6), ["dpo", "pairs"], []),
        (judged(6), ["pairs"], ["--objective", "grpo"]),
    ],
)
def test_check_prints_commands_that_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    rows: list[dict[str, Any]],
    names: list[str],
    changes: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    log = write_log(tmp_path / "my log.jsonl", rows)  # the name has to be quoted
    found = agro("check", log.name, "--model", model, *changes)
    assert found.exit_code == (2 if changes else 0)
    printed = commands(found.stderr if changes else found.stdout)
    assert [
        shlex.split(line)[8] for line in printed
    ] == names  # agro import LOG --store DB && agro train NAME
    if changes:
        return
    for line in printed:
        for part in line.split(" && "):
            short = ["train.steps=1"] if " train " in part else []
            done(*shlex.split(part)[1:], *short)
    for name in names:
        assert (tmp_path / "runs" / name / "model").is_dir()
    assert RunConfig.load(tmp_path / "runs" / names[-1] / "config.json").train.groups == len(rows)


def test_training_is_refused_with_the_same_commands(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", single(6))
    done("import", log, "--store", tmp_path / "log.db")
    changes = {"data__prompts": None, "data__store": str(tmp_path / "log.db"), "data__replay": 1.0}
    config = write_toml(tmp_path / "recipe.json", tiny(tmp_path, **changes))
    found = agro("train", config, "--out", tmp_path / "run")
    assert found.exit_code == 2
    first = f"agro train feedback policy.model=MODEL data.store={tmp_path}/log.db train.groups=6"
    assert commands(found.stderr)[0].startswith(first)
    assert "objective.threshold=3 " in commands(found.stderr)[2]


def test_too_few_groups_beside_many_single_responses(tmp_path: Path) -> None:
    """One group to compare, and eight prompts of one response: the draw refuses, and says what takes them."""
    fill_store(tmp_path / "log.db", groups=1)
    done("import", write_log(tmp_path / "log.jsonl", single(9)[1:]), "--store", tmp_path / "log.db")
    values = {"data__prompts": None, "data__store": str(tmp_path / "log.db"), "data__replay": 1.0}
    with pytest.raises(Refused, match=r"expected 4 groups(.|\n)*agro train feedback .*train.groups=9"):
        Trainer(tiny(tmp_path, **values, objective__singletons="drop"), tmp_path / "run").run()


def test_groups_are_compared_as_they_are(tmp_path: Path) -> None:
    fill_store(tmp_path / "log.db", groups=4)
    done("import", write_log(tmp_path / "log.jsonl", single(7)[4:]), "--store", tmp_path / "log.db")
    with Store.open(tmp_path / "log.db", read_only=True) as store:
        assert store.counts().groups == 7  # three of them of one response: not half
        assert instead(RunConfig(), store) == ""


def test_the_page_and_the_verdicts_name_them_once(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", [*single(12), single(1)[0] | {"response": "7", "reward": 9}])
    page = tmp_path / "page"
    found = done("check", log, "--set", "objective.singletons=drop", "--out", page)
    assert [shlex.split(line)[8] for line in commands(before_ranking(found.stdout))] == [
        "feedback",
        "dro",
        "kto",
    ]
    assert "agro train feedback" in (page / "check.html").read_text()
    found = done("check", write_log(tmp_path / "pairs.jsonl", judged(6)), "--objective", "sft")
    assert before_ranking(found.stdout).count("agro train pairs") == 1


def before_ranking(said: str) -> str:
    return said.partition("\nalso ")[0].partition("\nrecommended")[0]
