"""What examples of providers' files can't say: files of prompts, and what is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from example import examples_of, json_lines
from examples_providers import ASK, BATCHES, PARAMS, REQUESTS, SYSTEM, batch, completion

from agro.errors import Refused
from agro.logs.importing import import_files
from agro.rollout.prompts import load_prompts
from agro.store import Store


@pytest.mark.parametrize("at", [0, 2])
def test_a_batch_asks_for_its_requests(at: int, store: Store, tmp_path: Path) -> None:
    path = BATCHES[at].make(tmp_path / "log")
    with pytest.raises(Refused, match=r"custom_id: the prompts are in the .*; name it with --join FILE"):
        import_files(store, [path])


def test_a_request_that_is_there_twice(store: Store, tmp_path: Path) -> None:
    json_lines(tmp_path / "in.jsonl", [*REQUESTS, REQUESTS[0]])
    json_lines(tmp_path / "log.jsonl", [batch("a", completion())])
    with pytest.raises(Refused, match=r"in.jsonl:4: the id a is there twice"):
        import_files(store, [tmp_path / "log.jsonl"], join=tmp_path / "in.jsonl")


def test_one_batch_in_two_files_is_told_apart_by_file(store: Store, tmp_path: Path) -> None:
    """Ids name requests of one batch: another batch may use them again."""
    example = BATCHES[0]
    first = example.make(tmp_path / "log")
    json_lines(tmp_path / "log" / "retry.jsonl", example.rows[:1])
    report = import_files(
        store, [first, tmp_path / "log" / "retry.jsonl"], join=tmp_path / "log" / "input.jsonl"
    )
    assert (report.samples, report.repeats) == (4, 1)


def test_requests_and_problems_are_prompts(store: Store, tmp_path: Path) -> None:
    json_lines(tmp_path / "openai.jsonl", REQUESTS[:2])
    json_lines(tmp_path / "anthropic.jsonl", PARAMS[:1])
    problems = examples_of("human-eval")[0].others["problems.jsonl"]
    json_lines(tmp_path / "problems.jsonl", problems)
    assert [prompt.text for prompt in load_prompts(tmp_path / "openai.jsonl")] == [ASK, SYSTEM + ASK]
    assert [prompt.text for prompt in load_prompts(tmp_path / "anthropic.jsonl")] == [SYSTEM + ASK]
    [problem] = load_prompts(tmp_path / "problems.jsonl")
    assert (problem.id, problem.columns["test"]) == ("HumanEval/0", "assert add(2, 2) == 4")
    for name in ("openai", "anthropic", "problems"):
        with pytest.raises(Refused, match="these are prompts"):
            import_files(store, [tmp_path / f"{name}.jsonl"])
