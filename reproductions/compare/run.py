"""The example of lm-evaluation-harness's pull request 3868: the same answers, p = .080 unpaired, .008 paired.

    python reproductions/compare/run.py [--out FOLDER] [--json]

The request (for issue 3831) gives n = 220 and both p, not the table. With the harness's own unpaired test
(z of two accuracies, standard errors with n − 1) and the exact McNemar test three tables have both p to the
third decimal, apart from exchanging right and wrong; `TABLE` is the one with the most answers that differ.
The files are made of its counts, in the harness's format of --log_samples, and compared by `agro compare`.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TABLE = {"both": 110, "b": 30, "a": 12, "neither": 68}  # who was right: n = 220
NAME = "samples_additions_2026-06-23T10-00-00.000000.jsonl"


def answers() -> list[tuple[int, int]]:
    """Of A and of B: 1 where it is right."""
    kinds = {"both": (1, 1), "b": (0, 1), "a": (1, 0), "neither": (0, 0)}
    return [right for kind, count in TABLE.items() for right in [kinds[kind]] * count]


def row(doc_id: int, is_right: int) -> dict[str, Any]:
    """As lm-evaluation-harness logs a sample (4e7e0d4)."""
    question, total = f"What is {doc_id} + {7 * doc_id + 3}?", str(8 * doc_id + 3)
    response = total if is_right else "I don't know."
    generation = {"arg_0": f"Q: {question}\nA:", "arg_1": {"until": ["\n"], "temperature": 0.0}}
    return {
        "doc_id": doc_id,
        "doc": {"question": question, "answer": total},
        "target": total,
        "arguments": {"gen_args_0": generation},
        "resps": [[response]],
        "filtered_resps": [response],
        "filter": "none",
        "metrics": ["exact_match"],
        "exact_match": float(is_right),
    }


def write_samples(folder: Path) -> list[Path]:
    """The files of both models, in a folder each."""
    paths = []
    for side, name in enumerate(("a", "b")):
        path = folder / name / NAME
        path.parent.mkdir(parents=True)
        lines = [json.dumps(row(i, right[side])) for i, right in enumerate(answers())]
        path.write_text("".join(f"{line}\n" for line in lines))
        paths.append(path)
    return paths


def unpaired_p(paths: list[Path]) -> float:
    """As the harness's scripts/model_comparator.py has it, of the scores in the files."""
    means, errors = [], []
    for path in paths:
        scores = [json.loads(line)["exact_match"] for line in path.read_text().splitlines()]
        mean = sum(scores) / len(scores)
        means.append(mean)
        errors.append(sum((x - mean) ** 2 for x in scores) / (len(scores) - 1) / len(scores))
    return math.erfc(abs(means[0] - means[1]) / math.sqrt(sum(errors)) / math.sqrt(2))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="keep the files in this folder")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        paths = write_samples(asked.out or Path(folder))
        command = [sys.executable, "-m", "agro", "compare", *map(str, paths), "--json"]
        done = subprocess.run([*command, "--out", folder], check=True, capture_output=True, text=True)
        [found] = json.loads(done.stdout)["sets"]
        result = {"p_unpaired": unpaired_p(paths), **found}
    if asked.json:
        print(json.dumps(result))
        return
    print(f"unpaired: p = {result['p_unpaired']:.3f}")
    print(
        f"paired:   p = {found['p']:.3f} ({found['test']}), {found['verdict']} by {found['difference']:.3f} "
        f"[{found['low']:.3f}, {found['high']:.3f}] on {found['n']} prompts"
    )


if __name__ == "__main__":
    main()
