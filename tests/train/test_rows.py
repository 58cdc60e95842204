"""Episodes of several rows in a run: each is one response, used whole or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_runs import before_step, metrics, tiny

from agro.api.reporting_trainer import Trainer
from agro.config import PolicyConfig
from agro.errors import Refused
from agro.models.encoding import InvalidSample
from agro.models.policy import Policy
from agro.objectives.needs import REWARD
from agro.rollout import CollectResult
from agro.store import DrawnGroups, Store
from agro.store.drawing import Draws
from agro.train.collate import collate
from agro.train.feed import Feed, Valid, select_valid
from agro.train.learner import Local
from agro.train.measure import describe_batch
from agro.train.monitors.heldout import HeldOutGroups
from agro.types import Sample


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return Policy.load(PolicyConfig(new=tiny(tmp_path).policy.new))


def row(
    policy: Policy, response: str, episode: str | None = None, *, later: bool = False, **fields
) -> Sample:
    plain = policy.encode(Sample("100>", response, reward=1.0, prompt_id="p"))
    assert plain.tokens is not None
    assert plain.action is not None
    context = {"context_tokens": plain.tokens[~plain.action]} if later else {}
    return plain.replace(episode=episode, **context, **fields)


def test_an_episode_that_loses_a_row_leaves_whole(tmp_path: Path, policy: Policy) -> None:
    rows = [
        row(policy, "1", "e"),
        row(policy, "2" * 8, "e", later=True),
        row(policy, "3"),
        row(policy, "4", "f"),
        row(policy, "5", "f", later=True),
    ]
    valid = select_valid(DrawnGroups(rows), policy.encoder, 12, {REWARD})
    assert [s.response for s in valid.samples] == ["3", "4", "5"]
    assert valid.dropped == {"too long": 1, "another row of its episode was dropped": 1}


def test_episodes_of_two_prompts_may_have_one_name(policy: Policy) -> None:
    """That of p loses a row and leaves; that of q stays, and is no part of the other one's responses."""
    rows = [row(policy, "1", "e"), row(policy, "2", "e", later=True)]
    others = [r.replace(prompt_id="q", reward=0.0) for r in rows]
    assert collate([*rows, *others], 0).response.tolist() == [0, 0, 1, 1]
    drawn = DrawnGroups([rows[0], row(policy, "2" * 8, "e", later=True), *others])
    assert [s.prompt_id for s in select_valid(drawn, policy.encoder, 12, {REWARD}).samples] == ["q", "q"]


def test_an_episode_with_a_damaged_row_leaves_whole(tmp_path: Path, policy: Policy) -> None:
    with Store.open(tmp_path / "log.db") as store:
        for g in range(4):
            for e in range(3):
                store.append(
                    row(policy, str(i), f"{g}-{e}", later=bool(i), reward=float(e)).replace(prompt_id=str(g))
                    for i in range(2)
                )
        store._database.run("UPDATE samples SET response = 'x' WHERE id = 2")
    config = tiny(tmp_path, data__store=str(tmp_path / "log.db"), data__replay=1.0, train__steps=1)
    [found] = metrics(Trainer(config, tmp_path / "run").run())
    assert found["dropped_reasons"] == {"damaged": 1, "another row of its episode was dropped": 1}


def test_means_are_over_responses(policy: Policy) -> None:
    """A response of 4 tokens in two rows (each with its end token), reward 1, and one of 2, reward 0."""
    rows = [row(policy, "1", "e"), row(policy, "2", "e", later=True), row(policy, "3", reward=0.0)]
    rows = [
        s.replace(meta={"finish": "stop" if s.episode else "length", "reward_parts": {"a": s.reward}})
        for s in rows
    ]
    found = describe_batch(Valid(rows), CollectResult(), 0)
    assert (found["reward_mean"], found["reward_std"]) == (0.5, pytest.approx(0.5**0.5))
    assert (found["length_mean"], found["truncated_share"], found["reward_parts"]) == (3.0, 0.5, {"a": 0.5})


def test_failed_rewards_and_requests_are_counted_apart(policy: Policy) -> None:
    found = describe_batch(Valid([row(policy, "1")]), CollectResult(failed=1, failed_requests=3), 0)
    assert (found["rewards_failed"], found["requests_failed"]) == (1, 3)


def test_a_held_out_group_of_one_episode_is_none(tmp_path: Path, policy: Policy) -> None:
    with Store.open(tmp_path / "held.db") as store:
        store.append([row(policy, "1", "e"), row(policy, "2", "e", later=True)])
    with pytest.raises(
        Refused, match="expected groups of two or more scored responses, got none among 1 groups"
    ):
        HeldOutGroups.load(
            tiny(tmp_path, data__eval_store=str(tmp_path / "held.db")), Local(policy, None, print)
        )


def test_a_later_row_of_another_tokenizer_is_left_out(policy: Policy) -> None:
    """Its context isn't the prompt, and only the other tokenizer knows it."""
    policy.encode(row(policy, "1", "e").replace(tokenizer="another"))
    with pytest.raises(InvalidSample, match="another context than the prompt"):
        policy.encode(row(policy, "1", "e", later=True).replace(tokenizer="another"))


class Far:
    """Weights away from the reference's; and what kl_ref is of that step's rows."""

    def __call__(self, feed: Feed, valid: Valid) -> None:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in feed.learner.policy.weights().values():
                p.add_(0.1 * torch.randn(p.shape, generator=generator))
        total = 0.0
        for s in valid.samples:
            tokens, mask = torch.tensor(s.tokens)[None].long(), torch.tensor(s.mask)[None]
            with torch.no_grad():
                ours, theirs = (
                    p.streams(tokens, torch.tensor([len(s.tokens)]), mask)["logp"][mask]
                    for p in (feed.learner.policy, feed.learner.reference)
                )
            total += float((ours - theirs).sum())
        self.expected = total / len({s.episode for s in valid.samples})


def test_kl_is_of_a_response(tmp_path: Path, monkeypatch) -> None:
    """Each sampled response is made an episode together with its neighbor of the group."""
    real = Draws.draw_picked

    def paired(*args, **kwargs):
        drawn = real(*args, **kwargs)
        found = drawn.samples
        first = {s.id: found[i - i % 2] for i, s in enumerate(found)}
        rows = [s.replace(episode=str(first[s.id].id), reward=first[s.id].reward) for s in found]
        return replace(drawn, samples=rows)

    monkeypatch.setattr(Draws, "draw_picked", paired)
    far = Far()
    with before_step(far):
        config = tiny(tmp_path, sampler__n=4, train__steps=1, guard__logp_diff=0)  # the sampler was nearer
        [found] = metrics(Trainer(config, tmp_path / "run").run())
    assert found["kl_ref"] == pytest.approx(far.expected, rel=1e-4)
