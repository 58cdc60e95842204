"""A real chat model learns to answer with one word: from fresh samples, from a log, from thumbs.

    python reproductions/chat/run.py [KEY=VALUE …] --model DIR [--job log …] [--method recipe]
                                     [--rates 1e-3 3e-3] [--seeds 0 1] [--steps 16] [--recorded] [--measured]
                                     [--record]

DIR is what model.py writes. Each job trains an adapter with its recipe and, with as many updates, the
simplest alternative; KEY=VALUE changes a setting of either, and the run is kept as one of its own. A run that
is done isn't made again, an interrupted one continues. With --recorded, other runs are those in result.json.
Prints the tables of all runs in --out, with --record also into README.md and result.json beside this script.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro.config import RunConfig  # noqa: E402
from agro.errors import Refused  # noqa: E402
from reproductions import harness  # noqa: E402
from reproductions.chat import logs, report, tasks  # noqa: E402

TRAINED, HELD_OUT = 60, 30  # questions of each kind, at most
RATE, STEPS = 3e-3, 16
METHODS = ("recipe", "imitation")
# What all runs have, and by job its methods: a recipe or none, and what differs.
_DECLARED: dict[str, Any] = tomllib.loads((HERE / "jobs.toml").read_text(encoding="utf-8"))
COMMON: dict[str, Any] = _DECLARED["common"]
JOBS: dict[str, dict[str, dict[str, Any]]] = {name: _DECLARED[name] for name in ("fresh", "log", "thumbs")}
# Below the lowest layer that is trained there is no backward pass.
_LORA = COMMON["policy"]["lora"]
_LORA["targets"] = [f"{i}.{place}" for i in _LORA.pop("layers") for place in _LORA["targets"]]


@dataclass(frozen=True)
class Row:
    """One run: what it trains on, by which method, and what differs from the others of it."""

    job: str
    method: str
    rate: float = RATE
    steps: int = STEPS
    seed: int = 0
    changes: tuple[str, ...] = ()  # KEY=VALUE

    @property
    def folder(self) -> str:
        changes = "".join(f"-{change.replace('/', ':')}" for change in self.changes)
        return f"{self.job}-{self.method}{changes}-{self.rate:g}-{self.steps}-{self.seed}"

    @property
    def keys(self) -> dict[str, Any]:
        """As they stand in its record."""
        return {**asdict(self), "changes": list(self.changes)}

    @classmethod
    def of(cls, record: dict[str, Any]) -> Row:
        names = ("job", "method", "rate", "steps", "seed")
        return cls(*(record[name] for name in names), tuple(record["changes"]))


def settings(row: Row, model: Path, files: logs.Files) -> dict[str, Any]:
    """The values of a run's configuration, without its changes."""
    own = dict(JOBS[row.job][row.method])
    values = RunConfig.load(own.pop("recipe")).model_dump() if "recipe" in own else {}
    data: dict[str, Any] = {"hold_out": 0.0, "hold_out_most": None}  # the held-out questions are others
    if row.job == "fresh":
        data["prompts"] = str(files.trained)
    else:
        data["store"] = str(files.store(row.job))
    train = {"seed": row.seed, "epochs": None, "lr": row.rate, "steps": row.steps}
    policy: dict[str, Any] = {"model": str(model)}
    if row.job != "fresh":
        policy["cache_reference"] = row.method == "recipe"  # the others read none
    for more in (COMMON, own, {"policy": policy, "data": data, "train": train}):
        values = harness.merged(values, more)
    return values


def play(row: Row, model: Path, out: Path) -> None:
    """Make one run, and write what is reported of it into its folder."""
    folder = out / row.folder
    if (folder / "measured.json").exists():
        return
    print(folder.name, file=sys.stderr, flush=True)
    files = logs.Files(out / "data")
    values = settings(row, model, files)
    if row.job != "fresh" and not files.store(row.job).exists():
        logs.import_into(files.store(row.job), files, row.job)
    begun = out / f"{row.folder}.json"
    begun.write_text(json.dumps(values, indent=1))
    run = harness.train(RunConfig.load(str(begun), list(row.changes)), folder)
    measured = measure(row, folder, run, files)
    (folder / "measured.json").write_text(json.dumps(measured, ensure_ascii=False, allow_nan=False))


def measure(row: Row, folder: Path, run: dict[str, Any], files: logs.Files) -> dict[str, Any]:
    """What is reported of a run."""
    kls = [m["kl_ref"] for m in run["metrics"] if m.get("kl_ref") is not None]
    return {
        **row.keys,
        "exact": report.exact(folder / "model", files.held_out),
        "kl_ref": kls[-1] if kls else None,
        "kept": [m.get("kept") for m in run["metrics"][1:]],
        "promised": [m.get("promised") for m in run["metrics"][1:]],
        "rates": [m.get("lr") for m in run["metrics"][1:]],
        "seconds": run["seconds"],
        "cpu_seconds": run["cpu_seconds"],
        "commit": harness.machine()["commit"],
        "texts": report.texts(folder / "model", files.held_out) if row == Row(row.job, "recipe") else None,
    }


def finished(out: Path) -> list[dict[str, Any]]:
    """The runs in `out`, by job, method, changes, updates, rate and seed."""
    found = [json.loads(path.read_text()) for path in out.glob("*/measured.json")]
    places = {name: i for i, name in enumerate((*JOBS, *METHODS))}
    return sorted(
        found,
        key=lambda r: (places[r["job"]], places[r["method"]], r["changes"], r["steps"], r["rate"], r["seed"]),
    )


def restore(out: Path, asked: Container[Row]) -> None:
    """Put the recorded runs into `out`, where they count as done, but for those in `asked`."""
    result = json.loads((HERE / "result.json").read_text())
    facts = json.loads(logs.Files(out / "data").facts.read_text())
    for part in ("log", "mixed_groups", "thumbs"):
        if facts[part] != result["data"][part]:
            raise Refused(
                f"--recorded: the recorded runs had another log: {part} was {result['data'][part]}, is "
                f"{facts[part]}. What to do: run all methods anew, without --recorded"
            )
    for made in result["runs"]:
        row = Row.of(made)
        folder = out / row.folder
        if row not in asked and not folder.exists():
            folder.mkdir()
            (folder / "measured.json").write_text(json.dumps(made, ensure_ascii=False))


def main(arguments: Sequence[str] | None = None) -> None:
    more: dict[str, Any] = {
        "job": JOBS,
        "method": METHODS,
        "rates": [RATE],
        "steps": STEPS,
        "seeds": [0, 1, 2],
    }
    more |= {"record": harness.RECORD, "recorded": harness.RECORDED, "measured": harness.MEASURED}
    parser = harness.parser(__doc__, "runs/chat", **more)
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="of all runs that are asked for")
    parser.add_argument("--model", type=Path, required=True, help="folder that model.py wrote")
    args = parser.parse_args(arguments)
    if not (args.model / "config.json").is_file():
        raise Refused(f"--model: {args.model}: expected the folder that reproductions/chat/model.py writes")
    torch.set_num_threads(1)
    prepare(args.model, args.out)
    asked = [
        Row(job, method, rate, args.steps, seed, tuple(args.changes))
        for seed, job, method, rate in product(args.seeds, args.job, args.method, args.rates)
        if not args.measured
    ]
    if args.recorded:
        restore(args.out, set(asked))
    for row in asked:
        play(row, args.model, args.out)
    files = logs.Files(args.out / "data")
    result = {
        "data": json.loads(files.facts.read_text()),
        "runs": finished(args.out),
        "start": json.loads(files.texts.read_text()),
        "machine": harness.machine(),
    }
    page = report.page(result)
    harness.keep(args, HERE, result)
    if args.record:
        harness.put(HERE / "README.md", page)
    print(page)


def prepare(model: Path, out: Path) -> None:
    """Questions, the log of the start and the thumbs, once."""
    files = logs.Files(out / "data")
    if files.facts.exists():
        return
    trained, held_out = tasks.make(TRAINED, held_out=False), tasks.make(HELD_OUT, held_out=True)
    tasks.write(trained, files.trained)
    tasks.write(held_out, files.held_out)
    log = logs.write(model, files)
    counts = {
        part: Counter(row["kind"] for row in rows)
        for part, rows in (("trained", trained), ("held_out", held_out))
    }
    files.texts.write_text(json.dumps(report.texts(model, files.held_out), ensure_ascii=False))
    start = report.exact(model, files.held_out)
    files.facts.write_text(json.dumps({**counts, **log, "start": start}, ensure_ascii=False))


if __name__ == "__main__":
    harness.guarded(main)
