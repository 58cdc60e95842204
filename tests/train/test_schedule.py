"""β that holds the KL at a target."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from tiny_runs import InterruptAfter, metrics, tiny, weights

from agro.config import Train
from agro.errors import Interrupted, Refused
from agro.train.schedule import lr_at, option_at, tune
from agro.train.trainer import Trainer

ASKED = {"start": 0.02, "target_kl": 0.3, "rate": 0.2}


@pytest.mark.parametrize(
    ("schedule", "after"),
    [("constant", [1, 1, 1, 1]), ("linear", [1, 0.75, 0.5, 0.25]), ("cosine", [1, 0.8536, 0.5, 0.1464])],
)
def test_the_learning_rate_rises_from_the_first_step_on(schedule: str, after: list[float]) -> None:
    """A quarter of it at the first of four steps of warm-up, all of it at the fourth; then down."""
    config = Train.model_validate({"steps": 8, "lr": 2.0, "warmup": 4, "schedule": schedule})
    found = [lr_at(config, step, 8) / 2.0 for step in range(8)]
    assert found == pytest.approx([0.25, 0.5, 0.75, 1, *after], abs=1e-4)


def test_log_beta_moves_with_the_distance_to_the_target() -> None:
    assert tune(ASKED, 0.1, 0.45) == pytest.approx(0.1 * math.exp(0.2 * 0.5))
    assert tune(ASKED, 0.1, 30.0) == pytest.approx(0.1 * math.exp(0.2))
    assert tune(ASKED, 0.1, -5.0) == pytest.approx(0.1 * math.exp(-0.2))  # an estimate of a KL may be below 0
    assert option_at(ASKED, 7) == 0.02
    assert option_at(ASKED, 7, 0.5) == 0.5


def test_the_path_is_that_of_the_rule_and_survives_a_stop(tmp_path: Path) -> None:
    config = tiny(tmp_path, train__steps=12, objective__beta=ASKED)
    rows = metrics(Trainer(config, tmp_path / "plain").run())
    assert rows[0]["beta"] == 0.02
    for before, after in pairwise(rows):
        assert after["beta"] == pytest.approx(tune(ASKED, before["beta"], before["kl_ref"]))
    with pytest.raises(Interrupted):
        Trainer(config, tmp_path / "stopped", monitors=[InterruptAfter(5)]).run()
    out = Trainer(config, tmp_path / "stopped", resume=True).run()
    assert weights(out) == weights(tmp_path / "plain")
    assert [m["beta"] for m in metrics(out)] == [m["beta"] for m in rows]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective__beta": {"start": 0.1, "target_kl": 0.0, "rate": 0.1}}, "numbers above 0"),
        ({"objective__beta": {"target_kl": 1.0, "rate": 0.1}}, "expected {start, target_kl, rate}"),
        ({"objective__beta": ASKED, "data__replay": 1.0}, "follows kl_ref"),
        ({"objective": {"name": "kl_pg", "beta": ASKED}}, "follows kl_ref"),
    ],
)
def test_what_it_cannot_follow_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(Refused, match=message):
        Trainer(tiny(tmp_path, **changes), tmp_path / "run")
