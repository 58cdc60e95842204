"""Cases of one phase: data, objectives, references, samplers."""

from __future__ import annotations

from pathlib import Path

from small import base, case, from_store, log, prompts, reward, run, small

from agro import Trainer
from agro.store import Pair, Store
from agro.types import Sample


@case
def fresh(folder: Path) -> Path:
    """Held-out prompts measured on the way; warm-up and a schedule of the learning rate."""
    return run(
        folder,
        data={"eval_prompts": prompts(folder / "held.jsonl", range(60, 70))},
        evaluate={"every": 2, "n": 2, "keep_best": True},
        train={"warmup": 2, "schedule": "cosine", "weight_decay": 0.01, "clip": 0.5},
    )


@case
def two_rewards(folder: Path) -> Path:
    parts = [{**reward("share"), "label": "share"}, {**reward("short"), "label": "short", "weight": 0.3}]
    return run(folder, reward={"functions": parts}, train={"micro_batch": None, "micro_tokens": 20})


@case
def replay(folder: Path) -> Path:
    """Half of each step's groups are of a log without tokens, the other half fresh."""
    return run(folder, data={"store": log(folder / "log.db"), "replay": 0.5})


@case
def log_only(folder: Path) -> Path:
    return run(folder, data=from_store(log(folder / "log.db", size=5), group_size=3))


@case
def left_out(folder: Path) -> Path:
    """Responses that are too long, in draws of any order."""
    data = from_store(log(folder / "log.db"), order="uniform")
    return run(folder, data=data, train={"max_length": 7, "gradient_checkpointing": True})


@case
def lora(folder: Path) -> Path:
    return run(folder, policy={"new": None, "model": base(folder), "lora": {"rank": 2}})


@case
def lora_going_on(folder: Path) -> Path:
    """From an adapter that there is; RUN/model is an adapter too."""
    model = base(folder)
    first = Trainer(
        small(folder, policy={"new": None, "model": model, "lora": {"rank": 2}}), folder / "first"
    ).run()
    adapter = {"start": str(first / "adapter"), "merge": False}
    return run(folder, policy={"new": None, "model": model, "lora": adapter})


def judged(path: Path) -> str:
    """Groups of four responses: of three pairs of them it is known which is the better one."""
    with Store.open(path) as store:
        for g in range(100, 112):
            digits = [g, g + 1, g + 2, g + 4]
            ids = store.append(Sample(f"{g}>", str(d % 10) * 3, reward=(g - d) / 4) for d in digits)
            store.add_pairs(
                [Pair(ids[0], ids[1], 4, 1), Pair(ids[2], ids[3], 3, 2), Pair(ids[0], ids[3], 5, 0)]
            )
    return str(path)


@case
def dpo(folder: Path) -> Path:
    data = from_store(judged(folder / "pairs.db"), group_size=3)
    return run(folder, data=data, objective={"name": "dpo", "beta": 0.3, "votes": "mean"})


@case
def pair_consistency(folder: Path) -> Path:
    data = from_store(judged(folder / "pairs.db"))
    return run(folder, data=data, objective={"name": "pair_consistency", "beta": 0.3, "gap": "reward"})


@case
def reference_model(folder: Path) -> Path:
    first = small(folder, train={"steps": 2, "seed": 1})
    other = Trainer(first, folder / "other").run() / "model"
    return run(
        folder,
        policy={"new": None, "model": base(folder), "reference": "model", "reference_model": str(other)},
    )


@case
def cache_reference(folder: Path) -> Path:
    """Each stored group is drawn several times."""
    data = {"store": log(folder / "log.db", range(100, 105)), "replay": 0.5}
    return run(folder, data=data, policy={"cache_reference": True})


@case
def held_out_groups(folder: Path) -> Path:
    """Groups of one source and role among others; several updates a batch."""
    store = log(folder / "log.db")
    log(folder / "log.db", range(100, 115), source="others")
    log(folder / "log.db", range(105, 120), role="expert")
    held = log(folder / "held.db", range(200, 206))
    with Store.open(folder / "held.db") as opened:
        opened.append(Sample("x>", "12", reward=float(i)) for i in range(2))
    data = from_store(store, eval_store=held, roles=["log"], sources=["someone"])
    return run(folder, data=data, train={"updates": 2}, evaluate={"every": 3})


@case
def max_age(folder: Path) -> Path:
    """Fresh groups, and those that the run itself has sampled not long ago."""
    log(folder / "store.db")
    data = {
        "store": str(folder / "store.db"),
        "replay": 0.5,
        "max_age": 6,
        "order": "uniform",
        "roles": ["policy"],
    }
    return run(folder, data=data, train={"steps": 10, "updates": 2})


@case
def stored_value(folder: Path) -> Path:
    values = log(folder / "values.db", size=6)
    stored = {"name": "squared_consistency", "beta": 0.1, "baseline": "stored", "scale": "square"}
    data = from_store(log(folder / "log.db"), group_size=1, value_store=values)
    return run(folder, data=data, objective=stored)
