"""Whether everything is there: imports, versions, the device, its rates, an update of 25 million weights."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import torch

from benchmarks.on_gpu.common import Asked, Results, measured, peak_gib, rate_of, seconds

PACKAGES = tomllib.loads(Path(__file__).with_name("packages.toml").read_text("utf-8"))


def imports() -> dict[str, Any]:
    missing = {}
    for module in PACKAGES["modules"]:
        try:
            importlib.import_module(module)
        except ImportError as error:
            missing[module] = str(error)
    versions: dict[str, str | None] = {}
    for package in PACKAGES["listed"]:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    row = {"python": platform.python_version(), "versions": versions, "compiler": compiler}
    return {**row, "missing": missing, "within": not missing}


def counts(asked: Asked) -> dict[str, Any]:
    row: dict[str, Any] = {"cores": os.cpu_count(), "usable_cores": len(os.sched_getaffinity(0))}
    if asked.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(asked.device)
        row |= {
            "name": torch.cuda.get_device_name(asked.device),
            "capability": torch.cuda.get_device_capability(asked.device),
            "gib": total / 2**30,
            "free_gib": free / 2**30,
            "cuda": torch.version.cuda,
        }
    return row


def rates(asked: Asked) -> dict[str, Any]:
    """Operations a second of a product, bytes a second of a copy, seconds of a launch: what limits a part."""
    width, count = (256, 1 << 16) if asked.small else (8192, 1 << 28)
    a = torch.randn((width, width), device=asked.device, dtype=torch.bfloat16)
    bytes_ = torch.empty(count, dtype=torch.float32, device=asked.device)
    few = torch.zeros(8, device=asked.device)

    def launches() -> None:
        for _ in range(1000):
            few.add_(1.0)

    product = min(seconds(lambda: a @ a, asked.device, 5))
    copy = min(seconds(bytes_.clone, asked.device, 5))
    return {
        "product_a_second": 2 * width**3 / product,
        "known_rate": rate_of(asked.device),
        "copied_bytes_a_second": 2 * 4 * count / copy,
        "seconds_a_launch": min(seconds(launches, asked.device, 3)) / 1000,
    }


def update(asked: Asked) -> dict[str, Any]:
    """Seconds of an update of the model of the part `learns`, on lessons of its teacher."""
    import random

    from agro import objectives
    from agro.config import RunConfig
    from agro.train.learner import Local
    from benchmarks.on_gpu import learns, task

    size = learns.SMALL if asked.small else learns.FULL
    policy = learns.new_policy(size, asked)
    learner = Local(policy, None, print)
    learner.enter(RunConfig.of({"train": {"micro_tokens": learns.PASS}}), began=None, resumed=None)
    rng = random.Random(0)
    chosen = rng.choices(task.prompts([])[0], k=size.groups * learns.N)
    batch = learns.taught([(prompt, task.lesson(prompt, rng)) for prompt in chosen], policy)
    options = objectives.get("sft").resolve("sft", {})

    def step() -> None:
        learner.gradient(batch, "sft", options, lambda: None)
        learner.move(1e-5)

    row = measured(step, asked.device, 1 if asked.small else 5)
    row |= {"tokens": int(batch.mask.sum()), "gib": peak_gib(asked.device)}
    return row


def main() -> int:
    asked = Asked.parse()
    results = Results("start", asked)
    results.measure("imports", imports)
    if results.failed:
        return 1
    results.measure("machine", lambda: counts(asked))
    results.measure("rates", lambda: rates(asked))
    results.measure("update", lambda: update(asked))
    return int(results.failed)


if __name__ == "__main__":
    sys.exit(main())
