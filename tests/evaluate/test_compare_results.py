"""`agro compare` of results that were measured anywhere, and prompts that were seen before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import done, refused, report_of
from writing import write_rows

from agro.pages.run.compare import Matching, PairedSets
from agro.pages.store.check_survey import Contamination
from agro.stats.paired import holm, shares_interval
from agro.store import Store
from agro.types import Prompt, Sample

KEYS = ["name", "n", "a", "b", "difference", "low", "high", "p", "test", "detectable", "verdict"]


def compared(tmp_path: Path, *arguments: Any) -> dict[str, Any]:
    return dict(report_of("compare", *arguments, "--out", tmp_path / "out"))


def row(doc_id: int, is_right: bool) -> dict[str, Any]:
    """As lm-evaluation-harness logs a sample (4e7e0d4)."""
    response = "42" if is_right else "I don't know."
    generation = {"arg_0": f"Q: What is {doc_id}?\nA:", "arg_1": {"until": ["\n"], "temperature": 0.0}}
    return {
        "doc_id": doc_id,
        "doc": {"question": f"What is {doc_id}?", "answer": "42"},
        "target": "42",
        "arguments": {"gen_args_0": generation},
        "resps": [[response]],
        "filtered_resps": [response],
        "filter": "none",
        "metrics": ["exact_match"],
        "exact_match": float(is_right),
    }


def published(folder: Path) -> list[Path]:
    """lm-evaluation-harness, pull request 3868, has n = 220 and p = .008; of the tables with both, the one
    with the most changed answers: 110 right twice, 30 gained, 12 lost, 68 wrong twice."""
    rights = [(True, True)] * 110 + [(False, True)] * 30 + [(True, False)] * 12 + [(False, False)] * 68
    name = "samples_additions_2026-06-23T10-00-00.000000.jsonl"
    return [
        write_rows(folder / model / name, [row(i, right[side]) for i, right in enumerate(rights)])
        for side, model in enumerate(("a", "b"))
    ]


def choice_row(doc_id: int, is_right: bool, **more: Any) -> dict[str, Any]:
    """Of a task that takes the log-likelihoods of given answers."""
    found = row(doc_id, is_right)
    arguments = {f"gen_args_{i}": {"arg_0": f"Q{doc_id}", "arg_1": f" {i}"} for i in range(2)}
    resps = [[["-3.1", "False"]], [["-2.0", "True"]]]
    scores = {"metrics": ["acc", "acc_norm"], "acc": float(is_right), "acc_norm": 1.0 - is_right}
    return {**found, "arguments": arguments, "resps": resps, **scores, **more}


def test_the_published_example_of_the_harness(tmp_path: Path) -> None:
    paths = published(tmp_path)
    document = compared(tmp_path, *paths)
    [found] = document["sets"]
    assert list(found) == KEYS
    said = (found["name"], found["n"], found["test"], found["verdict"])
    assert said == ("additions", 220, "McNemar", "better")
    assert round(found["p"], 3) == 0.008
    assert (found["a"], found["b"]) == (pytest.approx(122 / 220), pytest.approx(140 / 220))
    assert found["difference"] == pytest.approx(18 / 220)
    back = compared(tmp_path, *reversed(paths))["sets"][0]
    assert (back["verdict"], back["low"]) == ("worse", pytest.approx(-found["high"], abs=1e-9))
    assert document["matching"][0]["metric"] == "exact_match,none"


def test_the_interval_is_tangos() -> None:
    """Fagerland, Lydersen and Laake (2014), airway hyper-responsiveness: 1 and 7 of 21 changed."""
    found = shares_interval(np.repeat([1.0, -1.0, 0.0], [1, 7, 13]))
    assert found == pytest.approx((-0.517, -0.026), abs=5e-4)


def test_holm() -> None:
    """As p.adjust(c(.01, .04, .03, .005), "holm") in R; what is unknown isn't counted."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    found = holm([0.02, np.nan, 0.01])
    assert (found[0], found[2], np.isnan(found[1])) == (0.02, 0.02, True)


def test_prompts_are_matched_by_their_text_then_by_id() -> None:
    a = {"1": "x", "2": "x", "3": "y", "4": "z"}
    b = {"2": "x", "7": "x", "9": "y", "4": "other"}
    found = Matching.of(a, b)
    assert found.pairs == [("2", "2"), ("1", "7"), ("3", "9")]
    assert (found.only_a, found.only_b, found.other_text) == (("4",), ("4",), ("4",))


def test_several_tasks_are_adjusted_and_those_of_one_side_listed(tmp_path: Path) -> None:
    """20 and 6 gains without a loss: p = 2/2²⁰ and 2/2⁶, which Holm doubles and leaves."""
    for side in ("a", "b"):
        for task, gains in (("easy", 20), ("hard", 6), (f"only_{side}", 1)):
            rights = [side == "b" and i < gains for i in range(20)]
            rows = [choice_row(i, right) for i, right in enumerate(rights)]
            write_rows(tmp_path / side / "model" / f"samples_{task}_2026-08-21T10-00-00.jsonl", rows)
        (tmp_path / side / "model" / "results_2026.json").write_text('{"results": {}}')
    document = compared(tmp_path, tmp_path / "a", tmp_path / "b")
    easy, hard = document["sets"]
    assert (easy["name"], hard["name"]) == ("easy", "hard")
    assert (easy["p"], hard["p"]) == (pytest.approx(4 / 2**20), pytest.approx(2 / 2**6))
    assert [m["p_alone"] for m in document["matching"]] == [2 / 2**20, 2 / 2**6]
    assert (easy["verdict"], hard["verdict"]) == ("better", "better")
    assert any("only_a" in note for note in document["not_compared"])
    assert any("only_b" in note for note in document["not_compared"])
    shown = done("compare", tmp_path / "a", tmp_path / "b", "--out", tmp_path, COLUMNS="300").stdout
    assert "both also have acc_norm,none (--metric NAME)" in shown
    assert "p is adjusted for 2 comparisons (Holm); unadjusted p < .001." in shown
    assert "│ < .001 │" in shown  # not 0.0000
    by_other = compared(tmp_path, tmp_path / "a", tmp_path / "b", "--metric", "acc_norm,none")
    assert [s["verdict"] for s in by_other["sets"]] == ["worse", "worse"]
    assert "acc_norm,none" in refused("compare", tmp_path / "a", tmp_path / "b", "--metric", "f1")


def test_what_is_not_compared_is_listed(tmp_path: Path) -> None:
    rows = [row(i, i % 2) for i in range(12)]
    changed = [dict(each) for each in rows]
    changed[3] = {**row(3, 1), "doc": {"question": "Another one?"}}
    changed[4]["exact_match"] = "none"
    changed[5] = {**row(5, 1), "arguments": {"gen_args_0": {"arg_0": "<chat>", "arg_1": {}}}}
    a = write_rows(tmp_path / "a.jsonl", rows)
    b = write_rows(tmp_path / "b.jsonl", [*changed[:11], row(40, 1)])
    b.write_text(b.read_text() + '{"cut": off\n')
    found = compared(tmp_path, a, b)
    assert found["sets"][0]["n"] == 9
    [matching] = found["matching"]
    assert (matching["only_a"], matching["only_b"]) == (["3", "11"], ["3", "40"])
    assert (matching["other_text"], matching["unscored"]) == (["3"], ["4"])
    said = " ".join(matching["notes"])
    assert f"2 prompts only in {a} (3, 11)" in said
    assert "1 of these have the same id on both sides, but different texts (3)" in said
    assert "1 prompts without a score on one side (4)" in said
    assert "1 of the prompts were worded differently for the two models" in said
    assert f"1 records of {b} that can't be read ({b}:13" in said


def test_filters_and_repeats(tmp_path: Path) -> None:
    """A row a filter; of repeats the harness may give a list."""
    for side, right in (("a", 0.0), ("b", 1.0)):
        rows = []
        for i in range(6):
            rows.append({**row(i, 1), "filter": "strict", "exact_match": [0.0, right]})
            rows.append({**row(i, 1), "filter": "flexible", "exact_match": 1.0})
        write_rows(tmp_path / f"{side}.jsonl", rows)
    sides = (tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    strict = compared(tmp_path, *sides)
    assert (strict["matching"][0]["metric"], strict["sets"][0]["b"]) == ("exact_match,strict", 0.5)
    loose = compared(tmp_path, *sides, "--metric", "exact_match,flexible")["sets"][0]
    assert (loose["difference"], loose["p"], loose["verdict"]) == (0.0, 1.0, "not shown")


def test_inspect_and_lighteval(tmp_path: Path) -> None:
    """Epochs of a sample count by their mean; log-likelihood tasks of lighteval have no text."""
    for side, values in (("a", "II"), ("b", "CI")):
        samples, details = [], []
        for i in range(7):
            asked = {"role": "user", "content": f"What is {i}+{i}?", "id": f"{side}{i}"}
            for epoch, value in enumerate(values, 1):
                sample = {"id": i, "epoch": epoch, "input": [asked], "scores": {"match": {"value": value}}}
                samples.append(sample | {"messages": [], "output": {"choices": []}})
            doc = {"query": f"Q{i}", "choices": ["x", "y"], "gold_index": 0, "id": i, "task_name": "arc"}
            response = {"input": f"Q{i}", "text": [], "logprobs": [-1.0, -2.0]}
            metric = {"acc": int(side == "b")}
            details.append({"doc": doc, "model_response": response, "metric": metric})
        log = {"version": 2, "status": "success", "eval": {"task": "sums", "model": side}, "samples": samples}
        (tmp_path / f"{side}.json").write_text(json.dumps(log))
        write_rows(tmp_path / f"{side}.details.jsonl", details)
    inspect = compared(tmp_path, tmp_path / "a.json", tmp_path / "b.json")["sets"][0]
    assert (inspect["name"], inspect["n"], inspect["difference"]) == ("sums", 7, 0.5)
    lighteval = compared(tmp_path, tmp_path / "a.details.jsonl", tmp_path / "b.details.jsonl")["sets"][0]
    assert (lighteval["name"], lighteval["p"], lighteval["verdict"]) == ("arc", 2 / 2**7, "better")


def test_stores_and_other_logs(tmp_path: Path) -> None:
    """A store against a log that agro import takes: the same prompts, whatever their ids."""
    prompts = [f"A question about {word}?" for word in ("stars", "bread", "rivers", "chess", "glass", "wool")]
    with Store.open(tmp_path / "a.db") as store:
        for i, prompt in enumerate(prompts):
            store.append(Sample(prompt, str(j), 0.0, role="log", prompt_id=str(i)) for j in range(2))
    log = write_rows(tmp_path / "b.jsonl", [{"prompt": p, "response": "x", "reward": 1.0} for p in prompts])
    found = compared(tmp_path, tmp_path / "a.db", log)
    assert (found["sets"][0]["n"], found["sets"][0]["p"]) == (6, 2 / 2**6)
    assert "the reward isn't recorded there" in " ".join(found["matching"][0]["notes"])


def test_three_results_are_compared_with_the_first(tmp_path: Path) -> None:
    files = []
    for name, reward in (("base", 0), ("same", 0), ("good", 1)):
        rows = [{"prompt_id": w, "prompt": w * 9, "rewards": [reward]} for w in "abcdefgh"]
        files.append(write_rows(tmp_path / f"{name}.jsonl", rows))
    same, good = compared(tmp_path, *files)["sets"]
    assert (same["verdict"], same["p"]) == ("not shown", 1.0)
    assert (good["verdict"], good["p"], good["name"]) == ("better", 4 / 2**8, f"{files[2]}: prompts")


def test_different_rewards_are_refused(tmp_path: Path) -> None:
    files = []
    for name in ("exact", "math"):
        scoring = {"name": name, "options": {}}
        rows = [{"prompt_id": "p", "prompt": "p", "rewards": [1], "scored_by": scoring}]
        files.append(write_rows(tmp_path / f"{name}.jsonl", rows))
    assert "name is 'exact' and 'math'" in refused("compare", *files)


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    file = write_rows(tmp_path / "a.jsonl", [row(0, 1)])
    said = refused("compare", file, tmp_path / "model")
    assert "a model: models are compared with --prompts FILE --reward NAME" in said
    assert "no such file or folder" in refused("compare", file, tmp_path / "nothing")
    assert "expected two results or more" in refused("compare", file)
    assert "--prompts: expected --reward NAME" in refused("compare", "m", "n", "--prompts", file)
    (tmp_path / "empty").mkdir()
    assert "samples of lm-evaluation-harness" in refused("compare", file, tmp_path / "empty")
    twice = tmp_path / "twice"
    for day in ("21", "22"):
        write_rows(twice / f"samples_x_2026-08-{day}T10-00-00.jsonl", [row(0, 1)])
    assert "expected one file of the task x" in refused("compare", file, twice)
    other = write_rows(tmp_path / "b.jsonl", [{**row(0, 1), "metrics": ["f1"], "f1": 1.0}])
    assert "expected a metric that both have, got different scoring" in refused("compare", file, other)


@pytest.mark.test
def test_files_are_compared_without_torch(tmp_path: Path) -> None:
    paths = published(tmp_path)
    program = (
        "import sys\nfrom agro.cli import main\ntry:\n    main()\nexcept SystemExit as end:\n"
        "    assert not end.code\nassert 'torch._C' not in sys.modules"
    )
    arguments = ["compare", *map(str, paths), "--out", str(tmp_path / "out")]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True)
    assert PairedSets(()).to_json()["sets"] == []


TRAINED = (
    "How many apples has Anna if she buys twelve and eats three of them on Monday?",
    [{"role": "user", "content": "Name the capital of Peru."}],
)


def test_copies_and_near_copies_are_told_apart() -> None:
    prompts = [
        Prompt("Q7: how many apples has Anna if she buys  twelve and eats three of them on monday?", "a"),
        Prompt("How many apples has Anna if she buys twelve and eats three of them on Friday?", "b"),
        Prompt([{"role": "user", "content": "Name the capital of Peru."}], "c"),
        Prompt("Who wrote Faust?", "d"),
    ]
    found = Contamination.of(prompts, TRAINED, 0.7)
    assert (found.exact, found.near, found.trained) == (("a", "c"), ("b",), 2)
    assert found.sentence == (
        "of 4 prompts 2 were trained on (a, c), 1 are near-copies of training prompts (b); the run has 2 "
        "training prompts"
    )


def test_copies_among_themselves_are_no_contamination() -> None:
    copies = [Prompt("Who wrote Faust?", "a"), Prompt("Who wrote Faust??", "b")]
    found = Contamination.of(copies, TRAINED, 0.7)
    assert (found.exact, found.near) == ((), ())
