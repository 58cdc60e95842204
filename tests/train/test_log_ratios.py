"""Log-ratios of the best and the worst stored responses, and the mean of their exponential."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import RESPONSE_ROUNDING, fill_store, metrics, tiny

from agro.api.reporting_trainer import Trainer
from agro.train.measure import exponential, stored_metrics
from agro.types import Batch

NAN = math.nan


def batch_of(rho: list[float], **columns: Any) -> tuple[Batch, torch.Tensor]:
    """A batch of one token a row, with these log-ratios."""
    logp_BT = torch.tensor([[9.0, x - 3.0] for x in rho], dtype=torch.float64)
    ref_BT = torch.tensor([[NAN, -3.0]] * len(rho), dtype=torch.float64)
    return Batch.of(mask=[[False, True]] * len(rho), ref_logp=ref_BT, **columns), logp_BT


def test_best_and_worst_of_each_group_by_hand() -> None:
    """Group a: best 2 and 1, worst −1 and −3. Group b: best 0.2 + 0.3 in two rows, worst −2.

    The rewards of c are equal, and d has one. The best are ½ of a and ½ of b.
    """
    batch, logp = batch_of(
        [2.0, 1.0, -1.0, -3.0, 9.0, 0.2, 0.3, -2.0, 5.0, 5.0, 7.0, 7.0],
        reward=[1.0, 1.0, 0.0, 0.0, NAN, 0.7, 0.7, 0.1, 1.0, 1.0, 1.0, NAN],
        group=list("aaaaabbbccdd"),
        response=[0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10],
    )
    found = stored_metrics(batch, logp, [False] * 12)
    assert found["log_ratio_best"] == pytest.approx((1.5 + 0.5) / 2)
    assert found["log_ratio_worst"] == pytest.approx((-2.0 - 2.0) / 2)
    assert found["kl_of_best"] == pytest.approx(math.log(2))
    rho = [2.0, 1.0, -1.0, -3.0, 9.0, 0.5, -2.0, 5.0, 5.0, 7.0, 7.0]
    assert found["ratio_mean"] == pytest.approx(np.exp(rho).mean())


def test_only_stored_rows_count_and_only_known_ones() -> None:
    batch, logp = batch_of([1.0, -1.0, 8.0, 8.0], reward=[1.0, 0.0, 1.0, 0.0], group=list("aabb"))
    stored = stored_metrics(batch, logp, [False, False, True, True])
    assert stored["log_ratio_best"] == 1.0
    assert stored["ratio_mean"] == pytest.approx(math.cosh(1.0))
    assert stored_metrics(batch, logp, [True] * 4) == {}
    ref = batch.ref_logp.clone()
    ref[:2] = NAN
    half = stored_metrics(batch.replace(ref_logp=ref), logp, [False] * 4)
    assert half["log_ratio_best"] == 8.0
    for unknown in (None, torch.full_like(ref, NAN)):
        only = stored_metrics(batch.replace(ref_logp=unknown), logp, [False] * 4)
        assert only == {"kl_of_best": pytest.approx(math.log(2)), "kl_of_best_groups": 2}


def test_rows_of_one_response_with_different_rewards_have_none() -> None:
    """`sft` doesn't refuse them."""
    batch, logp = batch_of(
        [1.0, 1.0, -1.0, 4.0], reward=[1.0, 0.0, 0.0, 0.5], group=list("aaaa"), response=[0, 0, 1, 2]
    )
    found = stored_metrics(batch, logp, [False] * 4)
    assert (found["log_ratio_best"], found["log_ratio_worst"]) == (4.0, -1.0)


def test_an_exponential_that_is_too_large_is_the_largest_number() -> None:
    """Also where only the sum, or only the standard error, would overflow."""
    assert exponential("x", np.array([800.0, 0.0]), error=False) == {"x": pytest.approx(sys.float_info.max)}
    near = exponential("x", np.array([709.5, 709.5]))
    assert near["x"] == pytest.approx(math.exp(709.5))
    assert near["x_se"] == 0.0
    plain = exponential("x", np.array([0.0, math.log(3.0)]))
    assert plain == {"x": pytest.approx(2.0), "x_se": pytest.approx(1.0)}
    assert math.isnan(exponential("x", np.array([1.0]))["x_se"])
    assert exponential("x", np.array([])) == {}


def test_a_run_on_a_log_measures_them_at_each_step(tmp_path: Path) -> None:
    """At the first step π is the reference; one half of each group of the log is right."""
    fill_store(tmp_path / "log.db")
    log = {"data__store": str(tmp_path / "log.db"), "data__replay": 1.0, "train__steps": 3}
    rows = [m for m in metrics(Trainer(tiny(tmp_path, **log), tmp_path / "run").run()) if m["step"]]
    assert [rows[0][key] for key in ("log_ratio_best", "log_ratio_worst")] == pytest.approx(
        [0, 0], abs=RESPONSE_ROUNDING
    )
    assert rows[0]["ratio_mean"] == pytest.approx(1.0, abs=RESPONSE_ROUNDING)
    assert all(m["kl_of_best"] == pytest.approx(math.log(2)) for m in rows)
    assert rows[2]["log_ratio_best"] > rows[2]["log_ratio_worst"]
    sft = tiny(tmp_path, **log, objective={"name": "sft"})
    imitated = [m for m in metrics(Trainer(sft, tmp_path / "sft").run()) if m["step"]]
    assert {m["log_ratio_best"] for m in imitated} == {m["ratio_mean"] for m in imitated} == {None}
    fresh = metrics(Trainer(tiny(tmp_path, train__steps=2), tmp_path / "fresh").run())
    assert {m["kl_of_best"] for m in fresh} == {None}
