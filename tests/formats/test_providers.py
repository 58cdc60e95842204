"""What examples of providers' files can't say: files of prompts, and what is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from example import examples_of, parts_of
from writers import json_lines

from agro.errors import Refused
from agro.logs.importing import import_files
from agro.rollout.prompts import load_prompts
from agro.store import Store

OPENAI = parts_of("openai-batch")
SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "What is 2+2?"}


def test_a_request_that_is_there_twice(store: Store, tmp_path: Path) -> None:
    json_lines(tmp_path / "in.jsonl", [*OPENAI["requests"], OPENAI["requests"][0]])
    json_lines(tmp_path / "log.jsonl", [OPENAI["batch"]])
    with pytest.raises(Refused, match=r"in.jsonl:4: the id a is repeated"):
        import_files(store, [tmp_path / "log.jsonl"], join=tmp_path / "in.jsonl")


def test_one_batch_in_two_files_is_told_apart_by_file(store: Store, tmp_path: Path) -> None:
    """Ids name requests of one batch: another batch may use them again."""
    example = examples_of("openai-batch")[0]
    first = example.make(tmp_path / "log")
    json_lines(tmp_path / "log" / "retry.jsonl", example.rows[:1])
    report = import_files(
        store, [first, tmp_path / "log" / "retry.jsonl"], join=tmp_path / "log" / "input.jsonl"
    )
    assert (report.samples, report.repeats) == (4, 1)


def test_requests_and_problems_are_prompts(store: Store, tmp_path: Path) -> None:
    json_lines(tmp_path / "openai.jsonl", OPENAI["requests"][:2])
    json_lines(tmp_path / "anthropic.jsonl", parts_of("anthropic-batch")["params"][:1])
    problems = examples_of("human-eval")[0].others["problems.jsonl"]
    json_lines(tmp_path / "problems.jsonl", problems)
    assert [prompt.text for prompt in load_prompts(tmp_path / "openai.jsonl")] == [[ASK], [SYSTEM, ASK]]
    assert [prompt.text for prompt in load_prompts(tmp_path / "anthropic.jsonl")] == [[SYSTEM, ASK]]
    [problem] = load_prompts(tmp_path / "problems.jsonl")
    assert (problem.id, problem.columns["test"]) == ("HumanEval/0", "assert add(2, 2) == 4")
    for name in ("openai", "anthropic", "problems"):
        with pytest.raises(Refused, match="these are prompts"):
            import_files(store, [tmp_path / f"{name}.jsonl"])
