"""½ Var(R), regret and the share of the pull, in groups of any run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import (
    RESPONSE_ROUNDING,
    is_mean,
    metrics,
    run_tiny,
    tiny,
    total_logp,
    weights,
    write_prompts,
)

from agro.config import RunConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.objectives import Evaluation, get
from agro.rollout import Activity
from agro.rollout.evaluate import Heldout
from agro.rollout.prompts import load_prompts
from agro.rollout.rollout import embedded, load_rollout
from agro.train.learner import Local
from agro.train.measure import describe_step, distances, fresh_metrics, spreads
from agro.train.monitors import View
from agro.train.monitors.heldout import HeldOutPrompts
from agro.train.phases import Phase
from agro.train.step import Step
from agro.types import Batch

WITHOUT_BETA = {
    "agro": {"beta": 0.0},
    "rloo": {},
    "reinforce": {"baseline": "mean"},
    "grpo": {},
    "sft": {},
    "squared_consistency": {"beta": 0.2, "anchor": "behavior"},
}


def a_batch(
    rho: Sequence[float], reward: Sequence[float], group: Sequence[Any], length: int = 1
) -> tuple[torch.Tensor, Batch]:
    """log π [B,1+length] and a batch of responses with these log-ratios, which are shared by their tokens."""
    ref = torch.full((len(rho), 1 + length), -5.0, dtype=torch.float64)
    logp = ref.clone()
    logp[:, 1:] += torch.tensor(rho, dtype=torch.float64)[:, None] / length
    mask = [[False] + [True] * length] * len(rho)
    known = {"ref_logp": ref, "behavior_logp": (logp + ref) / 2}
    return logp, Batch.of(mask=mask, reward=reward, group=list(group), **known)


def a_step(logp: torch.Tensor, batch: Batch) -> Step:
    return Step(Evaluation(0.0, {}, {}), {"logp": logp}, batch)


# log π_ref, rewards and log π* of a prompt with four responses.
_random = torch.Generator().manual_seed(0)
REF = torch.randn(4, generator=_random).double().log_softmax(0)
REWARD, BETA = torch.rand(4, generator=_random).double(), 0.3
STAR = (REF + REWARD / BETA).log_softmax(0)


def groups_of_eight(policy: torch.Tensor, count: int) -> tuple[torch.Tensor, Batch]:
    """`a_batch` of groups drawn from `policy`."""
    drawn = policy.exp().multinomial(count * 8, replacement=True, generator=torch.Generator().manual_seed(1))
    group = torch.arange(count).repeat_interleave(8).tolist()
    return a_batch((policy - REF)[drawn].tolist(), REWARD[drawn].tolist(), group)


@pytest.mark.parametrize(
    ("policy", "truth"), [(STAR, 0.0), (REF, BETA * float((REF.exp() * (REF - STAR)).sum()))]
)
def test_at_the_optimum_there_is_no_regret_and_elsewhere_at_most_the_truth(
    policy: torch.Tensor, truth: float
) -> None:
    """β KL(π ‖ π*) of four responses (Lemma 5), against the mean estimate over many groups."""
    logp, batch = groups_of_eight(policy, 4000)
    half, regret = distances(batch, logp, BETA)
    assert 0.7 * truth - 1e-12 <= regret.mean() <= truth + 1e-12
    assert (half.max() < 1e-20) == (truth == 0)


@pytest.mark.parametrize(("average", "rho"), [("sum", 2.0), ("token", 1.0)])
def test_regret_and_pull_average_as_the_objective_does(average: str, rho: float, tmp_path: Path) -> None:
    """Log-ratios of 1 + 1 and 0; rewards of 1 and 0."""
    step, options = a_step(*a_batch([2.0, 0.0], [1.0, 0.0], "aa", 2)), {"beta": 0.4, "average": average}
    out = describe_step(step, [True, True], Phase.all(tiny(tmp_path))[0], options)
    R = [1.0 - 0.4 * rho, 0.0]
    assert out["regret"] == pytest.approx(0.4 * math.log(sum(math.exp(x / 0.4) for x in R) / 2) - sum(R) / 2)
    assert out["kl_to_reward_spread"] == pytest.approx(0.4 * rho)


def test_the_pull_is_as_large_as_the_rewards_at_the_optimum() -> None:
    logp, batch = groups_of_eight(STAR, 50)
    step = a_step(logp + 3.0, batch)  # what all log-ratios share doesn't count
    pull, reward = spreads(step, get("agro"), {"beta": BETA})
    assert BETA * pull / reward == pytest.approx(1.0)


def test_spreads_are_of_groups_whose_rewards_differ() -> None:
    """ρ = 4, 0 with rewards 1, 0; ρ = 2, 0 with 2, 0; ρ = 9, 0 with equal ones. Variances 8, 2 and ½, 2."""
    logp, batch = a_batch([4.0, 0.0, 2.0, 0.0, 9.0, 0.0], [1.0, 0.0, 2.0, 0.0, 1.0, 1.0], "aabbcc", 2)
    step = a_step(logp, batch)
    pull, reward = 5.0**0.5, 1.25**0.5
    for name, options, expected in (
        ("agro", {}, pull),
        ("rloo", {}, pull),
        ("agro", {"average": "token"}, pull / 2),
        ("squared_consistency", {"anchor": "behavior"}, pull / 2),
    ):
        assert spreads(step, get(name), {"beta": 0.1, **options}) == pytest.approx((expected, reward))
    assert spreads(step, get("agro"), {"beta": 0.0}) is spreads(step, get("grpo"), {"beta": 0.1}) is None
    equal = batch.rows(torch.tensor([4, 5]))
    assert spreads(a_step(logp[4:], equal), get("agro"), {"beta": 0.1}) is None


@pytest.mark.parametrize("name", WITHOUT_BETA)
def test_an_objective_without_a_beta_is_measured_at_the_one_given(name: str, tmp_path: Path) -> None:
    """It shows, and trains as it did: the second step's regret is that of R at weights that have moved."""
    changes = {
        "objective": {"name": name, **WITHOUT_BETA[name]},
        "train__steps": 2,
        "evaluate__n": 2,
        "data__eval_prompts": write_prompts(tmp_path / "held.jsonl", range(60, 64)),
    }
    silent = run_tiny(tmp_path, "silent", **changes)
    folder = run_tiny(tmp_path, **changes, evaluate__beta=0.5)
    keys = ("regret", "eval_regret", "eval_regret_se", "eval_fresh_consistency", "eval_fresh_groups")
    assert {m[key] for m in metrics(silent) for key in keys} == {None}
    assert weights(silent) == weights(folder)
    start, first, second = metrics(folder)
    assert [m["eval_fresh_groups"] for m in (start, first, second)] == [4, None, 4]
    assert start["eval_regret"] != second["eval_regret"] > 0
    assert first["kl_ref"] == pytest.approx(0.0, abs=RESPONSE_ROUNDING)
    assert second["kl_ref"] != pytest.approx(0.0, abs=RESPONSE_ROUNDING)
    assert min(first["regret"], second["regret"]) > 0


@pytest.mark.parametrize("replay", [0.0, 0.5])
def test_a_fresh_regret_reads_the_reference_where_the_objective_does_not(
    tmp_path: Path, replay: float
) -> None:
    """rloo at β = 0 and at a tiny β take the same steps; only the second uses the reference."""

    def rows(name: str, **beta: float) -> list[dict[str, Any]]:
        changes = {"objective": {"name": "rloo", **beta}, "evaluate__beta": 0.5, "data__replay": replay}
        return metrics(run_tiny(tmp_path, name, **changes))

    given, read = rows("given"), rows("read", beta=1e-30)
    for key in ("regret", "kl_ref"):
        known = [[math.nan if m[key] is None else m[key] for m in rows] for rows in (given, read)]
        assert known[0] == pytest.approx(known[1], rel=1e-4, abs=RESPONSE_ROUNDING, nan_ok=True)
    if not replay:  # all is fresh: each step has a regret of its own
        assert len({m["regret"] for m in given}) == 6


@pytest.mark.parametrize("average", ["sum", "token"])
def test_held_out_responses_are_measured_against_the_reference_without_the_unscored(
    tmp_path: Path, average: str, monkeypatch
) -> None:
    """Expected numbers from the models' own logits, response by response."""
    config = tiny(tmp_path, evaluate__n=3)
    policy, reference = (Policy.load(config.policy, seed=seed) for seed in (1, 2))
    prompts = load_prompts(write_prompts(tmp_path / "held.jsonl", range(60, 64)))
    samples = sorted(
        load_rollout(policy.encoder, embedded(policy)).sample(prompts, 3, config.sampler),
        key=lambda s: int(s.meta["index"]),
    )
    rewards = [1.0, 0.0, math.nan, 1.0, math.nan, math.nan, 0.0, 0.5, 1.0, 1.0, 1.0, 1.0]
    scored = [s.replace(reward=None if math.isnan(r) else r) for s, r in zip(samples, rewards, strict=True)]
    found = Heldout(np.array(rewards).reshape(4, 3), tuple(scored))
    learner = Local(policy, reference, print)
    learner.enter(config, began=None, resumed=None)

    def described(found: Heldout, config: RunConfig, average: str = "sum", prompts=prompts) -> dict:
        """What the monitor adds to a step's metrics where the responses and their rewards are those."""
        monkeypatch.setattr("agro.train.monitors.heldout.heldout", lambda *args: found)
        [phase] = Phase.all(config)
        monitor = HeldOutPrompts(phase, learner, None, None, prompts, Activity())
        view = View(phase, phase.ends, {"beta": 0.2, "average": average}, {"kl_ref": 0.0})
        monitor.after(view)
        return view.metrics

    out = described(found, config, average)

    ratio = np.array([total_logp(policy, s) - total_logp(reference, s) for s in samples])
    tokens = np.array([s.action.sum() for s in samples]) if average == "token" else 1
    R = np.array(rewards) - 0.2 * ratio / tokens
    groups = [R[[0, 1]], R[6:9], R[9:12]]
    half = [np.var(g, ddof=1) / 2 for g in groups]
    regret = [0.2 * np.log(np.mean(np.exp(g / 0.2))) - g.mean() for g in groups]
    assert out["eval_fresh_groups"] == 3
    is_mean(out, "eval_fresh_consistency", half, 1e-4)
    is_mean(out, "eval_regret", regret, 1e-4)
    for changes in ({"evaluate__n": 3, "evaluate__kl": False}, {"evaluate__temperature": 0.5}):
        less = described(found, tiny(tmp_path, **changes))
        assert "eval_regret" not in less
    single = Heldout(found.rewards[1:2], tuple(scored[3:6]))
    assert "eval_regret" not in described(single, config, prompts=prompts[1:2])


@pytest.mark.parametrize("given", [None, 0.2])
def test_a_beta_that_a_schedule_ends_leaves_what_is_measured(tmp_path: Path, given: float | None) -> None:
    """At β = 0 the objective doesn't use the reference; kl_ref (for a guard) and evaluate.beta do."""
    fades = {"name": "agro", "beta": {"start": 0.1, "end": 0.0, "steps": 2}}
    rows = metrics(run_tiny(tmp_path, objective=fades, evaluate__beta=given))
    assert [m["beta"] for m in rows] == [0.1, 0.05, 0.0, 0.0, 0.0, 0.0]
    assert all(m["kl_ref"] is not None for m in rows)
    assert [m["regret"] is not None for m in rows] == [True] * 2 + [given is not None] * 4


def test_a_pull_that_dwarfs_the_rewards_is_said_once_a_phase_with_its_figures(tmp_path: Path, capsys) -> None:
    phases = [{"name": "far"}, {"name": "near", "objective": {"beta": 0.1}}, {"name": "again"}]
    rows = metrics(run_tiny(tmp_path, objective__beta=200.0, phases=phases, train__steps=4))
    said = [line for line in capsys.readouterr().err.splitlines() if "within groups" in line]
    above = [m for m in rows if m["kl_to_reward_spread"] is not None and m["kl_to_reward_spread"] > 10]
    assert {m["phase"] for m in above} == {"far", "again"}
    assert len(said) == 2
    assert said[0].startswith(f"step {above[0]['step']}: ")
    spread, length = above[0]["kl_to_reward_spread"], above[0]["length_mean"]
    for words in (
        f" {spread:.3g} times",
        "β = 200,",
        f"responses of {length:.0f} tokens",
        f"about 1/length, {1 / length:.2g},",
        'objective.average = "token"',
    ):
        assert words in said[0]


def test_the_guard_watches_a_kl_that_only_the_diagnostics_read(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"above guard\.kl"):
        run_tiny(tmp_path, objective={"name": "rloo"}, guard__kl=1e-3, evaluate__beta=0.5)


@pytest.mark.parametrize(("second", "is_known"), [(0.0, False), (math.nan, False), (0.1, True)])
def test_a_regret_without_unequal_rewards_is_unknown(second: float, is_known: bool, tmp_path: Path) -> None:
    """ρ = 1, 0 and rewards of 0 alone: R = −βρ, whose regret is above 0, but what is better wasn't seen."""
    logp, batch = a_batch([1.0, 0.0], [0.0, second], "aa")
    found = describe_step(a_step(logp, batch), [True, True], Phase.all(tiny(tmp_path))[0], {"beta": 0.1})
    assert (found.get("regret") is not None) == is_known
    assert ("eval_regret" in fresh_metrics(batch, logp, 0.1, "sum")) == is_known


@pytest.mark.parametrize(("other", "is_known"), [(1.0005, False), (1.01, True)])
def test_rewards_that_hardly_differ_have_no_spread(other: float, is_known: bool) -> None:
    """Those that differ by less than a thousandth of the larger one."""
    step = a_step(*a_batch([1.0, 0.0], [1.0, other], "aa"))
    assert (spreads(step, get("agro"), {"beta": 0.1}) is not None) == is_known
