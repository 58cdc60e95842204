"""`agro.train` with the real pandas and datasets."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import agro

pandas = pytest.importorskip("pandas", reason="needs pandas: make test-integrations")
datasets = pytest.importorskip("datasets", reason="needs datasets: make test-integrations")

EXAMPLE = Path(__file__).parents[2] / "examples/dataframe.py"
SMALL = {
    "policy__new": {"alphabet": "0123456789>", "hidden": 16, "layers": 1, "heads": 2, "context": 16},
    "sampler__max_new": 3,
    "sampler__n": 2,
    "train__groups": 2,
    "train__steps": 1,
}
ROWS = {"prompt": [f"{i}>" for i in range(4)], "answer": [1, 2, 3, 4]}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_example_learns(capsys) -> None:
    trained = runpy.run_path(str(EXAMPLE))["trained"]
    metrics = trained.metrics
    assert isinstance(metrics, pandas.DataFrame)
    assert metrics.reward_mean.iloc[-1] > metrics.reward_mean.iloc[1] + 0.5
    assert "reward_mean" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["frame", "dataset", "stream", "folder"])
def test_prompts_of_the_real_packages(kind) -> None:
    """Each row's columns reach the reward as they were."""
    frame = pandas.DataFrame(ROWS | {"day": pandas.date_range("2026-01-01", periods=4)})
    dataset = datasets.Dataset.from_pandas(frame)
    dataset.save_to_disk("saved")
    given = {"frame": frame, "dataset": dataset, "stream": dataset.to_iterable_dataset(), "folder": "saved"}
    seen = []

    def reward(prompts, completions, answer, day):
        seen.extend(zip(prompts, answer, [str(d)[:10] for d in day]))
        return [1.0] * len(completions)

    trained = agro.train(prompts=given[kind], reward=reward, beta=0.1, out="run", **SMALL)
    expected = {(f"{i}>", i + 1, f"2026-01-0{i + 1}") for i in range(4)}
    assert len(seen) == 4
    assert set(seen) <= expected
    assert trained.metrics.step.tolist() == [1]


def test_a_log_is_a_frame() -> None:
    rows = {"prompt": ["1>", "1>"], "response": ["0", "1"], "reward": [0.0, 1.0]}
    for given in (pandas.DataFrame(rows), datasets.Dataset.from_dict(rows)):
        out = type(given).__name__
        trained = agro.train(log=given, beta=0.1, out=out, **(SMALL | {"train__groups": 1}))
        assert sorted(s.reward for s in trained.store.samples()) == [0.0, 1.0]
