"""β that holds the KL at a target."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from tiny_runs import log_alone, metrics, run_tiny

from agro.config import RunConfig, TrainConfig
from agro.errors import Refused
from agro.train.phases import Phase, Position, is_tuned, lr_at, options_at, tune

ASKED = {"start": 0.02, "target_kl": 0.3, "rate": 0.2}


@pytest.mark.parametrize(
    ("schedule", "after"),
    [("constant", [1, 1, 1, 1]), ("linear", [1, 0.75, 0.5, 0.25]), ("cosine", [1, 0.8536, 0.5, 0.1464])],
)
def test_the_learning_rate_rises_from_the_first_step_on(schedule: str, after: list[float]) -> None:
    """A quarter of it at the first of four steps of warm-up, all of it at the fourth; then down."""
    config = TrainConfig.model_validate({"steps": 8, "lr": 2.0, "warmup": 4, "schedule": schedule})
    found = [lr_at(config, step, 8) / 2.0 for step in range(8)]
    assert found == pytest.approx([0.25, 0.5, 0.75, 1, *after], abs=1e-4)


RAMP = {"start": 1.0, "end": 3.0, "steps": 4}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (RAMP, [1, 1.5, 2, 2.5, 3, 3]),
        ({**RAMP, "shape": "linear"}, [1, 1.5, 2, 2.5, 3, 3]),
        ({**RAMP, "shape": "cosine"}, [1, 1.2929, 2, 2.7071, 3, 3]),
        ({**RAMP, "warmup": 2}, [0, 0.5, 1, 1.5, 2, 2.5]),
        ({**RAMP, "warmup": 0}, [1, 1.5, 2, 2.5, 3, 3]),
        ({**RAMP, "steps": 1}, [1, 3, 3, 3, 3, 3]),
        ({**RAMP, "steps": 0}, [3] * 6),
        ({"start": 1.0, "end": 3.0}, [1, 1.5, 2, 2.5, 3, 3]),  # the phase has 4 steps
        ({"start": 1.0, "end": 3.0, "warmup": 2}, [0, 0.5, 1, 2, 3, 3]),
        (0.5, [0.5] * 6),
        ("adaptive", ["adaptive"] * 6),
    ],
)
def test_an_option_goes_from_start_to_end(value, expected: list) -> None:
    found = [options_at({"x": value}, step, steps=4)["x"] for step in range(6)]
    assert found == (expected if isinstance(value, str) else pytest.approx(expected, abs=1e-4))


def test_in_a_run_it_goes_over_the_steps_of_its_phase() -> None:
    values = {"objective": {"beta": {"start": 1.0, "end": 3.0}}, "train": {"steps": 4}}
    [phase] = Phase.all(RunConfig.of(values))
    assert [phase.options(Position(step=step))["beta"] for step in range(4)] == [1, 1.5, 2, 2.5]
    train = {"steps": 2, "updates": 2, "lr": 1.0, "schedule": "linear"}
    [phase] = Phase.all(RunConfig.of({"train": train}))
    rates = [phase.lr(Position(step=step), update) for step in range(2) for update in range(2)]
    assert rates == [1, 0.75, 0.5, 0.25]


@pytest.mark.parametrize(
    "wrong", [{"end": "3"}, {"steps": True}, {"start": None}, {"shape": "step"}, {"stop": 1}, {"warmup": "2"}]
)
def test_a_malformed_schedule_is_refused_with_what_came(wrong: dict) -> None:
    with pytest.raises(Refused, match=f"schedule of an option: .*{next(iter(wrong))}"):
        options_at({"x": RAMP | wrong}, 0)


def test_each_option_has_its_own_schedule_and_beta_the_tuned_value() -> None:
    options = {"gap": RAMP, "beta": ASKED, "scale": "loss"}
    assert options_at(options, 2, 0.5) == {"gap": 2.0, "beta": 0.5, "scale": "loss"}
    assert (is_tuned(ASKED), is_tuned(RAMP), is_tuned(0.1)) == (True, False, False)


@pytest.mark.parametrize(
    "wrong", [{"rate": 0.0}, {"target_kl": -1.0}, {"start": "1"}, {"rate": True}, {"end": 1.0}]
)
def test_a_malformed_target_is_refused_with_what_came(wrong: dict) -> None:
    with pytest.raises(Refused, match=rf"objective\.beta: .*{next(iter(wrong))}"):
        is_tuned(ASKED | wrong)


def test_log_beta_moves_with_the_distance_to_the_target() -> None:
    assert tune(ASKED, 0.1, 0.45) == pytest.approx(0.1 * math.exp(0.2 * 0.5))
    assert tune(ASKED, 0.1, 30.0) == pytest.approx(0.1 * math.exp(0.2))
    assert tune(ASKED, 0.1, -5.0) == pytest.approx(0.1 * math.exp(-0.2))  # an estimate of a KL may be below 0
    assert options_at({"x": ASKED}, 7)["x"] == 0.02
    assert options_at({"x": ASKED}, 7, 0.5)["x"] == 0.5


@pytest.mark.test
def test_the_path_is_that_of_the_rule(tmp_path: Path) -> None:
    rows = metrics(run_tiny(tmp_path, train__steps=12, objective__beta=ASKED))
    assert rows[0]["beta"] == 0.02
    for before, after in pairwise(rows):
        assert after["beta"] == pytest.approx(tune(ASKED, before["beta"], before["kl_ref"]))


@pytest.mark.test
def test_on_a_log_beta_follows_the_evaluations(tmp_path: Path) -> None:
    """Three steps apart; in between it stays as it is."""
    log = {"data": log_alone(tmp_path), "reward": {}, "evaluate": {"every": 3, "kl_samples": 8}}
    rows = metrics(run_tiny(tmp_path, **log, train__steps=7, objective__beta=ASKED))
    assert [m["step"] for m in rows if m["kl_ref"] is not None] == [3, 6, 7]
    for before, after in pairwise(rows):
        expected = before["beta"]
        if before["kl_ref"] is not None:
            expected = tune(ASKED, before["beta"], before["kl_ref"])
            assert expected != before["beta"]
        assert after["beta"] == pytest.approx(expected)
