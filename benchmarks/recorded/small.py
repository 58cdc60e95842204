"""A run of a few thousand weights that each case changes, the files that it reads, and the list of cases."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from agro import RunConfig, Trainer
from agro.store import Store
from agro.types import Sample

HERE = Path(__file__).resolve().parent
DIGITS = "0123456789"

Values = dict[str, Any]
Case = Callable[[Path], Path]  # trains in a folder and returns the run's
CASES: dict[str, Case] = {}


def case(train: Case) -> Case:
    """List it under its name."""
    CASES[train.__name__.replace("_", "-")] = train
    return train


def prompts(path: Path, numbers: Iterable[int]) -> str:
    """A file of prompts such as `037>`, whose answer is the last digit."""
    lines = (json.dumps({"prompt": f"{i:03d}>", "answer": f"{i % 10}"}) + "\n" for i in numbers)
    path.write_text("".join(lines))
    return str(path)


def log(path: Path, groups: Iterable[int] = range(100, 110), size: int = 4, **fields: Any) -> str:
    """A store of texts and rewards alone, as of an imported log."""
    with Store.open(path) as store:
        store.append(
            Sample(
                f"{g}>",
                str((g + i) % 10) * (i % 3 + 1),
                **{"reward": (i * g % 4) / 3, "source": "someone", **fields},
            )
            for g in groups
            for i in range(size)
        )
    return str(path)


def reward(name: str) -> Values:
    return {"name": f"{HERE / 'reward.py'}:{name}"}


def small(folder: Path, **sections: Values) -> RunConfig:
    """Fresh AGRO with a model of a few thousand weights; each of `sections` changes values of its own.

    An objective is given whole.
    """
    new = {
        "alphabet": DIGITS + ">",
        "hidden": 16,
        "layers": 2,
        "heads": 2,
        "context": 16,
        "initializer_range": 0.2,
    }
    values: Values = {
        "policy": {"new": new},
        "data": {"prompts": prompts(folder / "prompts.jsonl", range(60))},
        "sampler": {"n": 3, "max_new": 3},
        "reward": reward("share"),
        "objective": {"name": "agro", "beta": 0.1},
        "train": {"steps": 8, "groups": 4, "micro_batch": 4, "lr": 1e-2, "checkpoint_every": 3},
    }
    for name, changes in sections.items():
        alone = name in ("objective", "phases", "reward")
        values[name] = changes if alone else {**values.get(name, {}), **changes}
    return RunConfig.of(values)


def from_store(store: str, **data: Any) -> Values:
    """The section [data] of a run that samples nothing."""
    return {"prompts": None, "store": store, "replay": 1.0, **data}


def run(folder: Path, **sections: Any) -> Path:
    return Trainer(small(folder, **sections), folder / "run").run()


def settings_alone(name: str) -> Case:
    """A case of cases.toml, where rewards are named by their function."""

    def train(folder: Path) -> Path:
        sections = tomllib.loads((HERE / "cases.toml").read_text(encoding="utf-8"))[name]
        if "reward" in sections:
            sections["reward"] |= reward(sections["reward"]["name"])
        return run(folder, **sections)

    return train


CASES |= {name: settings_alone(name) for name in tomllib.loads((HERE / "cases.toml").read_text("utf-8"))}


def base(folder: Path) -> str:
    """A model that a run of two steps has left."""
    (folder / "base").mkdir()
    return str(run(folder / "base", train={"steps": 2}) / "model")


def metrics(out: Path) -> list[Values]:
    """The lines of metrics.jsonl, without the times."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not is_time(k)} for line in lines]


def is_time(key: str) -> bool:
    return key.startswith("seconds") or key == "tokens_per_second"
