"""Cases of several phases, an environment and the demo among them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from small import DIGITS, HERE, case, log, reward, run

from agro import Trainer
from agro.store import Store
from agro.types import Sample

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from demo import configure


@case
def sft_then_grpo(folder: Path) -> Path:
    store = log(folder / "store.db", range(100, 140), size=1, reward=None, role="expert", source="teacher")
    grpo = {"name": "grpo", "ratio": "old", "beta": 0.05}
    phases = [
        {
            "name": "imitate",
            "objective": {"name": "sft"},
            "data": {"replay": 1.0, "roles": ["expert"]},
            "train": {"steps": 6, "groups": 8},
        },
        {"name": "grpo", "objective": grpo, "train": {"steps": 5, "updates": 3, "schedule": "linear"}},
    ]
    return run(folder, data={"store": store}, policy={"reference": "phase"}, phases=phases)


@case
def calculator(folder: Path) -> Path:
    """Texts of a teacher that calls it are imitated; then episodes, fresh and stored."""
    asked = [(f"{a}*{b}=", str(a * b)) for a in range(1, 10) for b in range(1, 10)]
    lines = (json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in asked[::2])
    (folder / "asked.jsonl").write_text("".join(lines))
    (folder / "held.jsonl").write_text(
        "".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in asked[1:20:2])
    )
    with Store.open(folder / "store.db") as store:
        store.append(
            Sample(p, f"[{p[:-1]}]({a}){a}", role="expert", source="teacher") for p, a in asked[21::2]
        )
    new = {
        "alphabet": DIGITS + "*=[]()?",
        "hidden": 32,
        "layers": 2,
        "heads": 2,
        "context": 32,
        "initializer_range": 0.2,
    }
    phases = [
        {
            "name": "imitate",
            "objective": {"name": "sft"},
            "data": {"replay": 1.0, "roles": ["expert"]},
            "train": {"steps": 40, "groups": 16},
        },
        {"name": "episodes", "train": {"steps": 4, "lr": 1e-3}},
        {"name": "mixed", "data": {"replay": 0.5, "roles": ["policy"]}, "train": {"steps": 4, "lr": 1e-3}},
    ]
    return run(
        folder,
        policy={"new": new, "reference": "phase"},
        environment={
            "name": str(HERE.parents[1] / "examples/environments/calculator.py") + ":Calculator",
            "max_turns": 3,
            "options": {"call": ["[", "]"], "result": "({})", "error": "?"},
        },
        data={
            "prompts": str(folder / "asked.jsonl"),
            "eval_prompts": str(folder / "held.jsonl"),
            "store": str(folder / "store.db"),
        },
        sampler={"n": 4, "max_new": 8},
        reward=reward("places"),
        train={"micro_batch": 8},
        phases=phases,
    )


@case
def demo(folder: Path) -> Path:
    """`make demo`; it takes a few minutes."""
    return Trainer(configure(folder / "run", 0), folder / "run").run()
