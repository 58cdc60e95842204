"""The page's browser of responses to held-out prompts: what it holds, with and without its script."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from made_up_run import read_rows
from writing import write_rows

from agro.config import RunConfig
from agro.errors import Refused
from agro.pages.run import experience as module
from agro.pages.run import report
from agro.pages.run.experience import HeldOutSamples, held_out_samples
from agro.runs.folder import Run
from agro.runs.rundata import load_run
from agro.runs.side_by_side import KEPT, Answer, SideBySide, place
from agro.types import Sample

EVIL = "</script><script>window.HIT=1</script>"


def answer(prompt: Any, response: str, reward: float | None, **more: Any) -> dict[str, Any]:
    return {"prompt_id": str(prompt), "prompt": prompt, "response": response, "reward": reward, **more}


def write(folder: Path, evaluations: dict[int, list[dict[str, Any]]]) -> None:
    """held_out.jsonl with what was answered at each step."""
    rows = ({"step": step, "responses": found} for step, found in evaluations.items())
    write_rows(folder / "held_out.jsonl", rows)


def shown_of(folder: Path) -> HeldOutSamples:
    found = held_out_samples(load_run(folder))
    assert found is not None
    return found


def test_the_first_response_of_the_first_prompts_is_kept_after_the_best_of_the_log(tmp_path: Path) -> None:
    """Of two responses to each of more prompts than are kept, in the order of the hash."""
    run = Run(tmp_path / "run", RunConfig(), resume=False)
    asked: list[list[str]] = []

    def best_of_log(prompt_ids: list[str]) -> list[list[Sample]]:
        asked.append(prompt_ids)
        return [[Sample("p3", "the log's", reward=1.0)], [Sample("p5", "log", meta={"answer": math.nan})]]

    for step in (0, 5, 10):
        evaluation = [
            Sample(
                f"p{i // 2}",
                f"{step}: {i % 2}",
                reward=float(i % 2),
                meta={"index": i},
                prompt_id=f"p{i // 2}",
            )
            for i in range(2 * KEPT + 4)
        ]
        run.log_held_out(step, evaluation, best_of_log)
    run.forget_after(5)
    log, *rows = read_rows(run.held_out_file)
    kept = sorted((f"p{i}" for i in range(KEPT + 2)), key=place)[:KEPT]
    assert asked == [kept]
    assert {r["response"]: r["answer"] for r in log["responses"]} == {"the log's": None, "log": None}
    assert [row["step"] for row in (log, *rows)] == [0, 0, 5]
    assert [(r["prompt_id"], r["response"]) for r in rows[1]["responses"]] == [(p, "5: 0") for p in kept]
    run.close()


def test_every_evaluation_is_there_and_three_stand_beside_each_other(run_folder: Path) -> None:
    run = load_run(run_folder)
    assert run.best_row is not None
    best = run.rows[run.best_row]["step"]
    steps = sorted({0, 20, best, 220})
    rewards = {step: None if step == 20 else 0.5 for step in steps}
    write(run_folder, {step: [answer("p", f"at {step}", rewards[step])] for step in steps})
    with (run_folder / "held_out.jsonl").open("a") as file:
        file.write('{"step": 2')  # torn
    shown = shown_of(run_folder)
    assert shown.steps == tuple(steps)
    assert json.loads(shown.data)["responses"] == [[[[f"at {step}"], rewards[step]] for step in steps]]
    assert [step for _, step in shown.columns] == sorted({0, best, 220})
    prompts: list[Any] = [5, None, {"a": 1}, [], [{"role": "user"}]]
    wrong = [answer("p", "x", 0.0) | {"prompt": prompt} for prompt in prompts]
    wrong += [answer("p", "x", reward) for reward in ("nan", "inf", 10**400)]
    for line in ("[]", *(json.dumps({"step": 0, "responses": [each]}) for each in wrong)):
        (run_folder / "held_out.jsonl").write_text(f"{line}\n")
        with pytest.raises(Refused, match=r"held_out\.jsonl:1: expected the responses"):
            SideBySide.of(run_folder, run.config)


def test_the_log_stands_beside_the_model(run_folder: Path) -> None:
    rows = [
        {"step": 0, "log": True, "responses": [answer("p", "the log's", 1.0)]},
        {"step": 0, "responses": [answer("p", "first", 0.0), answer("q", "a", None)]},
        {"step": 220, "responses": [answer("q", "b", None), answer("p", "last", 1.0)]},
    ]
    write_rows(run_folder / "held_out.jsonl", rows)
    shown = shown_of(run_folder)
    prompts = {p.prompt: p for p in shown.prompts}
    assert [p.prompt for p in shown.prompts] == sorted("pq", key=place)
    assert (prompts["p"].log, prompts["q"].log) == (Answer("the log's", 1.0), None)
    assert prompts["p"].responses == {0: Answer("first", 0.0), 220: Answer("last", 1.0)}
    assert prompts["q"].responses == {0: Answer("a"), 220: Answer("b")}
    assert shown.about.startswith("One response to each of 2 held-out prompts, chosen by a hash")


def test_two_prompts_of_one_text_stay_two(run_folder: Path) -> None:
    """As those of an environment with different secrets."""
    found = [answer("guess", str(i), 0, prompt_id=str(i)) for i in (1, 2)]
    write(run_folder, {220: found})
    assert {p.responses[220].response for p in shown_of(run_folder).prompts} == {"1", "2"}


def test_a_long_run_keeps_the_first_the_best_and_the_last(run_folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "TOTAL", 1000)
    write(run_folder, {step: [answer("p", "x" * 100, 0.5)] for step in range(0, 221, 5)})
    run, shown = load_run(run_folder), shown_of(run_folder)
    assert run.best_row is not None
    assert {0, run.rows[run.best_row]["step"], 220} <= set(shown.steps)
    assert len(shown.data) < 2000


def test_what_a_model_writes_never_ends_the_element_of_the_data(run_folder: Path) -> None:
    write(run_folder, {0: [answer("p", EVIL, 0.5)]})
    shown = shown_of(run_folder)
    assert "<" not in shown.data
    assert json.loads(shown.data)["responses"] == [[[[EVIL], 0.5]]]


def test_search_filter_steps_and_difference_in_a_browser(run_folder: Path, browser: Browser) -> None:
    tool = [{"role": "user", "content": "ask"}, {"role": "tool", "content": "a long result"}]
    said = {
        0: [("one", "the cat sat", 0.0), (tool, "no " + EVIL, 0.5), ("three", "same", 1.0)],
        100: [("one", "the dog sat", 0.2), (tool, "no " + EVIL, 0.5), ("three", "same", 1.0)],
        220: [("one", "the dog ran", 1.0), (tool, "yes " + EVIL, 0.0), ("three", "same", 1.0)],
    }
    write(run_folder, {step: [answer(*each) for each in found] for step, found in said.items()})
    browser.open(report(run_folder))
    visible = "[...document.querySelectorAll('article.sample:not([hidden])')].map(e => e.dataset.prompt)"
    put = "(() => {{ const e = document.querySelector('.toolbar [name={}]'); e.value = '{}'; "
    put += "e.dispatchEvent(new Event('input', {{bubbles: true}})); }})()"
    assert browser.ask("document.querySelector('.count').textContent") == "3 of 3 prompts"
    assert browser.ask("document.querySelector('article details').open") is False
    assert browser.ask("document.querySelector('.now del').textContent") == "cat"
    for kind, expected in (("better", ["one"]), ("worse", ["user: ask\ntool: a long result"])):
        browser.ask(put.format("kind", kind))
        assert browser.ask(visible) == expected
    browser.ask(put.format("kind", "all") + ";" + put.format("low", "0.9"))
    assert browser.ask(visible) == sorted(("one", "three"), key=place)
    press = "document.body.dispatchEvent(new KeyboardEvent('keydown', {{key: '{}', bubbles: true}}))"
    browser.ask(press.format("["))
    assert browser.ask(visible) == ["three"]
    browser.ask(put.format("low", "") + ";" + put.format("text", "DOG"))
    assert browser.ask(visible) == ["one"]
    now = "document.querySelector('article.sample:not([hidden]) .now {}').innerText"
    assert browser.ask(now.format(".aside")) == "step 100 · reward 0.2"
    assert browser.ask(now.format("pre")) == "the catdog sat"
    browser.ask(press.format("d") + ";" + press.format("j"))
    assert browser.ask(now.format("pre")) == "the dog sat"
    assert browser.ask("document.activeElement.dataset.prompt") == "one"
    assert browser.ask("typeof window.HIT") == "undefined"
    assert browser.complaints == browser.blocked == []


@pytest.fixture
def page_of_turns(run_folder: Path) -> Path:
    """Emoji count one character, in Python and in the browser."""
    evaluations = {}
    for step, parts in ((0, ["look 🙂", " a <wall> ", "go up"]), (220, ["look 🙂", " a hole ", "go in"])):
        places = [[6, 6 + len(parts[1])]]
        evaluations[step] = [answer("p", "".join(parts), 0.5, observations=places)]
    write(run_folder, evaluations)
    return report(run_folder)


def test_an_environments_turns_are_folded(page_of_turns: Path) -> None:
    plain = re.sub(r">\s+<", "><", page_of_turns.read_text())
    folded = "<details><summary>environment</summary><pre> a &lt;wall&gt; </pre></details>"
    assert f"<pre>look 🙂</pre>{folded}" in plain


def test_an_environments_turns_are_folded_by_the_script(page_of_turns: Path, browser: Browser) -> None:
    """Each turn of the policy is compared to the start's."""
    browser.open(page_of_turns)
    assert browser.ask("document.querySelector('.now details').open") is False
    assert browser.ask("document.querySelector('.now details pre').textContent") == " a hole "
    assert browser.ask("document.querySelector('.now del').textContent") == "up"
    assert browser.ask("document.querySelectorAll('.now del').length") == 1
    assert browser.complaints == browser.blocked == []
