"""What a run keeps of its held-out prompts, and two results compared on them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import InterruptAfter, metrics, tiny, write_prompts
from typer.testing import CliRunner

from agro.cli import app
from agro.errors import Interrupted, Refused
from agro.logs.results import Result
from agro.pages.run.compare import compare, notes, page
from agro.pages.run.paired_results import PairedResults
from agro.runs.rundata import FILE, HeldOutRewards
from agro.train.trainer import BaseTrainer


def config(folder: Path, **changes: Any) -> Any:
    folder.mkdir(exist_ok=True)
    held = write_prompts(folder / "held.jsonl", range(60, 100))
    return tiny(folder, data__eval_prompts=held, evaluate__every=3, **changes)


def written(path: Path, rewards: Mapping[str, Any], prompt: str = "") -> Path:
    """A file as `agro eval --out` writes it."""
    records = [
        {"prompt_id": key, "prompt": prompt or key, "rewards": values} for key, values in rewards.items()
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def kept(run: Path) -> Any:
    return json.loads((run / FILE).read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of one reward on the same held-out prompts."""
    folder = tmp_path_factory.mktemp("runs")
    for name, changes in (("a", {}), ("b", {"objective__beta": 0.5})):
        BaseTrainer(config(folder, **changes), folder / name).run()
    return [folder / "a", folder / "b"]


def test_a_run_keeps_the_rewards_of_its_start_and_of_its_latest_evaluation(runs: list[Path]) -> None:
    found, rows = kept(runs[0]), {row["step"]: row for row in metrics(runs[0])}
    assert found["step"] == 6
    assert len(found["texts"]) == 40
    for name, step in (("start", 0), ("rewards", 6)):
        assert sum(found[name].values()) / 40 == pytest.approx(rows[step]["eval_reward"])


def test_a_resumed_run_takes_back_the_rewards_of_a_lost_step(runs: list[Path], tmp_path: Path) -> None:
    """The file is of step 6 where the checkpoint is of step 4, whose latest evaluation was at step 3."""
    plain, folder = kept(runs[0]), tmp_path / "run"
    with pytest.raises(Interrupted):
        BaseTrainer(config(tmp_path), folder, monitors=[InterruptAfter(4)]).run()
    before = kept(folder)
    assert (before["step"], before["start"]) == (3, plain["start"])
    (folder / FILE).write_text(json.dumps({**before, "step": 6, "rewards": plain["rewards"]}))
    with pytest.raises(Refused, match=r"up to step 4 of the run, got step 6"):
        compare_with(folder, runs[0])
    with pytest.raises(Interrupted):
        BaseTrainer(config(tmp_path), folder, resume=True, monitors=[InterruptAfter(5)]).run()
    assert kept(folder) == before
    BaseTrainer(config(tmp_path), folder, resume=True).run()
    assert kept(folder) == plain


@pytest.mark.parametrize(
    "change",
    [{"step": True}, {"step": "3"}, {"rewards": {"a": "0.5"}}, {"rewards": {"a": True}}, {"x": 1}],
)
def test_what_no_run_writes_is_refused(change: dict[str, Any]) -> None:
    values = {"step": 3, "rewards": {"a": 1.0}, "start": {"a": None}, "texts": {"a": "b"}}
    assert HeldOutRewards.of(values, "file").rewards == {"a": 1.0}
    with pytest.raises(Refused, match="file: expected rewards of held-out prompts"):
        HeldOutRewards.of({**values, **change}, "file")


def compare_with(a: Path, b: Path) -> PairedResults:
    from agro.runs.rundata import load_run

    return PairedResults.of(Result.of_run(load_run(a)), Result.of_run(load_run(b)))


def test_two_runs_are_compared_prompt_by_prompt(runs: list[Path], tmp_path: Path) -> None:
    ends = [metrics(run)[-1]["eval_reward"] for run in runs]
    arguments = ["compare", *map(str, runs), "--out", str(tmp_path)]
    document = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    [row], [found] = document["sets"], document["matching"]
    assert row["difference"] == pytest.approx(ends[1] - ends[0])
    assert (row["n"], found["a"]["step"], found["a"]["name"]) == (40, 6, str(runs[0]))
    assert row["low"] <= row["difference"] <= row["high"]
    assert row["verdict"] in ("better", "worse", "not shown")
    assert len(document["lines"]) == 2
    shown = " ".join(CliRunner().invoke(app, arguments, env={"COLUMNS": "1000"}).stdout.split())
    text = " ".join(re.sub(r"<[^>]+>", " ", (tmp_path / "compare.html").read_text()).split())
    for place in (shown, text):
        assert f"{runs[1]} at step 6 against {runs[0]} at step 6: {found['sentence']}" in place
        assert "Matched: 40 prompts." in place
        assert re.search("show (a difference of )?[0-9.]+ or more four times out of five", place)


def test_without_rewards_by_prompt_or_with_two_rewards_it_says_why_not(
    runs: list[Path], tmp_path: Path
) -> None:
    copies = []
    for run in runs:
        copy = tmp_path / run.name
        copy.mkdir()
        for name in ("config.json", "metrics.jsonl", FILE):
            (copy / name).write_bytes((run / name).read_bytes())
        copies.append(copy)
    values = json.loads((copies[1] / "config.json").read_text())
    values["inputs"]["reward.name"] = "another"
    (copies[1] / "config.json").write_text(json.dumps(values))
    [said] = [text for text in notes(compare(copies)) if "No verdict" in text]
    assert "expected the same reward and environment" in said
    (copies[0] / FILE).unlink()
    found = compare(copies)
    [said] = [text for text in notes(found) if "No verdict" in text]
    assert f"{copies[0]}: expected held-out rewards by prompt; this run has no {FILE}" in said
    assert found.paired is None
    assert "Prompt by prompt" not in page(found)


def test_prompts_of_one_side_are_counted_and_said(tmp_path: Path) -> None:
    """8 gains and no loss: p = 2/2⁸, whatever the unknown reward of u is. Half of one side's: no p."""
    shared = [f"p{i}" for i in range(8)]
    a = written(tmp_path / "a.jsonl", {key: [0, 0] for key in [*shared, "x", "y", "u"]})
    b = written(tmp_path / "b.jsonl", {**{key: [1, 1] for key in shared}, "z": [1], "u": [None]})
    half = written(tmp_path / "half.jsonl", {**{key: [1, None] for key in shared}, "u": [None]})
    missing = PairedResults.of(Result.of_file(a), Result.of_file(half))
    assert (missing.row()["p"], missing.row()["verdict"]) == (None, "not shown")
    assert (missing.comparison.unknown_a, missing.comparison.unknown_b) == (0, 5 / 9)
    paired = PairedResults.of(Result.of_file(a), Result.of_file(b))
    assert (paired.comparison.n, paired.comparison.p, paired.verdict.answer) == (8, 2 / 2**8, "better")
    assert PairedResults.of(paired.b, paired.a).verdict.answer == "worse"
    said = " ".join(paired.notes)
    assert f"2 prompts only in {a} (x, y)" in said
    assert f"1 prompts only in {b} (z)" in said
    assert "1 prompts without a score on one side (u)" in said
    result = CliRunner().invoke(app, ["compare", str(a), str(b), "--out", str(tmp_path / "out"), "--json"])
    document = json.loads(result.stdout)
    assert document["matching"][0]["only_a"] == ["x", "y"]
    assert document["files"] == [str(tmp_path / "out" / "compare.html")]
    assert "2 prompts only in" in (tmp_path / "out" / "compare.html").read_text()


def test_a_run_against_a_file_of_agro_eval(runs: list[Path], tmp_path: Path) -> None:
    texts = [json.loads(line)["prompt"] for line in (runs[0].parent / "held.jsonl").read_text().splitlines()]
    rewards = dict(zip(kept(runs[0])["rewards"], texts, strict=True))
    records = [{"prompt_id": key, "prompt": text, "rewards": [9]} for key, text in rewards.items()]
    file = tmp_path / "eval.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = CliRunner().invoke(app, ["compare", str(runs[0]), str(file), "--out", str(tmp_path), "--json"])
    document = json.loads(result.stdout)
    [row], [found] = document["sets"], document["matching"]
    assert (row["verdict"], row["n"], found["b"]["step"], row["b"]) == ("better", 40, None, 9)
    assert any("the reward isn't recorded there" in note for note in found["notes"])


def test_what_can_not_be_compared_is_refused(tmp_path: Path) -> None:
    a = written(tmp_path / "a.jsonl", {"p": [1], "q": [0]})
    for other, message in (
        (written(tmp_path / "b.jsonl", {"r": [1]}), "prompts that both answered, got none"),
        (written(tmp_path / "c.jsonl", {"p": [1]}, prompt="else"), "p names another one in each"),
        (written(tmp_path / "d.jsonl", {"p": [True]}), r"d.jsonl:1: rewards: expected a number or null"),
        (written(tmp_path / "e.jsonl", {"p": 1}), r"e.jsonl:1: expected prompt_id, prompt and rewards"),
    ):
        with pytest.raises(Refused, match=message):
            PairedResults.of(Result.of_file(a), Result.of_file(other))
    a.write_text(a.read_text() * 2)
    with pytest.raises(Refused, match=r"a.jsonl:3: expected each prompt once"):
        Result.of_file(a)
    refused = CliRunner().invoke(app, ["compare", str(a)])
    assert (refused.exit_code, "expected two results or more" in refused.stderr) == (2, True)
