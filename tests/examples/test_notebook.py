"""The cells of `examples/notebooks`, run in order as a notebook does, and the outputs kept in them."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.report  # a notebook shows the page
FOLDER = Path(__file__).parents[2] / "examples/notebooks"


def cells(name: str) -> list[dict[str, Any]]:
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(source: str, names: dict) -> object:
    """Execute a cell and return the value of its last line, where it has one."""
    *before, last = ast.parse(source).body
    exec(compile(ast.Module(before, []), "<cell>", "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    exec(compile(ast.Module([last], []), "<cell>", "exec"), names)
    return None


def last_value(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(folder)
    names: dict = {"__name__": "__main__"}
    values = [run("".join(cell["source"]), names) for cell in cells(name)]
    assert names["trained"]._repr_html_().startswith("<iframe")
    return values[-1]


def test_from_a_reward(tmp_path, monkeypatch) -> None:
    """Of three zeros at most; at random there are .3."""
    assert last_value("reward", tmp_path, monkeypatch)["value"] > 2


@pytest.mark.nightly
def test_from_a_log(tmp_path, monkeypatch) -> None:
    """Of three sevens at most; in the log there are .3."""
    assert last_value("log", tmp_path, monkeypatch)["value"] > 1


@pytest.mark.nightly
def test_from_thumbs(tmp_path, monkeypatch) -> None:
    """The share of responses with a seven: .27 in the log."""
    learned, imitated = last_value("thumbs", tmp_path, monkeypatch)
    assert min(learned, imitated) > 0.6


@pytest.mark.parametrize("name", ["log", "reward", "thumbs"])
def test_outputs_are_kept_and_name_no_machine(name) -> None:
    assert [i for i, cell in enumerate(cells(name), 1) if cell["execution_count"] != i] == []
    printed = json.dumps([cell["outputs"] for cell in cells(name)])
    assert "Better by" in printed
    assert re.findall(r"/(?:home|root|tmp|work|Users)/[^\s\"]*|hf_\w{20,}", printed) == []
