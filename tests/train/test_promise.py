"""What a step promised and what it kept of it: exact cases by hand, and in runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import metrics, tiny
from torch import Tensor

from agro import objectives
from agro.io.numbers import percent
from agro.models.policy import Policy
from agro.objectives import Evaluation
from agro.pages.run.page import course
from agro.runs.problems import kept_share, phase_problems
from agro.runs.rundata import load_run
from agro.train.learner import Local
from agro.train.step import MicroBatch, Step
from agro.train.trainer import BaseTrainer
from agro.train.update import kept
from agro.types import Batch


def step_of(push: Tensor, logp: Tensor, response: list[int] | None = None, **streams: Tensor) -> Step:
    """Rows of their own responses, all of one group, whose loss has the gradient −`push` in log-probs."""
    rows = len(push)
    push, logp = (torch.cat([torch.zeros(rows, 1), x], 1) for x in (push, logp))  # the prompt
    mask = (torch.arange(push.shape[1]) > 0).expand(push.shape)
    batch = Batch.of(mask=mask, reward=[0.0] * rows, group=[0] * rows, response=response)
    return Step(Evaluation(0.0, {"logp": -push, **streams}, {}), {"logp": logp}, batch)


def after(logp: Tensor) -> Tensor:
    """As the learner gives them: with the prompt."""
    return torch.cat([torch.zeros(len(logp), 1), logp], 1)


@pytest.mark.parametrize("rate", [0.01, 0.5, 1.0, 1.5])
def test_the_share_of_a_quadratic_gain_is_exact(rate: float) -> None:
    """A normal policy of mean θ, log π(y) = −½(y − θ)²: Δρ = (y − θ)δ − ½δ², so with pushes a > 0 a step
    δ = α p along p = Σ a (y − θ) promises αp² and keeps αp² − ½κ(αp)² with κ = Σ a. The share is 1 − ακ/2,
    a half where K is largest, at α = 1/κ. Here κ = 1."""
    y, a, theta = torch.tensor([0.5, 2.0, -1.0]).double(), torch.tensor([0.25, 0.5, 0.25]).double(), 0.25
    p = float((a * (y - theta)).sum())
    first, then = (-0.5 * (y - at)[:, None].square() for at in (theta, theta + rate * p))
    found = kept(after(then), step_of(a[:, None], first))
    assert found == pytest.approx(rate * p * p * (1 - rate / 2), rel=1e-12)


def test_what_falls_loses_no_more_than_its_probability() -> None:
    """By hand: a table, logits (0, 0) to (δ, −δ), so Δρ = ±δ − log cosh δ. The first is pushed up by .5, the
    second down by .5; also as two tokens that share the change, and as two rows of one response."""
    delta = 0.7
    up, down = delta - math.log(math.cosh(delta)), -delta - math.log(math.cosh(delta))
    expected = 0.5 * up - 0.5 * math.expm1(down)
    push = torch.tensor([[0.5], [-0.5]]).double()
    before = torch.full((2, 1), -math.log(2), dtype=torch.float64)
    change = torch.tensor([[up], [down]], dtype=torch.float64)
    assert kept(after(before + change), step_of(push, before)) == pytest.approx(expected, rel=1e-12)
    halves = torch.stack([change[:, 0] / 4, change[:, 0] * 3 / 4], 1)
    tokens = step_of(push.expand(2, 2), torch.zeros(2, 2).double())
    assert kept(after(halves), tokens) == pytest.approx(expected, rel=1e-12)
    rows = step_of(push[[0, 1, 1]], torch.zeros(3, 1).double(), response=[0, 1, 1])
    thirds = torch.tensor([[up], [down / 3], [down * 2 / 3]], dtype=torch.float64)
    assert kept(after(thirds), rows) == pytest.approx(expected, rel=1e-12)


def test_a_gradient_that_isnt_of_log_probs_alone_is_unknown() -> None:
    push = torch.tensor([[1.0]]).double()
    assert kept(after(push), step_of(push, push, kl=torch.zeros(1, 1), value=torch.ones(1))) == 0.0
    assert kept(after(push), step_of(push, push, kl=torch.ones(1, 1))) is None


def stepped(folder: Path, micro: int, rate: float = 1e-5, **changes: Any) -> tuple[float, float, float]:
    """Promised, by hand and by the learner, and kept; of four responses without a padding token."""
    config = tiny(folder, train__clip=1e-2, **changes)
    learner = Local(Policy.load(config.policy, seed=0), None, print)
    learner.enter(config, began=None, resumed=None)
    learner.micro = MicroBatch(micro)
    batch = Batch.of(
        mask=(torch.arange(6) >= 3).expand(4, 6),
        reward=[0.0, 1.0, 0.0, 2.0],
        group=[0, 0, 1, 1],
        tokens=torch.randint(3, 12, (4, 6), generator=torch.Generator().manual_seed(0)),
        lengths=[6] * 4,
    )
    step = learner.gradient(batch, "rloo", objectives.get("rloo").resolve("rloo", {}), lambda: None)
    weights = list(learner.policy.trained().values())
    first = [w.detach().clone() for w in weights]
    before = learner.along_gradient()
    learner.move(rate)
    fall = float(before - learner.along_gradient())
    by_hand = -sum(
        float((w.grad * (w.detach() - w0)).double().sum()) for w, w0 in zip(weights, first, strict=True)
    )
    found = kept(learner.logp(batch), step)
    assert found is not None
    return by_hand, fall, found * config.train.clip / step.norm


@pytest.mark.parametrize("changes", [{}, {"policy__dtype": "mixed"}, {"train__weight_decay": 0.1}])
def test_the_promise_is_that_of_the_weights_and_a_short_step_keeps_it(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """`mixed`: of the float32 weights that are trained; their rounding decides what a short step keeps."""
    by_hand, fall, found = stepped(tmp_path, 4, **changes)
    assert fall == pytest.approx(by_hand, rel=1e-4)
    assert fall > 0
    if not changes:
        assert found == pytest.approx(fall, rel=0.01)
    several = stepped(tmp_path, 1, **changes)
    assert several[1:] == pytest.approx((fall, found), rel=1e-3 if "policy__dtype" not in changes else 0.1)


def test_a_run_has_both_with_the_bound_alone(tmp_path: Path) -> None:
    """At a rate of .1 a tiny policy's steps overshoot; without train.step_kl nothing is measured."""
    config = tiny(tmp_path, train__lr=0.1, train__clip=1e-3, train__step_kl=1e6, train__steps=12)
    rows = metrics(BaseTrainer(config, tmp_path / "run").run())
    share = kept_share(rows)
    assert share is not None
    assert 0.05 < share < 0.5
    assert "steps overshoot" in [problem.title for problem in phase_problems(rows, config)]
    [panel] = [
        panel for panel in course(load_run(tmp_path / "run"))["panels"] if panel.title == "Promised and kept"
    ]
    assert panel.caption.endswith(f"The median of the last steps kept {percent(share)}.")
    free = metrics(BaseTrainer(tiny(tmp_path, train__steps=1), tmp_path / "free").run())
    assert [(row["promised"], row["kept"]) for row in free] == [(None, None)]


def test_the_median_share_of_the_last_steps_decides(tmp_path: Path) -> None:
    """Of ten known ones or more; a step that went against its own gradient promised nothing."""
    config = tiny(tmp_path, train__step_kl=0.005)
    few = [{"step": n, "promised": 2.0, "kept": 0.98} for n in range(1, 10)]
    assert kept_share([*few, {"step": 10}, {"step": 11, "promised": -1.0, "kept": 5.0}]) is None
    rows = [*few, {"step": 12, "promised": 1e-6, "kept": -1.0}]
    assert kept_share(rows) == 0.49
    [problem] = phase_problems(rows, config)
    assert problem.title == "steps overshoot"
    assert "a larger train.gain_ratio (now None) or a lower train.lr (now 0.01)" in problem.detail
    assert phase_problems([row | {"kept": 1.0} for row in rows], config) == []
