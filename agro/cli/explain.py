"""`agro objectives`, `formats`, `recipes`, `init` and `prove` list and explain; `agro doctor` reports the
machine and the state of a run or a store."""

from __future__ import annotations

import inspect
import json
import os
import platform
import re
import shutil
import subprocess
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agro.cli.common import answer, end, paragraph, show_table, width
from agro.cli.common import names as side_by_side
from agro.cli.tasks import TASKS, create
from agro.errors import Refused
from agro.io.processes import cores
from agro.io.version import __version__
from agro.logs.format_table import FORMATS
from agro.objectives import describe

if TYPE_CHECKING:
    from agro.store.location import Location

COUPLES = {
    "row": "a row's gradient depends on no other row's log-probs",
    "group": "a row's gradient depends on the log-probs of its complete group",
    "step": "a row's gradient depends on the log-probs of the complete step",
}
DATA_PROVIDERS = ("record", "draw", "value_store")  # of needs that the data meet
KINDS = {"nothing": "can't be imported; agro formats NAME says why"}


def objectives(
    name: Annotated[str | None, typer.Argument()] = None,
    as_json: bool = False,
) -> None:
    """Args:
    name: An objective, to show in full.
    """
    from agro.objectives import names
    from agro.objectives.table import entries

    if as_json:
        answer(describe(name) if name else [describe(n) for n in names()], "", as_json)
        return
    if name:
        print("\n".join(_one(describe(name))))
        return
    groups: dict[str, list[str]] = {}  # objectives by the data that they need
    for key, entry in entries().items():
        needed = entry.needs(entry.defaults())
        data_needs = sorted(str(need) for need in needed if need.provider in DATA_PROVIDERS)
        groups.setdefault(_listed(data_needs), []).append(key)
    lines: list[str] = []
    for needs, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines += side_by_side(f"need {needs}", members)
    print("\n".join([*lines, *paragraph("One in full: agro objectives NAME")]))


def _one(entry: dict[str, Any]) -> list[str]:
    couples = entry["couples"]
    lines = [*paragraph(f"{entry['name']}: {entry['source']}"), ""]
    for text in inspect.cleandoc(entry["summary"]).split("\n\n"):
        lines += [*paragraph(" ".join(text.split())), ""]
    if entry["called"]:
        lines += [*paragraph(f"called {entry['called']}"), ""]
    lines += paragraph(f"needs {_listed(entry['needs'])}; couples by {couples}: {COUPLES[couples]}")
    lines += [""] if entry["options"] else []
    for key, option in entry["options"].items():
        default = "required" if option["required"] else json.dumps(option["default"])
        meaning = f"{option['meaning']} ({option['unit']}; {option['expected']})"
        lines += paragraph(f"objective.{key} = {default}: {meaning}", 0, 4)
    return lines


def _listed(needs: list[str]) -> str:
    return ", ".join(needs) or "texts alone"


def formats(
    name: Annotated[str | None, typer.Argument()] = None,
    as_json: bool = False,
) -> None:
    """Args:
    name: A format, to show in full.
    """
    from agro.logs.format_table import get

    keys = ("name", "title", "kind", "carries", "joins", "written_by")
    rows: list[dict[str, Any]] = []
    for entry in [get(name)] if name else FORMATS.values():
        carries = {"carries": list(entry.carries), "joins": entry.joins or None}
        rows.append({key: carries.get(key, getattr(entry, key)) for key in keys})
    lines: list[str] = []
    if name:  # data of its records other than prompts and responses
        carried = "can't be imported" if rows[0]["kind"] == "nothing" else _listed(rows[0]["carries"])
        for key, value in (rows[0] | {"carries": carried}).items():
            if value is not None:
                lines += paragraph(f"{key.replace('_', ' ')}: {value}", 0, 4)
    else:
        for kind in sorted({row["kind"]: 0 for row in rows}, key=lambda kind: kind in KINDS):
            lines += side_by_side(KINDS.get(kind, kind), (r["name"] for r in rows if r["kind"] == kind))
        lines += paragraph("One in full: agro formats NAME")
    answer(rows[0] if name else rows, "\n".join(lines), as_json)


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    task: Annotated[str, typer.Option(metavar="NAME")] = "digits",
) -> None:
    """Args:
    folder: A new or empty folder.
    task: digits, own-log, chat or multi-turn.
    """
    for path in create(folder, task):
        print(f"wrote {path}")
    print(f"\nnext:\n  cd {folder}")
    for command in commands(folder / "README.md"):
        print(f"  {command}")


def commands(readme: Path) -> list[str]:
    """List the indented commands of a README."""
    lines = readme.read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.startswith("    agro ")]


def recipes(
    name: Annotated[str | None, typer.Argument()] = None,
    as_json: bool = False,
) -> None:
    """Args:
    name: A recipe, to print.
    """
    from agro.config import recipes as recipe_table

    if name is not None:
        recipe = recipe_table.get(name)
        row = {"name": name, "kind": recipe.kind, "for": recipe.title, "minutes": None, "text": recipe.text}
        answer(row, recipe.text.removesuffix("\n"), as_json)
        return
    rows: list[dict[str, Any]] = []
    for key, task in TASKS.items():
        rows.append({"name": key, "kind": "task", "for": task.title, "minutes": task.minutes})
    for recipe in recipe_table.recipes().values():  # their minutes depend on the model
        rows.append({"name": recipe.name, "kind": recipe.kind, "for": recipe.title, "minutes": None})
    lines = []
    for kind, title in TITLES.items():
        selected = [row for row in rows if row["kind"] == kind]
        if kind == "method":
            lines += side_by_side(title, (row["name"] for row in selected))
            continue
        lines.append(title)
        for row in selected:
            minutes = "" if row["minutes"] is None else f" ({row['minutes']:g} minutes)"
            text = f"{row['name']}: {row['for']}{minutes}"
            lines.append(f"  {shorten(text, width() - 2, placeholder=' …')}")
    answer(rows, "\n".join([*lines, *paragraph(HINT)]), as_json)


HINT = "agro recipes NAME prints one; its first lines have the complete command."
TITLES = {
    "task": "Tasks: agro init DIR --task NAME, with all data and a small new model",
    "situation": "Recipes by the data you have: agro train NAME policy.model=MODEL …",
    "method": "Recipes by method",
}


def prove(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME…]")] = None,
    as_json: bool = False,
) -> None:
    """Args:
    names: Objectives. Default: all.
    """
    from agro import objectives

    selected = names or objectives.names()
    for name in selected:
        objectives.get(name)  # refuse a wrong name before computing anything
    from agro.proof import passport  # here, so that a wrong name is refused at once
    from agro.proof.claims import claims_of

    for name in selected:
        claims_of(name)

    rows = [row for measured in passport.prove(selected).values() for row in measured]
    if as_json:
        answer([row.to_json() for row in rows], "", as_json)
    else:
        cells = []
        for row in rows:
            verdict = {True: "yes", False: "NO", None: ""}[row.holds]
            bound = "" if row.bound is None else f"{row.side} {row.bound:g}"
            cells.append([row.objective, row.property, row.setting, f"{row.value:.3g}", bound, verdict])
        titles = ("objective", "property", "setting", "value", "bound", "holds")
        claimed = [row.holds for row in rows if row.holds is not None]
        show_table(titles, cells).print(
            f"{sum(claimed)} of {len(claimed)} claims hold; {len(rows) - len(claimed)} values are reported "
            "without a claim"
        )
    broken = [
        f"agro: {row.objective}: {row.property} ({row.setting}): expected {row.side} {row.bound:g}, "
        f"got {row.value:.3g}"
        for row in rows
        if row.holds is False
    ]
    if broken:
        end(1, "\n".join(broken))


LIBRARIES = (
    *("torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy", "pydantic", "typer"),
    *("rich", "pyarrow", "matplotlib", "peft", "datasets", "math-verify", "verifiers"),
)
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE")
MINIMUM_SPACE = 2.0  # GiB; with less a run may fail to write its checkpoints


def doctor(
    path: Annotated[Path | None, typer.Argument(metavar="[RUN-or-STORE]")] = None,
    as_json: bool = False,
) -> None:
    """Args:
    path: A run or store, whose state is reported too.
    """
    from importlib import metadata  # here: it would delay every command

    libraries: dict[str, str | None] = dict.fromkeys(LIBRARIES)  # None: not installed
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            libraries[name] = metadata.version(name)
    info = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:(.*)", info.read_text("utf-8") if info.exists() else "", re.MULTILINE)
    threads, gpus = os.environ.get("OMP_NUM_THREADS", ""), _gpus()
    report: dict[str, Any] = {
        "agro": __version__,
        "python": platform.python_version(),
        "libraries": libraries,
        "platform": platform.platform(),
        "processor": named[1].strip() if named else platform.processor() or platform.machine(),
        "cores": cores(),
        "threads_of_torch": int(threads) if threads.isdecimal() else None,  # if the variable is set
        "device_auto": "cuda" if gpus else "cpu",
        "cuda": gpus,
        "free_gib": round(shutil.disk_usage(Path.cwd()).free / 2**30, 1),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    problems = {
        f"only {report['free_gib']} GiB are free here; a run writes checkpoints": (
            report["free_gib"] < MINIMUM_SPACE
        ),
        f"torch uses {threads} threads on {cores()} cores; set OMP_NUM_THREADS": (
            (report["threads_of_torch"] or 0) > cores()
        ),
        "nvidia-smi is installed, but torch has no CUDA or sees no GPU; install torch for CUDA": (
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
    lines.append("threads and GPUs come from variables and nvidia-smi, since loading torch takes seconds")
    answer(report | {"off": off}, "\n".join(lines), as_json)


def _gpus() -> list[str]:
    """List the NVIDIA GPUs, if the installed torch was built for CUDA."""
    spec, program = find_spec("torch"), shutil.which("nvidia-smi")
    if spec is None or spec.origin is None or program is None:
        return []
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    if re.search(r"^cuda\b.*= *['\"]", text, re.MULTILINE) is None:
        return []
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [name.strip() for name in result.stdout.splitlines() if name.strip()]


def _state(path: Path, off: list[str]) -> dict[str, Any]:
    """Return the state of a run or store, and add its problems to `off`."""
    from agro.config import RunConfig
    from agro.runs.folder import lines_by_step
    from agro.store import Store
    from agro.store.location import located, url_of

    state: dict[str, Any] = {}
    store: Location = path
    if url_of(path) is None and not path.exists():
        raise Refused(f"{path}: expected a run's folder or a store; no such file")
    if url_of(path) is None and path.is_dir():
        if not (path / "config.json").exists():
            raise Refused(f"{path}: expected a run's folder, with config.json, or a store")
        config = RunConfig.load(path / "config.json")
        steps = [line for line, step in lines_by_step(path / "metrics.jsonl") if step is not None]
        row = json.loads(steps[-1]) if steps else {}
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
