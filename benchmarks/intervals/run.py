"""How often the 95 % intervals of `agro eval` and `agro compare` hold the truth, and how often two equal
models are called different, by simulation.

    python benchmarks/intervals/run.py [--only shares] [--prompts 100 300] [--evaluations 2000]

A prompt's difficulty is drawn from Beta(½, 1), as in practice: most are hard, some are easy. It gives eight
responses that pass with that probability, or one graded reward of that mean. Each simulated evaluation draws
new prompts and responses. `truth` is the mean over all prompts that there could be, by formula.

Shares of right answers are simulated for each probability of `SHARES` too: of one model (Wilson), and of two
on the same prompts (Tango, as `agro compare` has it), whose answers a prompt decides alike with a probability
of 0, ½ or .9. `changed` is how many answers differ on average: with fewer than five no interval can have its
nominal coverage, since most evaluations see no or one change. Graded rewards of two models share the
difficulty of a prompt.

`--only null --prompts 5 10 15 20 30 50 200` has shares of comparisons of two equally good models that are
called better or worse (5 % is the goal), by the verdict and by the rule that it had before (McNemar or
flipped signs alone), and of a model that is better by `effect` that are called better: the power. Shapes of
the differences are in `SHAPES`, with rewards from 0 to 1, or of unknown range. With 500 evaluations it
takes a quarter of an hour, and the standard error of a share is .01 at most at .05.

Writes benchmarks/results/intervals.json and prints a table. The standard error of a coverage is about 0.005.
`--only shares` takes half a minute, `eval` and `graded`, whose intervals are bootstraps, some minutes; rows
of the others stay in the file.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from agro.stats.intervals import Ratio, interval  # noqa: E402
from agro.stats.paired import LEVEL, compare, inference, mcnemar, sign_flips  # noqa: E402
from benchmarks import recording  # noqa: E402

RESULTS = ROOT / "benchmarks/results/intervals.json"
RESPONSES = 8
Values = NDArray[np.float64]
Row = dict[str, Any]
Draw = Callable[[np.random.Generator, Values], Values]


def one_response(random: np.random.Generator, difficulty: Values) -> Values:
    """Passed or not: Wilson's interval is taken."""
    return random.binomial(1, difficulty).astype(float)


def pass_at(k: int) -> Draw:
    """The unbiased estimate of each prompt's pass@k from its eight responses."""
    table = np.array(
        [1 - math.comb(RESPONSES - x, k) / math.comb(RESPONSES, k) for x in range(RESPONSES + 1)]
    )
    return lambda random, difficulty: table[random.binomial(RESPONSES, difficulty)]


def graded(random: np.random.Generator, difficulty: Values) -> Values:
    """A skewed reward without a maximum."""
    return random.exponential(difficulty)


def passes(k: int) -> float:
    """E[1 − (1 − p)^k] for p from Beta(½, 1)."""
    return 1 - math.prod((1 + i) / (1.5 + i) for i in range(k))


CASES: dict[str, tuple[Draw, float]] = {
    "share of prompts, one response each (Wilson)": (one_response, passes(1)),
    "pass@1 of 8 responses (bootstrap)": (pass_at(1), passes(1)),
    "pass@4 of 8 responses (bootstrap)": (pass_at(4), passes(4)),
    "graded reward (bootstrap)": (graded, passes(1)),
}


SHARES = (0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95)
GAINS = (0.0, 0.05, 0.2)
ALIKE = (0.0, 0.5, 0.9)  # the probability that a prompt decides for both models


def two_models(share: float, gain: float, alike: float, prompts: int, evaluations: int) -> Row:
    """Right or wrong answers to the same prompts, with the probabilities `share` and `share + gain`.

    Where a prompt decides for both, the second model answers right whenever the first one does.
    """
    random = np.random.default_rng([prompts, round(100 * share), round(100 * gain), round(10 * alike)])
    better = alike * gain + (1 - alike) * (share + gain) * (1 - share)
    worse = (1 - alike) * share * (1 - share - gain)
    draws = random.multinomial(prompts, [better, worse, 1 - better - worse], evaluations)
    held = 0
    for (gains, losses, same), times in zip(*np.unique(draws, axis=0, return_counts=True)):
        found = compare(
            np.repeat([0.0, 1.0, 1.0], [gains, losses, same]),
            np.repeat([1.0, 0.0, 1.0], [gains, losses, same]),
        )
        held += int(times) * (found.low <= gain <= found.high)
    changed = prompts * (better + worse)
    return {"share": share, "gain": gain, "alike": alike, "changed": changed, "coverage": held / evaluations}


def of_graded(prompts: int, evaluations: int) -> list[Row]:
    """Exponential rewards of two models whose means are a prompt's difficulty, and .1 more."""
    random = np.random.default_rng(prompts)
    held = 0
    for _ in range(evaluations):
        difficulty = random.beta(0.5, 1.0, size=prompts)
        difference = random.exponential(difficulty + 0.1) - random.exponential(difficulty)
        each = Ratio.of(difference, np.ones(prompts), np.arange(prompts))
        low, high, _ = inference(each)  # that of `compare`
        held += low <= 0.1 <= high
    return [{"name": "two models, paired, graded (t and bootstrap)", "coverage": held / evaluations}]


def rare_changes(changed: int, sizes: str, prompts: int, evaluations: int) -> float:
    """Graded rewards from 0 to 1, of which so many change on average, two thirds of them for the better."""
    random = np.random.default_rng([prompts, changed, len(sizes)])
    by_size: dict[str, tuple[Callable[[int], Values], float]] = {
        "uniform": (lambda n: random.random(n), 1 / 2),
        "thirds": (lambda n: random.integers(1, 4, n) / 3, 2 / 3),
        "small, seldom large": (lambda n: random.beta(0.3, 2.0, n), 0.3 / 2.3),
    }
    draw, mean = by_size[sizes]
    truth, held = changed / prompts / 3 * mean, 0
    for _ in range(evaluations):
        before = random.random(prompts)
        moved = random.random(prompts) < changed / prompts
        size = draw(prompts) * np.where(random.random(prompts) < 2 / 3, 1, -1)
        difference = np.where(moved, size, 0.0)
        found = compare(before, before + difference)
        held += found.low <= truth <= found.high
    return held / evaluations


def of_rare(prompts: int, evaluations: int) -> list[Row]:
    rows: list[Row] = []
    for changed, sizes in itertools.product((1, 2, 3, 4), ("uniform", "thirds", "small, seldom large")):
        covers = rare_changes(changed, sizes, prompts, evaluations)
        about = {"name": "two models, graded, few changes", "mean changes": changed, "sizes": sizes}
        rows.append({**about, "coverage": covers})
    return rows


def of_shares(prompts: int, evaluations: int) -> list[Row]:
    rows: list[Row] = []
    for share in SHARES:
        random = np.random.default_rng([prompts, round(100 * share)])
        right, times = np.unique(random.binomial(prompts, share, evaluations), return_counts=True)
        intervals = [interval(np.repeat([1.0, 0.0], [k, prompts - k])) for k in right]
        held = sum(n for n, (low, high) in zip(times, intervals) if low <= share <= high)
        rows.append({"name": "one model (Wilson)", "share": share, "coverage": float(held / evaluations)})
    for share, gain, alike in itertools.product(SHARES, GAINS, ALIKE):
        if share + gain <= SHARES[-1]:
            found = two_models(share, gain, alike, prompts, evaluations)
            rows.append({"name": "two models, paired (Tango)", **found})
    return rows


def of_eval(prompts: int, evaluations: int) -> list[Row]:
    """The share of simulated evaluations whose interval holds the truth."""
    rows: list[Row] = []
    for name, (draw, truth) in CASES.items():
        random, held = np.random.default_rng(0), 0
        for _ in range(evaluations):
            low, high = interval(draw(random, random.beta(0.5, 1.0, size=prompts)))
            held += low <= truth <= high
        rows.append({"name": name, "coverage": held / evaluations})
    return rows


Pair = tuple[Values, Values]


def within(draw: Callable[[np.random.Generator, int], Values]) -> Callable[..., Pair]:
    """Rewards from 0 to 1, of a start of .5."""
    return lambda random, n, effect: (np.full(n, 0.5), np.clip(0.5 + draw(random, n) + effect, 0, 1))


def anywhere(draw: Callable[[np.random.Generator, int], Values]) -> Callable[..., Pair]:
    """Rewards whose range is unknown, of starts that vary as much as the differences."""

    def pair(random: np.random.Generator, n: int, effect: float) -> Pair:
        before = random.normal(size=n)
        return before, before + draw(random, n) + effect

    return pair


def rare(share: float, noise: float) -> Callable[[np.random.Generator, int], Values]:
    """A loss on a share of the prompts, and a small gain on the others; the mean is 0."""

    def draw(random: np.random.Generator, n: int) -> Values:
        gain = share / (1 - share)
        difference = np.where(random.random(n) < share, -1.0, gain) + noise * gain * random.normal(size=n)
        scaled: Values = difference / math.sqrt(gain)  # of variance 1
        return scaled

    return draw


def of_responses(random: np.random.Generator, n: int, effect: float) -> Pair:
    """Means of 1 to 8 right or wrong responses, of another number at each prompt."""
    share, count = random.beta(0.5, 1.0, size=n), random.integers(1, 9, n)
    after = share + effect * (1 - share)
    return random.binomial(count, share) / count, random.binomial(count, after) / count


def right_or_wrong(random: np.random.Generator, n: int, effect: float) -> Pair:
    share = random.beta(0.5, 1.0, size=n)
    return random.binomial(1, share) * 1.0, random.binomial(1, share + effect * (1 - share)) * 1.0


def skewed(random: np.random.Generator, n: int) -> Values:
    return (random.lognormal(0, 1, n) - math.exp(0.5)) / math.sqrt(math.exp(2) - math.exp(1))


def mixture(random: np.random.Generator, n: int) -> Values:
    """Of two normal distributions, a wide one of 15 %."""
    wide = random.random(n) < 0.15
    return np.where(wide, random.normal(2.1, 0.7, n), random.normal(-2.1 * 0.15 / 0.85, 0.3, n))


# Each with an effect that a model is better by where power is measured.
SHAPES: dict[str, tuple[Callable[..., Pair], float]] = {
    "right or wrong": (right_or_wrong, 0.4),
    "means of 1 to 8 responses": (of_responses, 0.4),
    "0 to 1, uniform": (within(lambda random, n: random.uniform(-0.25, 0.25, n)), 0.2),
    "0 to 1, rare loss (10 %)": (within(lambda random, n: rare(0.1, 0.3)(random, n) / 8), 0.2),
    "0 to 1, rare loss (5 %)": (within(lambda random, n: rare(0.05, 0.3)(random, n) / 10), 0.2),
    "any, normal": (anywhere(lambda random, n: random.normal(size=n)), 0.8),
    "any, heavy tails (t, 2.5)": (anywhere(lambda random, n: random.standard_t(2.5, n)), 0.8),
    "any, rare loss (10 %)": (anywhere(rare(0.1, 0.3)), 0.8),
    "any, rare loss (5 %)": (anywhere(rare(0.05, 0.3)), 0.8),
    "any, rare loss (2 %)": (anywhere(rare(0.02, 0.3)), 0.8),
    "any, skewed (lognormal)": (anywhere(skewed), 0.8),
    "any, mixture": (anywhere(mixture), 0.8),
}


def of_null(prompts: int, evaluations: int) -> list[Row]:
    rows: list[Row] = []
    for (shape, (draw, effect)), shift in itertools.product(SHAPES.items(), (False, True)):
        random = np.random.default_rng([prompts, list(SHAPES).index(shape), int(shift)])
        verdict = before = detectable = 0.0
        for _ in range(evaluations):
            a, b = draw(random, prompts, effect if shift else 0.0)
            found = compare(a, b)
            old = mcnemar(b - a) if found.test == "McNemar" else sign_flips(b - a)
            is_up = b.mean() > a.mean()
            verdict += found.verdict == "better" if shift else found.verdict != "not shown"
            before += old < LEVEL and (is_up or not shift)
            detectable += found.detectable / evaluations
        about = {"name": "power" if shift else "called different", "shape": shape, "effect": effect * shift}
        shares = {"verdict": verdict / evaluations, "before": before / evaluations}
        rows.append({**about, **shares, "detectable": None if math.isnan(detectable) else detectable})
    return rows


KINDS = {"eval": of_eval, "shares": of_shares, "graded": of_graded, "rare": of_rare, "null": of_null}


def summary(rows: list[Row]) -> list[str]:
    """The least and the largest coverage of each kind; of verdicts all."""
    lines = [
        f"{row['shape']}, {row['prompts']} prompts, {row['name']}: {row['verdict']:.3f}, "
        f"before {row['before']:.3f}"
        for row in rows
        if row["kind"] == "null"
    ]
    rows = [row for row in rows if row["kind"] != "null"]
    for prompts, name in dict.fromkeys((row["prompts"], row["name"]) for row in rows):
        chosen = [row for row in rows if (row["prompts"], row["name"]) == (prompts, name)]
        for what, part in (
            ("", [r for r in chosen if r.get("changed", 5) >= 5]),
            (", fewer than 5 changed answers", [r for r in chosen if r.get("changed", 5) < 5]),
        ):
            if part:
                low, high = (f(row["coverage"] for row in part) for f in (min, max))
                lines.append(
                    f"{name}{what}, {prompts} prompts: {low:.3f} to {high:.3f} in {len(part)} settings"
                )
    return lines


def main() -> None:
    parser = recording.parser(__doc__, prompts=[100, 300], evaluations=2000, only=KINDS)
    parser.set_defaults(only=[kind for kind in KINDS if kind != "null"])
    asked = parser.parse_args()
    rows: list[Row] = []
    for kind, prompts in itertools.product(asked.only, asked.prompts):
        about = {"kind": kind, "prompts": prompts, "evaluations": asked.evaluations}
        found = KINDS[kind](prompts, asked.evaluations)
        for row in found:
            value, goal = (row["coverage"], 0.95) if "coverage" in row else (row["verdict"], 0.05)
            rows.append(recording.row(ours=[value], goal=goal, **row, **about))
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    made = {(row["kind"], row["prompts"]) for row in rows}
    rows = [row for row in kept if (row["kind"], row["prompts"]) not in made] + rows
    recording.write(RESULTS, rows)
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
