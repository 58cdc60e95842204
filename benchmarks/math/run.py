"""How often the reward `math` judges a pair as people do.

    python benchmarks/math/run.py [--alone]

On the judged pairs of `tests/grade/pairs`. With --alone that of math-verify by itself, without agro_grade's
rules.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import math_verify

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from agro import config  # noqa: E402
from agro.rewards import load_reward  # noqa: E402
from agro.types import Sample  # noqa: E402
from benchmarks import recording  # noqa: E402

Pairs = list[tuple[Sample, float]]  # and whether it is right


def sample(response: str, answer: str) -> Sample:
    return Sample("p", response, meta={"answer": answer})


def judged(file: Path) -> Pairs:
    pairs = []
    for row in map(json.loads, file.read_text().splitlines()):
        pairs += [(sample(text, row["answer"]), 1.0) for text in row["right"]]
        pairs += [(sample(text, row["answer"]), 0.0) for text in row["wrong"]]
    return pairs


def accuracy(name: str, values: list[float | None], pairs: Pairs) -> dict[str, Any]:
    outcomes = list(zip(values, (label for _, label in pairs), strict=True))
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


def main() -> None:
    asked = recording.parser(__doc__, alone=False).parse_args()
    sets = {file.stem: judged(file) for file in sorted((ROOT / "tests/grade/pairs").glob("*.jsonl"))}
    with closing(load_reward(config.RewardConfig(name="math", timeout=20.0))) as reward:
        for name, pairs in sets.items():
            samples = [each for each, _ in pairs]
            if asked.alone:
                values: list[float | None] = [
                    float(math_verify.verify(parsed(s.meta["answer"]), parsed(s.response))) for s in samples
                ]
            else:
                values = [score.value for score in reward.score(samples)]
            print(json.dumps(accuracy(name, values, pairs)), flush=True)


if __name__ == "__main__":
    main()
