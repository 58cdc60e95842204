"""Two policies on the same prompts: exact tests, intervals that cover, and few false alarms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from agro.errors import Refused
from agro.stats import paired
from agro.stats.intervals import Ratio, t_quantile
from agro.stats.paired import Comparison, compare, mcnemar, sign_flips

NAN = math.nan


@pytest.fixture
def without_flips(monkeypatch) -> None:
    """Where p isn't looked at: flipping signs takes nearly all of the time."""
    monkeypatch.setattr(paired, "sign_flips", lambda difference: 1.0)


def drawn(rng: np.random.Generator, n: int, a: float, b: float, shared: float) -> list[np.ndarray]:
    """Right or wrong answers of two policies; with probability `shared` a prompt decides for both alike."""
    same, prompt = rng.random(n) < shared, rng.random(n)
    return [(np.where(same, prompt, rng.random(n)) < share).astype(float) for share in (a, b)]


def test_mcnemar_is_the_binomial_tail_of_changed_answers() -> None:
    assert mcnemar(np.repeat([1.0, -1.0, 0.0], [10, 1, 89])) == 2 * (1 + 11) / 2**11
    assert mcnemar(np.repeat([1.0, -1.0], [5, 5])) == 1.0
    assert mcnemar(np.zeros(50)) == 1.0


def test_pairs_say_more_than_two_means() -> None:
    """Nine of 100 answers became right and none wrong: p = 2/2⁹ paired, .14 by two separate shares."""
    a = np.repeat([1.0, 0.0], [70, 30])
    b = a.copy()
    b[70:79] = 1.0
    out = compare(a, b)
    assert (out.p, out.test, out.verdict) == (2 / 2**9, "McNemar", "better")
    separate = 0.09 / math.sqrt(0.7 * 0.3 / 100 + 0.79 * 0.21 / 100)
    assert math.erfc(separate / math.sqrt(2)) == pytest.approx(0.142, abs=1e-3)


def test_signs_are_flipped_in_all_ways_of_few_prompts() -> None:
    """Of five positive differences 2 of the 32 signs have as large a sum."""
    assert sign_flips(np.array([0.1, 0.2, 0.3, 0.4, 0.5])) == pytest.approx(2 / 32, abs=0.008)
    assert sign_flips(np.zeros(20)) == 1.0


def test_the_mean_of_several_responses_counts_and_unknown_prompts_dont() -> None:
    a = np.array([[0.0, 1.0], [0.0, NAN], [NAN, NAN], [1.0, 1.0]])
    b = np.array([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    out = compare(a, b)
    assert (out.n, out.a, out.b, out.test) == (3, 0.5, pytest.approx(2.5 / 3), "sign flips and t")
    assert out.difference == pytest.approx(1 / 3)


def test_what_cant_be_compared_is_refused() -> None:
    with pytest.raises(Refused, match="the same prompts, got 2 and 3"):
        compare(np.zeros(2), np.zeros(3))
    with pytest.raises(Refused, match="none of the 2 prompts has a score on both sides"):
        compare(np.array([NAN, 1.0]), np.array([1.0, NAN]))


@pytest.mark.parametrize(("n", "clusters"), [(1, None), (5, [0] * 5)])
def test_one_prompt_or_cluster_shows_nothing(n: int, clusters: list[int] | None) -> None:
    out = compare(np.zeros(n), np.ones(n), clusters)
    assert math.isnan(out.p)
    assert math.isnan(out.low)
    assert (out.verdict, out.clusters) == ("not shown", 1)


@pytest.mark.test
@pytest.mark.parametrize("n", [100, 400])
@pytest.mark.parametrize(("a", "b"), [(0.05, 0.1), (0.3, 0.3), (0.5, 0.7), (0.9, 0.95)])
def test_the_interval_of_shares_covers(n: int, a: float, b: float) -> None:
    """A nominal 95% covers in 93 to 97.5 % of 1,500 draws, whose own error is .6 %."""
    rng = np.random.default_rng([n, round(100 * a), round(100 * b)])
    results = [compare(*drawn(rng, n, a, b, 0.5)) for _ in range(1500)]
    covered = np.mean([r.low <= b - a <= r.high for r in results])
    assert 0.93 <= covered <= 0.975


@pytest.mark.test
def test_the_interval_of_grades_covers(without_flips) -> None:
    rng = np.random.default_rng(0)
    results = []
    for _ in range(300):
        prompt = rng.normal(size=100)
        results.append(compare(prompt + rng.normal(size=100), prompt + 0.3 + rng.normal(size=100) ** 2 - 1))
    covered = np.mean([r.low <= 0.3 <= r.high for r in results])
    assert 0.92 <= covered <= 0.98  # its own error is 1.3 %


def test_skewed_grades_have_the_interval_of_the_bootstrap_where_it_is_wider() -> None:
    """Of 50 squares of normal numbers: above the mean, and of their negatives below it. The quantile is that
    of other resamples; its error is 5 %."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=50) ** 2
    resampled = rng.choice(values, (20_000, 50))
    error = values.std(ddof=1) / math.sqrt(50)
    t = (resampled.mean(1) - values.mean()) / (resampled.std(1, ddof=1) / math.sqrt(50))
    wide, narrow = -np.quantile(t, 0.025) * error, t_quantile(49) * error
    assert wide > 1.2 * narrow
    for sign in (1, -1):
        low, high, _ = paired.inference(Ratio.of(sign * values, np.ones(50), np.arange(50)))
        ends = np.sort([sign * values.mean() - sign * narrow, sign * values.mean() + sign * wide])
        assert (low, high) == pytest.approx(tuple(ends), abs=0.05 * wide)


@pytest.mark.test
@pytest.mark.parametrize("n", [20, 100, 400])
def test_nothing_learned_is_seldom_called_better(n: int) -> None:
    """At most 5 % of the runs that learned nothing; an exact test has at most 2.5 %."""
    rng = np.random.default_rng(n)
    verdicts = [compare(*drawn(rng, n, 0.4, 0.4, 0.5)).verdict for _ in range(3000)]
    assert verdicts.count("better") / len(verdicts) <= 0.025 + 3 * math.sqrt(0.025 / len(verdicts))


@pytest.mark.test
def test_detectable_is_detected_four_times_out_of_five() -> None:
    rng = np.random.default_rng(1)
    results: list[Comparison] = [compare(*drawn(rng, 400, 0.4, 0.5, 0.5)) for _ in range(400)]
    least = float(np.median([r.detectable for r in results]))
    found = [compare(*drawn(rng, 400, 0.4, 0.4 + least, 0.5)).verdict == "better" for _ in range(600)]
    assert np.mean(found) == pytest.approx(0.8, abs=0.07)


def copied(rng: np.random.Generator, clusters: int, size: int) -> tuple[list[np.ndarray], list[int]]:
    """Right or wrong answers of two equal policies to so many prompts, each in `size` near-copies: what a
    policy answers to the copies is the same nine times out of ten."""
    labels = np.repeat(np.arange(clusters), size)
    sides = []
    for _ in range(2):
        shared, own = (rng.random(n) < 0.5 for n in (clusters, clusters * size))
        sides.append(np.where(rng.random(clusters * size) < 0.9, shared[labels], own).astype(float))
    return sides, labels.tolist()


def test_copies_count_as_one() -> None:
    """Ten prompts in ten copies each, all gained or lost together: the test is that of ten prompts."""
    gain = np.repeat([1.0, 1, 1, 1, 1, 1, 1, 1, 1, 0], 10)
    alone = compare(np.zeros(10), gain[::10])
    out = compare(np.zeros(100), gain, np.repeat(np.arange(10), 10).tolist())
    assert (out.n, out.clusters, out.test, alone.test) == (100, 10, "sign flips and t", "McNemar")
    assert out.p == pytest.approx(alone.p, abs=0.003)  # 2/2⁹, and the error of 10,000 draws
    assert out.difference == alone.difference
    naive = compare(np.zeros(100), gain)
    assert out.high - out.low > 2 * (naive.high - naive.low)


def test_each_its_own_cluster_changes_nothing() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.normal(size=(2, 50))
    assert compare(a, b) == compare(a, b, list(range(50)))
    right = [(x > 0).astype(float) for x in (a, b)]
    assert compare(*right) == compare(*right, list(range(50)))


@pytest.mark.test
def test_copies_of_nothing_learned_are_seldom_called_better() -> None:
    """With clusters at most 2.5 % and the error of 1,000 runs; taken for as many prompts, a third of them."""
    rng = np.random.default_rng(6)
    drawn_runs = [copied(rng, 20, 10) for _ in range(1000)]
    right = [compare(a, b, labels).verdict for (a, b), labels in drawn_runs]
    naive = [compare(a, b).verdict for (a, b), _ in drawn_runs]
    assert right.count("better") / 1000 <= 0.025 + 3 * math.sqrt(0.025 / 1000)
    assert naive.count("better") / 1000 > 0.15


@pytest.mark.test
@pytest.mark.parametrize("sizes", [[10] * 20, [28] * 3 + [1] * 85, [1] * 95 + [5]])
def test_the_interval_of_clusters_covers(without_flips, sizes: list[int]) -> None:
    """A nominal 95% covers in 93 to 99 % of 1,500 draws, whose own error is .6 %; some are large."""
    rng, labels = np.random.default_rng(sum(sizes)), np.repeat(np.arange(len(sizes)), sizes)
    covered = []
    for _ in range(1500):
        common, own = rng.normal(0.3, 1.0, len(sizes)), rng.normal(0, 0.5, len(labels))
        out = compare(np.zeros(len(labels)), common[labels] + own, labels.tolist())
        covered.append(out.low <= 0.3 <= out.high)
    assert 0.93 <= np.mean(covered) <= 0.99


def test_few_changed_graded_rewards_are_bounded_by_how_many_may_change() -> None:
    """Three of 100 rose, none fell, and rewards are from .2 to 1: .8 times Wilson's upper ends of 3 % and of
    0 %, which is z²/(n + z²), in either direction."""
    before = np.linspace(0.2, 0.9, 100)
    after = before.copy()
    after[[5, 50, 99]] += 0.1
    found = compare(before, after)
    assert (found.low, found.high) == pytest.approx((-0.8 * 0.0370, 0.8 * 0.0845), abs=1e-4)
    assert found.verdict == "not shown"
    same = compare(np.full(100, 0.5), np.full(100, 0.5))
    assert math.isnan(same.low)
    assert math.isnan(same.high)


def skewed(rng: np.random.Generator, n: int) -> np.ndarray:
    """Differences of mean 0: −1 with a probability of .1, else about 1/9."""
    return np.where(rng.random(n) < 0.1, -1.0, 1 / 9) + rng.normal(0, 0.03, n)


@pytest.mark.parametrize("n", [5, 10, 15, 20, 30, 50])
@pytest.mark.parametrize("bounded", [True, False])
def test_a_rare_loss_that_wasnt_seen_isnt_a_gain(n: int, bounded: bool) -> None:
    """At most 5 % and two errors of 150 draws; flipped signs alone call 35 % of them better at 10 prompts."""
    rng, verdicts = np.random.default_rng(n), []
    for _ in range(150):
        difference = skewed(rng, n)
        if bounded:
            before = np.full(n, 0.5)
            after = np.clip(before + difference / 2, 0, 1)
        else:
            before = rng.normal(size=n)
            after = before + difference
        verdicts.append(compare(before, after).verdict)
    shown = 150 - verdicts.count("not shown")
    assert shown / 150 <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 150)
    alone = [sign_flips(skewed(rng, 10)) < 0.05 for _ in range(150)]
    assert np.mean(alone) > 0.2


def test_a_real_gain_of_few_graded_prompts_is_shown_where_the_range_is_known() -> None:
    """Each of 20 rewards from 0 to 1 rose by .6: even if 17 % of others fell to 0, the mean rises. Where
    rewards may be any, as few prompts show nothing; 30 do."""
    low = np.linspace(0.1, 0.3, 20)
    assert compare(low, low + 0.6).verdict == "better"
    few = compare(10 * low, 10 * low + 6)
    assert (few.verdict, math.isnan(few.p), math.isnan(few.detectable)) == ("not shown", True, True)
    many = np.linspace(1, 3, 30)
    assert compare(many, many + 6).verdict == "better"


def test_detectable_of_few_prompts_is_what_the_test_shows() -> None:
    """Of six answers all have to change: x⁶ = .8 at x = .963. Of five and of two none suffices."""
    assert compare(np.zeros(6), np.zeros(6)).detectable == pytest.approx(0.8 ** (1 / 6), abs=1e-3)
    assert all(math.isnan(compare(np.zeros(n), np.ones(n)).detectable) for n in (2, 5))
    assert math.isnan(compare(np.array([0.2, 0.4]), np.array([0.3, 0.6])).detectable)


@pytest.mark.parametrize("shape", [(200,), (200, 4)])
def test_the_same_model_with_its_wrong_answers_unscored_isnt_better(shape: tuple[int, ...]) -> None:
    """70 % of one side's wrong answers have no score."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        a, b = ((rng.random(shape) < 0.4).astype(float) for _ in range(2))
        b[(b == 0) & (rng.random(shape) < 0.7)] = NAN
        out = compare(a, b)
        assert (out.verdict, out.unknown_a) == ("not shown", 0.0)
        assert out.unknown_b == pytest.approx(0.42, abs=0.13)
        # Its worst case is what the answers were, whose 95% interval leaves 0 out at times.
        assert out.low < 0.05


def test_a_gain_that_no_unknown_reward_can_undo_is_shown() -> None:
    """Two of 100 are unknown on each side, and 40 rose: at worst (0 − 1) · 4 of the 100 differences."""
    a, b = np.zeros(100), np.repeat([1.0, 0.0], [40, 60])
    a[[50, 51]], b[[60, 61]] = NAN, NAN
    out = compare(a, b)
    assert (out.verdict, out.unknown_a, out.unknown_b) == ("better", 0.02, 0.02)
    assert out.low < compare(np.zeros(100), np.repeat([1.0, 0.0], [40, 60])).low


def test_as_many_unknown_on_both_sides_may_still_decide() -> None:
    """Six gains of 20, p = .031; four unknown rewards on each side could be four losses, of which and six
    gains p is 2 (1 + 10 + 45 + 120 + 210)/2¹⁰ = .754."""
    a, b = np.zeros(20), np.repeat([1.0, 0.0], [6, 14])
    assert compare(a, b).verdict == "better"
    a[16:], b[12:16] = NAN, NAN
    out = compare(a, b)
    assert (out.verdict, out.p) == ("not shown", 2 * 386 / 2**10)


def test_shares_of_unknown_rewards_count_beside_means() -> None:
    """Of means by prompt the shares say the same as the responses themselves."""
    rng = np.random.default_rng(3)
    a, b = (np.where(rng.random((60, 4)) < 0.1, NAN, rng.random((60, 4))) for _ in range(2))
    means = [np.nanmean(x, axis=1) for x in (a, b)]
    shares = [np.isnan(x).mean(1) for x in (a, b)]
    out = compare(*means, unknown=(shares[0], shares[1]))
    again = compare(a, b)
    assert (out.low, out.high, out.p) == pytest.approx((again.low, again.high, again.p))
    assert out.high - out.low > compare(*means).high - compare(*means).low + 0.1
