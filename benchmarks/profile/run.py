"""Where the CPU time of a step of RLOO goes, on the model and prompts of `benchmarks/trl`.

    python benchmarks/profile/run.py [--case tiny] [--before CHECKOUT] [--model FOLDER]

Functions of agro are wrapped with clocks; a part's time is without that of the parts inside it. Printed are
medians over the steps after the first ones, in CPU milliseconds, in order of execution. --before measures
another checkout of agro too; parts that it doesn't have are left out there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT.parent / "shared/peers/trl/models/tiny"
PARTS = {  # module, function -> part
    ("agro.rollout.engines.decoding_rows", "Rows.admit"): "sampling: prompts",
    ("agro.rollout.engines.decoding_rows", "Rows.step"): "sampling: rest of decoding",
    ("agro.rollout.engines.fused", "Fused.logits"): "sampling: norms, rotation, gates",
    ("agro.rollout.engines.fused", "scaled_dot_product_attention"): "sampling: attention",
    ("agro.rollout.engines.fused", "_attended"): "sampling: attention",
    ("agro.rollout.engines.fused", "_Product.__call__"): "sampling: products",
    ("agro.rollout.engines.decoding_rows", "draw"): "sampling: draw",
    ("agro.train.learner", "Local.logp"): "reference",
    ("agro.train.learner", "Local.gradient"): "training: objective, packing",
    ("agro.train.step", "_back_propagate"): "training: layers backward",
    ("agro.models.logprobs", "_Streams.forward"): "output layer forward",
    ("agro.models.logprobs", "_Streams.backward"): "output layer backward",
    ("agro.train.learner", "Optimizer.clip"): "optimizer",
    ("agro.train.learner", "Optimizer.move"): "optimizer",
}


class Clocks:
    """CPU seconds of each part, without those of the parts inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.open: list[float] = []  # seconds that were spent inside each running function

    def timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.open.append(0.0)
            began = time.process_time()
            try:
                return work(*args, **kwargs)
            finally:
                took = time.process_time() - began
                self.seconds[part] += took - self.open.pop()
                if self.open:
                    self.open[-1] += took

        return run

    def wrap(self, module: str, name: str, part: str) -> None:
        """Replace a function by its timed version; leave it where this agro doesn't have it."""
        try:
            owner: Any = importlib.import_module(module)
            *outer, last = name.split(".")
            for each in outer:
                owner = getattr(owner, each)
            work = getattr(owner, last)
        except (ImportError, AttributeError):
            return
        timed = self.timed(part, work)
        is_static = isinstance(vars(owner).get(last), staticmethod)
        setattr(owner, last, staticmethod(timed) if is_static else timed)

    def wrap_products(self) -> None:
        """Before `_Product`, those of a decoding step were made by a function."""
        fused: Any = importlib.import_module("agro.rollout.engines.fused")
        make = getattr(fused, "_product", None)
        if make is None:
            return
        fused._product = lambda *args: self.timed("sampling: products", make(*args))


def profile(case: str, model: Path, own: Callable[..., Any]) -> dict[str, float]:
    """Train as `benchmarks/trl` does; milliseconds of each part a step."""
    from agro.train.monitors import Monitor, View

    clocks = Clocks()
    for (module, name), part in PARTS.items():
        clocks.wrap(module, name, part)
    clocks.wrap_products()
    steps: list[dict[str, float]] = []

    class Steps(Monitor):
        began = time.process_time()

        def after(self, view: View) -> None:
            now = time.process_time()
            rest = now - self.began - sum(clocks.seconds.values())
            steps.append({**clocks.seconds, "store, reward, metrics": rest})
            clocks.seconds.clear()
            self.began = time.process_time()

    with tempfile.TemporaryDirectory() as folder:
        own(case, model, Path(folder), monitors=[Steps()])
    counted = steps[3:]  # the first is the measurement before the first step
    parts = sorted({part for step in counted for part in step}, key=_order)
    return {part: 1000 * statistics.median(step.get(part, 0.0) for step in counted) for part in parts}


def _order(part: str) -> int:
    names = [*PARTS.values(), "sampling: products"]
    return names.index(part) if part in names else len(names)


def measured(checkout: Path, case: str, model: Path) -> dict[str, float]:
    """`profile` in a process of its own, with the agro of a checkout."""
    command = [sys.executable, __file__, "--one", "--case", case, "--model", str(model)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", default="tiny", choices=["tiny", "mid"])
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--one", action="store_true")
    asked = parser.parse_args()
    if asked.one:
        sys.path.insert(0, str(ROOT / "benchmarks/trl"))
        trl = importlib.import_module("run")
        print(json.dumps(profile(asked.case, asked.model.resolve(), trl.own)))
        return
    if not asked.model.is_dir():
        sys.exit(f"skipped: expected a model's folder, got {asked.model}; name one with --model")
    runs = {"now": measured(ROOT, asked.case, asked.model)}
    if asked.before:
        runs = {"before": measured(asked.before.resolve(), asked.case, asked.model), **runs}
    print(f"| CPU ms a step, {asked.case} | {' | '.join(runs)} |\n|---|{'---|' * len(runs)}")
    for part in runs["now"]:
        print(f"| {part} | {' | '.join(f'{run.get(part, 0.0):.0f}' for run in runs.values())} |")
    print(f"| all | {' | '.join(f'{sum(run.values()):.0f}' for run in runs.values())} |")


if __name__ == "__main__":
    main()
