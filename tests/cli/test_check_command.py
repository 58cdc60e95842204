"""`agro check`: the summary, JSON and exit codes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from running import agro, done
from writing import write_rows

from agro.config import RunConfig
from agro.train import trainable
from agro.train.check import check_config
from agro.train.inputs import within_budget
from agro.train.phases import Phase

ROWS = [
    *(
        {"prompt": f"{g}>", "response": "x" * i, "reward": i % 2, "source": "a"}
        for g in range(3)
        for i in range(4)
    ),
    {"prompt": "0>", "response": "</script><b>", "reward": 1, "source": "<b>"},
]


def run(folder: Path, rows: list[dict], *options: object):
    return agro("check", write_rows(folder / "log.jsonl", rows), *options)


def test_the_summary_and_json_say_the_same(tmp_path):
    plain = run(tmp_path, ROWS)
    assert plain.exit_code == 0, plain.output
    assert "13 of 3 prompts" in plain.stdout
    assert "note: Recipe log can train on this." in plain.stdout
    values = json.loads(run(tmp_path, ROWS, "--json").stdout)
    assert (values["samples"], values["groups"], values["recipe"]) == (13, 3, "log")
    assert values["by_source"]["<b>"]["rewards"]["mean"] == 1.0


def test_rewards_of_different_scales_in_a_group_end_with_2(tmp_path):
    graded = {"prompt": "0>", "response": "good", "reward": 5, "source": "annotators"}
    found = run(tmp_path, [*ROWS, graded])
    assert found.exit_code == 2
    assert "those of annotators from 5 to 5" in found.stderr
    assert "data.reward_scale" in found.stderr
    assert found.stderr.count("annotators from") == 2  # once for each source that they meet


def test_a_log_that_needs_a_map_is_for_import(tmp_path):
    found = run(tmp_path, [{"question": "1>", "output": "2"}])
    assert found.exit_code == 2
    assert "agro import with these options, then use the store" in found.stderr


def test_held_out_prompts_that_the_log_has_are_named(tmp_path):
    question = "Which of the rivers that flow into the sea at the town of the old bridge is the longest one{}"
    held = [{"id": "same", "prompt": "0>"}, {"id": "copy", "prompt": question.format("?")}, {"prompt": "9>"}]
    rows = [{**ROWS[0], "prompt": question.format(", please?")}, *ROWS]
    found = run(tmp_path, rows, "--held-out", write_rows(tmp_path / "held.jsonl", held))
    assert "1 of 3 held-out prompts are prompts of the store, and 1 are near-copies" in found.stdout
    assert "(same, copy)" in found.stdout


def test_singletons_are_a_problem_unless_the_recipe_drops_them(tmp_path):
    rows = [*ROWS, {"prompt": "9>", "response": "alone", "reward": 1, "source": "a"}]
    found = run(tmp_path, rows, "--objective", "agro")
    assert found.exit_code == 2
    assert "objective.singletons=drop" in found.stderr
    found = run(tmp_path, rows)  # of the recipe that it finds
    assert found.exit_code == 0, found.output
    assert "1 of 4 prompts have one response, and are left out" in found.stdout


def rows_of(kind: str) -> list[dict]:
    """40 prompts that share no five letters."""
    rows = []
    for g in range(40):
        letters = " ".join(chr(97 + (g * 7 + i * i) % 26) * (2 + g % 5) for i in range(6))
        parts = {
            "groups": [{"response": f"r{i}", "reward": float(i == 0)} for i in range(3)],
            "single": [{"response": "r", "reward": g % 5}],
            "pairs": [{"chosen": "a", "rejected": "b"}],
            "demonstrations": [{"response": "r"}],
        }
        rows += [{"prompt": f"{letters}{g}", **part} for part in parts[kind]]
    return rows


RECOMMENDED = {
    "groups": ["log"],
    "single": ["feedback", "dro", "kto"],
    "pairs": ["pairs", "dpo"],
    "demonstrations": ["sft"],
}


@pytest.mark.parametrize("kind", RECOMMENDED)
def test_the_recommended_commands_are_those_of_runs_that_are_not_refused(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    recommended = json.loads(run(tmp_path, rows_of(kind), "--json").stdout)["recommended"]
    assert [each["name"] for each in recommended] == RECOMMENDED[kind]
    said = run(tmp_path, rows_of(kind))
    assert said.exit_code == 0  # something can train, and no objective was asked for
    assert said.stdout.endswith(f"  {recommended[0]['command']} --fit 30min\n")
    for each in recommended:
        imported, _, train = each["command"].partition(" && ")
        if not Path("log.db").exists():
            done(*shlex.split(imported)[1:])
        _, _, recipe, *settings, _, _ = shlex.split(train)
        config = RunConfig.load(recipe, settings)
        for phase in check_config(config):  # what a run does before it loads a model
            trainable.check_stores([phase], [], config.data.store)
            budget = within_budget(config, config.data.store, tmp_path, resume=False)
            trainable.check_enough(Phase.all(budget.config), config.data.store)


@pytest.mark.parametrize(("kind", "code", "said"), [("pairs", 0, ""), ("groups", 2, "needs pairs")])
def test_an_objective_of_pairs_needs_them(tmp_path, kind, code, said):
    found = run(tmp_path, rows_of(kind), "--objective", "dpo")
    assert found.exit_code == code
    assert said in found.stderr


def test_equal_rewards_teach_nothing(tmp_path):
    equal = [{"prompt": f"{g}>", "response": "x" * i, "reward": 1} for g in range(3) for i in range(2)]
    found = run(tmp_path, equal)
    assert found.exit_code == 2
    assert "agro can run on this, but there is nothing to learn: all 6 rewards are 1." in found.stderr
    assert "recommended: nothing" in found.stdout
    assert run(tmp_path, equal, "--objective", "sft").exit_code == 0  # which imitates
    single = [{"prompt": f"{p}>", "response": "1", "reward": 1.0} for p in range(4)]  # no recipe mends that
    alone = run(tmp_path, single)
    assert alone.exit_code == 2
    assert "agro: There is nothing to learn: all 4 rewards are 1." in alone.stderr
    by_prompt = [row | {"reward": int(row["prompt"][0])} for row in equal]
    assert "in all 3 groups the rewards are equal" in run(tmp_path, by_prompt).stderr
