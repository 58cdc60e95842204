"""Accuracy and speed of the reward `math`.

    python benchmarks/math/run.py [--workers N] [--repeats N] [--json] [--alone] [--golden FILE]

Accuracy on the judged pairs of `tests/grade/pairs`, and on those of FILE (JSONL of prediction, gold
and expected). With --json only that; with --alone that of math-verify by itself, without agro_grade's rules.
Speed on 10,000 worked solutions with numbers, half of them wrong, and on the held-out pairs that SymPy
compares, in batches of 128 and without the start of the workers. SymPy's pairs are scored once, because the
workers cache what they have read.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import math_verify

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from agro import config  # noqa: E402
from agro.rewards import Reward, Score, load_reward  # noqa: E402
from agro.types import Sample  # noqa: E402
from agro_grade.final import compare, final  # noqa: E402

PAIRS = sorted(path.stem for path in (ROOT / "tests/grade/pairs").glob("*.jsonl"))  # judged by hand
WORK = "Each box holds {a} eggs, so {b} boxes hold {b} * {a} = {c} eggs. "
ENDS = ("So the answer is {}.", r"So $x = \boxed{{{}}}$.", "#### {}", "They need {} eggs in total.")
FORMS = ("{}", "{},000", r"\frac{{{}}}{{7}}", "{}.5", "{} cm", r"{}\%")


def sample(response: str, answer: str) -> Sample:
    return Sample("p", response, meta={"answer": answer})


def pairs(name: str) -> list[tuple[Sample, float]]:
    rows = map(json.loads, (ROOT / f"tests/grade/pairs/{name}.jsonl").read_text().splitlines())
    labeled = []
    for row in rows:
        labeled += [(sample(text, row["answer"]), 1.0) for text in row["right"]]
        labeled += [(sample(text, row["answer"]), 0.0) for text in row["wrong"]]
    return labeled


def golden(file: Path) -> list[tuple[Sample, float]]:
    rows = map(json.loads, file.read_text().splitlines())
    return [(sample(row["prediction"], row["gold"]), float(row["expected"])) for row in rows]


def solutions(n: int) -> list[Sample]:
    made = []
    for i in range(n):
        work = "".join(WORK.format(a=i % 89 + j, b=j + 2, c=(i % 89 + j) * (j + 2)) for j in range(6))
        form = FORMS[i % len(FORMS)]
        value = form.format(i % 900 + 2 - i % 2)
        made.append(sample(work + "\n" + ENDS[i // 6 % len(ENDS)].format(value), form.format(i % 900 + 2)))
    return made


def accuracy(scores: list[Score], name: str, labeled: list[tuple[Sample, float]]) -> dict[str, object]:
    values = [score.value for score in scores]
    outcomes = list(zip(values, (label for _, label in labeled)))
    return {
        "pairs": name,
        "n": len(outcomes),
        "accuracy": round(sum(value == label for value, label in outcomes) / len(outcomes), 4),
        "accepted": f"{outcomes.count((1.0, 0.0))} of {sum(label == 0.0 for _, label in outcomes)} wrong",
        "rejected": f"{outcomes.count((0.0, 1.0))} of {sum(label == 1.0 for _, label in outcomes)} right",
        "unknown": values.count(None),
    }


def parsed(text: str) -> Any:
    """As math-verify reads a text: it looks for LaTeX between delimiters, so one without words gets some."""
    is_bare = not re.search(r"\$|\\boxed|\\[(\[]|[A-Za-z]+ [A-Za-z]{2}", text)
    return math_verify.parse(f"${text}$" if is_bare else text)


def alone(samples: list[Sample]) -> list[Score]:
    """What math-verify says by itself."""
    return [Score(float(math_verify.verify(parsed(s.meta["answer"]), parsed(s.response)))) for s in samples]


def speed(reward: Reward, name: str, samples: list[Sample], repeats: int) -> dict[str, object]:
    minutes = []
    for _ in range(repeats):
        start = time.perf_counter()
        for i in range(0, len(samples), 128):
            reward.score(samples[i : i + 128])
        minutes.append((time.perf_counter() - start) / 60)
    rates = sorted(len(samples) / m for m in minutes)
    return {
        "samples": name,
        "n": len(samples),
        "per_minute": round(statistics.median(rates)),
        "from": round(rates[0]),
        "to": round(rates[-1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--golden", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    sets = {name: pairs(name) for name in PAIRS}
    if options.golden is not None:
        sets = {"golden": golden(options.golden), **sets}
    samples = {name: [sample for sample, _ in labeled] for name, labeled in sets.items()}
    if options.alone:
        print(json.dumps([accuracy(alone(samples[name]), name, sets[name]) for name in sets]))
        return
    if not options.json:
        print(json.dumps({"machine": platform.processor() or platform.machine(), "workers": options.workers}))
    settings = config.RewardConfig(name="math", timeout=20.0, workers=options.workers)
    with closing(load_reward(settings)) as reward:
        rows = (accuracy(reward.score(samples[name]), name, sets[name]) for name in sets)
        if options.json:
            print(json.dumps(list(rows)))
            return
        for row in rows:
            print(json.dumps(row))
        print(json.dumps(speed(reward, "solutions with numbers", solutions(10_000), options.repeats)))
        finals = [(s, final(s.response), final(s.meta["answer"])) for s in samples["heldout"]]
        symbolic = [s for s, said, answer in finals if compare(said, answer) is None]
        print(json.dumps(speed(reward, "compared by SymPy", symbolic, 1)))


if __name__ == "__main__":
    main()
