"""What an engine doesn't declare is refused, whatever its name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from tiny_runs import tiny

import agro
from agro.config import RunConfig, SamplerConfig, SourceConfig
from agro.errors import Refused
from agro.models.encoding import Encoder
from agro.models.policy import Policy
from agro.rollout import Rollout
from agro.rollout.engines.capabilities import CAPABILITIES, ENGINES, REQUIREMENTS, capabilities
from agro.rollout.engines.protocol import Capability
from agro.train import around
from agro.train.check import check_config, check_sharded, samples_kl
from agro.train.collate import recording
from agro.train.phases import Phase
from agro.types import Prompt


class Third:
    """An engine that doesn't say that it can do anything but decode."""


@pytest.fixture(params=["server", "third"])
def engine(request, monkeypatch) -> dict[str, str]:
    """[engine] of a server, and of an engine that is added later, in the server's place."""
    if request.param == "third":
        monkeypatch.setitem(ENGINES, "server", frozenset())
    return {"kind": "server", "url": "http://127.0.0.1:9"}


NEEDING: dict[str, Any] = {
    "train__weights_average": 0.9,
    "sampler__keep_sets": True,
    "sampler__skip_layers": 0.5,
    "source__kind": "elsewhere",
    "source__sync_every": 2,
    "source__sync_from": 2,
}


def test_each_requirement_is_tried_here() -> None:
    assert {key.replace("__", ".") for key in NEEDING} == {r.setting for r in REQUIREMENTS}
    assert set(CAPABILITIES) == set(get_args(Capability)) == capabilities("hf")


def test_the_trainer_s_process_can_do_what_collectors_cannot() -> None:
    every = set(around.SOURCE_CAPABILITIES)
    inline, elsewhere = RunConfig(), RunConfig(source=SourceConfig(kind="elsewhere"))
    assert every == set(get_args(around.SourceCapability)) == set(around.SOURCES["inline"]) | {"judges_pairs"}
    assert around.source_abilities(inline) == every - {"judges_pairs"}
    assert {"shares_engine", "samples_current_weights"}.isdisjoint(around.source_abilities(elsewhere))


@pytest.mark.parametrize("key", NEEDING)
def test_a_setting_is_refused_by_an_engine_that_does_not_declare_what_it_needs(
    tmp_path: Path, engine: dict[str, str], key: str
) -> None:
    setting = key.replace("__", ".")
    [need] = [r.needs for r in REQUIREMENTS if r.setting == setting]
    if need in capabilities("server"):
        check_config(tiny(tmp_path, **{key: NEEDING[key]}, engine=engine))
        return
    words = re.escape(f'{setting} and engine.kind = "server" exclude each other')
    with pytest.raises(Refused, match=words):
        check_config(tiny(tmp_path, **{key: NEEDING[key]}, engine=engine))
    check_config(tiny(tmp_path, engine=engine))
    check_config(tiny(tmp_path, **{key: NEEDING[key]}))
    phases = [{"name": "one"}, {"name": "two", **_nested(key)}]
    if key != "source__kind":  # which is one for the complete run
        with pytest.raises(Refused, match="phase two: " + words):
            check_config(tiny(tmp_path, phases=phases, engine=engine))


def _nested(key: str) -> dict[str, Any]:
    section, name = key.split("__")
    return {section: {name: NEEDING[key]}}


def test_what_is_chosen_by_what_the_engine_can(tmp_path: Path, engine: dict[str, str]) -> None:
    check_sharded(tiny(tmp_path, engine=engine))  # all engines serve ranks
    truncated = {"sampler__top_p": 0.8, "objective": {"name": "grpo"}, "engine": engine}
    with pytest.raises(Refused, match=r'top_p 0\.8: .*engine\.kind = "hf"'):
        check_config(tiny(tmp_path, **truncated))
    [run] = Phase.all(tiny(tmp_path, **truncated))
    assert not recording([run], run).sampler.records_kept
    stored = {"data": {"store": "s.db", "replay": 1.0}}
    assert samples_kl(tiny(tmp_path, **stored))
    assert not samples_kl(tiny(tmp_path, **stored, engine=engine))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Encoder:
    return Policy.load(tiny(tmp_path_factory.mktemp("tiny")).policy, seed=0).encoder


@pytest.mark.parametrize("changes", [{"keep_sets": True}, {"skip_layers": 0.5}])
def test_a_rollout_refuses_it_too(encoder: Encoder, changes: dict[str, Any]) -> None:
    [name] = changes
    with pytest.raises(Refused, match=f"sampler.{name} and the engine Third exclude each other"):
        Rollout(encoder, Third()).sample([Prompt("1>")], 1, SamplerConfig(**changes))


def test_no_code_asks_for_the_name_of_an_engine() -> None:
    """Except for the one place that makes it."""
    asking = re.compile(r"""engine\.kind\s*(==|!=|in)|settings\.kind\s*(==|!=|in)""")
    files = Path(agro.__file__).parent.rglob("*.py")
    assert [path.name for path in files if asking.search(path.read_text())] == ["rollout.py"]


@pytest.fixture(params=["of agro", "third"])
def other(request, monkeypatch) -> None:
    """What collectors can do, and a source that is added later."""
    if request.param == "third":
        monkeypatch.setitem(around.SOURCES, "elsewhere", frozenset())


def test_a_source_that_declares_nothing_is_refused_where_more_is_needed(tmp_path: Path, other: None) -> None:
    elsewhere = {"source__kind": "elsewhere"}
    stored = {"store": "s.db", "prompts": "p.jsonl", "replay": 1.0, "complete_groups": 2}
    with pytest.raises(
        Refused, match=r'data\.complete_groups = 2 needs a source .*source\.kind = "elsewhere"'
    ):
        check_config(tiny(tmp_path, data=stored, **elsewhere))
    check_config(tiny(tmp_path, data=stored))
    phases = [{"name": "one"}, {"name": "two", "sampler": {"top_k": 2}}]
    with pytest.raises(Refused, match=r'phase two: with source\.kind = "elsewhere" all phases share'):
        check_config(tiny(tmp_path, phases=phases, **elsewhere))
    check_config(tiny(tmp_path, phases=phases))
    on_policy = {"objective": {"name": "agro_onpolicy", "beta": 0.1}}
    with pytest.raises(Refused, match=r'with source\.kind = "elsewhere" samples may be stale'):
        check_config(tiny(tmp_path, data__max_age=1, **on_policy, **elsewhere))
    check_config(tiny(tmp_path, data__max_age=1, **on_policy))
    kl = {"data": {"store": "s.db", "replay": 1.0}}
    assert samples_kl(tiny(tmp_path, **kl))
    assert not samples_kl(tiny(tmp_path, **kl, **elsewhere))
