"""Responses to held-out prompts on the page: of the first, the best and the last evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agro.config import RunConfig
from agro.errors import Refused
from agro.pages.run.held_out import held_out
from agro.runs.folder import KEPT, Run
from agro.runs.rundata import load_run
from agro.types import Sample


def evaluation(step: int) -> list[Sample]:
    """Two responses to each of six prompts."""
    return [
        Sample(f"p{i}", f"{step}: {i}.{j}", reward=float(j), meta={"index": 2 * i + j, "answer": str(i)})
        for i in range(6)
        for j in range(2)
    ]


def test_the_first_response_of_the_first_prompts_is_kept(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", RunConfig(), resume=False)
    for step in (0, 5, 10):
        run.log_held_out(step, evaluation(step))
    run.forget_after(5)
    rows = [json.loads(line) for line in run.held_out_file.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 5]
    assert [r["response"] for r in rows[1]["responses"]] == [f"5: {i}.0" for i in range(KEPT)]
    run.close()


def test_the_first_the_best_and_the_last_are_shown(run_folder: Path) -> None:
    run = load_run(run_folder)
    assert run.best_row is not None
    best = run.rows[run.best_row]["step"]
    lines = []
    for step in (0, 20, best, 220):
        response = {"prompt": "p", "response": f"at {step}", "reward": None if step == 20 else 0.5}
        lines.append(json.dumps({"step": step, "responses": [response]}) + "\n")
    (run_folder / "held_out.jsonl").write_text("".join(lines) + '{"step": 2')
    (prompt,) = held_out(run)
    expected = [(step, f"at {step}", step == best) for step in sorted({0, best, 220})]
    assert [(g.step, g.response, g.best) for g in prompt.responses] == expected
    (run_folder / "held_out.jsonl").write_text("[]\n")
    with pytest.raises(Refused, match=r"held_out\.jsonl:1: expected the responses"):
        held_out(run)
