"""Every objective on every kind of data: one task, one model, one budget, one small grid.

    python reproductions/arena/run.py [--only NAME …] [--seeds N] [--jobs N] [--out runs/arena] [--record]
                                      [--measured] [--small]

A model of 0.2 million parameters that sorts digits carelessly is trained for 120 updates of 8 prompts with 4
responses each. The kinds of data: fresh samples; samples of the weights 1, 10 and 100 updates ago; half fresh
and half logged ones; a log of the start; a log of another model. An objective takes part wherever the data
have what it needs, and the table says what is missing elsewhere.

Each objective has the same grid: with seed 0 its defaults at each learning rate, then its other β at the best
rate, where its β has no default. The best by accuracy on the prompts for validation is run with the other
seeds, unless it ends below the start. Where their mean is below what the next settings reached with seed 0,
these are run with the other seeds too, and so on: the best mean of all seeds counts. The results are of
other prompts. In theory: where exact descent ends on a policy that can be enumerated.

`--only` takes names of objectives and of kinds of data, and "theory". An interrupted run continues; what is
complete in `--out` isn't run again, with `--recorded` neither is what the result beside this script has.
Writes result.json and figure.png into `--out`, with `--record` beside
this script too, with the tables in README.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro.errors import Refused  # noqa: E402
from reproductions import harness  # noqa: E402
from reproductions.arena import kinds, play, report, task, theory  # noqa: E402
from reproductions.arena.kinds import KINDS, RATES, Row  # noqa: E402
from reproductions.arena.play import Run  # noqa: E402

THEORY = "theory"
IN_TURN = ("log", "other's log", "fresh", "stale 1", "stale 10", "stale 100", "half")
PART = 12  # runs in lockstep


def cells(names: Sequence[str], of: Sequence[str]) -> tuple[list[tuple[str, str]], list[dict[str, str]]]:
    """(objective, kind) that can be run, and the others with the reason."""
    able, missing = [], []
    for name in names:
        for kind in of:
            why = kinds.obstacle(name, KINDS[kind])
            if why:
                missing.append({"objective": name, "kind": kind, "why": why})
            else:
                able.append((name, kind))
    return able, missing


def trials(name: str, kind: str) -> list[Row]:
    """The defaults at each rate."""
    return [Row(name, kind, rate, kinds.betas(name)[0]) for rate in RATES]


def other_betas(best: Row) -> list[Row]:
    """The best of these with each other β."""
    return [replace(best, beta=beta) for beta in kinds.betas(best.objective) if beta != best.beta]


def best_of(runs: Iterable[Run], cell: tuple[str, str]) -> tuple[Row, float] | None:
    """The settings with the highest validation, a mean over the seeds so far, and that; None without one."""
    of_cell = [run for run in runs if (run["objective"], run["kind"]) == cell]
    if not of_cell:
        return None
    best = report.best_settings(of_cell)
    return Row(*cell, best[0]["rate"], best[0]["beta"]), report.mean(best, "validation")


class Arena:
    """The runs that are complete, and what makes them."""

    def __init__(self, files: task.Files, out: Path, each: harness.Map, measured: bool) -> None:
        self.files, self.out, self.each, self.measured = files, out, each, measured
        self.runs: list[Run] = []
        self.refused: list[Run] = []  # before their first update

    def run(self, rows: Iterable[Row]) -> None:
        """Those that aren't complete yet; with `measured` none. What is the same run is made once."""
        made = {row: replace(row, objective=kinds.same(row.objective, kinds.names())) for row in rows}
        if self.measured:
            made = {row: of for row, of in made.items() if (self.out / "runs" / of.file).exists()}
        parts = list(together(dict.fromkeys(made.values())))
        found: dict[Row, Run] = {}
        play_each = partial(play.complete, files=self.files, out=self.out)
        for part, runs in zip(parts, self.each(play_each, parts), strict=True):
            found |= dict(zip(part, runs, strict=True))
            print("\n".join(report.line(run) for run in runs), flush=True)
        for row, of in made.items():
            run = found[of] | {"objective": row.objective}
            (self.runs if run["updates"] else self.refused).append(run)

    def choose(self, able: Sequence[tuple[str, str]]) -> None:
        """With seed 0, on one kind of data after the other."""
        for kind in IN_TURN:
            of_kind = [cell for cell in able if cell[1] == kind]
            self.run(row for cell in of_kind for row in trials(*cell))
            self.run(row for best, _ in self._best(of_kind) for row in other_betas(best))

    def repeat(self, able: Sequence[tuple[str, str]], seeds: int, start: float) -> None:
        """The best settings with the other seeds, unless they end below `start`, until these stay the best.

        `start`: accuracy before training, on the prompts for validation.
        """
        repeated: set[Row] = set()
        while True:
            leaders = [best for best, reached in self._best(able) if reached > start]
            new = [row for row in leaders if row not in repeated]
            if not new:
                return
            self.run(replace(row, seed=seed) for row in new for seed in range(1, seeds))
            repeated.update(new)

    def _best(self, able: Sequence[tuple[str, str]]) -> list[tuple[Row, float]]:
        found = [best_of(self.runs, cell) for cell in able]
        return [best for best in found if best is not None]


def together(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Parts of one kind of data each."""
    of_kind: dict[str, list[Row]] = {}
    for row in rows:
        of_kind.setdefault(row.kind, []).append(row)
    for found in of_kind.values():
        for i in range(0, len(found), PART):
            yield found[i : i + PART]


def refusals(refused: Sequence[Run]) -> list[dict[str, str]]:
    """The reasons of runs that were refused before their first update."""
    return [{"objective": r["objective"], "kind": r["kind"], "why": r["stopped"]} for r in refused]


def descents(names: Sequence[str], each: harness.Map, out: Path, *, small: bool, measured: bool) -> list[Run]:
    """The table in theory, of which each row is made once."""
    folder = out / THEORY
    folder.mkdir(parents=True, exist_ok=True)
    new = [name for name in names if not (folder / f"{name}.json").exists()]
    if measured:
        names, new = [name for name in names if name not in new], []
    updates = 5 if small else theory.UPDATES
    for name, found in zip(new, each(partial(theory.ends, updates=updates), new)):
        (folder / f"{name}.json").write_text(json.dumps([asdict(end) for end in found]))
        print(f"theory: {name}", flush=True)
    return [end for name in names for end in json.loads((folder / f"{name}.json").read_text())]


def restore(out: Path) -> None:
    """Write what was recorded into `out`, where it counts as complete."""
    result = json.loads((HERE / "result.json").read_text())
    for folder in (out / "runs", out / THEORY):
        folder.mkdir(parents=True, exist_ok=True)
    for made in result["runs"]:
        row = Row(*(made[name] for name in ("objective", "kind", "rate", "beta", "seed")))
        if not (out / "runs" / row.file).exists():
            (out / "runs" / row.file).write_text(json.dumps(made))
    for name in {end["objective"] for end in result["theory"]}:
        ends = [end for end in result["theory"] if end["objective"] == name]
        (out / THEORY / f"{name}.json").write_text(json.dumps(ends))


def chosen(only: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """The objectives, the kinds of data, and whether the table in theory is made. Nothing given: all."""
    every = kinds.names()
    known = {*every, *KINDS, THEORY}
    for word in only:
        if word not in known:
            raise Refused(
                f"--only: expected an objective, one of {', '.join(KINDS)}, or {THEORY}; got {word}"
            )
    names = [name for name in every if name in only]
    of = [kind for kind in KINDS if kind in only]
    if THEORY in only and not of:
        return names or every, [], True
    return names or every, of or list(KINDS), THEORY in only or not of


def main(arguments: Sequence[str] | None = None) -> None:
    more = {"recorded": harness.RECORDED, "measured": harness.MEASURED, "small": harness.SMALL}
    parser = harness.parser(__doc__, "runs/arena", record=harness.RECORD, **more)
    parser.add_argument("--only", action="append", default=[], help="may be given several times")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each with one thread")
    args = parser.parse_args(arguments)
    harness.at_least_1(seeds=args.seeds, jobs=args.jobs)
    if args.recorded:
        restore(args.out)
    names, of, in_theory = chosen(args.only)
    files = task.prepare(args.out, task.SMALL if args.small else task.FULL)
    able, missing = cells(names, of)
    with harness.processes(args.jobs) as each:
        arena, start = Arena(files, args.out, each, args.measured), play.start(files)
        arena.choose(able)
        ends: list[Run] = []
        if in_theory:
            ends = descents(names, each, args.out, small=args.small, measured=args.measured)
        arena.repeat(able, args.seeds, start["validation"])
    result = {
        "start": start,
        "grid": {"rates": RATES, "betas": kinds.BETAS},
        "machine": harness.machine(),
        "runs": arena.runs,
        "theory": ends,
        "missing": [*missing, *refusals(arena.refused)],
    }
    harness.keep(args, HERE, result, report.figure(result))
    if args.record:
        harness.put(HERE / "README.md", report.tables(result), report.BEGIN, report.END)
    print(report.tables(result))


if __name__ == "__main__":
    harness.guarded(main)
