"""What may change when a run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import metrics, tiny, weights, write_prompts

from agro.api.reporting_trainer import Trainer
from agro.errors import Refused


def run(folder: Path, name: str = "run", resume: bool = False, **changes) -> Path:
    return Trainer(tiny(folder, **changes), folder / name, resume=resume).run()


def test_more_steps_are_those_of_a_longer_run(tmp_path: Path) -> None:
    longer = run(tmp_path, "longer", train__steps=7)
    run(tmp_path, train__steps=4)
    out = run(tmp_path, resume=True, train__steps=7)
    assert weights(out) == weights(longer)
    assert [m["step"] for m in metrics(out)] == list(range(1, 8))
    with pytest.raises(Refused, match="last phase had 7, now it has 5"):
        run(tmp_path, resume=True, train__steps=5)


def test_the_last_of_several_phases_may_grow(tmp_path: Path) -> None:
    def phases(first: int, last: int) -> list:
        return [{"name": "a", "train": {"steps": first}}, {"name": "b", "train": {"steps": last}}]

    longer = run(tmp_path, "longer", phases=phases(2, 4))
    run(tmp_path, phases=phases(2, 2))
    assert weights(run(tmp_path, resume=True, phases=phases(2, 4))) == weights(longer)
    with pytest.raises(Refused, match=r"phases\.a\.train\.steps was 2, now it is 3$"):
        run(tmp_path, resume=True, phases=phases(3, 4))


def test_a_schedule_over_other_steps_is_told(tmp_path: Path, capsys) -> None:
    run(tmp_path, train__steps=3, train__schedule="linear")
    run(tmp_path, resume=True, train__steps=4, train__schedule="linear")
    assert "train.schedule = linear now runs over 4 steps, not 3" in capsys.readouterr().err


def test_a_run_that_ended_early_goes_on_where_its_rule_changes(tmp_path: Path) -> None:
    common = {
        "data__eval_prompts": write_prompts(tmp_path / "held.jsonl", range(60, 66)),
        "evaluate__every": 1,
        "train__steps": 5,
    }
    run(tmp_path, evaluate__target=-1.0, **common)  # reached at once
    assert metrics(tmp_path / "run")[-1]["step"] == 1
    assert metrics(run(tmp_path, resume=True, evaluate__target=-1.0, **common))[-1]["step"] == 1
    assert metrics(run(tmp_path, resume=True, **common))[-1]["step"] == 5
