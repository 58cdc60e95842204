"""The feed: what of a draw is valid, and what a batch gets besides the samples."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from rounding import rounding
from tiny_runs import tiny

from agro.config import RunConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.models.reference import load_reference
from agro.store import DamagedSample, DrawnGroups
from agro.train.collate import StoredValues
from agro.train.feed import Feed, Valid, by_reward, count_responses, one_each
from agro.train.learner import Local
from agro.train.phases import Phase, Position
from agro.types import Sample


def feed(config: RunConfig, values: StoredValues | None = None) -> Feed:
    policy = Policy.load(config.policy, seed=0)
    learner = Local(policy, load_reference(config.policy, policy), print)
    learner.enter(config, began=None, resumed=None)
    with torch.no_grad():  # so that the policy isn't its reference
        for w in policy.weights().values():
            w.add_(0.1)
    learner.version = 5
    [phase] = Phase.all(config)
    return Feed(phase, learner, values, None, "", -1)


def valid_of(made: Feed, drawn: DrawnGroups) -> Valid:
    return made.valid(drawn, ())


def samples(*versions: int) -> list[Sample]:
    """Two responses of each version, each to a prompt of its own."""
    texts = [("1", 0.0), ("23", 1.0)]
    return [
        Sample(f"{v + 1}>", text, reward=r, version=v, role="policy", id=10 * k + i)
        for k, v in enumerate(versions)
        for i, (text, r) in enumerate(texts)
    ]


def test_fresh_is_what_the_present_weights_made(tmp_path: Path) -> None:
    valid = valid_of(feed(tiny(tmp_path)), DrawnGroups(samples(5, 4, -1)))
    assert valid.recent(5) == [True, True, False, False, False, False]
    assert valid.recent(4) == [False, False, True, True, False, False]
    assert not valid.dropped


def test_what_is_not_valid_is_counted_by_reason(tmp_path: Path) -> None:
    made = feed(tiny(tmp_path))
    good, lone = samples(1), samples(3)
    unscored = good[0].replace(reward=None, id=30)
    drawn = DrawnGroups([*good, unscored, lone[0]], [], [DamagedSample(31, lone[0].prompt_id, None)])
    valid = valid_of(made, drawn)
    assert [s.id for s in valid.samples] == [0, 1]
    assert valid.dropped == {
        "no reward": 1,
        "damaged": 1,
        "group too small after others were dropped": 1,
    }
    assert all(s.tokens is not None for s in valid.samples)


def test_only_rows_whose_log_probs_are_read_must_know_over_which_tokens(tmp_path: Path) -> None:
    """luffy reads none of experts': theirs may be over what top-p left, which isn't recorded."""
    made = feed(tiny(tmp_path, objective={"name": "luffy"}))
    truncated = [s.replace(sampling={"temperature": 1.0, "top_p": 0.9}) for s in samples(5)]
    experts = [s.replace(role="expert") for s in truncated]
    assert len(valid_of(made, DrawnGroups(experts)).samples) == 2
    with pytest.raises(Refused, match=r"behavior_logp.*2 don't.*sampled with top_p 0\.9"):
        valid_of(made, DrawnGroups([*truncated, *experts]))


def test_nothing_valid_is_no_batch(tmp_path: Path) -> None:
    made = feed(tiny(tmp_path))
    assert made.batch(valid_of(made, DrawnGroups([])), 1, made.phase.options(Position())) is None


def test_the_reference_of_an_objective_is_of_all_rows(tmp_path: Path) -> None:
    made = feed(tiny(tmp_path))
    valid = valid_of(made, DrawnGroups(samples(5, 2)))
    data = made.batch(valid, 1, made.phase.options(Position()))
    assert data is not None
    batch = data.batch
    assert torch.equal(batch.ref_logp, made.learner.logp(batch, "reference"))
    assert not torch.equal(batch.ref_logp, made.learner.logp(batch))
    assert batch.age.tolist() == [0, 0, 3, 3]


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": {"name": "rloo"}, "evaluate__beta": 0.5},
        {"objective": {"name": "agro", "beta": {"start": 0.1, "end": 0.0, "steps": 1}}},
    ],
)
def test_the_reference_of_diagnostics_is_of_fresh_rows(tmp_path: Path, changes: dict) -> None:
    """Where the objective doesn't need it, or no longer: a schedule has ended at β = 0."""
    made = feed(tiny(tmp_path, **changes))
    data = made.batch(valid_of(made, DrawnGroups(samples(2, 5))), 2, made.phase.options(Position(step=1)))
    assert data is not None
    batch = data.batch
    expected = made.learner.logp(batch, "reference")[2:][batch.mask[2:]]
    assert batch.ref_logp[:2].isnan().all()
    torch.testing.assert_close(batch.ref_logp[2:][batch.mask[2:]], expected, **rounding(expected))


def test_no_reference_where_nothing_needs_it(tmp_path: Path) -> None:
    made = feed(tiny(tmp_path, objective={"name": "rloo"}))
    data = made.batch(valid_of(made, DrawnGroups(samples(5))), 1, made.phase.options(Position()))
    assert data is not None
    batch = data.batch
    assert batch.ref_logp is None
    assert batch.old_logp is None


def test_old_log_probs_are_the_learners_of_now(tmp_path: Path) -> None:
    made = feed(tiny(tmp_path, objective={"name": "grpo", "ratio": "old"}))
    data = made.batch(valid_of(made, DrawnGroups(samples(5))), 1, made.phase.options(Position()))
    assert data is not None
    batch = data.batch
    assert torch.equal(batch.old_logp, made.learner.logp(batch))


def test_groups_are_replayed_by_the_mean_power_of_their_rewards() -> None:
    """Rewards 4 and 0 at the power ½: (2 + 10⁻³)/2, ε = 10⁻⁶; one without a reward counts nowhere."""
    rewards = {"a": (4.0, 0.0), "b": (-1.0, None)}
    samples = [
        Sample(p, str(i), reward=r, prompt_id=p) for p, of in rewards.items() for i, r in enumerate(of)
    ]
    found = by_reward(samples, 0.5)
    assert found["a"] == pytest.approx(math.log((2 + 1e-3) / 2), abs=1e-6)
    assert found["b"] == pytest.approx(0.0, abs=1e-6)


def test_samples_of_an_episode_are_one_response() -> None:
    rows = [
        Sample("a", "1", prompt_id="p", episode="e"),
        Sample("a", "2", prompt_id="p", episode="e"),
        Sample("a", "3", prompt_id="p"),
        Sample("a", "4", prompt_id="q", episode="e"),
    ]
    assert [s.response for s in one_each(rows)] == ["2", "3", "4"]
    assert count_responses(rows) == {"p": 2, "q": 1}
