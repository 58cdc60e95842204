"""A server that is started beside a run, and one that sleeps while the trainer has the GPU."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
from processes import is_running
from safetensors.torch import load_file
from stand_in import NEW, StandIn, decoded

from agro.config import EngineConfig, LoRA, PolicyConfig, RunConfig
from agro.errors import Refused
from agro.models.policy import Policy
from agro.rollout.engines import server as servers
from agro.rollout.engines.server import VLLM, Server, command_of, sleep_level
from agro.train.check import check_config

HERE = Path(__file__).parent
PROGRAM = f"""#!{sys.executable}
import argparse, sys, time
sys.path[:0] = [{str(HERE)!r}, {str(HERE.parents[1])!r}]
from stand_in import serving
from agro.config import PolicyConfig
from agro.models.policy import Policy

parser = argparse.ArgumentParser()
parser.add_argument("serve")
parser.add_argument("model")
for name in ("--served-model-name", "--logprobs-mode", "--max-model-len", "--host", "--dtype"):
    parser.add_argument(name, required=True)
parser.add_argument("--port", type=int, required=True)
asked = parser.parse_args()
policy = Policy.load(PolicyConfig(model=asked.model, dtype=asked.dtype, device="cpu"))
with serving(policy, asked.port):
    time.sleep(120)
"""


def program(folder: Path, text: str) -> str:
    """A command that does what `text` says."""
    file = folder / "vllm"
    file.write_text(text)
    file.chmod(0o700)
    return str(file)


def test_a_server_is_started_gets_weights_samples_and_ends_with_the_engine(bench, tmp_path: Path) -> None:
    """Of a new model, whose weights are nowhere else. It samples from what was pushed."""
    policy = Policy.load(PolicyConfig(new=NEW), seed=0)
    said: list[str] = []
    engine = VLLM(EngineConfig(kind="vllm", vllm=program(tmp_path, PROGRAM)), policy, said.append)
    try:
        assert "--logprobs-mode processed_logprobs" in said[0]
        engine.load(bench.moved(policy, 1, "reload", nats=1.0), 1)
        assert engine.measured["push_error"] < 1e-5
        [done] = decoded(engine)
        assert done.version == 1
        pid = engine._process.pid
        assert is_running(pid)
    finally:
        engine.close()
    assert not is_running(pid)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ()),
        ({"api": "generate"}, ("--enable-scale-out",)),
        ({"push": "transfer"}, ("--weight-transfer-config", '{"backend": "agro_files"}')),
        ({"vllm": "vllm --max-num-seqs 512"}, ("--max-num-seqs", "512")),
        ({"sleep": True}, ("--enable-sleep-mode",)),
    ],
)
def test_the_command_has_what_the_settings_need(start, bench, tmp_path: Path, settings, expected) -> None:
    command = command_of(EngineConfig(kind="vllm", **settings), bench.policy(), tmp_path / "unused")
    always = ("--served-model-name", "policy", "--dtype", "float32")
    always += ("--logprobs-mode", "processed_logprobs", "--max-model-len", "16")
    assert command == ["vllm", "serve", start, *always, *expected]


def test_a_server_of_adapters_has_the_base_and_room_for_them(start, tuned, tmp_path: Path) -> None:
    command = command_of(EngineConfig(kind="vllm"), tuned, tmp_path / "unused")
    assert command[2] == start
    assert command[-5:] == ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"]
    merged = command_of(EngineConfig(kind="vllm", push="reload"), tuned, tmp_path / "unused")
    assert "--enable-lora" not in merged


def test_a_quantized_model_is_saved_once_and_served_from_there(start, bench, tmp_path: Path) -> None:
    """Not the model of `policy.model`, whose numbers are others. tests/models has real ones."""
    policy = bench.policy(lora=LoRA(rank=2, merge=False))
    policy.model.is_quantized = True
    command = command_of(EngineConfig(kind="vllm"), policy, tmp_path / "engine")
    assert command[2] == str(tmp_path / "engine" / "model")
    assert command[command.index("--quantization") + 1] == "bitsandbytes"
    assert "--enable-lora" in command
    saved = load_file(tmp_path / "engine" / "model" / "model.safetensors")
    assert saved.keys() == load_file(Path(start) / "model.safetensors").keys()


def test_its_share_of_a_gpu_is_given(bench, tmp_path: Path, monkeypatch) -> None:
    policy = bench.policy()
    monkeypatch.setattr(Policy, "device", torch.device("cuda"))
    for memory, expected in ((None, "0.4"), (0.6125, "0.613")):
        command = command_of(EngineConfig(kind="vllm", memory=memory), policy, tmp_path)
        assert command[command.index("--gpu-memory-utilization") + 1] == expected


def test_a_server_that_does_not_start_is_named_with_what_it_said(tmp_path: Path) -> None:
    policy = Policy.load(PolicyConfig(new=NEW), seed=0)
    fails = program(tmp_path, "#!/bin/sh\necho no kernel image is available\nexit 3\n")
    began = time.monotonic()
    with pytest.raises(Refused, match=r"vLLM ended with exit status 3\. Its last output:\nno kernel image"):
        VLLM(EngineConfig(kind="vllm", vllm=fails), policy, print)
    with pytest.raises(Refused, match=r"engine\.vllm: /nowhere/vllm: no such command\. .*pip install vllm"):
        VLLM(EngineConfig(kind="vllm", vllm="/nowhere/vllm"), policy, print)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("engine", [{"urls": ["http://x"]}, {"dialect": "sglang"}])
def test_a_server_of_ones_own_has_no_other_address(engine) -> None:
    values = {
        "policy": {"model": "m"},
        "data": {"prompts": "p.jsonl"},
        "reward": {"name": "exact"},
        "objective": {"name": "agro", "beta": 0.1},
        "engine": {"kind": "vllm"},
    }
    check_config(RunConfig.of(values))
    with pytest.raises(Refused, match=r'engine\.memory needs engine\.kind = "vllm", got "hf"'):
        check_config(RunConfig.of({**values, "engine": {"memory": 0.5}}))
    with pytest.raises(Refused, match=r"starts a server of its own: expected no engine\.urls"):
        check_config(RunConfig.of({**values, "engine": {"kind": "vllm", **engine}}))


PROBE = ["/v1/completions"] * 4
SAMPLE, ADAPTER, RELOAD = ["/v1/completions"], "/v1/load_lora_adapter", "/collective_rpc"


def paths(state: StandIn) -> list[str]:
    """Those asked for since the last call."""
    found = [path for path, _ in state.asked]
    state.asked.clear()
    return found


def version_of(engine: Server) -> int:
    """Of a response that it samples."""
    [done] = decoded(engine)
    return done.version


def test_it_wakes_gets_the_adapter_is_probed_samples_and_sleeps(bench, tuned) -> None:
    """A push waits for the wake; a wake without one probes what is there. The engine finds out by itself that
    it pushes an adapter."""
    state = bench.server()
    engine = bench.engine(tuned, state, sleep=True, level=1)
    engine.sleep()
    assert paths(state) == ["/sleep?level=1"]
    engine.load(bench.moved(tuned, 1, "adapter"), 1)
    assert paths(state) == []
    assert version_of(engine) == 1
    assert paths(state) == ["/wake_up", ADAPTER, *PROBE, *SAMPLE, "/sleep?level=1"]
    assert state.asleep == 1
    assert version_of(engine) == 1
    assert paths(state) == ["/wake_up", *PROBE, *SAMPLE, "/sleep?level=1"]
    engine.load(bench.moved(tuned, 2, "adapter"), 2)
    assert version_of(engine) == 2
    assert paths(state) == ["/wake_up", ADAPTER, *PROBE, *SAMPLE, "/sleep?level=1"]
    assert engine.measured["push_error"] < 1e-6


@pytest.mark.parametrize("pushes", [False, True])
def test_a_wake_that_loses_the_adapter_is_refused(bench, pushes: bool) -> None:
    """vLLM's issue 53888: it answers under the adapter's name, with the model alone. Also after a push."""
    tuned, state, engine = bench.pushing("adapter", sleep=True, level=1)
    engine.load(bench.moved(tuned, 1, "adapter"), 1)
    version_of(engine)
    state.loses = True
    if pushes:
        engine.load(bench.moved(tuned, 2, "adapter"), 2)
    paths(state)
    with pytest.raises(Refused, match=r"after the push its log-probs of .* off those of the trainer"):
        version_of(engine)
    assert paths(state) == ["/wake_up", *([ADAPTER] if pushes else []), *PROBE]


def test_what_level_2_forgets_is_brought_again(bench) -> None:
    """All weights by each push; of an adapter's model by loading it again, before the cache is there."""
    policy, state, engine = bench.pushing("reload", sleep=True, level=2)
    engine.load(bench.moved(policy, 1, "reload"), 1)
    awake = ["/wake_up", RELOAD, "/reset_prefix_cache", *PROBE, *SAMPLE, "/sleep?level=2"]
    for _ in range(2):
        assert version_of(engine) == 1
        assert paths(state) == awake
    tuned, state, engine = bench.pushing("adapter", sleep=True, level=2)
    engine.load(bench.moved(tuned, 2, "adapter"), 2)
    wake = ["/wake_up?tags=weights", RELOAD, "/wake_up?tags=kv_cache"]
    for loaded in ([ADAPTER], []):
        assert version_of(engine) == 2
        assert paths(state) == [*wake, *loaded, *PROBE, *SAMPLE, "/sleep?level=2"]


def test_a_server_that_cannot_sleep_is_named(bench) -> None:
    _, state, engine = bench.pushing("adapter", sleep=True, level=1)
    state.without = ("/sleep?level=1",)
    words = r"engine\.sleep: .*isn't there.*VLLM_SERVER_DEV_MODE=1 and --enable-sleep"
    with pytest.raises(Refused, match=words):
        engine.sleep()


def test_the_level_goes_by_what_must_be_kept_and_by_the_hosts_memory(bench, tuned, monkeypatch) -> None:
    sleeps, size = EngineConfig(kind="vllm", sleep=True), sum(p.nbytes for p in tuned.model.parameters())
    assert sleep_level(EngineConfig(kind="vllm"), tuned) == 0
    assert sleep_level(sleeps, tuned) == 1
    assert sleep_level(sleeps.model_copy(update={"push": "reload"}), tuned) == 2
    assert sleep_level(sleeps, bench.policy()) == 2
    monkeypatch.setattr(servers, "host_memory", lambda: 2.0 * size - 1)
    assert sleep_level(sleeps, tuned) == 2
