"""Record what synchronous runs come to, byte for byte, and check that a changed trainer comes to the same.

    python benchmarks/recorded/run.py record
    python benchmarks/recorded/run.py check [CASE ...] [--without CASE ...]
                                               [--renamed OLD=NEW ...] [--new KEY ...]

Each case trains a small model in a folder of its own. What is kept of it: the SHA-256 of the weights that it
leaves, and its metrics without the times. The code that trains is that of the repository which this script is
in. `check` exits with 1 and names each case, file and metric (with its steps) that differs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import interrupted  # noqa: F401
import one_phase  # noqa: F401  these three list their cases in CASES
import phases  # noqa: F401
import torch
from differences import differences, with_names, without_metrics
from small import CASES, HERE, Values, metrics

RECORDED = HERE / "recorded.json"
LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "peft", "safetensors")
WEIGHTS = (
    "model/*.safetensors",
    "adapter/*.safetensors",
    "best/*.safetensors",
    "checkpoints/*/value.safetensors",
)


def left(out: Path) -> Values:
    """What is kept of a run: the digests of its weights, and its metrics."""
    files = sorted(path for pattern in WEIGHTS for path in out.glob(pattern))
    digests = {
        path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }
    return {"weights": digests, "metrics": metrics(out)}


def train(name: str) -> Values:
    """Train a case anew, in a folder that is then removed; what it says on the way is shown if it fails."""
    with tempfile.TemporaryDirectory() as scratch:
        said = Path(scratch) / "said"
        folder = Path(scratch) / "case"
        folder.mkdir()
        with contextlib.ExitStack() as shown:
            shown.callback(lambda: sys.stderr.write(said.read_text()))
            with said.open("w") as file, contextlib.redirect_stderr(file):
                out = CASES[name](folder)
            shown.pop_all()
        return left(out)


def machine() -> dict[str, str]:
    """What the last bits of a number may hang on."""
    told = [line.split(":") for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()]
    cpu = {key.strip(): value.strip() for key, value in told}
    numbers = ", ".join(f"{key} {cpu[key]}" for key in ("cpu family", "model", "stepping") if key in cpu)
    return {
        "cpu": f"{cpu.get('model name', platform.machine())} ({numbers})",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        **{name: version(name) for name in LIBRARIES},
    }


def commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(HERE), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", str(HERE.parents[1] / "agro"))
    return git("rev-parse", "HEAD") + (" and changes to agro" if changed else "")


def record() -> int:
    cases = {}
    for name in CASES:
        began = time.monotonic()
        cases[name] = train(name)
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    RECORDED.write_text(as_text({"commit": commit(), "machine": machine(), "cases": cases}) + "\n")
    print(f"recorded at {commit()}, {HERE.parents[1]}")
    return 0


def as_text(value: Any, indent: int = 0) -> str:
    """JSON with a line for each line of metrics."""
    pad = "\n" + " " * (indent + 1)
    if isinstance(value, dict) and "step" not in value:
        items = [f"{json.dumps(k)}: {as_text(v, indent + 1)}" for k, v in value.items()]
        return "{" + pad + f",{pad}".join(items) + pad[:-1] + "}"
    if isinstance(value, list):
        return "[" + pad + f",{pad}".join(json.dumps(v) for v in value) + pad[:-1] + "]"
    return json.dumps(value)


def compare(was: Values | None, name: str, renamed: Mapping[str, str], new: Sequence[str]) -> list[str]:
    """Train a case anew: what isn't as it was recorded."""
    if was is None:
        return ["not recorded"]
    try:
        now = train(name)
    except Exception as error:  # noqa: BLE001  the other cases are to be heard too
        traceback.print_exc()
        return [f"failed: {error!r}"]
    return differences(with_names(was, renamed), without_metrics(now, new))


def check(names: Sequence[str], renamed: Mapping[str, str], new: Sequence[str]) -> int:
    if not RECORDED.exists():
        raise SystemExit(f"{RECORDED}: missing; run record in a checkout of before, and copy it here")
    recorded = json.loads(RECORDED.read_text())
    print(f"recorded at {recorded['commit']}; here: {commit()}, {HERE.parents[1]}")
    for key, here in machine().items():
        if here != recorded["machine"].get(key):
            print(f"note: {key} is {here}, was {recorded['machine'].get(key)}: the last bits may differ")
    different = []
    for name in names:
        began = time.monotonic()
        found = compare(recorded["cases"].get(name), name, renamed, new)
        print(f"{name}: {'DIFFERS' if found else 'equal'}, {time.monotonic() - began:.1f} s", flush=True)
        for line in found:
            print(f"    {line}")
        different += [name] * bool(found)
    print(
        f"{len(names) - len(different)} of {len(names)} cases are equal"
        + "".join(f"; {n} differs" for n in different)
    )
    return 1 if different else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record", help="train every case anew and write recorded.json")
    checking = commands.add_parser("check", help="train again and compare")
    checking.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"all where none is given: {', '.join(CASES)}"
    )
    checking.add_argument("--without", nargs="+", default=[], metavar="CASE", choices=list(CASES))
    checking.add_argument(
        "--renamed", nargs="+", default=[], metavar="OLD=NEW", help="metrics that have another name now"
    )
    checking.add_argument(
        "--new", nargs="+", default=[], metavar="KEY", help="metrics that didn't exist when it was recorded"
    )
    asked = parser.parse_args()
    if asked.command == "record":
        return record()
    if unknown := [name for name in asked.cases if name not in CASES]:
        parser.error(f"unknown: {', '.join(unknown)}; expected some of {', '.join(CASES)}")
    renamed = dict(names.split("=") for names in asked.renamed)
    return check([name for name in asked.cases or CASES if name not in asked.without], renamed, asked.new)


if __name__ == "__main__":
    sys.exit(main())
