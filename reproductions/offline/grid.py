"""The comparison of `run.py` over a whole grid, on two other logs and with a smaller model.

    python reproductions/offline/grid.py [--only LOG] [--seeds 3] [--out runs/grid] [--record]

The task and the models are those of the arena (reproductions/arena): five digits are to be sorted, and the
model of 0.2 million parameters has learned that from a careless teacher. One log is the model's own, the
other is by a model that learned from another teacher. Both have 256 prompts with four responses each. Every
method has its learning rate and one more option to choose, and the same trials: all of `RATES` × the option's
values, seed 0, 150 updates of 8 prompts. The best by accuracy on prompts for validation is run with further
seeds, and for 600 updates at its learning rate and a third of it, the recipe and imitation with all seeds.
What is reported is the accuracy on other prompts.

Writes grid.json into --out, with --record beside this script too. An interrupted run continues.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from agro import objectives  # noqa: E402
from agro.config import (  # noqa: E402
    PolicyConfig,
    RewardConfig,
    RunConfig,
    SamplerConfig,
)
from agro.models.policy import Policy  # noqa: E402
from agro.objectives import Groups  # noqa: E402
from agro.rewards import load_reward  # noqa: E402
from agro.rollout.evaluate import heldout  # noqa: E402
from agro.rollout.prompts import load_prompts  # noqa: E402
from agro.rollout.rollout import Rollout, embedded  # noqa: E402
from agro.train.collate import collate  # noqa: E402
from agro.train.step import (  # noqa: E402
    MicroBatch,
    Passes,
    streams_of,
)
from agro.types import Batch  # noqa: E402
from reproductions import harness  # noqa: E402
from reproductions.arena.task import FULL, GROUPS, LENGTH, OTHER, SMALL, START, Files, prepare  # noqa: E402
from reproductions.arena.training import SilentActivity  # noqa: E402
from reproductions.offline.methods import IMITATION, METHODS, OPTIONS, RATES, RECIPE, UNBOUNDED  # noqa: E402

LOGS = {"own": START, "other": OTHER}
UPDATES, LONGER = 150, 600


@dataclass(frozen=True)
class Trial:
    """One run. `value` is that of the method's option."""

    log: str
    method: str
    lr: float
    value: float | None = None
    updates: int = UPDATES
    seed: int = 0

    @property
    def file(self) -> str:
        words = [str(word) for word in asdict(self).values()]
        return "_".join("".join(c if c.isalnum() or c == "." else "-" for c in word) for word in words)


def trials(log: str, method: str) -> list[Trial]:
    values: Sequence[float | None] = OPTIONS[method][1] if method in OPTIONS else (None,)
    return [Trial(log, method, lr, value) for lr in RATES for value in values]


def configure(trial: Trial, files: Files, store: Path) -> RunConfig:
    """The recipe with what the method and the trial change of it; `store`: a copy of the log."""
    method = METHODS[trial.method]
    settings = [
        f"policy.model={files.start}",
        f"data.store={store}",
        f"sampler.max_new={LENGTH + 1}",
        f"train.steps={trial.updates}",
        f"train.groups={GROUPS}",
        f"train.lr={trial.lr}",
        f"train.seed={trial.seed}",
        f"train.checkpoint_every={trial.updates}",
        "evaluate.kl=false",
        "evaluate.kl_samples=0",
        "data.spread=false",  # as these runs were recorded
        "data.hold_out=0",
    ]
    values = RunConfig.load(harness.ROOT / "agro/config/recipes/log.toml", settings).model_dump()
    if "objective" in method:
        values["objective"] = dict(method["objective"])
    for section in ("data", "train"):
        values[section] |= method.get(section, {})
    values["train"] |= {"gain_ratio": None, "step_kl": None}  # as these runs were recorded
    if trial.value is not None:
        values["objective"][OPTIONS[trial.method][0]] = trial.value
    values["phases"] = [
        {**phase, "train": {**phase["train"], "steps": trial.updates // 2}}
        for phase in method.get("phases", [])
    ]
    options = {key: value for key, value in values["objective"].items() if key != "name"}
    needs = objectives.get(values["objective"]["name"]).needed(options)
    values["policy"]["cache_reference"] = "ref_logp" in needs
    return RunConfig.of(values, trial.file)


def complete(trial: Trial, files: Files, out: Path) -> dict[str, Any]:
    """What is measured of a run, which is made unless that was done before."""

    def make() -> dict[str, Any]:
        began = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder) / "log.db"
            shutil.copyfile(files.log(LOGS[trial.log]), store)
            trainer = SilentActivity(configure(trial, files, store), Path(folder) / "run")
            trainer.run()
            found = measure(trainer.policy, files)
        return {**asdict(trial), **found, "cpu_seconds": time.process_time() - began}

    measured: dict[str, Any] = harness.once(out / "runs" / f"{trial.file}.json", make)
    return measured


def measure(policy: Policy, files: Files) -> dict[str, float]:
    """Accuracy on the prompts for validation and on those of the test, and KL(π ‖ π_ref) on the latter.

    One response each, at temperature 1, with the same random numbers for every policy.
    """
    prompts = load_prompts(files.held_out)
    rollout = Rollout(policy.encoder, embedded(policy))
    sampler = SamplerConfig(n=1, max_new=LENGTH + 1, batch=1024)
    result = heldout(rollout, load_reward(RewardConfig(name="exact")), prompts, sampler, seed=0)
    batch = collate(result.samples, 0)
    ratio_BT = _logp(policy, batch) - _logp(_start(files), batch)
    test = slice(files.size.validation, None)
    right_M = result.rewards[:, 0]
    return {
        "validation": float(right_M[: files.size.validation].mean()),
        "accuracy": float(right_M[test].mean()),
        "kl": float(Groups.of(batch).sum_tokens(ratio_BT)[test].mean()),
    }


def _start(files: Files) -> Policy:
    return Policy.load(PolicyConfig(model=str(files.start)))


def _logp(policy: Policy, batch: Batch) -> Tensor:
    with torch.no_grad():
        return streams_of(policy, batch, ["logp"], Passes(MicroBatch(len(batch.mask))))["logp"]


def compare(log: str, method: str, seeds: int, files: Files, out: Path) -> dict[str, Any]:
    """The trials of a method on a log, its best settings with all seeds, and the longer runs."""

    def run(trial: Trial) -> float:
        measured = complete(trial, files, out)
        made.append(measured)
        return float(measured["validation"])

    made: list[dict[str, Any]] = []
    best = max(trials(log, method), key=run)
    longer = max((replace(best, lr=lr, updates=LONGER) for lr in (best.lr, best.lr / 3)), key=run)
    ends = {}
    for name, trial in (("150 updates", best), ("600 updates", longer)):
        same = [complete(replace(trial, seed=seed), files, out) for seed in range(seeds)]
        ends[name] = {
            **asdict(trial),
            "accuracy": [m["accuracy"] for m in same],
            "kl": [m["kl"] for m in same],
        }
        if method not in (RECIPE, UNBOUNDED, IMITATION):
            seeds = 1  # of the longer runs
    return {"log": log, "method": method, "trials": made, "ends": ends}


def table(results: Sequence[dict[str, Any]]) -> str:
    lines = []
    for found in sorted(results, key=_place):
        short, longer = found["ends"]["150 updates"], found["ends"]["600 updates"]
        chosen = f"{short['lr']:g}"
        if short["value"] is not None:
            chosen += f", {OPTIONS[found['method']][0]} {short['value']:g}"
        cells = [found["log"], found["method"].partition(", β")[0].partition(", b")[0], chosen]
        cells += [" ".join(f"{end:.3f}" for end in short["accuracy"]), harness.of_seeds(short["accuracy"])]
        worst = min(m["accuracy"] for m in found["trials"] if m["updates"] == UPDATES)
        cells += [f"{statistics.mean(short['kl']):.2f}", f"{worst:.3f}", harness.of_seeds(longer["accuracy"])]
        lines.append(cells)
    head = [
        "log",
        "method",
        "lr, option",
        "accuracy by seed",
        "mean",
        "KL, nats",
        "worst trial",
        "600 updates",
    ]
    return harness.markdown(head, lines)


def _place(found: dict[str, Any]) -> tuple[str, float]:
    return found["log"], -statistics.mean(found["ends"]["150 updates"]["accuracy"])


def main() -> None:
    small = "tiny logs: seconds a run, and no result"
    parser = harness.parser(__doc__, "runs/grid", record=harness.RECORD, small=small)
    parser.add_argument("--only", choices=LOGS, help="one log")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    files = prepare(args.out, SMALL if args.small else FULL)
    results = []
    for log in [args.only] if args.only else LOGS:
        for method in (name for name in METHODS if name != UNBOUNDED):  # no run here has the bound
            results.append(compare(log, method, args.seeds, files, args.out))
            print(table(results[-1:]).splitlines()[-1], flush=True)
    record = {"machine": harness.machine(), "start": measure(_start(files), files), "results": results}
    harness.keep_json(args, HERE, "grid.json", record, indent=None)
    print(table(results))


if __name__ == "__main__":
    harness.guarded(main)
