"""An engine of the user's own, by the name of its class: examples/plugins/engine.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import tiny

from agro.api.reporting_trainer import Trainer
from agro.errors import Refused
from agro.store import Store
from agro.train.check import check_config

ENGINE = f"{Path(__file__).parents[2]}/examples/plugins/engine.py:Generate"


def test_a_run_samples_with_it_and_publishes_weights_to_it(tmp_path: Path) -> None:
    config = tiny(tmp_path, engine__kind=ENGINE, train__steps=2)
    run = Trainer(config, tmp_path / "run").run()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    errors = [row["logp_diff_max"] for row in rows if row.get("logp_diff_max") is not None]
    assert len(errors) == 2
    assert max(errors) < 1e-4  # nats a token between its log-probs and the trainer's
    with Store.open(run / "store.db", read_only=True) as store:
        assert {sample.version for sample in store.samples()} == {0, 1}


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            "vlm",
            r"engine\.kind: expected hf, vllm, server, module:NAME .*; did you mean vllm\?, got 'vlm'",
        ),
        ("json:dumps", r"expected a class as agro\.rollout\.engines\.Engine, .* without decode, load"),
        ("none.py:X", r"engine\.kind: there is no file .*none\.py"),
    ],
)
def test_what_is_no_engine_is_refused(engine: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=message):
        check_config(tiny(tmp_path, engine__kind=engine))


def test_settings_that_it_doesn_t_declare_and_options_that_it_doesn_t_take(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"train\.weights_average"):
        check_config(tiny(tmp_path, engine__kind=ENGINE, train__weights_average=0.9))
    config = tiny(tmp_path, engine__kind=ENGINE, engine__options={"dtyp": "float32"})
    with pytest.raises(Refused, match=r"engine\.options: .* the options dtyp: .*unexpected keyword"):
        Trainer(config, tmp_path / "run").run()
