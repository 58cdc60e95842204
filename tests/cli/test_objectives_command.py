"""`agro objectives` says what `agro.objectives.describe` says."""

from __future__ import annotations

import json

import pytest
from running import done, refused

from agro import objectives


def test_all_of_them_as_json() -> None:
    found = json.loads(done("objectives", "--json").stdout)
    assert [d["name"] for d in found] == objectives.names()
    assert json.loads(done("objectives", "grpo", "--json").stdout)["options"]["clip"]["default"] == [0.2, 0.2]


def test_the_table_names_needs_and_what_has_to_be_given(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    rows = {line.split()[0]: line for line in done("objectives").stdout.splitlines() if line.strip("━╇ ")}
    assert "groups, ref_logp, reward" in rows["agro"]
    assert "RLOO, arXiv 2402.14740" in rows["rloo"]
    assert "texts alone" in rows["sft"]


@pytest.mark.parametrize("name", objectives.names())
def test_each_in_full(name: str, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out, described = done("objectives", name).stdout, objectives.describe(name)
    assert described["source"] in out
    for key, option in described["options"].items():
        [row] = [line for line in out.splitlines() if line.strip().startswith(f"objective.{key} ")]
        assert ("to be given" in row) == option["required"]


def test_its_paragraphs_are_as_wide_as_the_terminal(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert "the same divided by β, which at β = 0 is RLOO" in done("objectives", "agro").stdout


def test_an_unknown_one_is_refused() -> None:
    assert "did you mean agro?" in refused("objectives", "agor")
