"""First steps: `agro init`, `agro recipes`, `agro doctor`, help, completion, tables in a narrow terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from running import done, refused, report_of
from writing import write_rows

from agro import objectives
from agro.cli import COMMANDS
from agro.cli.explain import commands
from agro.cli.program import command as declared
from agro.cli.tasks import TASKS
from agro.config import RunConfig
from agro.config.recipes import recipes
from agro.io.version import __version__
from agro.models.pretrained import set_threads

ROOT = Path(__file__).parents[2]
FRESH = ("train.steps=1", "train.groups=2", "sampler.n=2")
SHORT = {
    "digits": FRESH,
    "own-log": [f"phases.{p}.train.{key}" for p in ("imitate", "learn") for key in ("steps=1", "groups=2")],
    "chat": FRESH,
    "multi-turn": FRESH,
}


@pytest.mark.parametrize("task", TASKS)
def test_a_task_trains_as_its_readme_says(task: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("agro.api.reporting_trainer.report", lambda folder: folder)
    said = done("init", "first", "--task", task).stdout
    monkeypatch.chdir("first")
    held_out = Path("held_out.jsonl")
    held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[:8]))
    listed = commands(Path("README.md"))
    assert all(command in said for command in ("cd first", *listed))
    for command in listed[:3]:
        name, *arguments = command.split()[1:]
        if name == "train":
            arguments += SHORT[task]
        done(name, *arguments)
    measured = report_of("eval", "runs/first", "-n", "2")
    assert measured["prompts"] == 8
    assert measured["unscored"] == 0
    assert measured["pass_at"] == 1.0  # the reward's own maximum; of "multi-turn" the environment's


def test_a_folder_with_files_and_an_unknown_task_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "expected an empty or a new folder" in refused("init", tmp_path)
    said = refused("init", tmp_path / "new", "--task", "chess")
    assert "expected one of digits, own-log, chat, multi-turn, got 'chess'" in said


def test_recipes_are_listed_printed_and_trained_by_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed = {row["name"]: row for row in report_of("recipes")}
    assert {"digits", "own-log", "chat", "multi-turn", "fresh", "log"} <= listed.keys()
    assert set(objectives.names()) <= listed.keys()
    assert listed["digits"]["minutes"] > 0
    assert listed["fresh"]["minutes"] is None
    assert done("recipes", "fresh").stdout == recipes()["fresh"].text
    assert RunConfig.load("dpo").objective.name == "dpo"
    Path("dpo").write_text('objective = { name = "rloo" }')
    assert RunConfig.load("dpo").objective.name == "rloo"  # a file of one's own comes first
    assert "did you mean fresh?" in refused("train", "frsh")
    assert "did you mean fresh?" in refused("recipes", "frsh")


def test_doctor_reports_versions_machine_and_state(tmp_path: Path) -> None:
    report = report_of("doctor")
    assert report["libraries"]["torch"] == torch.__version__
    assert report["cores"] >= 1
    damaged = tmp_path / "store.db"
    damaged.write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    report = report_of("doctor", damaged)
    assert report["off"]
    assert "off:" in done("doctor").stdout
    assert "or a store; no such file" in refused("doctor", tmp_path / "none.db")


def test_doctor_knows_the_last_complete_step_of_a_run_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"train": {"steps": 9}}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "phase": "a"}\n{"step": 4, "pha')
    state = report_of("doctor", tmp_path)["state"]
    assert (state["step"], state["phase"]) == (3, "a")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_names_a_page_of_the_guide_and_types_of_values_only(command) -> None:
    said = done(command.name, "--help").stdout
    assert (ROOT / "docs" / command.page).is_file()
    assert f"docs/{command.page}" in said
    assert f"Example: agro {command.name}" in " ".join(said.split())
    assert "<bool>" not in said
    assert [option.name for option in declared(command.name).params if not option.help] == []


def test_names_are_not_cut_in_a_narrow_terminal(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert set(objectives.names()) <= set(done("objectives").stdout.split())
    listed = done("recipes").stdout.replace(":", "").split()
    assert set(recipes()) <= set(listed)


# Runs commands one after another, and prints of each what it printed, and whether torch is imported by then.
SEVERAL = """
import contextlib, io, json, os, sys
import agro.cli
for command, variables in json.loads(sys.argv[1]):
    os.environ.update(variables)
    sys.argv = ["agro", *command]
    said, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(told), contextlib.suppress(SystemExit):
        agro.cli.main()
    print(json.dumps([said.getvalue(), told.getvalue(), "torch._C" in sys.modules]))
    for name in variables:
        del os.environ[name]
"""


def in_one_process(*commands: Sequence[str], variables: Sequence[dict[str, str]]) -> list[tuple[str, str]]:
    """stdout and stderr of each; none of them imports torch. `variables`: of the environment of further
    calls, without arguments."""
    asked = [*((command, {}) for command in commands), *(((), of_call) for of_call in variables)]
    ended = subprocess.run(
        [sys.executable, "-c", SEVERAL, json.dumps(asked)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(found) == len(asked), ended.stderr
    assert [command for command, (*_, torch) in zip(asked, found, strict=True) if torch] == []
    return [(said, told) for said, told, _ in found]


def test_help_and_completion_import_no_torch() -> None:
    helped, version, _, *refused, printed, sourced, asked = in_one_process(
        ("--help",),
        ("--version",),
        ("objectives", "agro"),
        ("doctor",),
        ("check", "none.db"),
        ("eval", "none"),
        ("train", "fresh", "data.stor=no"),
        ("train", "no.toml"),
        ("eval", "--model", "no/such/model", "--prompts", "no.jsonl"),
        ("eval", "--log", "no.db", "--model", "m"),
        ("train", "fresh", "--resume"),
        ("--show-completion", "bash"),
        variables=[
            {"_AGRO_COMPLETE": "source_bash"},
            {"_AGRO_COMPLETE": "complete_bash", "COMP_WORDS": "agro ra", "COMP_CWORD": "1"},
        ],
    )
    assert helped == (done("--help").stdout, "")
    assert version[0] == done("--version").stdout == f"agro-rl {__version__}\n"
    assert all(told.startswith("agro: ") for _, told in refused[1:])
    assert "_AGRO_COMPLETE" in printed[0] + sourced[0]
    assert asked[0].split() == ["race", "rate"]


def test_what_is_missing_is_refused(tmp_path: Path) -> None:
    row = {"prompt": "1", "response": "1", "reward": 1.0, "answer": "1"}
    prompts = write_rows(tmp_path / "prompts.jsonl", [row])
    empty = write_rows(tmp_path / "empty.jsonl", [])
    store, run = tmp_path / "store.db", tmp_path / "run"
    done("import", prompts, "--store", store)
    run.mkdir()
    (run / "metrics.jsonl").touch()
    fresh = ("train", "fresh", f"data.prompts={prompts}", "reward.name=exact", "policy.model=some/model")
    new = (*fresh, "--out", tmp_path / "new")
    commands = {
        "there is a run": (*fresh, "--out", run),
        "no such folder": (*new, "policy.model=no/such/model"),
        "no file": (*new, "reward.name=no.py:reward"),
        "the file is empty: expected a recipe": ("train", empty),
        "at least one prompt": (*new, f"data.prompts={empty}"),
        "unknown option foo": (*new, "objective.foo=1"),
        "got a folder": ("train", "log", f"data.store={tmp_path}", "policy.model=some/model"),
        "is an empty file": ("train", "log", f"data.store={empty}", "policy.model=some/model"),
        "there is no file": ("score", store, "--reward", "no.py:reward"),
        "but there is no such": ("check", store, "--model", "no/such/model"),
        "with config.json": ("collect", tmp_path / "none"),
    }
    for expected, command in commands.items():
        assert expected in refused(*command)
    assert not (tmp_path / "new").exists()


def test_threads_follow_the_size_of_the_model(monkeypatch) -> None:
    before = torch.get_num_threads()
    try:
        monkeypatch.setattr("agro.models.pretrained.cores", lambda: 3)
        small = torch.nn.Linear(4, 4)
        set_threads("auto", small)
        assert torch.get_num_threads() == 1
        monkeypatch.setattr("agro.models.pretrained.LARGE", 20)  # 4·4 weights and 4 biases
        set_threads("auto", small)
        assert torch.get_num_threads() == 3
        set_threads(2, small)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
