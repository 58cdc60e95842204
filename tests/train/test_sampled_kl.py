"""KL from unscored responses to prompts of the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_consistency import total_logp
from tiny_runs import fill_store, metrics, tiny, weights, whole_and_resumed, write_prompts

from agro.api.reporting_trainer import Trainer
from agro.config import RunConfig
from agro.models.policy import Policy
from agro.rollout.rollout import embedded, load_rollout
from agro.store import Store, is_held_out
from agro.train.check import samples_kl
from agro.train.monitors.heldout import prompts_for_kl
from agro.train.phases import derive
from agro.types import Prompt, Sample, prompt_hash


def on_log(tmp_path: Path, groups: int = 8, **changes: Any) -> RunConfig:
    if not (tmp_path / "log.db").exists():
        fill_store(tmp_path / "log.db", groups=groups)
    return tiny(tmp_path, data={"store": str(tmp_path / "log.db"), "replay": 1.0}, **changes)


def test_it_is_the_mean_log_ratio_of_responses_to_prompts_of_the_store(tmp_path: Path) -> None:
    """The responses are sampled anew from the model that was saved, and scored by the models' own logits."""
    config = on_log(tmp_path, evaluate={"every": 3, "kl_samples": 10})
    folder = Trainer(config, tmp_path / "run").run()
    rows = metrics(folder)
    assert [m["step"] for m in rows if m["eval_kl_ref"] is not None] == [3, 6]
    start = Policy.load(config.policy, seed=derive(0, "weights"))
    now = Policy.load(RunConfig.of({"policy": {"model": str(folder / "model")}}).policy)
    with Store.open(config.data.store, read_only=True) as store:
        prompts = prompts_for_kl(config, store, "another", [], now.encoder)
    assert {p.text for p in prompts} == {f"{i}>" for i in range(100, 108)}
    asked = [prompts[i % 8] for i in range(10)]
    sampler = config.sampler.model_copy(update={"n": 1})
    rollout = load_rollout(now.encoder, embedded(now))
    samples = list(rollout.sample(asked, 1, sampler, seed=derive(0, "evaluate KL")))
    rho = np.array([total_logp(now, s) - total_logp(start, s) for s in samples])
    assert rows[-1]["eval_kl_ref"] == pytest.approx(rho.mean(), rel=1e-4)
    assert rows[-1]["eval_kl_ref_se"] == pytest.approx(rho.std(ddof=1) / 10**0.5, rel=1e-4)
    assert rows[-1]["kl_ref"] == rows[-1]["eval_kl_ref"]


def test_it_changes_nothing_of_the_training(tmp_path: Path) -> None:
    """Half of each step is sampled, so that a disturbed stream of random numbers would show."""
    fill_store(tmp_path / "log.db")
    mixed = {"data__store": str(tmp_path / "log.db"), "data__replay": 0.5, "data__roles": ["log"]}
    with_kl = Trainer(tiny(tmp_path, **mixed, evaluate={"every": 2}), tmp_path / "with").run()
    without = Trainer(tiny(tmp_path, **mixed, evaluate={"kl_samples": 0}), tmp_path / "without").run()
    assert [m["step"] for m in metrics(with_kl) if m["eval_kl_ref"] is not None] == [2, 4, 6]
    assert {m["eval_kl_ref"] for m in metrics(without)} == {None}
    assert weights(with_kl) == weights(without)


@pytest.mark.parametrize("replay", [0.5, 1.0])
def test_a_resumed_run_measures_the_same(tmp_path: Path, replay: float) -> None:
    """With replay 0.5 the run fills its own store, whose prompts it must not choose anew."""
    every = {"evaluate": {"every": 1, "kl_samples": 5}}

    def make(folder: Path) -> RunConfig:
        return on_log(folder, **every) if replay == 1 else tiny(folder, data__replay=replay, **every)

    whole, resumed = (metrics(run) for run in whole_and_resumed(make, tmp_path, 3))
    assert len(whole) == 6
    assert [m["eval_kl_ref"] for m in resumed] == [m["eval_kl_ref"] for m in whole]
    assert all(m["eval_kl_ref"] is not None for m in whole)


def test_the_prompts_are_held_out_ones_where_there_are_any(tmp_path: Path) -> None:
    config = on_log(tmp_path, groups=40)
    held = config.model_copy(update={"data": config.data.model_copy(update={"hold_out": 0.3})})
    policy = Policy.load(config.policy)
    with Store.open(config.data.store) as store:
        chosen = prompts_for_kl(held, store, "run", [], policy.encoder)
        expected = {f"{p}>" for p in range(100, 140) if is_held_out(prompt_hash(f"{p}>"), 0.3)}
        assert {p.text for p in chosen} == expected
        assert len(prompts_for_kl(config, store, "run", [], policy.encoder)) == 32


def test_prompts_of_the_run_itself_too_long_ones_and_episodes_are_not_chosen(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    policy = Policy.load(config.policy)
    fresh = [Prompt("7>", "a"), Prompt("8>", "b")]
    with Store.open(tmp_path / "s.db") as store:
        store.append([Sample("1>", "2", reward=1.0)], run="own")
        assert {p.text for p in prompts_for_kl(config, store, "own", fresh, policy.encoder)} == {"7>", "8>"}
        store.append(
            [
                Sample("3>", "2", reward=1.0),
                Sample("1" * 16, "2", reward=1.0),
                Sample("4>", "2", reward=1.0, episode="e"),
                Sample("5>", "2", reward=1.0, tokens=[1, 2], action=[False, True], context_tokens=[1]),
            ]
        )
        assert [p.text for p in prompts_for_kl(config, store, "own", fresh, policy.encoder)] == ["3>"]


def test_it_is_not_measured_where_it_can_not_be(tmp_path: Path) -> None:
    """Also without a reference, as in `sft`, and where no prompt leaves room."""
    assert samples_kl(on_log(tmp_path))
    held = write_prompts(tmp_path / "held.jsonl", range(60, 64))
    for section, changes in (
        ("data", {"eval_prompts": held}),
        ("data", {"replay": 0.0}),
        ("evaluate", {"kl": False}),
        ("evaluate", {"kl_samples": 0}),
        ("engine", {"kind": "server", "url": "http://localhost:1"}),
        ("source", {"kind": "elsewhere"}),
        ("environment", {"name": "tool"}),
    ):
        values = on_log(tmp_path).model_dump(mode="json")
        values[section] = {**(values[section] or {}), **changes}
        assert not samples_kl(RunConfig.of(values)), changes
    sft = on_log(tmp_path, objective={"name": "sft"}, train__steps=2)
    assert {m["eval_kl_ref"] for m in metrics(Trainer(sft, tmp_path / "sft").run())} == {None}


def test_another_model_as_reference_is_measured_before_the_first_step(tmp_path: Path) -> None:
    start = Trainer(on_log(tmp_path, train__steps=1), tmp_path / "start").run()
    policy = tiny(tmp_path).policy.model_dump(mode="json", exclude_none=True)
    policy |= {"reference": "model", "reference_model": str(start / "model")}
    config = on_log(tmp_path, policy=policy, train__steps=2)
    rows = metrics(Trainer(config, tmp_path / "run").run())
    assert [m["step"] for m in rows if m["eval_kl_ref"] is not None] == [0, 2]
    assert rows[0]["eval_kl_ref"] > 0
    assert rows[0]["kl_ref"] is None
