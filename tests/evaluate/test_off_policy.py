"""Off-policy estimates: exact where weights are equal, right on average, silent where they can't know."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from agro.pages.store.value_on_log import LoggedResponses, fitted_values, value_on_log
from agro.stats.off_policy import LEAST, compare_on_log, interval


def test_of_its_own_log_a_policy_is_worth_the_mean_reward() -> None:
    rewards = np.arange(40.0)
    out = compare_on_log(np.zeros(40), np.zeros(40), rewards, np.arange(40))
    assert (out.a, out.difference, out.low, out.high, out.p) == (19.5, 0, 0, 0, 1)
    assert (out.ess, out.mean_weight, out.clusters, out.obstacle) == (40, 1, 40, "")


def test_weights_by_hand() -> None:
    """Weights 1 and 3 of rewards 0 and 1: (1 · 0 + 3 · 1)/4, and (1 + 3)²/(1 + 9) effective responses."""
    out = compare_on_log(np.zeros(2), np.log([1.0, 3.0]), np.array([0.0, 1.0]), np.arange(2))
    assert out.b == pytest.approx(0.75)
    assert out.ess == pytest.approx(1.6)
    assert out.mean_weight == pytest.approx(2)
    assert "2 of the log's responses count, and 30 are needed" in out.obstacle
    shifted = compare_on_log(np.full(2, -9.0), np.log([1.0, 3.0]) + 5, np.array([0.0, 1.0]), np.arange(2))
    assert shifted.difference == pytest.approx(out.difference)


def test_a_policy_that_left_the_log_isnt_estimated() -> None:
    """It gives each logged response e⁻²⁰ of the probability: the weights are equal, so all of them count."""
    rng = np.random.default_rng(0)
    out = compare_on_log(np.zeros(400), np.full(400, -20.0), rng.random(400), np.arange(400))
    assert out.ess == pytest.approx(400)
    assert "the log doesn't have what a policy writes" in out.obstacle
    hopeless = compare_on_log(np.zeros(400), np.full(400, -9e5), rng.random(400), np.arange(400))
    assert hopeless.mean_weight > 0


def test_one_prompt_is_no_sample() -> None:
    out = compare_on_log(np.zeros(40), np.zeros(40), np.ones(40), np.zeros(40, int))
    assert math.isnan(out.p)
    assert "one held-out prompt" in out.obstacle


def logs(rng: np.random.Generator, prompts: int) -> tuple[np.ndarray, ...]:
    """Two responses to each prompt out of five, by μ; the second policy moves half of the weight to the
    last, which is right at half of the prompts: the true difference follows from the tables."""
    mu, pi = np.array([0.3, 0.3, 0.2, 0.1, 0.1]), np.array([0.15, 0.15, 0.1, 0.05, 0.55])
    is_right = rng.random((prompts, 5)) < np.array([0.2, 0.2, 0.2, 0.2, 0.5])
    x, y = np.repeat(np.arange(prompts), 2), rng.choice(5, 2 * prompts, p=mu)
    return np.zeros(2 * prompts), np.log(pi / mu)[y], is_right[x, y].astype(float), x


GAIN = 0.45 * 0.2 + 0.55 * 0.5 - (0.9 * 0.2 + 0.1 * 0.5)


@pytest.mark.test
def test_the_interval_covers_the_true_difference() -> None:
    """95% nominal: 93 to 97.5 % of 2,000 logs, whose own error is .5 %; the bias is below .01."""
    rng = np.random.default_rng(1)
    found = [compare_on_log(*logs(rng, 200)) for _ in range(2000)]
    assert min(out.ess for out in found) > LEAST
    assert np.mean([out.difference for out in found]) == pytest.approx(GAIN, abs=0.01)
    assert 0.93 <= np.mean([out.low <= GAIN <= out.high for out in found]) <= 0.975


@pytest.mark.test
def test_copies_are_one_unit() -> None:
    """Each response four times over: with clusters the interval is as wide as without copies."""
    a, b, rewards, x = logs(np.random.default_rng(2), 100)
    once = compare_on_log(a, b, rewards, x)
    copied = compare_on_log(*(np.tile(value, 4) for value in (a, b, rewards)), np.tile(x, 4))
    assert copied.high - copied.low == pytest.approx(once.high - once.low, rel=0.05)


def test_without_skewness_and_with_all_clusters_alike_it_is_students_interval() -> None:
    """Values 0 and 1, 50 each: no skewness, and all 100 matter. Student's t of 99 degrees of
    freedom is 1.984217, the standard error of the mean √(.25/99)."""
    terms = np.repeat([0.0, 1.0], 50)
    low, high, p = interval(0.5, (terms.sum() - terms) / 99)
    assert (low, high) == pytest.approx(
        (0.5 - 1.984217 * math.sqrt(0.25 / 99), 0.5 + 1.984217 * math.sqrt(0.25 / 99))
    )
    assert p < 1e-12


def test_a_few_large_terms_make_the_upper_end_far() -> None:
    """One in twenty terms is 20, the others 0: the mean 1 is likelier too low than too high."""
    terms = np.tile([20.0, *[0.0] * 19], 5)
    low, high, p = interval(1.0, (terms.sum() - terms) / 99)
    assert high - 1 > 2 * (1 - low) > 0
    assert (p < 0.05) is bool(low > 0)


def complete(log_weights: list[float], rewards: list[float], clusters: list[int]) -> LoggedResponses:
    """Of complete responses, as if each were one token."""
    ratios, by_token = (np.array(values)[:, None] for values in (log_weights, rewards))
    return LoggedResponses(ratios, by_token, np.ones(len(rewards), np.int64), np.array(clusters))


def test_of_its_own_log_the_estimate_is_the_mean_reward() -> None:
    found = value_on_log(complete([0.0] * 40, list(np.arange(40.0)), list(range(40))))
    assert [found.estimate.value, found.per_decision.value] == pytest.approx([19.5, 19.5])
    assert (found.ess, found.answer) == (40, "not shown")
    assert vars(found.mean_weight) == {"value": 1, "low": 1, "high": 1}


def test_an_estimate_by_hand() -> None:
    """Weights 3 and ½ of rewards 1 and 2, V = 1: 1 + 3·0 and 1 + ½·1 over 2."""
    log = complete([math.log(3), math.log(0.5)], [1.0, 2.0], [0, 1])
    found = value_on_log(log, np.ones((2, 1)))
    assert [found.estimate.value, found.per_decision.value] == pytest.approx([1.25, (3 * 1 + 0.5 * 2) / 2])
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


def test_rewards_per_token_are_weighted_by_what_was_decided_before_them() -> None:
    """ρ_1 = 2, ρ_2 = 1, V = (5, 4): 5 + 2·(1 + 4 − 5) + 1·(10 − 4); V = 0: 2·1 + 1·10."""
    ratios, rewards = np.log([[2.0, 0.5]] * 2), np.array([[1.0, 10.0]] * 2)
    log = LoggedResponses(ratios, rewards, np.array([2, 2]), np.array([0, 1]))
    assert value_on_log(log, np.array([[5.0, 4.0]] * 2)).estimate.value == pytest.approx(11.0)
    found = value_on_log(log, np.zeros((2, 2)))
    assert [found.estimate.value, found.per_decision.value] == pytest.approx([12.0, 12.0])


def test_a_response_isnt_in_its_own_value() -> None:
    """Of the prompt's other response 1, and of the other prompt's 3 as one more: (1 + 3)/2. A single response
    has the other prompts' alone: the mean of 7 and 1."""
    log = complete([0.0, 0.0, 0.0], [7.0, 1.0, 3.0], [0, 0, 1])
    assert fitted_values(log)[:, 0] == pytest.approx([2.0, 5.0, 4.0])


@pytest.mark.parametrize("kind", ["fitted", "any", "none"])
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
    V = {"any": rng.normal(size=(2, 3)), "none": np.zeros((2, 3))}.get(kind)
    expected = 0.0
    x = np.array([0, 0, 1, 1])
    for y in itertools.product(range(4), repeat=4):
        rows = list(y)
        log = LoggedResponses(np.log(of_pi[x, rows] / of_mu[x, rows]), reward[x, rows], np.full(4, 2), x)
        values = None
        if V is not None:
            values = np.array([[V[p, 0], V[p, 1 + responses[i][0]]] for p, i in zip(x, rows, strict=True)])
        expected += float(of_mu[x, rows].prod()) * value_on_log(log, values).estimate.value
    assert expected == pytest.approx(true)


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
