"""Off-policy values: by hand, unbiased over all logs of a small policy, silent where nothing is known."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from agro.stats.off_policy import LoggedResponses, fitted_values, sharpe_ratio, value_on_log


def complete(log_weights: list[float], rewards: list[float], clusters: list[int]) -> LoggedResponses:
    """Of complete responses, as if each were one token."""
    ratios, by_token = (np.array(values)[:, None] for values in (log_weights, rewards))
    return LoggedResponses(ratios, by_token, np.ones(len(rewards), np.int64), np.array(clusters))


def test_of_its_own_log_every_estimate_is_the_mean_reward() -> None:
    found = value_on_log(complete([0.0] * 40, list(np.arange(40.0)), list(range(40))))
    for estimate in found.estimates.values():
        assert estimate.value == pytest.approx(19.5)
    assert (found.ess, found.clipping_bias, found.answer) == (40, (0, 0), "not shown")
    assert vars(found.mean_weight) == {"value": 1, "low": 1, "high": 1}


def test_estimates_by_hand() -> None:
    """Weights 3 and ½ of rewards 1 and 2, c = 2, V = 1: 3·1 + ½·2 over 2 and over 3½; 2·1 + ½·2 over 2;
    1 + 3·0 and 1 + ½·1 over 2. The share 1 − (2 + ½)/2 < 0 that clipping left out isn't seen."""
    log = complete([math.log(3), math.log(0.5)], [1.0, 2.0], [0, 1])
    found = value_on_log(log, np.ones((2, 1)), clip=2.0)
    by_name = {name: x.value for name, x in found.estimates.items()}
    expected = {"ips": 2.0, "self_normalized": 4 / 3.5, "clipped": 1.5, "per_decision": 2.0}
    assert by_name == pytest.approx(expected | {"doubly_robust": 1.25})
    assert found.answer == "not estimable"
    assert found.to_json()["estimates"] is None
    assert "agro eval --model M --prompts FILE" in found.to_json()["instead"]


@pytest.mark.parametrize(("count", "says"), [(40, True), (500, False)])
def test_few_responses_that_count_are_a_caution(count: int, says: bool) -> None:
    weights = [math.log(1000 / count)] * count + [-700.0] * (1000 - count)
    found = value_on_log(complete(weights, [0.0, 1.0] * 500, list(range(1000))))
    assert (found.obstacle, found.ess) == ("", pytest.approx(count))
    assert ("fewer than a tenth" in found.caution) == says
    assert found.to_json()["caution"] == (found.caution or None)


def test_clipping_says_between_what_it_is_off() -> None:
    """Of 40 responses half have the weight 1.6 and half .4; c = 1 leaves out .3 of the mass of 1, in rewards
    between 0 and 1: the clipped estimate is .35, the true value .5 and so within."""
    log = complete([math.log(1.6), math.log(0.4)] * 20, [0.5, 0.5] * 19 + [0.0, 1.0], list(range(40)))
    found = value_on_log(log, clip=1.0)
    assert found.clipping_bias == pytest.approx((-0.3, 0.0))
    low, high = found.clipping_bias
    clipped, ips = found.estimates["clipped"].value, found.estimates["ips"].value
    assert low <= clipped - ips <= high


def test_rewards_per_token_are_weighted_by_what_was_decided_before_them() -> None:
    """ρ_1 = 2, ρ_2 = 1: 2·1 + 1·10; V = (5, 4): 5 + 2·(1 + 4 − 5) + 1·(10 − 4). Ips: 1 · 11."""
    log = LoggedResponses(
        np.log([[2.0, 0.5]] * 2), np.array([[1.0, 10.0]] * 2), np.array([2, 2]), np.array([0, 1])
    )
    found = value_on_log(log, np.array([[5.0, 4.0]] * 2))
    by_name = {name: x.value for name, x in found.estimates.items()}
    assert (by_name["per_decision"], by_name["ips"]) == pytest.approx((12.0, 11.0))
    assert by_name["doubly_robust"] == pytest.approx(11.0)


def test_a_response_isnt_in_its_own_value() -> None:
    """Of the prompt's other response 1, and of the other prompt's 3 as one more: (1 + 3)/2. A single response
    has the other prompts' alone: the mean of 7 and 1."""
    log = complete([0.0, 0.0, 0.0], [7.0, 1.0, 3.0], [0, 0, 1])
    assert fitted_values(log)[:, 0] == pytest.approx([2.0, 5.0, 4.0])


@pytest.mark.parametrize("kind", ["fitted", "any"])
def test_unbiased_over_every_log(kind: str) -> None:
    """The mean over all logs of two responses to each of two prompts, by their probability under μ, of two
    tokens with rewards of their own: the value of π by the same sum over its responses."""
    rng = np.random.default_rng(3)
    responses = list(itertools.product(range(2), repeat=2))
    mu, pi = (rng.dirichlet(np.ones(2), size=(2, 3)) for _ in range(2))  # [X,C,V]; contexts: none, 0, 1

    def probabilities(policy: np.ndarray) -> np.ndarray:  # [X,Y,T]
        return np.array([[(policy[x, 0, a], policy[x, 1 + a, b]) for a, b in responses] for x in range(2)])

    of_mu, of_pi, reward = probabilities(mu), probabilities(pi), rng.normal(size=(2, 4, 2))
    reward[:, 1::2, 0] = reward[:, ::2, 0]  # what the first token gets doesn't depend on the second
    true = float((of_pi.prod(-1) * reward.sum(-1)).sum() / 2)
    V = rng.normal(size=(2, 3)) if kind == "any" else None
    expected = dict.fromkeys(("ips", "per_decision", "doubly_robust"), 0.0)
    x = np.array([0, 0, 1, 1])
    for y in itertools.product(range(4), repeat=4):
        rows = list(y)
        log = LoggedResponses(np.log(of_pi[x, rows] / of_mu[x, rows]), reward[x, rows], np.full(4, 2), x)
        values = None
        if V is not None:
            values = np.array([[V[p, 0], V[p, 1 + responses[i][0]]] for p, i in zip(x, rows, strict=True)])
        found = value_on_log(log, values)
        for name in expected:
            expected[name] += float(of_mu[x, rows].prod()) * found.estimates[name].value
    assert expected == pytest.approx(dict.fromkeys(expected, true))


def test_a_log_that_says_nothing() -> None:
    rng = np.random.default_rng(0)
    hopeless = value_on_log(complete([-9e5] * 400, list(rng.random(400)), list(range(400))))
    assert hopeless.answer == "not estimable"
    spread = value_on_log(complete(list(rng.normal(0, 4, 400)), list(rng.random(400)), list(range(400))))
    assert "and 30 are needed" in spread.obstacle


def test_a_log_without_half_of_what_the_policy_writes() -> None:
    """Weights of ½ to .9 on all of 400 responses: many count, but their mean is surely below 1."""
    weights = np.random.default_rng(1).uniform(0.5, 0.9, 400)
    found = value_on_log(complete(list(np.log(weights)), [1.0] * 400, list(range(400))))
    assert found.ess > 350
    assert "the mean weight is 0.69 [0.68, 0.71] instead of 1" in found.obstacle


def test_sharpe_ratio_by_hand() -> None:
    """The two that are ranked first are worth 3 and 1, μ 2: (3 − 2)/1; of three also μ, (3 − 2)/√(2/3)."""
    estimated, true = np.array([9.0, 8.0, 7.0, 1.0]), np.array([3.0, 1.0, 2.0, 5.0])
    assert sharpe_ratio(estimated, true, behavior=2, k=2) == 1
    assert sharpe_ratio(estimated, true, behavior=2, k=3) == pytest.approx(1 / math.sqrt(2 / 3))
    assert math.isnan(sharpe_ratio(estimated, np.ones(4), behavior=2, k=2))
