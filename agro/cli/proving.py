"""`agro prove`: what is proved of objectives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agro.cli.common import Json, table, terminal

if TYPE_CHECKING:
    from agro.proof.measuring import ProofRow


def prove(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME…]", help="Objectives; all where none is given.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw where descent goes into this .png or .svg.")
    ] = None,
    as_json: Json = False,
) -> None:
    from agro import objectives

    selected = names or objectives.names()
    for name in selected:
        objectives.get(name)  # a wrong name is refused before anything is computed
    from agro.proof import passport  # here: a wrong name is refused at once
    from agro.proof.claims import claims_of

    for name in selected:
        claims_of(name)

    if figure is not None:
        figure.parent.mkdir(parents=True, exist_ok=True)
    results = passport.prove(selected, descents=figure is not None)
    rows = [row for measured in results.values() for row in measured.rows]
    if figure is not None:
        passport.draw_descents(results, str(figure))
    broken = [row for row in rows if row.holds is False]
    if as_json:
        print(json.dumps([row.to_json() for row in rows], ensure_ascii=False, allow_nan=False))
    else:
        _show(rows)
    if broken:
        for row in broken:
            typer.echo(
                f"agro: {row.objective}: {row.property} ({row.setting}): expected {row.side} {row.bound:g}, "
                f"got {row.value:.3g}",
                err=True,
            )
        raise SystemExit(1)


def _show(rows: list[ProofRow]) -> None:
    shown = table("objective", "property", "setting", "value", "bound", "holds")
    for row in rows:
        verdict = {True: "yes", False: "NO", None: ""}[row.holds]
        bound = "" if row.bound is None else f"{row.side} {row.bound:g}"
        shown.add_row(row.objective, row.property, row.setting, f"{row.value:.3g}", bound, verdict)
    console = terminal()
    console.print(shown)
    claimed = [row for row in rows if row.holds is not None]
    holding = sum(bool(row.holds) for row in claimed)
    console.print(
        f"{holding} of {len(claimed)} claims hold; {len(rows) - len(claimed)} values are reported without a "
        "claim"
    )
