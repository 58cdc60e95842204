"""`agro eval --blind` and `--ratings`: a sheet to rate start and result on, and what its ratings say."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from agro.errors import Refused

if TYPE_CHECKING:
    from agro.config import SamplerConfig
    from agro.rollout.blind import Test
    from agro.rollout.rollout import Rollout
    from agro.types import Prompt

OF_REWARDS = ("reward", "option", "pass_at", "n", "out", "store")  # say nothing about a sheet
OF_RATINGS = ("run", "ratings", "as_json")


def given(context: typer.Context) -> list[str]:
    """The options and arguments that the command line has."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]


def check_blind(context: typer.Context, sheet: Path) -> None:
    """Before anything is sampled."""
    from agro.rollout.blind import check_free

    names = given(context)
    if "against" not in names:
        raise Refused("--blind: expected --against start, or --against MODEL, beside it, got neither")
    _refuse(context, "--blind: a sheet has one response of each model and no reward", names, OF_REWARDS)
    check_free(sheet)


def check_ratings(context: typer.Context) -> None:
    names = [name for name in given(context) if name not in OF_RATINGS]
    _refuse(context, "--ratings only reads a sheet, with the folder of the run and --json", names, names)


def _refuse(context: typer.Context, reason: str, names: Sequence[str], wrong: Collection[str]) -> None:
    flags = [p.opts[0] for p in context.command.params if p.name in names and p.name in wrong]
    if flags:
        raise Refused(f"{reason}: leave out {', '.join(flags)}")


def write_blind(
    sheet: Path,
    rollouts: tuple[Rollout, Rollout],
    prompts: Sequence[Prompt],
    sampler: SamplerConfig,
    seed: int,
    names: tuple[str, str],
    run: Path | None,
    test: Test = "sign",
) -> dict[str, Any]:
    """Returns what was written. `rollouts`: start and result. `names`: what they were called. `run`: whose
    result it is, if any's."""
    from agro.rollout.blind import answer, key_of, write_sheet
    from agro.runs.rundata import load_run

    answers = answer(*rollouts, prompts, sampler, seed)
    ran = None if run is None else load_run(run)
    about = {
        "against": names[0],
        "model": names[1],
        "run": None if ran is None else ran.values.get("run"),
        "step": None if ran is None else ran.steps,
        "test": test,
    }
    write_sheet(sheet, answers, seed, about)
    return {
        "sheet": str(sheet),
        "key": str(key_of(sheet)),
        "prompts": len(answers),
        "failed": len(prompts) - len(answers),
        "same": sum(a.start == a.result for a in answers),
    }


def show_written(report: dict[str, Any], run: Path | None, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    print(f"{report['sheet']}: {report['prompts']} prompts; put left, right or tie into better of each")
    if report["same"]:
        print(f"{report['same']} of them have the same response on both sides: a tie")
    if report["failed"]:
        print(f"{report['failed']} prompts are left out, since their environment failed")
    of = f" {run}" if run else ""
    print(f"{report['key']} says which side is whose; then: agro eval{of} --ratings {report['sheet']}")


def read_blind(run: Path | None, sheet: Path, as_json: bool) -> None:
    """Say what the ratings say, and keep those of a run's result against its start in the run's folder."""
    import numpy as np

    from agro.rollout.blind import read_key, read_ratings
    from agro.runs.card import write_cards
    from agro.runs.verdict import Ratings, Verdict

    key = read_key(sheet)
    values = read_ratings(sheet)
    if np.isnan(values).all():
        raise Refused(f"{sheet}: none of its {len(values)} rows is rated; put left, right or tie into better")
    ratings = Ratings.of(values, key["step"], key["test"])
    if run is not None:
        check_of(run, sheet, key)
        ratings.save(run)
        write_cards(run)
    against = "the start" if key["against"] == "start" else key["against"]
    verdict = Verdict.rated(ratings, against)
    if as_json:
        report = {"sheet": str(sheet), "model": key["model"], "against": key["against"]}
        print(json.dumps(report | {"verdict": verdict.to_json()}, ensure_ascii=False, allow_nan=False))
        return
    print(verdict.sentence)
    if run is not None:
        print(
            f"kept in {run / 'ratings.json'} and in the model cards; agro report {run} shows it",
            file=sys.stderr,
        )


def check_of(run: Path, sheet: Path, key: dict[str, Any]) -> None:
    """Raise `Refused` where a sheet isn't of the run's result against its start."""
    from agro.runs.rundata import load_run

    if key["against"] != "start" or key["run"] is None or load_run(run).values.get("run") != key["run"]:
        raise Refused(
            f"{sheet}: its ratings are of {key['model']} against {key['against']}, not of {run} against "
            "its start; leave the run out to print what they say"
        )
