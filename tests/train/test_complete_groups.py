"""`data.complete_groups`: stored groups of one response, completed with fresh ones."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import before_step, metrics, tiny

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.store import Store
from agro.types import Sample

REWARD = {"name": "exact"}


def single_log(path: Path, prompts: int = 6) -> str:
    with Store.open(path) as store:
        store.append(
            Sample(f"{i}>", "11", reward=1.0, role="log", source="someone", meta={"answer": "11"})
            for i in range(prompts)
        )
    return str(path)


def test_each_stored_response_meets_fresh_ones_to_its_prompt(tmp_path):
    stored = {"store": single_log(tmp_path / "log.db"), "replay": 1.0, "roles": ["log"], "complete_groups": 3}
    config = tiny(tmp_path, data=stored, reward=REWARD, train__steps=2)
    seen: list[Counter[tuple[str, str]]] = []
    with before_step(lambda feed, valid: seen.append(Counter((s.prompt_id, s.role) for s in valid.samples))):
        run = Trainer(config, tmp_path / "run").run()
    for step in seen:
        assert sorted(step.values()) == [1, 1, 1, 1, 3, 3, 3, 3]  # train.groups = 4
        assert len({prompt_id for prompt_id, _ in step}) == 4
    with Store.open(tmp_path / "log.db", read_only=True) as store:
        fresh = [s for s in store.samples() if s.role == "policy"]
    assert len(fresh) == 2 * 4 * 3
    assert all(s.reward is not None and s.meta["answer"] == "11" for s in fresh)
    assert metrics(run)[-1]["grad_norm"] > 0


def last_digit_three_times(folder: Path) -> dict[str, str]:
    """80 prompts such as `07>`, whose answer is `777`. The log has one response to most; 60 % are right."""
    rng = random.Random(0)
    prompts = [f"{i:02d}>" for i in range(100)]
    rng.shuffle(prompts)
    held_out, trained = prompts[:20], prompts[20:]
    for name, part in (("prompts", trained), ("eval_prompts", held_out)):
        lines = (json.dumps({"prompt": p, "answer": p[1] * 3}) + "\n" for p in part)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    samples = []
    for i, prompt in enumerate(trained):
        answer = prompt[1] * 3
        for _ in range(2 if i % 4 == 0 else 1):
            text = answer if rng.random() < 0.6 else "".join(rng.choices("0123456789", k=3))
            reward, meta = float(text == answer), {"answer": answer}
            samples.append(Sample(prompt, text, reward=reward, role="log", source="someone", meta=meta))
    with Store.open(folder / "log.db") as store:
        store.append(samples)
    return {name: str(folder / f"{name}.jsonl") for name in ("prompts", "eval_prompts")}


@pytest.mark.nightly
def test_mixed_groups_learn_what_neither_the_log_nor_fresh_samples_teach(tmp_path):
    """A new model finds the answer once in 20,000 tries, and the log has few groups of two."""
    files = last_digit_three_times(tmp_path)
    log = {"store": str(tmp_path / "log.db"), "replay": 1.0, "roles": ["log"]}
    parts: dict[str, dict[str, Any]] = {"log": log, "fresh": {}, "mixed": {**log, "complete_groups": 3}}
    reward = {}
    for name, data in parts.items():
        values = {
            "policy": {
                "new": {"alphabet": "0123456789>", "hidden": 32, "layers": 2, "heads": 2, "context": 16}
            },
            "data": {**files, **data},
            "sampler": {"n": 4, "max_new": 4},
            "reward": REWARD,
            "objective": {"name": "agro", "beta": 0.05, "singletons": "drop"},
            "train": {"steps": 60, "groups": 16, "lr": 1e-2, "micro_batch": 80, "warmup": 5},
            "evaluate": {"n": 4},
        }
        run = Trainer(RunConfig.of(values), tmp_path / name).run()
        reward[name] = metrics(run)[-1]["eval_reward"]
    assert reward["mixed"] > 0.2 + max(reward["log"], reward["fresh"])
