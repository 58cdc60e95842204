"""An engine of the user's own, by the name of its class: examples/plugins/engine.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import tiny

from agro.api.reporting_trainer import Trainer
from agro.errors import Refused
from agro.models.newmodel import new_model
from agro.store import Store
from agro.train.check import check_config

ENGINE = f"{Path(__file__).parents[2]}/examples/plugins/engine.py:Generate"


@pytest.mark.parametrize("lora", [False, True])
def test_a_run_samples_with_it_and_publishes_weights_to_it(lora: bool, tmp_path: Path) -> None:
    """Of a policy with an adapter it gets merged weights."""
    config = tiny(tmp_path, engine__kind=ENGINE, train__steps=2)
    if lora:
        new_model(tmp_path / "model", config.policy.new, 0)
        policy = {"model": str(tmp_path / "model"), "lora": {"rank": 2}}
        config = tiny(tmp_path, policy=policy, engine__kind=ENGINE, train__steps=2)
    run = Trainer(config, tmp_path / "run").run()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    errors = [row["logp_diff_max"] for row in rows if row.get("logp_diff_max") is not None]
    assert len(errors) == 2
    assert max(errors) < 1e-4  # nats a token between its log-probs and the trainer's
    with Store.open(run / "store.db", read_only=True) as store:
        assert {sample.version for sample in store.samples()} == {0, 1}


def test_settings_that_it_doesn_t_declare_and_options_that_it_doesn_t_take(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"train\.weights_average"):
        check_config(tiny(tmp_path, engine__kind=ENGINE, train__weights_average=0.9))
    config = tiny(tmp_path, engine__kind=ENGINE, engine__options={"dtyp": "float32"})
    with pytest.raises(Refused, match=r"engine\.options: .* the options dtyp: .*unexpected keyword"):
        Trainer(config, tmp_path / "run").run()


WRONG = """
from collections import deque
from dataclasses import replace
import sys; sys.path.insert(0, {folder!r})
from engine import Generate

class Wrong(Generate):
    def decode(self, waiting, sampler, seed):
        for done in super().decode(waiting, sampler, seed):
            yield replace(done, **{change})
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{'tokens': done.tokens[:0], 'logp': done.logp[:0]}", "response 0: expected 1 to 3 tokens, got 0"),
        ("{'logp': done.logp[1:]}", r"expected a log-prob for each of \d tokens, got an array"),
        ("{'tokens': done.tokens + 99}", r"expected ids from 0 to \d+, got \d+ to \d+"),
        ("{'logp': 1 - done.logp}", "expected log-probs of at most 0, got"),
    ],
)
def test_what_it_says_wrong_is_refused(change: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(WRONG.replace("{folder!r}", repr(str(Path(ENGINE).parent))).replace("{change}", change))
    with pytest.raises(Refused, match=f"engine Wrong: .*{message}"):
        Trainer(tiny(tmp_path, engine__kind=f"{file}:Wrong"), tmp_path / "run").run()


def test_changed_code_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(Path(ENGINE.partition(":")[0]).read_text())
    config = tiny(tmp_path, engine__kind=f"{file}:Generate", train__steps=2)
    Trainer(config, tmp_path / "run").run()
    file.write_text(file.read_text() + "\nX = 1\n")
    with pytest.raises(Refused, match=r"engine\.kind"):
        Trainer(config, tmp_path / "run", resume=True).run()
