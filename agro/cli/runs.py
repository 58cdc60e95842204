"""Commands that make and read run folders."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def train(
    config: Annotated[Path, typer.Argument(help="A TOML recipe, or a run's config.json.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE…", help="Such as train.steps=20.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; runs/ and the time where it isn't given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
) -> None:
    """One run: from a configuration to a model, metrics and a report."""
    from agro.config import RunConfig

    loaded = RunConfig.load(config, overrides or [])
    from agro.train.loop import Trainer

    folder = Trainer(loaded, out, resume=resume).run()
    print(f"done: {folder / 'model'}, {folder / 'report.html'}", file=sys.stderr)


def report(run: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """A run's figures as one self-contained page."""
    from agro.report import report as write_report

    print(write_report(run))
