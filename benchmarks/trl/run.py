"""A complete step of RLOO with a reference beside TRL's, by the peer's protocol (shared/peers/trl/README.md).

    python benchmarks/trl/run.py --trl-python /tmp/trlenv/bin/python [--cases tiny mid] [--pairs 3]

`tiny` is the peer's 2.4M model: 16 prompts × 4 responses of at most 64 tokens. `mid` is its 34M model with
random weights: 8 × 4 of 256 tokens (agro's may end earlier, with the end token, 1 of 32,000; TRL's don't).
Both float32, one thread, β = 0.05, one optimizer step a batch. A pair is a process of each, in turns; a
process gives the median of the CPU seconds of its steps without the first ones, and the ratio is of the
medians of these. TRL needs an environment of its own with the packages of the peer's requirements.txt. Rows
of benchmarks/results/trl.json with the same names are replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/trl.json"
PEER = ROOT / "../shared/peers/trl"
CASES: dict[str, dict[str, Any]] = {
    "tiny": {"goal": 2.0, "prompts": 16, "new": 64, "steps": 8, "warmup": 2, "micro": 64},
    "mid": {"goal": 2.5, "prompts": 8, "new": 256, "steps": 3, "warmup": 1, "micro": 16},
}
SIZE = 4  # responses a prompt


def write_prompts(path: Path, case: str) -> None:
    """The prompts that the peer trains on: of its task, or as its `word_prompts`."""
    sys.path.insert(0, str(PEER))
    import task  # type: ignore[import-not-found]

    texts = task.make_prompts(4096, task.TRAIN_SEED)
    if case == "mid":
        words = random.Random(task.TRAIN_SEED)
        texts = [" ".join(f"w{words.randrange(2, 32000)}" for _ in range(32)) for _ in range(4096)]
    lines = (json.dumps({"prompt": text}) + "\n" for text in texts)
    path.write_text("".join(lines))


def tiny_reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    import task

    return [task.reward(p, c) for p, c in zip(prompts, completions, strict=True)]


def mid_reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """A coin that the text decides, as the peer's."""
    return [float(zlib.crc32(c.encode()) & 1) for c in completions]


def own(case: str, model: Path, folder: Path, monitors: Sequence[Any] = ()) -> dict[str, Any]:
    """Train in this process; CPU seconds and new tokens of each step, and the peak of the memory in MB."""
    from agro import RunConfig, Trainer
    from agro.train.monitors import Monitor, View

    size = CASES[case]
    write_prompts(folder / "prompts.jsonl", case)
    steps: list[dict[str, float]] = []

    class Clock(Monitor):
        last = time.process_time()

        def after(self, view: View) -> None:
            now = time.process_time()
            if view.step > 0:
                steps.append({"cpu": now - self.last, "tokens": view.metrics["sampled_tokens"]})
            self.last = now

    values = {
        "policy": {"model": str(model), "device": "cpu"},
        "data": {"prompts": str(folder / "prompts.jsonl")},
        "sampler": {"n": SIZE, "max_new": size["new"], "batch": size["prompts"] * SIZE},
        "reward": {"name": "score"},
        "objective": {"name": "rloo", "beta": 0.05},
        "train": {
            "steps": size["steps"],
            "groups": size["prompts"],
            "micro_batch": size["micro"],
            "lr": 1e-4,
            "warmup": 10,
            "checkpoint_every": 1000,
        },
    }
    reward = tiny_reward if case == "tiny" else mid_reward
    Trainer(RunConfig.of(values), folder / "run", monitors=[Clock(), *monitors], rewards={"score": reward}).run()
    counted = steps[size["warmup"] :]
    return {
        "cpu": statistics.median(s["cpu"] for s in counted),
        "tokens": statistics.median(s["tokens"] for s in counted),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    }


def measured_own(case: str, model: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--own", case, str(model), folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measured_peer(python: Path, case: str, model: Path) -> dict[str, Any]:
    size = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        numbers = {name: size[name] for name in ("steps", "warmup", "prompts")}
        options = [f"--{name}={value}" for name, value in numbers.items()]
        options += [f"--max-new={size['new']}", f"--model={model}", f"--out={out}"]
        command = [str(python), "bench_trl.py", *options]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"  # the peer's folder stays as it is
        subprocess.run(command, cwd=PEER, env=environment, check=True, capture_output=True, text=True)
        found = json.loads(out.read_text())
    summary = found["summary"]
    return {
        "cpu": summary["cpu_s"]["median"],
        "tokens": summary["new_tokens"]["median"],
        "peak_mb": found["peak_rss_mb"],
        "machine": found["machine"],
    }


def compare(python: Path, case: str, model: Path, pairs: int) -> dict[str, Any]:
    ours, peers = [], []
    for _ in range(pairs):
        ours.append(measured_own(case, model))
        peers.append(measured_peer(python, case, model))
        print(f"{case}: agro {ours[-1]['cpu']:.2f} s a step, TRL {peers[-1]['cpu']:.2f} s", flush=True)
    own_cpu, peer_cpu = [r["cpu"] for r in ours], [r["cpu"] for r in peers]
    own_peak, peer_peak = (statistics.median(r["peak_mb"] for r in runs) for runs in (ours, peers))
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    facts = peers[0]["machine"]
    return {
        "name": f"step of RLOO, {case}, float32",
        "goal": CASES[case]["goal"],
        "ratio": statistics.median(peer_cpu) / statistics.median(own_cpu),
        "ours": own_cpu,
        "peer": peer_cpu,
        "tokens": [statistics.median(r["tokens"] for r in runs) for runs in (ours, peers)],
        "memory": own_peak / peer_peak,
        "commit": commit,
        "machine": ", ".join(f"{name} {value}" for name, value in facts.items()),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trl-python", type=Path, help="interpreter of an environment with TRL")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--own", nargs=3)
    asked = parser.parse_args()
    if asked.own:
        case, model, folder = asked.own
        print(json.dumps(own(case, Path(model), Path(folder))))
        return
    if not PEER.is_dir():
        sys.exit(f"skipped: expected the peer's scripts in {PEER.resolve()}; they aren't there")
    if asked.trl_python is None or not asked.trl_python.exists():
        sys.exit("skipped: expected --trl-python, an interpreter with the peer's requirements.txt installed")
    known = {}
    if RESULTS.exists():
        known = {row["name"]: row for row in json.loads(RESULTS.read_text())}
    for case in asked.cases:
        model = PEER.resolve() / "models/tiny"
        if case == "mid":
            model = ROOT.resolve() / "build/trl/mid"
            command = [str(asked.trl_python), "make_model.py", "--mid", str(model.parent)]
            if not model.exists():
                subprocess.run(command, cwd=PEER, check=True)
        row = compare(asked.trl_python, case, model, asked.pairs)
        known[row["name"]] = row
        print(f"{row['name']}: {row['ratio']:.2f}x, memory {row['memory']:.2f}", flush=True)
        RESULTS.write_text(json.dumps(list(known.values()), indent=1) + "\n")


if __name__ == "__main__":
    main()
