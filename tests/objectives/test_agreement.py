"""`objectives.evaluate` against the second implementation in `independent` and finite differences."""

from __future__ import annotations

from typing import Any

import independent
import numpy as np
import pytest
import torch
from cases import (
    COVERING,
    FIELDS,
    VARIANTS,
    Case,
    batch_of,
    by_objective,
    change,
    draw,
    draw_for,
    evaluate,
    expected,
    least,
    least_groups,
    streams_of,
    take,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import some

from agro import Batch, objectives
from agro.errors import Refused
from agro.objectives import Evaluation

EVERY = by_objective(VARIANTS)


def test_every_objective_is_written_a_second_time() -> None:
    missing = [name for name in objectives.names() if name not in independent.names()]
    assert missing == [], "write their equations in tests/objectives/independent"


def test_every_option_of_an_ingredient_is_tried() -> None:
    """Those of `singletons` have tests of their own."""
    tried = {key for _, options, _ in VARIANTS for key in options} | {"singletons"}
    parts = {part for name in objectives.names() for part in objectives.get(name).ingredients}
    assert [key for part in parts for key in part.options if key not in tried] == []


def agree(out: Evaluation, case: Case, name: str, options: dict[str, Any]) -> None:
    """Loss and every gradient to 1e-10, relative to a number above 1 and absolute below it."""
    loss, grads = expected(case, name, options)
    assert abs(out.loss - loss) <= 1e-10 * max(1.0, abs(loss))
    assert out.grads.keys() == grads.keys()
    for stream, grad in grads.items():
        assert out.grads[stream].dtype == np.float64
        assert (np.abs(out.grads[stream] - grad) <= 1e-10 * np.maximum(1.0, np.abs(grad))).all()
        assert stream == "value" or (out.grads[stream][~case.mask] == 0).all()
    assert out.grad is out.grads["logp"]


@pytest.mark.test
@EVERY
@pytest.mark.parametrize("rewards", ["normal", "binary", "equal"])
def test_ragged_batches(name: str, options: dict[str, Any], needs: set[str], rewards: str) -> None:
    """The last one with ratios beyond most limits (of 1 + 2 see test_by_hand.py)."""
    for seed, spread in enumerate((0.3, 0.3, 0.3, 0.3, 1.0)):
        case = draw_for(needs, seed, sizes=(least(needs), 5), rewards=rewards, spread=spread)
        agree(evaluate(case, name, options), case, name, options)


@pytest.mark.test
@by_objective([v for v in VARIANTS if least(v[2]) > 1])
def test_groups_too_small_are_left_out_and_counted(
    name: str, options: dict[str, Any], needs: set[str]
) -> None:
    dropped = 0
    for seed in range(4):
        case = draw_for(needs, seed, groups=8, sizes=(1, 4))
        out = evaluate(case, name, {**options, "singletons": "drop"})
        agree(out, case, name, options)
        members = {g: {r for r, h in zip(case.response, case.group) if h == g} for g in case.group}
        small = sum(len(m) < least(needs) for m in members.values())
        assert out.metrics["singletons_dropped"] == small
        dropped += small
    assert dropped > 0


@by_objective(
    [v for v in VARIANTS if v[0] in ("agro", "rloo", "grpo", "squared_consistency") and "groups" in v[2]]
)
def test_groups_of_one_response_are_pooled(name: str, options: dict[str, Any], needs: set[str]) -> None:
    """They are one group, which weighs as much as they did together. A single one is left out."""
    for seed in range(4):
        case = draw_for(needs, seed, groups=8, sizes=(1, 2))
        out = evaluate(case, name, {**options, "singletons": "pool"})
        alone = {g for g in case.group if len({r for r, h in zip(case.response, case.group) if h == g}) == 1}
        assert alone
        together = sum({g: w for g, w in zip(case.group, case.weight) if g in alone}.values())
        case.weight = [together if g in alone else w for g, w in zip(case.group, case.weight)]
        case.group = ["pool" if g in alone else g for g in case.group]
        agree(out, case, name, options)
        assert out.metrics.get("singletons_dropped", 0.0) == (len(alone) == 1)


@EVERY
def test_one_group_and_one_response_a_row(name: str, options: dict[str, Any], needs: set[str]) -> None:
    """Without `response` and `weight` a row is a response and a group counts once."""
    if least_groups(options) == 1:
        case = draw_for(needs, 5, groups=1, sizes=(6, 6))
        agree(evaluate(case, name, options), case, name, options)
    case = draw_for(needs, 6, episodes=False, weights=False)
    agree(evaluate(case, name, options, response=None, weight=None), case, name, options)


@pytest.mark.test
@EVERY
def test_many_groups(name: str, options: dict[str, Any], needs: set[str]) -> None:
    case = draw_for(needs, 7, groups=120, sizes=(3, 3), length=4)
    agree(evaluate(case, name, options), case, name, options)


@pytest.mark.test
@EVERY
def test_a_group_of_weight_0_is_not_there(name: str, options: dict[str, Any], needs: set[str]) -> None:
    case = draw_for(needs, 6, weights=False)
    gone = np.array([g == case.group[0] for g in case.group])
    out = evaluate(change(case, weight=1.0 - gone), name, options)
    others = evaluate(take(case, np.flatnonzero(~gone)), name, options)
    assert out.loss == pytest.approx(others.loss, rel=1e-12)
    np.testing.assert_allclose(out.grad[~gone], others.grad, rtol=1e-12, atol=1e-12)
    assert (out.grad[gone] == 0).all()


@pytest.mark.test
@EVERY
def test_extreme_values(name: str, options: dict[str, Any], needs: set[str]) -> None:
    """Log-probs near -1e4 and ratios up to e^±100: what a policy far from its data gives.

    A reward of 1e6 beside rewards of order 1 as well, but where its exponential is taken. The loss is a
    difference of numbers up to 1e14 here, so the tolerance is 1e-10 of the largest of them.
    """
    if options.get("fix", name) in ("tempsamp_r1", "shape"):
        return  # it shapes rewards from 0 to 1, and overflows below −700
    for seed in range(3):
        case = draw_for(needs, seed, far=1e3, spread=30.0)
        large = 1.0 if name == "red_weight" else 1e6
        case.reward = [large * r if g == case.group[0] else r for r, g in zip(case.reward, case.group)]
        out, (loss, grads) = evaluate(case, name, options), expected(case, name, options)
        for stream, grad in grads.items():
            scale = np.abs(grad).max()
            assert np.abs(out.grads[stream] - grad).max() <= 1e-10 * max(1.0, scale)
            ordinary = np.abs(grad) < 1e-6 * scale
            np.testing.assert_allclose(out.grads[stream][ordinary], grad[ordinary], rtol=1e-8, atol=1e-10)
        terms = np.abs(grads["logp"])[case.mask] @ np.abs(case.logp[case.mask])
        assert abs(out.loss - loss) <= 1e-10 * max(1.0, abs(loss), terms)


KINDS: dict[str, Any] = {
    "tensor": lambda x: torch.as_tensor(np.asarray(x)),
    "array": np.asarray,
    "list": lambda x: np.asarray(x).tolist(),
}


@pytest.mark.test
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float64", "float32", pytest.param("float16", marks=pytest.mark.nightly)])
@by_objective([v for v in VARIANTS if (v[0], repr(v[1])) in COVERING])
def test_kind_and_dtype_are_those_of_logp(
    name: str, options: dict[str, Any], needs: set[str], dtype: str, kind: str
) -> None:
    """Computed in float64 whatever comes in: the result is that of the rounded numbers, rounded once.

    The batch may be of any kind too.
    """
    case = draw_for(needs, 8, junk=False)
    convert, logp = KINDS[kind], case.logp.astype(dtype)
    fields = {f: convert(getattr(case, f)) for f in ("mask", "reward", "weight", *FIELDS)}
    number = [list(dict.fromkeys(case.group)).index(g) for g in case.group]
    fields |= {"group": convert(number), "staleness": convert(np.zeros(len(number)))}
    streams = {k: convert(v) for k, v in streams_of(case).items()}
    out = objectives.evaluate(name, convert(logp), batch_of(case, **fields), streams=streams, **options)
    case.logp = logp.astype(np.float64)
    loss, grads = expected(case, name, options)
    assert out.loss == pytest.approx(loss, rel=1e-12, abs=1e-12)
    wanted = "float64" if kind == "list" else dtype
    tolerance = {"rtol": 2 * np.finfo(wanted).eps, "atol": 1e-7 if wanted == "float16" else 1e-12}
    for stream, grad in grads.items():
        found = out.grads[stream]
        if kind == "tensor":
            assert isinstance(found, torch.Tensor)
            assert found.dtype == getattr(torch, dtype)
            assert not found.requires_grad
            found = found.numpy()
        assert isinstance(found, np.ndarray)
        assert found.dtype == np.dtype(wanted)
        np.testing.assert_allclose(found, grad, **tolerance)


@pytest.mark.test
@EVERY
def test_float32_fields_of_the_batch_are_not_summed_in_float32(
    name: str, options: dict[str, Any], needs: set[str]
) -> None:
    """Beside float64 log-probs: only the rounding of the fields themselves may show."""
    case = draw_for(needs, 10, length=40, far=100.0, junk=False)
    rounded = {k: np.asarray(getattr(case, k), dtype=np.float32) for k in ("reward", "weight", *FIELDS)}
    out = evaluate(case, name, options, **{k: torch.as_tensor(v) for k, v in rounded.items()})
    agree(out, change(case, **{k: v.astype(np.float64) for k, v in rounded.items()}), name, options)


def test_whole_numbers() -> None:
    """As lists and as tensors of integers: float64 comes back."""
    given = [[0, -1, -2], [0, -3, -1]]
    batch = Batch.of(mask=[[0, 1, 1]] * 2, reward=[1, 0], group=[0, 0], ref_logp=[[0, -1, -1]] * 2)
    for logp in (given, np.array(given), torch.tensor(given)):
        out = objectives.evaluate("agro", logp, batch, beta=1)
        assert out.grad.dtype in (np.float64, torch.float64)
        # R = (1 + 1, 0 + 2): equal, so that neither response is pushed
        assert out.loss == 0
        out = objectives.evaluate("agro", logp, batch, beta=2)
        # R = (1 + 2, 0 + 4): ¼ · 1, ±½
        assert out.loss == 0.25
        assert np.asarray(out.grad).tolist() == [[0, 0.5, 0.5], [0, -0.5, -0.5]]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_log_probs_on_a_device_of_their_own() -> None:
    """The batch follows the log-probs to the GPU, and the gradient stays there."""
    for name, options, needs in VARIANTS:
        case = draw_for(needs, 11)
        streams = {k: torch.as_tensor(v, device="cuda") for k, v in streams_of(case).items()}
        logp = torch.as_tensor(case.logp, device="cuda")
        out = objectives.evaluate(name, logp, batch_of(case), streams=streams, **options)
        assert all(g.device.type == "cuda" for g in out.grads.values())
        here = {k: v.cpu().numpy() for k, v in out.grads.items()}
        agree(Evaluation(out.loss, here, out.metrics), case, name, options)


# Their terms are −k A log π, where k depends on log π but is constant. (m2po masks some of equal ratios.)
WEIGHED = ("cispo", "aipo", "minpro", "vespo", "reinforce_pp", "gdpo")


def away_from_kinks(seed: int, episodes: bool) -> Case:
    """Token ratios on both sides of both clips of (0.2, 0.2) and (0.1, 0.4), none near an edge."""
    case, rng = draw(seed, groups=2, length=5, episodes=episodes), np.random.default_rng(seed)
    case.logp = case.logp - 1.0  # a ratio of 1/2 leaves the other log-prob below 0
    for name in ("behavior_logp", "old_logp"):
        log_ratio = np.log(rng.choice([0.5, 0.85, 0.95, 1.05, 1.3, 2.0], size=case.mask.shape))
        setattr(case, name, np.where(case.mask, case.logp - log_ratio, np.nan))
    return case


# Parts of their losses are constants.
DETACHED = ("chord", "guide", "tempsamp_r1", "otr", "distill", "hnpg", "oorl", "otb")
DIVIDED = ("agro", "dro", "prefix_consistency")  # the policy's part of the gradient, by β


@pytest.mark.test
@pytest.mark.parametrize("seed", some([0, 1], every=2))
@by_objective(
    [
        (n, o, needs)
        for n, o, needs in VARIANTS
        if n not in ("agro_onpolicy", "topr", "m2po", *WEIGHED, *DETACHED)
        and not (n == "rloo" and "beta" in o)
        and o.get("criterion") != "gradient"  # the search ends where a bound reaches a ratio: at a kink
        and not (n == "kto" and o.get("kl") != "none")
        and not {"regularizer", "weight", "compared"} & (o | objectives.get(n).preset).keys()
        and o.get("mismatch") != "retrace"
        and "token_weight" not in o
        and not {"weight_baseline", "baseline_shift"} & o.keys()
        and o.get("baseline") != "step"  # a constant
    ]
)
def test_finite_differences(name: str, options: dict[str, Any], needs: set[str], seed: int) -> None:
    """Central differences of `loss` in every stream. Not for estimators whose loss isn't what they descend.

    Divided by beta, the gradient in logp times beta is the loss's own; not so the part of imitation.
    Step 1e-5 on losses of order 1: error about 1e-10.
    """
    case = away_from_kinks(seed, "rows" not in needs)
    grads = evaluate(case, name, options).grads
    if name in DIVIDED and options.get("scale") != "loss":
        plain = evaluate(case, name, {key: value for key, value in options.items() if key != "imitation"})
        grads["logp"] = grads["logp"] + (options["beta"] - 1) * plain.grads["logp"]
    for stream in grads:
        for at in [(i,) for i in range(len(case.mask))] if stream == "value" else np.argwhere(case.mask):
            sides = []
            for step in (1e-5, -1e-5):
                moved = np.array(getattr(case, stream))
                moved[tuple(at)] += step
                sides.append(evaluate(change(case, **{stream: moved}), name, options).loss)
            assert grads[stream][tuple(at)] == pytest.approx((sides[0] - sides[1]) / 2e-5, abs=2e-8)


def test_what_looks_along_a_response_refuses_one_of_several_rows() -> None:
    for name, options, needs in VARIANTS:
        if "rows" in needs:
            several = draw_for(needs, 0, episodes=True)
            with pytest.raises(Refused, match=r"each response in one row, but that of row \d+ "):
                evaluate(several, name, options)


@pytest.mark.nightly
@by_objective(VARIANTS)
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 10_000),
    most=st.integers(3, 7),
    episodes=st.booleans(),
    shape=st.fixed_dictionaries(
        {
            "groups": st.one_of(st.integers(1, 6), st.just(30)),
            "length": st.integers(2, 12),
            "rewards": st.sampled_from(["normal", "binary", "equal"]),
            "spread": st.sampled_from([0.0, 0.3, 3.0]),
            "far": st.sampled_from([0.0, 1.0, 1e4]),
        }
    ),
)
def test_the_gradient_is_that_of_plain_loops(
    name: str,
    options: dict[str, Any],
    needs: set[str],
    seed: int,
    most: int,
    episodes: bool,
    shape: dict[str, Any],
) -> None:
    """Relative to the largest number of the batch, as sums of numbers of 1e4 round in their last places."""
    episodes = episodes and "rows" not in needs
    shape["groups"] = max(shape["groups"], least_groups(options))
    case = draw_for(needs, seed, sizes=(least(needs), most), episodes=episodes, **shape)
    out = evaluate(case, name, options)
    loss, grads = expected(case, name, options)
    size = max(1.0, abs(loss), *(np.abs(g).max() for g in grads.values()))
    assert abs(out.loss - loss) <= 1e-9 * size
    for stream, grad in grads.items():
        assert stream == "value" or (out.grads[stream][~case.mask] == 0).all()
        assert np.abs(out.grads[stream] - grad).max() <= 1e-9 * size * max(1.0, shape["far"])
