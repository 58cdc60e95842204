"""4-bit weights: a server loads what the trainer computes with. By bitsandbytes on a CPU; on no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agro.config import EngineConfig, LoRA, NewModel, PolicyConfig, RunConfig
from agro.models.footprint import NF4, Footprint
from agro.models.policy import Policy
from agro.rollout.engines.server import command_of

pytest.importorskip("bitsandbytes", reason="it isn't installed: pip install '.[quantized]'")

NEW = NewModel(alphabet="0123456789", hidden=64, layers=2, heads=2, context=64)


def quantized(folder: Path, *, tied: bool) -> Policy:
    """A small model in 4 bits, with an adapter that isn't empty."""
    source = Policy.load(PolicyConfig(new=NEW), seed=0)
    if not tied:
        source.model.config.tie_word_embeddings = False
        source.model.lm_head.weight = torch.nn.Parameter(source.model.lm_head.weight.detach() * 2)
    source.save(folder)
    values = {"dtype": "bfloat16", "quantize": "4bit", "device": "cpu"}
    policy = Policy.load(PolicyConfig(model=str(folder), lora=LoRA(rank=4, merge=False), **values))
    for weight in policy.weights().values():
        weight.data.normal_()
    return policy


@pytest.mark.parametrize("tied", [True, False])
def test_a_server_gets_the_quantized_weights_bit_for_bit(tmp_path: Path, tied: bool) -> None:
    policy = quantized(tmp_path / "model", tied=tied)
    tokens = torch.arange(12)[None] % 10
    with torch.no_grad(), policy.adapter.disable_adapter():
        before = policy.model(input_ids=tokens).logits
    command = command_of(EngineConfig(kind="vllm"), policy, tmp_path / "engine")
    assert command[command.index("--quantization") + 1] == "bitsandbytes"
    assert command[command.index("--dtype") + 1] == "bfloat16"
    served = AutoModelForCausalLM.from_pretrained(command[2], dtype=torch.bfloat16, device_map={"": "cpu"})
    for module in served.modules():  # bitsandbytes on a CPU rounds once more in the first pass otherwise
        module.support_avx512bf16_for_cpu = False
    ours = {
        name.replace(".base_layer.", "."): weight
        for name, weight in policy.model.state_dict().items()
        if ".lora_" not in name
    }
    theirs = served.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert sum(weight.dtype == torch.uint8 and weight.dim() == 2 for weight in ours.values()) == 2 * 7
    with torch.no_grad():
        assert torch.equal(served(input_ids=tokens).logits, before)


def test_a_pass_without_gradient_leaves_the_packed_weights_as_they_are(tmp_path: Path) -> None:
    """Log-probs of training and sampling are those of the same numbers."""
    policy = quantized(tmp_path, tied=True)
    layer = policy.model.model.layers[0].mlp.up_proj.base_layer
    before, scales = layer.weight.clone(), layer.weight.quant_state.absmax.clone()
    tokens = torch.arange(12)[None] % 10
    policy.model.eval()
    with torch.no_grad():
        policy.model(input_ids=tokens)
    assert torch.equal(layer.weight, before)
    assert torch.equal(layer.weight.quant_state.absmax, scales)


def test_a_quantized_model_takes_what_was_counted(tmp_path: Path) -> None:
    """Weights and scales; tables of 256 and 16 numbers beside each layer, which show in small ones, not."""
    new = NewModel(alphabet="0123456789", hidden=512, layers=2, heads=8, context=64)
    Policy.load(PolicyConfig(new=new), seed=0).save(tmp_path)
    values = {"model": str(tmp_path), "dtype": "bfloat16", "quantize": "4bit", "device": "cpu"}
    values["lora"] = {"rank": 4, "merge": False}
    policy = Policy.load(PolicyConfig(**values))
    state = policy.model.state_dict().items()
    tables = ("quant_map", "nested_quant_map", "bitsandbytes__nf4")
    real = sum(w.nbytes for name, w in state if ".lora_" not in name and not name.endswith(tables))
    real -= policy.model.lm_head.weight.nbytes  # the embedding's, listed again
    counted = Footprint.of(RunConfig.of({"policy": values})).weights(NF4)
    assert counted == pytest.approx(real, rel=0.002)
