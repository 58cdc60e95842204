"""How often the verdict is wrong: runs that learned nothing, and runs with a known gain, simulated.

    python reproductions/verdict/run.py [--out runs/verdict] [--record]

Start and result answer the same prompts; their rewards are drawn and compared by the code that a run uses
(`agro.stats.paired.compare`). Prompts differ in difficulty, so that the two rewards of a prompt are
correlated. Writes result.json into --out, with --record beside this script, with the tables of README.md.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agro.stats.paired import compare
from reproductions import harness

FOLDER = Path(__file__).resolve().parent
PROMPTS, MEANS, SPREADS = (20, 50, 100, 300, 1000), (0.05, 0.2, 0.5, 0.8, 0.95), (0.0, 0.5, 0.9)
GAIN_MEAN, GAIN_SPREAD, GAINS = 0.5, 0.5, (0.05, 0.1, 0.2)
GRADED = (20, 100)  # numbers of prompts with graded rewards, whose test draws 10,000 signs a prompt
# Clusters of near-copies by their sizes: few large ones, some large ones among others, nearly all alone.
COPIES = {
    "20 × 10": (10,) * 20,
    "50 × 4": (4,) * 50,
    "3 × 28 + 85": (28,) * 3 + (1,) * 85,
    "5 + 95": (5,) + (1,) * 95,
}
ALIKE = 0.9  # share of the copies that are answered as the first of their cluster

Values = NDArray[np.float64]
Kind = Literal["0/1", "graded"]
KINDS: tuple[Kind, ...] = ("0/1", "graded")


@dataclass(frozen=True)
class Case:
    """`mean`: of the start's rewards; `gain`: the result's mean minus it.

    `spread`: the variance of the prompts' difficulties as a share of the largest possible one, which is the
    correlation of two 0/1 rewards of a prompt where nothing was learned.
    """

    kind: Kind
    n: int
    mean: float
    spread: float
    gain: float = 0.0


def draw(case: Case, rng: np.random.Generator) -> tuple[Values, Values]:
    """Rewards [n] of the start and of the result on the same prompts."""
    before = _difficulties(case, case.mean, rng)
    share = case.gain / (1 - case.mean)
    after = before + share * (1 - before)  # the mean rises by the gain
    return _rewards(case, before, rng), _rewards(case, after, rng)


def _rewards(case: Case, expected: Values, rng: np.random.Generator) -> Values:
    if case.kind == "0/1":
        return (rng.random(case.n) < expected).astype(np.float64)
    return rng.beta(3 * expected + 1e-3, 3 * (1 - expected) + 1e-3)


def _difficulties(case: Case, mean: float, rng: np.random.Generator) -> Values:
    """[n] The expected reward of each prompt, of a beta distribution."""
    if case.spread == 0:
        return np.full(case.n, mean)
    concentration = 1 / case.spread - 1
    return rng.beta(mean * concentration, (1 - mean) * concentration, case.n)


def measure(case: Case, runs: int, seed: int) -> dict[str, Any]:
    """Shares of `runs` simulated runs that are called better and worse."""
    rng = np.random.default_rng(seed)
    verdicts = [compare(*draw(case, rng)).verdict for _ in range(runs)]
    return {
        **vars(case),
        "runs": runs,
        "better": verdicts.count("better") / runs,
        "worse": verdicts.count("worse") / runs,
    }


def draw_copies(
    kind: Kind, sizes: Sequence[int], mean: float, spread: float, rng: np.random.Generator
) -> tuple[Values, Values]:
    """Rewards of start and result, which learned nothing, on the near-copies of len(sizes) prompts."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    difficulty = _difficulties(Case(kind, len(sizes), mean, spread), mean, rng)
    sides = []
    for _ in range(2):
        first = _rewards(Case(kind, len(sizes), mean, spread), difficulty, rng)[labels]
        own = _rewards(Case(kind, len(labels), mean, spread), difficulty[labels], rng)
        sides.append(np.where(rng.random(len(labels)) < ALIKE, first, own))
    return sides[0], sides[1]


def near_copies(runs: int, means: Sequence[float] = (0.2, 0.5, 0.8)) -> list[dict[str, Any]]:
    """Of runs that learned nothing: shares called better or worse with clusters and without, and how often
    the interval covers 0."""
    rows = []
    for seed, (name, kind, mean) in enumerate(product(COPIES, KINDS, means)):
        rng, labels = np.random.default_rng([1, seed]), np.repeat(range(len(COPIES[name])), COPIES[name])
        pairs = [draw_copies(kind, COPIES[name], mean, 0.5, rng) for _ in range(runs)]
        clustered = [compare(a, b, labels.tolist()) for a, b in pairs]
        alone = [compare(a, b).verdict for a, b in pairs]
        verdicts = [found.verdict for found in clustered]
        rows.append(
            {
                "kind": kind,
                "sizes": name,
                "mean": mean,
                "runs": runs,
                "better": verdicts.count("better") / runs,
                "worse": verdicts.count("worse") / runs,
                "covers": sum(found.low <= 0 <= found.high for found in clustered) / runs,
                "better, as if alone": alone.count("better") / runs,
            }
        )
    return rows


def nothing_learned(kind: Kind, runs: int, prompts: Sequence[int] = PROMPTS) -> list[dict[str, Any]]:
    cases = [Case(kind, *case) for case in product(prompts, MEANS, SPREADS)]
    return [measure(case, runs, seed) for seed, case in enumerate(cases)]


def known_gain(kind: Kind, runs: int, prompts: Sequence[int] = PROMPTS) -> list[dict[str, Any]]:
    cases = [Case(kind, n, GAIN_MEAN, GAIN_SPREAD, gain) for n, gain in product(prompts, GAINS)]
    return [measure(case, runs, seed) for seed, case in enumerate(cases)]


def tables(result: dict[str, Any]) -> str:
    """Markdown: the share of "better" where nothing was learned, and at known gains."""
    gained = harness.grouped(result["known gain"], "kind", "n")
    none = []
    for (kind, n), rows in harness.grouped(result["nothing learned"], "kind", "n").items():
        better, worse = (np.array([row[name] for row in rows]) for name in ("better", "worse"))
        shares = [f"{better.mean():.2%}", f"{better.max():.2%}", f"{worse.mean():.2%}"]
        none.append([f"{kind}, {n}", *shares, *(f"{row['better']:.0%}" for row in gained[kind, n])])
    copies = []
    for kind, sizes in product(KINDS, COPIES):
        rows = [row for row in result["near-copies"] if (row["kind"], row["sizes"]) == (kind, sizes)]
        names = ("better", "worse", "covers", "better, as if alone")
        copies.append(
            [f"{kind}, {sizes}", *(f"{np.mean([row[name] for row in rows]):.1%}" for name in names)]
        )
    of_none = ["prompts", '"better", mean', "largest", '"worse", mean', *(f"+{gain:g}" for gain in GAINS)]
    of_copies = ["near-copies", '"better"', '"worse"', "interval holds 0", '"better" alone']
    return "\n\n".join(harness.markdown(head, rows) for head, rows in ((of_none, none), (of_copies, copies)))


def main() -> None:
    record = "write beside this script, and the page"
    given = harness.parser(__doc__, "runs/verdict", record=record).parse_args()
    exact, graded = 400, 100  # runs a setting
    clock = time.process_time()
    result: dict[str, Any] = {
        "nothing learned": nothing_learned("0/1", exact) + nothing_learned("graded", graded, GRADED),
        "known gain": known_gain("0/1", exact) + known_gain("graded", graded, GRADED),
        "near-copies": near_copies(exact),
    }
    result["cpu_seconds"] = time.process_time() - clock
    harness.keep(given, FOLDER, result)
    if given.record:
        harness.put(FOLDER / "README.md", tables(result), "tables")
    print(tables(result))
    error = math.sqrt(0.025 * 0.975 / graded)
    print(f"{result['cpu_seconds']:.0f} s of CPU; standard error of a share of 2.5 %: at most {error:.2%}")


if __name__ == "__main__":
    main()
