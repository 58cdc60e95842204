"""docs/command-line.md is what the program says of its commands."""

from __future__ import annotations

from pathlib import Path

import cli_docs
import pytest

from agro.cli import COMMANDS
from agro.errors import Refused

PAGE = Path(__file__).parents[2] / "docs/command-line.md"


def test_the_page_is_made_from_the_program() -> None:
    made = cli_docs.page()
    assert PAGE.read_text(encoding="utf-8") == made, (
        "run: python tools/docs/cli_docs.py > docs/command-line.md"
    )
    assert made.count("\n## agro ") == len(COMMANDS)
    assert "| `--watch` | Serve the page on this machine while the run trains. |" in made
    assert "| `RUN` | A run folder. Required. |" in made


def test_an_example_that_was_not_recorded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = [entry._replace(example="runs/second") for entry in COMMANDS if entry.name == "report"]
    monkeypatch.setattr(cli_docs, "COMMANDS", changed)
    with pytest.raises(Refused, match=r"`agro report runs/second`, which isn't recorded; run python docs/"):
        cli_docs.page()
