"""Kill, stop and cut off the processes of runs, and measure what goes on, what is lost and when all is back.

    python benchmarks/hosts/run.py [--only kills equal …] [--kills 26] [--seed 0] [--ray-python PYTHON]

Every case starts a run with `agro train … --place`, and in the end looks at its store: each response made
once and drawn once, groups complete, nothing damaged. Writes benchmarks/results/hosts.json. Ranks that are
killed are in tests/train/test_ranks.py, a cable that is cut in tests/store/postgres_faults.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent / "postgres"), str(ROOT)]

from failures import equal_weights, random_kills  # noqa: E402
from placed import ENVIRONMENT, holds  # noqa: E402
from postgres_server import Server  # noqa: E402

from agro.io.processes import free_port  # noqa: E402
from benchmarks import recording  # noqa: E402

RESULTS = HERE.parent / "results" / "hosts.json"
RAY_KILLS = {"ray": "5", "ray on postgres": "24"}


def case(name: str, folder: Path, url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """`url`: of a database, which some cases use."""
    kills, seed = arguments.kills, arguments.seed
    if name == "kills":
        return asdict(random_kills(folder, kills, seed))
    if name.startswith("equal"):
        return asdict(equal_weights(folder, 6, seed, url if "postgres" in name else None))
    result = folder / "result.json"
    command = [arguments.ray_python, str(HERE / "failures.py"), str(folder), str(result)]
    command += ["--seed", str(seed), "--kills", RAY_KILLS[name]]
    subprocess.run([*command, *(("--url", url) if "postgres" in name else ())], env=ENVIRONMENT, check=True)
    return dict(json.loads(result.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", default=None)
    parser.add_argument("--kills", type=int, default=26, help="besides the 6 of `equal`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ray-python", default=None)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    before = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    results = {result["name"]: result for result in before}
    names = ["kills", "equal", "equal on postgres", *(RAY_KILLS if arguments.ray_python else ())]
    for name in [each for each in names if each in (arguments.only or names)]:
        with tempfile.TemporaryDirectory() as folder, closing(Server(free_port("127.0.0.1"))) as server:
            began = time.monotonic()
            result = case(name, Path(folder), server.url, arguments)
            result["seconds"] = round(time.monotonic() - began, 1)
        print(json.dumps(result), flush=True)
        back = [seconds for failure in result["failures"] for seconds in failure["back_after"]]
        results[result["name"]] = recording.row(ours=back, **result)
        recording.write(arguments.out, results.values())
    raise SystemExit(0 if all(holds(result["found"]) for result in results.values()) else 1)


if __name__ == "__main__":
    main()
