"""A run's store, exported and imported elsewhere, trains as the store itself does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rounding import rounding
from safetensors.torch import load_file
from tiny_runs import metrics, tiny
from typer.testing import CliRunner

from agro.api.reporting_trainer import Trainer
from agro.cli import app
from agro.store import Store


@pytest.mark.parametrize("ending", ["jsonl.gz", "parquet"])
def test_an_exported_store_trains_elsewhere_with_the_same_gradients(tmp_path: Path, ending: str) -> None:
    """The same samples are drawn at each step; rounding differs, since those of a run's own step are summed
    in the order of their numbers, and imported ones in that of their ids."""
    made = Trainer(tiny(tmp_path, train__steps=3), tmp_path / "made").run() / "store.db"
    file, imported = tmp_path / f"export.{ending}", tmp_path / "imported.db"
    for command in (["export", str(made), str(file)], ["import", str(file), "--store", str(imported)]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    rows, drawn, weights = [], [], []
    for name, path in (("here", made), ("elsewhere", imported)):
        log = {"data__store": str(path), "data__replay": 1.0, "train__steps": 3, "train__lr": 3e-3}
        trainer = Trainer(tiny(tmp_path, **log), tmp_path / name)
        run = trainer.run()
        rows.append([row for row in metrics(run) if row["step"]])
        weights.append(load_file(run / "model" / "model.safetensors"))
        with Store.open(path, read_only=True) as store:
            last = store._database.run("SELECT run FROM draws ORDER BY rowid DESC LIMIT 1")[0][0]
            drawn.append({(draw.step, draw.sample) for draw in store.draws.drawn(last)})
    assert drawn[0] == drawn[1]
    assert all(row["grad_norm"] > 0.1 for row in rows[0])
    for key in ("loss", "grad_norm", "reward_mean", "tokens"):
        here, elsewhere = ([row[key] for row in run] for run in rows)
        np.testing.assert_allclose(elsewhere, here, **rounding(here))
    torch.testing.assert_close(weights[1], weights[0], **rounding(*weights[0].values()))
