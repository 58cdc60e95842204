"""reproductions/offline: its reward, its configurations, and short runs from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agro.config import RunConfig
from reproductions.offline import logs, run
from reproductions.offline.reward import right_sum
from reproductions.offline.run import METHODS, NEAR, RATES, RECIPE, Row

IMITATION = "sft on the right responses"
needs_data = pytest.mark.skipif(
    not logs.LOG.exists(), reason=f"{logs.LOG} isn't there: the shared folder holds the log and its model"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    return logs.prepare(tmp_path_factory.mktemp("offline"))


def measured(method: str, seed: int, end: float, *changes: str) -> dict[str, Any]:
    ends = {"accuracy": [0.3, end], "accuracy_se": [0.01, 0.01], "kl_ref": [0.0, 1.0]}
    return {"section": "methods", "method": method, "seed": seed, "changes": [*changes], **ends}


def test_the_reward_looks_at_what_follows_the_last_sign() -> None:
    texts = ["1+2=3#3", "1+2=4#4", "3", "#4#3", "3#"]
    assert right_sum(["1+2="] * 5, texts, ["3"] * 5) == [1.0, 0.0, 0.0, 1.0, 0.0]


def test_further_seeds_take_the_best_trial() -> None:
    """Of each method that ends near the recipe, which has no trials."""
    ends = [measured(RECIPE, 0, 0.7), measured("GRPO", 0, 0.5, "a=1"), measured("GRPO", 0, 0.6, "a=2")]
    ends.append(measured(IMITATION, 0, 0.7 - NEAR - 0.01, "a=1"))
    assert run.further(ends, 5) == [Row("methods", "GRPO", seed, ("a=2",)) for seed in (1, 2)]
    assert run.further(ends, 1) == []


def test_recorded_runs_count_as_complete(tmp_path) -> None:
    run.restore(tmp_path)
    recorded = run.recorded()
    assert run.complete(Row.of(recorded[0]), tmp_path, []) == recorded[0]


def test_the_figure_shows_the_settings_that_were_continued() -> None:
    lucky = measured("GRPO", 0, 0.9, "a=1")
    continued = [measured("GRPO", seed, 0.6, "a=2") for seed in range(3)]
    assert run.best_of([lucky, *continued]) == {"GRPO": continued}


@needs_data
@pytest.mark.parametrize("method", METHODS["methods"])
def test_every_method_takes_an_update(files, tmp_path, method) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(files["held_out"].read_text().splitlines(keepends=True)[:8]))
    here = {**files, "held_out": few}
    config = run.configure(Row("methods", method), here, ["train.groups=2", "train.checkpoint_every=1"])
    values = config.model_dump()
    values["train"]["steps"] = 1
    for phase in values["phases"]:
        phase["train"]["steps"] = 1
    found = run.harness.train(RunConfig.of(values), tmp_path / "run")["metrics"]
    assert found[-1]["step"] == max(1, len(config.phases))
    assert found[-1]["grad_norm"] > 0


@needs_data
def test_runs_a_section_and_writes_the_result(files, tmp_path, capsys) -> None:
    for path in files.values():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    few = tmp_path / "held_out.jsonl"
    few.write_text("".join(few.read_text().splitlines(keepends=True)[:8]))
    few_steps = ["train.steps=2", "train.groups=2", "evaluate.every=2", "train.schedule=constant"]
    run.main(["--only", "fresh", "--seeds", "1", "--out", str(tmp_path), *few_steps])
    runs = json.loads((tmp_path / "result.json").read_text())["runs"]
    assert [r["method"] for r in runs[::2]] == list(METHODS["fresh"])
    assert all(r["step"] == [0, 2] for r in runs)
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("fresh, fresh, RLOO")]) == 2


@needs_data
def test_methods_differ_in_what_they_say_they_do(files) -> None:
    recipe = run.configure(Row("methods", RECIPE), files)
    plain = run.configure(Row("methods", "agro without the weight, β = 0.1"), files)
    imitation = run.configure(Row("methods", IMITATION), files, [f"train.lr={RATES[0]:g}"])
    assert (recipe.objective.options["weight"], recipe.data.min_reward) == ("reference", None)
    assert recipe.train.step_kl == 0.005
    assert plain.objective.options == {"beta": 0.1}
    assert plain.train == recipe.train.model_copy(update={"gain_ratio": None, "step_kl": None})
    assert (imitation.objective.name, imitation.data.min_reward) == ("sft", 1.0)
    assert imitation.train.lr == RATES[0]
