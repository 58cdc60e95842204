"""docs/command-line.md is what the program says of its commands."""

from __future__ import annotations

from pathlib import Path

from agro import cli_docs
from agro.cli import COMMANDS

PAGE = Path(__file__).parents[2] / "docs/command-line.md"


def test_the_page_is_made_from_the_program() -> None:
    made = cli_docs.page()
    assert PAGE.read_text(encoding="utf-8") == made, "run: python -m agro.cli_docs > docs/command-line.md"
    assert made.count("\n## agro ") == len(COMMANDS)
    assert "| `--watch` | Serve the page on this machine while the run trains. |" in made
    assert "| `RUN` | A run folder. Required. |" in made
