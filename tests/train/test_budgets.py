"""How many functions and files a value goes through in a tiny run: a reader has to read as many.

tools/budgets.toml has the numbers; lower them when a way becomes shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
from budgets import budgets
from tiny_runs import tiny
from tracing import Trace, traced

from agro.config import RunConfig
from agro.train.loop import Loop
from agro.train.trainer import BaseTrainer
from agro.types import Batch, Sample

LOOKED_UP = (("objectives/table.py", "get"), ("objectives/core.py", "Objective.resolve"))
BETA = 0.0123456  # no other number of the run


def holding(kind: type, *fields: str) -> Callable[[Any], bool]:
    """Whether a value is of this kind, a list of such, or a record that has one in these fields."""

    def holds(value: Any, depth: int = 0) -> bool:
        if isinstance(value, kind):
            return True
        if isinstance(value, (list, tuple)):
            return depth < 3 and any(holds(item, depth + 1) for item in value[:2])
        if depth >= 2 or not is_dataclass(value) or isinstance(value, Batch):
            return False
        inside = [name for name in fields if name in value.__dataclass_fields__]
        return any(holds(getattr(value, name, None), depth + 1) for name in inside)

    return holds


def has_beta(value: Any, depth: int = 0) -> bool:
    """β, or nested values with it."""
    if isinstance(value, Mapping):
        return depth < 2 and any(has_beta(item, depth + 1) for item in value.values())
    return isinstance(value, float) and value == BETA


def of_second_step(handles: Callable[[Any], bool], folder: Path) -> Trace:
    plain, traces = Loop._step, []

    def step(self: Loop, *args: Any) -> Any:
        with traced(handles) as trace:
            traces.append(trace)
            return plain(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_step", step)
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


@pytest.mark.parametrize(
    ("name", "trace_of", "handles"),
    [
        # One class makes the rows of all samples, also of one turn; one guard looks at those of any engine.
        ("sample", of_second_step, holding(Sample, "sample", "samples")),
        ("batch", of_second_step, holding(Batch, "batch")),
        ("beta", run_of_two_steps, has_beta),
        ("run", run_of_two_steps, None),
    ],
)
def test_functions_and_files_of(name: str, trace_of: Any, handles: Any, tmp_path: Path):
    trace, budget = trace_of(handles, tmp_path), budgets()
    assert len(trace.functions) <= budget[f"functions.{name}"]["now"], trace
    assert len(trace.files) <= budget[f"files.{name}"]["now"], trace


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
