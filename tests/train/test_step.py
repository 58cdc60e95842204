"""The step's gradient doesn't depend on how the step is cut, and it is the gradient of the loss; where
collate puts things, and what the step's passes leave."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from rounding import rounding
from tiers import first_of_each
from torch import Tensor

from agro import config, objectives
from agro.errors import Refused
from agro.models.policy import Policy
from agro.proof.claims import claims_of
from agro.store import Pair
from agro.train import step
from agro.train.collate import collate
from agro.train.step import MicroBatch, Passes, backward, by_length, complete, streams_of
from agro.types import Batch, Sample

SIZES = (5, 1, 3, 2)  # ragged groups; 1 only where an objective takes it
# Every entry with the options of each of its claims.
CASES = [
    (name, ({"beta": 0.3} if "beta" in objectives.describe(name)["options"] else {}) | dict(claims.options))
    for name in objectives.names()
    for claims in claims_of(name)
]
CASES.append(("dro", {"beta": 0.0}))


@pytest.fixture(scope="module")
def policies() -> tuple[Policy, Policy]:
    return make_policies()


def make_policies(layers: int = 1) -> tuple[Policy, Policy]:
    """A policy in float64 and another as its reference."""
    spec = config.NewModel(alphabet="abcdef", hidden=16, layers=layers, heads=2, context=64)
    made = [Policy.load(config.PolicyConfig(new=spec, temperature=1.3), seed=s) for s in (0, 1)]
    for p in made:
        p.model.double()
    made[0].add_value()
    torch.nn.init.normal_(made[0].value.linear.weight, generator=torch.Generator().manual_seed(2))
    return made[0], made[1]


def parameters(policy: Policy) -> list[torch.Tensor]:
    return [*policy.model.parameters(), *policy.value_weights().values()]


def samples(policy: Policy, least: int, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    out = []
    for g, n in enumerate(SIZES):
        for _ in range(max(n, least)):
            text = "".join(rng.choice(list("abcdef"), rng.integers(1, 12)))
            s = policy.encode(Sample("fed"[: g % 3 + 1] * (g + 1), text, float(rng.random()), version=0))
            noise = -rng.random(len(s.tokens)).astype(np.float32) * 3
            out.append(s.replace(behavior_logp=np.where(s.action, noise, np.nan).astype(np.float32)))
    return out


def batch_for(name: str, options: dict, policy: Policy, reference: Policy) -> Batch:
    needs = objectives.get(name).needs(resolved(name, **options))
    found = samples(policy, objectives.least_responses(needs))
    found = [s.replace(id=i) for i, s in enumerate(found)]
    both = []
    if "pairs" in needs:
        both = [(a.id, b.id) for a, b in pairwise(found) if a.prompt_id == b.prompt_id]
    batch = collate(found, 0, [Pair(a, b, 3.0, 1.0) for a, b in both])
    if "stored_value" in needs:
        batch = batch.replace(extra={"stored_value": 0.1 * batch.group.double()})
    if "stored_quantile" in needs:
        batch = batch.replace(extra={"stored_quantile": batch.response.double() / len(batch.mask)})
    if "meaning" in needs:
        batch = batch.replace(extra={"meaning": (batch.response // 2).double()})
    if "reward_parts" in needs:
        parts = torch.stack((batch.reward.double(), batch.response.double() % 3), 1)
        weights = torch.tensor([[1.0, 0.5]], dtype=torch.float64).expand(len(parts), 2)
        batch = batch.replace(extra={"reward_parts": parts, "part_weights": weights})
    if "old_value" in needs:
        values = streams_of(policy, batch, ["prefix_value"], passes(4))["prefix_value"]
        batch = batch.replace(old_value=values - 0.1)
    if "old_logp" in needs:
        batch = batch.replace(old_logp=streams_of(policy, batch, ["logp"], passes(4))["logp"] - 0.1)
    if options.get("weight") == "mismatch":  # close to the sampler, so that a mask leaves some responses
        by_row = torch.where(torch.arange(len(batch.mask)) % 3 == 0, 0.2, 0.02)
        batch = batch.replace(behavior_logp=batch.old_logp - by_row[:, None])
    if "ref_logp" in needs:
        batch = batch.replace(ref_logp=streams_of(reference, batch, ["logp"], passes(4))["logp"])
    if "of_reference" in needs:
        batch = batch.replace(behavior_logp=batch.ref_logp)
    return batch


def passes(size: int | None, tokens: int | None = None) -> Passes:
    return Passes(MicroBatch(size, tokens))


def resolved(name: str, **options: Any) -> dict[str, Any]:
    return objectives.get(name).resolve(name, options)


def gradient(
    name: str, options: dict, policy: Policy, reference: Policy, batch: Batch, size: int
) -> torch.Tensor:
    policy.zero_grad()
    backward(policy, batch, name, resolved(name, **options), passes(size), reference)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters(policy)]
    return torch.cat([grad.flatten() for grad in grads])


def kind(case: tuple[str, dict, torch.dtype]) -> object:
    """Rounding alone differs in float32: there one of each file of objectives is enough."""
    return case[0] if case[2] is torch.float64 else objectives.get(case[0]).function.__module__


IN_DTYPES = [(*case, dtype) for dtype in (torch.float64, torch.float32) for case in CASES]


@pytest.mark.parametrize(("name", "options", "dtype"), first_of_each(kind, IN_DTYPES))
def test_gradient_does_not_depend_on_the_micro_batch(name: str, options: dict, dtype, policies) -> None:
    policy, reference = policies
    policy.model.to(dtype)
    reference.model.to(dtype)
    batch = batch_for(name, options, policy, reference)
    whole_step = gradient(name, options, policy, reference, batch, len(batch.mask))
    norm = float(whole_step.double().norm())
    assert norm > 1e-6
    bound = rounding(1.0)["atol"]
    sizes: tuple[int, ...] = (2,)  # rounding alone differs from float64, where each size is tried
    if dtype == torch.float64:
        bound, sizes = 1e-10, (1, 2, 3)
    for size in sizes:
        cut = gradient(name, options, policy, reference, batch, size)
        assert float((cut - whole_step).double().norm()) <= bound * norm, size
    policy.model.double()
    reference.model.double()


def test_nor_does_that_of_two_layers() -> None:
    policy, reference = make_policies(layers=2)
    batch = batch_for("agro", {"beta": 0.3}, policy, reference)
    whole_step = gradient("agro", {"beta": 0.3}, policy, reference, batch, len(batch.mask))
    cut = gradient("agro", {"beta": 0.3}, policy, reference, batch, 2)
    assert float((cut - whole_step).norm()) <= 1e-10 * float(whole_step.norm())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("agro", {"beta": 0.3, "scale": "loss"}), ("rloo", {}), ("sft", {})),
        *((name, {"beta": 0.3}) for name in ("kl_pg", "grpo", "pair_consistency", "dpo")),
    ],
)
def test_gradient_is_the_loss_differentiated(name: str, options: dict, policies) -> None:
    """Central differences of the loss along the gradient, whose slope is its norm."""
    policy, reference = policies
    batch = batch_for(name, options, policy, reference)
    norm = float(gradient(name, options, policy, reference, batch, 3).norm())
    assert not any(p.grad.any() for p in policy.value.parameters() if p.grad is not None)
    direction = [p.grad / norm for p in policy.model.parameters()]
    # Llama's norms round to float32 inside, whatever its weights: a smaller shift would measure that
    loss = partial(loss_of, policy, batch, name, options, reference)
    slope = slope_along(direction, policy.model.parameters(), loss)
    assert slope == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("name", ["dro", "prefix_consistency"])
def test_gradient_of_the_value_is_the_loss_differentiated(name: str, policies) -> None:
    policy, reference = policies
    options = {"beta": 0.3}
    batch = batch_for(name, options, policy, reference)
    gradient(name, options, policy, reference, batch, 3)
    found = [p.grad.clone() for p in policy.value.parameters() if p.grad is not None]
    assert all(g.abs().max() > 1e-3 for g in found)
    loss = partial(loss_of, policy, batch, name, options, reference)
    slope = slope_along(found, policy.value.parameters(), loss)
    assert slope == pytest.approx(sum(float(g.square().sum()) for g in found), rel=1e-6)


def test_the_value_does_not_change_what_it_reads(policies) -> None:
    policy, _ = policies
    batch = collate(samples(policy, 2), 0)
    policy.zero_grad()
    out = policy.streams(batch.tokens, batch.lengths, batch.mask, ("logp", "value", "prefix_value"))
    out["value"].sum().backward()
    assert all(p.grad is None for p in policy.model.parameters())
    first = batch.mask.int().argmax(1)
    rows = torch.arange(len(first))
    assert torch.equal(out["value"], out["prefix_value"][rows, first])
    hidden = policy.hidden(batch.tokens, batch.lengths)[rows, first - 1]
    unit = hidden / hidden.norm(dim=1, keepdim=True)
    assert torch.allclose(out["value"], policy.value.linear(unit)[:, 0])
    assert out["prefix_value"][~batch.mask].isnan().all()


def slope_along(
    direction: Sequence[Tensor], parameters: Iterable[Tensor], value: Callable[[], float], h: float = 1e-3
) -> float:
    """Central difference of `value` when the parameters move along `direction`."""
    moved = list(zip(parameters, direction, strict=True))

    def at(shift: float) -> float:
        with torch.no_grad():
            for p, d in moved:
                p += shift * d
            out = value()
            for p, d in moved:
                p -= shift * d
        return out

    return (at(h) - at(-h)) / (2 * h)


def loss_of(policy: Policy, batch: Batch, name: str, options: dict, reference: Policy) -> float:
    with torch.enable_grad():
        left = backward(policy, batch, name, resolved(name, **options), passes(100), reference)
    return left.evaluation.loss


def test_first_pass_falls_away_where_a_micro_batch_holds_what_couples(policies, monkeypatch) -> None:
    policy, reference = policies
    batch = batch_for("agro", {"beta": 0.3}, policy, reference)
    batch = batch.replace(ref_logp=streams_of(reference, batch, ["logp"], passes(4))["logp"])
    calls: list[int] = []
    plain = policy.streams

    def counted(tokens, *args):
        calls.append(len(tokens))
        return plain(tokens, *args)

    monkeypatch.setattr(policy, "streams", counted)
    options = resolved("agro", beta=0.3)
    backward(policy, batch, "agro", options, passes(5))
    assert sum(calls) == len(batch.mask)  # one pass
    calls.clear()
    backward(policy, batch, "agro", options, passes(4))  # the group of 5 doesn't fit
    assert sum(calls) == 2 * len(batch.mask)


def test_micro_batches_hold_whole_groups_and_every_row_once(policies) -> None:
    policy, _ = policies
    batch = collate(samples(policy, 1), 0)
    parts = complete(batch, "group", MicroBatch(5))
    assert sorted(torch.cat(parts).tolist()) == list(range(len(batch.mask)))
    for g in range(batch.n_groups):
        assert sum((batch.group[p] == g).any().item() for p in parts) == 1
    assert complete(batch, "group", MicroBatch(4)) is None
    assert complete(batch, "step", MicroBatch(len(batch.mask) - 1)) is None
    assert sorted(torch.cat(by_length(batch, MicroBatch(3))).tolist()) == list(range(len(batch.mask)))


@pytest.mark.parametrize(
    ("name", "options"),
    [("rloo", {"beta": 0.3}), ("dro", {"beta": 0.3}), ("topr", {"baseline": 0.5}), ("gspo", {})],
)
def test_rows_of_one_episode_stay_together_or_need_a_first_pass(name: str, options: dict, policies) -> None:
    """All but rloo couple by row, and the ratio of a response is that of all its rows."""
    policy, reference = policies
    six = enumerate(samples(policy, 2)[:6])
    rows = [s.replace(episode=f"e{i // 2}", reward=float(i // 2), prompt_id="p") for i, s in six]
    batch = collate(rows, 0)
    batch = batch.replace(ref_logp=streams_of(reference, batch, ["logp"], passes(4))["logp"])
    full = gradient(name, options, policy, reference, batch, 6)
    for size in (1, 2, 3):
        cut = gradient(name, options, policy, reference, batch, size)
        assert torch.allclose(cut, full, rtol=1e-10, atol=1e-13)


def test_a_pass_over_nothing_leaves_a_gradient_of_zero_everywhere(policies) -> None:
    """As on a rank without rows, whose sharded parameters take part in every pass."""

    class Nothing(Passes):
        def share(self, parts: list[torch.Tensor]) -> list[torch.Tensor | None]:
            return [None]

    policy, reference = policies
    batch = batch_for("dro", {"beta": 0.3}, policy, reference)
    policy.zero_grad()
    backward(policy, batch, "dro", resolved("dro", beta=0.3), Nothing(MicroBatch(4)), reference)
    assert all(p.grad is not None and not p.grad.any() for p in parameters(policy))


def sample(tokens: list[int], prompt: int, **fields) -> Sample:
    """The first `prompt` tokens are the prompt's."""
    action = [i >= prompt for i in range(len(tokens))]
    return Sample("p", "r", tokens=np.array(tokens), action=np.array(action), tokenizer="t", **fields)


def test_collate_puts_everything_in_its_place() -> None:
    """A log's dense rewards beside an expert's piece of an episode, padded on the right. Unknown stays so."""
    dense = np.array([math.nan, math.nan, 0.25, 0.5], dtype=np.float32)
    logp = np.array([math.nan, math.nan, -1.0, -2.0], dtype=np.float32)
    known = {"token_reward": dense, "behavior_logp": logp, "version": np.array([7, 7, 7, 5], dtype=np.int32)}
    expert = {"reward": 2.0, "episode": "e", "role": "expert", "prompt_id": "b"}
    rows = [
        sample([4, 5, 6, 7], 2, reward=1.0, episode="e", id=3, prompt_id="a", **known),
        sample([8, 9], 1, id=4, **expert),
        sample([8, 9, 9], 2, id=5, **expert),
        sample([8, 9], 1, token_reward=dense[2:], version=0, role="policy", id=6, prompt_id="b"),
    ]
    batch = collate(rows, 9, [Pair(6, 4, 3.0, 1.0), Pair(5, 6, 2.0, 4.0)])
    nan = math.nan
    expected = {
        "mask": [[0, 0, 1, 1], [0, 1, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0]],
        "tokens": [[4, 5, 6, 7], [8, 9, 0, 0], [8, 9, 9, 0], [8, 9, 0, 0]],
        "lengths": [4, 2, 3, 2],
        "reward": [1.75, 2.0, 2.0, 0.75],  # with the token rewards, which alone are a reward too
        "pairs": [[3, 1], [2, 3]],
        "votes": [[3, 1], [2, 4]],
        "group": [0, 1, 1, 1],
        "response": [0, 1, 1, 2],  # an episode is one of its prompt
    }
    assert {name: getattr(batch, name).tolist() for name in expected} == expected
    assert (batch.mask.dtype, batch.tokens.dtype) == (torch.bool, torch.long)
    np.testing.assert_array_equal(batch.behavior_logp, [[nan, nan, -1, -2], *[[nan] * 4] * 3])
    of_tokens = [[nan, nan, 0.25, 0.5], [nan] * 4, [nan] * 4, [0.25, 0.5, nan, nan]]
    np.testing.assert_array_equal(batch.extra["token_reward"], of_tokens)
    assert batch.extra["token_reward"].dtype == torch.float64
    np.testing.assert_array_equal(batch.staleness, [4, nan, nan, 9])  # of its oldest token
    assert list(batch.role) == ["log", "expert", "expert", "policy"]
    assert batch.ids == tuple(f"sample {i} (prompt {p})" for i, p in [(3, "a"), (4, "b"), (5, "b"), (6, "b")])


def test_collate_says_nothing_of_what_no_sample_knows() -> None:
    batch = collate([sample([4, 5], 1, reward=1.0), sample([4, 5], 1, reward=0.0)], 0)
    assert (batch.behavior_logp, batch.pairs, batch.votes) == (None, None, None)
    assert list(batch.extra) == ["hinted"]  # which is known of every sample
    assert batch.response.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("reward", "of_tokens", "total"),
    [
        (None, None, math.nan),
        (None, [math.nan] * 3, math.nan),
        (0.5, [math.nan] * 3, 0.5),
        (None, [math.nan, 0.0, math.nan], 0.0),
        (0.5, [math.nan, 1e8, 1.0], 100000001.5),  # in float32 1e8 + 1 is 1e8
    ],
)
def test_a_reward_is_the_sum_of_what_is_known(reward, of_tokens, total) -> None:
    dense = None if of_tokens is None else np.array(of_tokens, np.float32)
    batch = collate([sample([4, 5, 6], 1, reward=reward, token_reward=dense)], 0)
    np.testing.assert_equal(batch.reward.tolist(), [total])


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
    found = streams_of(policy, batch, want, passes(1))
    assert list(found) == want
    alone = policy.streams(batch.tokens, batch.lengths, batch.mask, want)
    assert found["logp"].shape == batch.mask.shape
    assert (found["logp"][~batch.mask] == 0).all()
    logp = alone["logp"][batch.mask].detach()
    torch.testing.assert_close(found["logp"][batch.mask].float(), logp, **rounding(logp))
    torch.testing.assert_close(found["value"].float(), alone["value"].detach(), **rounding(alone["value"]))
    assert {(v.requires_grad, v.dtype) for v in found.values()} == {(False, torch.float64)}


@pytest.mark.parametrize("size", [2, 1])
def test_the_step_leaves_streams_and_evaluation_of_all_its_rows(size: int, tiny, monkeypatch) -> None:
    """In one pass of complete groups (2 rows) and in two passes (1).

    Loss and streams are from before the update, activations as configured."""
    policy, reference = tiny(), tiny(initializer_range=0.2)
    batch = ragged(policy)
    batch = batch.replace(ref_logp=streams_of(reference, batch, ["logp"], passes(3))["logp"])
    offloaded: list[bool] = []
    called: list[int] = []
    plain = step.activations
    monkeypatch.setattr(step, "activations", lambda active: (offloaded.append(active), plain(active))[1])
    options = resolved("agro", beta=0.5, singletons="drop")
    offloading = Passes(MicroBatch(size), check=lambda: called.append(1), offload=True)
    left = backward(policy, batch, "agro", options, offloading)
    made = {2: 2, 1: 3}[size]
    assert offloaded == [True] * made
    assert len(called) == made
    assert left.batch.ref_logp is batch.ref_logp
    torch.testing.assert_close(
        left.streams["logp"],
        streams_of(policy, batch, ["logp"], passes(3))["logp"],
        **rounding(left.streams["logp"]),
    )
    whole = objectives.evaluate("agro", left.streams["logp"], left.batch, beta=0.5, singletons="drop")
    assert left.evaluation.loss == pytest.approx(whole.loss, rel=1e-12)
    assert left.evaluation.metrics == pytest.approx(whole.metrics, rel=1e-12)
    torch.testing.assert_close(left.evaluation.grad, whole.grad)
    assert not left.streams["logp"].requires_grad
    offloaded.clear()
    backward(policy, batch, "agro", options, passes(size), reference)
    assert offloaded == [False] * made


def test_the_kl_of_a_first_pass_is_from_the_reference(tiny) -> None:
    policy, reference = tiny(), tiny(initializer_range=0.2)
    batch = ragged(policy)
    found = streams_of(policy, batch, ["kl"], passes(1), reference)["kl"]
    alone = policy.streams(batch.tokens, batch.lengths, batch.mask, ["kl"], reference)["kl"]
    assert (found[batch.mask] > 0.01).all()
    expected = alone[batch.mask].detach()
    torch.testing.assert_close(found[batch.mask].float(), expected, **rounding(expected))


def test_both_passes_are_cut_where_memory_runs_out(tiny, monkeypatch) -> None:
    """A limit in tokens alone: the step's three rows are what is halved first, to 2 and to 1."""
    policy = tiny()
    batch = ragged(policy)
    whole = streams_of(policy, batch, ["logp"], passes(3))["logp"]
    plain = step._forward

    def scarce(policy, batch, rows, *rest):
        if len(rows) > 1:
            raise torch.OutOfMemoryError("no more")
        return plain(policy, batch, rows, *rest)

    monkeypatch.setattr(step, "_forward", scarce)
    first, second = passes(None, 100), passes(None, 100)
    found = [
        streams_of(policy, batch, ["logp"], first)["logp"],
        backward(policy, batch, "rloo", resolved("rloo", singletons="drop"), second).streams["logp"],
    ]
    assert (first.micro.sequences, second.micro.sequences) == (1, 1)
    for logp in found:
        torch.testing.assert_close(logp, whole, **rounding(whole))


@pytest.mark.parametrize("size", [2, 1])
def test_a_refusal_in_the_step_names_the_objective(size: int, tiny) -> None:
    policy = tiny()
    batch = ragged(policy)
    batch = batch.replace(reward=batch.reward * math.nan)
    options = resolved("rloo", beta=0.5, singletons="drop")
    with pytest.raises(Refused, match=r"^objective rloo needs reward"):
        backward(policy, batch, "rloo", options, passes(size), policy)


def test_two_passes_with_the_exact_kl_are_one(tiny) -> None:
    """The squared part, token by token, takes the reference's whole distribution in both passes."""
    policy, reference = tiny(), tiny(initializer_range=0.2)
    batch = ragged(policy)
    batch = batch.replace(ref_logp=streams_of(reference, batch, ["logp"], passes(3))["logp"])
    options = resolved("agro_onpolicy", beta=0.5, squared="local", singletons="drop")
    grads = []
    for size in (2, 1):
        backward(policy, batch, "agro_onpolicy", options, passes(size), reference)
        grads.append(torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]))
    assert grads[0].norm() > 1e-3
    torch.testing.assert_close(grads[1], grads[0], **rounding(grads[0]))


def test_a_micro_batch_is_as_wide_as_its_rows_and_judged_by_them(tiny, monkeypatch) -> None:
    """What isn't in the micro-batch costs nothing.

    There is no padding to the step's width, and no forward of a reference whose KL isn't needed."""
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
    backward(policy, batch, "reinforce", resolved("reinforce"), passes(1), reference)
    assert shapes == [(1, 6), (1, 4), (1, 3)]  # the longest first
    assert judged == [[0], [2], [1], None]
