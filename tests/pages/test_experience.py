"""What the page says of the material: windows, sources, ages, and stores that can't be read."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from writing import write_rows

from agro.pages.run.experience import RunExperience, begin_and_end, source_of
from agro.pages.run.figures import FIRST, MUTED, histogram
from agro.pages.run.page import material
from agro.runs.rundata import RunData, load_run
from agro.store import Draw, Store
from agro.types import Sample

RUN = "0123456789abcdef"  # of the made-up configuration
STEPS = 20


@pytest.fixture
def run(bare_folder: Path) -> RunData:
    """20 steps in two phases of 10; each draws two fresh responses, and from step 11 on three of a log."""
    rows = [{"step": i, "phase": "sft" if i <= 10 else "onpolicy", "version": i} for i in range(1, STEPS + 1)]
    write_rows(bare_folder / "metrics.jsonl", rows)
    with Store.open(bare_folder / "store.db") as store, store.transaction():
        log = store.append(
            Sample("q", str(i), reward=float(i), source="file:log", role="log") for i in range(3)
        )
        for step in range(1, STEPS + 2):  # one more than was logged: the run was killed after it had drawn
            fresh = []
            for length in (step, 2 * step):
                spoken = {"tokens": np.arange(length + 1), "action": np.arange(length + 1) > 0}
                fresh.append(Sample(f"p{step}", "r", reward=step / 10, version=step - 1, **spoken))
            ids = store.append(fresh, run=RUN, step=step)
            store.draws.record(RUN, step, ids + (log if step > 10 else []))
    return load_run(bare_folder)


def test_draws_of_steps_that_were_not_logged_are_left_out(run: RunData) -> None:
    found = RunExperience.of(run)
    assert len(found.draws) == 20 * 2 + 10 * 3


def test_begin_and_end_are_tenths_of_the_steps_that_know_the_value(run: RunData) -> None:
    """Two of 20 steps.

    First rewards 0.1, 0.1, 0.2, 0.2; last 1.9, 1.9, 2.0, 2.0 and twice 0, 1, 2 of the log.
    """
    found = RunExperience.of(run)
    windows = begin_and_end(found.column("step"), found.column("reward"))
    assert windows is not None
    begin, end = windows
    assert (begin.start, begin.stop, end.start, end.stop) == (1, 2, 19, 20)
    assert begin.values.tolist() == [0.1, 0.1, 0.2, 0.2]
    assert sorted(end.values.tolist()) == [0, 0, 1, 1, 1.9, 1.9, 2, 2, 2, 2]
    lengths = begin_and_end(found.column("step"), found.column("length"))
    assert lengths is not None
    assert lengths[1].values.tolist() == [19, 38, 20, 40]  # the log has no tokens
    assert begin_and_end(found.column("step"), np.full(len(found.column("step")), math.nan)) is None
    late = np.where(found.column("step") > 15, found.column("reward"), math.nan)
    windows = begin_and_end(found.column("step"), late)
    assert windows is not None
    assert (windows[0].start, windows[0].stop) == (16, 16)


def test_the_table_of_sources(run: RunData) -> None:
    rows = material(run, RunExperience.of(run))["sources"]
    names = ["fresh samples", "file:log", "fresh samples"]  # by phase, the most frequent first
    assert [row["source"] for row in rows] == names
    log = rows[1]
    assert (log["drawn"], log["share"], log["distinct"], log["reward"]) == (30, 0.6, 3, 1.0)
    assert (log["staleness"], log["stalest"]) == (None, None)
    assert (rows[0]["staleness"], rows[0]["stalest"]) == (0.0, 0)


def test_sources_have_names() -> None:
    def named(role: str, source: str, is_own: bool = False, staleness: int | None = None) -> Draw:
        return Draw(3, 1, None, role, source, is_own=is_own, staleness=staleness, length=None)

    assert source_of(named("policy", "m", is_own=True, staleness=0)) == "fresh samples"
    for staleness in (2, None):
        assert source_of(named("policy", "m", True, staleness)) == "this run's earlier samples"
    assert source_of(named("expert", "")) == "expert"
    draws = [named("log", f"s{i}") for i in range(7)]
    found = RunExperience(draws + draws[3:6])
    assert sorted(set(found.sources)) == ["3 other sources", "s0", "s3", "s4", "s5"]


def test_a_histogram_is_of_shares() -> None:
    """A share is of its own window."""
    axes = histogram(np.array([0.0, 0.0, 0.0, 1.0]), np.array([1.0]), "reward").axes[0]
    heights = {p.get_edgecolor(): p.get_data().values for p in axes.patches if not p.get_fill()}
    ends = {c: (heights[to_rgba(c)][0], heights[to_rgba(c)][-1]) for c in (MUTED, FIRST)}
    assert ends == {MUTED: (0.75, 0.25), FIRST: (0.0, 1.0)}
    axes = histogram(np.arange(100.0), np.arange(50.0), "reward").axes[0]
    shares = [p.get_data().values.sum() for p in axes.patches]
    assert shares == pytest.approx([1, 1, 1, 1])
    axes = histogram(np.zeros(5), np.zeros(3), "reward").axes[0]
    assert axes.get_xlim()[0] < axes.get_xlim()[1]


@pytest.mark.parametrize("what", ["gone", "text", "newer"])
def test_a_store_that_cannot_be_read_is_said_and_hinders_nothing(bare_folder: Path, what: str) -> None:
    path = bare_folder / "store.db"
    said = "There is no store at"
    if what == "text":
        path.write_text("something else is here now")
        said = "not a store"
    elif what == "newer":
        Store.open(path).close()
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA user_version = 99")
        connection.close()
        said = "another version of agro wrote it"
    found = RunExperience.of(load_run(bare_folder))
    assert said in found.problem
    assert said in material(load_run(bare_folder), found)["problem"]
