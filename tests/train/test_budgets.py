"""How many functions and files a value goes through in a tiny run: a reader has to read as many.

Budgets are what was reached. Lower them when a way becomes shorter; don't raise them. The goals (functions,
files): a sample 24, 10; a batch 40, 10; β 25; a run 700, 80.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny
from tracing import Trace, traced

from agro.config import RunConfig
from agro.train.loop import Loop
from agro.train.trainer import BaseTrainer
from agro.types import Batch, Sample

LOOKED_UP = (("objectives/table.py", "get"), ("objectives/core.py", "Objective.resolve"))
BETA = 0.0123456  # no other number of the run


def has_sample(value: Any, depth: int = 0) -> bool:
    """A sample, or a list or a record of samples."""
    if isinstance(value, Sample):
        return True
    if isinstance(value, (list, tuple)):
        return depth < 3 and any(has_sample(item, depth + 1) for item in value[:2])
    return depth < 2 and any(
        has_sample(getattr(value, name, None), depth + 1) for name in _fields(value, "sample", "samples")
    )


def has_batch(value: Any, depth: int = 0) -> bool:
    if isinstance(value, Batch):
        return True
    return depth < 2 and any(
        has_batch(getattr(value, name, None), depth + 1) for name in _fields(value, "batch")
    )


def has_beta(value: Any, depth: int = 0) -> bool:
    """β, or nested values with it."""
    if isinstance(value, Mapping):
        return depth < 2 and any(has_beta(item, depth + 1) for item in value.values())
    return isinstance(value, float) and value == BETA


def _fields(value: Any, *names: str) -> list[str]:
    if not is_dataclass(value) or isinstance(value, Batch):
        return []
    return [name for name in names if name in value.__dataclass_fields__]


def of_second_step(handles: Callable[[Any], bool], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    plain, traces = Loop._step, []

    def step(self: Loop, *args: Any) -> Any:
        with traced(handles) as trace:
            traces.append(trace)
            return plain(self, *args)

    monkeypatch.setattr(Loop, "_step", step)
    BaseTrainer(tiny(folder, train__steps=2), folder / "run").run()
    return traces[1]


@pytest.fixture(scope="module", autouse=True)
def _earlier_run(tmp_path_factory):
    """The first run of a process also loads what later ones have."""
    folder = tmp_path_factory.mktemp("earlier")
    BaseTrainer(tiny(folder, train__steps=1), folder / "run").run()


def run_of_two_steps(handles: Callable[[Any], bool] | None, folder: Path) -> Trace:
    values = tiny(folder, train__steps=2, objective__beta=BETA).model_dump(mode="json")
    with traced(handles) as trace:
        BaseTrainer(RunConfig.of(values), folder / "run").run()
    return trace


def check(trace: Trace, functions: int, files: int) -> None:
    assert len(trace.functions) <= functions, trace
    assert len(trace.files) <= files, trace


def test_a_fresh_sample(tmp_path, monkeypatch):
    trace = of_second_step(has_sample, tmp_path, monkeypatch)
    # One class makes the rows of all samples, also of one turn, and one guard looks at those of any engine.
    check(trace, functions=41, files=15)


def test_a_batch(tmp_path, monkeypatch):
    trace = of_second_step(has_batch, tmp_path, monkeypatch)
    check(trace, functions=58, files=14)


def test_beta(tmp_path):
    trace = run_of_two_steps(has_beta, tmp_path)
    check(trace, functions=60, files=20)


def test_a_run(tmp_path):
    trace = run_of_two_steps(None, tmp_path)
    check(trace, functions=681, files=84)  # what a step kept of its promise is measured


def test_a_configuration_is_validated_once(tmp_path):
    """That of the run, and of several phases each one."""
    values = tiny(tmp_path, train__steps=1).model_dump(mode="json")
    for phases, expected in ([], 1), ([{"name": "first"}, {"name": "second"}], 3):
        out = tmp_path / f"run {len(phases)}"
        with traced() as trace:
            BaseTrainer(RunConfig.of(values | {"phases": phases}), out).run()
        assert trace.functions["config/run.py", "RunConfig.of"] == expected


def test_an_objective_is_looked_up_once_a_phase_and_once_a_step(tmp_path):
    """A step passes its name to a learner, which may be on several ranks; problems of a run are of runs/."""
    trace = run_of_two_steps(None, tmp_path)
    found = {name: trace.functions[file, name] for file, name in LOOKED_UP}
    assert found == {"get": 1 + 2 + 1, "Objective.resolve": 1}
