"""Details of the step that no other test covers: where collate puts things, what the step's passes leave."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from rounding import rounding

from agro import objectives
from agro.errors import Refused
from agro.store import Pair
from agro.train import step
from agro.train.collate import collate, total_reward
from agro.train.step import MicroBatch, Passes, backward, streams_of
from agro.types import Batch, Sample


def sample(tokens: list[int], prompt: int, **fields) -> Sample:
    """The first `prompt` tokens are the prompt's."""
    action = [i >= prompt for i in range(len(tokens))]
    return Sample("p", "r", tokens=np.array(tokens), action=np.array(action), tokenizer="t", **fields)


def test_collate_puts_everything_in_its_place() -> None:
    """A log's dense rewards beside an expert's piece of an episode, padded on the right.

    Unknown stays unknown.
    """
    dense = np.array([math.nan, math.nan, 0.25, 0.5], dtype=np.float32)
    logp = np.array([math.nan, math.nan, -1.0, -2.0], dtype=np.float32)
    version = np.array([7, 7, 7, 5], dtype=np.int32)
    batch = collate(
        [
            sample(
                [4, 5, 6, 7],
                2,
                reward=1.0,
                token_reward=dense,
                behavior_logp=logp,
                version=version,
                id=3,
                prompt_id="a",
                episode="e",
            ),
            sample([8, 9], 1, reward=2.0, episode="e", role="expert", id=4, prompt_id="b"),
            sample([8, 9, 9], 2, reward=2.0, episode="e", role="expert", id=5, prompt_id="b"),
            sample(
                [8, 9], 1, reward=None, token_reward=dense[2:], version=0, role="policy", id=6, prompt_id="b"
            ),
        ],
        9,
        [Pair(6, 4, 3.0, 1.0), Pair(5, 6, 2.0, 4.0)],
    )
    nan = math.nan
    assert batch.tokens is not None
    assert batch.behavior_logp is not None
    assert batch.lengths is not None
    assert batch.mask.tolist() == [
        [False, False, True, True],
        [False, True, False, False],
        [False, False, True, False],
        [False, True, False, False],
    ]
    assert batch.tokens.tolist() == [[4, 5, 6, 7], [8, 9, 0, 0], [8, 9, 9, 0], [8, 9, 0, 0]]
    assert batch.tokens.dtype == torch.long
    assert batch.lengths.tolist() == [4, 2, 3, 2]
    np.testing.assert_array_equal(batch.behavior_logp, [[nan, nan, -1, -2], *[[nan] * 4] * 3])
    np.testing.assert_array_equal(
        batch.extra["token_reward"], [[nan, nan, 0.25, 0.5], [nan] * 4, [nan] * 4, [0.25, 0.5, nan, nan]]
    )
    assert batch.extra["token_reward"].dtype == torch.float64
    assert batch.reward.tolist() == [
        1.75,
        2.0,
        2.0,
        0.75,
    ]  # with the token rewards, which alone are a reward too
    assert batch.pairs is not None
    assert batch.votes is not None
    assert batch.pairs.tolist() == [[3, 1], [2, 3]]
    assert batch.votes.tolist() == [[3, 1], [2, 4]]
    assert batch.group.tolist() == [0, 1, 1, 1]
    assert batch.response.tolist() == [0, 1, 1, 2]  # an episode is one of its prompt
    np.testing.assert_array_equal(batch.age, [4, nan, nan, 9])  # of its oldest token
    assert list(batch.role) == ["log", "expert", "expert", "policy"]
    assert batch.ids == tuple(f"sample {i} (prompt {p})" for i, p in [(3, "a"), (4, "b"), (5, "b"), (6, "b")])


def test_collate_says_nothing_of_what_no_sample_knows() -> None:
    batch = collate([sample([4, 5], 1, reward=1.0), sample([4, 5], 1, reward=0.0)], 0)
    assert batch.behavior_logp is None
    assert list(batch.extra) == ["hinted"]  # which is known of every sample
    assert batch.pairs is None
    assert batch.votes is None
    assert batch.response.tolist() == [0, 1]


def test_token_rewards_of_float32_are_not_summed_in_float32() -> None:
    """There 1e8 + 1 is 1e8."""
    dense = np.array([math.nan, 1e8, 1.0], dtype=np.float32)
    assert collate([sample([4, 5, 6], 1, reward=0.5, token_reward=dense)], 0).reward.tolist() == [100000001.5]


def test_a_reward_of_which_nothing_is_known_is_unknown() -> None:
    unknown = np.full(2, math.nan, dtype=np.float32)
    assert math.isnan(total_reward(sample([4, 5], 1)))
    assert math.isnan(total_reward(sample([4, 5], 1, token_reward=unknown)))
    assert total_reward(sample([4, 5], 1, token_reward=unknown, reward=0.5)) == 0.5
    assert total_reward(sample([4, 5], 1, token_reward=np.array([math.nan, 0.0], dtype=np.float32))) == 0.0


def ragged(policy) -> Batch:
    """Three rows of 6, 3 and 4 tokens, the first token of each the prompt's, two groups."""
    rows = [
        sample([1, 5, 6, 7, 8, 2], 1, reward=1.0, prompt_id="a", version=0),
        sample([1, 5, 2], 1, reward=0.0, prompt_id="a", version=0),
        sample([1, 9, 4, 2], 1, reward=0.5, prompt_id="b", version=0),
    ]
    return collate(rows, 0)


def test_streams_of_a_step_are_0_outside_the_mask_and_carry_no_gradient(tiny) -> None:
    policy = tiny()
    batch = ragged(policy)
    policy.add_value()
    want = ["logp", "value"]
    found = streams_of(policy, batch, want, Passes(MicroBatch(1)))
    assert list(found) == want
    alone = policy.streams(batch.tokens, batch.lengths, batch.mask, want)
    assert found["logp"].shape == batch.mask.shape
    assert (found["logp"][~batch.mask] == 0).all()
    torch.testing.assert_close(
        found["logp"][batch.mask].float(),
        alone["logp"][batch.mask].detach(),
        **rounding(alone["logp"][batch.mask]),
    )
    torch.testing.assert_close(found["value"].float(), alone["value"].detach(), **rounding(alone["value"]))
    assert not any(v.requires_grad for v in found.values())
    assert all(v.dtype == torch.float64 for v in found.values())


@pytest.mark.parametrize("size", [2, 1])
def test_the_step_leaves_streams_and_evaluation_of_all_its_rows(size: int, tiny, monkeypatch) -> None:
    """In one pass of complete groups (2 rows) and in two passes (1).

    Loss and streams are from before the update, activations as configured.
    """
    policy, reference = tiny(), tiny(initializer_range=0.2)
    batch = ragged(policy)
    batch = batch.replace(ref_logp=streams_of(reference, batch, ["logp"], Passes(MicroBatch(3)))["logp"])
    offloaded: list[bool] = []
    called: list[int] = []
    plain = step.activations
    monkeypatch.setattr(step, "activations", lambda active: (offloaded.append(active), plain(active))[1])
    options = objectives.get("agro").resolve("agro", {"beta": 0.5, "singletons": "drop"})
    left = backward(
        policy,
        batch,
        "agro",
        options,
        Passes(MicroBatch(size), check=lambda: called.append(1), offload=True),
    )
    passes = {2: 2, 1: 3}[size]
    assert offloaded == [True] * passes
    assert len(called) == passes
    assert left.batch.ref_logp is batch.ref_logp
    torch.testing.assert_close(
        left.streams["logp"],
        streams_of(policy, batch, ["logp"], Passes(MicroBatch(3)))["logp"],
        **rounding(left.streams["logp"]),
    )
    whole = objectives.evaluate("agro", left.streams["logp"], left.batch, beta=0.5, singletons="drop")
    assert left.evaluation.loss == pytest.approx(whole.loss, rel=1e-12)
    assert left.evaluation.metrics == pytest.approx(whole.metrics, rel=1e-12)
    torch.testing.assert_close(left.evaluation.grad, whole.grad)
    assert not left.streams["logp"].requires_grad
    offloaded.clear()
    backward(policy, batch, "agro", options, Passes(MicroBatch(size)), reference)
    assert offloaded == [False] * passes


def test_the_kl_of_a_first_pass_is_from_the_reference(tiny) -> None:
    policy, reference = tiny(), tiny(initializer_range=0.2)
    batch = ragged(policy)
    found = streams_of(policy, batch, ["kl"], Passes(MicroBatch(1)), reference)["kl"]
    alone = policy.streams(batch.tokens, batch.lengths, batch.mask, ["kl"], reference)["kl"]
    assert (found[batch.mask] > 0.01).all()
    expected = alone[batch.mask].detach()
    torch.testing.assert_close(found[batch.mask].float(), expected, **rounding(expected))


def test_both_passes_are_cut_where_memory_runs_out(tiny, monkeypatch) -> None:
    """A limit in tokens alone: the step's three rows are what is halved first, to 2 and to 1."""
    policy = tiny()
    batch = ragged(policy)
    whole = streams_of(policy, batch, ["logp"], Passes(MicroBatch(3)))["logp"]
    plain = step._forward

    def scarce(policy, batch, rows, *rest):
        if len(rows) > 1:
            raise torch.OutOfMemoryError("no more")
        return plain(policy, batch, rows, *rest)

    monkeypatch.setattr(step, "_forward", scarce)
    micro = MicroBatch(None, 100)
    torch.testing.assert_close(
        streams_of(policy, batch, ["logp"], Passes(micro))["logp"], whole, **rounding(whole)
    )
    assert micro.sequences == 1
    micro = MicroBatch(None, 100)
    left = backward(
        policy,
        batch,
        "rloo",
        objectives.get("rloo").resolve("rloo", {"singletons": "drop"}),
        Passes(micro),
    )
    torch.testing.assert_close(left.streams["logp"], whole, **rounding(whole))
    assert micro.sequences == 1


@pytest.mark.parametrize("size", [2, 1])
def test_a_refusal_in_the_step_names_the_objective(size: int, tiny) -> None:
    policy = tiny()
    batch = ragged(policy)
    batch = batch.replace(reward=batch.reward * math.nan)
    options = objectives.get("rloo").resolve("rloo", {"beta": 0.5, "singletons": "drop"})
    with pytest.raises(Refused, match=r"^objective rloo needs reward"):
        backward(policy, batch, "rloo", options, Passes(MicroBatch(size)), policy)


def test_two_passes_with_the_exact_kl_are_one(tiny) -> None:
    """The squared part, token by token, takes the reference's whole distribution in both passes."""
    policy, reference = tiny(), tiny(initializer_range=0.2)
    batch = ragged(policy)
    batch = batch.replace(ref_logp=streams_of(reference, batch, ["logp"], Passes(MicroBatch(3)))["logp"])
    given = {"beta": 0.5, "squared": "local", "singletons": "drop"}
    options = objectives.get("agro_onpolicy").resolve("agro_onpolicy", given)
    grads = []
    for size in (2, 1):
        backward(policy, batch, "agro_onpolicy", options, Passes(MicroBatch(size)), reference)
        grads.append(torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]))
    assert grads[0].norm() > 1e-3
    torch.testing.assert_close(grads[1], grads[0], **rounding(grads[0]))


def test_a_micro_batch_is_as_wide_as_its_rows_and_judged_by_them(tiny, monkeypatch) -> None:
    """What isn't in the micro-batch costs nothing.

    There is no padding to the step's width, and no forward of a reference whose KL isn't needed.
    """
    policy, reference = tiny(), tiny(initializer_range=0.2)
    batch = ragged(policy)
    batch = batch.replace(ref_logp=torch.where(batch.mask, -1.0, math.nan).double())
    shapes, judged = [], []
    plain, differentiate = policy.streams, step.differentiate

    def streams(tokens, lengths, mask, want, reference, kept=None):
        shapes.append(tuple(tokens.shape))
        assert reference is None
        return plain(tokens, lengths, mask, want, reference)

    def seen(name, objective, streams, batch, options, rows=None):
        judged.append(None if rows is None else rows.tolist())
        return differentiate(name, objective, streams, batch, options, rows)

    monkeypatch.setattr(policy, "streams", streams)
    monkeypatch.setattr(step, "differentiate", seen)
    options = objectives.get("reinforce").resolve("reinforce", {})
    backward(policy, batch, "reinforce", options, Passes(MicroBatch(1)), reference)
    assert shapes == [(1, 6), (1, 4), (1, 3)]  # the longest first
    assert judged == [[0], [2], [1], None]
