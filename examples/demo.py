"""`make demo`: a small new model learns to sort, first from a careless teacher, then from its own rewards.

The task is verifiable: a response is correct if it is the prompt's digits in rising order. The teacher
replaces each digit by a random one with probability 0.16, so the model that imitates it is correct about one
time in three. Phase `sft` imitates, `onpolicy` is AGRO on fresh samples, and `store` is AGRO on stored
samples only.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agro.config import RunConfig
from agro.errors import Refused

DIGITS = "0123456789"
LENGTH = 6
SLIP = 0.16  # probability that the teacher writes a digit at random
TRAIN, HELD_OUT, TAUGHT = 4000, 512, 16000

CONFIG: dict[str, Any] = {
    "policy": {
        "new": {"alphabet": DIGITS + ">", "hidden": 144, "layers": 5, "heads": 4, "context": 32},
        "reference": "phase",
    },
    "sampler": {"n": 8, "max_new": LENGTH + 2, "batch": 256},
    "reward": {"name": "exact"},
    "objective": {"name": "agro", "beta": 0.1},
    "train": {
        "groups": 16,
        "micro_batch": 128,
        "lr": 4e-4,
        "warmup": 5,
        "schedule": "linear",
        "checkpoint_every": 60,
    },
    "evaluate": {"every": 20},
    "phases": [
        {
            "name": "sft",
            "objective": {"name": "sft"},
            "data": {"replay": 1.0, "roles": ["expert"]},
            "train": {
                "steps": 240,
                "groups": 64,
                "lr": 2e-3,
                "warmup": 20,
                "schedule": "cosine",
                "adam_betas": [0.9, 0.99],
            },
            "evaluate": {"every": 60},
        },
        {"name": "onpolicy", "train": {"steps": 70}},
        {
            "name": "store",
            "objective": {"beta": 0.02, "weight": "reference"},
            "data": {"replay": 1.0, "roles": ["policy"]},
            "train": {"steps": 80, "lr": 1e-4},
        },
    ],
}


def prompts(count: int, rng: random.Random) -> list[str]:
    """Different prompts, such as `520731>`."""
    unique: dict[str, None] = {}
    while len(unique) < count:
        unique["".join(rng.choices(DIGITS, k=LENGTH)) + ">"] = None
    return list(unique)


def answer(prompt: str) -> str:
    return "".join(sorted(prompt[:-1]))


def careless(prompt: str, rng: random.Random) -> str:
    """The teacher's response."""
    return "".join(rng.choice(DIGITS) if rng.random() < SLIP else digit for digit in answer(prompt))


def prepare(run_folder: Path, seed: int) -> dict[str, str]:
    """Write training and held-out prompts, and store the teacher's responses to other prompts."""
    from agro.store import Store
    from agro.types import Sample

    rng = random.Random(seed)
    texts = prompts(TRAIN + HELD_OUT + TAUGHT, rng)
    parts = {"prompts": texts[:TRAIN], "eval_prompts": texts[TRAIN : TRAIN + HELD_OUT]}
    taught = texts[TRAIN + HELD_OUT :]
    folder = run_folder / "data"
    folder.mkdir(parents=True)
    for name, part in parts.items():
        lines = (json.dumps({"prompt": p, "answer": answer(p)}) + "\n" for p in part)
        (folder / f"{name}.jsonl").write_text("".join(lines))

    def lessons() -> Iterator[Sample]:
        for p in taught:
            yield Sample(
                p, careless(p, rng), role="expert", source="careless teacher", meta={"answer": answer(p)}
            )

    with Store.open(run_folder / "store.db") as store:
        store.append(lessons())
    return {name: str(folder / f"{name}.jsonl") for name in parts}


def configure(folder: Path, seed: int) -> RunConfig:
    """The demo's configuration, with data written to `folder`."""
    data = prepare(folder, seed)
    return RunConfig.of({**CONFIG, "data": data, "train": {**CONFIG["train"], "seed": seed}}, "demo")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python examples/demo.py", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.out.exists():
        if not (args.out / "config.json").exists() and any(args.out.iterdir()):
            sys.exit(f"{args.out}: expected a run of the demo or no such folder; give another --out")
        shutil.rmtree(args.out)
    from agro.api.reporting_trainer import Trainer

    try:
        folder = Trainer(configure(args.out, args.seed), args.out).run()
    except Refused as error:
        print(f"agro: {error}", file=sys.stderr)
        sys.exit(2)
    for name, reward, se in summary(folder):
        print(f"{name:>10}: held-out reward {reward:.3f} ± {se:.3f}")
    print(f"\nThe page with the figures: {folder / 'report.html'}")


def summary(folder: Path) -> list[tuple[str, float, float]]:
    """(phase, held-out reward at its end, standard error)."""
    ends = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        m = json.loads(line)
        if m["eval_reward"] is not None:
            ends[m["phase"] if m["step"] else "start"] = (m["eval_reward"], m["eval_reward_se"])
    return [(name, *value) for name, value in ends.items()]


if __name__ == "__main__":
    main()
