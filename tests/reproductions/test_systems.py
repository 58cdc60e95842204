"""reproductions/systems: its list, what makes a system whole, and the page. No run."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from agro import objectives
from agro.config.recipes import recipes
from reproductions import harness
from reproductions.systems import run
from reproductions.systems.present import sharpe_ratio
from reproductions.systems.run import MEASURED, SYSTEMS, System, page
from reproductions.systems.tiny import Row

HELD = Row("PPO", "a setting", "what it changes", 1.0, 0.5, "at least")
FAILED = Row("PPO", "a setting", "what it changes", 0.2, 0.5, "at least")
UNHELD = "Not all measurements hold: what it changes: 0.2 (**not** ≥ 0.5)."


def test_the_list_has_each_system_once_and_recipes_that_there_are() -> None:
    assert len({system.name for system in SYSTEMS}) == len(SYSTEMS) == 69  # 56 and thirteen later ones
    assert {name for system in SYSTEMS for name in system.recipes} <= recipes().keys()
    assert {name for system in SYSTEMS for name in system.equations} <= set(objectives.names())
    assert all(system.missing for system in SYSTEMS if system.part == "no")


def test_a_number_that_is_none_holds_nothing() -> None:
    assert HELD.holds
    assert not FAILED.holds
    assert not Row("AGRO", "", "", float("nan"), 0.5, "at most").holds
    assert not Row("AGRO", "", "", float("nan"), 0.5, "at least").holds


@pytest.mark.parametrize(
    ("system", "rows", "extent", "reason"),
    [
        (System("AGRO", "1"), [HELD], "whole", ""),
        (System("AGRO", "1"), [HELD, FAILED], "the loss", UNHELD),
        (System("AGRO", "1"), [], "the loss", "Nothing is measured here."),
        (System("AGRO", "1", equations=("agro",)), [], "whole", ""),
        (System("AGRO", "1", missing="A lag.", part="the rule"), [HELD], "the rule", "A lag."),
        (System("AGRO", "1", missing="A world.", part="no"), [], "no", "A world."),
    ],
)
def test_whole_is_what_lacks_nothing_and_holds(
    system: System, rows: list[Row], extent: str, reason: str
) -> None:
    assert system.extent(rows) == extent
    assert system.reason(rows) == reason


def test_what_a_recipe_lacks_its_system_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = {"agro": SimpleNamespace(missing="a lag."), "log": SimpleNamespace(missing="")}
    monkeypatch.setattr("reproductions.systems.run.recipes", lambda: lacking)
    assert System("AGRO", "1", ("agro", "log")).reason([HELD]) == "a lag."


def test_the_page_has_all_systems_and_all_rows() -> None:
    """Of what doesn't hold its value and bound."""
    better = Row("PPO", "m", "|c|", 3.0, 1.0, "at least")
    text = page({"present": [better, Row("PPO", "m", "|c|", 0.5, 1.0, "at least")]})
    assert all(f"[{system.name}](" in text or f"- {system.name}:" in text for system in SYSTEMS)
    assert "1 of 2 measurements hold." in text
    assert "): Not all measurements hold: |c|: 0.5 (**not** ≥ 1)." in text
    with pytest.raises(KeyError, match="no such system"):
        page({"present": [Row("no such system", "m", "c", 0.5, 1.0, "at least")]})


def test_a_module_is_measured_and_the_others_are_those_of_before(tmp_path: Path, monkeypatch) -> None:
    begin, end = harness.marks("systems")
    (tmp_path / "README.md").write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    (tmp_path / "result.json").write_text(json.dumps({"again": [asdict(HELD)]}))
    measured = SimpleNamespace(rows=lambda folder: iter([FAILED]))
    monkeypatch.setattr(run.importlib, "import_module", lambda name: measured)
    assert run.main(["--only", "present", "--out", str(tmp_path)]) == 1
    assert json.loads((tmp_path / "result.json").read_text()) == {
        "again": [asdict(HELD)],
        "present": [asdict(FAILED)],
    }
    text = page({"again": [HELD], "present": [FAILED]})
    assert "1 of 2 measurements hold" in text
    assert (tmp_path / "README.md").read_text() == f"before\n{begin}\n\n{text}\n\n{end}\nafter\n"


@pytest.mark.parametrize("module", MEASURED)
def test_a_module_measures(module: str) -> None:
    assert callable(importlib.import_module(f"reproductions.systems.{module}").rows)


def test_sharpe_ratio_by_hand() -> None:
    """The two that are ranked first are worth 3 and 1, μ 2: (3 − 2)/1; of three also μ, (3 − 2)/√(2/3)."""
    estimated, true = np.array([9.0, 8.0, 7.0, 1.0]), np.array([3.0, 1.0, 2.0, 5.0])
    assert sharpe_ratio(estimated, true, behavior=2, k=2) == 1
    assert sharpe_ratio(estimated, true, behavior=2, k=3) == pytest.approx(1 / math.sqrt(2 / 3))
    assert math.isnan(sharpe_ratio(estimated, np.ones(4), behavior=2, k=2))
