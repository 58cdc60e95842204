"""What needs a CUDA GPU is refused without one, with the setting, what is missing, and a way out."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import rounding

from agro import config as configuration
from agro.errors import Refused
from agro.models.policy import Policy
from agro.models.pretrained import adamw_8bit, loading_options

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ADAPTER = {"lora": {"merge": False}, "dtype": "bfloat16", "quantize": "4bit"}


@pytest.mark.parametrize(
    ("given", "device", "message"),
    [
        (ADAPTER, CPU, r"policy\.quantize = 4bit: expected a CUDA GPU, got device cpu"),
        (
            {"quantize": "4bit"},
            CUDA,
            r"policy\.quantize = 4bit: expected \[policy\.lora\] with merge = false",
        ),
        ({"attention": "flash_attention_2"}, CPU, r"policy\.attention = .*: expected a CUDA GPU"),
    ],
)
def test_it_is_refused_by_name(given: dict[str, Any], device: torch.device, message: str) -> None:
    with pytest.raises(Refused, match=message):
        loading_options(configuration.PolicyConfig(**given), device)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("bitsandbytes", "flash_attn"):
        monkeypatch.setitem(sys.modules, package, None)
    weights = [{"params": [torch.zeros(1)]}]
    with pytest.raises(Refused, match=r"train\.optimizer = adamw_8bit: expected the package bitsandbytes"):
        adamw_8bit(weights, CUDA, lr=1.0)
    flash = configuration.PolicyConfig(attention="flash_attention_2", dtype="bfloat16")
    with pytest.raises(Refused, match=r"expected the package flash_attn.*pip install flash_attn"):
        loading_options(flash, CUDA)


def test_another_attention_computes_the_same(tiny: Any, tmp_path: Path) -> None:
    tiny().save(tmp_path)
    tokens = torch.arange(6)[None] % 8
    found = []
    for name in ("auto", "eager"):
        policy = Policy.load(configuration.PolicyConfig(model=str(tmp_path), attention=name, device="cpu"))
        found.append(policy.streams(tokens, torch.tensor([6]), torch.arange(6)[None] > 0)["logp"][0, 1:])
    assert policy.model.config._attn_implementation == "eager"
    torch.testing.assert_close(found[0], found[1], **rounding(found[1]))


def benchmark(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> str:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    assert import_module("gpu").main(arguments) == 0
    return capsys.readouterr().out


def test_the_benchmark_runs_its_code_on_a_cpu(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for part in ("agreement", "training", "logps", "sampling", "vllm"):
        given = ["--device", "cpu", "--small", "--repeats", "1", "--vllm", "no-such-vllm", "--one", part]
        out = benchmark(given, capsys, monkeypatch)
        rows += json.loads(out.splitlines()[-1])
    found = {row["name"].partition(",")[0]: row for row in rows}
    assert list(found) == ["agreement", "training", "log-probs", "sampling", "sampling by vLLM"]
    assert rows[0]["within"]  # of itself in float32: decoding against complete sequences
    assert found["training"]["mfu"] is None  # the CPU's rate isn't in the table
    assert found["log-probs"]["skipped"] == "Liger's kernels need CUDA"
    assert found["sampling by vLLM"]["skipped"].startswith("no command no-such-vllm: pip install vllm")


def test_a_part_that_runs_out_of_time_costs_no_other(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    gpu = import_module("gpu")
    monkeypatch.setitem(gpu.PARTS, "logps", (0.01, gpu.PARTS["logps"][1]))
    monkeypatch.setitem(gpu.PARTS, "learning", (0.01, gpu.PARTS["learning"][1]))
    assert gpu.main(["--device", "cpu", "--small", "--parts", "logps", "learning", "trl"]) == 1
    *rows, skipped = capsys.readouterr().out.splitlines()
    assert [json.loads(row)["name"] for row in rows] == ["logps", "learning"]
    assert all("TimeoutExpired" in json.loads(row)["failed"] for row in rows)
    assert skipped == "trl: skipped: --trl-python names no Python that has it"


def test_the_operations_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six for each of the weights and tokens, and 3 · 2 · layers · heads · width · tokens² of attention."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    gpu = import_module("gpu")
    policy = gpu.model_of("0.6B, all weights", CPU, small=True)
    count = sum(p.numel() for p in policy.model.parameters())
    assert gpu.operations(policy, 3, 10) == 3 * (10 * 6 * count + 3 * 2 * 2 * 4 * 8 * 10**2)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_benchmark_runs_on_a_gpu(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    out = benchmark(
        ["--device", "cuda", "--small", "--repeats", "1", "--one", "sampling"], capsys, monkeypatch
    )
    assert '"name": "sampling' in out
