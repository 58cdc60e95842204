"""How cost grows with the size of a step, and how far a dry run's predictions are from the runs.

    python benchmarks/scaling/run.py [--parts slopes predictions] [--cases "34M, 2 × 4, 32 + 32" …]

Slopes: CPU seconds, and the memory that is added to the process at most, at four sizes that double, of a
Llama of 1M parameters with random weights (width 128, 4 layers, a vocabulary of 2,048), on one thread. The
slope is that of the logarithms by least squares; beside it is the expected exponent. The faster of two
repeats counts. Predictions: see predicted.py. Rows of the same name are replaced.

Writes benchmarks/results/scaling.json, and scaling.md beside this file. In the rows of slopes
`ours` are the CPU seconds, `goal` is the expected exponent and `ratio` the measured one; in those of
predictions `ours` is predicted, `peer` measured, and `ratio` the one over the other.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import predicted
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from benchmarks import recording  # noqa: E402

RESULTS = ROOT / "benchmarks/results/scaling.json"
REPEATS = 2
Work = Callable[[], Any]


def policy_of(folder: Path) -> Any:
    from agro.config import PolicyConfig
    from agro.models.policy import Policy

    if not (folder / "config.json").exists():
        predicted.random_model(folder, "1M")
    policy = Policy.load(PolicyConfig(model=str(folder), device="cpu", threads=1))
    policy.eos_ids = ()  # only lengths end a response
    return policy


def gradient(policy: Any, groups: int, size: int, width: int, micro_tokens: int = 512) -> Work:
    """The gradient of RLOO over groups of `size` sequences, without a reference, and the update."""
    from agro import objectives
    from agro.config import RunConfig
    from agro.train.learner import Local
    from agro.types import Batch

    train = {"lr": 1e-6, "micro_tokens": micro_tokens}
    config = RunConfig.of({"objective": {"name": "rloo", "beta": 0.0}, "train": train})
    learner = Local(policy, None, print)
    learner.enter(config, began=None, resumed=None)
    rows, random = groups * size, torch.Generator().manual_seed(0)
    batch = Batch.of(
        mask=(torch.arange(width) >= 16).expand(rows, width),
        reward=torch.rand(rows, generator=random).tolist(),
        group=[i // size for i in range(rows)],
        tokens=torch.randint(4, policy.vocab_size, (rows, width), generator=random),
        lengths=[width] * rows,
    )
    options = objectives.get("rloo").resolve("rloo", config.objective.options)

    def step() -> None:
        learner.gradient(batch, "rloo", options, lambda: None)
        learner.move(1e-6)

    return step


def head(vocabulary: int) -> Work:
    """Log-probs of 512 positions of width 128, forward and backward."""
    from agro.models.logprobs import Outputs, token_streams
    from agro.models.tiles import Head

    random = torch.Generator().manual_seed(0)
    hidden = torch.randn((1, 513, 128), generator=random).requires_grad_()
    weight = torch.randn((vocabulary, 128), generator=random).mul_(0.05).requires_grad_()
    tokens = torch.randint(0, vocabulary, (1, 513), generator=random)
    mask = torch.arange(513)[None] > 0

    def step() -> None:
        token_streams(Outputs(hidden, Head(weight)), tokens, mask)["logp"][mask].sum().backward()
        hidden.grad = weight.grad = None

    return step


def decoding(policy: Any, batch: int, new: int) -> Work:
    """Responses of `new` tokens to prompts of 16, four to each."""
    from agro.config import SamplerConfig
    from agro.rollout.engines import Request
    from agro.rollout.engines.hf import HF

    engine, random = HF(policy), np.random.default_rng(0)
    prompts = random.integers(4, policy.vocab_size, (batch // 4, 16)).tolist()

    def decode() -> None:
        requests = deque(Request(i, prompts[i // 4], new) for i in range(batch))
        assert len(list(engine.decode(requests, SamplerConfig(batch=batch, max_new=new), 0))) == batch

    return decode


def draw(folder: Path, samples: int) -> Work:
    """A draw of 16 groups, and its record."""
    from agro.config import DataConfig
    from agro.store import At, DrawRule, Store
    from agro.types import Sample

    store = Store.open(folder / f"{samples}.db")
    store.append(Sample(f"p{i // 4}", f"r{i}", reward=float(i % 2), source="a") for i in range(samples))
    steps = iter(range(1, 1000))
    rule = DrawRule(16, DataConfig(), min_group=2)
    return lambda: store.draw(rule, At("r", next(steps), 0, 0))


def slopes(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> sizes, the work at each, and the expected exponents of time and memory (None: not measured)."""
    policy = policy_of(folder / "model")
    sequences, lengths, sizes = (8, 16, 32, 64), (64, 128, 256, 512), (2, 4, 8, 16)
    vocabularies, stores = (8192, 16_384, 32_768, 65_536), (2_000, 4_000, 8_000, 16_000)
    return {
        "sequences of 64 tokens": _of(sequences, lambda n: gradient(policy, n // 4, 4, 64), (1, 0)),
        "length, 4 sequences in a pass": _of(lengths, lambda n: gradient(policy, 1, 4, n, 2048), (1, 1)),
        "group size, 4 groups of 64 tokens": _of(sizes, lambda n: gradient(policy, 4, n, 64), (1, 0)),
        "vocabulary, log-probs of 512 positions": _of(vocabularies, head, (1, 1)),
        "sampling, batch": _of(sequences, lambda n: decoding(policy, n, 16), (1, None)),
        "sampling, new tokens": _of((16, 32, 64, 128), lambda n: decoding(policy, 16, n), (1, None)),
        "store, draw of 16 groups": _of(stores, lambda n: draw(folder, n), (0, None)),
    }


def _of(
    sizes: tuple[int, ...], make: Callable[[int], Work], expected: tuple[int, int | None]
) -> dict[str, Any]:
    return {"sizes": sizes, "make": make, "expected": expected}


def measured(work: Work) -> tuple[float, int]:
    """The smallest CPU seconds of some repeats, and bytes that the last one adds to the process at most."""
    work()
    seconds, added = [], 0
    for _ in range(REPEATS):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, began = memory("VmRSS"), time.process_time()
        work()
        seconds.append(time.process_time() - began)
        added = memory("VmHWM") - before
    return min(seconds), added


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def slope(sizes: tuple[int, ...], costs: list[float]) -> float:
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def slope_rows(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for name, case in slopes(folder).items():
        found = [measured(case["make"](size)) for size in case["sizes"]]
        seconds, added = [s for s, _ in found], [max(b, 4096) for _, b in found]
        time_exponent, memory_exponent = case["expected"]
        row = {
            "name": f"slope: {name}",
            "goal": time_exponent,
            "ratio": slope(case["sizes"], seconds),
            "ours": seconds,
            "peer": [],
            "sizes": case["sizes"],
            "memory": added,
            "memory_goal": memory_exponent,
            "memory_ratio": None if memory_exponent is None else slope(case["sizes"], added),
        }
        rows.append(row)
        print(f"{name}: {row['ratio']:.2f}, expected {row['goal']}; memory {row['memory_ratio']}", flush=True)
    return rows


def prediction_rows(name: str) -> list[dict[str, Any]]:
    """Time and memory of one case."""
    plan = predicted.in_a_process(name, "predict")
    [phase] = plan["phases"]
    run = predicted.in_a_process(name, "train")
    pairs = {
        "time": (sum(phase["step_seconds"].values()), run["cpu"]),
        "memory": (phase["peak"], run["peak"]),
    }
    rows = []
    for what, (guess, found) in pairs.items():
        row = {
            "name": f"{what}: {name}",
            "goal": 1.0,
            "ratio": guess / found,
            "ours": [guess],
            "peer": [found],
        }
        rows.append(row | {"parts": phase["step_seconds"], "run": run, "dry_run": plan["cpu_of_dry_run"]})
        print(f"{what}: {name}: {guess:.4g} predicted, {found:.4g} measured, {guess / found:.2f}", flush=True)
    return rows


def keep(rows: list[dict[str, Any]]) -> None:
    """Replace rows of the same names, and write results and tables."""
    known = recording.known(RESULTS)
    known |= {
        row["name"]: row | {"commit": recording.commit(), "machine": recording.machine_of_models()}
        for row in rows
    }
    recording.keep(RESULTS, known)
    table = tables(list(known.values()))
    (ROOT / "benchmarks/scaling/scaling.md").write_text(table)


def tables(rows: list[dict[str, Any]]) -> str:
    lines = ["| cost against | time | expected | memory | expected |", "|---|---|---|---|---|"]
    for row in rows:
        if row["name"].startswith("slope"):
            most = "–" if row["memory_ratio"] is None else f"{row['memory_ratio']:.2f} | {row['memory_goal']}"
            name = row["name"].removeprefix("slope: ")
            lines.append(f"| {name} | {row['ratio']:.2f} | {row['goal']} | {most.replace('–', '– | –')} |")
    lines += ["", "| case | predicted | measured | ratio |", "|---|---|---|---|"]
    for row in rows:
        unit, scale = ("GB", 1e-9) if row["name"].startswith("memory") else ("s", 1.0)
        if not row["name"].startswith("slope"):
            both = " | ".join(f"{scale * row[key][0]:.3g} {unit}" for key in ("ours", "peer"))
            lines.append(f"| {row['name']} | {both} | {row['ratio']:.2f} |")
    last = rows[-1]
    note = f"`python benchmarks/scaling/run.py`, commit {last['commit']}, {last['machine']}"
    return "\n".join([*lines, "", note, ""])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="+", default=["slopes", "predictions"])
    parser.add_argument("--cases", nargs="+", default=list(predicted.CASES), choices=list(predicted.CASES))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if "slopes" in asked.parts:
        with tempfile.TemporaryDirectory() as folder:
            keep(slope_rows(Path(folder)))
    if "predictions" in asked.parts:
        for name in asked.cases:
            if predicted.CASES[name]["model"] == "tiny" and not predicted.TINY.is_dir():
                print(f"{name}: skipped: {predicted.TINY} isn't there", flush=True)
                continue
            keep(prediction_rows(name))


if __name__ == "__main__":
    main()
