"""`agro forget`: delete samples for good."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from agro.cli.common import Json, pairs
from agro.errors import Refused

TIMEOUT = 3.0  # seconds to wait for others to close the store


def forget(
    store: Annotated[Path, typer.Argument(help="The store.")],
    source: Annotated[str | None, typer.Option(help="All samples of this source.")] = None,
    prompt_id: Annotated[str | None, typer.Option("--prompt-id", help="All samples of this prompt.")] = None,
    meta: Annotated[
        str | None, typer.Option(metavar="KEY=VALUE", help="All whose meta has this, such as user=alice.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it, only what would be said.")] = False,
    as_json: Json = False,
) -> None:
    from agro.store import Store

    conditions = {"--source": source, "--prompt-id": prompt_id, "--meta": meta}
    flags = [flag for flag, value in conditions.items() if value is not None]
    if len(flags) != 1:
        raise Refused(f"expected one of {', '.join(conditions)}, got {' and '.join(flags) or 'none'}")
    with Store.open(store, create=False, timeout=TIMEOUT) as opened:
        ids = opened.experience.find(source=source, prompt_id=prompt_id, meta=_key_and_value(meta))
        if not ids:
            raise Refused(
                f"{store}: no sample has {flags[0]} {conditions[flags[0]]}; see agro show and agro check"
            )
        trained = opened.draws.trained(ids)
        report: dict[str, Any] = {"samples": len(ids), "runs": [run._asdict() for run in trained]}
        runs = "".join(f"\n  {run}" for run in trained)
        runs_text = f"runs that trained on them:{runs}" if trained else "no run trained on them"
        if not yes:
            raise Refused(
                f"{store}: {len(ids)} samples would be deleted for good; {runs_text}\n"
                "Add --yes to delete them"
            )
        opened.imports.forget(ids)
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    print(f"deleted: {len(ids)} samples, with their judgments, from {shlex.quote(str(store))}\n{runs_text}")
    if trained:
        print(
            "Their weights, pages (report.html) and logs still have what they learned or showed of these "
            "samples; delete those, or train again. A run that is resumed draws from what is left."
        )


def _key_and_value(meta: str | None) -> tuple[str, str] | None:
    if meta is None:
        return None
    [(key, value)] = pairs([meta], "--meta", "KEY=VALUE").items()
    return key, value
