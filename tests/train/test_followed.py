"""Runs that follow what is measured on held-out prompts: the best model, early ends, a baseline that is
lowered by it, and what is refused.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import fill_store, interrupted, metrics, run_tiny, tiny, weights, write_prompts

from agro import objectives
from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.errors import Refused
from agro.runs.rundata import Outcome, load_run
from agro.store import Store
from agro.train.monitors.guard import Best
from agro.train.monitors.heldout import HeldOutLog
from agro.types import Batch, Sample


def on_a_log(folder: Path, **changes: Any) -> RunConfig:
    """Twelve stored groups, of which some are held out; no prompts and no reward function are used."""
    store = folder / "log.db"
    if not store.exists():
        fill_store(store, groups=12)
    data = {"data__store": str(store), "data__replay": 1.0, "data__hold_out": 0.4}
    measured = {"evaluate__kl_samples": 0, "evaluate__every": 1, "train__steps": 5}
    return tiny(folder, **data, **{**measured, **changes})


@pytest.fixture
def given(monkeypatch) -> Any:
    """AUC and ½ Var(R) of steps 0, 1, … as given; a checkpoint that is resumed from step 2 goes on there."""
    auc = [0.5, 0.8, 0.6, 0.7, 0.75, 0.79]

    def measure(self: HeldOutLog, beta: float | None, average: str = "sum") -> dict:
        value = auc[self.learner.version]
        return {"eval_auc": value, "eval_auc_se": 0.01, "eval_consistency": 1 - value}

    monkeypatch.setattr(HeldOutLog, "measure", measure)
    return auc


def test_the_best_on_a_log_is_kept_and_said(tmp_path: Path, given: Any, capsys) -> None:
    out = Trainer(on_a_log(tmp_path, evaluate__keep_best=True), tmp_path / "run").run()
    assert "best eval_auc 0.800 at step 1; the end 0.790" in capsys.readouterr().err
    best = json.loads((out / "best" / "best.json").read_text())
    measured = {"eval_auc": 0.8, "eval_auc_se": 0.01, "eval_consistency": pytest.approx(0.2)}
    assert best == {"step": 1, "metric": "eval_auc", **measured}
    card = (out / "best" / "README.md").read_text()
    for line in (
        "the weights of step 1, which had the highest held-out AUC of the run",
        "| held-out AUC before | 0.5000 ± 0.0100 |",
        "| held-out AUC after 5 steps | 0.7900 ± 0.0100 |",
        "| held-out AUC at step 1 | 0.8000 ± 0.0100 |",
    ):
        assert line in card
    run = load_run(out)
    found = Outcome.of(run)
    assert found is not None
    assert found.has_model
    position = json.loads((out / "checkpoints" / "step-00000005" / "position.json").read_text())
    state, row = position["monitors"][Best.name], run.rows[run.best_row]
    assert (state["value"], state["step"]) == (row["eval_auc"], row["step"]) == (0.8, 1)


def test_patience_on_a_log_ends_the_run_also_when_it_was_resumed(tmp_path: Path, given: Any) -> None:
    config = on_a_log(tmp_path, evaluate__patience=3, evaluate__keep_best=True)
    plain = Trainer(config, tmp_path / "plain").run()
    out = Trainer(config, interrupted(config, tmp_path / "run", 2), resume=True).run()
    assert metrics(plain)[-1]["step"] == metrics(out)[-1]["step"] == 4
    assert weights(out) == weights(plain)
    best = [(run / "best" / "model.safetensors").read_bytes() for run in (out, plain)]
    assert best[0] == best[1]
    higher = on_a_log(tmp_path, evaluate__patience=9, evaluate__keep_best=True)
    assert metrics(Trainer(higher, out, resume=True).run())[-1]["step"] == 5


def test_a_kl_ends_a_run_while_its_rule_holds(tmp_path: Path) -> None:
    held = write_prompts(tmp_path / "held.jsonl", range(60, 80))

    def config(target: float | None) -> RunConfig:
        return tiny(tmp_path, data__eval_prompts=held, evaluate__every=1, evaluate__target_kl=target)

    free = [m["eval_kl_ref"] for m in metrics(Trainer(config(None), tmp_path / "free").run())]
    target = max(free[:4])
    first = next(step for step, kl in enumerate(free) if kl >= target)
    assert 0 < first < 6
    for resume in (False, True):
        out = Trainer(config(target), tmp_path / "run", resume=resume).run()
        assert [m["eval_kl_ref"] for m in metrics(out)] == free[: first + 1]
    for higher in (max(free) + 1, None):
        on = Trainer(config(higher), shutil.copytree(out, tmp_path / str(higher)), resume=True).run()
        assert [m["eval_kl_ref"] for m in metrics(on)] == free


def test_a_log_of_equal_rewards_has_nothing_to_follow(tmp_path: Path) -> None:
    for _ in range(2):
        fill_store(tmp_path / "log.db", groups=12, size=1)
    with pytest.raises(Refused, match="eval_auc, which can't be measured on these held-out groups"):
        Trainer(on_a_log(tmp_path, evaluate__patience=2), tmp_path / "run").run()


def test_a_phase_may_measure_for_the_others(tmp_path: Path) -> None:
    """Only the second phase has stored groups to measure; the first one has nothing to compare."""
    fill_store(tmp_path / "held.db")
    phases = [
        {"name": "a", "train": {"steps": 1}},
        {"name": "b", "data": {"eval_store": str(tmp_path / "held.db")}, "train": {"steps": 2}},
    ]
    out = run_tiny(tmp_path, phases=phases, evaluate__keep_best=True, evaluate__every=1)
    assert json.loads((out / "best" / "best.json").read_text())["metric"] == "eval_auc"


def logged(folder: Path, rewards: tuple[float, float], **changes: Any) -> RunConfig:
    """Of a log of two responses to each of 40 prompts, one of each reward."""
    with Store.open(folder / "log.db") as store:
        store.append(
            Sample(f"{g:03d}>", str(g % 10) * (1 + i), reward=reward, source="someone")
            for g in range(40)
            for i, reward in enumerate(rewards)
        )
    held = write_prompts(folder / "held.jsonl", range(60, 84))
    data = {"store": str(folder / "log.db"), "replay": 1.0, "eval_prompts": held}
    options = {"name": "agro", "beta": 0.1, "baseline_shift": "measured"}
    return tiny(folder, **{"data": data, "objective": options, **changes})


def test_it_is_how_much_the_log_is_better_and_falls_to_0(tmp_path: Path) -> None:
    """The log's mean is .6; the start's rewards are at step 0. A resumed run has the same."""
    config = logged(tmp_path, (0.5, 0.7))
    run = Trainer(config, tmp_path / "run").run()
    start, *rows = metrics(run)
    shift = 0.6 - start["eval_reward"]
    assert start["baseline_shift"] == pytest.approx(shift, rel=1e-6)
    assert shift > 0.3
    assert [row["baseline_shift"] for row in rows] == pytest.approx([shift * (1 - i / 6) for i in range(6)])
    again = Trainer(config, interrupted(config, tmp_path / "again", 3), resume=True).run()
    assert weights(again) == weights(run)
    options = config.objective.model_copy(update={"baseline_shift": 0.0})
    plain = Trainer(config.model_copy(update={"objective": options}), tmp_path / "plain").run()
    assert weights(plain) != weights(run)


@pytest.mark.parametrize(
    ("rewards", "shift", "said"),
    [
        ((0.0, 0.1), 0.0, "objective.baseline_shift = 0.000"),  # a worse author
        ((3.0, 5.0), None, "can't be compared"),  # stars, where the reward goes from 0 to 1
    ],
)
def test_there_is_none_where_the_author_isnt_better_or_that_isnt_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rewards: tuple[float, float], shift: Any, said: str
) -> None:
    run = Trainer(logged(tmp_path, rewards, train__steps=1), tmp_path / "run").run()
    assert [row["baseline_shift"] for row in metrics(run)] == [shift, 0.0]
    assert said in capsys.readouterr().err


def test_without_a_reward_the_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unmeasured = {"data__eval_prompts": None, "evaluate__kl_samples": 0}
    run = Trainer(logged(tmp_path, (0.0, 1.0), train__steps=1, **unmeasured), tmp_path / "run").run()
    assert metrics(run)[-1]["baseline_shift"] == 0.0
    assert "objective.baseline_shift: no reward measures the start" in capsys.readouterr().err


def test_outside_of_a_run_it_is_a_number_in_units_of_the_gradient() -> None:
    """By hand: two responses, s/2 more of each; with scale = "loss" the gradient is another's."""
    logp, mask = [[0.0, -1.0], [0.0, -1.0]], [[False, True], [False, True]]
    batch = Batch.of(mask=mask, reward=[0.0, 1.0], group=[0, 0], ref_logp=logp)
    one, two = (
        objectives.evaluate("agro", logp, batch, beta=0.0, baseline_shift=s).grads["logp"] for s in (0.0, 0.4)
    )
    assert [two[i][1] - one[i][1] for i in (0, 1)] == pytest.approx([-0.2, -0.2])
    with pytest.raises(Refused, match="expected a number here"):
        objectives.evaluate("agro", logp, batch, beta=0.0, baseline_shift="measured")
    with pytest.raises(Refused, match=r'scale = "loss" needs baseline_shift = 0\.0, got 0\.1'):
        objectives.evaluate("agro", logp, batch, beta=0.1, baseline_shift=0.1, scale="loss")
