"""`agro check`: the summary, JSON, the page and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from agro.cli import app

ROWS = [
    *(
        {"prompt": f"{g}>", "response": "x" * i, "reward": i % 2, "source": "a"}
        for g in range(3)
        for i in range(4)
    ),
    {"prompt": "0>", "response": "</script><b>", "reward": 1, "source": "<b>"},
]


def run(folder: Path, rows: list[dict], *options: str):
    log = folder / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return CliRunner().invoke(app, ["check", str(log), *options])


def test_summary_json_and_page_say_the_same(tmp_path):
    plain = run(tmp_path, ROWS, "--out", str(tmp_path / "page"))
    assert plain.exit_code == 0, plain.output
    assert "13 of 3 prompts" in plain.stdout
    assert "note: agro can train on this." in plain.stdout
    values = json.loads(run(tmp_path, ROWS, "--json").stdout)
    assert json.loads((tmp_path / "page" / "check.json").read_text()) == values
    page = (tmp_path / "page" / "check.html").read_text()
    assert "13 responses to 3 prompts" in page
    assert "&lt;b&gt;" in page
    assert "<script" not in page
    assert page.count("<svg") == 6  # sizes, rewards, trajectory quality, coverage (2), lengths
    assert values["by_source"]["<b>"]["rewards"]["mean"] == 1.0


def test_rewards_of_different_scales_in_a_group_end_with_2_and_a_page(tmp_path):
    graded = {"prompt": "0>", "response": "good", "reward": 5, "source": "annotators"}
    found = run(tmp_path, [*ROWS, graded], "--out", str(tmp_path / "page"))
    assert found.exit_code == 2
    assert "those of annotators from 5 to 5" in found.stderr
    assert "data.reward_scale" in found.stderr
    assert found.stderr.count("annotators from") == 2  # once for each source that they meet
    assert "It can't train on this as it is." in (tmp_path / "page" / "check.html").read_text()


def test_a_log_that_needs_a_map_is_for_import(tmp_path):
    found = run(tmp_path, [{"question": "1>", "output": "2"}])
    assert found.exit_code == 2
    assert "agro import with these options, then agro check STORE" in found.stderr


def test_held_out_prompts_that_the_log_has_are_named(tmp_path):
    (tmp_path / "held.jsonl").write_text('{"prompt": "0>"}\n{"prompt": "9>"}\n')
    found = run(tmp_path, ROWS, "--held-out", str(tmp_path / "held.jsonl"))
    assert "1 of 2 held-out prompts" in found.stdout


def test_singletons_are_a_problem_unless_the_recipe_drops_them(tmp_path):
    rows = [*ROWS, {"prompt": "9>", "response": "alone", "reward": 1, "source": "a"}]
    found = run(tmp_path, rows)
    assert found.exit_code == 2
    assert 'singletons = "drop"' in found.stderr
    for options in (["--recipe", "log", "--set", "train.groups=3"], ["--set", "objective.singletons=drop"]):
        found = run(tmp_path, rows, *options)
        assert found.exit_code == 0, found.output
        assert "1 of 4 prompts have one response, and are left out" in found.stdout
    too_few = run(tmp_path, rows, "--recipe", "log")
    assert too_few.exit_code == 2
    assert "expected 16 groups with 2 or more eligible responses to draw from, got 3" in too_few.stderr
    completed = run(tmp_path, rows, "--set", "data.complete_groups=4").stdout
    assert "1 of 4 prompts have one response; 4 fresh ones are sampled" in completed
    assert "data.complete_groups = 3" not in completed
    for wrong in ("objective.beta=x", "objective.nope=1"):
        assert run(tmp_path, rows, "--set", wrong).exit_code == 2
    both = run(tmp_path, rows, "--recipe", "log", "--objective", "sft")
    assert both.exit_code == 2
