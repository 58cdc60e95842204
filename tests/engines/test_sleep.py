"""A server on the trainer's GPU sleeps while that trains: it wakes, gets weights, is probed, and samples.

With a stand-in that forgets as vLLM does; nothing of it was tried on a GPU, where alone vLLM can sleep.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from stand_in import StandIn, serving

from agro.config import EngineConfig, LoRA, NewModel, PolicyConfig, SamplerConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.models.published import Form, publish
from agro.rollout.engines import Request
from agro.rollout.engines import connection as module
from agro.rollout.engines import server as servers
from agro.rollout.engines.server import Server, sleep_level

NEW = NewModel(alphabet="0123456789>", hidden=16, layers=1, heads=2, context=16)
PROBE = ["/v1/completions"] * 4
SAMPLE, ADAPTER, RELOAD = ["/v1/completions"], "/v1/load_lora_adapter", "/collective_rpc"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.001)


@pytest.fixture
def start(tmp_path: Path) -> str:
    Policy.load(PolicyConfig(new=NEW), seed=0).save(tmp_path / "start")
    return str(tmp_path / "start")


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def sleeping(opened: ExitStack, policy: Policy, start: str, level: int) -> tuple[Server, StandIn]:
    url, state = opened.enter_context(serving(Policy.load(PolicyConfig(model=start))))
    settings = EngineConfig(kind="server", url=url, retries=1, sleep=True)
    engine = Server(settings, policy.encoder, level=level)
    opened.callback(engine.close)
    return engine, state


def moved(policy: Policy, folder: Path, form: Form) -> Path:
    with torch.no_grad():
        for weight in policy.weights().values():
            weight.add_(torch.randn_like(weight) * 0.1)
    folder.mkdir()
    publish(policy, folder, form)
    return folder


def paths(state: StandIn) -> list[str]:
    """Those asked for since the last call."""
    found = [path for path, _ in state.asked]
    state.asked.clear()
    return found


def sample(engine: Server) -> int:
    [done] = engine.decode(deque([Request(0, [3, 4], 3)]), SamplerConfig(max_new=3), seed=0)
    assert isinstance(done.version, int)
    return done.version


def test_it_wakes_gets_the_adapter_is_probed_samples_and_sleeps(opened, start: str, tmp_path: Path) -> None:
    """A push waits for the wake; a wake without one probes what is there."""
    policy = Policy.load(PolicyConfig(model=start, lora=LoRA(rank=2)))
    engine, state = sleeping(opened, policy, start, level=1)
    engine.sleep()
    assert paths(state) == ["/sleep?level=1"]
    engine.load(moved(policy, tmp_path / "v1", "adapter"), 1)
    assert paths(state) == []
    assert sample(engine) == 1
    assert paths(state) == ["/wake_up", ADAPTER, *PROBE, *SAMPLE, "/sleep?level=1"]
    assert state.asleep == 1
    assert sample(engine) == 1
    assert paths(state) == ["/wake_up", *PROBE, *SAMPLE, "/sleep?level=1"]
    engine.load(moved(policy, tmp_path / "v2", "adapter"), 2)
    assert sample(engine) == 2
    assert paths(state) == ["/wake_up", ADAPTER, *PROBE, *SAMPLE, "/sleep?level=1"]
    assert engine.measured["push_error"] < 1e-6


@pytest.mark.parametrize("pushes", [False, True])
def test_a_wake_that_loses_the_adapter_is_refused(opened, start: str, tmp_path: Path, pushes: bool) -> None:
    """vLLM's issue 53888: it answers under the adapter's name, with the model alone. Also after a push."""
    policy = Policy.load(PolicyConfig(model=start, lora=LoRA(rank=2)))
    engine, state = sleeping(opened, policy, start, level=1)
    engine.load(moved(policy, tmp_path / "v1", "adapter"), 1)
    sample(engine)
    state.loses = True
    if pushes:
        engine.load(moved(policy, tmp_path / "v2", "adapter"), 2)
    paths(state)
    with pytest.raises(Refused, match=r"after the push its log-probs of .* off those of the trainer"):
        sample(engine)
    assert paths(state) == ["/wake_up", *([ADAPTER] if pushes else []), *PROBE]


def test_what_level_2_forgets_is_brought_again(opened, start: str, tmp_path: Path) -> None:
    """All weights by each push; of an adapter's model by loading it again, before the cache is there."""
    policy = Policy.load(PolicyConfig(model=start))
    engine, state = sleeping(opened, policy, start, level=2)
    engine.load(moved(policy, tmp_path / "v1", "explicit_head"), 1)
    awake = ["/wake_up", RELOAD, "/reset_prefix_cache", *PROBE, *SAMPLE, "/sleep?level=2"]
    for _ in range(2):
        assert sample(engine) == 1
        assert paths(state) == awake
    tuned = Policy.load(PolicyConfig(model=start, lora=LoRA(rank=2)))
    engine, state = sleeping(opened, tuned, start, level=2)
    engine.load(moved(tuned, tmp_path / "a1", "adapter"), 1)
    wake = ["/wake_up?tags=weights", RELOAD, "/wake_up?tags=kv_cache"]
    assert sample(engine) == 1
    assert paths(state) == [*wake, ADAPTER, *PROBE, *SAMPLE, "/sleep?level=2"]
    assert sample(engine) == 1
    assert paths(state) == [*wake, *PROBE, *SAMPLE, "/sleep?level=2"]


def test_a_server_that_cannot_sleep_is_named(opened, start: str, tmp_path: Path) -> None:
    policy = Policy.load(PolicyConfig(model=start, lora=LoRA(rank=2)))
    engine, state = sleeping(opened, policy, start, level=1)
    state.without = ("/sleep?level=1",)
    with pytest.raises(
        Refused, match=r"engine\.sleep: .*isn't there.*VLLM_SERVER_DEV_MODE=1 and --enable-sleep"
    ):
        engine.sleep()


def test_the_level_goes_by_what_must_be_kept_and_by_the_hosts_memory(start: str, monkeypatch) -> None:
    tuned = Policy.load(PolicyConfig(model=start, lora=LoRA(rank=2)))
    sleeps, size = EngineConfig(kind="vllm", sleep=True), sum(p.nbytes for p in tuned.model.parameters())
    assert sleep_level(EngineConfig(kind="vllm"), tuned) == 0
    assert sleep_level(sleeps, tuned) == 1
    assert sleep_level(sleeps.model_copy(update={"push": "reload"}), tuned) == 2
    assert sleep_level(sleeps, Policy.load(PolicyConfig(model=start))) == 2
    monkeypatch.setattr(servers, "host_memory", lambda: 2.0 * size - 1)
    assert sleep_level(sleeps, tuned) == 2
