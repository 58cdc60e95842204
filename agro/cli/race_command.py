"""`agro race`: short runs of several methods and rates, judged on held-out prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from agro.cli.common import Json, table, terminal
from agro.errors import Refused


def race(
    out: Annotated[
        Path, typer.Option(help="The folder of race.json and of a run for each; begun there, it continues.")
    ],
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LOG-or-RECIPE] KEY=VALUE…",
            help="A log or store to learn from, or a recipe that takes part too; policy.model; data.store "
            "or data.prompts; data.eval_prompts; reward.name; train.steps.",
        ),
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option("--rate", min=0, help="A learning rate, again for each; train.lr, ⅓ and 3 times of it."),
    ] = None,
    as_json: Json = False,
) -> None:
    from agro.cli.first_looks import look_at_inputs
    from agro.config.race import race_config

    named = _named(given or [])
    overrides = [item for item in given or [] if "=" in item]
    look_at_inputs(race_config(named, overrides))
    from agro.api.race import Race, conclusion  # here: what is missing is refused at once

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    record = Race(overrides, out, rate or (), say, named).run()
    said = conclusion(record)
    if as_json:
        print(json.dumps(record | {"conclusion": said}, ensure_ascii=False))
        return
    shown = table("candidate", "rate", "steps", "held-out reward", "to the start", "run")
    for row in record["rows"]:
        shown.add_row(*_cells(row))
    console = terminal()
    console.print(shown)
    console.print(f"\n{said}")


def _named(given: list[str]) -> str | None:
    """The log or recipe among the arguments. What looks like a file and isn't there is refused at once."""
    names = [item for item in given if "=" not in item]
    if len(names) > 1:
        raise Refused(f"agro race: expected one log or recipe, got {' and '.join(names)}")
    if names and Path(names[0]).suffix and not Path(names[0]).exists():
        raise Refused(f"agro race: expected a log, a store, or a recipe; there is no file {names[0]}")
    return names[0] if names else None


def _cells(row: dict[str, Any]) -> list[str]:
    rate = "" if row["lr"] is None else f"{row['lr']:.3g}"
    if "refused" in row:
        return [row["candidate"], rate, "", "", f"refused: {row['refused']}", row["run"]]
    reward = f"{row['reward']:.3f} ± {row['se']:.3f}"
    gain = ""
    if row["low"] is not None:
        gain = f"{row['gain']:+.3f} ({row['low']:.3f} to {row['high']:.3f})"
    return [row["candidate"], rate, str(row["step"]), reward, gain, row["run"] or ""]
