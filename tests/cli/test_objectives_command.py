"""`agro objectives` says what `agro.objectives.describe` says."""

from __future__ import annotations

import pytest
from running import done, refused, report_of

from agro import objectives


def test_all_of_them_as_json() -> None:
    found = report_of("objectives")
    assert [d["name"] for d in found] == objectives.names()
    assert report_of("objectives", "grpo")["options"]["clip"]["default"] == [0.2, 0.2]


def test_the_list_has_each_by_what_it_needs_of_the_data() -> None:
    needs: dict[str, str] = {}
    for line in done("objectives").stdout.splitlines():
        if line.startswith("need "):
            need = line
        for name in line.split() if line.startswith("  ") else ():
            needs[name] = need
    assert set(needs) == set(objectives.names())
    assert (needs["agro"], needs["sft"]) == ("need groups, reward", "need texts alone")


@pytest.mark.parametrize("name", objectives.names())
def test_each_in_full(name: str) -> None:
    out, described = done("objectives", name).stdout, objectives.describe(name)
    assert described["source"] in " ".join(out.split())
    for key, option in described["options"].items():
        [row] = [line for line in out.splitlines() if line.startswith(f"objective.{key} = ")]
        assert row.startswith(f"objective.{key} = required:") == option["required"]


@pytest.mark.parametrize("command", ["objectives", "recipes", "formats"])
def test_a_list_fits_a_screen(command: str, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = done(command).stdout.splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 80


def test_an_unknown_one_is_refused() -> None:
    assert "did you mean agro?" in refused("objectives", "agor")
