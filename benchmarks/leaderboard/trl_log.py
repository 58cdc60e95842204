"""TRL's trainers on a log: `TRL_PYTHON trl_log.py JOB METHOD SEED LR OUT.json`. Needs TRL 1.16, not agro.

TRL's online trainers only know how to sample. So that they read a log, GRPO gets the logged responses by
`rollout_func`, and of RLOO the method that samples is overridden. TRL then takes the log as if it had
just been sampled: with one update a batch its importance ratio is 1. β = 0.1 was the best of 0, 0.01, 0.1
and 0.3 on the job sums.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

import torch
import trl
from clock import Clock, load_job
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

BETA = 0.1


class Log:
    """Logged responses by prompt, as tokens with the end token."""

    def __init__(self, file: Path, tokenizer: Any) -> None:
        self.responses: dict[str, list[list[int]]] = {}
        self.rewards: dict[str, list[float]] = {}
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            ends = [tokenizer.eos_token_id]
            ids = [tokenizer.encode(text, add_special_tokens=False) + ends for text in row["responses"]]
            self.responses[row["prompt"]] = ids
            self.rewards[row["prompt"]] = row["rewards"]

    def in_turn(self, prompts: list[str]) -> list[list[int]]:
        """TRL repeats each prompt once for each response, in a row: they are given out in turn."""
        turn: dict[str, int] = {}
        found = []
        for prompt in prompts:
            turn[prompt] = turn.get(prompt, -1) + 1
            found.append(list(self.responses[prompt][turn[prompt]]))
        return found

    def score(self, prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        """The logged reward of each logged response."""
        found = []
        for prompt, ids in zip(prompts, completion_ids, strict=True):
            found.append(self.rewards[prompt][self.responses[prompt].index(list(ids))])
        return found


class Measured(TrainerCallback):
    def __init__(self, clock: Clock, tokenizer: Any) -> None:
        self.clock, self.tokenizer = clock, tokenizer

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.clock.after(0, model, self.tokenizer)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.clock.after(state.global_step, model, self.tokenizer)


def main() -> None:
    folder, method, seed, rate, out = sys.argv[1:]
    torch.set_num_threads(1)
    job = load_job(Path(folder))
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    log = Log(Path(job["log"]), tokenizer)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = log.in_turn(prompts)
        prompt_ids = [tokenizer.encode(prompt) for prompt in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": [[0.0] * len(x) for x in ids]}

    class LoggedRLOO(trl.RLOOTrainer):  # type: ignore[name-defined,misc]
        def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any) -> list[list[int]]:
            return log.in_turn([tokenizer.decode(ids, skip_special_tokens=True) for ids in prompt_ids])

    ways: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "RLOO": (trl.RLOOConfig, LoggedRLOO, {}),
        "GRPO": (trl.GRPOConfig, trl.GRPOTrainer, {"rollout_func": rollout}),
    }
    config_class, trainer_class, more = ways[method]
    size = len(next(iter(log.responses.values())))
    batch = {"per_device_train_batch_size": job["groups"] * size, "gradient_accumulation_steps": 1}
    batch |= {"num_generations": size, "max_completion_length": job["max_new"], "num_iterations": 1}
    rates = {"learning_rate": float(rate), "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10}
    plain = {"bf16": False, "gradient_checkpointing": False, "model_init_kwargs": {"dtype": "float32"}}
    plain |= {"use_cpu": True, "dataloader_pin_memory": False, "weight_decay": 0.0, "max_grad_norm": 1.0}
    quiet = {"save_strategy": "no", "report_to": [], "logging_steps": 10**9, "disable_tqdm": True}
    run = {"output_dir": tempfile.mkdtemp(), "max_steps": job["updates"], "seed": int(seed)}
    config = config_class(temperature=1.0, beta=BETA, **run, **batch, **rates, **plain, **quiet)
    clock = Clock(job)
    trainer = trainer_class(
        model=job["model"],
        reward_funcs=log.score,
        args=config,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": list(log.responses)}),
        callbacks=[Measured(clock, tokenizer)],
        **more,
    )
    trainer.train()
    Path(out).write_text(json.dumps({**clock.result(), "version": f"TRL {trl.__version__}"}))


main()
