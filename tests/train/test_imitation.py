"""A share of imitation in a run."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_runs import tiny

from agro.api.reporting_trainer import Trainer
from agro.train.phases import Phase, Position


def test_a_schedule_of_imitation_ends_at_0(tmp_path: Path) -> None:
    """Shares 1, ½ and 0. A step without a share reports none."""
    share = {"start": 1.0, "end": 0.0, "steps": 2}
    objective = {"name": "agro", "beta": 0.1, "imitation": share, "imitation_reward": 0.0}
    config = tiny(tmp_path, objective=objective, train__steps=3)
    Trainer(config, tmp_path / "run").run()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    found = [row["objective"].get("imitation_loss") for row in rows if "objective" in row]
    assert [x is None for x in found] == [False, False, True]
    assert all(x > 0 for x in found[:2])


def test_a_schedule_without_steps_lasts_the_phase(tmp_path: Path) -> None:
    objective = {"name": "agro", "beta": 0.1, "imitation": {"start": 1.0, "end": 0.0}}
    [phase] = Phase.all(tiny(tmp_path, objective=objective, train__steps=4))
    found = [phase.options(Position(step=step))["imitation"] for step in range(4)]
    assert found == [1.0, 0.75, 0.5, 0.25]
