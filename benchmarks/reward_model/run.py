"""A reward model trained on logged answers of four models to GSM8K, and its accuracy on held-out questions.

    python benchmarks/reward_model/run.py LOG MODEL [--out FILE] [--max-length N] [--lr RATE] [--epochs N]
        [--json]

LOG is gsm8k_openai_6b_175b.jsonl.gz of openai/grade-school-math: 1,319 questions, of each four answers that
are right or wrong. Pairs are a right and a wrong answer to one question. Three tenths of the questions are
held out. MODEL is a causal language model, such as a tiny one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from agro.store import Store  # noqa: E402
from agro.types import Sample  # noqa: E402
from benchmarks import recording  # noqa: E402


def write_store(log: Path, path: Path) -> None:
    with gzip.open(log, "rt", encoding="utf-8") as lines, Store.open(path) as store:
        for number, row in enumerate(map(json.loads, lines)):
            answers = {name: value for name, value in row.items() if isinstance(value, dict)}
            store.append(
                Sample(
                    f"Question: {row['question']}\nAnswer: ",
                    answer["solution"],
                    prompt_id=f"q{number}",
                    reward=float(answer["is_correct"]),
                    role="expert",
                    source=name,
                )
                for name, answer in answers.items()
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("log", type=Path)
    parser.add_argument("model")
    parser.add_argument("--max-length", type=int, default=320)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store, out = Path(folder) / "answers.db", Path(folder) / "judge"
        write_store(options.log, store)
        command = [sys.executable, "-m", "agro", "fit-reward", str(store), "--model", options.model]
        command += ["--out", str(out), "--on", "groups", "--hold-out", "0.3", "--lr", str(options.lr)]
        command += ["--max-length", str(options.max_length), "--batch", "8", "--json"]
        command += ["--epochs", str(options.epochs)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    result["cpu_seconds"] = round(used.ru_utime + used.ru_stime, 1)
    found = result["held_out"]
    accuracy = found["accuracy"]
    if options.out:
        row = recording.row("held-out accuracy of a fitted reward", [accuracy["value"]], **result)
        recording.write(options.out, [row])
    if options.json:
        print(json.dumps(result))
        return
    print(f"{result['data']['trained']['comparisons']} comparisons trained on, {result['cpu_seconds']} CPU s")
    print(
        f"held-out accuracy {accuracy['value']:.3f} ({accuracy['low']:.3f} to {accuracy['high']:.3f}), "
        f"{found['comparisons']} comparisons of {found['prompts']} questions"
    )
    for row in found["calibration"]:
        print(f"  says {row['says']:.3f}, right {row['right']:.3f} ({row['n']})")
    print("length:", json.dumps(found["length"]))


if __name__ == "__main__":
    main()
