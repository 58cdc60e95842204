"""The feed: what of a draw is valid, with rewards of one scale and episodes used whole or not at all, and
what a batch gets besides the samples.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import rounding
from tiny_runs import before_step, metrics, run_tiny, tiny, total_logp

from agro.config import PolicyConfig, RewardConfig, RunConfig
from agro.errors import Refused
from agro.models.encoding import InvalidSample
from agro.models.policy import Policy
from agro.models.reference import load_reference
from agro.objectives.needs import REWARD
from agro.rollout import Activity, CollectResult
from agro.store import DamagedSample, DrawnGroups, Store
from agro.store.drawing import Draws
from agro.train.collate import StoredValues, collate
from agro.train.feed import Feed, Valid, count_responses, one_each, priorities, select_valid
from agro.train.learner import Local
from agro.train.measure import describe_batch
from agro.train.monitors.heldout import HeldOutLog
from agro.train.phases import Phase, Position
from agro.train.trainable import check_drawn, check_scales, check_store, rescaled
from agro.types import Batch, Sample


def feed(config: RunConfig, values: StoredValues | None = None) -> Feed:
    policy = Policy.load(config.policy, seed=0)
    learner = Local(policy, load_reference(config.policy, policy), print)
    learner.enter(config, began=None, resumed=None)
    with torch.no_grad():  # so that the policy isn't its reference
        for w in policy.weights().values():
            w.add_(0.1)
    learner.version = 5
    [phase] = Phase.all(config)
    return Feed(phase, None, learner, None, "", Activity(), values)  # type: ignore[arg-type]


def valid_of(made: Feed, *drawn: Sample, **more: Any) -> Valid:
    return made.valid(DrawnGroups(list(drawn), **more), ())


def samples(*versions: int) -> list[Sample]:
    """Two responses of each version, each to a prompt of its own."""
    texts = [("1", 0.0), ("23", 1.0)]
    return [
        Sample(f"{v + 1}>", text, reward=r, version=v, role="policy", id=10 * k + i)
        for k, v in enumerate(versions)
        for i, (text, r) in enumerate(texts)
    ]


def test_fresh_is_what_the_present_weights_made(tmp_path: Path) -> None:
    valid = valid_of(feed(tiny(tmp_path)), *samples(5, 4, -1))
    assert valid.recent(5) == [True, True, False, False, False, False]
    assert valid.recent(4) == [False, False, True, True, False, False]
    assert not valid.dropped


def test_what_is_not_valid_is_counted_by_reason(tmp_path: Path) -> None:
    good, lone = samples(1), samples(3)
    unscored = good[0].replace(reward=None, id=30)
    damaged = [DamagedSample(31, lone[0].prompt_id, None)]
    valid = valid_of(feed(tiny(tmp_path)), *good, unscored, lone[0], damaged=damaged)
    assert [s.id for s in valid.samples] == [0, 1]
    reasons = ("no reward", "damaged", "group too small after others were dropped")
    assert valid.dropped == dict.fromkeys(reasons, 1)
    assert all(s.tokens is not None for s in valid.samples)


def test_only_rows_whose_log_probs_are_read_must_know_over_which_tokens(tmp_path: Path) -> None:
    """luffy reads none of experts': theirs may be over what top-p left, which isn't recorded."""
    made = feed(tiny(tmp_path, objective={"name": "luffy"}))
    truncated = [s.replace(sampling={"temperature": 1.0, "top_p": 0.9}) for s in samples(5)]
    experts = [s.replace(role="expert") for s in truncated]
    assert len(valid_of(made, *experts).samples) == 2
    with pytest.raises(Refused, match=r"behavior_logp.*2 don't.*sampled with top_p 0\.9"):
        valid_of(made, *truncated, *experts)


def batch_of(made: Feed, *versions: int) -> Batch:
    """Of the second step."""
    return made.batch(valid_of(made, *samples(*versions)), 2, made.phase.options(Position(step=1))).batch


SCHEDULED = {"name": "agro", "beta": {"start": 0.1, "end": 0.0, "steps": 1}}


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({}, [0, 1, 2, 3]),
        ({"objective": {"name": "rloo"}, "evaluate__beta": 0.5}, [2, 3]),  # of diagnostics, on fresh rows
        ({"objective": SCHEDULED}, [2, 3]),  # it has ended at β = 0
        ({"objective": {"name": "rloo"}}, None),
    ],
)
def test_the_reference_is_of_the_rows_that_are_read(
    tmp_path: Path, changes: dict, known: list[int] | None
) -> None:
    made = feed(tiny(tmp_path, **changes))
    batch = batch_of(made, 2, 5)
    assert batch.old_logp is None
    assert batch.staleness.tolist() == [3, 3, 0, 0]
    if known is None:
        assert batch.ref_logp is None
        return
    expected = made.learner.logp(batch, "reference")[known][batch.mask[known]]
    torch.testing.assert_close(batch.ref_logp[known][batch.mask[known]], expected, **rounding(expected))
    assert not torch.equal(expected, made.learner.logp(batch)[known][batch.mask[known]])
    others = [row for row in range(4) if row not in known]
    assert batch.ref_logp[others].isnan().all()


def test_old_log_probs_are_the_learners_of_now(tmp_path: Path) -> None:
    made = feed(tiny(tmp_path, objective={"name": "grpo", "ratio": "old"}))
    batch = batch_of(made, 5)
    assert torch.equal(batch.old_logp, made.learner.logp(batch))


def test_groups_are_replayed_by_the_mean_power_of_their_rewards() -> None:
    """Rewards 4 and 0 at the power ½: (2 + 10⁻³)/2, ε = 10⁻⁶; one without a reward counts nowhere."""
    rewards = [("a", 4.0), ("a", 0.0), ("b", -1.0), ("b", None)]
    samples = [Sample(p, str(i), reward=r, prompt_id=p) for i, (p, r) in enumerate(rewards)]
    assert priorities(samples, 0.5) == pytest.approx({"a": math.log((2 + 1e-3) / 2), "b": 0.0}, abs=1e-6)


def test_samples_of_an_episode_are_one_response() -> None:
    rows = [
        Sample("a", text, prompt_id=prompt_id, episode=episode)
        for text, prompt_id, episode in (("1", "p", "e"), ("2", "p", "e"), ("3", "p", None), ("4", "q", "e"))
    ]
    assert [s.response for s in one_each(rows)] == ["2", "3", "4"]
    assert count_responses(rows) == {"p": 2, "q": 1}


GRADES = {"annotators": {"factor": 0.25, "offset": -0.25}}  # 1 … 5 to 0 … 1


def data(**values: object):
    return RunConfig.of({"data": values}).data


def made(source: str, *rewards: float, prompt: str = "1>") -> list[Sample]:
    return [Sample(prompt, str(i), reward=r, role="log", source=source) for i, r in enumerate(rewards)]


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "log.db") as store:
        store.append([*made("checker", 0.0, 1.0), *made("annotators", 1.0, 5.0)])
        yield store


def test_sources_of_different_scales_are_refused_where_they_meet(store):
    words = r"checker go from 0 to 1, those of annotators from 1 to 5.*reward_scale"
    with pytest.raises(Refused, match=words):
        check_scales(data(), store)
    check_scales(data(reward_scale={**GRADES, "checker": {}}), store)
    check_scales(data(reward_scale=GRADES), store)  # mapped, the ranges agree
    check_scales(data(sources=["checker"]), store)
    agro, sft = (Phase("", RunConfig.of({"objective": {"name": name}}), 0, 1) for name in ("agro", "sft"))
    with pytest.raises(Refused, match="different scales"):
        check_store(agro, store)
    check_store(sft, store)  # reads no rewards


def test_apart_or_within_one_scale_they_may_have_any_range(tmp_path):
    with Store.open(tmp_path / "log.db") as store:
        store.append([*made("a", 0.0, 0.01), *made("b", 0.9, 1.0), *made("c", -1.0, 2.9)])
        store.append(made("d", 1.0, 100.0, prompt="2>"))
        check_scales(data(), store)


def test_a_map_changes_rewards_and_those_of_tokens():
    [sample] = made("annotators", 5.0)
    of_tokens = {"tokens": [1, 2], "action": [False, True], "token_reward": [math.nan, 4.0]}
    [mapped] = rescaled([sample.replace(tokenizer="t", **of_tokens)], data(reward_scale=GRADES))
    assert (mapped.reward, mapped.token_reward[1]) == (1.0, 1.0)
    assert rescaled(made("checker", 1.0), data(reward_scale=GRADES))[0].reward == 1.0


def test_a_step_is_refused_too_where_scales_meet_that_the_store_did_not_show():
    with pytest.raises(Refused, match="meet in groups of this step"):
        check_drawn([*made("policy", 0.0, 1.0), *made("annotators", 4.0)], data())
    check_drawn([*made("policy", 0.0), *made("annotators", 4.0, prompt="2>")], data())


def test_a_run_trains_on_mapped_rewards(tmp_path, store):
    log = {"store": str(store.path), "replay": 1.0, "reward_scale": GRADES}
    rewards = []
    with before_step(lambda feed, valid: rewards.extend(s.reward for s in valid.samples)):
        run_tiny(tmp_path, data=log, train__steps=1, train__groups=1)
    assert sorted(rewards) == [0.0, 0.0, 1.0, 1.0]


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return Policy.load(PolicyConfig(new=tiny(tmp_path).policy.new))


def row(
    policy: Policy, response: str, episode: str | None = None, *, later: bool = False, **fields
) -> Sample:
    plain = policy.encode(Sample("100>", response, reward=1.0, prompt_id="p"))
    context = {"context_tokens": plain.tokens[~plain.action]} if later else {}
    return plain.replace(episode=episode, **context, **fields)


def an_episode(policy: Policy, name: str = "e", second: str = "2", **fields) -> list[Sample]:
    """Its two rows."""
    return [row(policy, "1", name, **fields), row(policy, second, name, later=True, **fields)]


TOO_LONG = "2" * 8


def test_an_episode_that_loses_a_row_leaves_whole(policy: Policy) -> None:
    rows = [*an_episode(policy, "e", TOO_LONG), row(policy, "3"), *an_episode(policy, "f", "5")]
    valid = select_valid(DrawnGroups(rows), policy.encoder, 12, {REWARD})
    assert [s.response for s in valid.samples] == ["3", "1", "5"]
    assert valid.dropped == {"too long": 1, "another row of its episode was dropped": 1}


def test_episodes_of_two_prompts_may_have_one_name(policy: Policy) -> None:
    """That of p loses a row and leaves; that of q stays, and is no part of the other one's responses."""
    others = an_episode(policy, prompt_id="q", reward=0.0)
    assert collate([*an_episode(policy), *others], 0).response.tolist() == [0, 0, 1, 1]
    drawn = DrawnGroups([*an_episode(policy, "e", TOO_LONG), *others])
    assert [s.prompt_id for s in select_valid(drawn, policy.encoder, 12, {REWARD}).samples] == ["q", "q"]


def test_an_episode_with_a_damaged_row_leaves_whole(tmp_path: Path, policy: Policy) -> None:
    with Store.open(tmp_path / "log.db") as store:
        for g in range(4):
            for e in range(3):
                store.append(an_episode(policy, f"{g}-{e}", prompt_id=str(g), reward=float(e)))
        store.tables.run("UPDATE samples SET response = 'x' WHERE id = 2")
    log = {"data__store": str(tmp_path / "log.db"), "data__replay": 1.0}
    [found] = metrics(run_tiny(tmp_path, **log, train__steps=1))
    assert found["dropped_reasons"] == {"damaged": 1, "another row of its episode was dropped": 1}


def test_means_are_over_responses(policy: Policy) -> None:
    """A response of 4 tokens in two rows (each with its end token), reward 1, and one of 2, reward 0."""
    rows = an_episode(policy, meta={"finish": "stop", "reward_parts": {"a": 1.0}})
    rows.append(row(policy, "3", reward=0.0, meta={"finish": "length", "reward_parts": {"a": 0.0}}))
    found = describe_batch(Valid(rows), 0, RewardConfig())
    assert (found["reward_mean"], found["reward_std"]) == (0.5, pytest.approx(0.5**0.5))
    assert (found["length_mean"], found["truncated_share"], found["reward_parts"]) == (3.0, 0.5, {"a": 0.5})


def test_failed_rewards_and_requests_are_counted_apart(policy: Policy) -> None:
    collected = CollectResult(failed=1, measured={"requests_failed": 3})
    found = describe_batch(Valid([row(policy, "1")], collected=collected), 0, RewardConfig())
    assert (found["rewards_failed"], found["requests_failed"]) == (1, 3)


def test_a_held_out_group_of_one_episode_is_none(tmp_path: Path, policy: Policy) -> None:
    with Store.open(tmp_path / "held.db") as store:
        store.append(an_episode(policy))
    [phase] = Phase.all(tiny(tmp_path, data__eval_store=str(tmp_path / "held.db")))
    words = "expected groups of two or more scored responses, got none among 1 groups"
    with pytest.raises(Refused, match=words):
        HeldOutLog.load(phase, Local(policy, None, print), Activity())


def test_a_later_row_of_another_tokenizer_is_left_out(policy: Policy) -> None:
    """Its context isn't the prompt, and only the other tokenizer knows it."""
    first, later = an_episode(policy, tokenizer="another")
    policy.encode(first)
    with pytest.raises(InvalidSample, match="another context than the prompt"):
        policy.encode(later)


def test_kl_is_of_a_response(tmp_path: Path, monkeypatch) -> None:
    """Each sampled response is made an episode together with its neighbor of the group, and the weights are
    moved away from the reference's."""
    real, expected = Draws.draw_picked, []

    def paired(*args, **kwargs):
        drawn = real(*args, **kwargs)
        found = drawn.samples
        first = {s.id: found[i - i % 2] for i, s in enumerate(found)}
        rows = [s.replace(episode=str(first[s.id].id), reward=first[s.id].reward) for s in found]
        return replace(drawn, samples=rows)

    def move(feed: Feed, valid: Valid) -> None:
        policy, reference = feed.learner.policy, feed.learner.reference
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in policy.weights().values():
                p.add_(0.1 * torch.randn(p.shape, generator=generator))
            ratios = [total_logp(policy, s) - total_logp(reference, s) for s in valid.samples]
        expected.append(sum(ratios) / len({s.episode for s in valid.samples}))

    monkeypatch.setattr(Draws, "draw_picked", paired)
    with before_step(move):  # the sampler was nearer, so that nothing guards their difference
        [found] = metrics(run_tiny(tmp_path, sampler__n=4, train__steps=1, guard__logp_diff=0))
    assert found["kl_ref"] == pytest.approx(expected[0], rel=1e-4)
