"""Studies beside the panel, by studies.toml: few updates, more prompts, longer responses.

    python reproductions/panel/studies.py short|sizes|thousand [--jobs JOB …] [--seeds N]
                                          [--out runs/studies] [--record] [--small]

Prints a table, and writes it with --record into result_NAME.json beside this script. An interrupted one
continues.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro.train.phases import FEW_STEPS, step_bound  # noqa: E402
from reproductions import harness  # noqa: E402
from reproductions.panel import logs, play, report  # noqa: E402
from reproductions.panel.jobs import JOBS, Job, chosen, job_of  # noqa: E402
from reproductions.panel.logs import FULL, SMALL, Size  # noqa: E402
from reproductions.panel.methods import METHODS, NOTHING, Facts, Values  # noqa: E402
from reproductions.panel.play import Row, Run  # noqa: E402
from reproductions.panel.tasks import TASKS, onward  # noqa: E402

STUDIES: dict[str, dict[str, Any]] = tomllib.loads((HERE / "studies.toml").read_text("utf-8"))
_THOUSAND = dict(STUDIES.pop("job")["thousand"])
KEYS = ("jobs", "updates", "prompts", "rates", "rate_of", "seeds", "methods", "size")  # of a study
for _name, _study in STUDIES.items():
    harness.refuse_unknown(_study, KEYS, f"studies.toml: {_name}")
_ANSWER = onward(_THOUSAND.pop("letters"))
_JOB = job_of("thousand", _THOUSAND)
KINDS = {
    "thousand": replace(_JOB, task=replace(_JOB.task, name="thousand onward", answer=_ANSWER)),
    "ratings": JOBS["stars"],
    "noisy thumbs": replace(JOBS["thumbs"], name="noisy thumbs", task=TASKS["swapped"], wrong=0.2),
}
TINY = Size(16, 32, prompts=4, updates=1, warm_up=2)  # of `thousand`, with --small
BOUND = 0.005
OWN, LONG = "0.005 √(100/updates)", "0.005, as in long runs"
IN_SUM, NO_BOUND = "0.005 · 100/updates, as much in sum", "none"


def bound_of(method: str, updates: int) -> float | None:
    """`train.step_kl` with which a phase of so many updates has the bound of this name."""
    widened = step_bound(1.0, updates)
    in_sum = BOUND * FEW_STEPS / updates / widened
    return {OWN: BOUND, LONG: BOUND / widened, IN_SUM: in_sum, NO_BOUND: None}[method]


def bounded(job: Job, facts: Facts, *, name: str) -> Values:
    """The default with another bound."""
    given = METHODS["the default"](job, facts)
    assert not isinstance(given, str)
    return {**given, "train": {"gain_ratio": None, "step_kl": bound_of(name, job.updates)}}


def sized(kind: str, prompts: int, updates: int, start: Path) -> Job:
    """A job of a kind with so many prompts, from the start of that kind."""
    job = KINDS.get(kind) or JOBS[kind]
    named = replace(job, name=f"{kind}, {prompts}", start=start)
    return replace(named, prompts=prompts, updates=updates, kept=False)


def jobs_of(
    study: Mapping[str, Any], names: Sequence[str], out: Path, size: Size
) -> Iterator[tuple[Path, Job]]:
    """The jobs of a study, each with the folder of its files and runs."""
    for updates, name in product(study.get("updates", [None]), names):
        job = KINDS.get(name) or JOBS[name]
        if "prompts" in study:
            start = logs.prepare(size.of(job), out, size).start
            for prompts in study["prompts"]:
                yield out, sized(name, prompts, updates, start)
        elif updates is None:
            yield out, job
        else:
            yield out / str(updates), replace(job, updates=updates)


def rows(job: Job, study: Mapping[str, Any], seeds: int) -> list[Row]:
    """The start, then each method at its rates, seed by seed."""
    found = [Row(job.name, NOTHING, None)]
    for seed, method in product(range(seeds), study["methods"]):
        own = study.get("rate_of", {}).get(method)
        rates = study["rates"] if own is None else [own]
        found += [Row(job.name, method, rate, seed) for rate in rates]
    return found


def table(runs: Sequence[Run]) -> str:
    """A row for each job, number of updates, method and rate: means over seeds and their range."""
    lines = []
    cells = harness.grouped(runs, "job", "updates", "method", "rate")
    for (job, updates, method, rate), same in cells.items():
        words = [job, str(updates), method, "–" if rate is None else f"{rate:g}", str(len(same))]
        lines.append([*words, _range(same, "reward", 3), _range(same, "kl", 1)])
    head = ["job", "updates", "method", "lr", "seeds", "held-out reward", "KL, nats"]
    return harness.markdown(head, lines)


def over_jobs(runs: Sequence[Run]) -> str:
    """A row for each number of updates, method and rate: the mean reward over jobs and seeds."""
    lines = []
    for (updates, method, rate), same in harness.grouped(runs, "updates", "method", "rate").items():
        mean = report.number(report.mean(same))
        lines.append([str(updates), method, "–" if rate is None else f"{rate:g}", mean])
    return harness.markdown(["updates", "method", "lr", "mean of all jobs"], lines)


def _range(runs: Sequence[Run], key: str, digits: int) -> str:
    values = [run[key] for run in runs]
    return "–" if None in values else harness.spread(values, f".{digits}f")


def main(arguments: Sequence[str] | None = None) -> None:
    switches = {"record": harness.RECORD, "small": harness.SMALL}
    parser = harness.parser(__doc__, "runs/studies", jobs=[], seeds=int, **switches)
    parser.add_argument("study", choices=STUDIES)
    args = parser.parse_args(arguments)
    study, out = STUDIES[args.study], args.out / args.study
    size = Size(**study["size"]) if "size" in study else FULL
    if args.small:
        size = TINY if "size" in study else SMALL
    bounds = {name: partial(bounded, name=name) for name in (OWN, LONG, IN_SUM, NO_BOUND)}
    names = chosen(args.jobs, study["jobs"], "--jobs")
    runs: list[Run] = []
    facts = {}
    for folder, job in jobs_of(study, names, out, size):
        play.world.cache_clear()
        updates = size.of(job).updates
        with patch.dict(METHODS, bounds), patch.dict(JOBS, {job.name: job}):
            for row in rows(job, study, args.seeds or study["seeds"]):
                runs.append({**play.complete(row, folder, size), "updates": updates})
                print(report.line(runs[-1]), flush=True)
            facts[f"{job.name}, {updates}"] = play.world(job.name, folder, size).facts
    result = {"machine": harness.machine(), "facts": facts, "runs": runs}
    harness.keep(args, HERE, result, name=f"result_{args.study}.json")
    for name, of in facts.items():
        if "responses" in of:
            error = 0.5 / of["held_out"] ** 0.5
            logged = f"{of['responses']} logged responses of {of['length']:.0f} letters"
            held_out = f"{of['held_out']} held-out prompts (standard error ≤ {error:.3f})"
            print(f"{name} updates: {logged}; {held_out}")
    print(table(runs))
    if len(names) > 1 and "prompts" not in study:
        print(over_jobs(runs))


if __name__ == "__main__":
    harness.guarded(main)
