"""reproductions/systems: its list, what makes a system whole, and the page. No run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from agro.config.recipes import recipes
from reproductions.systems import run
from reproductions.systems.row import Row
from reproductions.systems.run import Measured, modules, page
from reproductions.systems.systems import SYSTEMS, System

HELD = Row("PPO", "a setting", "what it changes", 1.0, 0.5, "at least")
FAILED = Row("PPO", "a setting", "what it changes", 0.2, 0.5, "at least")


def test_the_list_has_each_system_once_and_recipes_that_there_are() -> None:
    assert len({system.name for system in SYSTEMS}) == len(SYSTEMS) == 69  # 56 and thirteen later ones
    assert {name for system in SYSTEMS for name in system.recipes} <= recipes().keys()
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
        (System("AGRO", "1"), [HELD, FAILED], "the loss", "Not all that is measured holds."),
        (System("AGRO", "1"), [], "the loss", "Nothing of it is measured here."),
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
    monkeypatch.setattr("reproductions.systems.systems.recipes", lambda: lacking)
    assert System("AGRO", "1", ("agro", "log")).reason([HELD]) == "a lag."


def test_the_page_has_all_systems_and_all_rows() -> None:
    """Of what doesn't hold its value and bound."""
    better = Row("PPO", "m", "|c|", 3.0, 1.0, "at least")
    text = page([Measured("some", [better, Row("PPO", "m", "|c|", 0.5, 1.0, "at least")], 60.0)])
    assert all(f"[{system.name}](" in text or f"- {system.name}:" in text for system in SYSTEMS)
    assert "1 of 2 measurements hold; 1.0 CPU minutes" in text
    assert "): Not all that is measured holds: |c|: 0.5 (**not** ≥ 1)." in text
    with pytest.raises(KeyError):
        page([Measured("some", [Row("no such system", "m", "c", 0.5, 1.0, "at least")], 60.0)])


def test_rows_before_a_failure_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(folder: Path) -> Iterator[Row]:
        yield HELD
        raise TimeoutError

    monkeypatch.setattr(run.importlib, "import_module", lambda name: SimpleNamespace(rows=rows))
    with pytest.raises(TimeoutError):
        run._measure_here("some", tmp_path)
    assert json.loads((tmp_path / "rows.jsonl").read_text()) == asdict(HELD)


def test_a_module_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the others' rows are those of before."""
    before = [asdict(Measured("other", [HELD], 1.0))]
    (tmp_path / "result.json").write_text(json.dumps(before))
    monkeypatch.setattr(run, "measure", lambda name, limit: Measured(name, [], 2.0, "it ended with 1"))
    assert run.main(["--only", "present", "--out", str(tmp_path)]) == 1
    text = (tmp_path / "README.md").read_text()
    assert "The module `present` failed: it ended with 1." in text
    assert "**Whole**: [PPO](" in text


def test_modules_are_those_that_measure() -> None:
    assert {"equations", "lag", "present"} <= set(modules())
    assert not {"run", "row", "systems", "tiny"} & set(modules())
