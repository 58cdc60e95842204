"""What a step promised and kept of it, the bounds on how far it goes, and what a resumed run has of them."""

from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import REWARDS, metrics, run_tiny, tiny, weights
from torch import Tensor

from agro import objectives
from agro.api.reporting_trainer import Trainer
from agro.config import TrainConfig
from agro.models.policy import Policy
from agro.objectives import Evaluation
from agro.pages.run.page import course
from agro.runs.problems import kept_share, phase_problems
from agro.runs.rundata import load_run
from agro.train.learner import Local
from agro.train.measure import change, gain_of
from agro.train.phases import DECAY, FIRST_RATE, Position, loss_of, lowered, recalled, speed_of, step_bound
from agro.train.step import MicroBatch, Step
from agro.train.trainer import BaseTrainer
from agro.types import Batch

BOUND = 0.005  # nats a token: a root mean square of 0.1


def test_the_rate_keeps_a_step_of_known_speed_within_the_bound() -> None:
    """By hand: at 50 per unit of rate, √(2 · 0.005) = 0.1 is reached with the rate 0.002."""
    train = TrainConfig(step_kl=BOUND)
    assert lowered(0.003, train, BOUND, Position(speed=50.0)) == pytest.approx(0.002, rel=1e-12)
    assert lowered(0.001, train, BOUND, Position(speed=50.0)) == 0.001
    assert lowered(0.003, train, BOUND, Position()) == 0.003  # the first step of a phase
    assert lowered(0.003, train, BOUND, Position(speed=0.0)) == 0.003  # nothing moved
    assert lowered(0.003, TrainConfig(), BOUND, Position(speed=50.0, lost=1e9)) == 0.003  # no rule


@pytest.mark.parametrize("ratio", [0.5, 0.75])
def test_a_ratio_of_half_is_the_best_single_step_of_a_quadratic(ratio: float) -> None:
    """A step α promises αp and keeps αp − ½κα², which is largest at α = p/κ; ¾ of it is kept at half of that.
    Whatever step was measured, the next one has this length."""
    p, curvature = 3.0, 40.0
    for alpha in (0.01, 0.075, 0.12):
        lost = loss_of(alpha * p, alpha * p - curvature * alpha**2 / 2, alpha, ratio)
        train = TrainConfig(gain_ratio=ratio)
        expected = 2 * (1 - ratio) * p / curvature
        assert lowered(1.0, train, BOUND, Position(lost=lost)) == pytest.approx(expected, rel=1e-12)


def test_a_step_that_lost_more_than_all_makes_the_next_one_a_tenth() -> None:
    lost = loss_of(1e-9, -5.0, 0.02, 0.75)
    found = lowered(1.0, TrainConfig(gain_ratio=0.75), BOUND, Position(lost=lost))
    assert found == pytest.approx(0.002, rel=1e-12)


def test_what_promised_nothing_or_isnt_known_tells_and_changes_nothing() -> None:
    told = [
        *(loss_of(promise, 0.2, 0.01, 0.75) for promise in (-0.1, 0.0, math.nan)),
        *(loss_of(0.1, gain, 0.01, 0.75) for gain in (math.nan, None)),
        *(speed_of(kl, 0.01) for kl in (math.nan, math.inf)),
        *(loss_of(0.1, 0.1, 0.0, 0.75), speed_of(0.02, 0.0)),  # at a rate of 0
    ]
    assert told == [None] * 9
    assert recalled(None, 3.0) == 3.0


def test_a_short_phase_has_a_larger_bound() -> None:
    found = [step_bound(BOUND, steps) for steps in (1, 16, 100, 101, 2000)]
    assert found == pytest.approx([0.05, 0.0125, 0.005, 0.005, 0.005], rel=1e-12)


def test_the_highest_speed_counts_at_once_and_is_forgotten_slowly() -> None:
    """√(2 · 0.02) = 0.2 at a rate of 0.01 is a speed of 20."""
    speed = speed_of(0.02, 0.01)
    assert speed == pytest.approx(20.0, rel=1e-12)
    assert (recalled(speed, None), recalled(speed, 5.0)) == (speed, speed)
    assert recalled(speed, 50.0) == pytest.approx(DECAY * 50 + (1 - DECAY) * 20, rel=1e-12)
    assert recalled(None, None) is None


def test_the_change_is_half_the_mean_square_over_the_tokens() -> None:
    """By hand: differences 0.3 and −0.1 of two tokens, a third one masked: (0.09 + 0.01)/4."""
    mask = torch.tensor([[True, True, False]])
    before = torch.tensor([[-1.0, -2.0, 0.0]], dtype=torch.float64)
    after = torch.tensor([[-0.7, -2.1, 5.0]], dtype=torch.float64)
    step = SimpleNamespace(batch=SimpleNamespace(mask=mask), streams={"logp": before})
    assert change(after, step) == pytest.approx(0.025, rel=1e-12)


def test_a_rate_that_is_too_high_is_lowered(tmp_path: Path) -> None:
    """The first step has the rate of train.lr; the others what the speed of those before allows."""
    config = tiny(tmp_path, train__lr=0.1, train__step_kl=1e-5)
    first, *later = metrics(Trainer(config, tmp_path / "run").run())
    bound = 1e-5 * math.sqrt(100 / (config.train.steps * config.train.updates))
    assert first["lr"] == 0.1
    assert first["step_kl"] > 1e-2
    allowed = first["lr"] * math.sqrt(bound / first["step_kl"])
    assert later[0]["lr"] == pytest.approx(allowed, rel=1e-12)
    assert all(row["lr"] < 0.05 for row in later)
    assert max(row["step_kl"] for row in later) < first["step_kl"] / 10


def test_steps_that_overshoot_are_shortened_until_they_keep_their_share(tmp_path: Path) -> None:
    rows = metrics(run_tiny(tmp_path, train__lr=0.1, train__gain_ratio=0.75, train__steps=12))
    first, *later = rows
    lost = None
    for row, following in pairwise(rows):
        lost = recalled(loss_of(row["promised"], row["kept"], row["lr"], 0.75), lost)
        assert following["lr"] == pytest.approx(min(0.1, 0.25 / lost), rel=1e-12)
    assert later[0]["lr"] < 0.05
    shares = [row["kept"] / row["promised"] for row in later if row["promised"] > 0]
    assert statistics.median(shares) > max(0.6, first["kept"] / first["promised"])


def test_a_bound_that_is_never_met_changes_nothing_and_without_it_nothing_is_measured(tmp_path: Path) -> None:
    plain = run_tiny(tmp_path, "plain", train__steps=3)
    assert weights(run_tiny(tmp_path, "bounded", train__steps=3, train__step_kl=1e6)) == weights(plain)
    measured = [row[name] for row in metrics(plain) for name in ("step_kl", "promised", "kept")]
    assert measured == [None] * 9


def test_each_phase_begins_without_what_steps_did(tmp_path: Path) -> None:
    phases = [{"name": name, "train": {"steps": 2}} for name in ("a", "b")]
    rows = metrics(run_tiny(tmp_path, phases=phases, train__lr=0.1, train__gain_ratio=0.99))
    assert [row["lr"] == 0.1 for row in rows] == [True, False, True, False]


def test_a_rate_is_found_at_which_the_first_step_meets_the_bound(tmp_path: Path) -> None:
    """What is tried is taken back: a run with that rate from the beginning has the same weights."""
    config = tiny(tmp_path, train__lr="auto", train__step_kl=0.001)
    run = Trainer(config, tmp_path / "run").run()
    first = metrics(run)[0]
    bound = 0.001 * math.sqrt(100 / config.train.steps)
    assert first["step_kl"] == pytest.approx(bound, rel=0.25)
    assert json.loads((run / "config.json").read_text())["train"]["lr"] == "auto"
    same = run_tiny(tmp_path, "same", train__lr=first["lr"], train__step_kl=0.001)
    assert weights(same) == weights(run)


def test_equal_rewards_tell_no_rate(tmp_path: Path) -> None:
    """Then the gradient is 0 at the reference, and nothing moves."""
    rule = {"train__lr": "auto", "train__gain_ratio": 0.75, "train__steps": 2}
    rows = metrics(run_tiny(tmp_path, reward__name=f"{REWARDS}:alike", **rule))
    assert [row["lr"] for row in rows] == [FIRST_RATE, FIRST_RATE]


def test_the_gain_of_an_exact_kl_isn_t_measured(tmp_path: Path) -> None:
    changes = {"objective": {"name": "kl_pg", "beta": 0.1}, "train__steps": 2}
    rows = metrics(run_tiny(tmp_path, **changes, train__gain_ratio=0.75))
    assert [row["kept"] for row in rows if row["step"]] == [None, None]


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
    found = gain_of(after(then), step_of(a[:, None], first))
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
    assert gain_of(after(before + change), step_of(push, before)) == pytest.approx(expected, rel=1e-12)
    halves = torch.stack([change[:, 0] / 4, change[:, 0] * 3 / 4], 1)
    tokens = step_of(push.expand(2, 2), torch.zeros(2, 2).double())
    assert gain_of(after(halves), tokens) == pytest.approx(expected, rel=1e-12)
    rows = step_of(push[[0, 1, 1]], torch.zeros(3, 1).double(), response=[0, 1, 1])
    thirds = torch.tensor([[up], [down / 3], [down * 2 / 3]], dtype=torch.float64)
    assert gain_of(after(thirds), rows) == pytest.approx(expected, rel=1e-12)


def test_a_gradient_that_isnt_of_log_probs_alone_is_unknown() -> None:
    push = torch.tensor([[1.0]]).double()
    assert gain_of(after(push), step_of(push, push, kl=torch.zeros(1, 1), value=torch.ones(1))) == 0.0
    assert gain_of(after(push), step_of(push, push, kl=torch.ones(1, 1))) is None


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
    moved = zip(weights, first, strict=True)
    by_hand = -sum(float((w.grad * (w.detach() - w0)).double().sum()) for w, w0 in moved)
    return by_hand, fall, gain_of(learner.logp(batch), step) * config.train.clip / step.norm


@pytest.mark.parametrize("changes", [{}, {"policy__dtype": "mixed"}, {"train__weight_decay": 0.1}])
def test_the_promise_is_that_of_the_weights_and_a_short_step_keeps_it(tmp_path: Path, changes) -> None:
    """`mixed`: of the float32 weights that are trained; their rounding decides what a short step keeps."""
    by_hand, fall, found = stepped(tmp_path, 4, **changes)
    assert fall == pytest.approx(by_hand, rel=1e-4)
    assert fall > 0
    if not changes:
        assert found == pytest.approx(fall, rel=0.01)
    several = stepped(tmp_path, 1, **changes)
    assert several[1:] == pytest.approx((fall, found), rel=1e-3 if "policy__dtype" not in changes else 0.1)


def test_a_run_that_overshoots_says_so(tmp_path: Path) -> None:
    """At a rate of .1 a tiny policy's steps overshoot."""
    config = tiny(tmp_path, train__lr=0.1, train__clip=1e-3, train__step_kl=1e6, train__steps=12)
    rows = metrics(BaseTrainer(config, tmp_path / "run").run())
    share = kept_share(rows)
    assert 0.05 < share < 0.5
    assert "steps overshoot" in [problem.title for problem in phase_problems(rows, config)]
    titles = [panel.title for panel in course(load_run(tmp_path / "run"))["panels"]]
    assert "Promised and kept" in titles


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
