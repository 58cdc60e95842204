"""`--fit` chooses settings with which a run fits into a time or into memory, from what a token was measured
to take, and leaves alone what is given."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from running import done, report_of
from tiny_runs import tiny, write_prompts

from agro.api import fit as fitting
from agro.api import plan as planning
from agro.api.fit import Limits, answers, fit
from agro.api.plan import Rates
from agro.config import RunConfig
from agro.errors import Refused
from agro.models.footprint import CONTEXT, SIZES, Footprint
from agro.models.policy import Policy

# A token of a pass takes 1 ms, one that is sampled 2 ms; nothing else takes time. A step of `tiny` has
# 4 groups of 3 responses of 3 tokens to prompts of 5 (BOS, "000>").
RATES = Rates(training=1e-3, scoring=0.0, sampling=2e-3, saved=1e3)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "measured", lambda *args: RATES)
    monkeypatch.setattr(fitting, "load_average", lambda: None)


def chosen(config: RunConfig, limits: Limits, given: tuple[str, ...] = ()) -> dict[str, Any]:
    return fit(config, limits, given).settings


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


def test_measurements_count(tmp_path: Path) -> None:
    """A measurement of 40 held-out prompts takes 240 ms, a step 128 ms. The run has one at the start, every
    tenth step and at the end: of 28 steps four, 0.96 + 3.584 s; of 29 one more step would be 4.672 s.

    Two measurements and five steps take 1.12 s.
    """
    data = {
        "prompts": write_prompts(tmp_path / "all.jsonl", range(100)),
        "hold_out": 0.6,
        "hold_out_most": 40,
    }
    config = tiny(tmp_path, data=data, evaluate__every=10, train__steps=100)
    assert chosen(config, Limits(seconds=4.6), ("train.lr", "train.groups", "sampler")) == {"train.steps": 28}
    with pytest.raises(Refused, match=r"one step takes 0.128 s and the measurements 0.48 s"):
        chosen(config, Limits(seconds=1.0), ("train.groups", "sampler"))


def test_a_time_that_is_not_known_is_refused(tmp_path: Path) -> None:
    served = {"reference": "model", "reference_model": "http://127.0.0.1:8000"}
    changes = {
        "a server samples": {"engine": {"kind": "server", "urls": ["http://localhost:1"], "model": "m"}},
        "a server has the reference": {f"policy__{key}": value for key, value in served.items()},
    }
    for reason, change in changes.items():
        with pytest.raises(Refused, match=f"the time of a step isn't known here, for {reason}: set train.st"):
            chosen(tiny(tmp_path, **change), Limits(seconds=10.0))


def test_an_adapter_is_chosen_for_many_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Policy.load(tiny(tmp_path).policy).save(tmp_path / "model")
    config = tiny(tmp_path, policy={"new": None, "model": str(tmp_path / "model")})
    assert "policy.lora.rank" not in chosen(config, Limits(bytes=1e12))
    monkeypatch.setattr(fitting, "parameters", lambda model: fitting.ADAPTED)
    assert chosen(config, Limits(bytes=1e12))["policy.lora.rank"] == 16
    assert "policy.lora.rank" not in chosen(config, Limits(bytes=1e12), ("policy.lora",))


def test_passes_go_by_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 responses of 8 tokens make a pass of 2,048. It computes 3 of each and 5 of each prompt of 8, 928,
    and keeps 1 kB of each, twice with the layer that goes backward: 1.9 MB, and half in one of 1,024."""

    def peak(of: Footprint, tokens: int, sequences: int, length: int) -> float:
        return sum(of.activations(tokens))

    monkeypatch.setattr(Footprint, "peak", peak)
    train = {"micro_tokens": 2048, "micro_batch": None, "groups": 60}
    config = tiny(tmp_path, train=train, sampler={"n": 8, "max_new": 3})
    assert chosen(config, Limits(bytes=1e6), ("train.lr",)) == {"train.micro_tokens": 1024}
    with pytest.raises(Refused, match=r"--fit 1 kB: the run needs .*train\.micro_tokens=256"):
        chosen(config, Limits(bytes=1e3))


@pytest.mark.parametrize(
    ("model", "limit", "rungs"), [("0.6B", 16e9, 1), ("4B", 24e9, 3), ("8B", 24e9, 3), ("14B", 80e9, 2)]
)
def test_one_card_gets_the_first_settings_with_enough_tokens(model: str, limit: float, rungs: int) -> None:
    """A hundred tokens more don't fit, and with the settings before it fewer than enough do."""
    choice = fitting.Choice(RunConfig.load("card24", [f"policy.model={model}"]))
    assert fitting.for_card(choice, limit) == ""
    config, n = choice.config, choice.config.sampler.n
    found, tokens = Footprint.of(config, has_reference=True), config.train.max_length
    assert tokens >= fitting.ENOUGH_TOKENS
    assert found.peak(tokens, n) <= limit < found.peak(tokens + 100, n)
    assert config.train.micro_tokens == tokens
    assert config.engine.memory == round((limit - found.resting) / limit, 3)
    before: dict[str, Any] = {}
    for rung in fitting.RUNGS[: rungs - 1]:
        before |= rung
    if before:
        earlier = Footprint.of(fitting.Choice(choice.start).with_settings(before), has_reference=True)
        assert earlier.longest(limit, n, 32_000) < fitting.ENOUGH_TOKENS
    assert (before | fitting.RUNGS[rungs - 1]).items() <= choice.settings.items()


def test_a_card_has_room_for_the_reference_where_a_phase_reads_it(monkeypatch) -> None:
    """Recipe card24's objective reads it; REINFORCE doesn't."""
    asked: list[bool] = []

    def of(config: RunConfig, *, has_reference: bool) -> Footprint:
        asked.append(has_reference)
        return found

    found = Footprint.of(RunConfig.load("card24", ["policy.model=0.6B"]), has_reference=True)
    monkeypatch.setattr(Footprint, "of", of)
    for changes in ([], ["objective={name='reinforce'}"]):
        choice = fitting.Choice(RunConfig.load("card24", ["policy.model=0.6B", *changes]))
        assert fitting.for_card(choice, 24e9) == ""
    assert asked == [True, False]


def test_what_is_given_for_one_card_stays() -> None:
    config = RunConfig.load("card24", ["policy.model=8B", "policy.lora.rank=64", "train.max_length=2000"])
    choice = fitting.Choice(config, {"policy.lora.rank", "train.max_length"})
    assert fitting.for_card(choice, 24e9) == ""
    assert (choice.config.policy.lora.rank, choice.config.train.max_length) == (64, 2000)
    assert choice.config.policy.quantize == "4bit"


def test_the_answers_are_words() -> None:
    found = answers(RunConfig.load("card24"), 24e9, ())
    assert [line.partition(":")[0] for line in found] == list(SIZES)
    assert re.match(r"8B: yes, \d,\d00 tokens, with policy\.dtype=bfloat16 policy\.lora\.rank=32 ", found[3])
    no, here = found[4].split("; sampling in the process that trains: ")
    assert re.match(r"14B: no, [\d.]+ GB short of 1,000 tokens: [\d.]+ GB for the trainer's weights and ", no)
    assert re.match(r"yes, \d,\d00 tokens, with engine\.kind=hf engine\.sleep=false ", here)
    [one] = answers(RunConfig.load("card24", ["policy.model=14B"]), 10e9, {"policy.model"})
    assert one.count(": no, ") == 2


def test_the_command_answers_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "card24", "policy.model=8B", "--fit", "24GB", "--dry-run"]
    said = done(*arguments).stdout
    assert said.count("\n") == 1
    assert said.startswith("8B: yes, ")
    assert report_of(*arguments) == [said.strip()]
    assert not list(tmp_path.iterdir())


def test_the_table_of_cards_is_what_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[2]
    runpy.run_path(str(root / "tools/docs/card_table.py"))["main"]()
    assert capsys.readouterr().out in (root / "docs/scaling.md").read_text(encoding="utf-8")


def test_a_model_with_weights_is_loaded_and_not_counted_alone(tmp_path: Path) -> None:
    Policy.load(tiny(tmp_path).policy).save(tmp_path / "model")
    assert answers(RunConfig.load("card24", [f"policy.model={tmp_path / 'model'}"]), 24e9, ()) == []
    config = tiny(tmp_path, policy={"new": None, "model": str(tmp_path / "model")}, engine={"kind": "vllm"})
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"sleep": True})})
    found = chosen(config, Limits(bytes=24e9), ("train.lr",))
    assert found["policy.dtype"] == "bfloat16"
    assert found["train.max_length"] == 16  # all of its context
    assert found["engine.memory"] == pytest.approx((24e9 - CONTEXT) / 24e9, abs=0.001)
    with pytest.raises(
        Refused, match=r"--fit 1 GB: .* GB short of .* What to do: a smaller model, or a larger"
    ):
        chosen(config, Limits(bytes=1e9))


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
