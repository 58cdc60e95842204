"""Change the code in one place at a time, and see that a test fails.

    python benchmarks/mutation/run.py [--files agro/models/logprobs.py …]

A mutant that no test notices has survived. Either it is listed in survivors.md with the reason why it is
equivalent or harmless, or a test is missing: then it is printed and the exit status is 1. Outcomes are stored
in build/mutants.jsonl, so that a run that was stopped continues. A survivor is tried again once a test has
changed.

A mutant is a fork of a process that has loaded torch and collected the tests. The code of the changed
function replaces the old code, and the tests that call it run until one fails. A file whose change has run
already, at import or at collection, is executed once more; where that would leave objects of old classes
behind the mutant is left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import pytest  # noqa: E402
from forks import BUDGET, FILES, OPTIONS, ROOT, TESTS, Session, calls  # noqa: E402
from mutants import Mutant, mutants  # noqa: E402

from benchmarks import recording  # noqa: E402

KEPT = ROOT / "build/mutants.jsonl"


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def main() -> int:
    parser = recording.parser(__doc__)
    parser.add_argument("--files", nargs="+", type=lambda p: Path(p).resolve(), default=FILES)
    parser.add_argument("--sample", type=int, help="this many mutants of each file, drawn with seed 0")
    given = parser.parse_args()
    os.chdir(ROOT)
    tests = digest(str(BUDGET), *(p.read_text() for p in sorted((ROOT / "tests").rglob("*.py"))))
    every = [m for path in given.files for m in mutants(path)]
    whole, keys = every, keys_of(every)
    if given.sample is not None:
        every = [m for path in given.files for m in drawn(path, whole, given.sample)]
    KEPT.parent.mkdir(exist_ok=True)
    kept: dict[str, dict[str, Any]] = {}

    def read() -> list[Mutant]:
        for line in KEPT.read_text().splitlines() if KEPT.exists() else []:
            row = json.loads(line)
            kept[row["key"]] = row
        return [
            m
            for m in every
            if (row := kept.get(keys[id(m)])) is None
            or (row["outcome"] == "survived" and row["tests"] != tests)
        ]

    def keep(mutant: Mutant, outcome: str, seconds: float, by: str) -> None:
        row = {
            "key": keys[id(mutant)],
            "outcome": outcome,
            "seconds": round(seconds, 2),
            "by": by,
            "tests": tests,
        }
        with KEPT.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if outcome == "survived":
            print(f"{mutant.path.relative_to(ROOT)}:{mutant.line} {outcome}\n{mutant.diff()}", flush=True)

    todo = read()
    print(f"{len(every)} mutants, {len(todo)} to try", flush=True)
    pid = os.fork() if todo else 0
    if todo and pid == 0:
        session = Session(todo, keep)
        with calls(session.early):
            code = pytest.main([*OPTIONS, *TESTS], plugins=[session])
        os._exit(int(code))
    if todo and os.waitpid(pid, 0)[1]:
        return 1
    todo = read()
    print(f"{len(todo)} would have to be imported anew: left out", flush=True)
    every = [m for m in every if m not in todo]
    return report(every, [kept[keys[id(m)]] for m in every], len(whole) if given.files == FILES else None)


def keys_of(every: list[Mutant]) -> dict[int, str]:
    """Under which outcomes are stored, by the object's id."""
    seen: Counter[str] = Counter()
    keys: dict[int, str] = {}
    for m in every:
        text = digest(str(m.path.relative_to(ROOT)), m.name)
        seen[text] += 1  # the same change of the same line elsewhere
        keys[id(m)] = f"{text}-{seen[text]}"
    return keys


def drawn(path: Path, every: list[Mutant], size: int) -> list[Mutant]:
    """Of the bodies of functions: what runs at import mostly takes a new import for each mutant."""
    of_file = [m for m in every if m.path == path and m.function is not None]
    return random.Random(0).sample(of_file, min(size, len(of_file)))


def report(every: list[Mutant], rows: list[dict[str, Any]], whole: int | None) -> int:
    """Count, and print the survivors that survivors.md doesn't know.

    `whole`: all mutants, of which `every` may be a sample; None where not all files were tried. Else
    result.json is written.
    """
    explained = (HERE / "survivors.md").read_text() if (HERE / "survivors.md").exists() else ""
    files = {}
    for path in dict.fromkeys(m.path for m in every):
        outcomes = Counter(r["outcome"] for m, r in zip(every, rows, strict=True) if m.path == path)
        files[str(path.relative_to(ROOT))] = {k: outcomes[k] for k in ("killed", "timeout", "survived")}
    total = {k: sum(f[k] for f in files.values()) for k in ("killed", "timeout", "survived")}
    share = 1 - total["survived"] / len(every)
    survivors = [m for m, r in zip(every, rows, strict=True) if r["outcome"] == "survived"]
    new = [m for m in survivors if m.diff() not in explained]
    for m in new:
        print(f"\n{m.path.relative_to(ROOT)}:{m.line}\n{m.diff()}")
    print(f"{len(every)} mutants: {total}, {share:.1%} killed; {len(new)} survivors are not in survivors.md")
    if whole is not None:
        result = {
            "mutants": whole,
            "tried": len(every),
            **total,
            "killed_share": round(share, 4),
            "files": files,
            "seconds": round(sum(r["seconds"] for r in rows)),
            "commit": recording.commit(),
            "date": date.today().isoformat(),
            "machine": recording.machine_of_models(),
        }
        (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())
