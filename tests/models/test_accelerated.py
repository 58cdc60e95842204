"""What needs a CUDA GPU is refused without one, with the setting, what is missing, and a way out."""

from __future__ import annotations

import sys
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
    with pytest.raises(Refused, match=r"policy\.quantize = 4bit: expected the package bitsandbytes"):
        loading_options(configuration.PolicyConfig(**ADAPTER), CPU)
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
