"""Accuracy, attacks and speed of the reward `code`.

    python benchmarks/code/run.py [--data FOLDER] [--level LEVEL] [--workers N] [--out FILE]

Writes benchmarks/results/code.json, or FILE in its place.
FOLDER has `code/humaneval.jsonl.gz` and `code/mbpp.jsonl.gz`, whose own solutions have to pass, and
`generations/humaneval_*.jsonl.gz`, programs of other models with the verdicts of those who logged them.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATA, RESULTS = ROOT.parent / "shared/data", ROOT / "benchmarks/results/code.json"
sys.path.insert(0, str(ROOT))

from attacks import ESCAPES, FORGERIES, HONEST, TESTS  # noqa: E402

from agro.types import Sample  # noqa: E402
from agro_grade.rewards import CodeOptions, CodeReward, code  # noqa: E402
from benchmarks import recording  # noqa: E402


def rows(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt") as lines:
        return [json.loads(line) for line in lines]


def human_eval(row: dict[str, Any], program: str) -> Sample:
    meta = {name: row[name] for name in ("test", "entry_point")}
    return Sample(row["prompt"], program, prompt_id=row["task_id"], meta=meta)


def mbpp(row: dict[str, Any]) -> Sample:
    meta = {name: row[name] for name in ("test_list", "test_setup_code")}
    return Sample(row["text"], row["code"], prompt_id=f"MBPP/{row['task_id']}", meta=meta)


def measure(reward: CodeReward, name: str, samples: list[Sample], verdicts: list[float]) -> dict[str, Any]:
    """How many scores are the verdicts, and which aren't."""
    began = time.monotonic()
    scores = reward.score(samples)
    seconds = time.monotonic() - began
    differing = [
        {"program": sample.prompt_id, "verdict": verdict, "score": score.value, "error": score.error}
        for sample, score, verdict in zip(samples, scores, verdicts, strict=True)
        if score.value != verdict
    ]
    print(f"{name}: {len(samples) - len(differing)} of {len(samples)} as expected", file=sys.stderr)
    per_second = round(len(samples) / seconds, 1)
    share = 1 - len(differing) / len(samples)
    return recording.row(
        name, [share], goal=1.0, n=len(samples), differing=differing, programs_per_second=per_second
    )


def main() -> None:
    args = recording.parser(__doc__, data=DATA, level="full", workers=2, out=RESULTS).parse_args()
    results = []
    with closing(code(CodeOptions(level=args.level), timeout=3.0, workers=args.workers)) as reward:
        attacks = [
            Sample("p", source, prompt_id=name, meta={"tests": TESTS})
            for name, source in (FORGERIES | ESCAPES).items()
        ]
        attacks.append(Sample("p", HONEST, prompt_id="honest", meta={"tests": TESTS}))
        results.append(measure(reward, "attacks", attacks, [*[0.0] * (len(attacks) - 1), 1.0]))
    with closing(code(CodeOptions(level=args.level), timeout=30.0, workers=args.workers)) as reward:
        tasks = rows(args.data / "code/humaneval.jsonl.gz")
        solutions = [human_eval(row, row["canonical_solution"]) for row in tasks]
        results.append(measure(reward, "HumanEval, its solutions", solutions, [1.0] * len(tasks)))
        solutions = [mbpp(row) for row in rows(args.data / "code/mbpp.jsonl.gz")]
        results.append(measure(reward, "MBPP, its solutions", solutions, [1.0] * len(solutions)))
        for file in sorted((args.data / "generations").glob("humaneval_*.jsonl.gz")):
            logged = rows(file)
            programs = [human_eval(row, row["solution"]) for row in logged]
            verdicts = [float(row["is_solved"]) for row in logged]
            results.append(measure(reward, file.name.removesuffix(".jsonl.gz"), programs, verdicts))
    about = {"level": args.level, "workers": args.workers}
    recording.write(args.out, [row | about for row in results])


if __name__ == "__main__":
    main()
