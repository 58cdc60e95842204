"""`examples/chat_model`: what its notebook asks of the command line exists."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from typer.main import get_command

from agro.cli import app
from agro.config import RunConfig

FOLDER = Path(__file__).parents[2] / "examples/chat_model"


def test_the_commands_of_the_notebook_exist() -> None:
    notebook = json.loads((FOLDER / "free_gpu.ipynb").read_text(encoding="utf-8"))
    text = "".join(line for cell in notebook["cells"] for line in [*cell["source"], "\n"])
    assert "**Untried:" in text
    commands = [
        line.strip().removeprefix("!agro ") for line in text.splitlines() if line.startswith("!agro ")
    ]
    assert "never been run on a GPU" in (FOLDER / "README.md").read_text(encoding="utf-8")
    assert "!python benchmarks/gpu.py --within 540" in text
    names_of_commands = [command.split()[0] for command in commands]
    assert " ".join(names_of_commands) == "train train sample score check train train compare"
    names: dict[str, str] = {}
    [setting] = [cell["source"] for cell in notebook["cells"] if "OPTIONS = (\n" in cell["source"]]
    exec("MODEL =" + "".join(setting).split("MODEL =")[1], names)
    [fresh] = [cell["source"] for cell in notebook["cells"] if cell["source"][0].startswith("SETTINGS = ")]
    exec(fresh[0], names)
    program = get_command(app)
    context = program.make_context("agro", [], resilient_parsing=True)
    for command in commands:
        name, *arguments = shlex.split(command.format(**names))
        program.get_command(context, name).make_context(name, list(arguments))  # type: ignore[attr-defined]
        if name == "train":
            recipe, *overrides = arguments[: next(i for i, each in enumerate(arguments) if each[:2] == "--")]
            RunConfig.load(recipe, overrides)
