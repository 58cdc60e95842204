"""What is refused when a model is loaded, and how the message helps."""

from __future__ import annotations

import json
import subprocess
import sys

import huggingface_hub
import pytest
import safetensors.torch
import torch

from agro.config import NewModel, PolicyConfig
from agro.errors import Refused
from agro.models.newmodel import new_model
from agro.models.policy import Policy

SPEC = NewModel(alphabet="ab", hidden=8, layers=1, heads=1, context=16)


@pytest.fixture
def folder(tmp_path):
    new_model(tmp_path / "model", SPEC, 0)
    return tmp_path / "model"


def refusal(model, **changes) -> str:
    with pytest.raises(Refused) as caught:
        Policy.load(PolicyConfig(model=str(model), **{"device": "cpu"} | changes))
    assert str(model) in str(caught.value) or changes
    return str(caught.value)


def test_a_folder_loads(folder):
    assert Policy.load(PolicyConfig(model=str(folder), device="cpu")).name == "LlamaForCausalLM"


@pytest.mark.parametrize("name", ["/no/such/folder", "./model", "runs/a/model", "~/no-such-folder"])
def test_a_missing_folder(name):
    assert "there is no such folder" in refusal(name)


def test_a_folder_without_a_model(tmp_path):
    assert "no config.json" in refusal(tmp_path)


def test_a_folder_without_a_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert "save the model's tokenizer there" in refusal(folder)


def test_pickled_weights_are_not_read(folder):
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert "pickled weights are not read" in refusal(folder)


def test_that_the_hub_is_asked_is_said_at_once(monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    monkeypatch.setattr(
        "transformers.models.auto.tokenization_auto.get_tokenizer_config", lambda name: int("no network")
    )
    assert "can't be loaded" in refusal("nomodel")
    assert "nomodel: there is no such folder here; asking the Hugging Face hub" in capsys.readouterr().err


def test_weights_that_were_cut_off(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "can't be loaded" in refusal(folder)


def test_a_part_of_a_model(folder):
    file = folder / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    del weights["model.norm.weight"]
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})
    assert "1 missing keys in its weights (model.norm.weight" in refusal(folder)


def test_weights_of_another_shape(folder):
    file = folder / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    weights["model.norm.weight"] = torch.ones(9)
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})
    assert "1 mismatched keys in its weights (model.norm.weight" in refusal(folder)


def test_an_unknown_architecture(folder):
    config = (folder / "config.json").read_text().replace('"llama"', '"nosuchmodel"')
    (folder / "config.json").write_text(config)
    assert "nosuchmodel" in refusal(folder)


def test_a_hub_name_without_a_network(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    said = refusal("nobody/nothing-of-this-name")
    assert "expected a causal language model" in said
    assert "HF_HUB_OFFLINE is set" in said
    assert "hf download nobody/nothing-of-this-name" in said


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu0", "expected auto, cpu, cuda or cuda:N"),
        ("mps", "mps: Apple's GPU has no float64"),
        ("meta", "expected auto, cpu, cuda or cuda:N"),
        ("cuda:99", "there is no such CUDA device here"),
    ],
)
def test_a_device_that_is_not_there(folder, device, message):
    assert message in refusal(folder, device=device)


@pytest.mark.parametrize(
    ("config", "got"), [(PolicyConfig(), "neither"), (PolicyConfig(model="a", new=SPEC), "both")]
)
def test_a_model_comes_from_one_place(config, got):
    with pytest.raises(Refused, match=f"got {got}"):
        Policy.load(config)


@pytest.mark.parametrize("bases", [("one",), ("one", "two")])
def test_adapters_that_lead_back_to_themselves(tmp_path, bases):
    for name, base in zip(bases, bases[1:] + bases[:1]):
        (tmp_path / name).mkdir()
        config = json.dumps({"base_model_name_or_path": str(tmp_path / base)})
        (tmp_path / name / "adapter_config.json").write_text(config)
    assert "base_model_name_or_path" in refusal(tmp_path / "one")


def test_a_trainer_is_imported_without_the_code_of_models() -> None:
    """Of 5 CPU seconds transformers' modeling, what it imports of torch, and matplotlib took half."""
    heavy = {"transformers.modeling_utils", "torch.distributed.tensor", "torch._dynamo", "matplotlib"}
    code = f"import sys, agro; agro.Trainer; found = {heavy} & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
