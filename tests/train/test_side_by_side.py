"""What a run keeps to be read: responses of log, start and trained model to the same few prompts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import fill_store, interrupted, tiny, write_prompts
from typer.testing import CliRunner

from agro.api.reporting_trainer import Trainer
from agro.cli import app
from agro.errors import Refused
from agro.pages.run.card import card
from agro.pages.run.page import page
from agro.runs.rundata import load_run
from agro.runs.side_by_side import (
    FILE,
    LONGEST,
    Answer,
    Row,
    SideBySide,
    answers_of,
    place,
    response_parts,
    short_text,
)
from agro.store import Pair, Store, is_held_out
from agro.train.monitors.heldout import best_of_log
from agro.train.trainer import BaseTrainer
from agro.types import Prompt, Sample


def on_a_log(folder: Path, **changes: Any) -> Any:
    folder.mkdir(exist_ok=True)
    if not (folder / "log.db").exists():
        fill_store(folder / "log.db", groups=60)
    log = {"store": str(folder / "log.db"), "replay": 1.0, "group_size": 4, "hold_out": 0.3}
    return tiny(folder, data=log, **{"train__steps": 4, **changes})


@pytest.fixture(scope="module")
def log_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    Trainer(on_a_log(folder), folder / "run").run()
    return folder / "run"


def test_eight_held_out_prompts_by_a_hash_with_the_best_of_the_log(log_run: Path) -> None:
    shown = SideBySide.load(log_run)
    with Store.open(log_run.parent / "log.db", read_only=True) as store:
        held_out = sorted({s.prompt_id for s in store.samples() if is_held_out(s.prompt_id, 0.3)}, key=place)
    assert [row.prompt_id for row in shown.rows] == held_out[:8]
    assert (shown.held_out, shown.step, shown.sides) == (True, 4, ("log", "start", "trained"))
    assert [row.log for row in shown.rows] == [Answer("11", 1.0)] * 8  # the first of reward 1 in fill_store
    assert all(row.start and row.start.reward is None for row in shown.rows)
    assert [row.start for row in shown.rows] != [row.trained for row in shown.rows]


def test_it_is_on_the_page_in_the_card_on_the_terminal_and_in_json(log_run: Path) -> None:
    shown, run = SideBySide.load(log_run), load_run(log_run)
    text = " ".join(re.sub(r"<[^>]+>", " ", page(run)).replace("&gt;", ">").split())
    written = str(card(run, log_run / "model"))
    assert shown.about in written
    assert shown.about in text.replace("&#39;", "'")
    for row in shown.rows[:4]:
        assert f"prompt: `{row.prompt}`" in written
        assert row.trained.response in written
    result = CliRunner().invoke(app, ["report", str(log_run), "--json"])
    assert json.loads(result.stdout)["side_by_side"] == json.loads(json.dumps(shown.to_json()))
    [prompt, log, *_] = short_text(shown, 1, 80)
    assert (prompt, log) == (f"prompt   {shown.rows[0].prompt}", "log      1: 11")


def test_with_a_reward_its_values_stand_beside_the_prompts_of_the_evaluation(
    tmp_path: Path,
) -> None:
    held = write_prompts(tmp_path / "held.jsonl", range(60, 100))
    BaseTrainer(tiny(tmp_path, data__eval_prompts=held, train__steps=2), tmp_path / "run").run()
    shown = SideBySide.load(tmp_path / "run")
    rewards = json.loads((tmp_path / "run" / "held_out_rewards.json").read_text())
    assert shown.sides == ("start", "trained")
    for row in shown.rows:
        assert row.start.reward == rewards["start"][row.prompt_id]
        assert row.trained.reward == rewards["rewards"][row.prompt_id]


def test_without_held_out_prompts_it_says_that_they_were_trained_on(tmp_path: Path) -> None:
    fill_store(tmp_path / "log.db")
    log = {"store": str(tmp_path / "log.db"), "replay": 1.0}
    BaseTrainer(tiny(tmp_path, data=log, train__steps=1), tmp_path / "run").run()
    assert "prompts of those that were trained on" in SideBySide.load(tmp_path / "run").about
    BaseTrainer(tiny(tmp_path, train__steps=1), tmp_path / "fresh").run()
    assert SideBySide.load(tmp_path / "fresh") is None  # the page has its own responses
    BaseTrainer(tiny(tmp_path, data=log, train__steps=1, evaluate__side_by_side=0), tmp_path / "none").run()
    assert SideBySide.load(tmp_path / "none") is None


def test_a_resumed_run_keeps_the_start_and_forgets_a_lost_step(tmp_path: Path, log_run: Path) -> None:
    folder = tmp_path / "run"
    interrupted(on_a_log(tmp_path), folder, 3)
    before = SideBySide.load(folder)
    assert before.step is None
    before.answered({row.prompt_id: Answer("lost") for row in before.rows}, 4).save(folder)
    BaseTrainer(on_a_log(tmp_path), folder, resume=True).run()
    assert SideBySide.load(folder) == SideBySide.load(log_run)


def test_of_a_log_of_pairs_the_preferred_response_is_the_best(tmp_path: Path) -> None:
    with Store.open(tmp_path / "log.db") as store:
        first, second, third = store.append(Sample("p", text, prompt_id="p") for text in ("a", "b", "c"))
        store.add_pairs([Pair(second, first), Pair(second, third), Pair(third, first)])
        store.append([Sample("p", "own", reward=9.0, prompt_id="p")], run="this")
        assert best_of_log(store, "this", ["p", "q"]) == {"p": Answer("b")}
        assert best_of_log(store, "another", ["p"]) == {"p": Answer("own", 9.0)}


def test_an_episode_is_all_that_follows_its_prompt() -> None:
    parts = [Sample("p", text, reward=1.0, meta={"index": i}) for i, text in ((1, "no"), (0, "a"), (0, "b"))]
    assert answers_of(parts) == {parts[0].prompt_id: Answer("ab", 1.0)}


def test_an_environments_turns_keep_their_places_as_control_characters_become_escapes() -> None:
    samples = [
        Sample("p", "a\x07see b", reward=1.0, meta={"observations": [[2, 5]]}),
        Sample("p", "\x07c", reward=2.0, meta={"observations": [[0, 1]]}),
        Sample("p", "x" * LONGEST + "y", reward=3.0, meta={"observations": [[1, LONGEST + 1]]}),
    ]
    parts = Answer.of(samples).parts
    assert (parts[:5], parts[6]) == (["a\\x07", "see", " b", "\\x07", "cx"], " … 10 more characters")
    assert response_parts("abc", [[1, 2]]) == ["a", "b", "c"]
    for foreign in (None, 3, "text", [[2, 1]], [[1]], [["a", "b"]], [[-1, 2]]):
        assert response_parts("abc", foreign) == ["abc"]


def test_texts_are_harmless_and_bounded(tmp_path: Path) -> None:
    nasty = "\x1b[2J<script>`|" + "x" * 9000
    prompt = Prompt("p\x07")
    started = SideBySide.start([prompt], {}, held_out=True)
    shown = started.answered({prompt.id: Answer.of([Sample("p", nasty)])}, 0)
    shown.save(tmp_path)
    [row] = SideBySide.load(tmp_path).rows
    assert row.prompt == "p\\x07"
    assert row.start.response.startswith("\\x1b[2J<script>")
    assert len(row.start.response) < LONGEST + 40
    assert SideBySide.load(tmp_path) == shown
    values = shown.to_json()
    values["rows"][0]["start"]["response"] = "\x1b[2J"  # somebody changed the file
    (tmp_path / FILE).write_text(json.dumps(values))
    assert SideBySide.load(tmp_path).rows[0].start == Answer("\\x1b[2J")
    for broken in ("[]", '{"rows": 1, "held_out": true, "step": null}', '{"rows": [], "held_out": 1}'):
        (tmp_path / FILE).write_text(broken)
        with pytest.raises(Refused, match=r"side_by_side\.json: expected responses side by side"):
            SideBySide.load(tmp_path)


def test_the_page_escapes_what_a_model_wrote(log_run: Path, tmp_path: Path) -> None:
    for name in ("config.json", "metrics.jsonl"):
        shutil.copy(log_run / name, tmp_path)
    row = Row("i", "<b>p</b>", None, Answer("<script>alert(1)</script>"), Answer("`x` | y"))
    SideBySide((row,), True, 4).save(tmp_path)
    assert "<script>alert" not in page(load_run(tmp_path))
    assert "``x` | y``" in str(card(load_run(tmp_path), tmp_path)).replace("`` ", "``").replace(" ``", "``")
