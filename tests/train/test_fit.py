"""`--fit` chooses settings with which a run fits into a time or into memory, from what a token was measured
to take, and leaves alone what is given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny

from agro.api.plan import fit as fitting
from agro.api.plan import plan as planning
from agro.api.plan.fit import Limits, fit
from agro.api.plan.measure import Rates, positions
from agro.config import RunConfig
from agro.config.override import merge
from agro.errors import Refused
from agro.models.footprint import activations
from agro.models.policy import Policy

# A token of a pass takes 1 ms, one that is sampled 2 ms; nothing else takes time. A step of `tiny` has
# 4 groups of 3 responses of 3 tokens to prompts of 5 (BOS, "000>").
RATES = Rates(each_pass=0.0, training=1e-3, scoring=0.0, sampling=2e-3, saved=1e3, update=0.0)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "measured", lambda *args: RATES)
    monkeypatch.setattr(fitting, "load_average", lambda: None)


def chosen(config: RunConfig, limits: Limits, given: tuple[str, ...] = ()) -> dict[str, Any]:
    def changed(settings: Mapping[str, Any]) -> RunConfig:
        values = config.model_dump()
        for key, value in settings.items():
            for name in reversed(key.split(".")):
                value = {name: value}
            values = merge(values, value)
        return RunConfig.of(values)

    return fit(config, limits, given, changed).settings


def test_steps_go_by_time(tmp_path: Path) -> None:
    """The run has no held-out prompts. 12 responses of 3 tokens are sampled in 72 ms, and 4 prompts of 5
    tokens and 36 of responses trained in 56 ms, where a prompt is read once: 128 ms a step, 78 in 10 s."""
    config = tiny(tmp_path, train__steps=1000)
    assert chosen(config, Limits(seconds=10.0)) == {"train.steps": 78, "train.lr": "auto"}
    assert chosen(config, Limits(seconds=10.0), ("train.lr", "sampler")) == {"train.steps": 78}
    assert chosen(config, Limits(seconds=1000.0)) == {"train.lr": "auto"}


def test_steps_get_smaller_where_too_few_fit(tmp_path: Path) -> None:
    """A step of 4 groups of 6 samples 72 tokens in 144 ms and trains 20 of prompts and 72 in 92: 42 in 10 s.

    One of 16 groups of 6 takes four times as long: 38 of them fit into 36 s, fewer than the 40 for which a
    step gets smaller, where it can.
    """
    train = {"steps": 1000, "groups": 16, "micro_batch": None}
    config = tiny(tmp_path, train=train, sampler={"n": 12, "max_new": 3})
    found = chosen(config, Limits(seconds=10.0), ("train.lr",))
    assert found == {"train.groups": 4, "sampler.n": 6, "train.steps": 42}
    kept = chosen(config, Limits(seconds=36.0), ("train.lr", "train.groups"))
    assert kept == {"sampler.n": 6, "train.steps": 38}
    with pytest.raises(Refused, match=r"--fit 0.1 s: one step takes 0.128 s"):
        chosen(tiny(tmp_path), Limits(seconds=0.1))


def test_an_adapter_is_chosen_for_many_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Policy.load(tiny(tmp_path).policy).save(tmp_path / "model")
    config = tiny(tmp_path, policy={"new": None, "model": str(tmp_path / "model")})
    assert "policy.lora.rank" not in chosen(config, Limits(bytes=1e12))
    monkeypatch.setattr(fitting, "_weights", lambda config: fitting.ADAPTED)
    assert chosen(config, Limits(bytes=1e12))["policy.lora.rank"] == 16
    assert "policy.lora.rank" not in chosen(config, Limits(bytes=1e12), ("policy.lora",))


def test_passes_go_by_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 responses of 8 tokens make a pass of 2,048. It computes 3 of each and 5 of each prompt of 8, 928,
    and keeps 1 kB of each, twice with the layer that goes backward: 1.9 MB, and half in one of 1,024."""

    def peak(policy: Policy, config: RunConfig, step: Any, rate: Rates, loaded: int | None) -> float:
        largest = max(positions(policy, rows) for rows in step.passes)
        return sum(activations(policy.model.config, rate.saved, largest, config.train, 4))

    monkeypatch.setattr(planning, "peak", peak)
    train = {"micro_tokens": 2048, "micro_batch": None, "groups": 60}
    config = tiny(tmp_path, train=train, sampler={"n": 8, "max_new": 3})
    assert chosen(config, Limits(bytes=1e6), ("train.lr",)) == {"train.micro_tokens": 1024}
    with pytest.raises(Refused, match=r"--fit 1 kB: the run needs .*train\.micro_tokens=256"):
        chosen(config, Limits(bytes=1e3))


@pytest.mark.parametrize(
    ("texts", "limits"),
    [
        ("30min", Limits(seconds=1800.0)),
        (["2h", "24GB"], Limits(seconds=7200.0, bytes=24e9)),
        ("1.5 h", Limits(seconds=5400.0)),
    ],
)
def test_limits_are_read(texts: str | list[str], limits: Limits) -> None:
    assert Limits.parse(texts) == limits


@pytest.mark.parametrize("texts", ["30", "0min", "fast", ["1h", "2h"]])
def test_other_limits_are_refused(texts: str | list[str]) -> None:
    with pytest.raises(Refused, match="expected a time or a size of memory"):
        Limits.parse(texts)


def test_a_run_of_several_phases_is_refused(tmp_path: Path) -> None:
    config = tiny(tmp_path, phases=[{"name": "a", "train": {"steps": 2}}])
    with pytest.raises(Refused, match="one phase"):
        chosen(config, Limits(seconds=10.0))
