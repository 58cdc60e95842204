"""`examples/recipes`: the commands of each folder's README train, for two steps in place of hundreds."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agro.cli import app

FOLDER = Path(__file__).parents[2] / "examples/recipes"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/recipe.toml"))
FEW = ["phases.imitate.train.steps=1", "phases.learn.train.steps=1", "evaluate.n=1"]


def test_each_folder_is_listed() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[\w+\]\((\w+)\)", readme, re.MULTILINE)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_its_commands_train(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = FOLDER / name / "recipe.toml"
    assert len(recipe.read_text(encoding="utf-8").splitlines()) <= 25
    monkeypatch.chdir(tmp_path)
    shutil.copy(recipe, tmp_path)
    runpy.run_path(str(FOLDER / "make.py"))["main"](name, tmp_path)
    readme = (FOLDER / name / "README.md").read_text(encoding="utf-8")
    for line in re.findall(r"^    agro (.+)$", readme, re.MULTILINE):
        command = shlex.split(line) + (FEW if line.startswith("train") else [])
        found = CliRunner().invoke(app, command)
        assert found.exit_code == 0, found.output
    assert (tmp_path / "runs/first/model/model.safetensors").exists()
