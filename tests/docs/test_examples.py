"""The examples of README and guide do what they say.

Each page runs from top to bottom, in an empty folder, on a tiny model. What takes long on a real model is
made small: `RunConfig.load` gets further overrides, the command line further options.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gzip
import json
import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from pages import PAGES, ROOT, Block, blocks
from typer.testing import CliRunner

from agro.api.arguments import configured
from agro.cli import app
from agro.config import NewModel, RunConfig
from agro.errors import Refused
from agro.logs.format_table import get
from agro.models.pretrained import new_model

SMALL = ["train.steps=2", "train.groups=2", "sampler.n=3", "sampler.max_new=4", "data.group_size=2"]
SMALL_OPTIONS = {"sample": ["--max-new", "4"], "eval": ["--max-new", "4"]}
RUNNABLE = ("python", "sh", "console", "toml")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "MODEL"
    new_model(folder, NewModel(hidden=16, layers=1, heads=2, context=256, initializer_range=0.2), 0)
    return folder


@pytest.fixture
def here(tmp_path, model, monkeypatch) -> Path:
    """A folder with MODEL, and with the checkout's examples under their name."""
    load = RunConfig.load.__func__  # type: ignore[attr-defined]

    def small(cls, path, overrides=()):
        try:
            return load(cls, path, [*overrides, *SMALL])
        except Refused:  # phases with steps of their own; a mistake of the page is refused again
            return load(cls, path, overrides)

    monkeypatch.setattr(RunConfig, "load", classmethod(small))
    monkeypatch.setattr("agro.api.configured", small_settings)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for target in (model, ROOT / "examples"):
        Path(target.name).symlink_to(target)
    rows = ({"question": f"{i}?", "output": "x" * j, "score": j % 2} for i in range(4) for j in range(3))
    Path("log.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return tmp_path


def small_settings(objective: str, settings: dict) -> dict:
    """Of `agro.train`."""
    given = {key.replace("__", "."): value for key, value in settings.items()}
    for item in SMALL:
        key, _, value = item.partition("=")
        given[key] = int(value)
    return configured(objective, given)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_a_page_does_what_it_says(page: Path, here: Path, capsys) -> None:
    names = {"__name__": "page"}
    for block in blocks(page):
        if not block.not_run:
            run(block, names)


def run(block: Block, names: dict) -> None:
    if block.file:
        Path(block.file).write_text(block.text)
        if block.file.endswith(".toml"):
            values = tomllib.loads(block.text)
            if "map" in values:
                get(block.file)
            elif "project" not in values:
                RunConfig.of(values, block.where)
    elif block.language == "python":
        exec(compile(block.text, block.where, "exec"), names)
    else:
        with contextlib.chdir(Path.cwd()):
            for i, command in enumerate(block.commands):
                run_command(command, block.outputs[i] if block.outputs else "", block.where)


def run_command(command: str, expected: str, where: str) -> None:
    """The command's exit code is 0, or 2 where a refusal is expected; numbers may be others."""
    program, *arguments = shlex.split(command, comments=True)
    if program == "cd":
        os.chdir(arguments[0])
        return
    if "--guess" in arguments and not expected:
        arguments.append("--yes")  # as a person at a terminal says
    found = CliRunner().invoke(app, [*arguments, *SMALL_OPTIONS.get(arguments[0], ())])
    refused = any(line.startswith("agro: ") for line in expected.splitlines())
    assert found.exit_code == 2 * refused, f"{where}: {command}: {found.output}"
    if expected:
        streams = [found.output, found.stdout, found.stderr]  # a page may leave one of them out
        streams += [x.partition("did it get better? people")[0] for x in streams]  # and a run's last line
        assert any(fnmatch.fnmatchcase(plain(x), pattern(expected)) for x in streams), (
            f"{where}: {found.output}"
        )


def plain(text: str) -> str:
    return re.sub(r"\d[\d,.]*", "0", " ".join(text.split()))


def pattern(text: str) -> str:
    """`…` stands for anything."""
    return "*".join(plain(part).replace("[", "[[]") for part in text.split("…"))


def test_what_is_not_run_has_a_reason_and_most_is_run() -> None:
    found = [block for page in PAGES for block in blocks(page)]
    guide = [b for b in found if not b.where.startswith("README") and (b.file or b.language in RUNNABLE)]
    not_run = [b for b in guide if b.not_run]
    assert len(guide) - len(not_run) >= 36
    assert len(not_run) <= 17  # three of them need other hosts, Slurm or Ray
    for block in guide:
        idle = block.language in ("sh", "console") and not block.commands
        assert block.file or block.not_run or not idle, (
            f"{block.where}: say why it isn't run: <!-- not run: … -->"
        )
