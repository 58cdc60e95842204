"""Token rewards of RLFR: the formulas by hand, the optimum of Gaussian data, and a tiny model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from rounding import rounding

from agro.errors import Refused
from agro.store import Store
from agro.train.collate import collate
from agro.types import Sample
from agro_papers.flow_reward import FlowReward, flow_errors, hidden_states, token_rewards


def rewards(score, mask=None, **options) -> list[float]:
    score_BT = torch.tensor([score])
    mask_BT = torch.ones_like(score_BT, dtype=torch.bool) if mask is None else torch.tensor([mask])
    return token_rewards(score_BT, mask_BT, **{"coef": 1.0, **options})[0].tolist()


def test_scores_are_scaled_within_a_response():
    """(s − 1) / 4, then 2 s − 1; the first and the last token aren't in the mask."""
    score, mask = [9.0, 1.0, 2.0, 5.0, 0.0], [False, True, True, True, False]
    assert rewards(score, mask, coef=0.5) == [0.0, 0.5, 0.25, -0.5, 0.0]


def test_each_row_has_its_own_scale():
    score_BT = torch.tensor([[0.0, 1.0], [10.0, 30.0]])
    out = token_rewards(score_BT, torch.ones(2, 2, dtype=torch.bool), coef=1.0)
    assert out.tolist() == [[1.0, -1.0], [1.0, -1.0]]


def test_equal_scores_give_no_reward():
    """Scaled alone they would be −1, for which −coef · s is a bonus."""
    assert rewards([3.0, 3.0, 3.0]) == [0.0, 0.0, 0.0]
    assert rewards([3.0, 7.0], [True, False]) == [0.0, 0.0]
    assert rewards([3.0, 7.0], [False, False]) == [0.0, 0.0]


def test_a_threshold_leaves_the_extremes():
    """s = −1, −1/2, 0, 1/2, 1."""
    score = [0.0, 1.0, 2.0, 3.0, 4.0]
    assert rewards(score, threshold=0.75) == [1.0, 0.0, 0.0, 0.0, -1.0]
    assert rewards(score, threshold=0.5) == [1.0, 0.5, 0.0, -0.5, -1.0]


def test_a_perfect_velocity_has_no_error():
    """Where the context determines h, z is (x − t h) / (1 − t), and u = h − z = (h − x) / (1 − t)."""
    random = torch.Generator().manual_seed(0)
    h, z = (torch.randn(50, 4, generator=random, dtype=torch.float64) for _ in range(2))

    def perfect(x, time, context):
        return (context - x) / (1 - time[:, None])

    time = torch.rand(50, generator=random, dtype=torch.float64) * 0.99
    assert flow_errors(perfect, h, h, z, time).max() < 1e-20
    assert flow_errors(perfect, h, h + 1, z, time) == pytest.approx((1 - time) ** -2)  # (1 / (1 − t))²


def sequence(policy, text: str) -> Sample:
    return policy.encode(Sample("", text, reward=1.0))


def texts(alphabet: str, n: int, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    return ["".join(random.choice(list(alphabet), 12)) for _ in range(n)]


def test_states_are_those_of_each_sample_alone(tiny):
    policy = tiny(num_hidden_layers=3)
    samples = [sequence(policy, t) for t in ("abc", "hgfedcba", "a")]
    found = hidden_states(policy, samples, 1)
    assert not any(m._forward_hooks for m in policy.model.modules())
    for sample, states in zip(samples, found, strict=True):
        given = torch.tensor(sample.tokens[None].astype(np.int64))
        with torch.no_grad():  # hidden_states[k + 1] of transformers is the output of layer k
            own = policy.model(input_ids=given, output_hidden_states=True).hidden_states[2][0]
        torch.testing.assert_close(states, own, **rounding(own))


def test_the_fitted_error_of_normal_states_is_the_optimal_one(tiny, monkeypatch):
    """For h and z standard normal, Var(u | x_t) = 1 / (t² + (1 − t)²), which is 1.47 at t = .8."""
    random = torch.Generator().manual_seed(1)

    def normal(policy, samples, layer):
        return torch.randn(4000, 4, generator=random), torch.zeros(4000, 4)

    monkeypatch.setattr("agro_papers.flow_reward._pairs", normal)
    policy = tiny()
    fitted = FlowReward.fit(policy, [sequence(policy, "a")], width=64, steps=1500)
    h, z = (torch.randn(4000, 4, generator=random) for _ in range(2))
    error = flow_errors(fitted.flow, h, torch.zeros(4000, 4), z, torch.full((4000,), 0.8)).mean().item()
    assert error == pytest.approx(1 / (0.8**2 + 0.2**2), rel=0.06)


def test_tokens_unlike_the_trusted_ones_have_a_larger_error(tiny, tmp_path):
    """Trusted responses are of a, b and c; in others d to h are inserted."""
    policy = tiny()
    fitted = FlowReward.fit(policy, [Sample("", t, reward=1.0) for t in texts("abc", 64, 0)], steps=400)
    again = FlowReward.fit(policy, [Sample("", t, reward=1.0) for t in texts("abc", 64, 0)], steps=400)
    alike = fitted.scores([Sample("", t) for t in texts("abc", 16, 1)], times=(0.5, 0.8), draws=2)
    unlike = fitted.scores([Sample("", t) for t in texts("defgh", 16, 1)], times=(0.5, 0.8), draws=2)
    assert np.nanmean(unlike) > 2 * np.nanmean(alike)
    repeated = again.scores([Sample("", t) for t in texts("abc", 16, 1)], times=(0.5, 0.8), draws=2)
    np.testing.assert_array_equal(np.concatenate(alike), np.concatenate(repeated))
    sample = Sample("", "abcabgabcab", reward=0.25)
    (rewarded,) = fitted.reward([sample], coef=0.1)
    known = rewarded.token_reward[rewarded.action]
    assert np.isnan(rewarded.token_reward[~rewarded.action]).all()
    assert int(known.argmin()) in (5, 6)  # g, or the token that has it as its context
    assert (known.min(), known.max()) == (pytest.approx(-0.1), pytest.approx(0.1))
    with Store.open(tmp_path / "store.db") as store:
        store.append([rewarded])
        (stored,) = store.samples()
    batch = collate([stored], 0)
    assert math.isclose(batch.reward[0].item(), 0.25 + known.astype(float).sum(), rel_tol=1e-6)


def test_a_score_is_the_error_weighted_by_its_time(tiny):
    """t / (1 − t) is 1 at t = .5 and 4 at t = .8; the noise of both comes from one generator."""
    policy = tiny()
    samples = [sequence(policy, t) for t in texts("abc", 3, 0)]
    fitted = FlowReward.fit(policy, samples, steps=5)
    states = hidden_states(policy, samples, -1)
    after, before = (fitted.flow.scaled(torch.cat([s[i : len(s) - 1 + i] for s in states])) for i in (1, 0))
    noise, expected = torch.Generator().manual_seed(7), torch.zeros(len(after))
    for time, factor in ((0.5, 1.0), (0.8, 4.0)):
        z = torch.randn(after.shape, generator=noise)
        expected += factor / 2 * flow_errors(fitted.flow, after, before, z, torch.full((len(after),), time))
    scores = np.concatenate(fitted.scores(samples, times=(0.5, 0.8), seed=7))
    np.testing.assert_allclose(scores[~np.isnan(scores)], expected, **rounding(expected))


def test_nothing_to_trust_is_refused(tiny):
    with pytest.raises(Refused, match="flow reward: expected trusted responses"):
        FlowReward.fit(tiny(), [])
