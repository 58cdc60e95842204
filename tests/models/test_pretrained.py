"""Models: new ones, from folders and from the hub, with other attention, and quantized."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors.torch
import torch
import transformers
from rounding import rounding
from transformers import AutoModelForCausalLM

from agro.config import EngineConfig, LoRA, NewModel, PolicyConfig
from agro.errors import Refused
from agro.models.footprint import NF4, shape_of
from agro.models.policy import Policy
from agro.models.pretrained import adamw_8bit, loading_options, new_model
from agro.rollout.engines.server import command_of

SPEC = NewModel(alphabet="ab", hidden=8, layers=1, heads=1, context=16)


@pytest.fixture
def folder(tmp_path):
    new_model(tmp_path / "model", SPEC, 0)
    return tmp_path / "model"


def refusal(model, **changes) -> str:
    with pytest.raises(Refused) as caught:
        Policy.load(PolicyConfig(model=str(model), **{"device": "cpu"} | changes))
    if not changes:
        assert str(model) in str(caught.value)
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


def test_weights_that_cannot_be_read(folder):
    """Of another architecture, cut off, of another shape, in part, and pickled."""
    config, file = folder / "config.json", folder / "model.safetensors"
    text, weights = config.read_text(), safetensors.torch.load(file.read_bytes())
    config.write_text(text.replace('"llama"', '"nosuchmodel"'))
    assert "nosuchmodel" in refusal(folder)
    config.write_text(text)
    file.write_bytes(file.read_bytes()[:-100])
    assert "can't be loaded" in refusal(folder)
    norm = weights.pop("model.norm.weight")
    for kind, changed in (
        ("mismatched", weights | {"model.norm.weight": norm.repeat(2)}),
        ("missing", weights),
    ):
        safetensors.torch.save_file(changed, file, metadata={"format": "pt"})
        assert f"1 {kind} keys in its weights (model.norm.weight" in refusal(folder)
    file.unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert "pickled weights are not read" in refusal(folder)


def test_that_the_hub_is_asked_is_said_at_once(monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    monkeypatch.setattr(
        "transformers.models.auto.tokenization_auto.get_tokenizer_config", lambda name: int("no network")
    )
    assert "can't be loaded" in refusal("nomodel")
    assert "nomodel: there is no such folder here; asking the Hugging Face hub" in capsys.readouterr().err


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
def test_options_that_need_others_are_refused(
    given: dict[str, Any], device: torch.device, message: str
) -> None:
    with pytest.raises(Refused, match=message):
        loading_options(PolicyConfig(**given), device)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("bitsandbytes", "flash_attn"):
        monkeypatch.setitem(sys.modules, package, None)
    weights = [{"params": [torch.zeros(1)]}]
    with pytest.raises(Refused, match=r"train\.optimizer = adamw_8bit: expected the package bitsandbytes"):
        adamw_8bit(weights, CUDA, lr=1.0)
    with pytest.raises(Refused, match=r"policy\.quantize = 4bit: expected the package bitsandbytes"):
        loading_options(PolicyConfig(**ADAPTER), CPU)
    flash = PolicyConfig(attention="flash_attention_2", dtype="bfloat16")
    with pytest.raises(Refused, match=r"expected the package flash_attn.*pip install flash_attn"):
        loading_options(flash, CUDA)


def test_another_attention_computes_the_same(tiny: Any, tmp_path: Path) -> None:
    tiny().save(tmp_path)
    tokens = torch.arange(6)[None] % 8
    found = []
    for name in ("auto", "eager"):
        policy = Policy.load(PolicyConfig(model=str(tmp_path), attention=name, device="cpu"))
        found.append(policy.streams(tokens, torch.tensor([6]), torch.arange(6)[None] > 0)["logp"][0, 1:])
    assert policy.model.config._attn_implementation == "eager"
    torch.testing.assert_close(found[0], found[1], **rounding(found[1]))


needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes isn't installed: pip install '.[quantized]'",
)
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


@needs_bitsandbytes
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


@needs_bitsandbytes
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


@needs_bitsandbytes
def test_a_quantized_model_takes_what_was_counted(tmp_path: Path) -> None:
    """Weights and scales; tables of 256 and 16 numbers beside each layer, which show in small ones, not."""
    new = NewModel(alphabet="0123456789", hidden=512, layers=2, heads=8, context=64)
    Policy.load(PolicyConfig(new=new), seed=0).save(tmp_path)
    values = {"model": str(tmp_path), "dtype": "bfloat16", "quantize": "4bit", "device": "cpu"}
    values["lora"] = {"rank": 4, "merge": False}
    policy_config = PolicyConfig(**values)
    policy = Policy.load(policy_config)
    state = policy.model.state_dict().items()
    tables = ("quant_map", "nested_quant_map", "bitsandbytes__nf4")
    real = sum(w.nbytes for name, w in state if ".lora_" not in name and not name.endswith(tables))
    real -= policy.model.lm_head.weight.nbytes  # the embedding's, listed again
    counted = shape_of(policy_config).stored(policy_config, NF4)
    assert counted == pytest.approx(real, rel=0.002)


EVERYTHING = "".join(map(chr, range(0x250))) + " é😀\u200d中文\n\t  end "
TEXTS = ["", " ", "  a  b ", "\n\n", "<eos>", "<bos> <pad><unk>", EVERYTHING, "ab" * 3000]


def like(**changes: Any) -> NewModel:
    return SPEC.model_copy(update=changes)


@pytest.mark.parametrize("std", [0.02, 0.1])
def test_weights_have_the_standard_deviation_that_is_asked_for(std):
    spec = like(hidden=64, layers=2, heads=2, initializer_range=std)
    model = Policy.load(PolicyConfig(new=spec, device="cpu")).model
    for weight in (model.model.layers[1].mlp.up_proj.weight, model.model.layers[0].self_attn.q_proj.weight):
        # 4096 or more normal numbers: their standard deviation is known to 1.1 %.
        assert float(weight.detach().std()) == pytest.approx(std, rel=0.05)


@pytest.mark.parametrize("alphabet", ["bytes", EVERYTHING])
@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_a_text_back(tmp_path, alphabet, text):
    alphabet = alphabet if alphabet == "bytes" else "".join(dict.fromkeys(alphabet))
    new_model(tmp_path, like(alphabet=alphabet), 0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == (len(text.encode()) if alphabet == "bytes" else len(text))
    assert not set(ids) & {0, 1, 2, 3}
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer(text)["input_ids"] == [1, *ids]


def test_a_character_outside_the_alphabet_is_unknown(tmp_path):
    new_model(tmp_path, SPEC, 0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("axxb")["input_ids"] == [1, 4, 3, 3, 5]
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<bos>", "<eos>", "<unk>"]) == [0, 1, 2, 3]


def test_the_same_seed_writes_the_same_bytes_and_leaves_the_generator_alone(tmp_path):
    spec = like(layers=2, heads=2)
    before = torch.random.get_rng_state()
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        new_model(tmp_path / name, spec, seed)
        torch.rand(5)
    files = {n: {f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in "abc"}
    assert files["a"] == files["b"]
    assert files["a"]["model.safetensors"] != files["c"]["model.safetensors"]
    torch.random.set_rng_state(before)
    new_model(tmp_path / "d", spec, 3)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_model_is_a_llama_with_tied_embeddings(tmp_path):
    new_model(tmp_path, like(hidden=48, layers=3, heads=4, context=20), 0)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert len(model.model.layers) == 3
    assert (model.config.max_position_embeddings, model.config.vocab_size) == (20, 6)
    assert model.generation_config.eos_token_id == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "hidden to be heads times an even number, got hidden = 8, heads = 3"),
        ({"heads": 8}, "heads times an even number"),
        ({"alphabet": "aba"}, "expected distinct characters, or 'bytes'; repeated: 'a'"),
        ({"alphabet": ""}, "expected distinct characters"),
    ],
)
def test_a_specification_that_makes_no_model_is_refused(tmp_path, changes, message):
    with pytest.raises(Refused, match=message):
        new_model(tmp_path, like(**changes), 0)
