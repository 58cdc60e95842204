"""Rows of benchmarks/results/*.json: what a benchmark measured, on which machine, of which commit."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import runpy
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEYS = ("name", "goal", "ratio", "ours", "peer", "commit", "machine")
Row = dict[str, Any]


def row(
    name: str,
    ours: Sequence[float],
    *,
    goal: float | None = None,
    ratio: float | None = None,
    peer: Sequence[float] = (),
    **more: Any,
) -> Row:
    """One case. `ours`, `peer`: a figure for each repeat; `ratio`: None where there is no peer."""
    measured = {"name": name, "goal": goal, "ratio": ratio, "ours": list(ours), "peer": list(peer)}
    return {**measured, "commit": commit(), "machine": machine(), **more}


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    rows = list(rows)
    for made in rows:
        missing = [key for key in KEYS if key not in made]
        assert not missing, f"a row of {path.name} has no {', '.join(missing)}: {made.get('name')}"
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def parser(doc: str | None, /, **options: Any) -> argparse.ArgumentParser:
    """Of a script, whose head is the help. `options`: --NAME by its default, which says of what kind it is.

    False is a switch, a mapping or a tuple are names to choose from, a list several values, a type none yet.
    """
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in options.items():
        kind: dict[str, Any] = {"type": type(default), "default": default}
        if default is False:
            kind = {"action": "store_true"}
        elif isinstance(default, type):
            kind = {"type": default}
        elif isinstance(default, (Mapping, tuple)):
            kind = {"nargs": "+", "choices": list(default), "default": list(default)}
        elif isinstance(default, list):
            kind = {"nargs": "+", "type": type(default[0]) if default else str, "default": default}
        made.add_argument(f"--{name.replace('_', '-')}", **kind)
    return made


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def keep(path: Path, *rows: Row) -> list[Row]:
    """Write rows into a file, in the place of those of the same names; its others stay. Returns all."""
    known = {row["name"]: row for row in json.loads(path.read_text())} if path.exists() else {}
    known |= {row["name"]: row for row in rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, known.values())
    return list(known.values())


def apart(script: str, checkout: Path, function: str, *arguments: Any) -> Any:
    """What a function of `script` returns, in a process of its own with the agro of this checkout.

    Arguments and result are JSON.
    """
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, script, function, json.dumps(arguments)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def step_clock(*names: str) -> Any:
    """A monitor whose `steps` are the CPU seconds of each step and these metrics, `peak` the bytes so far."""
    from agro.train.monitors import Monitor, View

    class Clock(Monitor):
        last, peak = time.process_time(), 0

        def __init__(self) -> None:
            self.steps: list[dict[str, float]] = []

        def after(self, view: View) -> None:
            now = time.process_time()
            if view.step > 0:
                self.steps.append({**{name: view.metrics[name] for name in names}, "cpu": now - self.last})
            self.last, self.peak = now, peak_memory()

    return Clock()


def peak_memory() -> int:
    """Bytes that this process had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def machine_of_models() -> str:
    """With the versions of the libraries that compute."""
    return f"{machine()}, torch {version('torch')}, transformers {version('transformers')}"


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]  # not on every Linux
    return names[0] if names else platform.processor() or platform.machine()


def machine() -> str:
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{processor()}, {os.cpu_count()} cores, Python {python}, load {os.getloadavg()[0]:.0f}"


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":  # the process of `apart`
    _script, _function, _arguments = sys.argv[1:]
    sys.path[0] = str(Path(_script).parent)
    print(json.dumps(runpy.run_path(_script)[_function](*json.loads(_arguments))))
