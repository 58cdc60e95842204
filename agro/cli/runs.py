"""Commands that create and read run folders."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from agro.cli.common import Json, table, terminal
from agro.errors import Refused


def train(
    config: Annotated[
        Path, typer.Argument(help="A TOML recipe, a recipe's name (agro recipes), or a run's config.json.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE…", help="Such as train.steps=20.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run folder; runs/ and the time where it isn't given.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="With --resume: go on although what KEY names, such as reward.name, has changed; again for "
            "each.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Load and check everything, and report what would happen; write nothing."
        ),
    ] = False,
    place: Annotated[
        str | None,
        typer.Option(
            metavar="WHERE",
            help="Sample in other processes, and start again what dies: local:2 (two collectors beside the "
            "trainer), ray://HOST:PORT or ray:local.",
        ),
    ] = None,
    owner: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The owner of this run's store, which has the file (agro store serve); --place sets it.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    from agro.cli.first_looks import look_at_run
    from agro.config import RunConfig

    if place is not None:
        if dry_run or as_json or owner is not None:
            raise Refused("--place goes with none of --dry-run, --json and --owner; leave it or them out")
        _place(place, config, overrides, out, resume=resume, accept=tuple(accept or ()))
        return
    loaded = RunConfig.load(config, overrides or [])
    look_at_run(loaded, out, resume=resume, accept=accept or (), owner=owner, writes=not dry_run)
    from agro.api.reporting_trainer import Trainer

    trainer = Trainer(loaded, out, resume=resume, accept=accept or (), owner=owner)
    if dry_run:
        from agro.api.plan.plan import describe

        plan = trainer.plan()
        print(json.dumps(plan, ensure_ascii=False) if as_json else describe(plan))
        return
    folder = trainer.run()
    if as_json:
        print(_result(folder, trainer.ended_well))
    outcome = "done" if trainer.ended_well else "ended with the problems above"
    print(f"{outcome}: {folder / 'model'}, {folder / 'report.html'}", file=sys.stderr)


def _result(folder: Path, ended_well: bool) -> str:
    """What a run left, whether its model got better, and what it writes, as JSON."""
    from agro.runs.rundata import load_run
    from agro.runs.side_by_side import SideBySide
    from agro.runs.verdict import Verdict

    run, shown = load_run(folder), SideBySide.load(folder)
    result = {
        "run": str(folder),
        "model": str(folder / "model"),
        "report": str(folder / "report.html"),
        "ended_well": ended_well,
        "verdict": Verdict.of(run).to_json(),
        "held_out": {"share": run.config.data.hold_out, "set_aside": run.set_aside},
        "side_by_side": None if shown is None else shown.to_json(),
    }
    return json.dumps(result, ensure_ascii=False, allow_nan=False)


def _place(where: str, config: Path, overrides: list[str] | None, out: Path | None, **options: Any) -> None:
    """Start the processes of a run, and end with its exit code."""
    from agro.place.placement import Placement, TrainCommand
    from agro.place.run import place

    placement = Placement.parse(where)
    if out is None:
        raise Refused("--place: expected --out RUN, the folder that the processes share; got none")
    code = place(placement, TrainCommand(config, tuple(overrides or ()), out, **options))
    if code:
        raise SystemExit(code)


def ps(
    run: Annotated[str, typer.Argument(help="A run folder, or the URL of the owner of its store.")],
    as_json: Json = False,
) -> None:
    from agro.place.status import TITLES, RunStatus

    status = RunStatus.read(run)
    if as_json:
        print(json.dumps(status.to_json(), ensure_ascii=False, allow_nan=False))
        return
    shown = table(*TITLES)
    for row in status.rows():
        shown.add_row(*row)
    console = terminal()
    console.print(shown)
    console.print(status.sentence())


def collect(
    run: Annotated[str, typer.Argument(help="The run folder, or the URL of the owner of its store.")],
    name: Annotated[
        str | None,
        typer.Option(
            help="Of this collector among those of the run; one that is started again under the name of a "
            "dead one takes up what it had begun."
        ),
    ] = None,
) -> None:
    from agro.cli.first_looks import look_at_begun
    from agro.place.record import owner_of

    url_or_folder = owner_of(run)
    look_at_begun(url_or_folder)
    from agro.place.collector import Collector
    from agro.runs.progress import Interruption, Progress, RunActivity, Watchdog

    interruption = Interruption()
    progress = Progress(0)
    watchdog = Watchdog(0.0, progress.say)
    activity = RunActivity(progress, watchdog, interruption)
    with interruption.on_signals(progress.say, activity.pending):
        count = Collector.of(url_or_folder, activity, progress.say, name).serve()
    print(f"done: {count} responses for {run}", file=sys.stderr)


def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the page on this machine while the run trains.")
    ] = False,
    port: Annotated[int, typer.Option(help="With --watch: the port; 0 takes a free one.")] = 0,
    as_json: Json = False,
) -> None:
    if watch:
        if as_json:
            raise Refused("--json doesn't go with --watch, which doesn't end; give one of them")
        from agro.pages.run.live import watch as serve

        serve(run, port)
        return
    if port:
        raise Refused("--port belongs to --watch")
    from agro.pages.run import report as write_report

    page = write_report(run)
    if as_json:
        from agro.runs.problems import problems
        from agro.runs.rundata import load_run

        print(_result(run, not any(problem.serious for problem in problems(load_run(run)))))
        return
    print(page)
