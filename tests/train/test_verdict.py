"""What a run says at its end, did the model get better, and two results compared on its held-out prompts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from running import done, report_of
from tiny_runs import (
    InterruptAfter,
    by_someone,
    interrupted,
    log_alone,
    metrics,
    run_tiny,
    tiny,
    whole_and_resumed,
    write_prompts,
)

from agro.config import RunConfig
from agro.errors import Interrupted, Refused
from agro.logs.results import Result
from agro.pages.run.compare import PairedResults, compare, notes, page, to_json
from agro.pages.run.ratings import Ratings
from agro.pages.run.verdict import Verdict
from agro.runs.rundata import FILE, HeldOutRewards, load_run
from agro.store import Store
from agro.train.trainer import BaseTrainer

CHANGED = "Not shown better: the mean reward changed by"
GAIN = ("eval_gain", "eval_gain_low", "eval_gain_high", "eval_gain_p", "eval_gain_n", "eval_gain_detectable")


def config(folder: Path, **changes: Any) -> Any:
    held = write_prompts(folder / "held.jsonl", range(60, 100))
    return tiny(folder, data__eval_prompts=held, evaluate__every=3, **changes)


def changed_rows(run: Path, every: dict[str, Any] | None = None, **last: Any) -> Path:
    """The run with other measurements in every row, and in its last."""
    rows = [row | (every or {}) for row in metrics(run)]
    rows[-1] |= last
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of one reward on the same held-out prompts."""
    folder = tmp_path_factory.mktemp("runs")
    for name, changes in (("a", {}), ("b", {"objective__beta": 0.5})):
        BaseTrainer(config(folder, **changes), folder / name).run()
    return [folder / "a", folder / "b"]


@pytest.fixture(scope="module")
def run(runs: list[Path]) -> Path:
    return runs[0]


def copy_of(run: Path, folder: Path, *more: str) -> Path:
    folder.mkdir()
    for name in ("config.json", "metrics.jsonl", *more):
        shutil.copy(run / name, folder)
    return folder


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """What the verdict on that run is read from, to be changed."""
    return copy_of(run, tmp_path / "run")


def test_each_evaluation_is_compared_with_the_start(run: Path) -> None:
    rows = {row["step"]: row for row in metrics(run)}
    assert {rows[step][name] for step in (0, 2) for name in GAIN} == {None}
    for step in (3, 6):
        assert rows[step]["eval_gain"] == pytest.approx(rows[step]["eval_reward"] - rows[0]["eval_reward"])
        assert rows[step]["eval_gain_n"] == 40
        assert rows[step]["eval_gain_low"] <= rows[step]["eval_gain"] <= rows[step]["eval_gain_high"]


@pytest.mark.parametrize(
    ("interval", "p", "answer", "beginning"),
    [
        ((0.08, 0.12, 0.16), 0.0004, "better", "Better by 0.120 (0.080 to 0.160) in mean reward on 512 "),
        ((-0.16, -0.12, -0.08), 0.02, "worse", "Worse by 0.120 (0.080 to 0.160) in mean reward on 512 "),
        ((-0.03, 0.01, 0.05), 0.6, "not shown", f"{CHANGED} 0.010 (-0.030"),
        ((0.008, 0.094, 0.18), 0.053, "not shown", f"{CHANGED} 0.094 (0.008 to 0.180, p = .053) on 512 "),
        ((-0.03, 0.3, 0.05), None, "not shown", "Not shown better"),
    ],
)
def test_the_sentence(copied, interval, p, answer, beginning) -> None:
    Ratings(0, 40, 0, 0, step=6).save(copied)  # rewards say more than ratings
    low, gain, high = interval
    values = dict(zip(GAIN, (gain, low, high, p, 512, 0.055), strict=True))
    verdict = Verdict.of(load_run(changed_rows(copied, **values, eval_kl_ref=1.3)))
    assert verdict.answer == answer
    assert verdict.sentence.startswith(beginning)
    assert "KL to the reference 1.300 nats per response" in verdict.sentence


def test_a_log_with_log_probs_is_estimated_off_policy(tmp_path: Path) -> None:
    """Of a run's own fresh samples, of its start, since it didn't move: so their weights are 1. The run on
    them trains on, so the estimate is another, and where it is resumed it has the same start."""
    author = run_tiny(tmp_path, "author", train__groups=60, train__steps=1, train__lr=1e-9, sampler__n=4)

    def logged(folder: Path) -> RunConfig:
        with Store.open(author / "store.db", read_only=True) as own:
            data = log_alone(folder, [s.replace(id=None) for s in own.samples()], hold_out=0.5)
        return tiny(folder, data=data, train__steps=4, evaluate__every=2)

    run, resumed = whole_and_resumed(logged, tmp_path, 3)
    start, *_, end = metrics(run)
    assert metrics(resumed)[-1]["eval_logged_gain"] == pytest.approx(end["eval_logged_gain"])
    assert start["eval_logged_gain_ess"] is None
    assert end["eval_logged_gain_ess"] > 30
    assert end["eval_logged_gain_weight"] == pytest.approx(1, abs=0.3)
    assert end["eval_logged_gain_low"] < end["eval_logged_gain"] < end["eval_logged_gain_high"]
    verdict = Verdict.of(load_run(run))
    assert verdict.answer in ("better", "not shown", "worse")
    assert "This is an off-policy estimate from responses of the log" in verdict.sentence
    found = verdict.to_json()
    assert (found["by"], found["gain"]) == ("off-policy", end["eval_logged_gain"])
    Ratings(9, 0, 0, 0).save(run)  # of the model's own responses: these say more
    assert Verdict.of(load_run(run)).to_json()["by"] == "ratings"


def test_too_few_effective_responses_leave_it_unmeasured(copied: Path) -> None:
    ranked = dict.fromkeys(GAIN) | {"eval_auc": 0.9}
    few = {"eval_logged_gain_ess": 12.3, "eval_logged_gain_weight": 0.004}
    verdict = Verdict.of(load_run(changed_rows(copied, ranked, **few)))
    assert verdict.answer == "not measured"
    assert "12 of its responses count, and their mean weight is 0.004" in verdict.sentence


def test_a_judge_of_the_user_s_judges_a_run_on_ratings(tmp_path: Path) -> None:
    """Ratings are trained on; the reward, any function, is of responses to held-out prompts alone."""
    judge = tmp_path / "judge.py"
    judge.write_text("def longer(prompts, completions, **_):\n    return [len(c) / 3 for c in completions]\n")
    held = write_prompts(tmp_path / "held.jsonl", range(60, 90))
    log = log_alone(tmp_path, by_someone(groups=20), group_size=4, eval_prompts=held)
    run = run_tiny(tmp_path, data=log, reward__name=f"{judge}:longer", train__steps=2)
    found = Verdict.of(load_run(run)).to_json()
    assert (found["by"], found["n"]) == ("reward", 30)
    assert metrics(run)[-1]["rewards_failed"] in (0, None)


def test_a_gain_and_a_kl_of_two_zero_points_name_both(copied: Path) -> None:
    """The gain is against the run's start, which has random weights; the KL against that of the phase."""
    stored = json.loads((copied / "config.json").read_text())
    for reference, expected in (
        ("start", "; KL to the reference 1.300 nats per response"),
        ("ema", " (against random weights); KL to a moving reference 1.300 nats per response"),
        ("model", " (against random weights); KL to the reference model 1.300 nats per response"),
    ):
        more = {"ema": {"reference_decay": 0.9}, "model": {"reference_model": "m"}}.get(reference, {})
        values = stored | {"policy": stored["policy"] | {"reference": reference} | more}
        (copied / "config.json").write_text(json.dumps(values))
        assert expected in Verdict.of(load_run(changed_rows(copied, eval_kl_ref=1.3))).sentence


def test_rewards_that_are_missing_on_one_side_show_nothing(copied: Path) -> None:
    values = dict(zip(GAIN, (0.2, -0.1, 0.4, None, 300, 0.05), strict=True))
    unknown = {"eval_gain_unknown_a": 0.0, "eval_gain_unknown_b": 0.42}
    verdict = Verdict.of(load_run(changed_rows(copied, **values, **unknown)))
    assert verdict.answer == "not shown"
    assert "unknown are 0% of the rewards before and 42% after, which differ" in verdict.sentence


def test_a_reward_that_leaves_wrong_answers_of_the_result_unscored_is_counted(tmp_path: Path) -> None:
    """It is unknown of most responses; both sides' shares are in the run's rows, and in the rewards by prompt
    that agro compare reads."""
    code = tmp_path / "reward.py"
    code.write_text(
        "from zlib import crc32\n"
        "def score(prompts, completions, **columns):\n"
        "    return [None if crc32(c.encode()) % 3 else float(len(c) > 1) for c in completions]\n"
    )
    made = config(tmp_path, reward={"name": f"{code}:score", "max_failed": 1.0})
    first, *_, row = metrics(BaseTrainer(made, tmp_path / "run").run())
    responses = row["eval_n"] + row["eval_unscored"]
    assert row["eval_gain_unknown_b"] == pytest.approx(row["eval_unscored"] / responses)
    assert row["eval_gain_unknown_a"] == pytest.approx(first["eval_unscored"] / responses)
    assert row["eval_unscored"] > 0
    unscored = kept(tmp_path / "run")["unscored"]
    assert sum(latest for _, latest in unscored.values()) / 40 == pytest.approx(row["eval_gain_unknown_b"])
    assert row["eval_gain_low"] <= 0 <= row["eval_gain_high"]


def written(path: Path, rewards: dict[str, Any], prompts: dict[str, str] | None = None) -> Path:
    """A file as `agro eval --out` writes it; `prompts`: by id, where it isn't their text."""
    texts = prompts or {key: key for key in rewards}
    records = [{"prompt_id": key, "prompt": texts[key], "rewards": each} for key, each in rewards.items()]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def kept(run: Path) -> Any:
    return json.loads((run / FILE).read_text())


def test_a_run_keeps_the_rewards_of_its_start_and_of_its_latest_evaluation(runs: list[Path]) -> None:
    found, rows = kept(runs[0]), {row["step"]: row for row in metrics(runs[0])}
    assert found["step"] == 6
    assert len(found["texts"]) == 40
    for name, step in (("start", 0), ("rewards", 6)):
        assert sum(found[name].values()) / 40 == pytest.approx(rows[step]["eval_reward"])


def test_a_resumed_run_takes_back_the_rewards_of_a_lost_step(runs: list[Path], tmp_path: Path) -> None:
    """The file is of step 6 where the checkpoint is of step 4, whose latest evaluation was at step 3. At its
    end it is compared with the same start."""
    plain, folder = kept(runs[0]), tmp_path / "run"
    interrupted(config(tmp_path), folder, 4)
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
    ends = [metrics(run)[-1] for run in (folder, runs[0])]
    assert [ends[0][name] for name in GAIN] == [ends[1][name] for name in GAIN]


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
    return PairedResults.of(Result.of_run(load_run(a)), Result.of_run(load_run(b)))


def test_two_runs_are_compared_prompt_by_prompt(runs: list[Path], tmp_path: Path) -> None:
    ends = [metrics(run)[-1]["eval_reward"] for run in runs]
    arguments = ["compare", *runs, "--out", tmp_path]
    document = report_of(*arguments)
    [row], [found] = document["sets"], document["matching"]
    assert row["difference"] == pytest.approx(ends[1] - ends[0])
    assert (row["n"], found["a"]["step"], found["a"]["name"]) == (40, 6, str(runs[0]))
    assert row["low"] <= row["difference"] <= row["high"]
    assert row["verdict"] in ("better", "worse", "not shown")
    assert len(document["lines"]) == 2
    shown = " ".join(done(*arguments, COLUMNS="1000").stdout.split())
    text = " ".join(re.sub(r"<[^>]+>", " ", (tmp_path / "compare.html").read_text()).split())
    for place in (shown, text):
        assert f"{runs[1]} at step 6 against {runs[0]} at step 6: {found['sentence']}" in place
        assert "Matched: 40 prompts." in place
        assert re.search("show (a difference of )?[0-9.]+ or more four times out of five", place)


def test_without_rewards_by_prompt_or_with_two_rewards_it_says_why_not(runs, tmp_path: Path) -> None:
    copies = [copy_of(run, tmp_path / run.name, FILE) for run in runs]
    values = json.loads((copies[1] / "config.json").read_text())
    values["inputs"]["reward.name"] = "another"
    (copies[1] / "config.json").write_text(json.dumps(values))
    [said] = [text for text in notes(compare(copies)) if "No verdict" in text]
    assert "expected the same reward and environment" in said
    (copies[0] / FILE).unlink()
    found = compare(copies)
    [said] = [text for text in notes(found) if "No verdict" in text]
    assert f"{copies[0]}: expected a run with held-out rewards ({FILE})" in said
    assert found.paired is None
    assert "Prompt by prompt" not in page(found, to_json(found))


def test_unknown_rewards_of_one_side_may_leave_p_unknown(tmp_path: Path) -> None:
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
    files = report_of("compare", a, b, "--out", tmp_path)["files"]
    assert files == [str(tmp_path / "compare.html")]
    assert "2 prompts only in" in (tmp_path / "compare.html").read_text()


def test_a_run_against_a_file_of_agro_eval(runs: list[Path], tmp_path: Path) -> None:
    texts = [json.loads(line)["prompt"] for line in (runs[0].parent / "held.jsonl").read_text().splitlines()]
    prompts = dict(zip(kept(runs[0])["rewards"], texts, strict=True))
    file = written(tmp_path / "eval.jsonl", {key: [9] for key in prompts}, prompts)
    document = report_of("compare", runs[0], file, "--out", tmp_path)
    [row], [found] = document["sets"], document["matching"]
    assert (row["verdict"], row["n"], found["b"]["step"], row["b"]) == ("better", 40, None, 9)
    assert any("the reward isn't recorded there" in note for note in found["notes"])


def test_what_can_not_be_compared_is_refused(tmp_path: Path) -> None:
    a = written(tmp_path / "a.jsonl", {"p": [1], "q": [0]})
    for other, message in (
        (written(tmp_path / "b.jsonl", {"r": [1]}), "prompts that both answered, got none"),
        (written(tmp_path / "c.jsonl", {"p": [1]}, {"p": "else"}), "p names different prompts"),
        (written(tmp_path / "d.jsonl", {"p": [True]}), r"d.jsonl:1: rewards: expected a number or null"),
        (written(tmp_path / "e.jsonl", {"p": 1}), r"e.jsonl:1: expected prompt_id, prompt and rewards"),
    ):
        with pytest.raises(Refused, match=message):
            PairedResults.of(Result.of_file(a), Result.of_file(other))
    a.write_text(a.read_text() * 2)
    with pytest.raises(Refused, match=r"a.jsonl:3: expected each prompt once"):
        Result.of_file(a)
