"""Kill, stop and cut off the processes of runs, and measure what goes on, what is lost and when all is back.

    python benchmarks/hosts/run.py [--only kills equal …] [--kills 26] [--seed 0] [--ray-python PYTHON]

Every case starts a run with `agro train … --place`, and in the end looks at its store: each response made
once and drawn once, groups complete, nothing damaged. Cables are those of network namespaces, which need
root. Writes benchmarks/results/hosts.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent / "postgres"), str(ROOT)]

from failures import Result, equal_weights, random_kills  # noqa: E402
from network import has_namespaces  # noqa: E402
from placed import ENVIRONMENT, holds  # noqa: E402
from postgres_server import Server  # noqa: E402
from ranks import cut_ranks, ranks_and_servers  # noqa: E402

from agro.io.processes import free_port  # noqa: E402
from benchmarks import recording  # noqa: E402

RESULTS = HERE.parent / "results" / "hosts.json"
RAY_CASES = {"ray": ("--kills", "5"), "ray on postgres": ("--kills", "24"), "ray ranks": ("--served",)}


def ray_case(folder: Path, python: str, *options: str) -> dict[str, Any]:
    """The failures on Ray, by a Python that has it."""
    command = [python, str(HERE / "ray_failures.py"), str(folder), str(folder / "result.json"), *options]
    subprocess.run(command, env=ENVIRONMENT, check=True)
    return dict(json.loads((folder / "result.json").read_text()))


@contextmanager
def database() -> Iterator[str]:
    """The URL of a server that ends with the block."""
    with closing(Server(free_port("127.0.0.1"))) as server:
        yield server.url


def equal_weights_on_postgres(folder: Path, kills: int, seed: int) -> Result:
    with database() as url:
        return equal_weights(folder, kills, seed, url)


def cases(arguments: argparse.Namespace) -> dict[str, Callable[[Path], Result]]:
    kills, seed = arguments.kills, arguments.seed
    return {
        "kills": lambda folder: random_kills(folder, kills, seed),
        "equal": lambda folder: equal_weights(folder, 6, seed),
        "equal on postgres": lambda folder: equal_weights_on_postgres(folder, 6, seed),
        "ranks": lambda folder: ranks_and_servers(folder, 9, seed),
        "cut ranks": lambda folder: cut_ranks(folder, 3),
    }


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
    for name, case in cases(arguments).items():
        if name not in (arguments.only or [name]):
            continue
        if name.startswith("cut") and not has_namespaces():
            print(f"{name}: skipped, network namespaces need root", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            result = case(Path(folder))
            result.seconds = round(time.monotonic() - began, 1)
        _keep(asdict(result), arguments.out, results)
    for name, options in RAY_CASES.items():
        if not arguments.ray_python or name not in (arguments.only or [name]):
            continue
        with tempfile.TemporaryDirectory() as folder, database() as url:
            where = ("--url", url) if "postgres" in name else ()
            more = ("--seed", str(arguments.seed), *options, *where)
            found = ray_case(Path(folder), arguments.ray_python, *more)
        _keep(found, arguments.out, results)
    raise SystemExit(0 if all(holds(result["found"]) for result in results.values()) else 1)


def _keep(result: Mapping[str, Any], out: Path, results: dict[str, Any]) -> None:
    """Print what a case found, and record it with those before; `ours` are the seconds until all was back."""
    print(json.dumps(result), flush=True)
    back = [seconds for failure in result["failures"] for seconds in failure["back_after"]]
    results[result["name"]] = recording.row(ours=back, **result)
    recording.write(out, results.values())


if __name__ == "__main__":
    main()
