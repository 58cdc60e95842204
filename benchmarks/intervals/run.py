"""How often the 95 % intervals of `agro eval` and `agro compare` hold the truth, by simulation.

    python benchmarks/intervals/run.py [--only shares] [--prompts 100 300] [--evaluations 2000] [--json]

A prompt's difficulty is drawn from Beta(½, 1), as in practice: most are hard, some are easy. It gives eight
responses that pass with that probability, or one graded reward of that mean. Each simulated evaluation draws
new prompts and responses. `truth` is the mean over all prompts that there could be, by formula.

Shares of right answers are simulated for each probability of `SHARES` too: of one model (Wilson), and of two
on the same prompts (Tango, as `agro compare` has it), whose answers a prompt decides alike with a probability
of 0, ½ or .9. `changed` is how many answers differ on average: with fewer than five no interval can have its
nominal coverage, since most evaluations see no or one change. Graded rewards of two models share the
difficulty of a prompt.

Writes benchmarks/results/intervals.json and prints a table, or with --json that document alone. The standard
error of a coverage is about 0.005. `--only shares` takes half a minute, `eval` and `graded`, whose intervals
are bootstraps, some minutes; rows of the others stay in the file.
"""

from __future__ import annotations

import argparse
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

from agro.rollout.evaluate import interval  # noqa: E402
from agro.rollout.paired import Sums, compare  # noqa: E402
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


def one_model(share: float, prompts: int, evaluations: int) -> float:
    random = np.random.default_rng([prompts, round(100 * share)])
    right, times = np.unique(random.binomial(prompts, share, evaluations), return_counts=True)
    intervals = [interval(np.repeat([1.0, 0.0], [k, prompts - k])) for k in right]
    return float(sum(n for n, (low, high) in zip(times, intervals) if low <= share <= high) / evaluations)


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


def graded_pairs(prompts: int, evaluations: int) -> float:
    """Exponential rewards of two models whose means are a prompt's difficulty, and .1 more."""
    random = np.random.default_rng(prompts)
    held = 0
    for _ in range(evaluations):
        difficulty = random.beta(0.5, 1.0, size=prompts)
        difference = random.exponential(difficulty + 0.1) - random.exponential(difficulty)
        low, high = Sums.of(difference, np.arange(prompts)).interval()  # that of `compare`
        held += low <= 0.1 <= high
    return held / evaluations


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
    rows: list[Row] = [
        {"name": "one model (Wilson)", "share": p, "coverage": one_model(p, prompts, evaluations)}
        for p in SHARES
    ]
    for share, gain, alike in itertools.product(SHARES, GAINS, ALIKE):
        if share + gain <= SHARES[-1]:
            found = two_models(share, gain, alike, prompts, evaluations)
            rows.append({"name": "two models, paired (Tango)", **found})
    return rows


def of_graded(prompts: int, evaluations: int) -> list[Row]:
    name = "two models, paired, graded (t and bootstrap)"
    return [{"name": name, "coverage": graded_pairs(prompts, evaluations)}]


def of_eval(prompts: int, evaluations: int) -> list[Row]:
    return [
        {"name": name, "coverage": coverage(draw, truth, prompts, evaluations)}
        for name, (draw, truth) in CASES.items()
    ]


KINDS = {"eval": of_eval, "shares": of_shares, "graded": of_graded, "rare": of_rare}


def summary(rows: list[Row]) -> list[str]:
    """The least and the largest coverage of each kind."""
    lines = []
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


def coverage(draw: Draw, truth: float, prompts: int, evaluations: int) -> float:
    """The share of simulated evaluations whose interval holds the truth."""
    random = np.random.default_rng(0)
    held = 0
    for _ in range(evaluations):
        low, high = interval(draw(random, random.beta(0.5, 1.0, size=prompts)))
        held += low <= truth <= high
    return held / evaluations


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, nargs="+", default=[100, 300])
    parser.add_argument("--evaluations", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=KINDS, nargs="+", default=list(KINDS))
    asked = parser.parse_args()
    rows: list[Row] = []
    for kind, prompts in itertools.product(asked.only, asked.prompts):
        about = {"kind": kind, "prompts": prompts, "evaluations": asked.evaluations}
        found = KINDS[kind](prompts, asked.evaluations)
        rows += [recording.row(ours=[row["coverage"]], goal=0.95, **row, **about) for row in found]
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    made = {(row["kind"], row["prompts"]) for row in rows}
    rows = [row for row in kept if (row["kind"], row["prompts"]) not in made] + rows
    recording.write(RESULTS, rows)
    print(json.dumps(rows, indent=1) if asked.json else "\n".join(summary(rows)))


if __name__ == "__main__":
    main()
