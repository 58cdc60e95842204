"""A real chat model learns to answer with one word: from fresh samples, from a log, from thumbs.

    python reproductions/chat/run.py --model DIR [--job log …] [--method recipe] [--seeds 0 1 2]
                                     [--recorded] [--record] [KEY=VALUE …]

DIR is what model.py writes. Each job trains an adapter with its recipe and, with as many updates, the
simplest alternative, at a rate that is the same for all and at three times of it; a run that is done isn't
made again, an interrupted one continues. With --recorded, runs of other jobs, methods and seeds are those in
result.json. Prints the tables of all runs in --out, with --record also into README.md and result.json beside
this script.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro.config import RunConfig  # noqa: E402
from agro.errors import Refused  # noqa: E402
from agro.runs.rundata import load_run  # noqa: E402
from agro.runs.verdict import Verdict  # noqa: E402
from reproductions import harness  # noqa: E402
from reproductions.chat import logs, report, tasks  # noqa: E402

TRAINED, HELD_OUT = 60, 30  # questions of each kind, at most
LAYERS = range(20, 30)  # of 30: below the lowest layer that is trained there is no backward pass
PLACES = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")
RATE, HIGHER, STEPS = 3e-3, 9e-3, 16
AT_HIGHER = ", 9e-3"  # ends the name of a method at the higher rate
METHODS = tuple(name + rate for name in ("recipe", "imitation") for rate in ("", AT_HIGHER))

COMMON: dict[str, Any] = {
    "policy": {
        "dtype": "float32",  # bfloat16 is refused: decoded log-probs are too far from the trainer's
        "lora": {"rank": 8, "alpha": 16.0, "targets": [f"{i}.{place}" for i in LAYERS for place in PLACES]},
        "threads": 1,
    },
    "reward": {"name": "exact"},
    "sampler": {"n": 4, "max_new": 8, "batch": 160},
    "train": {
        "steps": STEPS,
        "lr": RATE,
        "warmup": 3,
        "schedule": "linear",
        "micro_tokens": 8192,
        "gradient_checkpointing": False,
        "checkpoint_every": 8,
        "keep": 1,
    },
    "evaluate": {"every": 0, "kl": False},
}
IMITATION = {"objective": {"name": "sft"}, "data": {"replay": 1.0, "min_reward": 1.0}}
# By job, its methods: a recipe or none, and what differs. Of fresh samples with rewards 1 and 0, REINFORCE
# without a baseline is imitation of the right ones.
JOBS: dict[str, dict[str, tuple[str | None, dict[str, Any]]]] = {
    "fresh": {
        "recipe": ("lora", {"train": {"groups": 8}}),
        "imitation": (None, {"objective": {"name": "reinforce"}, "train": {"groups": 8}}),
    },
    "log": {
        "recipe": ("log", {"train": {"groups": 32}}),
        "imitation": (None, {**IMITATION, "train": {"groups": 32}}),
    },
    "thumbs": {
        "recipe": ("feedback", {"train": {"groups": 32}}),
        "imitation": (None, {**IMITATION, "train": {"groups": 32}}),
    },
}


def settings(job: str, method: str, model: Path, files: logs.Files, seed: int) -> dict[str, Any]:
    """The values of a run's configuration."""
    recipe, changes = JOBS[job][method.removesuffix(AT_HIGHER)]
    values = RunConfig.load(recipe).model_dump() if recipe else {}
    data: dict[str, Any] = {"eval_prompts": str(files.held_out)}
    if job == "fresh":
        data["prompts"] = str(files.trained)
    own = {"policy": {"model": str(model)}, "data": data, "train": {"seed": seed, "epochs": None}}
    for more in (COMMON, changes, own):
        values = _merged(values, more)
    if method.endswith(AT_HIGHER):
        values["train"]["lr"] = HIGHER
    if job != "fresh":
        values["policy"]["cache_reference"] = method.startswith("recipe")
    return values


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        inner = merged.get(key)
        is_section = isinstance(value, dict) and isinstance(inner, dict)
        merged[key] = _merged(inner, value) if is_section and inner is not None else value
    return merged


def folder_of(job: str, method: str, seed: int) -> str:
    return f"{job}-{method.replace(', ', '-')}-{seed}"


def play(job: str, method: str, seed: int, model: Path, out: Path, changed: Sequence[str]) -> None:
    """Make one run, and write what is reported of it into its folder."""
    folder = out / folder_of(job, method, seed)
    if (folder / "measured.json").exists():
        return
    print(f"{job}, {method}, seed {seed}", file=sys.stderr, flush=True)
    files = logs.Files(out / "data")
    values = settings(job, method, model, files, seed)
    if job != "fresh":  # a copy of its own: a run writes draws and log-probs of the reference into its store
        store = folder.with_suffix(".db")
        if not store.exists():
            logs.import_into(store, files, job)
        values["data"]["store"] = str(store)
    begun = folder.with_suffix(".json")
    begun.write_text(json.dumps(values, indent=1))
    run = harness.train(RunConfig.load(str(begun), list(changed)), folder)
    measured = measure(job, method, seed, folder, run, files)
    (folder / "measured.json").write_text(json.dumps(measured, ensure_ascii=False, allow_nan=False))


def measure(
    job: str, method: str, seed: int, folder: Path, run: dict[str, Any], files: logs.Files
) -> dict[str, Any]:
    """What is reported of a run."""
    last = run["metrics"][-1]
    names = ("eval_gain", "eval_gain_low", "eval_gain_high", "eval_gain_p", "eval_gain_n")
    is_shown = method == "recipe" and seed == 0
    kls = [m["kl_ref"] for m in run["metrics"] if m.get("kl_ref") is not None]
    return {
        "job": job,
        "method": method,
        "seed": seed,
        "steps": last["step"],
        "before": run["metrics"][0]["eval_reward"],
        "after": last["eval_reward"],
        **{name: last[name] for name in names},
        "kl_ref": kls[-1] if kls else None,
        "verdict": Verdict.of(load_run(folder)).sentence,
        "kinds": report.by_kind(folder, files.held_out),
        "exact": report.exact(folder / "model", files.held_out),
        "seconds": run["seconds"],
        "cpu_seconds": run["cpu_seconds"],
        "texts": report.texts(folder / "model", files.held_out) if is_shown else None,
    }


def finished(out: Path) -> Iterator[dict[str, Any]]:
    for job, methods in JOBS.items():
        for method in methods:
            for path in sorted(out.glob(folder_of(job, method, 0)[:-1] + "[0-9]/measured.json")):
                yield json.loads(path.read_text())


def restore(out: Path, asked: Container[tuple[str, str, int]]) -> None:
    """Put the recorded runs into `out`, where they count as done, but for (job, method, seed) in `asked`."""
    result = json.loads((HERE / "result.json").read_text())
    facts = json.loads(logs.Files(out / "data").facts.read_text())
    for part in ("log", "mixed_groups", "thumbs"):
        if facts[part] != result["data"][part]:
            raise Refused(
                f"--recorded: the recorded runs had another log: {part} was {result['data'][part]}, is "
                f"{facts[part]}. What to do: run all methods anew, without --recorded"
            )
    for made in result["runs"]:
        row = made["job"], made["method"], made["seed"]
        folder = out / folder_of(*row)
        if row not in asked and not folder.exists():
            folder.mkdir()
            (folder / "measured.json").write_text(json.dumps(made, ensure_ascii=False))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="of all runs, such as train.steps=2"
    )
    parser.add_argument("--model", type=Path, required=True, help="folder that model.py wrote")
    parser.add_argument("--job", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--method", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/chat"))
    parser.add_argument("--recorded", action="store_true", help="other runs as they were recorded")
    parser.add_argument("--record", action="store_true", help="keep the result beside this script")
    args = parser.parse_args(arguments)
    if not (args.model / "config.json").is_file():
        raise Refused(f"--model: {args.model}: expected the folder that reproductions/chat/model.py writes")
    torch.set_num_threads(1)
    prepare(args.model, args.out)
    if args.recorded:
        restore(args.out, set(product(args.job, args.method, args.seeds)))
    for seed in args.seeds:
        for job in args.job:
            for method in args.method:
                play(job, method, seed, args.model, args.out, args.overrides)
    files = logs.Files(args.out / "data")
    result = {
        "data": json.loads(files.facts.read_text()),
        "runs": list(finished(args.out)),
        "start": report.kept_texts(files),
        "machine": harness.machine(),
        "overrides": args.overrides,
    }
    page = report.page(result)
    (args.out / "result.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    if args.record:
        (HERE / "result.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        report.put(page, HERE / "README.md")
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
    files.facts.write_text(json.dumps({**counts, **log}, ensure_ascii=False))


if __name__ == "__main__":
    harness.guarded(main)
