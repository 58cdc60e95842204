"""Commands that create and read run folders."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from agro.cli.common import answer, show_table
from agro.config import RunConfig
from agro.config.aliases import renamed
from agro.errors import Refused
from agro.pages.run.verdict import Verdict
from agro.place.placement import TITLES, Placement, RunStatus, TrainCommand
from agro.runs.folder import check_out
from agro.runs.problems import problems
from agro.runs.progress import RunActivity
from agro.runs.rundata import RunData, load_run
from agro.runs.side_by_side import SideBySide

IS_FIRST = os.environ.get("RANK", "0") == "0"  # among torchrun's ranks, the one that creates the folder


def train(
    config: Annotated[Path | None, typer.Argument()] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE…")] = None,
    out: Path | None = None,
    resume: bool = False,
    accept: Annotated[list[str] | None, typer.Option(metavar="KEY")] = None,
    dry_run: bool = False,
    fit: Annotated[list[str] | None, typer.Option(metavar="LIMIT")] = None,
    place: Annotated[str | None, typer.Option(metavar="WHERE")] = None,
    as_json: bool = False,
) -> None:
    """Args:
    config: A TOML recipe, a recipe's name (agro recipes), or a run's config.json; with --resume the run.
    overrides: Changes to the configuration, such as train.steps=20.
    out: The run folder. Default: a folder in runs/ named by the time.
    resume: Continue a run: agro train RUN --resume needs nothing else.
    accept: With --resume: continue although the input KEY, such as reward.name, has changed; may be
        repeated.
    dry_run: Load and check everything, and report what the run would do; write nothing.
    fit: Choose settings for a limit such as 30min, or 24GB of memory; may be repeated, for both.
    place: Sample in other processes, and restart those that die: local:2 (two collectors and the
        trainer), ray://HOST:PORT or ray:local.
    """
    changes, accepted = overrides or [], tuple(accept or ())
    if resume:
        config, changes, out = _resumed(config, changes, out)
    if config is None:
        raise Refused("agro train: expected a recipe, its name (agro recipes) or a configuration; got none")
    if fit and (resume or place is not None):
        raise Refused("--fit chooses for a new run in this process: leave out --resume and --place, or --fit")
    if place is not None:
        if dry_run or as_json:
            raise Refused("--place excludes --dry-run and --json; leave it out, or leave them out")
        _place(place, config, changes, out, resume=resume, accept=accepted)
        return
    loaded, planned = RunConfig.load(config, changes), None
    check_out(out, resume=resume, accept=accepted, makes=IS_FIRST and not dry_run)
    if fit:
        from agro.api.fit import Limits, answers
        from agro.api.fit import fit as fit_run

        pinned = {item.partition("=")[0].strip() for item in renamed(changes)}
        limits = Limits.parse(fit)
        # For a model without local weights, answer whether it fits into the memory.
        verdicts = answers(loaded, limits.bytes, pinned) if dry_run and limits.bytes else []
        if verdicts:
            answer(verdicts, "\n".join(verdicts), as_json)
            return
        fitted = fit_run(loaded, limits, pinned, out)
        print("\n".join(fitted.lines()), file=sys.stderr, flush=True)
        loaded, planned = fitted.config, fitted.plan
    from agro.api.reporting_trainer import Trainer

    trainer = Trainer(loaded, out, resume=resume, accept=accepted)
    trainer.forecasts = planned is None
    if dry_run:
        from agro.api.plan import describe

        planned = planned or trainer.plan()
        answer(planned, describe(planned), as_json)
        return
    folder = trainer.run()
    if as_json:
        answer(_result(load_run(folder)), "", as_json)
    outcome = "done" if trainer.ended_well else "ended with the problems above"
    print(f"{outcome}: {folder / 'model'}, {folder / 'report.html'}", file=sys.stderr)
    if IS_FIRST:
        _ask_people(folder)


def _ask_people(folder: Path) -> None:
    """Suggest ratings by people if no reward measured held-out prompts."""
    run = load_run(folder)
    if Verdict.of(run).to_json()["by"] in (None, "off-policy"):
        prompts = run.set_aside or run.config.data.eval_prompts
        rating = f"agro rate {folder}" + ("" if prompts else " --prompts FILE")
        print(f"did it get better? people can judge that, blind: {rating}", file=sys.stderr)


def _place(location: str, config: Path, changes: list[str], out: Path | None, **options: Any) -> None:
    """Start a run's processes, and exit with its exit code."""
    from agro.place.supervisor import place

    placement = Placement.parse(location)
    if out is None:
        raise Refused("--place: expected --out RUN, the folder that the processes share; got none")
    code = place(placement, TrainCommand(config, tuple(changes), out, **options))
    if code:
        raise SystemExit(code)


def _resumed(
    config: Path | None, overrides: list[str], out: Path | None
) -> tuple[Path | None, list[str], Path | None]:
    """Complete the arguments to resume a run. Its folder is enough: RUN, or --out RUN.

    This changes to the folder where the run began, for its relative paths.
    """
    if config is not None and "=" in str(config):
        overrides, config = [str(config), *overrides], None
    if config is not None and not config.is_dir():
        return config, overrides, out
    if config is not None and out is not None and out.resolve() != config.resolve():
        raise Refused(f"--out {out}: --resume continues {config}, which is set too; leave one out")
    run = config or out
    check_out(run, resume=True)
    assert run is not None
    if not (run / "config.json").is_file():
        raise Refused(f"{run}: expected the folder of a run, with its config.json; start it without --resume")
    from agro.cli.run_models import started_in

    began = started_in(run).resolve()
    if began != Path.cwd() and began.is_dir():
        run = run.absolute()
        os.chdir(began)
        sys.path.insert(0, str(began))
    return run / "config.json", overrides, run


def _result(run: RunData) -> dict[str, Any]:
    """Return a run's files, whether its model got better, and sample responses."""
    folder, shown = run.folder, SideBySide.of(run.folder, run.config)
    return {
        "run": str(folder),
        "model": str(folder / "model"),
        "report": str(folder / "report.html"),
        "ended_well": not any(problem.serious for problem in problems(run)),
        "verdict": Verdict.of(run).to_json(),
        "held_out": {"share": run.config.data.hold_out, "set_aside": run.set_aside},
        "side_by_side": None if shown is None else shown.to_json(),
    }


def ps(
    run: Annotated[str, typer.Argument()],
    as_json: bool = False,
) -> None:
    """Args:
    run: A run folder, or the URL of its store.
    """
    status = RunStatus.read(run)
    if as_json:
        answer(status.to_json(), "", as_json)
    else:
        show_table(TITLES, status.rows()).print(status.sentence())


def collect(
    run: Annotated[str, typer.Argument()],
    name: str | None = None,
) -> None:
    """Args:
    run: The run folder, or the URL of its store, postgresql://….
    name: This collector's name; one that restarts under a dead collector's name takes over its claims.
    """
    from agro.place.collector import Collector

    with RunActivity() as activity:
        count = Collector.of(run, activity, name).serve()
    print(f"done: {count} responses for {run}", file=sys.stderr)


def report(
    run: Annotated[Path, typer.Argument()],
    watch: bool = False,
    port: int = 0,
    as_json: bool = False,
) -> None:
    """Args:
    run: A run folder.
    watch: Serve the page on this machine while the run trains.
    port: With --watch: the port; 0 takes a free one.
    """
    if watch:
        if as_json:
            raise Refused("--json excludes --watch, which doesn't end; use one of them")
        from agro.pages.run.live import watch as serve

        serve(run, port)
        return
    if port:
        raise Refused("--port belongs to --watch")
    from agro.pages.run import report as write_report

    page = write_report(run)
    answer(_result(load_run(run)), str(page), as_json)


def race(
    out: Path,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[LOG-or-RECIPE] KEY=VALUE…")] = None,
    rate: Annotated[list[float] | None, typer.Option(min=0)] = None,
    as_json: bool = False,
) -> None:
    """Args:
    out: The folder of race.json and the runs; a race that began there continues.
    arguments: A log or store to learn from, or a recipe to add to the race; policy.model; data.store or
        data.prompts; data.eval_prompts; reward.name; train.steps.
    rate: A learning rate; may be repeated. Default: train.lr, ⅓ of it and 3 times it.
    """
    overrides = [item for item in arguments or [] if "=" in item]
    named = [item for item in arguments or [] if "=" not in item]
    if len(named) > 1:
        raise Refused(f"agro race: expected one log or recipe, got {' and '.join(named)}")
    name = named[0] if named else None
    if name is not None and Path(name).suffix and not Path(name).exists():
        raise Refused(f"agro race: expected a log, a store, or a recipe; there is no file {name}")
    from agro.api.race import Race, conclusion

    say = partial(print, file=sys.stderr, flush=True)
    record = Race(overrides, out, rate or (), say, name).run()
    text = conclusion(record)
    if as_json:
        answer(record | {"conclusion": text}, "", as_json)
        return
    titles = ("candidate", "rate", "steps", "held-out reward", "to the start", "run")
    show_table(titles, map(_cells, record["rows"])).print(f"\n{text}")


def _cells(row: dict[str, Any]) -> list[str]:
    rate = "" if row["lr"] is None else f"{row['lr']:.3g}"
    if "refused" in row:
        return [row["candidate"], rate, "", "", f"refused: {row['refused']}", row["run"]]
    reward = f"{row['reward']:.3f} ± {row['se']:.3f}"
    gain = ""
    if row["low"] is not None:
        gain = f"{row['gain']:+.3f} ({row['low']:.3f} to {row['high']:.3f})"
    return [row["candidate"], rate, str(row["step"]), reward, gain, row["run"] or ""]
