"""The step's gradient doesn't depend on how the step is cut, and it is the gradient of the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from rounding import rounding
from tiers import first_of_each
from torch import Tensor

from agro import config, objectives
from agro.models.policy import Policy
from agro.proof.claims import claims_of
from agro.store import Pair
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


def make_policies() -> tuple[Policy, Policy]:
    """A policy in float64 and another as its reference."""
    spec = config.NewModel(alphabet="abcdef", hidden=16, layers=2, heads=2, context=64)
    made = [Policy.load(config.PolicyConfig(new=spec, temperature=1.3), seed=s) for s in (0, 1)]
    for p in made:
        p.model.double()
    made[0].add_value()
    assert made[0].value is not None
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
            assert s.tokens is not None
            noise = -rng.random(len(s.tokens)).astype(np.float32) * 3
            out.append(s.replace(behavior_logp=np.where(s.action, noise, np.nan).astype(np.float32)))
    return out


def batch_for(name: str, options: dict, policy: Policy, reference: Policy) -> Batch:
    needs = objectives.get(name).needs(objectives.get(name).resolve(name, options))
    found = samples(policy, objectives.least_responses(needs))
    found = [s.replace(id=i) for i, s in enumerate(found)]
    both = (
        [(a.id, b.id) for a, b in pairwise(found) if a.prompt_id == b.prompt_id] if "pairs" in needs else []
    )
    batch = collate(found, 0, [Pair(a, b, 3.0, 1.0) for a, b in both if a is not None and b is not None])
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
        assert batch.old_logp is not None
        by_row = torch.where(torch.arange(len(batch.mask)) % 3 == 0, 0.2, 0.02)
        batch = batch.replace(behavior_logp=batch.old_logp - by_row[:, None])
    if "ref_logp" in needs:
        batch = batch.replace(ref_logp=streams_of(reference, batch, ["logp"], passes(4))["logp"])
    if "of_reference" in needs:
        batch = batch.replace(behavior_logp=batch.ref_logp)
    return batch


def passes(size: int) -> Passes:
    return Passes(MicroBatch(size))


def gradient(
    name: str, options: dict, policy: Policy, reference: Policy, batch: Batch, size: int
) -> torch.Tensor:
    policy.zero_grad()
    resolved = objectives.get(name).resolve(name, options)
    backward(policy, batch, name, resolved, passes(size), reference)
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters(policy)]
    )


def kind(case: tuple[str, dict, torch.dtype]) -> object:
    """Rounding alone differs in float32: there one of each file of objectives is enough."""
    return case[0] if case[2] is torch.float64 else objectives.get(case[0]).function.__module__


IN_DTYPES = [(*case, dtype) for dtype in (torch.float64, torch.float32) for case in CASES]


@pytest.mark.parametrize(("name", "options", "dtype"), first_of_each(kind, IN_DTYPES))
def test_gradient_does_not_depend_on_the_micro_batch(
    name: str, options: dict, dtype: torch.dtype, policies
) -> None:
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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("agro", {"beta": 0.3, "scale": "loss"}),
        ("rloo", {}),
        ("kl_pg", {"beta": 0.3}),
        ("grpo", {"beta": 0.3}),
        ("pair_consistency", {"beta": 0.3}),
        ("dpo", {"beta": 0.3}),
        ("sft", {}),
    ],
)
def test_gradient_is_the_loss_differentiated(name: str, options: dict, policies) -> None:
    """Central differences of the loss along the gradient, whose slope is its norm."""
    policy, reference = policies
    batch = batch_for(name, options, policy, reference)
    resolved = objectives.get(name).resolve(name, options)
    found = gradient(name, options, policy, reference, batch, 3)
    norm = float(found.norm())
    own = sum(p.numel() for p in policy.model.parameters())
    assert (found[own:] == 0).all()  # the value's
    parts = (found[:own] / norm).split([p.numel() for p in policy.model.parameters()])
    direction = [d.view_as(p) for d, p in zip(parts, policy.model.parameters())]
    # Llama's norms round to float32 inside, whatever its weights: a smaller shift would measure that
    slope = slope_along(
        direction, policy.model.parameters(), lambda: backward_value(policy, batch, name, resolved, reference)
    )
    assert slope == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("name", ["dro", "prefix_consistency"])
def test_gradient_of_the_value_is_the_loss_differentiated(name: str, policies) -> None:
    policy, reference = policies
    assert policy.value is not None
    options = {"beta": 0.3}
    batch = batch_for(name, options, policy, reference)
    resolved = objectives.get(name).resolve(name, options)
    gradient(name, options, policy, reference, batch, 3)
    found = [p.grad.clone() for p in policy.value.parameters() if p.grad is not None]
    assert all(g.abs().max() > 1e-3 for g in found)
    slope = slope_along(
        found, policy.value.parameters(), lambda: backward_value(policy, batch, name, resolved, reference)
    )
    assert slope == pytest.approx(sum(float(g.square().sum()) for g in found), rel=1e-6)


def test_the_value_does_not_change_what_it_reads(policies) -> None:
    policy, _ = policies
    assert policy.value is not None
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


def backward_value(policy: Policy, batch: Batch, name: str, options: dict, reference: Policy) -> float:
    with torch.enable_grad():
        return backward(policy, batch, name, options, passes(100), reference).evaluation.loss


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
    options = objectives.get("agro").resolve("agro", {"beta": 0.3})
    backward(policy, batch, "agro", options, passes(5))
    assert sum(calls) == len(batch.mask)  # one pass
    calls.clear()
    backward(policy, batch, "agro", options, passes(4))  # the group of 5 doesn't fit
    assert sum(calls) == 2 * len(batch.mask)


def test_micro_batches_hold_whole_groups_and_every_row_once(policies) -> None:
    policy, _ = policies
    batch = collate(samples(policy, 1), 0)
    parts = complete(batch, "group", MicroBatch(5))
    assert parts is not None
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
    rows = [
        s.replace(episode=f"e{i // 2}", reward=float(i // 2), prompt_id="p")
        for i, s in enumerate(samples(policy, 2)[:6])
    ]
    batch = collate(rows, 0)
    batch = batch.replace(ref_logp=streams_of(reference, batch, ["logp"], passes(4))["logp"])
    full = gradient(name, options, policy, reference, batch, 6)
    for size in (1, 2, 3):
        assert torch.allclose(
            gradient(name, options, policy, reference, batch, size), full, rtol=1e-10, atol=1e-13
        )


def test_a_pass_over_nothing_leaves_a_gradient_of_zero_everywhere(policies) -> None:
    """As on a rank without rows, whose sharded parameters take part in every pass."""

    class Nothing(Passes):
        def share(self, parts: list[torch.Tensor]) -> list[torch.Tensor | None]:
            return [None]

    policy, reference = policies
    batch = batch_for("dro", {"beta": 0.3}, policy, reference)
    policy.zero_grad()
    options = objectives.get("dro").resolve("dro", {"beta": 0.3})
    backward(policy, batch, "dro", options, Nothing(MicroBatch(4)), reference)
    assert all(p.grad is not None and not p.grad.any() for p in parameters(policy))


def test_collate_keeps_unknown_unknown(policies) -> None:
    policy, _ = policies
    known, bare = samples(policy, 2)[:2]
    batch = collate([known, bare.replace(behavior_logp=None, reward=None, version=-1)], 3)
    assert batch.behavior_logp is not None
    assert batch.behavior_logp[1].isnan().all()
    assert batch.reward[1].isnan()
    assert batch.age[0] == 3
    assert batch.age[1].isnan()
