"""`agro doctor`: what this machine has, and the state of a run or a store, for a report of a problem."""

from __future__ import annotations

import json
import os
import platform
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agro.cli.common import Json
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
    path: Annotated[
        Path | None, typer.Argument(metavar="[RUN-or-STORE]", help="Its state is reported too.")
    ] = None,
    as_json: Json = False,
) -> None:
    report = {**_versions(), **_machine()}
    off = _off(report)
    if path is not None:
        state, problems = _state(path)
        report["state"] = state
        off += problems
    report["off"] = off
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    for key, value in report.items():
        _show(key, value)


def _show(key: str, value: Any) -> None:
    if isinstance(value, dict):
        print(f"{key}:")
        for name, inner in value.items():
            print(f"  {name}: {'not installed' if inner is None and key == 'libraries' else inner}")
    elif key == "off":
        print("off: " + ("\n  ".join(["", *value]) if value else "nothing"))
    else:
        print(f"{key}: {value}")


def _versions() -> dict[str, Any]:
    """`libraries`: None where one isn't installed."""
    from importlib import metadata  # here, since each command would begin later

    versions: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {"agro": __version__, "python": platform.python_version(), "libraries": versions}


def _machine() -> dict[str, Any]:
    import torch

    from agro.models.pretrained import cores, device_of

    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": cores(),
        "threads_of_torch": torch.get_num_threads(),
        "device_auto": str(device_of("auto")),
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "mps": torch.backends.mps.is_available(),
        "free_gib": round(shutil.disk_usage(Path.cwd()).free / 2**30, 1),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _off(report: dict[str, Any]) -> list[str]:
    problems = []
    if report["free_gib"] < LEAST_SPACE:
        problems.append(f"only {report['free_gib']} GiB are free here; a run writes checkpoints")
    if report["threads_of_torch"] > report["cores"]:
        problems.append(
            f"torch uses {report['threads_of_torch']} threads on {report['cores']} cores; set OMP_NUM_THREADS"
        )
    if report["device_auto"] == "cpu" and shutil.which("nvidia-smi"):
        problems.append("nvidia-smi is there, but torch sees no GPU; install torch for CUDA")
    return problems


def _state(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The state of a run or store, and what is off in it."""
    from agro.config import RunConfig
    from agro.store.location import located, url_of

    if url_of(path):
        return _store_state(path)
    if not path.exists():
        raise Refused(f"{path}: expected a run's folder or a store; there is no such file")
    if not path.is_dir():
        return _store_state(path)
    if not (path / "config.json").exists():
        raise Refused(f"{path}: expected a run's folder, with config.json, or a store")
    config = RunConfig.load(path / "config.json")
    state, problems = _store_state(located(config.data.store, path))
    return {**_run_state(path, config.phase_names), **state}, problems


def _run_state(folder: Path, phases: tuple[str, ...]) -> dict[str, Any]:
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    row = json.loads(lines[-1]) if lines else {}
    return {
        "run": str(folder),
        "phases": list(phases),
        "step": row.get("step"),
        "phase": row.get("phase"),
        "checkpoints": sorted(p.name for p in folder.glob("checkpoints/step-*")),
        "model": (folder / "model").is_dir(),
        "report": (folder / "report.html").is_file(),
    }


def _store_state(path: Location) -> tuple[dict[str, Any], list[str]]:
    from agro.store import Store
    from agro.store.location import Shards, url_of

    state: dict[str, Any] = {"store": str(path), "mib": None}
    try:
        if not isinstance(path, Shards) and url_of(path) is None:
            state["mib"] = round(Path(path).stat().st_size / 2**20, 1)
        with Store.open(path, read_only=True) as store:
            state |= store.counts().to_json()
    except Refused as error:
        return state, [str(error)]
    except OSError as error:
        return state, [f"{path}: can't be read: {error.strerror}"]
    return state, []
