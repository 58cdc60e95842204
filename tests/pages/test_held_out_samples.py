"""The page's browser of responses to held-out prompts: what it holds, with and without its script."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, find

from agro.config import RunConfig
from agro.errors import Refused
from agro.pages.run import experience as module
from agro.pages.run import report
from agro.pages.run.experience import held_out_samples
from agro.runs.folder import KEPT, Run
from agro.runs.rundata import load_run
from agro.runs.side_by_side import Answer, SideBySide
from agro.types import Prompt, Sample

EVIL = "</script><script>window.HIT=1</script>"


def evaluation(step: int) -> list[Sample]:
    """Two responses to each of more prompts than are kept."""
    return [
        Sample(f"p{i}", f"{step}: {i}.{j}", reward=float(j), meta={"index": 2 * i + j, "answer": str(i)})
        for i in range(KEPT + 2)
        for j in range(2)
    ]


def write(folder: Path, evaluations: dict[int, Sequence[tuple[Any, str, float | None]]]) -> None:
    """held_out.jsonl with (prompt, response, reward) at each step."""
    lines = []
    for step, found in evaluations.items():
        responses = [
            {"prompt": p, "prompt_id": str(p), "response": text, "reward": reward}
            for p, text, reward in found
        ]
        lines.append(json.dumps({"step": step, "responses": responses}) + "\n")
    (folder / "held_out.jsonl").write_text("".join(lines))


def test_the_first_response_of_the_first_prompts_is_kept(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", RunConfig(), resume=False)
    unknown = Sample("p", "r", meta={"index": 0, "answer": math.nan})  # as Parquet has a missing answer
    run.log_held_out(-1, [unknown])
    for step in (0, 5, 10):
        run.log_held_out(step, evaluation(step))
    run.forget_after(5)
    rows = [json.loads(line) for line in run.held_out_file.read_text().splitlines()]
    assert rows.pop(0)["responses"][0]["answer"] is None
    assert [row["step"] for row in rows] == [0, 5]
    assert [r["response"] for r in rows[1]["responses"]] == [f"5: {i}.0" for i in range(KEPT)]
    run.close()


def test_every_evaluation_is_there_and_three_stand_beside_each_other(run_folder: Path) -> None:
    run = load_run(run_folder)
    assert run.best_row is not None
    best = run.rows[run.best_row]["step"]
    steps = sorted({0, 20, best, 220})
    write(run_folder, {step: [("p", f"at {step}", None if step == 20 else 0.5)] for step in steps})
    with (run_folder / "held_out.jsonl").open("a") as file:
        file.write('{"step": 2')  # torn
    shown = held_out_samples(run)
    assert shown is not None
    assert shown.steps == tuple(steps)
    assert json.loads(shown.data)["responses"] == [
        [[[f"at {step}"], None if step == 20 else 0.5] for step in steps]
    ]
    assert [step for _, step in shown.columns] == sorted({0, best, 220})
    (run_folder / "held_out.jsonl").write_text("[]\n")
    with pytest.raises(Refused, match=r"held_out\.jsonl:1: expected the responses"):
        held_out_samples(run)


def test_the_log_stands_beside_the_model_and_other_prompts_come_after(run_folder: Path) -> None:
    beside = SideBySide.start(
        [Prompt("p", id="p"), Prompt("q", id="q")], {"p": Answer("the log's", 1.0)}, held_out=True
    )
    beside = beside.answered({"q": Answer("a")}, 0).answered({"q": Answer("b")}, 220)
    beside.save(run_folder)
    write(run_folder, {0: [("p", "first", 0.0)], 220: [("p", "last", 1.0)]})
    shown = held_out_samples(load_run(run_folder))
    assert shown is not None
    p, q = shown.prompts
    assert (p.log, q.log) == (Answer("the log's", 1.0), None)
    assert p.responses == {0: Answer("first", 0.0), 220: Answer("last", 1.0)}
    assert q.responses == {0: Answer("a"), 220: Answer("b")}


def test_two_prompts_of_one_text_stay_two(run_folder: Path) -> None:
    """As those of an environment with different secrets; runs of earlier versions kept no ids."""
    lines = []
    for step in (0, 220):
        found = [
            {"prompt": "guess", "prompt_id": str(i), "response": f"{i} at {step}", "reward": 0}
            for i in (1, 2)
        ]
        found += [{"prompt": "old", "response": "x", "reward": 0}]
        lines.append(json.dumps({"step": step, "responses": found}) + "\n")
    (run_folder / "held_out.jsonl").write_text("".join(lines))
    shown = held_out_samples(load_run(run_folder))
    assert shown is not None
    assert [p.responses[220].response for p in shown.prompts] == ["1 at 220", "2 at 220", "x"]
    assert shown.about.startswith("One response each to the first 3 held-out prompts")


def test_a_long_run_keeps_the_first_the_best_and_the_last(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOTAL", 1000)
    write(run_folder, {step: [("p", "x" * 100, 0.5)] for step in range(0, 221, 5)})
    run = load_run(run_folder)
    shown = held_out_samples(run)
    assert shown is not None
    assert run.best_row is not None
    assert {0, run.rows[run.best_row]["step"], 220} <= set(shown.steps)
    assert len(shown.data) < 2000


def test_what_a_model_writes_never_ends_the_element_of_the_data(run_folder: Path) -> None:
    write(run_folder, {0: [("p", EVIL, 0.5)]})
    shown = held_out_samples(load_run(run_folder))
    assert shown is not None
    assert "<" not in shown.data
    assert json.loads(shown.data)["responses"] == [[[[EVIL], 0.5]]]


@pytest.mark.skipif(find() is None, reason="no Chromium in PATH (Debian: apt-get install chromium)")
def test_search_filter_steps_and_difference_in_a_browser(run_folder: Path) -> None:
    tool = [{"role": "user", "content": "ask"}, {"role": "tool", "content": "a long result"}]
    answers = {
        0: [("one", "the cat sat", 0.0), (tool, "no " + EVIL, 0.5), ("three", "same", 1.0)],
        100: [("one", "the dog sat", 0.2), (tool, "no " + EVIL, 0.5), ("three", "same", 1.0)],
        220: [("one", "the dog ran", 1.0), (tool, "yes " + EVIL, 0.0), ("three", "same", 1.0)],
    }
    write(run_folder, answers)
    browser = Browser(find() or "")
    try:
        browser.open(report(run_folder))
        count = "document.querySelector('.count').textContent"
        visible = "[...document.querySelectorAll('article.sample:not([hidden])')].map(e => e.dataset.prompt)"
        put = "(() => {{ const e = document.querySelector('.toolbar [name={}]'); e.value = '{}'; "
        put += "e.dispatchEvent(new Event('input', {{bubbles: true}})); }})()"
        assert browser.ask(count) == "3 of 3 prompts"
        assert browser.ask("document.querySelector('article details').open") is False
        assert browser.ask("document.querySelector('.now del').textContent") == "cat"
        for kind, expected in (("better", ["one"]), ("worse", ["user: ask\ntool: a long result"])):
            browser.ask(put.format("kind", kind))
            assert browser.ask(visible) == expected
        browser.ask(put.format("kind", "all") + ";" + put.format("low", "0.9"))
        assert browser.ask(visible) == ["one", "three"]
        press = "document.body.dispatchEvent(new KeyboardEvent('keydown', {{key: '{}', bubbles: true}}))"
        browser.ask(press.format("["))
        assert browser.ask(visible) == ["three"]
        browser.ask(put.format("low", "") + ";" + put.format("text", "DOG"))
        assert browser.ask(visible) == ["one"]
        assert browser.ask("document.querySelector('.now .aside').innerText") == "step 100 · reward 0.2"
        assert browser.ask("document.querySelector('.now pre').innerText") == "the catdog sat"
        browser.ask(press.format("d") + ";" + press.format("j"))
        assert browser.ask("document.querySelector('.now pre').innerText") == "the dog sat"
        assert browser.ask("document.activeElement.dataset.prompt") == "one"
        assert browser.ask("typeof window.HIT") == "undefined"
        assert (browser.complaints, browser.blocked) == ([], [])
    finally:
        browser.close()


def test_an_environments_turns_are_folded_with_and_without_the_script(run_folder: Path) -> None:
    """Each turn of the policy is compared to the start's. Emoji count one character, in Python and here."""
    lines = []
    for step, parts in ((0, ["look 🙂", " a <wall> ", "go up"]), (220, ["look 🙂", " a hole ", "go in"])):
        places = [[6, 6 + len(parts[1])]]
        response = {"prompt": "p", "response": "".join(parts), "reward": 0.5, "observations": places}
        lines.append(json.dumps({"step": step, "responses": [response]}) + "\n")
    (run_folder / "held_out.jsonl").write_text("".join(lines))
    page = report(run_folder)
    plain = re.sub(r">\s+<", "><", page.read_text())
    assert (
        "<pre>look 🙂</pre><details><summary>environment</summary><pre> a &lt;wall&gt; </pre></details>"
        in plain
    )
    if find() is None:
        pytest.skip("no Chromium in PATH (Debian: apt-get install chromium)")
    browser = Browser(find() or "")
    try:
        browser.open(page)
        assert browser.ask("document.querySelector('.now details').open") is False
        assert browser.ask("document.querySelector('.now details pre').textContent") == " a hole "
        assert browser.ask("document.querySelector('.now del').textContent") == "up"
        assert browser.ask("document.querySelectorAll('.now del').length") == 1
        assert (browser.complaints, browser.blocked) == ([], [])
    finally:
        browser.close()
