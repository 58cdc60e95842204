"""Seconds of each step of TRL's RLOO on sums of two numbers, for benchmarks/gpu.py; run by a Python with TRL.

python benchmarks/gpu_trl.py --model NAME --device cuda --steps 30
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import RLOOConfig, RLOOTrainer


class Clock(TrainerCallback):
    """When each step began."""

    def __init__(self) -> None:
        self.began: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began.append(time.perf_counter())


def is_sum(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(a in completion.split()) for a, completion in zip(answer, completions, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=30)
    asked = parser.parse_args()
    on_cpu = asked.device == "cpu"
    sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 60) for b in range(10, 30)]
    settings = RLOOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=asked.steps + 1,
        per_device_train_batch_size=16 if on_cpu else 128,
        num_generations=8,
        max_completion_length=4 if on_cpu else 32,
        beta=0.02,
        learning_rate=1e-5,
        use_cpu=on_cpu,
        bf16=not on_cpu,
        save_strategy="no",
        report_to=[],
    )
    clock = Clock()
    RLOOTrainer(
        model=asked.model,
        reward_funcs=is_sum,
        args=settings,
        train_dataset=Dataset.from_list(sums),
        callbacks=[clock],
    ).train()
    print(json.dumps([after - before for before, after in zip(clock.began, clock.began[1:], strict=False)]))


if __name__ == "__main__":
    main()
