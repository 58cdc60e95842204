"""Measurements, and runs of a few seconds: a new model of some hundred parameters repeats the last digit of
its prompt."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from agro import Trainer
from agro.config import RunConfig
from agro.config.recipes import get

DIGITS = "0123456789"
HERE = Path(__file__)
MODEL = {"alphabet": DIGITS + ">", "hidden": 16, "layers": 1, "heads": 2, "context": 16}


@dataclass(frozen=True)
class Row:
    """One measurement of a system: what its mechanism changes, and its bound."""

    row: str
    """the name of the system in systems.toml"""
    mechanism: str
    """what makes the data come about as in the paper: a setting, a recipe, an objective"""
    consequence: str
    """what is measured, with its unit"""
    value: float
    bound: float
    side: Literal["at most", "at least"]

    @property
    def holds(self) -> bool:
        """A value that isn't a number holds nothing."""
        return self.value <= self.bound if self.side == "at most" else self.value >= self.bound


DECLARED = tomllib.loads(HERE.with_name("measurements.toml").read_text("utf-8"))
RUNS: dict[str, dict[str, Any]] = tomllib.loads(HERE.with_name("runs.toml").read_text("utf-8"))
Measured = Iterable[float | tuple[float, str]]  # the values, and what is shown beside one


def rows_of(measure: Callable[[Path], Measured], folder: Path) -> Iterator[Row]:
    """What a function measures, beside what measurements.toml says of it; `folder` is for its runs."""
    declared = DECLARED[measure.__module__.rpartition(".")[2]][measure.__name__]
    scratch = folder / measure.__name__
    scratch.mkdir(parents=True, exist_ok=True)
    for about, found in zip(declared, measure(scratch), strict=True):
        value, shown = found if isinstance(found, tuple) else (found, "")
        side: Literal["at most", "at least"] = "at most" if "at_most" in about else "at least"
        bound, what = about[side.replace(" ", "_")], about["what"].format(shown)
        yield Row(about["system"], about["setting"], what, value, bound, side)


def measured(measures: Iterable[Callable[[Path], Measured]], folder: Path) -> Iterator[Row]:
    """All of a module."""
    for measure in measures:
        yield from rows_of(measure, folder)


def digits(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The share of three characters that are the answer."""
    return [sum(c == a for c in text) / 3 for text, a in zip(completions, answer, strict=True)]


def low(completions: list[str], **_: Any) -> list[float]:
    """The share of three characters that are digits below 5: easily learned."""
    return [sum(c in "01234" for c in text) / 3 for text in completions]


def written(path: Path, records: Iterable[Mapping[str, str]]) -> str:
    """Writes them as JSON Lines; the file's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def prompts(path: Path, numbers: range) -> str:
    return written(path, ({"prompt": f"{i:03d}>", "answer": f"{i % 10}"} for i in numbers))


def config(folder: Path, **changes: Any) -> RunConfig:
    """`changes`: dotted keys with __ for the dot."""
    values: dict[str, Any] = {
        "policy": {"new": dict(MODEL)},
        "data": {"prompts": prompts(folder / "prompts.jsonl", range(60))},
        "sampler": {"n": 4, "max_new": 3},
        "reward": {"name": f"{HERE}:digits"},
        "objective": {"name": "agro", "beta": 0.1},
        "train": {"steps": 30, "groups": 8, "micro_batch": 64, "lr": 1e-2, "checkpoint_every": 1000},
    }
    return RunConfig.of(changed(values, changes))


def of_recipe(name: str, folder: Path, **changes: Any) -> RunConfig:
    """A recipe as it is, with the tiny model, its prompts and reward, and a rate for its size."""
    small = config(folder).model_dump(mode="json", exclude_unset=True)
    values: dict[str, Any] = tomllib.loads(get(name).text)
    values["reward"] = small["reward"]
    for section in ("policy", "train", "data", "sampler"):
        kept = {"steps", "updates", "value_lr"} if section == "train" else {"n"}
        new = {key: value for key, value in small[section].items() if key not in kept}
        values[section] = {**values.get(section, {}), **new}
    return RunConfig.of(changed(values, {"train__micro_tokens": None, **changes}))


def changed(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        *sections, last = key.split("__")
        at = values
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = value
    return values


def train(settings: RunConfig, run: Path) -> Path:
    """The folder of the run."""
    torch.set_num_threads(1)
    return Trainer(settings, run).run()


def metrics(run: Path) -> list[dict[str, Any]]:
    """Of each step, without the measurement before the first."""
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["step"]]


def column(run: Path, name: str) -> NDArray[np.float64]:
    """A metric of each step, NaN where it is unknown; of the objective's own too."""
    found = [{**line.get("objective", {}), **line}.get(name) for line in metrics(run)]
    return np.array([np.nan if value is None else value for value in found], dtype=np.float64)


def weights(run: Path) -> Tensor:
    """All parameters of the trained model, as one vector."""
    return torch.cat([w.flatten() for w in load_file(run / "model" / "model.safetensors").values()])
