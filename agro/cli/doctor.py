"""`agro doctor`: what this machine has, and the state of a run or a store, for a report of a problem."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agro.cli.common import Json, answer
from agro.errors import Refused
from agro.io.version import __version__

if TYPE_CHECKING:
    from agro.store.location import Location

LIBRARIES = (
    *("torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy", "pydantic", "typer"),
    *("rich", "pyarrow", "matplotlib", "peft", "datasets", "math-verify", "verifiers"),
)
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE")
LEAST_SPACE = 2.0  # GiB free, below which a run may not be able to write its checkpoints


def doctor(
    path: Annotated[Path | None, typer.Argument(metavar="[RUN-or-STORE]")] = None,
    as_json: Json = False,
) -> None:
    """Args:
    path: Its state is reported too.
    """
    from importlib import metadata  # here, since each command would begin later

    libraries: dict[str, str | None] = dict.fromkeys(LIBRARIES)  # None: not installed
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            libraries[name] = metadata.version(name)
    info = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:(.*)", info.read_text("utf-8") if info.exists() else "", re.MULTILINE)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads, gpus = os.environ.get("OMP_NUM_THREADS", ""), _gpus()
    report: dict[str, Any] = {
        "agro": __version__,
        "python": platform.python_version(),
        "libraries": libraries,
        "platform": platform.platform(),
        "processor": named[1].strip() if named else platform.processor() or platform.machine(),
        "cores": cores,
        "threads_of_torch": int(threads) if threads.isdecimal() else None,  # where a variable says it
        "device_auto": "cuda" if gpus else "cpu",
        "cuda": gpus,
        "free_gib": round(shutil.disk_usage(Path.cwd()).free / 2**30, 1),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    problems = {
        f"only {report['free_gib']} GiB are free here; a run writes checkpoints": (
            report["free_gib"] < LEAST_SPACE
        ),
        f"torch uses {threads} threads on {cores} cores; set OMP_NUM_THREADS": (
            (report["threads_of_torch"] or 0) > cores
        ),
        "nvidia-smi is there, but torch has no CUDA or sees no GPU; install torch for CUDA": (
            not gpus and shutil.which("nvidia-smi")
        ),
    }
    off = [problem for problem, holds in problems.items() if holds]
    if path is not None:
        report["state"] = _state(path, off)
    lines = []
    for key, value in report.items():
        if isinstance(value, dict):
            absent = "not installed" if key == "libraries" else None
            lines += [
                f"{key}:",
                *(f"  {name}: {absent if inner is None else inner}" for name, inner in value.items()),
            ]
        else:
            lines.append(f"{key}: {'not set' if value is None else value}")
    lines.append("\n  ".join(["off:", *off]) if off else "off: nothing")
    lines.append(
        "threads and GPUs are those of variables and nvidia-smi: torch, which takes seconds, isn't asked"
    )
    answer(report | {"off": off}, "\n".join(lines), as_json)


def _gpus() -> list[str]:
    """The names of NVIDIA GPUs that the torch that is installed may use: it was built for CUDA."""
    spec, program = find_spec("torch"), shutil.which("nvidia-smi")
    if spec is None or spec.origin is None or program is None:
        return []
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    if re.search(r"^cuda\b.*= *['\"]", text, re.MULTILINE) is None:
        return []
    asked = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [name.strip() for name in found.stdout.splitlines() if name.strip()]


def _state(path: Path, off: list[str]) -> dict[str, Any]:
    """The state of a run or store; what is off in it is added to `off`."""
    from agro.config import RunConfig
    from agro.store import Store
    from agro.store.location import located, url_of

    state: dict[str, Any] = {}
    store: Location = path
    if url_of(path) is None and not path.exists():
        raise Refused(f"{path}: expected a run's folder or a store; there is no such file")
    if url_of(path) is None and path.is_dir():
        if not (path / "config.json").exists():
            raise Refused(f"{path}: expected a run's folder, with config.json, or a store")
        config = RunConfig.load(path / "config.json")
        metrics = path / "metrics.jsonl"
        lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
        row = json.loads(lines[-1]) if lines else {}
        state = {
            "run": str(path),
            "phases": list(config.phase_names),
            "step": row.get("step"),
            "phase": row.get("phase"),
            "checkpoints": sorted(p.name for p in path.glob("checkpoints/step-*")),
            "model": (path / "model").is_dir(),
            "report": (path / "report.html").is_file(),
        }
        store = located(config.data.store, path)
    state |= {"store": str(store), "mib": None}
    try:
        if url_of(store) is None:
            state["mib"] = round(Path(store).stat().st_size / 2**20, 1)
        with Store.open(store, read_only=True) as opened:
            state |= opened.counts().to_json()
    except Refused as error:
        off.append(str(error))
    except OSError as error:
        off.append(f"{store}: can't be read: {error.strerror}")
    return state
