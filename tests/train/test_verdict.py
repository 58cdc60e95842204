"""What a run says at its end: did the model get better?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import InterruptAfter, fill_store, metrics, tiny, write_prompts

from agro.errors import Interrupted
from agro.runs.ratings import Ratings
from agro.runs.rundata import load_run
from agro.runs.verdict import Verdict
from agro.train.trainer import BaseTrainer

GAIN = ("eval_gain", "eval_gain_low", "eval_gain_high", "eval_gain_p", "eval_gain_n", "eval_gain_detectable")


def config(folder: Path, **changes: Any) -> Any:
    held = write_prompts(folder / "held.jsonl", range(60, 100))
    return tiny(folder, data__eval_prompts=held, evaluate__every=3, **changes)


def changed_rows(run: Path, **values: Any) -> Path:
    """The run with other measurements in its last row."""
    rows = metrics(run)
    rows[-1] |= values
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verdict")
    BaseTrainer(config(folder), folder / "run").run()
    return folder / "run"


def test_each_evaluation_is_compared_with_the_start(run: Path) -> None:
    rows = {row["step"]: row for row in metrics(run)}
    assert all(rows[0][name] is None for name in GAIN)
    assert all(rows[2][name] is None for name in GAIN)
    for step in (3, 6):
        assert rows[step]["eval_gain"] == pytest.approx(rows[step]["eval_reward"] - rows[0]["eval_reward"])
        assert rows[step]["eval_gain_n"] == 40
        assert rows[step]["eval_gain_low"] <= rows[step]["eval_gain"] <= rows[step]["eval_gain_high"]


def test_a_resumed_run_compares_with_the_same_start(tmp_path: Path, run: Path) -> None:
    with pytest.raises(Interrupted):
        BaseTrainer(config(tmp_path), tmp_path / "run", monitors=[InterruptAfter(4)]).run()
    BaseTrainer(config(tmp_path), tmp_path / "run", resume=True).run()
    plain, resumed = (metrics(folder)[-1] for folder in (run, tmp_path / "run"))
    assert [plain[name] for name in GAIN] == [resumed[name] for name in GAIN]
    assert plain["eval_gain"] is not None


@pytest.mark.parametrize(
    ("interval", "p", "answer", "beginning"),
    [
        ((0.08, 0.12, 0.16), 0.0004, "better", "Better by 0.120 (0.080 to 0.160) in mean reward on 512 "),
        ((-0.16, -0.12, -0.08), 0.02, "worse", "Worse by 0.120 (0.080 to 0.160) in mean reward on 512 "),
        (
            (-0.03, 0.01, 0.05),
            0.6,
            "not shown",
            "Not shown better: the mean reward changed by 0.010 (-0.030",
        ),
        ((-0.03, 0.3, 0.05), None, "not shown", "Not shown better"),
    ],
)
def test_the_sentence(
    run: Path, tmp_path: Path, interval: tuple[float, ...], p: float | None, answer: str, beginning: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("config.json", "metrics.jsonl"):
        (folder / name).write_bytes((run / name).read_bytes())
    Ratings(0, 40, 0, 0, step=6).save(folder)  # rewards say more than ratings
    low, gain, high = interval
    values = dict(zip(GAIN, (gain, low, high, p, 512, 0.055), strict=True))
    verdict = Verdict.of(load_run(changed_rows(folder, **values, eval_kl_ref=1.3)))
    assert verdict.answer == answer
    assert verdict.sentence.startswith(beginning)
    assert "KL to the reference 1.300 nats" in verdict.sentence


def test_a_log_without_a_reward_function_says_that_nothing_was_measured_but_ranking(tmp_path: Path) -> None:
    fill_store(tmp_path / "log.db", groups=20)
    log = {"store": str(tmp_path / "log.db"), "replay": 1.0, "group_size": 4, "hold_out": 0.3}
    BaseTrainer(tiny(tmp_path, data=log, train__steps=2), tmp_path / "run").run()
    verdict = Verdict.of(load_run(tmp_path / "run"))
    assert verdict.answer == "not measured"
    assert "AUC" in verdict.sentence
    assert "says nothing about what it writes" in verdict.sentence
