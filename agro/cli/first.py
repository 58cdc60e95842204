"""Commands of the first steps: a folder to begin with, and the recipes."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

import typer

from agro.cli.common import Json, Whole
from agro.cli.listing import names, paragraph, show, width


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    task: Annotated[
        str, typer.Option("--task", metavar="NAME", help="digits, own-log, chat or multi-turn.")
    ] = "digits",
) -> None:
    from agro.cli.tasks import create

    for path in create(folder, task):
        print(f"wrote {path}")
    print(f"\nnext:\n  cd {folder}")
    for command in commands(folder / "README.md"):
        print(f"  {command}")


def commands(readme: Path) -> list[str]:
    """The indented commands of a README."""
    lines = readme.read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.startswith("    agro ")]


def recipes(
    name: Annotated[str | None, typer.Argument(help="One of them, to print.")] = None,
    whole: Whole = False,
    as_json: Json = False,
) -> None:
    from agro.config.recipes import get

    if name is not None:
        recipe = get(name)
        row = {"name": name, "kind": recipe.kind, "for": recipe.title, "minutes": None, "text": recipe.text}
        print(json.dumps(row, ensure_ascii=False) if as_json else recipe.text, end="\n" if as_json else "")
    elif as_json:
        print(json.dumps(_rows(), ensure_ascii=False))
    else:
        show(_listed(_rows(), whole), "agro recipes", whole)


def _rows() -> list[dict[str, Any]]:
    """Tasks, then recipes. `minutes`: None where they depend on the model."""
    from agro.cli.tasks import TASKS
    from agro.config.recipes import recipes

    rows: list[dict[str, Any]] = []
    for name, task in TASKS.items():
        rows.append({"name": name, "kind": "task", "for": task.title, "minutes": task.minutes})
    for recipe in recipes().values():
        rows.append({"name": recipe.name, "kind": recipe.kind, "for": recipe.title, "minutes": None})
    return rows


HINT = "agro recipes NAME prints one; its first lines have the complete command."
TITLES = {
    "task": "Tasks: agro init DIR --task NAME, with all data and a small new model",
    "situation": "Recipes by what is at hand: agro train NAME policy.model=MODEL …",
    "method": "Recipes by method",
}


def _listed(rows: list[dict[str, Any]], whole: bool) -> list[str]:
    """Of methods the names, and what each is for where `whole`."""
    lines = []
    for kind, title in TITLES.items():
        of_kind = [row for row in rows if row["kind"] == kind]
        if kind == "method" and not whole:
            lines += names(title, (row["name"] for row in of_kind))
            continue
        lines.append(title)
        for row in of_kind:
            minutes = "" if row["minutes"] is None else f" ({row['minutes']:g} minutes)"
            text = f"{row['name']}: {row['for']}{minutes}"
            lines += paragraph(text, 2, 4) if whole else [f"  {shorten(text, width() - 2, placeholder=' …')}"]
    return [*lines, *paragraph(HINT if whole else f"{HINT} agro recipes --all says what each is for.")]
