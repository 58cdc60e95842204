"""`agro import --guess`: logs of no known format come in by their columns' names and content."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from unknown_logs import ANSWERS, QUESTIONS, UNKNOWN_LOGS, UnknownLog, lines, table

from agro.cli import app
from agro.logs.guessing import columns_of, propose
from agro.store import Store


def run(*arguments: Any, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["import", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def rewards(store: Path) -> tuple[float, ...]:
    with Store.open(store, read_only=True) as opened:
        return tuple(sorted(s.reward for s in opened.samples() if s.reward is not None))


@pytest.mark.parametrize("log", UNKNOWN_LOGS, ids=lambda log: log.file)
def test_a_log_comes_in_by_the_guess_or_the_command_that_is_proposed(log: UnknownLog, tmp_path: Path) -> None:
    path, store = tmp_path / log.file, tmp_path / "s.db"
    log.write(path)
    document = json.loads(run(path, "--guess", "--store", store, "--json").stdout)
    assert (document["samples"], document["pairs"], document["refused_count"]) == (log.samples, log.pairs, 0)
    if not log.comes_in:
        assert document["proposed"]["undefined"] == ["ship it", "rework"]
        command = document["proposed"]["command"].replace("ship it=NUMBER", "ship it=1")
        run(*shlex.split(command.replace("rework=NUMBER", "rework=0"))[2:], "--replace")
    else:
        assert document["scored"] == log.scored
    assert rewards(store) == pytest.approx(log.rewards)
    with Store.open(store, read_only=True) as opened:
        prompts = {str(sample.prompt) for sample in opened.samples()}
        assert all(any(question in prompt for prompt in prompts) for question in QUESTIONS)


def test_twelve_of_fourteen_come_in_alone() -> None:
    assert len(UNKNOWN_LOGS) == 14
    assert sum(log.comes_in for log in UNKNOWN_LOGS) >= 12


def test_the_proposed_command_does_the_same(tmp_path: Path) -> None:
    for log in UNKNOWN_LOGS:
        path, store = tmp_path / log.file, tmp_path / f"{log.file}.db"
        log.write(path)
        proposal = propose(path)
        if proposal is not None and log.comes_in:
            run(*shlex.split(proposal.command(str(store)))[2:])
            assert rewards(store) == pytest.approx(log.rewards), log.file


def test_without_guess_an_unknown_file_is_refused_with_the_proposal(tmp_path: Path) -> None:
    path = tmp_path / "log.tsv"
    next(log for log in UNKNOWN_LOGS if log.file == "log.tsv").write(path)
    said = run(path, "--store", tmp_path / "s.db", code=2).stderr
    assert "--map prompt=user_input --map response=model_output --map reward=score" in said
    assert "take it with --guess" in said
    assert "number, 6 different" in said
    assert "not used: latency_ms" in said
    assert not (tmp_path / "s.db").exists()
    shown = json.loads(run(path, "--guess", "--json").stdout)
    assert shown["columns"][0]["column"] == "user_input"
    assert len(shown["columns"][0]["first"]) == 3
    assert "--guess: expected no --map" in run(path, "--guess", "--map", "prompt=x", code=2).stderr


def test_what_no_column_says_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "numbers.csv"
    table([["x", "y"], [1, 2], [3, 4]])(path)
    said = run(path, "--guess", "--store", tmp_path / "s.db", code=2).stderr
    assert "no column says that it is the prompt or the response; name them" in said


def test_a_known_format_needs_no_guess(tmp_path: Path) -> None:
    path = tmp_path / "known.jsonl"
    lines([{"prompt": q, "response": a, "reward": 1} for q, a in zip(QUESTIONS, ANSWERS, strict=True)])(path)
    assert propose(path) is None
    document = json.loads(run(path, "--guess", "--store", tmp_path / "s.db", "--json").stdout)
    assert (document["scored"], "proposed" in document) == (6, False)


def test_rewards_that_are_not_taken_are_named(tmp_path: Path) -> None:
    path = tmp_path / "known.jsonl"
    lines([{"prompt": q, "response": "x", "stars": 3, "user": "u"} for q in QUESTIONS])(path)
    said = run(path, "--store", tmp_path / "s.db").stdout
    assert "columns of numbers that aren't used: stars" in said
    assert "--reward stars" in said
    document = json.loads(run(path, "--guess", "--store", tmp_path / "g.db", "--json").stdout)
    assert (document["scored"], document["proposed"]["command"].split()[-2:]) == (6, ["--reward", "stars"])


def test_the_types_of_columns() -> None:
    rows = [
        {
            "n": "3,5",
            "w": "yes",
            "t": f"A longer text {i}",
            "m": '[{"role": "user", "content": "x"}]',
            "e": None,
        }
        for i in range(4)
    ]
    types = {column.path: column.type for column in columns_of(rows)}
    assert types == {"n": "number", "w": "word", "t": "text", "m": "messages", "e": "empty"}
    nested = columns_of([{"a b": {"c-d": {"e": 1}}, "l": [{"x": 1}, {"x": 2}]}])
    assert [column.path for column in nested] == ['"a b"."c-d".e', "l[*].x"]


def test_thousands_are_no_decimals(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    table([["prompt", "response", "reward"], ["Q", "A", "1,000"], ["R", "B", "2,5"]], ";")(path)
    document = json.loads(run(path, "--store", tmp_path / "s.db", "--json").stdout)
    assert (document["samples"], document["refused_count"]) == (1, 1)
    assert rewards(tmp_path / "s.db") == (2.5,)
