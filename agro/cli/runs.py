"""Commands that create and read run folders."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agro.cli.common import Json, table, terminal
from agro.errors import Refused

if TYPE_CHECKING:
    from agro.runs.by_prompt import PairedResults


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
    as_json: Json = False,
) -> None:
    from agro.config import RunConfig

    loaded = RunConfig.load(config, overrides or [])
    from agro.api.reporting_trainer import Trainer

    trainer = Trainer(loaded, out, resume=resume, accept=accept or ())
    if dry_run:
        from agro.plan.plan import describe

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

    shown = SideBySide.load(folder)
    result = {
        "run": str(folder),
        "model": str(folder / "model"),
        "report": str(folder / "report.html"),
        "ended_well": ended_well,
        "verdict": Verdict.of(load_run(folder)).to_json(),
        "side_by_side": None if shown is None else shown.to_json(),
    }
    return json.dumps(result, ensure_ascii=False, allow_nan=False)


def collect(run: Annotated[Path, typer.Argument(help="The run folder.")]) -> None:
    from agro.runs.progress import Interruption, Progress, RunActivity, Watchdog
    from agro.train.elsewhere import Collector

    interruption = Interruption()
    progress = Progress(0)
    watchdog = Watchdog(0.0, progress.say)
    activity = RunActivity(progress, watchdog, interruption)
    with interruption.on_signals(progress.say, activity.pending):
        count = Collector(run, activity, progress.say).serve()
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


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN…",
            help="Run folders; those that differ in their seed alone are one line. Of two, the second is "
            "compared with the first prompt by prompt; either may be a file of agro eval --out.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="The folder of compare.png, compare.svg and compare.html; of files the last alone."
        ),
    ] = Path("compare"),
    as_json: Json = False,
) -> None:
    if any(run.is_file() for run in runs):
        _compare_results(runs, out, as_json)
        return
    from agro.pages.run.compare import compare as read
    from agro.pages.run.compare_page import (
        NAMES,
        difference_words,
        differences_words,
        final_words,
        notes,
        to_json,
        write,
    )

    comparison = read(runs)
    paths = write(comparison, out)
    if as_json:
        print(json.dumps(to_json(comparison, paths), ensure_ascii=False, allow_nan=False))
        return
    final = f"final {NAMES[comparison.measure]}"
    shown = table("line", "seeds", final, "step", "to the first line", wrap_names=True)
    for line in comparison.lines:
        seeds = ", ".join(map(str, line.seeds))
        shown.add_row(
            line.label, seeds, final_words(line), str(line.steps[-1]), difference_words(comparison, line)
        )
    console = terminal()
    if comparison.paired is not None:
        _say(comparison.paired)
    console.print(shown)
    console.print("[…]: 95 % t-interval over seeds\n")
    for text in [
        "what differs:",
        *(differences_words(comparison) or ["nothing but the seed"]),
        "",
        *notes(comparison),
    ]:
        console.print(text)
    print("\n".join(map(str, paths)))


def _compare_results(paths: list[Path], out: Path, as_json: bool) -> None:
    """Two results, of which one or both are files of `agro eval --out`."""
    from agro.pages.run.compare_page import write_results
    from agro.runs.by_prompt import PairedResults, Result
    from agro.runs.rundata import load_run

    if len(paths) != 2:
        raise Refused(f"compare: expected two results where one is a file, got {len(paths)}: {paths[0]}, …")
    sides = [Result.of_file(path) if path.is_file() else Result.of_run(load_run(path)) for path in paths]
    paired = PairedResults.of(*sides)
    written = [str(path) for path in write_results(paired, out)]
    if as_json:
        print(json.dumps({"paired": paired.to_json(), "files": written}, ensure_ascii=False, allow_nan=False))
        return
    _say(paired)
    print("\n".join(written))


def _say(paired: PairedResults) -> None:
    for text in (paired.sentence, *paired.notes, ""):
        terminal().print(text)
