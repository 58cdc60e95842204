"""`agro objectives` says what `agro.objectives.describe` says."""

from __future__ import annotations

import pytest
from running import done, refused, report_of

from agro import objectives


def test_all_of_them_as_json() -> None:
    found = report_of("objectives")
    assert [d["name"] for d in found] == objectives.names()
    assert report_of("objectives", "grpo")["options"]["clip"]["default"] == [0.2, 0.2]


def test_the_list_names_needs_and_sources() -> None:
    lines = done("objectives", "--all").stdout.splitlines()
    about = {line: " ".join(lines[i + 1 : i + 4]) for i, line in enumerate(lines) if line[:1] != " "}
    assert "groups, ref_logp, reward" in about["agro"]
    assert "RLOO, arXiv 2402.14740" in about["rloo"]
    assert "texts alone" in about["sft"]


@pytest.mark.parametrize("name", objectives.names())
def test_each_in_full(name: str) -> None:
    out, described = done("objectives", name, "--all").stdout, objectives.describe(name)
    assert described["source"] in " ".join(out.split())
    for key, option in described["options"].items():
        [row] = [line for line in out.splitlines() if line.startswith(f"objective.{key} = ")]
        assert row.startswith(f"objective.{key} = to be given:") == option["required"]


@pytest.mark.parametrize("command", ["objectives", "objectives grpo", "recipes", "formats"])
def test_forty_lines_of_eighty_characters_come_first(command: str, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    first, whole = done(*command.split()).stdout, done(*command.split(), "--all").stdout
    assert len(first.splitlines()) <= 40
    assert max(map(len, whole.splitlines())) <= 80
    assert max(map(len, first.splitlines())) <= 80
    assert f"agro {command} --all" in " ".join(first.split()) or "--all" in first
    assert len(whole.splitlines()) > 40


def test_an_unknown_one_is_refused() -> None:
    assert "did you mean agro?" in refused("objectives", "agor")
