"""The first steps with the built wheel: an empty folder, the guide's first files, `agro` installed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from pages import ROOT, blocks

from agro.config import NewModel
from agro.models.pretrained import new_model

SMALL = {"train": ["train.steps=2", "sampler.max_new=4"], "eval": ["--max-new", "4"]}

PACKAGES = sorted(path.parent.name for path in ROOT.glob("agro*/__init__.py"))

EVERYTHING_IS_INSTALLED = """
import importlib, importlib.resources, pkgutil, sys
left_out = ("agro.__main__", "agro.api.trl", "agro.api.verl")  # need what isn't installed
for package in sys.argv[1].split():
    paths = importlib.import_module(package).__path__
    modules = [m.name for m in pkgutil.walk_packages(paths, f"{package}.") if m.name not in left_out]
    files = {importlib.import_module(name).__file__ for name in modules}
    print(*[f for f in files if not f.startswith(sys.prefix)], sep="\\n", end="")
data = importlib.resources.files("agro").parent
print(*[f for f in sys.argv[2:] if not (data / f).is_file()], sep="\\n", end="")
"""


def run(*command: object, cwd: Path) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """The folder of the programs of an environment with the wheel; its dependencies are those of this one."""
    source, wheels, home = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "home"))
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    quiet = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip"]
    run(*pip, "wheel", *quiet, "--no-build-isolation", "--wheel-dir", wheels, source, cwd=wheels)
    venv.create(home, with_pip=False, symlinks=True)
    run(*pip, "--python", home / "bin/python", "install", *quiet, *wheels.glob("agro_rl-*.whl"), cwd=home)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def test_the_wheel_holds_everything(programs: Path, tmp_path: Path) -> None:
    data = [
        str(p.relative_to(ROOT))
        for package in PACKAGES
        for p in (ROOT / package).rglob("*.*")
        if p.is_file() and p.suffix not in (".py", ".pyc")
    ]
    assert {"agro/cli/commands.txt", "agro/store/tables.sql", "agro_papers/recipes/remix.toml"} <= set(data)
    checked = ("-c", EVERYTHING_IS_INSTALLED, " ".join(PACKAGES), "agro/io/worker.py", *data)
    assert run(programs / "python", *checked, cwd=tmp_path) == ""


def test_the_first_page_of_the_guide_works(programs: Path, tmp_path: Path) -> None:
    new_model(tmp_path / "MODEL", NewModel(hidden=16, layers=1, heads=2, context=128), 0)
    done = set()
    for block in blocks(ROOT / "docs/guide/getting-started.md"):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
        for command in [] if block.not_run else block.commands:
            arguments = shlex.split(command)[1:]
            if arguments[0] in SMALL.keys() - done:  # each once: starting takes seconds
                run(programs / "agro", *arguments, *SMALL[arguments[0]], cwd=tmp_path)
                done.add(arguments[0])
    assert done == SMALL.keys()
    assert "<svg" in (tmp_path / "runs/mine/report.html").read_text(encoding="utf-8")
