"""How a sentence is judged from runs: holds, doesn't, no difference, can't tell.

Intervals are of 95 %, over seeds: Welch's of a difference of two means, Student's of a mean. There is no
difference where two one-sided tests at 5 % say that it is below MARGIN either way (the interval of 90 % is
within it). All policies answer the same held-out prompts with the same random numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agro.stats.intervals import t_quantile

HOLDS, FAILS, EQUAL, UNKNOWN = "holds", "doesn't", "no difference", "can't tell"
MARGIN = 0.03  # accuracy
Run = Mapping[str, Any]
Key = tuple[str, str, float | None]  # method, plan, and β where all of them are compared
Found = Mapping[Key, Sequence[Run]]  # the runs of each, one a seed
Score = Callable[[Run], float]


@dataclass(frozen=True)
class Verdict:
    word: str
    why: str  # the numbers
    keys: tuple[Key, ...] = ()  # the runs that more seeds would be added to


Rule = Callable[[Found], Verdict]


def rule(judge: Callable[..., Verdict]) -> Callable[..., Rule]:
    """A function of what is compared, which gives the judgment of what was found."""
    return lambda *compared: lambda found: judge(found, *compared)


@dataclass(frozen=True)
class Interval:
    mean: float
    error: float  # standard error
    degrees: int

    def half(self, level: float = 0.95) -> float:
        return t_quantile(self.degrees, level) * self.error if self.error else 0.0

    @property
    def low(self) -> float:
        return self.mean - self.half()

    @property
    def high(self) -> float:
        return self.mean + self.half()

    def within(self, margin: float) -> bool:
        """Two one-sided tests at 5 %: it is above −margin, and below margin."""
        return abs(self.mean) + self.half(0.90) <= margin

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ({self.low:+.3f}…{self.high:+.3f})"


def end(run: Run) -> float:
    """Accuracy at the end."""
    return float(run["curve"][-1]["accuracy"])


def start(run: Run) -> float:
    return float(run["curve"][0]["accuracy"])


def half_way(run: Run) -> float:
    """Accuracy after half of the updates."""
    updates = run["curve"][-1]["update"]
    return next(float(point["accuracy"]) for point in run["curve"] if 2 * point["update"] >= updates)


def regularized(run: Run) -> float:
    """J = E r − β KL(π ‖ π_ref) at the end, which both AGRO and KL-PG maximize, with the run's own β."""
    return end(run) - float(run["beta"]) * float(run["curve"][-1]["kl"])


def trained(run: Run) -> float:
    """The mean reward of all fresh responses of a run: how far ahead it is on the way."""
    return statistics.mean(run["rewards"])


def drop(run: Run) -> float:
    """How far accuracy ends below its best on the way."""
    return max(float(point["accuracy"]) for point in run["curve"]) - end(run)


def of_mean(values: Sequence[float]) -> Interval:
    """Student's interval."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Interval(statistics.mean(values), error, len(values) - 1)


def contrast(values: Sequence[tuple[float, Sequence[float]]]) -> Interval:
    """A sum of means times factors; Welch's interval."""
    mean = sum(factor * statistics.mean(of) for factor, of in values)
    parts = [factor**2 * statistics.variance(of) / len(of) for factor, of in values]
    if not sum(parts):
        return Interval(mean, 0.0, 1)
    degrees = sum(parts) ** 2 / sum(part**2 / (len(of) - 1) for part, (_, of) in zip(parts, values))
    return Interval(mean, math.sqrt(sum(parts)), max(1, math.floor(degrees + 1e-9)))


def difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    return contrast([(1.0, first), (-1.0, second)])


@rule
def above(found: Found, first: Key, second: Key, score: Score = end) -> Verdict:
    """The first one's score is higher: the interval of the difference says so."""
    values = [[score(run) for run in found[key]] for key in (first, second)]
    apart = difference(*values)
    means = "/".join(f"{statistics.mean(v):.3f}" for v in values)
    return Verdict(_side(apart), f"{means}: {apart}", (first, second))


@rule
def best(found: Found, first: Key, others: Sequence[Key], score: Score = end) -> Verdict:
    """The first one is above each of the others."""
    rival = max(others, key=lambda key: statistics.mean(score(run) for run in found[key]))
    verdict = above(first, rival, score)(found)
    return Verdict(verdict.word, f"{verdict.why}, {rival[0]}", verdict.keys)


@rule
def grows(found: Found, first: str, second: str, near: str, far: str) -> Verdict:
    """The first method is further ahead of the second one at the end on the plan `far` than on `near`."""
    keys = [(name, plan, None) for plan in (far, near) for name in (first, second)]
    ends = [[end(run) for run in found[key]] for key in keys]
    more = contrast(list(zip((1.0, -1.0, -1.0, 1.0), ends, strict=True)))
    gaps = [statistics.mean(ends[i]) - statistics.mean(ends[i + 1]) for i in (2, 0)]
    return Verdict(_side(more), f"{gaps[0]:+.3f} → {gaps[1]:+.3f}: {more}", tuple(keys))


@rule
def level(found: Found, first: Key, second: Key, score: Score = end) -> Verdict:
    """There is no difference; it doesn't hold where the interval is outside of ± MARGIN."""
    apart = difference(*([score(run) for run in found[key]] for key in (first, second)))
    outside = FAILS if apart.low > MARGIN or apart.high < -MARGIN else UNKNOWN
    return Verdict(HOLDS if apart.within(MARGIN) else outside, str(apart), (first, second))


@rule
def crashes(found: Found, key: Key, least: float) -> Verdict:
    """Accuracy ends more than `least` below its best on the way."""
    fall = of_mean([drop(run) for run in found[key]])
    ends = ", ".join(f"{end(run):.3f}" for run in found[key])
    return Verdict(_side(fall, least), f"{fall} below its best, at {ends}", (key,))


@rule
def below_start(found: Found, key: Key) -> Verdict:
    """Accuracy ends below the start's."""
    loss = of_mean([start(run) - end(run) for run in found[key]])
    return Verdict(_side(loss), f"the start is {loss} above the end", (key,))


@rule
def keeps(found: Found, ours: Sequence[str], fresh: str, stale: str, share: float) -> Verdict:
    """The best of the methods on stale samples has at least `share` of its accuracy on fresh ones."""
    name = max(ours, key=lambda name: statistics.mean(map(end, found[name, stale, None])))
    of_fresh = statistics.mean(map(end, found[name, fresh, None]))
    kept = of_mean([end(run) / of_fresh for run in found[name, stale, None]])
    ends = statistics.mean(map(end, found[name, stale, None]))
    why = f"{name}: {ends:.3f} of {of_fresh:.3f}, {kept.mean:.1%} ({kept.low:.1%}…{kept.high:.1%})"
    return Verdict(_side(kept, share), why, tuple((name, plan, None) for plan in (fresh, stale)))


@rule
def more_kl_efficient(found: Found, first: Key, second: Key, least: float = 0.0) -> Verdict:
    """More accuracy for the same KL: the mean over KL, up to the largest that all of the runs reach."""
    reach = min(float(_kl(run).max()) for key in (first, second) for run in found[key])
    values = [[over_kl(run, reach) for run in found[key]] for key in (first, second)]
    apart = difference(*values)
    why = f"{apart} to {reach:.2f} nats"
    return Verdict(_side(apart, least), why, (first, second))


def over_kl(run: Run, reach: float) -> float:
    """Mean accuracy over KL from 0 to `reach`, linear between the points."""
    accuracy = [float(point["accuracy"]) for point in run["curve"]]
    return float(np.interp(np.linspace(0, reach, 101), _kl(run), accuracy).mean())


def _kl(run: Run) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The largest KL so far at each point."""
    return np.maximum.accumulate([max(0.0, float(point["kl"])) for point in run["curve"]])


@rule
def fewer_generations(found: Found, method: str, replayed: str, fresh: str, most: float) -> Verdict:
    """With replay at most the share `most` of the generations is needed for the accuracy of fresh samples.

    That is 95 % of what fresh samples end with, which counts as reached where the line first crosses it.
    """
    keys = ((method, replayed, None), (method, fresh, None))
    goal = 0.95 * statistics.mean(map(end, found[keys[1]]))
    needed = [[generations(run, goal) for run in found[key]] for key in keys]
    missed = sum(n is None for n in needed[0])
    if not all(needed[1]):  # None, or 0 where the start is there already
        return Verdict(UNKNOWN, f"a run on fresh samples doesn't rise to {goal:.3f}", keys)
    if missed:
        runs = len(needed[0])
        chance = sum(math.comb(runs, k) for k in range(missed, runs + 1)) / 2**runs  # a sign test
        word = FAILS if chance <= 0.025 else UNKNOWN
        return Verdict(word, f"{missed} of {runs} runs never reach {goal:.3f}", keys)
    of_fresh = statistics.mean(n for n in needed[1] if n)
    ratio = of_mean([n / of_fresh for n in needed[0] if n])
    word = {HOLDS: FAILS, FAILS: HOLDS, UNKNOWN: UNKNOWN}[_side(ratio, most)]
    why = f"{ratio.mean:.0%} ({ratio.low:.0%}…{ratio.high:.0%}) of {of_fresh:.0f}, for {goal:.3f}"
    return Verdict(word, why, keys)


def generations(run: Run, goal: float) -> float | None:
    """Responses generated until accuracy first reaches `goal`; None if it never does."""
    each = run["generated"] / run["curve"][-1]["update"]
    before = run["curve"][0]
    for point in run["curve"]:
        if point["accuracy"] >= goal:
            rise = point["accuracy"] - before["accuracy"]
            share = (goal - before["accuracy"]) / rise if rise else 1.0
            return float(each * (before["update"] + share * (point["update"] - before["update"])))
        before = point
    return None


def _side(interval: Interval, least: float = 0.0) -> str:
    """Whether the interval is above `least`, below it, or has it inside; about 0, whether that is level."""
    if interval.low > least:
        return HOLDS
    if interval.high < least:
        return FAILS
    return EQUAL if not least and interval.within(MARGIN) else UNKNOWN
